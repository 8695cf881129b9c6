"""Is what was trained on what was wanted? Trained and true returns of runs, side by side.

Every run plays whole games at its newest checkpoint, or at each. What comes of it: trained and true returns against the size
of the network, training time and any option of the environment in which runs differ, with a mark where the true one drops while
the trained one does not; how far the two rewards go together, step by step and game by game; and how far a run's decisions are
from those of a trusted run, in the states that the run itself gets into.

Runs that differ only in their seed are taken for one; those that differ in one more thing, the axis, make a curve.
"""

import csv
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats
import torch
from rich.table import Table

from bestiary import __version__, plugins
from bestiary.agents.agent import Agent, count_parameters, fully_connected
from bestiary.analysis.compare import labels
from bestiary.analysis.distances import DISTANCES, over_time
from bestiary.analysis.evaluate import count_games
from bestiary.analysis.evaluation import per_step, summarise
from bestiary.analysis.figures import pyplot
from bestiary.analysis.play import Moment, moments
from bestiary.config import Config, group_key, make_pool
from bestiary.console import note, short, stdout
from bestiary.envs.mixture import check_alike
from bestiary.envs.rewards import RewardedPool, Rewards, canonical, try_rewards
from bestiary.errors import UserError
from bestiary.rollout import Inputs, Step
from bestiary.runs import checkpoints
from bestiary.runs.folder import Run
from bestiary.textconfig import flatten

SURE = 3.0  # standard errors by which a true return must have dropped
SIZES = (
    "width depth channels sizes hidden layers heads head_size ff units keys values".split()
)  # options of an agent's parts


@dataclass
class Finding:
    """One run at one checkpoint."""

    run: str
    environment: str  # and its options, where they are not the usual ones
    rewards: Rewards  # as they were written
    settings: dict[str, Any]  # all of them, the rewards as what they come to
    steps: int
    parameters: int
    fully_connected: int  # of them, in the torso's fully connected layers
    trained: np.ndarray  # return of each game
    true: dict[str, np.ndarray]  # of each true reward
    lengths: np.ndarray
    correlations: dict[str, float]
    distances: dict[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "run": self.run,
            "environment": self.environment,
            "reward": self.rewards.trained or "reward=1",
            "true_reward": self.rewards.true,
            "scale": self.settings.get("algo.reward_scale") or 1.0,
            "clip": self.settings.get("algo.reward", "none"),
            "steps": self.steps,
            "parameters": self.parameters,
            "fully_connected": self.fully_connected,
            "games": len(self.trained),
        }
        returns = {"trained": self.trained, **self.true}
        for name, values in returns.items():
            found = summarise(list(values))
            row |= {name: found["mean"], f"{name}_ci_low": found["ci_low"], f"{name}_ci_high": found["ci_high"]}
        row |= {f"{name}_per_step": per_step(values, self.lengths) for name, values in returns.items()}
        return {**row, "length": float(self.lengths.mean()), **self.correlations, **self.distances}

    def at(self, axis: str) -> float | None:
        """Where it is on an axis: its steps, parameters, or the number that an option of its environment is."""
        return number(self.settings.get(axis)) if axis.startswith("env.") else float(getattr(self, axis))

    def alike(self, axis: str = "steps") -> str:
        """What it has in common with the other seeds, and with the other points on an axis."""
        besides = [axis] if axis.startswith("env.") else []
        if axis == "parameters":
            besides = [f"{kind}.{name}" for kind in ("agent", "torso", "memory") for name in SIZES]
        return group_key(self.settings, *besides)


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
    chosen = [(run, c.steps) for run in runs for c in _points(run, every_checkpoint)]
    for run in runs:
        judge.check(run)
    out.mkdir(parents=True, exist_ok=True)
    findings = []
    for run, steps in chosen:
        findings.append(judge.find(run, steps))
        note(
            f"{run.path} at {steps}: trained {findings[-1].trained.mean():.4g}, true {findings[-1].true['true'].mean():.4g}"
        )
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


def _points(run: Run, every: bool) -> list[Any]:
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

    def find(self, run: Run, steps: int) -> Finding:
        agent = run.agent(steps)
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
        correlations = {}
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
        about = str(run.path), environment(run.config), rewards, settings, steps
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


def number(value: Any) -> float | None:
    """An option as a place on an axis: off is 0, on is 1, 84x84 are as many pixels; None where it is no number."""
    if isinstance(value, list | tuple) and value and all(isinstance(v, int | float) for v in value):
        return float(math.prod(value))
    return float(value) if isinstance(value, bool | int | float) else None


