"""Reward audit: does an agent that has a high training return also have a high true return?

The training reward is the reward that the agent was trained on. It is often a proxy for the true reward, which
measures what the agent should achieve. Each run plays whole games with its newest checkpoint, or with all checkpoints.
The audit reports:

- The training return and the true return, as functions of network size, training steps and each environment option in
  which the runs differ. If the true return drops significantly from one point of the x axis to the next, but the
  training return does not, a dashed line marks this place.
- The correlation of the training reward with the true reward, over steps and over games.
- The distance between the policy of each audited run and the policy of a trusted run, in the states that the audited
  run visits.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from bestiary import __version__
from bestiary.agents.agent import Agent, count_fc_parameters, count_parameters
from bestiary.agents.policy_runner import StepRecord, run_policy
from bestiary.config.config import Config, make_vector_env
from bestiary.config.plugin_options import map_plugins
from bestiary.config.toml import flatten
from bestiary.envs.multitask import check_compatible
from bestiary.envs.rewards.reward_functions import canonical_reward
from bestiary.envs.rewards.wrapper import RewardConfig, RewardWrapper, check_custom_rewards
from bestiary.evaluation.game_runner import collect_games
from bestiary.evaluation.statistics import describe_interval
from bestiary.reward_audit.curves import SIGNIFICANCE, AuditRow, Curve, make_curves, varied_env_options
from bestiary.reward_audit.figures import draw_figures
from bestiary.reward_audit.policy_distances import DISTANCES, summarise_steps
from bestiary.rollout import Step
from bestiary.runs import checkpoints
from bestiary.runs.checkpoints import Checkpoint
from bestiary.runs.run import Run
from bestiary.utils.console import note, plain, stdout, valid_text
from bestiary.utils.errors import UserError

RANDOM_STREAM = 5  # part of the seed; training, evaluation and playback use other numbers, so their games differ


def audit(
    runs: Sequence[Run],
    out: Path,
    *,
    trusted: Run | None = None,
    true_reward: str | None = None,
    every_checkpoint: bool = False,
    episodes: int = 20,
    greedy: bool = False,
    seed: int = 0,
    num_envs: int = 10,
    max_steps: int = 27_000,
    overwrite: bool = False,
) -> list[AuditRow]:
    """Audit runs, write audit.csv, audit.json and figures into the folder `out`, and print a table.

    Args:
        trusted: run whose policy is compared with the policy of each audited run; None: no comparison.
        true_reward: true reward of all runs; None: the true reward in the configuration of each run.
        every_checkpoint: audit all checkpoints of each run, not only the newest.
        episodes: number of whole games that are played with each checkpoint.
        greedy: take the most probable action in each step instead of sampling an action.
        max_steps: maximum number of steps of a game. Longer games are not included in the results.
    """
    _check_output_folder(out, overwrite)
    _check_runs(runs, trusted)
    auditor = _Auditor(trusted, true_reward, episodes, greedy, seed, num_envs, max_steps)
    chosen = [(run, checkpoint) for run in runs for checkpoint in _choose_checkpoints(run, every_checkpoint)]
    for run in runs:
        auditor.check(run)
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for run, checkpoint in chosen:
        row = auditor.audit_checkpoint(run, checkpoint)
        training, true = row.training.mean(), row.true["true"].mean()
        note(f"{run.path} at step {checkpoint.steps}: training return {training:.4g}, true return {true:.4g}")
        rows.append(row)
    protocol = {
        "trusted": trusted.name if trusted else None,
        "episodes": episodes,
        "policy": "greedy" if greedy else "sampled",
        "seed": seed,
        "num_envs": num_envs,
        "max_steps": max_steps,
        "true_return_drop": "largest significant drop of the true return between neighbouring points (Welch's t test "
        f"over seeds, Holm's correction over the pairs of points, p <= {SIGNIFICANCE:g}) without a significant drop of "
        "the training return",
        "interval": describe_interval("games"),
        "distances": "trusted against audited policy, in states that the audited run visits; kl in nats, js in bits",
        "bestiary": __version__,
    }
    _write_tables(rows, out, protocol)
    _print_table(rows)
    for axis, reason in dict.fromkeys((curve.axis, curve.untested) for curve in make_curves(rows) if curve.untested):
        note(f"note: curve over {axis}: {reason}")
    written = [out / "audit.csv", out / "audit.json", *draw_figures(rows, out)]
    note(f"written: {', '.join(map(str, written))}")
    return rows


def _check_output_folder(out: Path, overwrite: bool) -> None:
    for path in (out, *out.parents):
        if path.exists() and not path.is_dir():
            raise UserError(f"--out {out}: {path} is a file, not a folder; choose a folder")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise UserError(f"--out {out}: the folder is not empty; choose another folder or add --overwrite")


def _check_runs(runs: Sequence[Run], trusted: Run | None) -> None:
    for run in (*runs, *([trusted] if trusted else [])):
        if len(run.config.envs) > 1:
            raise UserError(f"{run.path} has several tasks; an audit needs runs with one task")
    paths = [run.path.resolve() for run in runs]
    for run, path in zip(runs, paths, strict=True):
        if paths.count(path) > 1:
            raise UserError(f"{run.path} is listed {paths.count(path)} times; list each run once")


def _choose_checkpoints(run: Run, every_checkpoint: bool) -> list[Checkpoint]:
    if every_checkpoint and not run.checkpoints:
        raise UserError(f"{run.path} has no checkpoint yet; wait for its first checkpoint, or do not list this run")
    return run.checkpoints if every_checkpoint else [checkpoints.choose(run.path)]


@dataclass
class _Auditor:
    """Plays new games with the agent of a run, and measures its training return and its true return.

    The fields are the options of `audit`.
    """

    trusted: Run | None
    true_reward: str | None
    episodes: int
    greedy: bool
    seed: int
    num_envs: int
    max_steps: int

    def rewards(self, run: Run) -> RewardConfig:
        """Return the training reward of a run and the true rewards that the audit reports for this run."""
        return RewardConfig(run.config.rewards.training, self.true_reward or run.config.rewards.true or "reward=1")

    def make_env(self, run: Run, num_envs: int, seed: Any) -> RewardWrapper:
        """Return a vector environment of a run. Each of its steps contains all rewards that the audit needs."""
        config = run.config
        pool = make_vector_env(config.envs, config.env_options, num_envs, seed, rewards=self.rewards(run))
        assert isinstance(pool, RewardWrapper)
        if self.trusted is not None:
            pool.add_reward("trusted", self.trusted.config.rewards.training)
        return pool

    def check(self, run: Run) -> None:
        """Raise UserError if the environment cannot compute the rewards, or if the trusted agent cannot play in it."""
        if self.trusted is not None:
            interfaces = [one.config.interface for one in (self.trusted, run)]
            check_compatible((str(self.trusted.path), str(run.path)), interfaces)
        wrapped = self.make_env(run, 1, 0)
        try:
            check_custom_rewards(wrapped)
        finally:
            wrapped.close()

    def audit_checkpoint(self, run: Run, checkpoint: Checkpoint) -> AuditRow:
        """Play whole games with one checkpoint of a run and return its returns, correlations and policy distances."""
        agent = run.agent(checkpoint)
        trusted = self.trusted.agent() if self.trusted is not None else None
        streams = np.random.SeedSequence([run.config.training.seed, RANDOM_STREAM, self.seed]).spawn(2)
        pool = self.make_env(run, min(self.num_envs, self.episodes), streams[0])
        rewards, settings = self.rewards(run), comparable_settings(run.config, pool)
        names = ("training", *rewards.channels)
        step_rewards: list[np.ndarray] = []
        step_distances: dict[str, list[np.ndarray]] = {name: [] for name in DISTANCES} if trusted is not None else {}
        records = run_policy(agent, pool, greedy=self.greedy, seed=int(streams[1].generate_state(1)[0]))
        steps = _measure_steps(records, names, trusted, step_rewards, step_distances)
        played, _ = collect_games(steps, pool, self.episodes, self.max_steps, f"auditing {run.path}")
        games = [episode for episode in played if episode.game_over]
        returns = {name: np.array([game.game_measures[name] for game in games]) for name in names}
        # [R,S]: R rewards, S steps of all environments. Entry 0 of `step_rewards` is the reset, which has no reward.
        flat_rewards = np.concatenate(step_rewards[1:], axis=1)
        return AuditRow(
            run=valid_text(str(run.path)),
            environment=describe_environment(run.config),
            rewards=rewards,
            settings=settings,
            steps=checkpoint.steps,
            parameters=count_parameters(agent),
            fc_parameters=count_fc_parameters(agent),
            training=returns["training"],
            true={name: returns[name] for name in rewards.channels},
            lengths=np.array([game.game_length for game in games]),
            correlations=_correlate_rewards(rewards.channels, flat_rewards, returns),
            distances={
                f"{name}_{statistic}": value
                for name, values in step_distances.items()
                for statistic, value in summarise_steps(np.concatenate(values)).items()
            },
        )


@torch.no_grad()
def _measure_steps(
    records: Iterator[tuple[StepRecord, np.ndarray]],
    reward_names: Sequence[str],
    trusted: Agent | None,
    step_rewards: list[np.ndarray],
    step_distances: dict[str, list[np.ndarray]],
) -> Iterator[Step]:
    """Yield the steps of `records`. Append rewards to `step_rewards` and policy distances to `step_distances`.

    The trusted agent receives the same observations as the audited agent. Its input `reward`, however, is the reward on
    which the trusted agent was trained.
    """
    state = None
    for record, actions in records:
        step_rewards.append(np.stack([record.step.measures[name] for name in reward_names]))
        if trusted is not None:
            state = trusted.initial_state(len(actions)) if state is None else state
            inputs = replace(record.inputs, reward=torch.from_numpy(record.step.measures["trusted"])[None])
            output, state = trusted(inputs, state)
            log_p, log_q = output.distribution.log_probs[0], record.output.distribution.log_probs[0]
            for name, distance in DISTANCES.items():
                step_distances[name].append(distance(log_p, log_q).numpy())
        yield record.step


def _correlate_rewards(
    channels: Sequence[str], step_rewards: np.ndarray, returns: dict[str, np.ndarray]
) -> dict[str, float]:
    """Return the correlations of the training reward with each true reward, over steps and over games.

    `channels` are the names of the true rewards: "true", "true_2" and so on. `step_rewards` [R,S] has the rewards of S
    steps: the training reward in row 0, and the true rewards in the other rows. `returns` has the returns of each game.

    The keys of the result are pearson_step, spearman_step, pearson_game and spearman_game for the first true reward.
    The keys for the second true reward have the suffix _true_2.
    """
    found: dict[str, float] = {}
    for k, name in enumerate(channels, start=1):
        suffix = "" if name == "true" else f"_{name}"
        over_steps = correlations(step_rewards[0], step_rewards[k])
        over_games = correlations(returns["training"], returns[name])
        found |= {f"{kind}_step{suffix}": value for kind, value in over_steps.items()}
        found |= {f"{kind}_game{suffix}": value for kind, value in over_games.items()}
    return found


def correlations(x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Return the Pearson and Spearman correlations of two samples.

    Both are NaN if a sample is constant or has fewer than two values.
    """
    import scipy.stats  # here, because the import takes 1 s

    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return {"pearson": float("nan"), "spearman": float("nan")}
    return {
        "pearson": float(np.corrcoef(x, y)[0, 1]),
        "spearman": float(scipy.stats.spearmanr(x, y).statistic),
    }


