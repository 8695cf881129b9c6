"""Is what was trained on what was wanted? Trained and true returns of runs, side by side.

Every run plays whole games at its newest checkpoint, or at each. What comes of it: trained and true returns against the size
of the network, training time and any option of the environment in which runs differ, with a mark where the true one drops while
the trained one does not; how far the two rewards go together, step by step and game by game; and how far a run's decisions are
from those of a trusted run, in the states that the run itself gets into.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats
import torch
from rich.table import Table

from bestiary import __version__, plugins
from bestiary.agents.agent import Agent, count_parameters, fully_connected
from bestiary.analysis.audit_curves import SURE, Finding, curves, options_varied
from bestiary.analysis.audit_figures import draw
from bestiary.analysis.distances import DISTANCES, over_time
from bestiary.analysis.games import count_games
from bestiary.analysis.play import Moment, moments
from bestiary.config import Config, make_pool
from bestiary.console import note, stdout
from bestiary.envs.mixture import check_alike
from bestiary.envs.rewards import RewardedPool, Rewards, try_rewards
from bestiary.envs.weightings import canonical
from bestiary.errors import UserError
from bestiary.rollout import Inputs, Step
from bestiary.runs import checkpoints
from bestiary.runs.checkpoints import Checkpoint
from bestiary.runs.folder import Run
from bestiary.textconfig import flatten


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
) -> list[Finding]:
    """Write audit.csv, audit.json and the figures into the folder `out`, and print a table.

    `true_reward` is what to judge all runs by, in place of what each was watched on."""
    for place in (out, *out.parents):
        if place.exists() and not place.is_dir():
            raise UserError(f"--out {out}: {place} is a file, not a folder")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise UserError(f"--out {out} exists; choose another folder or add --overwrite")
    for run in (*runs, *([trusted] if trusted else [])):
        if len(run.config.envs) > 1:
            raise UserError(f"{run.path} has several tasks, whose returns have no common mean: audit runs of one task")
    paths = [run.path.resolve() for run in runs]
    for run, path in zip(runs, paths, strict=True):
        if paths.count(path) > 1:
            raise UserError(f"{run.path} is there {paths.count(path)} times; it would count as runs of other seeds")
    judge = _Judge(trusted, true_reward, episodes, greedy, seed, num_envs, max_steps)
    chosen = [(run, point) for run in runs for point in _points(run, every_checkpoint)]
    for run in runs:
        judge.check(run)
    out.mkdir(parents=True, exist_ok=True)
    findings = []
    for run, point in chosen:
        found = judge.find(run, point)
        note(f"{run.path} at {point.steps}: trained {found.trained.mean():.4g}, true {found.true['true'].mean():.4g}")
        findings.append(found)
    protocol = {
        "trusted": trusted.name if trusted else None,
        "episodes": episodes,
        "policy": "greedy" if greedy else "sampled",
        "seed": seed,
        "num_envs": num_envs,
        "max_steps": max_steps,
        "transition": f"the largest drop of the true return beyond {SURE:g} standard errors, the trained one not dropping",
        "distances": "of the trusted run's decisions from the run's, in the run's states; kl in nats, js in bits",
        "bestiary": __version__,
    }
    _write(findings, out, protocol)
    _show(findings)
    written = [out / "audit.csv", out / "audit.json", *draw(findings, out)]
    note(f"written: {', '.join(map(str, written))}")
    return findings


def _points(run: Run, every: bool) -> list[Checkpoint]:
    if every and not run.checkpoints:
        raise UserError(f"{run.path} has no checkpoint yet")
    return run.checkpoints if every else [checkpoints.choose(run.path)]


@dataclass
class _Judge:
    """How runs are played and measured."""

    trusted: Run | None
    true_reward: str | None
    episodes: int
    greedy: bool
    seed: int
    num_envs: int
    max_steps: int

    def rewards(self, run: Run) -> Rewards:
        """What it was trained on, and what it is judged by."""
        return Rewards(run.config.rewards.trained, self.true_reward or run.config.rewards.true or "reward=1")

    def pool(self, run: Run, num_envs: int, seed: Any) -> RewardedPool:
        config = run.config
        pool = make_pool(config.envs, config.env_options, num_envs, seed, rewards=self.rewards(run))
        assert isinstance(pool, RewardedPool)
        if self.trusted is not None:
            pool.add("trusted", self.trusted.config.rewards.trained)
        return pool

    def check(self, run: Run) -> None:
        """Refuse, before any work, what cannot be judged so, or by such a trusted run."""
        if self.trusted is not None:
            pools = [one.config.make_pool(1, 0) for one in (self.trusted, run)]
            for pool in pools:
                pool.close()
            check_alike((str(self.trusted.path), str(run.path)), pools)
        made = self.pool(run, 1, 0)
        try:
            try_rewards(made)
        finally:
            made.close()

    def find(self, run: Run, point: Checkpoint) -> Finding:
        agent = run.agent(point)
        trusted = self.trusted.agent() if self.trusted is not None else None
        streams = np.random.SeedSequence([run.config.training.seed, 5, self.seed]).spawn(2)
        pool = self.pool(run, min(self.num_envs, self.episodes), streams[0])
        rewards, settings = self.rewards(run), settings_of(run.config, pool)
        draws = int(streams[1].generate_state(1)[0])
        pairs: list[np.ndarray] = []
        apart: dict[str, list[np.ndarray]] = {name: [] for name in DISTANCES} if trusted is not None else {}
        names = ("trained", *rewards.channels)
        watched = _watch(moments(agent, pool, greedy=self.greedy, seed=draws), names, trusted, pairs, apart)
        played, _ = count_games(watched, pool, self.episodes, self.max_steps, f"auditing {run.path}")
        games = [e for e in played if e.game_over]
        returns = {name: np.array([e.game_measures[name] for e in games]) for name in names}
        each = np.concatenate(pairs[1:], axis=1)  # [rewards, steps x N]; the opening step brought nothing
        correlations: dict[str, float] = {}
        for k, name in enumerate(rewards.channels, start=1):
            which = "" if name == "true" else f"_{name}"
            found = {"step": together(each[0], each[k]), "game": together(returns["trained"], returns[name])}
            correlations |= {f"{how}_{of}{which}": value for of, both in found.items() for how, value in both.items()}
        distances = {
            f"{name}_{how}": value
            for name, values in apart.items()
            for how, value in over_time(np.concatenate(values)).items()
        }
        lengths = np.array([e.game_length for e in games])
        about = str(run.path), environment(run.config), rewards, settings, point.steps
        sizes = count_parameters(agent), fully_connected(agent)
        return Finding(*about, *sizes, returns.pop("trained"), returns, lengths, correlations, distances)


@torch.no_grad()
def _watch(
    played: Iterator[tuple[Moment, np.ndarray]],
    names: Sequence[str],
    trusted: Agent | None,
    pairs: list[np.ndarray],
    apart: dict[str, list[np.ndarray]],
) -> Iterator[Step]:
    """Hand on the steps; keep the rewards of these names, and what the trusted agent would rather have done."""
    state = None
    for moment, actions in played:
        pairs.append(np.stack([moment.step.measures[name] for name in names]))
        if trusted is not None:
            state = trusted.initial_state(len(actions)) if state is None else state
            seen: Inputs = replace(moment.inputs, reward=torch.from_numpy(moment.step.measures["trusted"])[None])
            output, state = trusted(seen, state)  # it sees the reward that it was trained on
            mine, theirs = output.distribution.log_probs[0], moment.output.distribution.log_probs[0]
            for name, distance in DISTANCES.items():
                apart[name].append(distance(mine, theirs).numpy())
        yield moment.step


def together(one: np.ndarray, other: np.ndarray) -> dict[str, float]:
    """Pearson's and Spearman's correlation; nan where one of the two never changes."""
    if len(one) < 2 or np.ptp(one) == 0 or np.ptp(other) == 0:
        return {"pearson": float("nan"), "spearman": float("nan")}
    return {
        "pearson": float(np.corrcoef(one, other)[0, 1]),
        "spearman": float(scipy.stats.spearmanr(one, other).statistic),
    }


def environment(config: Config) -> str:
    """`atari/Pong, flicker=0.5`: runs that see or do other things are no seeds of each other."""
    options = config.env_options
    usual = type(options)()
    known = [field.name for field in fields(options)]
    changed = [f"{name}={getattr(options, name)}" for name in known if getattr(options, name) != getattr(usual, name)]
    return ", ".join([config.envs[0], *changed])


def settings_of(config: Config, pool: RewardedPool) -> dict[str, Any]:
    """All settings of a run by name; users' own parts by content, and the rewards as what they come to: `on_shelf=1` is
    `on_shelf=1.0`."""
    hashes = config.plugin_hashes
    flat = {k: v for k, v in flatten(config.tables()).items() if not k.startswith("plugins.")}
    named = plugins.renamed(flat, lambda path, name: f"{name}@{hashes.get(str(path), path)}")
    judged = [canonical(pool.true[name], pool.components) for name in pool.rewards.channels]
    return {**named, "reward": canonical(pool.trained, pool.components), "true_reward": judged}


# --- files and tables ---


def _write(findings: Sequence[Finding], out: Path, protocol: dict[str, Any]) -> None:
    varied = options_varied(findings)
    rows = [{**finding.row(), **{name: finding.at(name) for name in varied}} for finding in findings]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with (out / "audit.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    marks = [
        {
            "environment": curve.environment,
            "reward": curve.rewards.trained or "reward=1",
            "true_reward": curve.true,
            "runs": curve.runs,
            "axis": curve.axis,
            **curve.at,
            "before": mark[0],
            "after": mark[1],
        }
        for curve in curves(findings)
        if (mark := curve.transition) is not None
    ]
    found = {"transitions": marks, "protocol": protocol, "rows": [_finite(row) for row in rows]}
    (out / "audit.json").write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no nan."""
    return {key: None if isinstance(value, float) and not np.isfinite(value) else value for key, value in row.items()}


def _show(findings: Sequence[Finding]) -> None:
    table = Table(title="trained and true")
    true = list(dict.fromkeys(name for finding in findings for name in finding.true))
    shown = ["steps", "parameters", "trained", *true, "pearson_step", "pearson_game", "js_mean", "hellinger_mean"]
    rows = [finding.row() for finding in findings]
    shown = [name for name in shown if any(name in row for row in rows)]
    for name in ("run", "reward", *shown):
        table.add_column(name.replace("_", " "), justify="left" if name in ("run", "reward") else "right")
    for row in rows:
        known = [row.get(name, "") for name in shown]  # not every run was judged by as many rewards
        cells = [f"{v:,}" if isinstance(v, int) else f"{v:.3f}" if isinstance(v, float) else v for v in known]
        table.add_row(row["run"], str(row["reward"]), *cells)
    stdout.print(table)
