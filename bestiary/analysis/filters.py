"""`bestiary look filters`: how far apart the convolutions of agents are, and what they make of the same frames.

Two measures of the same question, layer by layer:

    distance    squared differences of kernels, the k x k weights from one input to one output channel: sum, and mean by
                kernel and by weight, which alone compares layers of different k. Kernels are matched by their index, or so
                that the sum is least (`optimal`: kernels one by one, as published, which no network allows for; `filters`:
                whole filters, all inputs of an output channel at once)
    CKA         linear centred kernel alignment of what the layers give out on the same frames (Kornblith et al. 2019): 1 where
                one is the other turned and scaled, whatever the order of channels, 0 where they have nothing in common; the
                sounder answer

Layers have a distance where their shapes are the same, and CKA wherever both agents can see the frames. Runs are compared with
the first one at equal fractions of their training, or each with itself over time.
"""

import csv
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.optimize
import torch
import torch.nn as nn
from torch import Tensor

from bestiary.analysis.figures import figure_path, finish, pyplot
from bestiary.analysis.stage import Show, open_stage
from bestiary.console import note, short, tracked
from bestiary.errors import UserError
from bestiary.rollout import Inputs
from bestiary.runs import checkpoints
from bestiary.runs.checkpoints import Checkpoint
from bestiary.runs.folder import Run, labels, load_weights

MEASURES = ("sum", "per_kernel", "per_weight", "cka")  # columns of the table
MATCHES = ("index", "optimal", "filters")
MANY = 4096  # kernels that optimal matching compares with as many others; more take minutes and gigabytes


@dataclass
class Row:
    """One layer of two checkpoints."""

    pair: str
    layer: str
    point: int  # how-manyeth of the compared checkpoints
    steps: tuple[int, int]
    kernels: int
    sum: float | None  # None where shapes differ, or there are too many kernels to match
    per_kernel: float | None
    per_weight: float | None
    cka: float | None


def look_filters(
    runs: Sequence[Run],
    *,
    out: str | Path | None = None,
    points: int = 10,
    match: str = "index",
    between: str = "runs",
    frames: int = 256,
    seed: int = 0,
    overwrite: bool = False,
) -> list[Row]:
    """Compare, draw and write; `frames` of a game of the first run are what CKA is taken on (0: none)."""
    path = figure_path(out, overwrite) if out is not None else None
    if between == "runs" and len(runs) < 2:
        raise UserError("--between runs: needs two runs or more; --between time compares a run with itself")
    chosen = [spaced(run, points) for run in runs]
    pairs = _pairs(runs, chosen, between)
    first = pairs[0][1][0]
    for run, own in zip(runs, chosen, strict=True):
        if not convolutions(own[-1].model()):
            raise UserError(f"{run.path}: no convolutions to compare; bestiary look actions compares what agents do")
    lens = Frames(runs) if frames else None
    remarks: list[str] = []
    for label, couples in pairs:
        remarks += _check(label, *couples[0], match, lens)
    for remark in dict.fromkeys(remarks):
        note(f"note: {remark}")
    if lens is not None:
        lens.play(runs[0], frames, seed)
    rows = []
    total = sum(len(couples) for _, couples in pairs)
    todo = [(label, k, couple) for label, couples in pairs for k, couple in enumerate(couples)]
    for label, k, (one, other) in tracked(todo, "filters", total):
        rows += _compare(label, k, one, other, match, lens)
    if path is None:
        path = runs[0].new_path("looks", f"filters-{between}-{match}-{first[1].steps:012d}", ".png")
    _write(rows, path.with_suffix(".csv"), match, frames, seed)
    _draw(rows, path, match, between)
    note(f"written: {path} and .csv")
    return rows


Couples = list[tuple[Checkpoint, Checkpoint]]