def describe_environment(config: Config) -> str:
    """Return the environment and all options that differ from their defaults, for example `atari/Pong, flicker=0.5`."""
    options = config.env_options
    defaults = type(options)()
    names = [field.name for field in fields(options)]
    changed = [
        f"{name}={getattr(options, name)}" for name in names if getattr(options, name) != getattr(defaults, name)
    ]
    return ", ".join([config.envs[0], *changed])


def comparable_settings(config: Config, pool: RewardWrapper) -> dict[str, Any]:
    """Return all settings of a run in a form in which settings of different runs can be compared.

    A plug-in is named by the hash of its file instead of the path. Rewards have a canonical form, so that
    `on_shelf=1` and `on_shelf=1.0` are equal.
    """
    hashes = config.plugin_hashes
    flat = {k: v for k, v in flatten(config.tables()).items() if not k.startswith("plugins.")}
    named = map_plugins(flat, lambda ref: f"{ref.attribute}@{hashes.get(str(ref.path), ref.path)}")
    true_rewards = [canonical_reward(pool.true_rewards[name], pool.components) for name in pool.rewards.channels]
    training_reward = canonical_reward(pool.training_reward, pool.components)
    return {**named, "reward": training_reward, "true_reward": true_rewards}


# --- files and table ---


def _write_tables(rows: Sequence[AuditRow], out: Path, protocol: dict[str, Any]) -> None:
    """Write audit.csv with one row per checkpoint, and audit.json.

    audit.json has the rows, the drops of the true return (`TrueReturnDrop`), the curves that were not tested for drops,
    and the protocol.
    """
    varied = varied_env_options(rows)
    records = [{**row.to_record(), **{name: row.position(name) for name in varied}} for row in rows]
    columns = list(dict.fromkeys(key for record in records for key in record))
    with (out / "audit.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(records)
    curves = make_curves(rows)
    drops = [{**_describe_curve(c), **asdict(c.true_return_drop)} for c in curves if c.true_return_drop is not None]
    untested = [{**_describe_curve(c), "reason": c.untested} for c in curves if c.untested]
    content = {
        "true_return_drops": drops,
        "untested": untested,
        "protocol": protocol,
        "rows": [_without_nan(r) for r in records],
    }
    (out / "audit.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def _describe_curve(curve: Curve) -> dict[str, Any]:
    return {
        "environment": curve.environment,
        "reward": curve.rewards.training or "reward=1",
        "true_reward": curve.true_reward,
        "runs": curve.runs,
        "axis": curve.axis,
        **curve.fixed,
    }


def _without_nan(record: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity by None, because JSON does not support them."""
    return {key: None if isinstance(v, float) and not np.isfinite(v) else v for key, v in record.items()}


def _print_table(rows: Sequence[AuditRow]) -> None:
    table = Table(title="training and true returns: means over the games of each checkpoint")
    channels = list(dict.fromkeys(name for row in rows for name in row.true))
    records = [row.to_record() for row in rows]
    columns = [
        "steps",
        "parameters",
        "training",
        *channels,
        "pearson_step",
        "pearson_game",
        "js_mean",
        "hellinger_mean",
    ]
    columns = [name for name in columns if any(name in record for record in records)]
    for name in ("run", "reward", *columns):
        table.add_column(plain(name.replace("_", " ")), justify="left" if name in ("run", "reward") else "right")
    for record in records:
        # A run with fewer true rewards than another run has no value in some columns.
        cells = [_format_cell(record.get(name, "")) for name in columns]
        table.add_row(*map(plain, (record["run"], str(record["reward"]), *cells)))
    stdout.print(table)


def _format_cell(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
