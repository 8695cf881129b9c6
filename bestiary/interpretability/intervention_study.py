"""Erase and move objects in many games and compare the effect with saliency (`bestiary look interventions`).

Saliency maps are exploratory. This tool tests them (Atrey et al. 2020): it erases or moves each object that the agent
observes, and measures how policy and value change. It reports the mean effect with an interval over games, and the rank
correlation of the effect with the saliency at the same place.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from bestiary.agents.agent import Agent
from bestiary.evaluation.figure_helpers import check_figure_path, import_pyplot, save_figure
from bestiary.evaluation.media import check_output
from bestiary.evaluation.statistics import MEAN_INTERVAL_METHODS, Interval, mean_interval
from bestiary.interpretability.interventions import Effect, measure_effects, with_observation
from bestiary.interpretability.observed_objects import (
    erase_object,
    find_objects,
    median_background,
    move_object,
)
from bestiary.interpretability.saliency import Saliency, SaliencyOptions, interpolate_grid
from bestiary.interpretability.sampled_steps import SampledStep, Samples, SamplingOptions, play_and_sample
from bestiary.rollout import Inputs
from bestiary.runs import checkpoints
from bestiary.runs.run import Run
from bestiary.utils.console import note, plain, progress_bar, stdout
from bestiary.utils.errors import UserError

ROWS_END = "-rows"  # end of the name of the CSV file with all measurements
DETECTIONS = ("labels", "changes", "items")
KINDS = ("erase", "move")
SALIENCY_GRID = 4.0  # distance between neighbouring saliency patches, in pixels of an image of 84x84
SHIFT_SHARE = 1 / 8  # an object is moved by this share of the image height or width
ALL = "all objects"  # name of the summaries over all objects
INTERVAL_CAPTION = f"means over n games, and 95 % intervals of these means ({MEAN_INTERVAL_METHODS})"


@dataclass(frozen=True)
class Measurement:
    """The effect of one change of one object at one step."""

    game: int  # index of the game
    step: int  # step within the game
    name: str  # name of the object
    kind: str  # erase or move
    effect: Effect
    action: int  # index of the action that was taken
    policy_saliency: float  # mean saliency of the policy over the pixels or entries of the object
    value_saliency: float  # mean saliency of the value


@dataclass(frozen=True)
class Summary:
    """The mean of a quantity over games, for one object and one kind of change.

    Each game has one value: the mean over its measurements, or the rank correlation of its measurements.
    """

    name: str  # name of the object, or ALL
    kind: str  # erase or move
    quantity: str  # a key of QUANTITIES or CORRELATIONS
    mean: float
    interval: Interval
    games: int  # number of games with a value
    measurements: int  # number of measurements in all games


def study_interventions(
    run: Run,
    *,
    checkpoint: int | None = None,
    env: str | None = None,
    sampling: SamplingOptions = SamplingOptions(),
    objects: str = "auto",
    out: str | Path | None = None,
    overwrite: bool = False,
) -> list[Summary]:
    """Measure the effect of erasing and moving objects, print a table, and write CSV files and a figure."""
    path = check_figure_path(out, overwrite) if out is not None else None
    if path is not None:
        check_output(_rows_path(path), overwrite, (".csv",), "tables")
    chosen = checkpoints.choose(run.path, checkpoint)
    agent = run.agent(chosen)
    how = choose_detection(run, objects, env)
    samples = play_and_sample(run, [agent], sampling, env)
    measurements = measure_objects(agent, samples, how, sampling.seed)
    if not measurements:
        advice = "try --objects changes or more --episodes" if how == "labels" else "try more --episodes"
        raise UserError(f"{run.path}: no objects were found with --objects {how}; {advice}")
    summaries = summarise_measurements(measurements)
    if path is None:
        path = run.new_output_path("interpretability", f"interventions-{chosen.steps:012d}", ".png", ROWS_END)
    title = f"{run.name}: {len({m.game for m in measurements})} games, {len(samples.steps)} steps, objects: {how}"
    draw_figure(measurements, summaries, path, title)
    rows_path = _rows_path(path)
    _write_summaries(summaries, path.with_suffix(".csv"), run.name, chosen.steps, how, sampling)
    _write_measurements(measurements, rows_path)
    _print_table(summaries, title)
    note(f"written: {path}, {path.with_suffix('.csv').name} and {rows_path.name}")
    return summaries


def _rows_path(path: Path) -> Path:
    """Return the path of the CSV file with all measurements."""
    return path.with_name(f"{path.stem}{ROWS_END}.csv")


def choose_detection(run: Run, objects: str, env: str | None = None) -> str:
    """Return how objects are found, one of DETECTIONS.

    `objects` is the value of --objects: one of DETECTIONS, or "auto". Raise UserError if this value is not available
    for the environment.
    """
    config = run.config
    interface = config.interface
    name = config.envs[config.task_index(env)]
    if "image" not in interface.observation_spec:
        has_items = any(label.group == "item positions" for label in interface.labels.values())
        if not has_items or objects not in ("auto", "items"):
            raise UserError(
                f"--objects {objects}: the agent of {run.path} observes {', '.join(interface.observation_spec)} and no "
                f"images; {'choose --objects items' if has_items else 'objects can be found only in images'}"
            )
        return "items"
    from bestiary.envs.ram_labels import OBJECTS

    has_labels = name.removeprefix("atari/") in OBJECTS
    if objects == "items" or (objects == "labels" and not has_labels):
        available = "labels or changes" if has_labels else "changes"
        raise UserError(f"--objects {objects}: not available for {name}; choose --objects {available}")
    if objects != "auto":
        return objects
    return "labels" if has_labels else "changes"


def measure_objects(agent: Agent, samples: Samples, how: str, seed: int = 0) -> list[Measurement]:
    """Erase and move each object at all steps, and return the effects.

    `how` says how objects are found: one of DETECTIONS. The places to which objects are moved are drawn with `seed`.
    """
    rng = np.random.default_rng(seed)
    measurements: list[Measurement] = []
    if how == "items":
        for step in progress_bar(samples.steps, "interventions", len(samples.steps)):
            measurements += _measure_items(agent, step, samples, rng)
        return measurements
    background = median_background(samples)
    spec = samples.interface.observation_spec
    saliency = Saliency(agent, spec, SaliencyOptions(default_density=SALIENCY_GRID))
    for step in progress_bar(samples.steps, "interventions", len(samples.steps)):
        measurements += _measure_image(agent, step, background, saliency, how, rng)
    return measurements


def _measure_image(
    agent: Agent, step: SampledStep, background: np.ndarray, saliency: Saliency, how: str, rng: np.random.Generator
) -> list[Measurement]:
    image = step.inputs.observation["image"][0, 0].numpy()
    found = find_objects(step, image, background, how)
    if not found:
        return []
    size = image.shape[1:]
    changed: list[Inputs] = []
    for one in found:
        rows, columns = (max(1, round(edge * SHIFT_SHARE)) for edge in size)
        shifts = [(-rows, 0), (rows, 0), (0, -columns), (0, columns)]
        shift = shifts[int(rng.integers(len(shifts)))]
        edits = [erase_object(image, one.mask, background), move_object(image, one.mask, background, shift)]
        changed += [with_observation(step.inputs, "image", edited) for edited in edits]
    effects = measure_effects(agent, step.inputs, changed, step.states[0])
    maps = saliency(step.inputs, step.states[0])
    policy, value = (interpolate_grid(scores, saliency.density, size) for scores in (maps.policy, maps.value))
    scores = [(float(policy[one.region].mean()), float(value[one.region].mean())) for one in found]
    return _as_measurements(step, [one.name for one in found], effects, scores)


def _measure_items(agent: Agent, step: SampledStep, samples: Samples, rng: np.random.Generator) -> list[Measurement]:
    """Measure two changes of each item in the observation of a warehouse: erase it, or move it to an empty cell."""
    ((kind, tensor),) = step.inputs.observation.items()
    vector = tensor[0, 0].numpy()
    shelves = range(sum(label.group == "item positions" for label in samples.interface.labels.values()))
    first = len(vector) - len(shelves)  # the last entries are those of the shelf cells
    occupied = [k for k in shelves if vector[first + k] > 0]
    empty = [k for k in shelves if vector[first + k] == 0]
    if not occupied or not empty:
        return []
    policy, value = gradient_saliency(agent, step, kind)
    changed, names, scores = list[Inputs](), list[str](), list[tuple[float, float]]()
    for k in occupied:
        erased = vector.copy()
        erased[first + k] = 0
        moved = erased.copy()
        moved[first + empty[int(rng.integers(len(empty)))]] = vector[first + k]
        changed += [with_observation(step.inputs, kind, one) for one in (erased, moved)]
        names.append(f"item of age {step.labels[f'age_{k}']:g}")
        scores.append((float(policy[first + k]), float(value[first + k])))
    effects = measure_effects(agent, step.inputs, changed, step.states[0])
    return _as_measurements(step, names, effects, scores)


def gradient_saliency(agent: Agent, step: SampledStep, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the saliency of the policy and of the value for each entry of a vector observation, both [D].

    Both estimate the effect of setting the entry x to zero. To first order, this changes an output y of the agent by
    the gradient times the input, x dy/dx. The saliency of the policy is half the sum of the squared changes of the
    logits. The saliency of the value is half the squared change of the value.
    """
    vector = step.inputs.observation[kind].clone().requires_grad_(True)
    inputs = Inputs(
        {**step.inputs.observation, kind: vector},
        step.inputs.reward,
        step.inputs.done,
        step.inputs.last_action,
        step.inputs.task,
    )
    with torch.enable_grad():
        output, _ = agent(inputs, step.states[0])
        outputs = [*output.distribution.logits[0, 0], output.value[0, 0]]
        gradients = [torch.autograd.grad(y, vector, retain_graph=True)[0][0, 0] for y in outputs]
    products = (torch.stack(gradients) * vector.detach()[0, 0]).square().numpy() / 2  # [A+1,D]
    return products[:-1].sum(axis=0), products[-1]