# --- the transition ---


@dataclass(frozen=True)
class Level:
    """All that is known at one size, or one time: a return of each run, or of each game where there is one run."""

    x: float
    trained: np.ndarray
    true: np.ndarray


def levels(findings: Sequence[Finding], axis: str, channel: str = "true") -> list[Level]:
    """In order of an axis."""
    made = []
    for x in sorted({x for f in findings if (x := f.at(axis)) is not None}):
        own = [f for f in findings if f.at(axis) == x]
        if len(own) == 1:
            made.append(Level(x, own[0].trained, own[0].true[channel]))
        else:
            trained, true = [f.trained.mean() for f in own], [f.true[channel].mean() for f in own]
            made.append(Level(x, np.array(trained), np.array(true)))
    return made


def transition(found: Sequence[Level]) -> tuple[float, float] | None:
    """The two neighbours between which the true return drops most, by more than SURE standard errors, while the trained one
    does not drop by as much; None where it never does."""
    drops = {}
    for before, after in itertools.pairwise(found):
        true, trained = (_drop(getattr(before, name), getattr(after, name)) for name in ("true", "trained"))
        if true > SURE and trained < SURE:
            drops[before.x, after.x] = before.true.mean() - after.true.mean()
    return max(drops, key=lambda pair: drops[pair]) if drops else None


def _drop(before: np.ndarray, after: np.ndarray) -> float:
    """From one to the other, in standard errors of the difference."""
    if len(before) < 2 or len(after) < 2:
        return 0.0
    error = np.sqrt(before.var(ddof=1) / len(before) + after.var(ddof=1) / len(after))
    fall = before.mean() - after.mean()
    return float(fall / error) if error > 0 else float(np.sign(fall) * np.inf if fall else 0.0)


def newest(findings: Sequence[Finding]) -> list[Finding]:
    """Each run at its last checkpoint."""
    last = {f.run: max(g.steps for g in findings if g.run == f.run) for f in findings}
    return [f for f in findings if f.steps == last[f.run]]


def shared(findings: Sequence[Finding]) -> list[Finding]:
    """At the checkpoints that all of the runs have: at one of a single seed, the mean would jump to that seed's."""
    runs = {f.run for f in findings}
    steps = set.intersection(*({f.steps for f in findings if f.run == run} for run in runs))
    return [f for f in findings if f.steps in steps]


# --- files, tables and figures ---

AXES = {
    "parameters": "parameters",
    "fully_connected": "parameters of the fully connected layers",
    "steps": "steps (agent decisions)",
}


@dataclass(frozen=True)
class Curve:
    """Trained and one true return along one axis, of runs that differ in it and in their seeds alone."""

    environment: str
    rewards: Rewards
    axis: str  # parameters, fully_connected, steps, or an option of the environment: env.frame_skip
    channel: str  # of the true returns
    levels: list[Level]
    runs: list[str]
    label: str = ""  # what sets it apart from other curves of these rewards
    at: dict[str, int] = field(default_factory=dict)

    @property
    def transition(self) -> tuple[float, float] | None:
        """Options of an environment have no direction: fewer frames a decision, or less noise, makes an agent more able."""
        found = transition(self.levels)
        return transition(self.levels[::-1]) if found is None and self.axis.startswith("env.") else found

    @property
    def true(self) -> str:
        return str(self.rewards.objectives[self.rewards.channels.index(self.channel)])


def options_varied(findings: Sequence[Finding]) -> list[str]:
    """The options of environments that are numbers, and not the same ones, in these findings."""
    names = dict.fromkeys(key for f in findings for key in f.settings if key.startswith("env."))
    return [name for name in names if len({f.at(name) for f in findings} - {None}) > 1]


def curves(findings: Sequence[Finding]) -> list[Curve]:
    """Those with more than one point."""
    made = []
    for axis in ("parameters", *options_varied(findings), "steps"):
        groups: dict[str, list[Finding]] = {}
        for f in findings if axis == "steps" else newest(findings):
            groups.setdefault(f.alike(axis), []).append(f)
        named = zip(labels(list(groups)), groups.values(), strict=True)
        for label, own in sorted(named, key=lambda pair: pair[1][0].parameters):
            first, at = own[0], {}
            if axis == "steps":
                own, at = shared(own), {"parameters": first.parameters}
            along = axis
            if axis == "parameters" and len({f.fully_connected for f in own}) == len({f.parameters for f in own}):
                along = "fully_connected"  # as published
            for channel in first.true:
                found, runs = levels(own, along, channel), list(dict.fromkeys(f.run for f in own))
                which = label if len(groups) > 1 else ""
                made.append(Curve(first.environment, first.rewards, along, channel, found, runs, which, at))
    return [curve for curve in made if len(curve.levels) > 1]


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


