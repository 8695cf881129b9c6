"""Play a game step by step with rendered images, for videos and interpretability tools.

    viewer = open_viewer(run, seed=0)
    for frames in Playback([viewer], length=300):  # one frame per viewer
        frames[0].screen, frames[0].record

A viewer is an agent together with its own environment. The same run, checkpoint, seed and options give the same game in
every tool. If there are several viewers, they all show the same game. The agent of the first viewer (or a recording)
selects the actions, and the environments of all viewers take these actions.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bestiary.agents.agent import Agent
from bestiary.agents.policy_runner import PolicyRunner, StepRecord
from bestiary.config.config import env_slug, make_vector_env
from bestiary.envs.multitask import describe_observations
from bestiary.envs.vector_env import VectorEnv, action_index
from bestiary.rollout import Step
from bestiary.runs import checkpoints
from bestiary.runs.recordings import INTERFACE_OPTIONS, RecordedGame, Recording
from bestiary.runs.run import Run
from bestiary.utils.console import note
from bestiary.utils.errors import UserError
from bestiary.utils.images import enlarge

MIN_VIDEO_STEPS = 50  # if a game ends before this many steps are drawn, another game follows


@dataclass
class Viewer:
    """An agent and the environment whose observations the agent processes. Only the first viewer selects actions."""

    run: Run
    agent: Agent
    pool: VectorEnv  # vector environment of size 1 that can render images
    task: int  # index of the task among the run's tasks
    checkpoint_steps: int
    action_seed: int  # seed with which actions are sampled
    game_info: dict[str, Any]  # options, seed or recording of the game, for the protocol
    first_step: Step | None = None  # first step of a recorded game; None: the game starts with pool.reset()

    @property
    def file_stem(self) -> str:
        """The stem of output file names: the checkpoint's step count, or TASK-STEPS if the run has several tasks."""
        several = len(self.run.config.envs) > 1
        return (
            f"{env_slug(self.pool.tasks[0])}-{self.checkpoint_steps:012d}"
            if several
            else f"{self.checkpoint_steps:012d}"
        )

    @property
    def screen_is_observation(self) -> bool:
        """Whether the rendered screen shows the same area as the agent's observation, possibly at another size.

        This is False for users' environments that do not set `observes_whole_screen`.
        """
        return self.pool.observes_whole_screen


@dataclass
class Frame:
    """One step of a game: the rendered image, and the inputs and outputs of the agent of one viewer."""

    record: StepRecord
    screen: np.ndarray  # rendered image, uint8 [H,W,3]
    action: str  # name of the action that is taken at this step
    screen_is_observation: bool = True

    @property
    def display_image(self) -> np.ndarray:
        """The screen, darkened if flicker hides it from the agent at this step."""
        blank = self.record.step.measures.get("blank")
        return self.screen // 4 if blank is not None and blank[0] else self.screen

    @property
    def canvas(self) -> np.ndarray:
        """The image on which saliency and attention are drawn.

        It is the screen if the screen shows the same area as the observation, or if the agent observes no image.
        Otherwise it is the newest observed frame.
        """
        image = self.record.step.observation.get("image")
        if self.screen_is_observation or image is None:
            return self.display_image
        return enlarge(newest_frame(image[0]))


def open_viewer(
    run: Run, *, checkpoint: int | None = None, env: str | None = None, seed: int = 0, like: Run | None = None
) -> Viewer:
    """Return a viewer that plays a new game of `env`, one of the run's tasks. The default is the first task.

    If the run `like` is given, the game starts exactly as a game of `like` with the same seed.
    """
    chosen = checkpoints.choose(run.path, checkpoint)
    run_seed = (like or run).config.training.seed
    return make_viewer(run, run.agent(chosen), chosen.steps, run.config.task_index(env), seed, run_seed)


def make_viewer(run: Run, agent: Agent, steps: int, task: int, seed: int, run_seed: int) -> Viewer:
    """Return a viewer that plays a new game of a task with an agent that has been trained for `steps` steps.

    The game depends on `seed` and `run_seed`, the seed of a run.
    """
    config = run.config
    streams = np.random.SeedSequence([run_seed, 2, seed]).spawn(2)
    game_info = {"environment_options": config.tables()["env"], "seed": seed}
    pool = make_vector_env([config.envs[task]], config.env_options, 1, streams[0], render=True, rewards=config.rewards)
    return Viewer(run, agent, pool, task, steps, int(streams[1].generate_state(1)[0]), game_info)


