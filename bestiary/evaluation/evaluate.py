"""Evaluation of agents: playing whole games in newly created environments.

The result is stored together with its protocol, which describes exactly how the games were played.
"""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bestiary import __version__
from bestiary.agents.agent import Agent, count_fc_parameters, count_parameters
from bestiary.config.config import Config, env_slug, make_vector_env, task_interfaces
from bestiary.envs import canonical_name, lookup_env, with_mode
from bestiary.envs.levels import levels_of, levels_overlap, parse_levels, with_levels
from bestiary.envs.multitask import check_compatible, task_name
from bestiary.evaluation.curve_plots import plot_checkpoint_curves
from bestiary.evaluation.game_runner import collect_games, play_games
from bestiary.evaluation.results import Evaluation, TaskResult
from bestiary.evaluation.statistics import describe_interval
from bestiary.rollout import Episode
from bestiary.runs import checkpoints
from bestiary.runs.checkpoints import Checkpoint
from bestiary.runs.recordings import make_recording_wrapper
from bestiary.runs.run import Run, evaluation_seeds
from bestiary.utils import trust
from bestiary.utils.console import format_count, note, warn
from bestiary.utils.errors import RunError, UserError
from bestiary.utils.options import same_options

DEFAULT_GAMES = 100
MAX_DEFAULT_LEVELS = 1_000  # default number of games: one per level if the range has at most this many levels


def evaluate(
    run: Run,
    *,
    episodes: int | None = None,
    checkpoint: int | None = None,
    every_checkpoint: bool = False,
    env: Sequence[str] = (),
    levels: Sequence[str] = (),
    greedy: bool = False,
    seed: int = 0,
    num_envs: int = 32,
    max_steps: int = 27_000,
    reset_state_every: int | None = None,
    record: bool = False,
) -> Evaluation:
    """Play whole games of each task with a run's agent, write the results into the run folder, and return them.

    Args:
        episodes: number of games for each task and range of levels. The default is 100. If `levels` gives a range of
            at most 1,000 levels, the default for this range is one game per level.
        checkpoint: step count; the checkpoint with the nearest step count is used. The default is the newest
            checkpoint.
        every_checkpoint: evaluate all undamaged checkpoints instead of one.
        env: environments to play. The default is all environments of the training.
        levels: ranges of levels to play, for example "0:500". The default is the range of the training.
        greedy: take the most probable action in each step instead of sampling an action.
        seed: seed of the environments and of action sampling.
        num_envs: number of environments that are played at the same time.
        max_steps: maximum number of steps of a game. Longer games are not included in the results, but their number is
            reported.
        reset_state_every: number of steps after which the recurrent state is reset, even in the middle of a game. 0:
            use the length of the training sequences. None: reset the state only at the start of each episode.
        record: also write all actions to the folder recordings/, so that each game can be replayed.
    """
    config = run.config
    names = tuple(canonical_name(trust.named_by_user(name)) for name in env) or config.envs
    _check_unique("--env", names)
    _check_unique("--levels", levels)
    split_options = [config.env_options]
    if levels:
        split_options = [with_levels(config.envs[0], config.env_options, range_) for range_ in levels]
    splits = [
        (options, episodes or (default_games(options.levels) if levels else DEFAULT_GAMES)) for options in split_options
    ]
    if record:
        _check_recordable(names, splits)
    roles = {
        (name, range_): level_role(config, name, range_)
        for name in names
        for range_ in map(levels_of, split_options)
        if range_
    }
    for one, other in itertools.combinations(levels, 2):
        if levels_overlap(one, other):
            warn(f"--levels {one} and {other} overlap, so the results on these ranges are not independent")
    check_playable(config, names)
    _note_untrained_critic(config, names)
    chosen = _undamaged_checkpoints(run) if every_checkpoint else [checkpoints.choose(run.path, checkpoint)]
    if reset_state_every == 0:
        reset_state_every = config.make_algorithm().sequence_length
    settings = _GameSettings(greedy, seed, num_envs, max_steps, reset_state_every, record)
    max_games = max(games for _, games in splits)
    stem = f"{'all' if every_checkpoint else f'{chosen[0].steps:012d}'}-{settings.policy}-{max_games}"
    writable = True
    try:
        run.new_output_path("evaluations", stem, ".json")
    except OSError as error:
        writable = False
        warn(f"{run.path} cannot be written ({error.strerror or error}); the results are shown, but not saved")

    is_single = len(chosen) * len(names) * len(splits) == 1
    evaluation = Evaluation({}, [])
    path = None
    skipped: list[str] = []
    for k, point in enumerate(chosen, start=1):
        try:
            agent = run.agent(point)
        except UserError:
            if point.path.is_dir() or not every_checkpoint:
                raise
            warn(_removed_message(point))
            skipped.append(f"step {point.steps}")
            continue
        for name, (options, games) in itertools.product(names, splits):
            range_ = levels_of(options)
            description = ["evaluating"]
            if not is_single:
                description += [task_name(name)]
                description += [f"levels {range_}"] if levels else []
                description += [f"at {format_count(point.steps)}"] if every_checkpoint else []
            try:
                played, missing = settings.play(run, point, agent, name, options, games, " ".join(description))
            except RunError as error:
                if not every_checkpoint:
                    raise
                warn(f"{name} at step {point.steps} is skipped: {error}")
                skipped.append(f"{name} at step {point.steps}")
                continue
            steps = point.steps if every_checkpoint else None
            role = roles.get((name, range_ or ""), "")
            evaluation.results.append(TaskResult(task_name(name), played, steps, range_, role, missing))
        if evaluation.results:
            not_played = [*skipped, *(f"step {other.steps}" for other in chosen[k:])]
            evaluation.protocol = {
                **_describe_run(run, agent, names, levels),
                **({"checkpoints": evaluation.checkpoints} if every_checkpoint else {"checkpoint_steps": point.steps}),
                **({"not_played": not_played} if not_played else {}),
                "policy": settings.policy,
                **({"reset_state_every": reset_state_every} if reset_state_every is not None else {}),
                **_describe_games(min(num_envs, max_games), max_games, evaluation.unfinished, max_steps, seed),
                "training_seed": config.training.seed,
            }
            if not writable:
                continue
            try:
                if path is None:
                    path = run.new_output_path("evaluations", stem, ".json")
                    if k < len(chosen):
                        note(f"results are saved to {path} after each of the {len(chosen)} checkpoints")
                # Save after each checkpoint, so that an interruption loses the games of only one checkpoint.
                evaluation.save(path)
            except OSError as error:
                writable, path, evaluation.path = False, None, None
                warn(f"{run.path} cannot be written ({error.strerror or error}); the results are shown, but not saved")
    if not evaluation.results:
        raise RunError(f"{run.path}: no checkpoint could be evaluated; if no game ended, choose a larger --max-steps")
    if len(evaluation.checkpoints) > 1 and path is not None:
        evaluation.figure = plot_checkpoint_curves(evaluation.results, path.with_suffix(".png"))
    return evaluation