def spaced(run: Run, points: int) -> list[Checkpoint]:
    """So many checkpoints of a run, from the first to the last, equally far apart; all where it has fewer; of one, the last."""
    found = run.checkpoints
    if not found:
        raise UserError(f"{run.path} has no checkpoint yet")
    wanted = np.linspace(found[-1].steps, found[0].steps, min(points, len(found)))
    nearest = {min((c.steps for c in found), key=lambda steps: abs(steps - at)) for at in wanted}
    return [checkpoints.choose(run.path, steps) for steps in sorted(nearest)]


def _pairs(runs: Sequence[Run], chosen: list[list[Checkpoint]], between: str) -> list[tuple[str, Couples]]:
    if between == "time":
        for run, points in zip(runs, chosen, strict=True):
            if len(points) < 2:
                raise UserError(
                    f"{run.path} has one checkpoint: nothing to compare over time (--save-every keeps more)"
                )
        return [(name, list(itertools.pairwise(own))) for name, own in zip(labels(runs), chosen, strict=True)]
    first, *names = labels(runs)
    return [
        (f"{first} and {name}", [(one, checkpoints.choose(run.path, at)) for one, at in _abreast(chosen[0], run)])
        for name, run in zip(names, runs[1:], strict=True)
    ]


def _abreast(chosen: list[Checkpoint], run: Run) -> list[tuple[Checkpoint, int]]:
    """Each with the steps of the run's that is as far in its own training, or nearest to it; none of the run's twice."""
    steps = [checkpoint.steps for checkpoint in run.checkpoints]
    couples: dict[int, tuple[float, Checkpoint]] = {}
    for one in chosen:
        fraction = one.steps / max(1, chosen[-1].steps)
        gap, at = min((abs(own / max(1, steps[-1]) - fraction), own) for own in steps)
        if at not in couples or gap < couples[at][0]:
            couples[at] = (gap, one)
    return [(one, at) for at, (_, one) in couples.items()]