def _as_measurements(
    step: SampledStep, names: Sequence[str], effects: Sequence[Effect], scores: Sequence[tuple[float, float]]
) -> list[Measurement]:
    """Return measurements; `effects` has two entries for each name, in the order of KINDS."""
    return [
        Measurement(step.game, step.step, name, kind, effects[len(KINDS) * k + j], step.action, *scores[k])
        for k, name in enumerate(names)
        for j, kind in enumerate(KINDS)
    ]


# --- statistics ---

QUANTITIES = {
    "kl": lambda m: m.effect.kl,
    "chosen_probability_change": lambda m: m.effect.probability_change(m.action),
    "value_change": lambda m: m.effect.value_change,
    "absolute_value_change": lambda m: abs(m.effect.value_change),
}
CORRELATIONS = {
    "policy_rank_correlation": lambda m: (m.policy_saliency, m.effect.policy_score),
    "value_rank_correlation": lambda m: (m.value_saliency, m.effect.value_score),
}
# A rank correlation uses only games with at least this number of pairs (saliency, effect), one per measurement.
MIN_PAIRS = 5


def summarise_measurements(measurements: Sequence[Measurement]) -> list[Summary]:
    """Return the mean effects of each object and kind of change, and the rank correlations with saliency.

    See `Summary` for the value of each game. Games with fewer than MIN_PAIRS measurements have no rank correlation.
    """
    summaries = []
    # Shorter names come first, so that "item of age 9" is before "item of age 10".
    names = [*sorted({m.name for m in measurements}, key=lambda name: (len(name), name)), ALL]
    for kind in KINDS:
        for name in names if len(names) > 2 else names[:1]:
            own = [m for m in measurements if m.kind == kind and name in (m.name, ALL)]
            by_game: dict[int, list[Measurement]] = {}
            for m in own:
                by_game.setdefault(m.game, []).append(m)
            for quantity, read in QUANTITIES.items():
                values = [float(np.mean([read(m) for m in group])) for group in by_game.values()]
                summaries.append(_summary(name, kind, quantity, values, len(own)))
            for quantity, pair in CORRELATIONS.items():
                values = []
                for group in by_game.values():
                    correlation = rank_correlation(*np.array([pair(m) for m in group]).T)
                    if len(group) >= MIN_PAIRS and np.isfinite(correlation):
                        values.append(correlation)
                if values:
                    summary = _summary(name, kind, quantity, values, len(own))
                    summaries.append(replace(summary, interval=_clipped(summary.interval)))
    return summaries


