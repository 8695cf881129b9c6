"""Compare the convolutions of agents (`bestiary look filters`) and write a figure and a CSV file.

Two checkpoints are compared layer by layer, with two measures of similarity:

    distance   squared differences of the weights: their sum, their mean per kernel and their mean per weight. Only the
               mean per weight is comparable between layers with different kernel sizes. The distance is computed only
               if the layer has the same shape in both checkpoints.
    CKA        linear centred kernel alignment of the layers' outputs on the same frames (Kornblith et al. 2019). CKA
               does not depend on the order of the channels, so it is the more reliable measure. The agents must have
               the same observations.

With `--between runs`, each run is compared with the first run. A pair consists of two checkpoints, one of each run, at
about the same fraction of training. With `--between time`, each checkpoint is compared with the next checkpoint of the
same run.
"""

import csv
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from bestiary.evaluation.figure_helpers import check_figure_path, format_axes, import_pyplot
from bestiary.evaluation.playback import Playback, open_viewer
from bestiary.interpretability import layer_similarity
from bestiary.interpretability.layer_similarity import (
    can_match,
    convolution_weights,
    kernel_distance,
    linear_cka,
)
from bestiary.rollout import Inputs
from bestiary.runs import checkpoints
from bestiary.runs.checkpoints import Checkpoint
from bestiary.runs.run import Run, load_weights, run_labels
from bestiary.training.factory import make_untrained_agent
from bestiary.utils.console import format_count, note, progress_bar, warn
from bestiary.utils.errors import UserError

MEASURES = ("sum", "per_kernel", "per_weight", "cka")  # columns of the CSV file with the distances and the CKA
CheckpointPair = tuple[Checkpoint, Checkpoint]


@dataclass
class LayerComparison:
    """The comparison of one layer between two checkpoints. Distances are squared differences of the weights."""

    pair: str  # label of the two runs; with `--between time`, label of the only run
    layer: str
    point: int  # index of the pair of checkpoints, in the order of training; 0 is the first pair
    steps: tuple[int, int]  # step counts of the two checkpoints
    kernels: int  # number of kernels of the layer
    # The next three are distances. They are None if the shapes of the layers differ, or if the layer has too many
    # kernels for the matching "optimal".
    sum: float | None
    per_kernel: float | None
    per_weight: float | None
    cka: float | None  # None if CKA was not computed, or if the agents have different observations


def compare_filters(
    runs: Sequence[Run],
    *,
    out: str | Path | None = None,
    points: int = 10,
    match: str = "index",
    between: str = "runs",
    frames: int = 256,
    seed: int = 0,
    overwrite: bool = False,
) -> list[LayerComparison]:
    """Compare the convolutions of checkpoints, and write a figure and a CSV file.

    Args:
        points: maximum number of checkpoints of each run.
        match: how kernels are paired (see `kernel_distance`).
        between: "runs" compares each run with the first run; "time" compares each checkpoint with the next checkpoint
            of the same run.
        frames: number of observations on which CKA is computed. They come from games played by the agent of the first
            run. 0 means no CKA.
        seed: seed of the games that are played for CKA.
    """
    path = check_figure_path(out, overwrite) if out is not None else None
    if between == "runs" and len(runs) < 2:
        raise UserError("--between runs: needs at least two runs; to compare a run with itself, use --between time")
    chosen = [evenly_spaced_checkpoints(run, points) for run in runs]
    pairs = _make_pairs(runs, chosen, between)
    for run, own in zip(runs, chosen, strict=True):
        if not convolution_weights(own[-1].load_model()):
            raise UserError(f"{run.path}: the agent has no convolutions; try bestiary look actions")
    features = LayerFeatures(runs) if frames else None
    notes: list[str] = []
    for label, own_pairs in pairs:
        notes += _check_comparable(label, *own_pairs[0], match, features)
    for text in dict.fromkeys(notes):
        note(f"note: {text}")
    if between == "runs":
        _warn_about_equal_initial_weights(runs)
    if features is not None:
        features.play(runs[0], frames, seed)
    rows = []
    jobs = [(label, k, pair) for label, own_pairs in pairs for k, pair in enumerate(own_pairs)]
    for label, k, (first, second) in progress_bar(jobs, "filters", len(jobs)):
        rows += _compare_layers(label, k, first, second, match, features)
    if path is None:
        _, second = pairs[0][1][0]
        path = runs[0].new_output_path("interpretability", f"filters-{between}-{match}-{second.steps:012d}", ".png")
    _write_csv(rows, path.with_suffix(".csv"), match, frames, seed)
    plt = import_pyplot()
    figure = _draw_figure(plt, rows, match, between)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
    note(f"written: {path} and {path.with_suffix('.csv').name}")
    return rows