@dataclass(frozen=True)
class _GameSettings:
    """The settings that are the same for all checkpoints, tasks and ranges of levels of an evaluation."""

    greedy: bool
    seed: int
    num_envs: int
    max_steps: int
    reset_state_every: int | None
    record: bool

    @property
    def policy(self) -> str:
        return "greedy" if self.greedy else "sampled"

    def play(
        self, run: Run, checkpoint: Checkpoint, agent: Agent, name: str, options: Any, games: int, description: str
    ) -> tuple[list[Episode], int]:
        """Play games of the task `name` in environments with the given options. See `play_games` for the result."""
        config = run.config
        env_seed, action_seed = evaluation_seeds(config, self.seed)
        pool = make_vector_env([name], options, min(self.num_envs, games), env_seed, rewards=config.rewards)
        if self.record:
            path = run.new_output_path("recordings", f"eval-{checkpoint.steps:012d}-{env_slug(name)}", ".json")
            metadata: dict[str, Any] = {
                "run": run.name,
                "checkpoint_steps": checkpoint.steps,
                "policy": self.policy,
            }
            pool = make_recording_wrapper(pool, path, [name], options, env_seed, config.rewards, **metadata)
        return play_games(
            agent,
            pool,
            games,
            self.max_steps,
            greedy=self.greedy,
            seed=action_seed,
            task=config.envs.index(name) if name in config.envs else 0,
            reset_state_every=self.reset_state_every,
            description=description,
            balance_levels=not self.record,
        )