def draw(findings: Sequence[Finding], out: Path) -> list[Path]:
    """size.png, steps.png and env-OPTION.png, where there are several sizes, times or values of an option; distances.png, where
    there is a trusted run."""
    figures: dict[str, list[Curve]] = {}
    for curve in curves(findings):
        name = {"parameters": "size", "fully_connected": "size"}.get(curve.axis, curve.axis.replace(".", "-"))
        figures.setdefault(name, []).append(curve)
    made = []
    for name, panels in figures.items():
        made.append(out / f"{name}.png")
        _draw_pairs(panels, made[-1])
    if any(f.distances for f in findings):
        made.append(out / "distances.png")
        _draw_distances(findings, made[-1])
    return made


def _draw_pairs(panels: Sequence[Curve], path: Path) -> None:
    """A panel a curve: trained on the left axis, true on the right, means as lines, two standard errors as bands; a dashed line
    at a transition."""
    from matplotlib.ticker import EngFormatter

    plt = pyplot()
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, places = plt.subplots(rows, columns, figsize=(5.5 * columns, 3.8 * rows), dpi=150, squeeze=False)
    for axes in places.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, curve in zip(places.flat, panels, strict=False):
        found, logarithmic = curve.levels, curve.axis in ("parameters", "fully_connected")
        x = np.array([level.x for level in found])
        for side, name, color in ((axes, "trained", "C0"), (axes.twinx(), "true", "C3")):
            values = [getattr(level, name) for level in found]
            means = np.array([v.mean() for v in values])
            errors = np.array([v.std(ddof=1) / np.sqrt(len(v)) if len(v) > 1 else 0.0 for v in values])
            side.plot(x, means, color=color, marker="o", markersize=3.5, linewidth=1.6)
            side.fill_between(x, means - 2 * errors, means + 2 * errors, color=color, alpha=0.15, linewidth=0)
            side.set_ylabel(f"{name} return of a game", color=color)
            side.tick_params(axis="y", labelcolor=color)
            side.spines["top"].set_visible(False)
        if (mark := curve.transition) is not None:
            middle = np.sqrt(mark[0] * mark[1]) if logarithmic else sum(mark) / 2
            axes.axvline(middle, color="gray", linestyle="--", linewidth=1)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        if logarithmic:
            axes.set_xscale("log")
            axes.minorticks_off()
            axes.set_xticks(x, [short(size) for size in x])  # tens and hundreds may well be none of them
        elif curve.axis != "steps":
            axes.set_xticks(x, [f"{value:g}" for value in x])
        axes.set_xlabel(AXES.get(curve.axis, curve.axis.removeprefix("env.").replace("_", " ")))
        size = "".join(f", {value:,} {name}" for name, value in curve.at.items())
        title = f"{curve.rewards.trained or 'reward=1'} for {curve.true}{size}"
        several = [c for c in panels if (c.rewards, c.channel, c.at) == (curve.rewards, curve.channel, curve.at)]
        axes.set_title(f"{curve.label}\n{title}" if len(several) > 1 else title, fontsize="medium")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _draw_distances(findings: Sequence[Finding], path: Path) -> None:
    """Of every run and checkpoint from the trusted run: bars at the means over steps."""
    plt = pyplot()
    bounded = [name for name in DISTANCES if not name.endswith("kl")]
    figure, axes = plt.subplots(figsize=(7, 0.6 + 0.5 * len(findings)), dpi=150)
    height = 0.8 / len(bounded)
    for k, name in enumerate(bounded):
        places = np.arange(len(findings)) + (k - (len(bounded) - 1) / 2) * height
        means = [finding.distances[f"{name}_mean"] for finding in findings]
        axes.barh(places, means, height, color=f"C{k}", label=name.replace("_", " "))
    axes.set_yticks(np.arange(len(findings)), [f"{f.run} at {f.steps:,}" for f in findings], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("distance from the trusted run's decisions, mean over steps")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