def open_replay(run: Run, recording: Recording, game: RecordedGame, checkpoint: int | None = None) -> Viewer:
    """Return a viewer whose environment has been advanced to the start of a recorded game.

    The environment has the options of the recording, with one exception: options for observations, rewards and actions
    are those of the run's training. Raise UserError if the agent cannot play in this environment.
    """
    config = run.config
    name = recording.env_name(game)
    own_options = config.tables()["env"]
    recorded_options = recording.metadata["environment_options"]
    options = {key: own_options[key] for key in INTERFACE_OPTIONS if key in own_options and key in recorded_options}
    pool = recording.make_env(game, render=True, interface_options=options, rewards=config.rewards)
    own = config.interface
    if (pool.observation_spec, pool.action_spec) != (own.observation_spec, own.action_spec):
        pool.close()
        raise UserError(
            f"{recording.path}: the recorded game of {name} has {describe_observations(pool.interface)} and "
            f"{pool.action_spec.n} actions, but the agent of {run.path} was trained with {describe_observations(own)} "
            f"and {own.action_spec.n} actions"
        )
    chosen = checkpoints.choose(run.path, checkpoint)
    task = config.envs.index(name) if name in config.envs else 0
    note(f"replaying {recording.path}: {game.first_step} steps before the game, then the game of {game.length} steps")
    try:
        first_step = recording.fast_forward(game, pool, run.path)
    except UserError:
        pool.close()
        raise
    game_info = {
        "environment_options": {**recorded_options, **options},
        "recording": str(recording.path),
        # These values identify the game's row in the CSV file of the recording.
        "recorded_game": {"env": game.env, "first_step": game.first_step, "length": game.length},
    }
    return Viewer(run, run.agent(chosen), pool, task, chosen.steps, 0, game_info, first_step)


@dataclass(frozen=True)
class PlaybackOptions:
    """Options of a playback: the game to play, the steps of the game to draw, and the frame rate of a video."""

    length: int = 300  # maximum number of steps that are drawn
    start: int = 0  # first step that is drawn
    checkpoint: int | None = None  # step count of the checkpoint; None: the newest checkpoint
    env: str | None = None  # name of one of the run's tasks; None: the first task
    greedy: bool = False  # take the most probable action instead of sampling an action
    seed: int = 0  # seed of the environment and of action sampling
    replay: tuple[Recording, RecordedGame] | None = None  # a recorded game to play again; None: a new game
    fps: float = 0  # frames per second of the video; 0: about the speed of the game


def open_game(run: Run, options: PlaybackOptions, like: Run | None = None) -> tuple[Viewer, list[str] | None]:
    """Return a viewer of the game described by `options`, and the names of the actions of a recorded game.

    If the game is new, the second value is None. If the run `like` is given, a new game has the same start as the game
    that this run plays with the same seed.
    """
    if options.replay is not None:
        recording, game = options.replay
        return open_replay(run, recording, game, options.checkpoint), recording.game_actions(game)
    viewer = open_viewer(run, checkpoint=options.checkpoint, env=options.env, seed=options.seed, like=like)
    return viewer, None


def open_playback(run: Run, options: PlaybackOptions) -> "Playback":
    """Return a Playback of the game described by `options`. It has one viewer, which uses the agent of the run."""
    viewer, actions = open_game(run, options)
    return Playback([viewer], start=options.start, length=options.length, greedy=options.greedy, actions=actions)