def _summary(name: str, kind: str, quantity: str, values: list[float], measurements: int) -> Summary:
    return Summary(name, kind, quantity, float(np.mean(values)), mean_interval(values), len(values), measurements)


def _clipped(interval: Interval) -> Interval:
    """Limit the interval of a mean correlation to [-1, 1]. An interval with Student's t may exceed this range."""
    if interval.low is None or interval.high is None:
        return interval
    return replace(interval, low=max(-1.0, interval.low), high=min(1.0, interval.high))


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Return Spearman's rank correlation of two samples; equal values share their mean rank.

    If a sample is constant, return NaN.
    """
    from scipy.stats import rankdata  # here, because the import takes a second

    a, b = rankdata(x), rankdata(y)
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


# --- output ---


def _write_summaries(
    summaries: Sequence[Summary], path: Path, run: str, checkpoint: int, how: str, sampling: SamplingOptions
) -> None:
    columns = (
        "run checkpoint object change quantity mean ci_low ci_high interval games measurements detection policy "
        "seed".split()
    )
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for s in summaries:
            limits = ["" if x is None else f"{x:.6g}" for x in (s.interval.low, s.interval.high)]
            writer.writerow(
                [
                    *(run, checkpoint, s.name, s.kind, s.quantity, f"{s.mean:.6g}", *limits, s.interval.method),
                    *(s.games, s.measurements, how, "greedy" if sampling.greedy else "sampled", sampling.seed),
                ]
            )


def _write_measurements(measurements: Sequence[Measurement], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        names = (
            "kl chosen_probability_change value_change policy_score value_score policy_saliency value_saliency".split()
        )
        writer.writerow(["game", "step", "object", "change", *names])
        for m in measurements:
            e = m.effect
            numbers = (e.kl, e.probability_change(m.action), e.value_change, e.policy_score, e.value_score)
            cells = [f"{x:.6g}" for x in (*numbers, m.policy_saliency, m.value_saliency)]
            writer.writerow([m.game, m.step, m.name, m.kind, *cells])


def _print_table(summaries: Sequence[Summary], title: str) -> None:
    columns = {
        "kl": "KL",
        "chosen_probability_change": "change of P(action)",
        "value_change": "change of value",
        "policy_rank_correlation": "rank corr., policy",
        "value_rank_correlation": "rank corr., value",
    }
    table = Table(title=plain(title), caption=INTERVAL_CAPTION, caption_justify="left")
    table.add_column("object")
    table.add_column("change")
    for column in columns.values():
        table.add_column(column, justify="right")
    for name, kind in dict.fromkeys((s.name, s.kind) for s in summaries):
        cells = {s.quantity: s for s in summaries if (s.name, s.kind) == (name, kind)}
        table.add_row(plain(name), kind, *(plain(_format(cells[q])) if q in cells else "" for q in columns))
    stdout.print(table)


def _format(summary: Summary) -> str:
    if summary.interval.low is None or summary.interval.high is None:
        return f"{summary.mean:.3f}"
    return f"{summary.mean:.3f} [{summary.interval.low:.3f}, {summary.interval.high:.3f}]"


def draw_figure(measurements: Sequence[Measurement], summaries: Sequence[Summary], path: Path, title: str) -> None:
    """Draw the mean KL divergence and value change of each object, and the effect of erasing against the saliency."""
    plt = import_pyplot()
    figure, (kl_axes, value_axes, scatter) = plt.subplots(1, 3, figsize=(13, 3.9), dpi=150)
    for axes, quantity, label in (
        (kl_axes, "kl", "KL divergence of the policies, nats"),
        (value_axes, "value_change", "change of the value"),
    ):
        _draw_means(axes, [s for s in summaries if s.quantity == quantity], label)
    erased = [m for m in measurements if m.kind == "erase"]
    names = sorted({m.name for m in erased}, key=lambda name: (len(name), name))
    for k, name in enumerate(names):
        points = np.array([(m.policy_saliency, m.effect.policy_score) for m in erased if m.name == name])
        floor = 1e-6  # smaller values, for example zero, are drawn at this value, because the axes are logarithmic
        colour = plt.get_cmap("viridis")(0.85 * k / max(1, len(names) - 1))
        scatter.plot(*np.maximum(points, floor).T, ".", markersize=2.5, alpha=0.5, label=name, color=colour)
    scatter.set_xscale("log")
    scatter.set_yscale("log")
    for axis in (scatter.xaxis, scatter.yaxis):
        # The default labels of logarithmic axes are formulas, which are turned off in all figures.
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    scatter.set_xlabel("policy saliency of the object (mean)", fontsize="small")
    scatter.set_ylabel("measured effect of erasing it", fontsize="small")
    correlation = [s for s in summaries if s.quantity == "policy_rank_correlation" and s.kind == "erase"]
    if correlation:
        scatter.set_title(f"rank correlation {_format(correlation[-1])}", fontsize="small")
    legend = scatter.legend(frameon=False, fontsize="x-small", markerscale=3)
    for handle in legend.legend_handles:
        handle.set_alpha(1)
    for axes in (kl_axes, value_axes, scatter):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize="x-small")
    figure.suptitle(title, fontsize="medium")
    save_figure(plt, figure, path, caption=f"Bars and black lines: {INTERVAL_CAPTION}.")


def _draw_means(axes: Any, summaries: Sequence[Summary], label: str) -> None:
    names = list(dict.fromkeys(s.name for s in summaries))
    colours = {"erase": "#0072B2", "move": "#E69F00"}
    for j, kind in enumerate(KINDS):
        own = [s for s in summaries if s.kind == kind]
        y = [names.index(s.name) + (j - 0.5) * 0.36 for s in own]
        axes.barh(y, [s.mean for s in own], 0.34, color=colours[kind], label=kind)
        for s, position in zip(own, y, strict=True):
            if s.interval.low is not None:
                axes.plot([s.interval.low, s.interval.high], [position] * 2, color="black", linewidth=0.9)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(0, color="gray", linewidth=0.6)
    axes.set_xlabel(label, fontsize="small")
    axes.legend(frameon=False, fontsize="x-small")