def convolutions(model: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights [out,in,k,k] of all convolutions, in the order of their numbers."""
    names = [name for name, tensor in model.items() if tensor.dim() == 4 and name.endswith(".weight")]
    natural = sorted(names, key=lambda name: [int(w) if w.isdecimal() else w for w in re.split(r"(\d+)", name)])
    return {name.removesuffix(".weight"): model[name].float() for name in natural}


def _check(label: str, one: Checkpoint, other: Checkpoint, match: str, lens: "Frames | None") -> list[str]:
    """Refuses what has nothing to compare; returns what to say about layers that have no distance."""
    left, right = convolutions(one.model()), convolutions(other.model())
    shapes = {
        name: ["x".join(map(str, m[name].shape)) if name in m else "not there" for m in (left, right)]
        for name in dict.fromkeys([*left, *right])
    }
    different = [name for name, (mine, its) in shapes.items() if mine != its]
    many = [name for name in shapes if name not in different and not _matched(left[name], match)]
    remarks = []
    if many:
        remarks.append(f"--match optimal: {_first(many)}: more than {MANY} kernels; try --match filters")
    if different:
        both = " and ".join(shapes[different[0]])
        remarks.append(f"{label}: filters of different shapes have no distance: {_first(different)}: {both}")
    aligned = lens is not None and lens.sees(one) and lens.sees(other) and left.keys() & right.keys()
    if len(different) + len(many) == len(shapes) and not aligned:
        raise UserError(*remarks)
    return remarks


def _first(names: list[str]) -> str:
    return names[0] + f" (and {len(names) - 1} more)" * (len(names) > 1)


def _matched(weights: Tensor, match: str) -> bool:
    """Whether so many kernels can be matched."""
    return match != "optimal" or weights.shape[0] * weights.shape[1] <= MANY


def _compare(label: str, k: int, one: Checkpoint, other: Checkpoint, match: str, lens: "Frames | None") -> list[Row]:
    left, right = convolutions(one.model()), convolutions(other.model())
    alike = lens.alignment(one, other) if lens is not None else {}
    rows = []
    for layer in left:
        weights, kernels = left[layer], left[layer].shape[0] * left[layer].shape[1]
        numbers: tuple[float | None, float | None, float | None] = (None, None, None)
        if layer in right and weights.shape == right[layer].shape and _matched(weights, match):
            total = distance(weights, right[layer], match)
            numbers = (total, total / kernels, total / weights.numel())
        elif layer not in alike:
            continue
        rows.append(Row(label, layer, k, (one.steps, other.steps), kernels, *numbers, alike.get(layer)))
    return rows


def distance(one: Tensor, other: Tensor, match: str = "index") -> float:
    """Sum of squared differences of two convolutions' weights [out,in,k,k], their kernels matched."""
    rows = [w.flatten(2).flatten(0, 1) if match != "filters" else w.flatten(1) for w in (one, other)]
    left, right = (r.double().numpy() for r in rows)
    if match == "index":
        return float(((left - right) ** 2).sum())
    cost = (left**2).sum(1)[:, None] + (right**2).sum(1)[None] - 2 * left @ right.T
    chosen = scipy.optimize.linear_sum_assignment(cost)
    return float(((left[chosen[0]] - right[chosen[1]]) ** 2).sum())


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Of features [n,p] and [n,q] of the same n frames, at least four; -1 to 1, nan where one of them is constant.

    A layer gives out far more numbers than there are frames. What a frame has in common with itself is left out of their
    products (Szekely & Rizzo 2014), else any two such layers would seem alike."""
    one, other = (_products(features.double()) for features in (x, y))
    norm = float(one.norm() * other.norm())
    return float((one * other).sum()) / norm if norm > 0 else float("nan")


def _products(features: Tensor) -> Tensor:
    """Products [n,n] of different frames' features, centred without their diagonal."""
    n, centred = len(features), features - features.mean(0)
    products = (centred @ centred.T).fill_diagonal_(0)
    rows = products.sum(0) / (n - 2)
    return (products - rows - rows.unsqueeze(1) + rows.sum() / (n - 1)).fill_diagonal_(0)


class Frames:
    """A game of the first run, and what the layers of any checkpoint give out on it."""

    def __init__(self, runs: Sequence[Run]):
        self.agents: dict[Path, Any] = {}
        self.seen: dict[Path, dict[str, Tensor]] = {}
        spec = None
        for run in runs:
            pool = run.config.make_pool(1, 0)
            pool.close()
            spec = spec or pool.observation_spec
            if pool.observation_spec != spec:
                note(f"note: {run.path} sees other pictures than {runs[0].path}; no CKA")
                continue
            self.agents[run.path.resolve()] = run.config.make_agent(pool)

    def play(self, run: Run, count: int, seed: int) -> None:
        """So many frames, of game after game."""
        show = Show([open_stage(run, seed=seed)], length=count, one_game=False)
        inputs = [scene.moment.inputs for (scene,) in tracked(show, "frames to compare on", count)]
        zeros = torch.zeros(len(inputs), 1)
        observation = {kind: torch.cat([i.observation[kind] for i in inputs]) for kind in inputs[0].observation}
        done = torch.cat([i.done for i in inputs])
        # tasks and actions may not be shared
        self.inputs = Inputs(observation, zeros, done, zeros.long(), zeros.long())

    def sees(self, checkpoint: Checkpoint) -> bool:
        return checkpoint.path.resolve().parent.parent in self.agents

    def alignment(self, one: Checkpoint, other: Checkpoint) -> dict[str, float]:
        """CKA by layer, of those that both have; empty where an agent cannot see the frames."""
        both = [self._features(checkpoint) for checkpoint in (one, other)]
        return {layer: linear_cka(both[0][layer], both[1][layer]) for layer in both[0] if layer in both[1]}

    @torch.no_grad()
    def _features(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """What each convolution gives out, [n,p]."""
        if checkpoint.path in self.seen:
            return self.seen[checkpoint.path]
        agent = self.agents.get(checkpoint.path.resolve().parent.parent)
        if agent is None:
            return {}
        load_weights(agent, checkpoint)
        caught: dict[str, list[Tensor]] = {}
        hooks = []
        for name, module in agent.named_modules():
            if isinstance(module, nn.Conv2d):

                def catch(_: nn.Module, __: Any, output: Tensor, name: str = name) -> None:
                    caught.setdefault(name, []).append(output.flatten(1))

                hooks.append(module.register_forward_hook(catch))
        agent(self.inputs, agent.initial_state(1))
        for hook in hooks:
            hook.remove()
        found = {name: torch.cat(parts) for name, parts in caught.items()}
        self.seen = {checkpoint.path: found, **dict(list(self.seen.items())[:1])}  # of the last two, the usual pair
        return found


def _write(rows: list[Row], path: Path, match: str, frames: int, seed: int) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["pair", "layer", "point", "steps", "other_steps", "kernels", "match", *MEASURES, "frames", "seed"]
        )
        for r in rows:
            numbers = ["" if x is None else f"{x:.6g}" for x in (getattr(r, name) for name in MEASURES)]
            writer.writerow([r.pair, r.layer, r.point, *r.steps, r.kernels, match, *numbers, frames, seed])


def _draw(rows: list[Row], path: Path, match: str, between: str) -> None:
    plt = pyplot()
    figure = _figure(plt, rows, match, between)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def _figure(plt: Any, rows: list[Row], match: str, between: str) -> Any:
    """A column for each pair; lines by layer, darker where deeper, the same as a heat map, and CKA, where those were taken."""
    pairs = list(dict.fromkeys(row.pair for row in rows))
    layers = list(dict.fromkeys(row.layer for row in rows))
    distances = [row.per_weight for row in rows if row.per_weight is not None]
    alike = [row.cka for row in rows if row.cka is not None]
    measures = [*(["per_weight", "map"] if distances else []), *(["cka"] if alike else [])]
    limits = {
        "per_weight": (0, 1.1 * max(distances, default=0) or 1.0),
        "cka": (1.02 * float(np.nanmin([0, *alike])), 1.02),
    }
    size = (4.6 * len(pairs) + 1.2, 3 * len(measures))
    figure, grid = plt.subplots(len(measures), len(pairs), figsize=size, dpi=150, squeeze=False)
    colors = plt.get_cmap("Blues")(np.linspace(0.35, 1, len(layers)))
    for column, pair in enumerate(pairs):
        own = {layer: [row for row in rows if (row.pair, row.layer) == (pair, layer)] for layer in layers}
        own = {layer: found for layer, found in own.items() if found}
        steps = "steps" if between == "time" else f"steps of {pair.rsplit(' and ', 1)[-1]}"
        for place, measure in enumerate(measures):
            axes = grid[place][column]
            if measure == "map":
                image = axes.imshow(
                    [[_or_nan(row.per_weight) for row in found] for found in own.values()],
                    aspect="auto",
                    vmin=0,
                    vmax=limits["per_weight"][1],
                    cmap="Blues",
                )
                axes.set_yticks(range(len(own)), [short_layer(layer) for layer in own], fontsize="xx-small")
                points = next(iter(own.values()))
                axes.set_xticks(range(len(points)), [short(row.steps[1]) for row in points], fontsize="xx-small")
                axes.set_xlabel(steps)
                axes.set_ylabel("layer")
                figure.colorbar(image, ax=axes, label="per weight")
                continue
            for layer, color in zip(layers, colors, strict=True):
                values = [_or_nan(getattr(row, measure)) for row in own.get(layer, ())]
                x = [row.steps[1] for row in own.get(layer, ())]
                axes.plot(x, values, color=color, label=short_layer(layer), marker="o" if len(x) == 1 else None)
            title = f"{pair}{', over time' if between == 'time' else ''}" if place == 0 else ""
            finish(axes, title, steps, True)
            axes.set_ylim(*limits[measure])
            axes.set_ylabel(f"squared difference per weight ({match})" if measure == "per_weight" else "CKA")
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


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def short_layer(name: str) -> str:
    """torso.convolutions.2.first -> 2.first"""
    return name.split("convolutions.")[-1]