class Playback:
    """Iterator over the steps of a game. Each item is a list with one Frame per viewer.

    The iterator yields at most `length` steps, from step `start` on. If `single_game` is True, it stops when the game
    ends. `actions` are the names of the actions of a recorded game. If `actions` is None, a new game is played: the
    agent of the first viewer selects the actions. If a new game ends before MIN_VIDEO_STEPS steps are yielded, another
    game follows. The environments of all viewers take the same actions. When the iterator ends, it closes the
    environments.
    """

    def __init__(
        self,
        viewers: Sequence[Viewer],
        *,
        start: int = 0,
        length: int,
        greedy: bool = False,
        actions: Iterable[str] | None = None,
        single_game: bool = True,
    ):
        self.viewers = viewers
        self.start = start
        self.length = length
        self.greedy = greedy
        self.single_game = single_game
        self.actions = None if actions is None else iter(actions)
        self.returns = [0.0]  # return of each game so far, in the first viewer's environment
        self.frames_per_step = viewers[0].pool.frames_per_step

    @property
    def fps(self) -> float:
        """Frame rate at which a video has about the speed of the game.

        If a step has several emulator frames, 60 emulator frames are one second. Otherwise 10 steps are one second.
        """
        return 60 / self.frames_per_step if self.frames_per_step > 1 else 10

    def protocol(self) -> dict[str, Any]:
        """Return the settings of the first viewer's game as JSON-compatible values."""
        viewer = self.viewers[0]
        policy = "greedy" if self.greedy else "sampled"
        return {
            "run": viewer.run.name,
            "checkpoint_steps": viewer.checkpoint_steps,
            "environment": viewer.pool.tasks[0],
            "policy": policy if self.actions is None else "recorded",
            **viewer.game_info,
        }

    def __iter__(self) -> Iterator[list[Frame]]:
        try:
            yield from self._play()
        finally:
            for viewer in self.viewers:
                viewer.pool.close()

    def _play(self) -> Iterator[list[Frame]]:
        runners = [
            PolicyRunner(viewer.agent, 1, greedy=self.greedy, seed=viewer.action_seed, task=viewer.task)
            for viewer in self.viewers
        ]
        steps = [viewer.first_step or viewer.pool.reset() for viewer in self.viewers]
        for t in itertools.count():
            if t:  # step 0 is the start of the game, and its reward belongs to no step of this game
                self.returns[-1] += float(steps[0].reward[0])
            if t >= self.start + self.length:
                return
            if t and steps[0].game_over[0]:
                if t <= self.start:
                    raise UserError(f"--start {self.start}: the game ended after {t} steps; choose an earlier start")
                if self.single_game and (t - self.start >= MIN_VIDEO_STEPS or self.actions is not None):
                    return  # the current observation already belongs to the next game
                self.returns.append(0.0)
            records = [runner.observe(step) for runner, step in zip(runners, steps, strict=True)]
            action = self._next_action(records[0], runners[0])
            if action is None:
                if t <= self.start:
                    raise UserError(f"--start {self.start}: the recorded game has {t} steps; choose an earlier start")
                return
            if t >= self.start:
                yield self._make_frames(records, action)
            steps = [
                runner.act(viewer.pool, np.array([action_index(action, viewer.pool, viewer.run.path)]))
                for runner, viewer in zip(runners, self.viewers, strict=True)
            ]

    def _next_action(self, record: StepRecord, runner: PolicyRunner) -> str | None:
        """Return the name of the next action, or None after the last recorded action.

        Names are used because the viewers' environments may number the actions differently.
        """
        if self.actions is None:
            return self.viewers[0].pool.action_spec.names[int(runner.select_actions(record.output)[0])]
        return next(self.actions, None)

    def _make_frames(self, records: list[StepRecord], action: str) -> list[Frame]:
        """Render the environment of each viewer and return one frame per viewer.

        `action` is the name of the action taken. Raise UserError if the images of the viewers differ.
        """
        screens = [viewer.pool.render()[0] for viewer in self.viewers]
        first = self.viewers[0]
        for viewer, screen in zip(self.viewers[1:], screens[1:], strict=True):
            if np.array_equal(screen, screens[0]):
                continue
            paths = f"{viewer.run.path} and {first.run.path}"
            if viewer.pool.tasks != first.pool.tasks:
                raise UserError(
                    f"{paths}: {viewer.pool.tasks[0]} and {first.pool.tasks[0]} are different games; "
                    "choose a task that both runs have with --env"
                )
            raise UserError(
                f"{paths}: their screens differ after the same actions; choose runs with the same "
                "environment options (--noop-max, --frame-skip, --sticky ...)"
            )
        return [
            Frame(record, screen, action, viewer.screen_is_observation)
            for record, screen, viewer in zip(records, screens, self.viewers, strict=True)
        ]


def newest_frame(image: np.ndarray) -> np.ndarray:
    """Return an observed image [C,H,W] as RGB [H,W,3].

    An image with three channels is regarded as one RGB frame. Otherwise the last channel is the newest grey frame.
    """
    return np.moveaxis(image if len(image) == 3 else np.repeat(image[-1:], 3, axis=0), 0, -1)


def note_screen_differs(viewers: Sequence[Viewer]) -> None:
    """Print a note for each task whose saliency or attention maps are drawn on the observation, not on the screen."""
    for task in dict.fromkeys(viewer.pool.tasks[0] for viewer in viewers if not viewer.screen_is_observation):
        note(f"note: the screen of {task} may differ from the observation, so maps are drawn on the observation")
