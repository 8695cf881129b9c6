"""How good is an agent? Whole games in pools of their own, with the whole protocol written down beside the result."""

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bestiary import __version__
from bestiary.agents.agent import Agent, count_parameters, fully_connected
from bestiary.analysis.evaluation import Evaluation, Part
from bestiary.analysis.evaluation_curves import draw_checkpoints
from bestiary.analysis.games import count_games, play_games
from bestiary.config import Config, make_pool, plain_name
from bestiary.console import note, short, warn
from bestiary.envs import canonical, lookup
from bestiary.envs.mixture import check_alike, task_name
from bestiary.envs.procgen import overlap, parse_levels, with_levels, with_mode
from bestiary.errors import RunError, UserError
from bestiary.options import same_options
from bestiary.rollout import Episode
from bestiary.runs import checkpoints
from bestiary.runs.checkpoints import Checkpoint
from bestiary.runs.folder import Run
from bestiary.runs.recordings import record as recorded

GONE = "{} was there at first and is no more: it is left out"  # where a training goes on meanwhile


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
    options = [with_levels(config.envs[0], config.env_options, split) for split in levels] or [config.env_options]
    splits = [(split, episodes or (_usual_games(split.levels) if levels else 100)) for split in options]
    if record:
        _check_recordable(names, splits)
    roles = {
        (name, range_): _role(config, name, range_) for name in names for range_ in map(_levels, options) if range_
    }
    for one, other in itertools.combinations(levels, 2):
        if overlap(one, other):
            warn(f"--levels {one} and {other} have levels in common: as splits they are not independent")
    _check_envs(config, names)
    chosen = _all_good(run) if every_checkpoint else [checkpoints.choose(run.path, checkpoint)]
    carry = config.make_algorithm().unroll_length if carry == 0 else carry
    how = _How(greedy, seed, num_envs, max_steps, carry, record)
    most = max(games for _, games in splits)
    stem = f"{'all' if every_checkpoint else f'{chosen[0].steps:012d}'}-{how.policy}-{most}"
    run.new_path("evaluations", stem, ".json")  # where it cannot be written, say so before any work

    several = len(chosen) * len(names) * len(splits) > 1
    evaluation, path, left_out = Evaluation({}, []), None, list[str]()
    for k, point in enumerate(chosen, start=1):
        try:
            agent = run.agent(point)
        except UserError:
            if point.path.is_dir() or not every_checkpoint:
                raise
            warn(GONE.format(point.path))
            left_out.append(f"step {point.steps}")
            continue
        at = point.steps if every_checkpoint else None
        for name, (split, games) in itertools.product(names, splits):
            which = [f"levels {_levels(split)}"] if levels else []
            which += [f"at {short(point.steps)}"] if every_checkpoint else []
            doing = " ".join(["evaluating", *([task_name(name), *which] if several else [])])
            try:
                played, missing = how.play(run, point, agent, name, split, games, doing)
            except RunError as error:
                if not every_checkpoint:
                    raise
                warn(f"{name} at step {point.steps}: {error}: it is left out")
                left_out.append(f"{name} at step {point.steps}")
                continue
            role = roles.get((name, _levels(split) or ""), "")
            evaluation.parts.append(Part(task_name(name), played, at, _levels(split), role, missing))
        if evaluation.parts:
            which_steps = (
                {"checkpoints": evaluation.checkpoints} if every_checkpoint else {"checkpoint_steps": point.steps}
            )
            missing = sum(part.given_up for part in evaluation.parts)
            not_played = [*left_out, *(f"step {other.steps}" for other in chosen[k:])]
            evaluation.protocol = {
                **_about(run, agent, names, levels),
                **which_steps,
                **({"not_played": not_played} if not_played else {}),
                "policy": how.policy,
                **({"memory_carried_for": carry} if carry is not None else {}),
                **_protocol(min(num_envs, most), most, missing, max_steps, seed),
                "training_seed": config.training.seed,
            }
            if path is None:
                path = run.new_path("evaluations", stem, ".json")
                if k < len(chosen):
                    note(f"{path} is written after each of {len(chosen)} checkpoints")
            evaluation.save(path)  # also where there is more to come: what was played is not lost
    if path is None:
        raise RunError(f"{run.path}: no game ended at any checkpoint")
    if len(evaluation.checkpoints) > 1:
        evaluation.figure = draw_checkpoints(evaluation.parts, path.with_suffix(".png"))
    return evaluation


@dataclass(frozen=True)
class _How:
    """How games are played, whatever the checkpoint, the task and the levels."""

    greedy: bool
    seed: int
    num_envs: int
    max_steps: int
    carry: int | None
    record: bool

    @property
    def policy(self) -> str:
        return "greedy" if self.greedy else "sampled"

    def play(
        self, run: Run, point: Checkpoint, agent: Agent, name: str, split: Any, games: int, doing: str
    ) -> tuple[list[Episode], int]:
        """So many games of one task with the options `split`, by the agent of a checkpoint; and how many are missing."""
        config = run.config
        streams = np.random.SeedSequence([config.training.seed, 1, self.seed]).spawn(2)
        pool = make_pool([name], split, min(self.num_envs, games), streams[0], rewards=config.rewards)
        if self.record:
            place = run.new_path("recordings", f"eval-{point.steps:012d}-{plain_name(name)}", ".json")
            about: dict[str, Any] = {"run": run.name, "checkpoint_steps": point.steps, "policy": self.policy}
            pool = recorded(pool, place, [name], split, streams[0], config.rewards, **about)
        return play_games(
            agent,
            pool,
            games,
            self.max_steps,
            greedy=self.greedy,
            seed=int(streams[1].generate_state(1)[0]),
            task=config.envs.index(name) if name in config.envs else 0,
            carry=self.carry,
            doing=doing,
            dealt=not self.record,
        )


def _levels(options: Any) -> str | None:
    """The range of levels that an environment's options name, where it has levels."""
    return getattr(options, "levels", None)


def _about(run: Run, agent: Agent, names: Sequence[str], levels: Sequence[str]) -> dict[str, Any]:
    """The part of a protocol that says what was played, by whom."""
    config = run.config
    sizes = {"parameters": count_parameters(agent), "fully_connected": fully_connected(agent)}
    return {
        "run": run.name,
        "environment": list(names),
        "trained_on": list(config.envs),
        "environment_options": config.tables()["env"],
        **({} if config.rewards.plain else {"rewards": asdict(config.rewards), **sizes}),
        **({"levels": list(levels)} if levels else {}),
    }


def _all_good(run: Run) -> list[Checkpoint]:
    """All checkpoints but the damaged ones, of which it says so."""
    good = []
    for point in run.checkpoints:
        if (problem := point.problem()) is None:
            good.append(point)
        elif point.path.is_dir():
            warn(f"{point.path} is damaged: {problem}: it is left out")
        else:
            warn(GONE.format(point.path))
    if not good:
        raise UserError(f"{run.path} has no {'checkpoint that is whole' if run.checkpoints else 'checkpoint yet'}")
    return good


def _check_recordable(names: Sequence[str], splits: Sequence[tuple[Any, int]]) -> None:
    """Where levels are dealt out, what a row plays next depends on the others: no game can be replayed alone. So while games
    are recorded chance picks levels, and what was to be even is refused."""
    for split, count in splits:
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