# --- choice of the pairs of checkpoints ---


def evenly_spaced_checkpoints(run: Run, points: int) -> list[Checkpoint]:
    """Return at most `points` checkpoints of a run, about evenly spaced in steps, from the oldest to the newest.

    The newest checkpoint is always included. The oldest checkpoint is included if `points` is at least 2.
    """
    available = run.checkpoints
    if not available:
        raise UserError(f"{run.path} has no checkpoint yet")
    targets = np.linspace(available[-1].steps, available[0].steps, min(points, len(available)))
    nearest = {min((c.steps for c in available), key=lambda steps: abs(steps - target)) for target in targets}
    return [checkpoints.choose(run.path, steps) for steps in sorted(nearest)]


def _make_pairs(
    runs: Sequence[Run], chosen: list[list[Checkpoint]], between: str
) -> list[tuple[str, list[CheckpointPair]]]:
    """Return a list of (label, pairs of checkpoints to compare).

    The list has one entry per pair of runs or, if `between` is "time", one entry per run.
    """
    labels = run_labels(runs)
    if between == "time":
        for run, own in zip(runs, chosen, strict=True):
            if len(own) < 2:
                raise UserError(
                    f"{run.path} has only one checkpoint, so it cannot be compared over time; "
                    "train with --save-every to keep more checkpoints"
                )
        return [(label, list(itertools.pairwise(own))) for label, own in zip(labels, chosen, strict=True)]
    return [
        (
            f"{labels[0]} and {label}",
            [(first, checkpoints.choose(run.path, steps)) for first, steps in _pair_by_fraction(chosen[0], run)],
        )
        for label, run in zip(labels[1:], runs[1:], strict=True)
    ]


def _pair_by_fraction(chosen: list[Checkpoint], run: Run) -> list[tuple[Checkpoint, int]]:
    """Pair checkpoints of two runs that are at about the same fraction of training.

    `chosen` are checkpoints of one run; `run` is the other run. Each chosen checkpoint is paired with the checkpoint of
    `run` whose fraction of training is nearest. No checkpoint of `run` is paired twice: if it is the nearest for
    several chosen checkpoints, only the nearest of these is paired. Return (chosen checkpoint, step count of the
    checkpoint of `run`) for each pair.
    """
    available = [checkpoint.steps for checkpoint in run.checkpoints]
    pairs: dict[int, tuple[float, Checkpoint]] = {}
    for first in chosen:
        fraction = first.steps / max(1, chosen[-1].steps)
        gap, steps = min((abs(own / max(1, available[-1]) - fraction), own) for own in available)
        if steps not in pairs or gap < pairs[steps][0]:
            pairs[steps] = (gap, first)
    return [(first, steps) for steps, (_, first) in pairs.items()]


# --- comparison ---


def _check_comparable(
    label: str, first: Checkpoint, second: Checkpoint, match: str, features: "LayerFeatures | None"
) -> list[str]:
    """Return notes for the user about layers whose distance between two checkpoints cannot be computed.

    Raise UserError if no layer can be compared, neither by distance nor by CKA.
    """
    left, right = convolution_weights(first.load_model()), convolution_weights(second.load_model())
    shapes = {
        layer: ["x".join(map(str, model[layer].shape)) if layer in model else "missing" for model in (left, right)]
        for layer in dict.fromkeys([*left, *right])
    }
    different = [layer for layer, (one, other) in shapes.items() if one != other]
    too_large = [layer for layer in shapes if layer not in different and not can_match(left[layer], match)]
    notes = []
    if too_large:
        limit = layer_similarity.MAX_MATCHED_KERNELS
        notes.append(
            f"--match optimal: there is no distance for layers with more than {limit} kernels: "
            f"{_first_of(too_large)}; try --match filters"
        )
    if different:
        both = " and ".join(shapes[different[0]])
        notes.append(f"{label}: there is no distance for layers of different shapes: {_first_of(different)}: {both}")
    has_cka = (
        features is not None and features.supports(first) and features.supports(second) and left.keys() & right.keys()
    )
    if len(different) + len(too_large) == len(shapes) and not has_cka:
        raise UserError(*notes)
    return notes


