"""Measure which layers of an agent represent labelled quantities (`bestiary look probes`): table, CSV and figure.

Linear probes are fitted to the activations of each layer and to the recurrent state. There are two baselines: an
untrained network of the same shape that observes the same games, and the observation itself.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from bestiary.agents.agent import Agent
from bestiary.envs.vector_env import EnvInterface
from bestiary.evaluation.figure_helpers import check_figure_path, import_pyplot
from bestiary.evaluation.statistics import MEAN_INTERVAL_METHODS
from bestiary.interpretability.linear_probes import FOLDS, ProbeResult, measure_probe
from bestiary.interpretability.sampled_steps import (
    SampledStep,
    Samples,
    SamplingOptions,
    join_inputs,
    play_and_sample,
)
from bestiary.runs import checkpoints
from bestiary.runs.run import Run
from bestiary.utils.console import note, plain, progress_bar, stdout
from bestiary.utils.errors import UserError

OBSERVATION, STATE = "observation", "recurrent state"  # values of `ProbeRow.layer` that are not names of modules
TRAINED, UNTRAINED, INPUT = "trained", "untrained", "observation"  # values of `ProbeRow.network`
BATCH = 64  # number of steps whose activations are computed at once
INTERVAL_CAPTION = f"R2 and its 95 % interval over n games ({MEAN_INTERVAL_METHODS})"
HEADS = ("policy", "critic", "policy_mlp", "value_mlp")  # children of an agent that are not probed


@dataclass(frozen=True)
class ProbeRow:
    """The result of the probes of one layer for one quantity or group of quantities."""

    quantity: str
    layer: str
    network: str  # TRAINED, UNTRAINED, or INPUT if the features are the observation itself
    features: int  # number of activations
    result: ProbeResult


def probe_run(
    run: Run,
    *,
    checkpoint: int | None = None,
    env: str | None = None,
    sampling: SamplingOptions = SamplingOptions(),
    out: str | Path | None = None,
    overwrite: bool = False,
) -> list[ProbeRow]:
    """Fit probes to all layers of a run's agent, print a table, and write a CSV file and a figure."""
    config = run.config
    path = check_figure_path(out, overwrite) if out is not None else None
    if not config.interface.labels:
        raise UserError(f"{config.envs[config.task_index(env)]} has no labelled quantities (docs/interventions.md)")
    if sampling.episodes < 2:
        raise UserError(f"--episodes {sampling.episodes}: probes need at least 2 games, one to fit and one held out")
    chosen = checkpoints.choose(run.path, checkpoint)
    agent = run.agent(chosen)
    untrained = make_untrained_agent(run, agent)
    samples = play_and_sample(run, [agent, untrained], sampling, env)
    rows = measure_layers([agent, untrained], samples)
    if path is None:
        path = run.new_output_path("interpretability", f"probes-{chosen.steps:012d}", ".png")
    draw_figure(rows, path, f"{run.name}: {len(samples.steps)} steps of {sampling.episodes} games")
    write_csv(rows, path.with_suffix(".csv"), run.name, chosen.steps, sampling)
    _print_table(rows, run.name, samples, sampling)
    note(f"written: {path} and {path.with_suffix('.csv').name}")
    return rows