def _check_unique(flag: str, values: Sequence[str]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise UserError(f"{flag} {value} is given {values.count(value)} times; remove the duplicates")


def _describe_run(run: Run, agent: Agent, names: Sequence[str], levels: Sequence[str]) -> dict[str, Any]:
    """Return the entries of `Evaluation.protocol` that describe the agent and its environments."""
    config = run.config
    sizes = {"parameters": count_parameters(agent), "fc_parameters": count_fc_parameters(agent)}
    return {
        "run": run.name,
        "environments": list(names),
        "training_environments": list(config.envs),
        "environment_options": config.tables()["env"],
        **({} if config.rewards.is_default else {"rewards": asdict(config.rewards), **sizes}),
        **({"levels": list(levels)} if levels else {}),
    }


def _describe_games(num_envs: int, games: int, unfinished: int, max_steps: int, seed: int) -> dict[str, Any]:
    """Return the entries of `Evaluation.protocol` that describe how the games were played."""
    return {
        "games": games,
        "unfinished_games": unfinished,
        "max_steps": max_steps,
        "num_envs": num_envs,
        "games_per_env": "equal: the first games of each environment; with levels, each level equally often",
        "seed": seed,
        "interval": describe_interval("games"),
        "bestiary": __version__,
    }


def _undamaged_checkpoints(run: Run) -> list[Checkpoint]:
    """Return all undamaged checkpoints, and warn about each damaged checkpoint.

    Raise UserError if none is undamaged.
    """
    undamaged = []
    for checkpoint in run.checkpoints:
        damage = checkpoint.find_damage()
        if damage is None:
            undamaged.append(checkpoint)
        elif checkpoint.path.is_dir():
            warn(f"{checkpoint.path} is skipped because it is damaged: {damage}")
        else:
            warn(_removed_message(checkpoint))
    if not undamaged:
        raise UserError(f"{run.path} has no {'undamaged checkpoint' if run.checkpoints else 'checkpoint yet'}")
    return undamaged


def _removed_message(checkpoint: Checkpoint) -> str:
    """Return the warning about a checkpoint that was removed after it was listed, usually by a running training."""
    return f"{checkpoint.path} is skipped because it has been removed since the evaluation started"


def _check_recordable(names: Sequence[str], splits: Sequence[tuple[Any, int]]) -> None:
    """Raise UserError if there are at least as many games as levels: recordings of these games cannot be replayed.

    With at least as many games as levels, each level is played equally often. The next level of an environment then
    depends on the games in the other environments, so a single game cannot be replayed. With fewer games than levels, a
    recorded evaluation chooses levels at random, so its games can be replayed.
    """
    for options, games in splits:
        levels = levels_of(options)
        if levels is not None:
            first, last = parse_levels(levels)
            if last - first <= games:
                raise UserError(
                    f"--record: {games} games on {last - first} levels would play each level equally often, which "
                    f"cannot be recorded; choose --episodes smaller than {last - first}"
                )


def default_games(levels: str) -> int:
    """Return the default number of games: one per level. For more than MAX_DEFAULT_LEVELS levels: DEFAULT_GAMES."""
    first, last = parse_levels(levels)
    return last - first if last - first <= MAX_DEFAULT_LEVELS else DEFAULT_GAMES


def level_role(config: Config, task: str, levels: str) -> str:
    """Return how the training of a run used the range `levels` of a task:

    "train"   the range is equal to the training levels
    "valid"   the range is equal to the validation levels
    "test"    the run used no level of the range
    ""        the range overlaps the training or validation levels but is not equal to them; a warning is printed

    Only levels of the same game and mode are compared, because the same numbers stand for other levels in other games
    and modes.
    """
    used = {"train": config.env_options.levels} if task in config.envs else {}
    mode = config.training.valid_mode
    valid_levels = config.training.valid_levels
    if valid_levels is not None and task in (with_mode(name, mode) for name in config.envs):
        used["valid"] = valid_levels
    for role, range_ in used.items():
        if parse_levels(levels) == parse_levels(range_):
            return role
    for role, range_ in used.items():
        if levels_overlap(levels, range_):
            name = "training" if role == "train" else "validation"
            warn(f"--levels {levels} overlaps the {name} levels {range_}, so some levels of the test are not new")
            return ""
    return "test"


def check_playable(config: Config, names: Sequence[str]) -> None:
    """Raise UserError if the agent of a run cannot play one of the environments."""
    new_names = [name for name in names if name not in config.envs]
    if not new_names:
        return
    for name in new_names:
        if not same_options(lookup_env(name).options, type(config.env_options)):
            raise UserError(
                f"--env {name}: the agent was trained on {', '.join(config.envs)}; choose an environment of the same "
                "family"
            )
    all_names = (config.envs[0], *new_names)
    check_compatible(all_names, task_interfaces(all_names, config.env_options))


def _note_untrained_critic(config: Config, names: Sequence[str]) -> None:
    """If the critic has one value per task, print a note about tasks on which this critic was not trained."""
    new_names = [name for name in names if name not in config.envs]
    if new_names and "critic" in config.components and config.components["critic"].name != "shared":
        note(
            f"note: the critic was not trained on {', '.join(new_names)}, so its values have no meaning in these "
            "tasks; the returns are not affected"
        )


def evaluate_scripted_policy(
    name: str,
    env: str,
    options: dict[str, Any],
    *,
    episodes: int = DEFAULT_GAMES,
    seed: int = 0,
    num_envs: int = 32,
    max_steps: int = 27_000,
) -> Evaluation:
    """Play whole games with a scripted policy and write the result to runs/scripted-NAME-ENV/evaluations/."""
    from bestiary.envs import make_env
    from bestiary.envs.warehouse.scripted_policies import make_scripted_policy, play_steps

    streams = np.random.SeedSequence([0, 1, seed]).spawn(2)
    pool = make_env(env, min(num_envs, episodes), streams[0], **options)
    policy = make_scripted_policy(name, pool, int(streams[1].generate_state(1)[0]))
    folder = Path("runs") / f"scripted-{name}-{env.replace(':', '-')}" / "evaluations"
    folder.mkdir(parents=True, exist_ok=True)
    path = checkpoints.unused_path(folder / f"{episodes}.json")
    played, missing = collect_games(play_steps(policy, pool), pool, episodes, max_steps)
    protocol = {
        "run": f"scripted:{name}",
        "environments": [env],
        "environment_options": asdict(pool.options),  # type: ignore[attr-defined]
        "policy": "scripted",
        **_describe_games(pool.num_envs, episodes, missing, max_steps, seed),
    }
    evaluation = Evaluation(protocol, [TaskResult(env, played, unfinished=missing)])
    evaluation.save(path)
    return evaluation