def _warn_about_equal_initial_weights(runs: Sequence[Run]) -> None:
    """Warn if a run had the same initial convolution weights as the first run: the distance then starts at 0."""
    first, *others = [_initial_weights(run) for run in runs]
    for run, weights in zip(runs[1:], others, strict=True):
        equal = [name for name, w in weights.items() if name in first and torch.equal(w, first[name])]
        own_source, source = run.config.training.init_from, runs[0].config.training.init_from
        if own_source or source:  # after a warm start, the initial weights are those of the source run
            equal = [*first] if own_source == source else []
        if equal:
            warn(
                f"{runs[0].path} and {run.path} had the same initial weights in {_first_of(equal)}, so their distance "
                "starts at 0; published comparisons have different initial weights: train with different --seed, and "
                "not with the same --init-from"
            )


def _initial_weights(run: Run) -> dict[str, Tensor]:
    return convolution_weights(make_untrained_agent(run.config).state_dict())


def _first_of(layers: list[str]) -> str:
    return layers[0] + f" (and {len(layers) - 1} more)" * (len(layers) > 1)


def _compare_layers(
    label: str, point: int, first: Checkpoint, second: Checkpoint, match: str, features: "LayerFeatures | None"
) -> list[LayerComparison]:
    """Return one row for each layer that has a distance or a CKA value."""
    left, right = convolution_weights(first.load_model()), convolution_weights(second.load_model())
    cka = features.cka(first, second) if features is not None else {}
    rows = []
    for layer, weights in left.items():
        kernels = weights.shape[0] * weights.shape[1]
        distances: tuple[float | None, float | None, float | None] = (None, None, None)
        if layer in right and weights.shape == right[layer].shape and can_match(weights, match):
            total = kernel_distance(weights, right[layer], match)
            distances = (total, total / kernels, total / weights.numel())
        elif layer not in cka:
            continue
        steps = (first.steps, second.steps)
        rows.append(LayerComparison(label, layer, point, steps, kernels, *distances, cka.get(layer)))
    return rows


class LayerFeatures:
    """Computes the features (outputs) of all convolutions of a checkpoint on frames from games of the first run."""

    def __init__(self, runs: Sequence[Run]):
        self.agents: dict[Path, Any] = {}  # run folder -> agent, if it has the same observations as the first run
        self.cache: dict[Path, dict[str, Tensor]] = {}  # checkpoint folder -> features; only the last two checkpoints
        spec = None
        for run in runs:
            spec = spec or run.config.interface.observation_spec
            if run.config.interface.observation_spec != spec:
                note(f"note: {run.path} has no CKA, because its observations differ from those of {runs[0].path}")
                continue
            self.agents[run.path.resolve()] = run.config.make_agent()

    def play(self, run: Run, count: int, seed: int) -> None:
        """Play games with a run's agent for `count` steps, and store the agent's inputs of each step."""
        playback = Playback([open_viewer(run, seed=seed)], length=count, single_game=False)
        inputs = [frame.record.inputs for (frame,) in progress_bar(playback, "frames for CKA", count)]
        observation = {kind: torch.cat([i.observation[kind] for i in inputs]) for kind in inputs[0].observation}
        done = torch.cat([i.done for i in inputs])
        # Inputs such as the last action have no common meaning for agents with different tasks, so they are set to 0.
        zeros = torch.zeros(len(inputs), 1)
        self.inputs = Inputs(observation, zeros, done, zeros.long(), zeros.long())

    def supports(self, checkpoint: Checkpoint) -> bool:
        """Return whether the checkpoint's agent has the same observations as the first run."""
        return checkpoint.path.resolve().parent.parent in self.agents

    def cka(self, first: Checkpoint, second: Checkpoint) -> dict[str, float]:
        """Return the CKA of each layer that both agents have.

        The dict is empty if an agent does not have the same observations as the first run.
        """
        left, right = (self._features(checkpoint) for checkpoint in (first, second))
        return {layer: linear_cka(left[layer], right[layer]) for layer in left if layer in right}

    @torch.no_grad()
    def _features(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """Return {layer: outputs [n,p]} of all convolutions: for each of n frames, the p numbers of the feature map.

        The dict is empty if the agent does not have the same observations as the first run.
        """
        if checkpoint.path in self.cache:
            return self.cache[checkpoint.path]
        agent = self.agents.get(checkpoint.path.resolve().parent.parent)
        if agent is None:
            return {}
        load_weights(agent, checkpoint)
        outputs: dict[str, list[Tensor]] = {}
        hooks = []
        for name, module in agent.named_modules():
            if isinstance(module, nn.Conv2d):

                def record(_: nn.Module, __: Any, output: Tensor, name: str = name) -> None:
                    outputs.setdefault(name, []).append(output.flatten(1))

                hooks.append(module.register_forward_hook(record))
        agent(self.inputs, agent.initial_state(1))
        for hook in hooks:
            hook.remove()
        features = {name: torch.cat(chunks) for name, chunks in outputs.items()}
        self.cache = {checkpoint.path: features, **dict(list(self.cache.items())[:1])}
        return features


# --- CSV file and figure ---


def _write_csv(rows: list[LayerComparison], path: Path, match: str, frames: int, seed: int) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["pair", "layer", "point", "steps", "other_steps", "kernels", "match", *MEASURES, "frames", "seed"]
        )
        for r in rows:
            numbers = ["" if x is None else f"{x:.6g}" for x in (getattr(r, name) for name in MEASURES)]
            writer.writerow([r.pair, r.layer, r.point, *r.steps, r.kernels, match, *numbers, frames, seed])