def make_untrained_agent(run: Run, trained: Agent, seed: int = 0) -> Agent:
    """Return a new agent of the same shape with random weights.

    The buffers are those of the trained agent, for example the mean image that is subtracted from the observations.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        agent = run.config.make_agent()
    assert isinstance(trained, torch.nn.Module)
    buffers = {name for name, _ in trained.named_buffers()}
    saved = {name: value for name, value in trained.state_dict().items() if name in buffers}
    agent.load_state_dict({**agent.state_dict(), **saved})
    return agent


def measure_layers(agents: Sequence[Agent], samples: Samples) -> list[ProbeRow]:
    """Measure all layers of the trained agent `agents[0]` and the untrained agent `agents[1]`, and the observation."""
    games = samples.games
    targets = make_targets(samples.steps, samples.interface)
    rows = []
    jobs: list[tuple[str, str, Agent | None]] = [(INPUT, OBSERVATION, None)]
    for network, agent in zip((TRAINED, UNTRAINED), agents, strict=True):
        jobs += [(network, layer, agent) for layer in layer_names(agent, samples.steps)]
    for network, layer, job_agent in progress_bar(jobs, "probes", len(jobs)):
        index = 0 if job_agent is agents[0] else 1
        x = observations(samples.steps) if job_agent is None else activations(job_agent, layer, samples.steps, index)
        for quantity, values in targets.items():
            result = measure_probe(x, values, games)
            if result is not None:
                rows.append(ProbeRow(quantity, layer, network, x.shape[1], result))
    return rows


def make_targets(steps: Sequence[SampledStep], interface: EnvInterface) -> dict[str, list[np.ndarray]]:
    """Return {name of a group: its quantities}. A quantity is an array [n] with its values at n steps.

    NaN means that the quantity does not exist at this step. A quantity without a group is a group of its own.
    """
    targets: dict[str, list[np.ndarray]] = {}
    for name, label in interface.labels.items():
        values = np.array([step.labels[name] for step in steps])
        if label.exists_if is not None:
            other, low, high = label.exists_if
            condition = np.array([step.labels[other] for step in steps])
            values[(condition < low) | (condition > high)] = np.nan
        targets.setdefault(label.group or name, []).append(values)
    return targets


def observations(steps: Sequence[SampledStep]) -> np.ndarray:
    """Return the flattened observations of all steps, [n,d]."""
    inputs, _ = join_inputs(steps)
    parts = [x[0].flatten(1).float() for _, x in sorted(inputs.observation.items())]
    return torch.cat(parts, dim=1).numpy()


def layer_names(agent: Agent, steps: Sequence[SampledStep]) -> list[str]:
    """Return the names of the layers to probe, in the order in which the agent computes them.

    The layers are all submodules that have parameters of their own, except for the heads. If the agent has a recurrent
    state, STATE is the last name.
    """
    order: list[str] = []
    hooks = [
        module.register_forward_hook(lambda *_, name=name: order.append(name))
        for name, module in _probed_modules(agent).items()
    ]
    _run(agent, steps[:1], 0)
    for hook in hooks:
        hook.remove()
    names = list(dict.fromkeys(order))
    if agent.initial_state(1):
        names.append(STATE)
    return names


def _probed_modules(agent: Agent) -> dict[str, torch.nn.Module]:
    assert isinstance(agent, torch.nn.Module)
    found = {}
    for name, module in agent.named_modules():
        has_own_parameters = any(True for _ in module.parameters(recurse=False))
        if name and name.split(".")[0] not in HEADS and has_own_parameters:
            found[name] = module
    return found


@torch.no_grad()
def activations(agent: Agent, layer: str, steps: Sequence[SampledStep], index: int) -> np.ndarray:
    """Return the activations of a layer at all steps, [n,d]. `index` is the agent's index in `SampledStep.states`.

    The activations of a layer are its outputs before the activation function.
    """
    parts = []
    for start in range(0, len(steps), BATCH):
        batch = steps[start : start + BATCH]
        captured: list[Tensor] = []
        if layer == STATE:
            _, state = _run(agent, batch, index)
            captured = [torch.cat([s.flatten(1) for s in state], dim=1)]
        else:
            module = _probed_modules(agent)[layer]
            hook = module.register_forward_hook(
                lambda _m, _i, output, kept=captured: kept.append(_first_tensor(output))
            )
            _run(agent, batch, index)
            hook.remove()
        parts.append(captured[-1].reshape(len(batch), -1).float().clone())
    return torch.cat(parts).numpy()


def _first_tensor(output: Any) -> Tensor:
    """Return the output of a module, or the first one if it has several (recurrent layers also return their state)."""
    while not isinstance(output, Tensor):
        output = output[0]
    return output


@torch.no_grad()
def _run(agent: Agent, steps: Sequence[SampledStep], index: int) -> Any:
    inputs, states = join_inputs(steps, index)
    return agent(inputs, states)


# --- output ---


def write_csv(rows: Sequence[ProbeRow], path: Path, run: str, checkpoint: int, sampling: SamplingOptions) -> None:
    """Write one line for each quantity, layer and network."""
    policy = "greedy" if sampling.greedy else "sampled"
    columns = (
        "run checkpoint quantity layer network features r2 ci_low ci_high interval games samples policy seed".split()
    )
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in rows:
            numbers = ["" if x is None else f"{x:.5g}" for x in (row.result.r2, row.result.low, row.result.high)]
            writer.writerow(
                [
                    *(run, checkpoint, row.quantity, row.layer, row.network, row.features),
                    *numbers,
                    *(row.result.interval, row.result.games, row.result.samples, policy, sampling.seed),
                ]
            )


def _print_table(rows: Sequence[ProbeRow], run: str, samples: Samples, sampling: SamplingOptions) -> None:
    quantities = list(dict.fromkeys(row.quantity for row in rows))
    title = f"{run}: R2 on held-out games, {len(samples.steps)} steps"
    table = Table(title=plain(title), caption=INTERVAL_CAPTION, caption_justify="left")
    table.add_column("network")
    table.add_column("layer")
    for quantity in quantities:
        table.add_column(plain(quantity), justify="right")
    for network, layer in dict.fromkeys((row.network, row.layer) for row in rows):
        cells = {row.quantity: row.result for row in rows if (row.network, row.layer) == (network, layer)}
        table.add_row(
            network, plain(layer), *(plain(format_result(cells[q])) if q in cells else "" for q in quantities)
        )
    stdout.print(table)
    note(f"{sampling.episodes} games in {min(FOLDS, sampling.episodes)} folds; each game is held out once")


def format_result(result: ProbeResult) -> str:
    """Return R2 and its interval as text, for example "0.91 [0.89, 0.93]"."""
    if result.low is None or result.high is None:
        return f"{result.r2:.2f}"
    return f"{result.r2:.2f} [{result.low:.2f}, {result.high:.2f}]"


def draw_figure(rows: Sequence[ProbeRow], path: Path, title: str) -> None:
    """Draw one panel per quantity: R2 of each layer of both networks, and of the observation."""
    plt = import_pyplot()
    quantities = list(dict.fromkeys(row.quantity for row in rows))
    layers = list(dict.fromkeys(row.layer for row in rows))
    columns = min(3, len(quantities))
    lines = -(-len(quantities) // columns)
    height = 0.9 + 0.32 * len(layers)
    figure, grid = plt.subplots(
        lines, columns, figsize=(3.4 * columns + 1.2, height * lines + 0.5), dpi=150, squeeze=False, sharey=True
    )
    colours = {TRAINED: "#0072B2", UNTRAINED: "#E69F00", INPUT: "#555555"}
    for axes in grid.flat[len(quantities) :]:
        axes.set_axis_off()
    for axes, quantity in zip(grid.flat, quantities, strict=False):
        for k, network in enumerate(colours):
            own = [row for row in rows if (row.quantity, row.network) == (quantity, network)]
            if not own:
                continue
            y = [layers.index(row.layer) + (k - 1) * 0.18 for row in own]
            r2 = [max(-0.25, row.result.r2) for row in own]
            for row, position in zip(own, y, strict=True):
                if row.result.low is not None and row.result.high is not None:
                    low, high = max(-0.25, row.result.low), max(-0.25, row.result.high)
                    axes.plot([low, high], [position, position], color=colours[network], linewidth=1)
            axes.plot(r2, y, "o", color=colours[network], markersize=4, label=network)
        axes.set_title(quantity, fontsize="medium")
        axes.set_xlim(-0.27, 1.03)
        axes.axvline(0, color="lightgray", linewidth=0.8, zorder=0)
        axes.set_yticks(range(len(layers)), layers, fontsize="x-small")
        axes.tick_params(axis="x", labelsize="x-small")
        axes.spines[["top", "right"]].set_visible(False)
    grid[0, 0].invert_yaxis()
    for axes in grid[-1]:
        axes.set_xlabel("R2 on held-out games (below -0.25: drawn at -0.25)", fontsize="xx-small")
    handles, names = grid[0, 0].get_legend_handles_labels()
    figure.suptitle(title, fontsize="medium")
    figure.tight_layout()
    figure.legend(
        handles,
        names,
        title=f"Dots and lines: {INTERVAL_CAPTION}.",
        title_fontsize="x-small",
        alignment="left",
        frameon=False,
        fontsize="small",
        loc="upper left",
        ncols=3,
        bbox_to_anchor=(0.02, 0.02),
    )
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
