"""A game on a stage: one environment with its picture, and an agent that plays it; or several agents that watch one game.

    stage = open_stage(run, seed=0)
    for scenes in Show([stage], length=300):        # a scene for each stage
        scenes[0].picture, scenes[0].moment

The same run, checkpoint, seed and options are the same game, whichever lens it is looked at through.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bestiary.agents.agent import Agent
from bestiary.analysis.paint import enlarge
from bestiary.analysis.play import Moment, Player
from bestiary.config import make_pool, plain_name
from bestiary.console import note
from bestiary.envs import canonical
from bestiary.envs.mixture import shapes
from bestiary.envs.pool import Pool, place_of
from bestiary.envs.rewards import bare
from bestiary.errors import UserError
from bestiary.options import suggest
from bestiary.rollout import Step
from bestiary.runs import checkpoints
from bestiary.runs.folder import Run
from bestiary.runs.recordings import SEEN, Game, Recording

ENOUGH = 50  # steps that make a movie worth watching; shorter games are followed by another


@dataclass
class Stage:
    run: Run
    agent: Agent
    pool: Pool  # of one environment, with pictures
    task: int  # which of the run's
    steps: int  # of the checkpoint
    draws: int  # seed of the decisions
    about: dict[str, Any]  # which game it is, for protocols
    opening: Step | None = None  # what the game begins with, where that is not a reset

    @property
    def stem(self) -> str:
        """How a file about this game is called: after the checkpoint and, where the run has several tasks, this one."""
        several = len(self.run.config.envs) > 1
        return f"{plain_name(self.pool.tasks[0])}-{self.steps:012d}" if several else f"{self.steps:012d}"

    @property
    def shows_all(self) -> bool:
        """Whether the screen is what the agent sees, if perhaps at another size; of other people's worlds nobody knows."""
        return getattr(bare(self.pool), "whole_screen", False)


@dataclass
class Scene:
    moment: Moment
    picture: np.ndarray  # uint8 [H,W,3]
    action: str  # what is done next
    shows_all: bool = True  # that the agent sees

    @property
    def shown(self) -> np.ndarray:
        """The picture; dark where a flickering game shows nothing of it to the agent."""
        blank = self.moment.step.measures.get("blank")
        return self.picture // 4 if blank is not None and blank[0] else self.picture

    @property
    def canvas(self) -> np.ndarray:
        """What to paint on what the agent thinks of what it sees: the picture, or, where that may show something else, the
        newest frame of its own."""
        image = self.moment.step.observation.get("image")
        return self.shown if self.shows_all or image is None else enlarge(newest_frame(image[0]))


def open_stage(
    run: Run, *, checkpoint: int | None = None, env: str | None = None, seed: int = 0, like: Run | None = None
) -> Stage:
    """The run's agent before one of its tasks, the first unless `env` names another. With `like`, the game is the one that
    another run would have played there with the same seed."""
    config, task = run.config, which_task(run, env)
    chosen = checkpoints.choose(run.path, checkpoint)
    agent = run.agent(chosen)
    streams = np.random.SeedSequence([(like or run).config.training.seed, 2, seed]).spawn(2)
    about = {"environment_options": config.tables()["env"], "seed": seed}
    pool = make_pool([config.envs[task]], config.env_options, 1, streams[0], render=True, rewards=config.rewards)
    return Stage(run, agent, pool, task, chosen.steps, int(streams[1].generate_state(1)[0]), about)


def which_task(run: Run, env: str | None) -> int:
    """The how-manyeth of a run's tasks an environment is; the first, where none is named."""
    names, name = run.config.envs, canonical(env) if env is not None else run.config.envs[0]
    if name not in names:
        raise UserError(f"--env {name}: the run's tasks are {', '.join(names)}{suggest(name, names)}")
    return names.index(name)


def open_replay(run: Run, recording: Recording, game: Game, checkpoint: int | None = None) -> Stage:
    """The run's agent before a recorded game, of which it sees what it was trained to see, rewards among it, and in which it
    has the actions that it was trained with."""
    config, name = run.config, recording.environment(game)
    own = config.tables()["env"]
    options = {key: own[key] for key in SEEN if key in own and key in recording.about["options"]}
    pool = recording.pool(game, render=True, seen=options, rewards=config.rewards, trusted=config.envs)
    trained = make_pool(config.envs, config.env_options, 1, 0)
    trained.close()
    if (pool.observation_spec, pool.action_spec) != (trained.observation_spec, trained.action_spec):
        pool.close()
        raise UserError(
            f"{recording.path}: a game of {name} with {shapes(pool)} and {pool.action_spec.n} actions; the agent of {run.path} "
            f"has {shapes(trained)} and {trained.action_spec.n} actions"
        )
    chosen = checkpoints.choose(run.path, checkpoint)
    task = config.envs.index(name) if name in config.envs else 0
    note(f"replaying {recording.path}: {game.first} decisions to the game, {game.length} in it")
    try:
        opening = recording.rewind(game, pool, run.path)
    except UserError:
        pool.close()
        raise
    about = {
        "environment_options": {**recording.about["options"], **options},
        "recording": str(recording.path),
        "recorded_game": {"env": game.env, "first": game.first, "length": game.length},  # its row in the CSV
    }
    return Stage(run, run.agent(chosen), pool, task, chosen.steps, 0, about, opening)