def _draw_figure(plt: Any, rows: list[LayerComparison], match: str, between: str) -> Any:
    """Draw one column of panels for each run or pair of runs.

    The panels of a column show distances as lines, distances as a heat map, and CKA as lines. Deeper layers have darker
    lines.
    """
    pairs = list(dict.fromkeys(row.pair for row in rows))
    layers = list(dict.fromkeys(row.layer for row in rows))
    distances = [row.per_weight for row in rows if row.per_weight is not None]
    cka = [row.cka for row in rows if row.cka is not None]
    panels = [*(["per_weight", "heat map"] if distances else []), *(["cka"] if cka else [])]
    limits = {
        "per_weight": (0, 1.1 * max(distances, default=0) or 1.0),
        "cka": (1.02 * float(np.nanmin([0, *cka])), 1.02),
    }
    size = (4.6 * len(pairs) + 1.2, 3 * len(panels))
    figure, grid = plt.subplots(len(panels), len(pairs), figsize=size, dpi=150, squeeze=False)
    colors = plt.get_cmap("Blues")(np.linspace(0.35, 1, len(layers)))
    for column, pair in enumerate(pairs):
        by_layer = {layer: [row for row in rows if (row.pair, row.layer) == (pair, layer)] for layer in layers}
        by_layer = {layer: own for layer, own in by_layer.items() if own}
        x_label = "steps" if between == "time" else f"steps of {pair.rsplit(' and ', 1)[-1]}"
        for position, panel in enumerate(panels):
            axes = grid[position][column]
            if panel == "heat map":
                _draw_heat_map(figure, axes, by_layer, limits["per_weight"][1])
                axes.set_xlabel(x_label)
                continue
            for layer, color in zip(layers, colors, strict=True):
                own = by_layer.get(layer, [])
                x = [row.steps[1] for row in own]
                y = [_or_nan(getattr(row, panel)) for row in own]
                axes.plot(x, y, color=color, label=short_layer_name(layer), marker="o" if len(x) == 1 else None)
            title = f"{pair}{', over time' if between == 'time' else ''}" if position == 0 else ""
            format_axes(axes, title, x_label, True)
            axes.set_ylim(*limits[panel])
            axes.set_ylabel(f"squared difference per weight ({match})" if panel == "per_weight" else "CKA")
    grid[0][-1].legend(
        title="layer",
        title_fontsize="xx-small",
        frameon=False,
        fontsize="xx-small",
        loc="upper left",
        bbox_to_anchor=(1.02, 1),
    )
    figure.tight_layout()
    return figure


def _draw_heat_map(figure: Any, axes: Any, by_layer: dict[str, list[LayerComparison]], highest: float) -> None:
    """Draw the distances per weight. There is one row per layer and one column per pair of checkpoints."""
    values = [[_or_nan(row.per_weight) for row in own] for own in by_layer.values()]
    image = axes.imshow(values, aspect="auto", vmin=0, vmax=highest, cmap="Blues")
    axes.set_yticks(range(len(by_layer)), [short_layer_name(layer) for layer in by_layer], fontsize="xx-small")
    points = next(iter(by_layer.values()))
    axes.set_xticks(range(len(points)), [format_count(row.steps[1]) for row in points], fontsize="xx-small")
    axes.set_ylabel("layer")
    figure.colorbar(image, ax=axes, label="per weight")


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def short_layer_name(name: str) -> str:
    """Return the part of a layer's name after "convolutions.", for example 2.first for torso.convolutions.2.first."""
    return name.split("convolutions.")[-1]
