"""How good is an agent? Whole games in pools of their own, with the whole protocol written down beside the result.

Every environment plays the same number of games (or one more), and exactly those count: taking the first games to finish
instead would favour short ones. Where games have levels, those are dealt out as environments ask for them, each equally often
(none twice, where there are more levels than games), and every game that was dealt counts.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from bestiary import __version__
from bestiary.agents.agent import Agent, count_parameters, fully_connected
from bestiary.analysis.evaluation import Evaluation, Part
from bestiary.analysis.evaluation_curves import draw_checkpoints
from bestiary.analysis.play import play
from bestiary.config import Config, make_pool, plain_name
from bestiary.console import interactive, note, short, stderr, warn
from bestiary.envs import canonical, lookup
from bestiary.envs.mixture import check_alike, task_name
from bestiary.envs.pool import Pool
from bestiary.envs.procgen import overlap, parse_levels, with_levels, with_mode
from bestiary.envs.rewards import bare
from bestiary.errors import RunError, UserError
from bestiary.options import same_options
from bestiary.rollout import Episode, Step
from bestiary.runs import checkpoints
from bestiary.runs.checkpoints import Checkpoint
from bestiary.runs.folder import Run
from bestiary.runs.recordings import record as recorded
from bestiary.runtime.episodes import EpisodeCounter


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
    carry: int | None = None,
    record: bool = False,
) -> Evaluation:
    """Play `episodes` whole games of each task with a run's agent and write the result into the run's folder.

    Without a number, 100, and of `levels` one game a level, where there are at most 1,000. `env` names other environments than
    the training's, `levels` ranges of levels to play one after the other. A game is given up after `max_steps` decisions: some
    environments never end. Those do not count, and are reported. With `carry`, the memory begins anew after so many decisions,
    in the middle of games (0: as many as an unroll of the training has). With `record`, every decision is written to
    recordings/, so that any of the games can be replayed."""
    config, names = run.config, tuple(map(canonical, env)) or run.config.envs
    for flag, words in (("--env", names), ("--levels", levels)):
        if twice := [word for word in words if words.count(word) > 1]:
            raise UserError(f"{flag} {twice[0]} is there {words.count(twice[0])} times")
    carry = config.make_algorithm().unroll_length if carry == 0 else carry
    splits = [with_levels(config.envs[0], config.env_options, split) for split in levels] or [config.env_options]
    games = [episodes or (_usual_games(split.levels) if levels else 100) for split in splits]
    if record:
        _check_recordable(names, splits, games)
    ranges = [split.levels for split in splits if hasattr(split, "levels")]
    roles = {(name, range_): _role(config, name, range_) for name in names for range_ in ranges}
    for one, other in itertools.combinations(levels, 2):
        if overlap(one, other):
            warn(f"--levels {one} and {other} have levels in common: as splits they are not independent")
    _check_envs(config, names)
    chosen = _all_good(run) if every_checkpoint else [checkpoints.choose(run.path, checkpoint)]
    policy = "greedy" if greedy else "sampled"
    stem = f"{'all' if every_checkpoint else f'{chosen[0].steps:012d}'}-{policy}-{max(games)}"
    run.new_path("evaluations", stem, ".json")  # where it cannot be written, say so before any work

    def protocol(parts: Sequence[Part], agent: Agent) -> dict[str, Any]:
        sizes = {"parameters": count_parameters(agent), "fully_connected": fully_connected(agent)}
        points = list(dict.fromkeys(part.checkpoint for part in parts))
        return {
            "run": run.name,
            "environment": list(names),
            "trained_on": list(config.envs),
            "environment_options": config.tables()["env"],
            **({} if config.rewards.plain else {"rewards": asdict(config.rewards), **sizes}),
            **({"levels": list(levels)} if levels else {}),
            **({"checkpoints": points} if every_checkpoint else {"checkpoint_steps": chosen[0].steps}),
            "policy": policy,
            **({"memory_carried_for": carry} if carry is not None else {}),
            **_protocol(min(num_envs, max(games)), max(games), sum(part.given_up for part in parts), max_steps, seed),
            "training_seed": config.training.seed,
        }

    def play_part(agent: Agent, point: Checkpoint, name: str, split: Any, count: int) -> Part:
        streams = np.random.SeedSequence([config.training.seed, 1, seed]).spawn(2)
        pool = make_pool([name], split, min(num_envs, count), streams[0], rewards=config.rewards)
        if record:
            place = run.new_path("recordings", f"eval-{point.steps:012d}-{plain_name(name)}", ".json")
            about: dict[str, Any] = {"run": run.name, "checkpoint_steps": point.steps, "policy": policy}
            pool = recorded(pool, place, [name], split, streams[0], config.rewards, **about)
        task = config.envs.index(name) if name in config.envs else 0
        draws = int(streams[1].generate_state(1)[0])
        how: dict[str, Any] = {"greedy": greedy, "seed": draws, "task": task, "carry": carry, "dealt": not record}
        own, at = getattr(split, "levels", None), point.steps if every_checkpoint else None
        which = [
            task_name(name),
            *([f"levels {own}"] if levels else []),
            *([f"at {short(at)}"] if at is not None else []),
        ]
        doing = f"evaluating {' '.join(which)}" if len(chosen) * len(names) * len(splits) > 1 else "evaluating"
        played, unfinished = play_games(agent, pool, count, max_steps, doing=doing, **how)
        return Part(task_name(name), played, at, own, roles.get((name, own), ""), unfinished)

    evaluation, path = Evaluation({}, []), None
    for point in chosen:
        try:
            agent = run.agent(point)
        except UserError:
            if point.path.is_dir() or not every_checkpoint:
                raise
            warn(f"{point.path} was there at first and is no more: it is left out")  # the training goes on
            continue
        for name, (split, count) in itertools.product(names, zip(splits, games, strict=True)):
            try:
                evaluation.parts.append(play_part(agent, point, name, split, count))
            except RunError as error:
                if not every_checkpoint:
                    raise
                warn(f"{name} at step {point.steps}: {error}: it is left out")
        if evaluation.parts:
            evaluation.protocol = protocol(evaluation.parts, agent)
            path = path or run.new_path("evaluations", stem, ".json")
            evaluation.save(path)  # also where there is more to come: what was played is not lost
    if path is None:
        raise RunError(f"{run.path}: no game ended at any checkpoint")
    if len(evaluation.protocol.get("checkpoints", [])) > 1:
        evaluation.figure = draw_checkpoints(evaluation.parts, path.with_suffix(".png"))
    return evaluation


def _all_good(run: Run) -> list[Checkpoint]:
    """All checkpoints but the damaged ones, of which it says so."""
    good = []
    for point in run.checkpoints:
        if (problem := point.problem()) is None:
            good.append(point)
        else:
            warn(f"{point.path} is damaged: {problem}: it is left out")
    if not good:
        raise UserError(f"{run.path} has no {'checkpoint that is whole' if run.checkpoints else 'checkpoint yet'}")
    return good


def _check_recordable(names: Sequence[str], splits: Sequence[Any], games: Sequence[int]) -> None:
    """Where levels are dealt out, what a row plays next depends on the others: no game can be replayed alone. So while games
    are recorded chance picks levels, and what was to be even is refused."""
    for split, count in zip(splits, games, strict=True):
        if hasattr(split, "levels") and hasattr(lookup(names[0]).options, "levels"):
            first, last = parse_levels(split.levels)
            if last - first <= count:
                raise UserError(
                    f"--record: {count} games of {last - first} levels are dealt out so that each is played equally often, "
                    "and cannot be replayed one by one; ask for fewer --episodes than levels"
                )


def _usual_games(levels: str) -> int:
    """One a level, where that is not too many."""
    first, last = parse_levels(levels)
    return last - first if last - first <= 1_000 else 100


def _role(config: Config, task: str, levels: str) -> str:
    """train or valid, where the levels are those of the training or of its validation; test, where none is; and a warning in
    between. Another game, or another mode, has other levels of the same numbers."""
    used = {"train": config.env_options.levels} if task in config.envs else {}
    mode, valid = config.training.valid_mode, config.training.valid_levels
    if valid is not None and task in (with_mode(name, mode) for name in config.envs):
        used["valid"] = valid
    for role, range_ in used.items():
        if parse_levels(levels) == parse_levels(range_):
            return role
    for role, range_ in used.items():
        if overlap(levels, range_):
            what = "training" if role == "train" else "validation"
            warn(f"--levels {levels} overlaps the levels of the {what}, {range_}: it is no fair test")
            return ""
    return "test"


def _check_envs(config: Config, names: Sequence[str]) -> None:
    """Refuse environments that the agent cannot play, and say where its values mean nothing."""
    strange = [name for name in names if name not in config.envs]
    if not strange:
        return
    for name in strange:
        if not same_options(lookup(name).options, type(config.env_options)):
            raise UserError(f"--env {name}: the agent was trained on {', '.join(config.envs)}, another family")
    names = (config.envs[0], *strange)
    pools = [make_pool([name], config.env_options, 1, 0, rewards=config.rewards) for name in names]
    for pool in pools:
        pool.close()
    check_alike(names, pools)
    if "critic" in config.parts and config.parts["critic"].name != "shared":
        note(
            f"note: the critic has no value for {', '.join(strange)}, which it was not trained on; the policy, which is "
            "what is evaluated, needs none"
        )


def evaluate_player(
    name: str,
    env: str,
    options: dict[str, Any],
    *,
    episodes: int = 100,
    seed: int = 0,
    num_envs: int = 32,
    max_steps: int = 27_000,
) -> Evaluation:
    """The same for a scripted player, into a folder below runs/ that is named for it."""
    from bestiary.envs import make
    from bestiary.envs.players import make_player
    from bestiary.envs.players import play as play_scripted

    streams = np.random.SeedSequence([0, 1, seed]).spawn(2)
    pool = make(env, min(num_envs, episodes), streams[0], **options)
    player = make_player(name, pool, int(streams[1].generate_state(1)[0]))
    folder = Path("runs") / f"scripted-{name}-{env.replace(':', '-')}" / "evaluations"
    folder.mkdir(parents=True, exist_ok=True)
    path = checkpoints.unused(folder / f"{episodes}.json")
    played, unfinished = count_games(play_scripted(player, pool), pool, episodes, max_steps)
    protocol = {
        "run": f"scripted:{name}",
        "environment": [env],
        "environment_options": asdict(pool.options),  # type: ignore[attr-defined]
        "policy": "scripted",
        **_protocol(pool.num_envs, episodes, unfinished, max_steps, seed),
    }
    evaluation = Evaluation(protocol, [Part(env, played, given_up=unfinished)])
    evaluation.save(path)
    return evaluation


def _protocol(num_envs: int, episodes: int, unfinished: int, max_steps: int, seed: int) -> dict[str, Any]:
    return {
        "games": episodes,
        "games_given_up": unfinished,
        "max_steps": max_steps,
        "num_envs": num_envs,
        "games_per_env": "equal, each environment's first; where there are levels, each of those equally often",
        "seed": seed,
        "interval": "95 % bootstrap of the mean, 2000 resamples",
        "bestiary": __version__,
    }


def play_games(
    agent: Agent,
    pool: Pool,
    episodes: int,
    max_steps: int,
    *,
    greedy: bool,
    seed: int,
    task: int = 0,
    carry: int | None = None,
    doing: str = "evaluating",
    stop: Callable[[], bool] = lambda: False,
    dealt: bool = True,
) -> tuple[list[Episode], int]:
    """The episodes of so many whole games of a pool of one task, the agent's how-manyeth `task` says; and how many games
    are missing. Levels are `dealt` out equally often, else by chance. Closes the pool. Raises Stopped where `stop` says so."""
    moments = play(agent, pool, greedy=greedy, seed=seed, task=task, carry=carry)
    return count_games((step for step, _ in moments), pool, episodes, max_steps, doing, stop, dealt)


class Stopped(Exception):
    """Games were cut off because somebody asked for it."""


def count_games(
    steps: Iterator[Step],
    pool: Pool,
    episodes: int,
    max_steps: int,
    doing: str = "evaluating",
    stop: Callable[[], bool] = lambda: False,
    dealt: bool = True,
) -> tuple[list[Episode], int]:
    """The episodes of so many whole games among the steps of a pool, whoever plays; and how many games are missing."""
    n = pool.num_envs
    levels: Any = found if hasattr(found := bare(pool), "owe") else None  # ProcGen's
    by_level = levels is not None and dealt
    if by_level:
        levels.owe(episodes)
    quota = np.full(n, episodes // n) + (np.arange(n) < episodes % n)  # games that environment i owes
    counter = EpisodeCounter(n, pool.tasks, pool.measures_spec)
    played, given_up = np.zeros(n, np.int64), 0
    lives: list[list[Episode]] = [[] for _ in range(n)]  # of the running games: they count once the game does
    result: list[Episode] = []
    try:
        next(steps)
        with Progress(console=stderr, disable=not interactive(), transient=True) as progress:
            bar, age, said = progress.add_task(doing, total=episodes), np.zeros(n, np.int64), time.monotonic()
            while True:
                owing = levels.counts.copy() if levels and by_level else played < quota
                more = np.full(n, bool(levels.owed)) if levels and by_level else owing
                waiting = more & (age >= max_steps) & (age < 2 * max_steps)  # for the end of a game that was given up
                owing &= age < max_steps  # else whatever comes of the game does not count
                if not (owing | waiting).any():
                    break
                if stop():
                    raise Stopped
                level = levels.level.copy() if levels else None
                step = next(steps)
                age = np.where(step.game_over, 0, age + 1)  # of the running game
                for episode in counter.add(step, 0):
                    if owing[episode.env]:
                        if level is not None:
                            episode.measures["level"] = float(level[episode.env])
                        lives[episode.env].append(episode)
                        if episode.game_over:
                            result += lives[episode.env]
                            lives[episode.env] = []
                            played[episode.env] += 1
                endless = owing & (age >= max_steps)
                given_up += int(endless.sum())
                quota[endless] -= 1
                for row in np.flatnonzero(endless):
                    lives[row] = []
                progress.update(bar, completed=int(played.sum()))
                if not interactive() and time.monotonic() - said > 10:
                    said = time.monotonic()
                    note(f"{doing}: {played.sum()} of {episodes} games")
    finally:
        pool.close()
    missing = episodes - int(played.sum())
    if missing:
        others = f"; {missing - given_up} more were not begun, behind one of those" if missing > given_up else ""
        warn(f"{given_up} of {episodes} games had not ended after {max_steps} steps and do not count{others}")
    if missing == episodes:
        raise RunError(f"no game ended within {max_steps} steps (--max-steps)")
    return sorted(result, key=lambda e: e.env), missing