def open_scripted(
    run: Run, replay: tuple[Recording, Game] | None, checkpoint: int | None = None, **options: Any
) -> tuple[Stage, list[str] | None]:
    """A recorded game and its actions, or a new one and none."""
    if replay is None:
        return open_stage(run, checkpoint=checkpoint, **options), None
    return open_replay(run, *replay, checkpoint), replay[0].script(replay[1])


class Show:
    """The scenes of a game, or of several where they are very short (or it is not to be `one_game`): from step `start` on, at
    most `length`.

    The first stage's agent decides, or the `script`, actions by name; all others watch the same game, each through its own
    environment, and remember what was really done. Closes the pools."""

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        start: int = 0,
        length: int,
        greedy: bool = False,
        script: Iterable[str] | None = None,
        one_game: bool = True,
    ):
        self.stages, self.start, self.length, self.greedy = stages, start, length, greedy
        self.one_game = one_game
        self.script = None if script is None else iter(script)
        self.earned = [0.0]  # by game, in the first stage's environment
        self.rate = stages[0].pool.frames_per_step

    @property
    def fps(self) -> float:
        """About the game's own speed."""
        return 60 / self.rate if self.rate > 1 else 10

    def protocol(self) -> dict[str, Any]:
        """What is shown, in words, as the first stage has it."""
        stage, chosen = self.stages[0], "greedy" if self.greedy else "sampled"
        return {
            "run": stage.run.name,
            "checkpoint_steps": stage.steps,
            "environment": stage.pool.tasks[0],
            "policy": chosen if self.script is None else "recorded",
            **stage.about,
        }

    def __iter__(self) -> Iterator[list[Scene]]:
        try:
            yield from self._play()
        finally:
            for stage in self.stages:
                stage.pool.close()

    def _play(self) -> Iterator[list[Scene]]:
        players = [Player(s.agent, 1, greedy=self.greedy, seed=s.draws, task=s.task) for s in self.stages]
        steps = [stage.opening or stage.pool.reset() for stage in self.stages]
        for t in itertools.count():
            self.earned[-1] += float(steps[0].reward[0]) if t else 0.0  # what led to the first is not this game's
            if t >= self.start + self.length:
                return
            if t and steps[0].game_over[0]:
                if t <= self.start:
                    raise UserError(f"--start {self.start}: the game was over after {t} steps; choose an earlier one")
                if self.one_game and (t - self.start >= ENOUGH or self.script is not None):
                    return  # this picture already belongs to the next game
                self.earned.append(0.0)
            moments = [player.see(step) for player, step in zip(players, steps, strict=True)]
            action = self._next(moments[0], players[0])
            if action is None:
                if t <= self.start:
                    raise UserError(f"--start {self.start}: the recorded game has {t} steps")
                return
            if t >= self.start:
                yield self._scenes(moments, action)
            steps = [
                player.act(stage.pool, np.array([place_of(action, stage.pool, stage.run.path)]))
                for player, stage in zip(players, self.stages, strict=True)
            ]

    def _next(self, moment: Moment, player: Player) -> str | None:
        """The action, by name: stages may count theirs differently."""
        if self.script is None:
            return self.stages[0].pool.action_spec.names[int(player.decide(moment.output)[0])]
        return next(self.script, None)

    def _scenes(self, moments: list[Moment], action: str) -> list[Scene]:
        pictures = [stage.pool.render()[0] for stage in self.stages]
        first = self.stages[0]
        for stage, picture in zip(self.stages[1:], pictures[1:], strict=True):
            if np.array_equal(picture, pictures[0]):
                continue
            both = f"{stage.run.path} and {first.run.path}"
            if stage.pool.tasks != first.pool.tasks:
                games = f"{stage.pool.tasks[0]} and {first.pool.tasks[0]}"
                raise UserError(f"{both}: {games} are not one game; --env names a task of those that have several")
            raise UserError(
                f"{both}: the same actions lead to different games there; their environments must start and step alike "
                "(--noops, --frame-skip, --sticky ...)"
            )
        views = zip(moments, pictures, self.stages, strict=True)
        return [Scene(moment, picture, action, stage.shows_all) for moment, picture, stage in views]


def newest_frame(image: np.ndarray) -> np.ndarray:
    """Of an agent's picture [C,H,W], colours or the last of several frames, as [H,W,3]."""
    return np.moveaxis(image if len(image) == 3 else np.repeat(image[-1:], 3, axis=0), 0, -1)


def note_of_the_screen(stages: Sequence[Stage]) -> None:
    """Say where it is not the screen that is painted on."""
    for task in dict.fromkeys(stage.pool.tasks[0] for stage in stages if not stage.shows_all):
        note(f"note: the screen of {task} may show something else than the agent sees; painted is what it sees")
