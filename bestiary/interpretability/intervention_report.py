"""Carry out interventions at one step of a game and report their effect (`bestiary intervene`): table, CSV and PNG.

The report contains the probabilities of the actions and the value before and after the interventions. If the agent
observes images, it also contains the saliency of the changed region, in the unit of the measured effect. With
`--continue`, the game is played on with and without the interventions, and the values, actions and rewards of both
games are written to a second CSV file.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bestiary.agents.policy_runner import StepRecord
from bestiary.evaluation.figure_helpers import check_figure_path, import_pyplot
from bestiary.evaluation.media import check_output
from bestiary.evaluation.playback import PlaybackOptions, newest_frame
from bestiary.interpretability.game_branch import Continuation, GameBranch, open_branch, repeat_branch
from bestiary.interpretability.interventions import Effect, Intervention, check_interventions
from bestiary.interpretability.saliency import Saliency, interpolate_grid
from bestiary.runs.run import Run
from bestiary.utils.console import note, plain, stdout
from bestiary.utils.errors import UserError

BEFORE_COLOUR, AFTER_COLOUR = "#0072B2", "#D55E00"  # distinguishable for colour-blind readers

STEPS_END = "-steps"  # end of the name of the CSV file with the steps of the continued games


@dataclass
class RegionSaliency:
    """The saliency of the changed region of an image: mean over its pixels, in the unit of `Effect.policy_score`."""

    policy: float  # saliency of the policy
    value: float  # saliency of the value
    policy_map: np.ndarray  # [H,W] saliency of the policy for each pixel of the observation


@dataclass
class InterventionReport:
    """The result of interventions at one step of a game. Fields about images are None if the agent observes none."""

    run: str
    step: int
    interventions: tuple[Intervention, ...]
    actions: tuple[str, ...]  # names of all actions
    effect: Effect
    action_before: str  # action that is taken without the interventions
    action_after: str
    screens: tuple[np.ndarray, np.ndarray]  # rendered screen [H,W,3] before and after
    frames: tuple[np.ndarray, np.ndarray] | None  # newest observed frame [H,W,3] before and after
    changed_region: np.ndarray | None  # bool [H,W]: pixels of the observation that differ
    saliency: RegionSaliency | None  # also None if the observation does not change
    continuations: tuple[Continuation, Continuation] | None  # without and with the interventions; None: not played on
    paths: tuple[Path, ...] = ()


def intervene(
    run: Run,
    options: PlaybackOptions,
    step: int,
    interventions: Sequence[Intervention],
    *,
    continue_steps: int = 0,
    earlier_actions: Mapping[int, str] | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
) -> InterventionReport:
    """Play a game to a step, apply interventions there, print the effect, and write a figure and CSV files.

    The game is the one that `bestiary video` records with the same options, apart from the changes in
    `earlier_actions` (step -> name of the action that is taken at this step). If `continue_steps` is not 0, the game is
    played on with and without the interventions, for at most this number of steps.
    """
    path = _check_paths(out, overwrite, continue_steps > 0) if out is not None else None
    if not interventions:
        raise UserError("intervene: no intervention given; for example: --erase 30,40,8,8")
    check_interventions(interventions, run.config.interface)
    actions = _actions_before(run, options, step, earlier_actions or {})
    branch = open_branch(run, options)
    other = branch
    try:
        branch.play_to(step, actions)
        record, screen, action = branch.record, branch.screen, branch.peek_action()
        sets_labels = any(one.kind == "set" for one in interventions)
        if continue_steps or sets_labels:
            other = repeat_branch(run, options, branch, settable=sets_labels)
        effect = other.intervene(interventions)
        report = _make_report(run, branch, other, record, screen, action, interventions, effect)
        if continue_steps:
            report.continuations = (branch.play_on(continue_steps), other.play_on(continue_steps))
        file_stem = branch.viewer.file_stem
    finally:
        branch.close()
        other.close()
    path = path or run.new_output_path("interpretability", f"intervention-{file_stem}-{step}", ".png", STEPS_END)
    report.paths = _write_files(report, path)
    _print_report(report)
    note(f"written: {', '.join(str(p) if k == 0 else p.name for k, p in enumerate(report.paths))}")
    return report


def _actions_before(
    run: Run, options: PlaybackOptions, step: int, earlier_actions: Mapping[int, str]
) -> dict[int, str]:
    """Return {step: action} of all steps before `step` at which the agent does not choose the action."""
    names = run.config.interface.action_spec.names
    for at, name in earlier_actions.items():
        if name not in names:
            raise UserError(f"--earlier-actions {at}:{name}: no such action; expected one of {', '.join(names)}")
        if at >= step:
            raise UserError(f"--earlier-actions {at}:{name}: must be before --step {step}")
    recorded: list[str] = []
    if options.replay is not None:
        recording, game = options.replay
        recorded = recording.game_actions(game)
    return {**dict(enumerate(recorded)), **earlier_actions}


def _check_paths(out: str | Path, overwrite: bool, continues: bool) -> Path:
    path = check_figure_path(out, overwrite)
    if continues:
        check_output(_steps_path(path), overwrite, (".csv",), "tables")
    return path


def _steps_path(path: Path) -> Path:
    """Return the path of the CSV file with the steps of the continued games."""
    return path.with_name(f"{path.stem}{STEPS_END}.csv")


def _make_report(
    run: Run,
    branch: GameBranch,
    other: GameBranch,
    record: StepRecord,
    screen: np.ndarray,
    action: str,
    interventions: Sequence[Intervention],
    effect: Effect,
) -> InterventionReport:
    """Return the report without continuations. `record`, `screen` and `action` are those before the interventions."""
    frames = region = saliency = None
    if "image" in record.inputs.observation:
        assert other.compared_inputs is not None
        record = replace(record, inputs=other.compared_inputs)
        before, after = (r.inputs.observation["image"][0, 0].numpy() for r in (record, other.record))
        frames = (newest_frame(before), newest_frame(after))
        region = (before != after).any(axis=0)
        if region.any():
            saliency = _measure_saliency(branch, record, region)
    return InterventionReport(
        run=run.name,
        step=branch.t,
        interventions=tuple(interventions),
        actions=branch.interface.action_spec.names,
        effect=effect,
        action_before=action,
        action_after=other.peek_action(),
        screens=(screen, other.screen),
        frames=frames,
        changed_region=region,
        saliency=saliency,
        continuations=None,
    )


def _measure_saliency(branch: GameBranch, record: StepRecord, region: np.ndarray) -> RegionSaliency:
    """Return the saliency of the pixels in `region`, bool [H,W], at the unchanged observation."""
    saliency = Saliency(branch.viewer.agent, branch.interface.observation_spec)
    maps = saliency(record.inputs, record.state)
    size = (saliency.height, saliency.width)
    policy, value = (interpolate_grid(scores, saliency.density, size) for scores in (maps.policy, maps.value))
    return RegionSaliency(float(policy[region].mean()), float(value[region].mean()), policy)


# --- output ---


def _write_files(report: InterventionReport, path: Path) -> tuple[Path, ...]:
    """Write the figure, the CSV file of the effect and, if the game continues, the CSV file of its steps."""
    _draw_figure(report, path)
    table_path = path.with_suffix(".csv")
    with table_path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "step", "interventions", "quantity", "before", "after", "change"])
        options = " ".join(one.option for one in report.interventions)
        for quantity, before, after in _rows(report):
            change = "" if before is None or after is None else f"{after - before:.6g}"
            cells = ("" if x is None else f"{x:.6g}" for x in (before, after))
            writer.writerow([report.run, report.step, options, quantity, *cells, change])
    if report.continuations is None:
        return path, table_path
    steps_path = _steps_path(path)
    with steps_path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *(f"{name}_{when}" for when in ("before", "after") for name in STEP_COLUMNS)])
        length = max(len(one.values) for one in report.continuations)
        for k in range(length):
            step_cells = [cell for one in report.continuations for cell in _step_cells(one, k)]
            writer.writerow([report.step + k, *step_cells])
    return path, table_path, steps_path


STEP_COLUMNS = ("value", "action", "reward")


def _step_cells(continuation: Continuation, k: int) -> tuple[Any, ...]:
    """Return value, action and reward of step k; empty cells if the game had ended."""
    if k >= len(continuation.values):
        return "", "", ""
    return f"{continuation.values[k]:.6g}", continuation.actions[k], f"{continuation.rewards[k]:g}"


def _rows(report: InterventionReport) -> list[tuple[str, float | None, float | None]]:
    """Return the rows of the CSV file: (quantity, before, after).

    Quantities that describe the change itself, for example the KL divergence, have no value before the change: `before`
    is None.
    """
    effect = report.effect
    rows: list[tuple[str, float | None, float | None]] = [
        (f"probability {name}", float(before), float(after))
        for name, before, after in zip(report.actions, effect.before, effect.after, strict=True)
    ]
    rows.append(("value", effect.value_before, effect.value_after))
    rows += [("kl", None, effect.kl), ("policy score", None, effect.policy_score)]
    rows.append(("value score", None, effect.value_score))
    if report.saliency is not None:
        rows.append(("policy saliency of the region", None, report.saliency.policy))
        rows.append(("value saliency of the region", None, report.saliency.value))
    if report.continuations is not None:
        one, other = report.continuations
        rows.append(("return of the continuation", one.game_return, other.game_return))
        rows.append(("steps of the continuation", float(len(one.values)), float(len(other.values))))
    return rows


def _print_report(report: InterventionReport) -> None:
    options = " ".join(one.option for one in report.interventions)
    table = Table(title=plain(f"{report.run}, step {report.step}: {options}"))
    for column in ("", "before", "after", "change"):
        table.add_column(column, justify="left" if column == "" else "right")
    for name, before, after in zip(report.actions, report.effect.before, report.effect.after, strict=True):
        table.add_row(plain(f"P({name})"), f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}")
    effect = report.effect
    table.add_row("value", f"{effect.value_before:.3f}", f"{effect.value_after:.3f}", f"{effect.value_change:+.3f}")
    table.add_row("action taken", plain(report.action_before), plain(report.action_after), "")
    if report.continuations is not None:
        one, other = report.continuations
        change = other.game_return - one.game_return
        steps = len(one.values)
        label = f"return of {steps} steps"
        if len(other.values) != steps:
            label = f"return of {steps} and {len(other.values)} steps"
        table.add_row(label, f"{one.game_return:g}", f"{other.game_return:g}", f"{change:+g}")
    stdout.print(table)
    note(f"KL(before || after) = {effect.kl:.4g} nats")
    if (
        report.changed_region is not None
        and not report.changed_region.any()
        and any(one.kind != "action" for one in report.interventions)
    ):
        note("the interventions do not change the observation at this step")
    if report.saliency is not None:
        s = report.saliency
        note(
            f"measured effect: policy {effect.policy_score:.3g}, value {effect.value_score:.3g}; mean saliency of the "
            f"changed region: policy {s.policy:.3g}, value {s.value:.3g} (unit: half the squared change of the logits "
            "or of the value)"
        )


def _draw_figure(report: InterventionReport, path: Path) -> None:
    """Draw images before and after the interventions, the saliency and the probabilities of the actions.

    If the game is played on, also draw its values and rewards.
    """
    plt = import_pyplot()
    images = _figure_images(report)
    continues = report.continuations is not None
    figure = plt.figure(figsize=(3.1 * (len(images) + 1) + 0.6, 6.4 if continues else 3.5), dpi=150)
    grid = figure.add_gridspec(2 if continues else 1, len(images) + 1, width_ratios=[1] * len(images) + [1.15])
    for k, (title, image, is_saliency) in enumerate(images):
        axes = figure.add_subplot(grid[0, k])
        if is_saliency:
            drawn = axes.imshow(image, cmap="viridis", interpolation="nearest")
            figure.colorbar(drawn, ax=axes, fraction=0.045, pad=0.03).ax.tick_params(labelsize="xx-small")
        else:
            axes.imshow(image, interpolation="nearest")
        _outline_region(axes, report.changed_region, image.shape[:2])
        axes.set_title(title, fontsize="small")
        axes.set_axis_off()
    _draw_probabilities(figure.add_subplot(grid[0, -1]), report)
    if continues:
        half = (len(images) + 1) // 2
        _draw_curves(report, figure.add_subplot(grid[1, :half]), figure.add_subplot(grid[1, half:]))
    options = " ".join(one.option for one in report.interventions)
    figure.suptitle(f"{report.run}, step {report.step}: {options}", fontsize="medium")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _figure_images(report: InterventionReport) -> list[tuple[str, np.ndarray, bool]]:
    """Return (title, image, whether it is a saliency map) for each image panel."""
    images: list[tuple[str, np.ndarray, bool]] = [("screen before", report.screens[0], False)]
    if report.frames is not None and report.changed_region is not None and report.changed_region.any():
        images = [("observation before", report.frames[0], False), ("observation after", report.frames[1], False)]
    if not np.array_equal(*report.screens):
        images = [("screen before", report.screens[0], False), ("screen after", report.screens[1], False)]
    if report.saliency is not None:
        title = (
            f"policy saliency (region: {report.saliency.policy:.3g})\nmeasured effect {report.effect.policy_score:.3g}"
        )
        images.append((title, report.saliency.policy_map, True))
    return images


def _outline_region(axes: Any, region: np.ndarray | None, size: tuple[int, ...]) -> None:
    """Draw the outline of the changed region, bool [h,w], on an image of another size."""
    if region is None or not region.any() or region.all():
        return
    rows = np.minimum(np.arange(size[0]) * region.shape[0] // size[0], region.shape[0] - 1)
    columns = np.minimum(np.arange(size[1]) * region.shape[1] // size[1], region.shape[1] - 1)
    axes.contour(region[np.ix_(rows, columns)], levels=[0.5], colors=[AFTER_COLOUR], linewidths=1.2)


def _draw_probabilities(axes: Any, report: InterventionReport) -> None:
    y = np.arange(len(report.actions))
    axes.barh(y - 0.2, report.effect.before, 0.4, color=BEFORE_COLOUR, label="before")
    axes.barh(y + 0.2, report.effect.after, 0.4, color=AFTER_COLOUR, label="after")
    axes.set_yticks(y, report.actions, fontsize="x-small")
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.tick_params(axis="x", labelsize="x-small")
    axes.spines[["top", "right"]].set_visible(False)
    effect = report.effect
    axes.set_title(
        f"probabilities (KL {effect.kl:.3g})\nvalue {effect.value_before:.2f} to {effect.value_after:.2f}",
        fontsize="small",
    )
    axes.legend(frameon=False, fontsize="x-small")


def _draw_curves(report: InterventionReport, value_axes: Any, return_axes: Any) -> None:
    """Draw the value and the summed reward over the steps of both continuations."""
    assert report.continuations is not None
    for one, name, colour in zip(report.continuations, ("before", "after"), (BEFORE_COLOUR, AFTER_COLOUR), strict=True):
        steps = report.step + np.arange(len(one.values))
        label = f"{name}: return {one.game_return:g}{', game over' if one.game_over else ''}"
        value_axes.plot(steps, one.values, color=colour, label=name, linewidth=1)
        return_axes.plot(steps + 1, np.cumsum(one.rewards), color=colour, label=label, linewidth=1)
    value_axes.set_ylabel("value", fontsize="small")
    return_axes.set_ylabel("summed reward", fontsize="small")
    for axes in (value_axes, return_axes):
        axes.set_xlabel("step of the game", fontsize="small")
        axes.tick_params(labelsize="x-small")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="x-small")
