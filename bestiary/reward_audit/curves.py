"""Curves of the training return and the true return, and detection of drops of the true return.

The x axis of a curve is the network size, the number of training steps, or an option of the environment. Runs that
differ only in their seed form one point. Points that differ only in the quantity on the x axis form a curve.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bestiary.config.training_options import group_key
from bestiary.envs.rewards.wrapper import RewardConfig
from bestiary.evaluation.run_groups import config_labels
from bestiary.evaluation.statistics import holm_adjust, mean_reward_per_step, summarise, welch_drop_test

SIGNIFICANCE = 0.05  # significance level: maximum probability of finding a drop in a constant curve
# Options of agent, torso and memory that change the network size. The runs of a curve over network size may differ in
# all of them.
SIZE_OPTIONS = "width depth channels sizes hidden layers heads head_size ff units key_channels value_channels".split()


@dataclass
class AuditRow:
    """Results of one run at one checkpoint."""

    run: str
    environment: str  # name, and the options that do not have the default value
    rewards: RewardConfig  # training reward of the run, and true rewards that the audit reports for this run
    settings: dict[str, Any]  # all settings of the run, see `comparable_settings`
    steps: int  # step count of the checkpoint
    parameters: int  # number of parameters of the agent
    fc_parameters: int  # number of parameters in the fully connected layers of the torso
    training: np.ndarray  # training return of each game
    true: dict[str, np.ndarray]  # name of the true reward -> true return of each game
    lengths: np.ndarray  # number of steps of each game
    correlations: dict[str, float]  # correlations of the training reward with the true rewards
    distances: dict[str, float] = field(default_factory=dict)  # distances from the policy of the trusted run

    def to_record(self) -> dict[str, Any]:
        """Return the columns of this row in audit.csv."""
        record: dict[str, Any] = {
            "run": self.run,
            "environment": self.environment,
            "reward": self.rewards.training or "reward=1",
            "true_reward": self.rewards.true,
            "reward_scale": self.settings.get("algo.reward_scale") or 1.0,
            "reward_clipping": self.settings.get("algo.reward_clipping", "none"),
            "steps": self.steps,
            "parameters": self.parameters,
            "fc_parameters": self.fc_parameters,
            "games": len(self.training),
        }
        returns = {"training": self.training, **self.true}
        for name, values in returns.items():
            summary = summarise(list(values))
            record[name] = summary["mean"]
            record[f"{name}_ci_low"] = summary["ci_low"]
            record[f"{name}_ci_high"] = summary["ci_high"]
            record["interval"] = f"{summary['interval']}, over games"
        record |= {f"{name}_per_step": mean_reward_per_step(values, self.lengths) for name, values in returns.items()}
        return {**record, "length": float(self.lengths.mean()), **self.correlations, **self.distances}

    def position(self, axis: str) -> float | None:
        """Return the position of this row on the x axis, or None if the axis is an option that is not numeric.

        `axis` is "steps", "parameters", "fc_parameters" or an option of the environment, "env.NAME".
        """
        return as_number(self.settings.get(axis)) if axis.startswith("env.") else float(getattr(self, axis))

    def group_key(self, axis: str = "steps") -> str:
        """Return a key that is equal for all rows of one curve.

        The key consists of all settings, with two exceptions: settings that change the position on the x axis, and the
        options in UNCOMPARED (config/training_options.py), such as the seed.
        """
        ignored = [axis] if axis.startswith("env.") else []
        if axis == "parameters":
            ignored = [f"{component}.{name}" for component in ("agent", "torso", "memory") for name in SIZE_OPTIONS]
        return group_key(self.settings, *ignored)


def as_number(value: Any) -> float | None:
    """Return the value of an option as a number, or None if it is not numeric.

    False is 0, True is 1, and a list such as [84, 84] is the product of its elements.
    """
    if isinstance(value, list | tuple) and value and all(isinstance(v, int | float) for v in value):
        return float(math.prod(value))
    return float(value) if isinstance(value, bool | int | float) else None


@dataclass(frozen=True)
class CurvePoint:
    """Returns at one position of the x axis.

    If there are several runs at this position, the arrays have the mean return of each run, and `unit` is "seeds". If
    there is only one run, the arrays have the return of each game, and `unit` is "games".
    """

    x: float
    training: np.ndarray
    true: np.ndarray
    unit: str = "seeds"


def make_points(rows: Sequence[AuditRow], axis: str, channel: str = "true") -> list[CurvePoint]:
    """Return the points of a curve, sorted along the x axis. `channel` is the name of the true reward."""
    points = []
    for x in sorted({x for row in rows if (x := row.position(axis)) is not None}):
        own = [row for row in rows if row.position(axis) == x]
        if len(own) == 1:
            points.append(CurvePoint(x, own[0].training, own[0].true[channel], "games"))
        else:
            training = np.array([row.training.mean() for row in own])
            true = np.array([row.true[channel].mean() for row in own])
            points.append(CurvePoint(x, training, true))
    return points


@dataclass(frozen=True)
class TrueReturnDrop:
    """A significant drop of the true return between two neighbouring points of the x axis, `before` and `after`.

    The training return does not drop significantly between these points.
    """

    before: float
    after: float
    p_value: float  # p-value of Welch's test of the drop, after Holm's correction


def find_true_return_drop(points: Sequence[CurvePoint], both_directions: bool = False) -> TrueReturnDrop | None:
    """Return the largest significant drop of the true return between two neighbouring points; None if there is none.

    Each pair of neighbouring points is tested with Welch's t test over runs, and the p-values are corrected for the
    number of tests (Holm). A drop of the true return is reported if two conditions hold: its corrected p-value is at
    most SIGNIFICANCE, and the training return does not drop significantly between the same points. The second test uses
    the p-value without correction. It therefore finds a drop of the training return more easily, and fewer drops of the
    true return are reported. If `both_directions` is True, drops from right to left are also tested; this doubles the
    number of tests.

    A pair is not tested if one of its points has only one run: the test needs the variation between runs. The variation
    between the games of one run cannot replace it.
    """
    pairs = [pair for pair in itertools.pairwise(points) if all(point.unit == "seeds" for point in pair)]
    if both_directions:
        pairs += [(after, before) for before, after in pairs]
    p_values = [welch_drop_test(before.true, after.true) for before, after in pairs]
    # The test gives nan if both points are constant over seeds. Such a pair is regarded as not significant.
    adjusted = holm_adjust([1.0 if math.isnan(p) else p for p in p_values])
    drops = {}
    for (before, after), p_value in zip(pairs, adjusted, strict=True):
        if p_value <= SIGNIFICANCE and not _drops(before.training, after.training):
            drops[TrueReturnDrop(before.x, after.x, p_value)] = before.true.mean() - after.true.mean()
    return max(drops, key=drops.__getitem__) if drops else None


def _drops(before: np.ndarray, after: np.ndarray) -> bool:
    """Return whether the mean drops significantly. If both samples are constant, any drop is significant."""
    p_value = welch_drop_test(before, after)
    return bool(before.mean() > after.mean()) if math.isnan(p_value) else p_value <= SIGNIFICANCE


def newest_rows(rows: Sequence[AuditRow]) -> list[AuditRow]:
    """Return the row of the last checkpoint of each run."""
    last = {row.run: max(other.steps for other in rows if other.run == row.run) for row in rows}
    return [row for row in rows if row.steps == last[row.run]]


def rows_at_common_steps(rows: Sequence[AuditRow]) -> list[AuditRow]:
    """Return only the rows at steps at which all runs have a checkpoint.

    At other steps, the mean over runs would include only some of the runs, so the curve could jump there.
    """
    runs = {row.run for row in rows}
    steps = set.intersection(*({row.steps for row in rows if row.run == run} for run in runs))
    return [row for row in rows if row.steps in steps]


@dataclass(frozen=True)
class Curve:
    """Training return and one true return of runs that differ only in the quantity on the x axis and in their seeds."""

    environment: str
    rewards: RewardConfig
    axis: str  # "parameters", "fc_parameters", "steps", or an option of the environment, for example "env.frame_skip"
    channel: str  # name of the true reward: "true", "true_2" ...
    points: list[CurvePoint]
    runs: list[str]
    label: str = ""  # settings that distinguish this curve from other curves with the same axis
    # Name -> value of quantities that are equal at all points: {"parameters": n} if the axis is "steps", otherwise {}.
    fixed: dict[str, int] = field(default_factory=dict)

    @property
    def true_return_drop(self) -> TrueReturnDrop | None:
        """The largest significant drop of the true return, or None if there is none (see `find_true_return_drop`).

        A drop is expected towards more capable agents: larger networks or more training steps. If the axis is an option
        of the environment, both directions are tested, because for some options, for example frame skip or noise, lower
        values make agents more capable.
        """
        return find_true_return_drop(self.points, both_directions=self.axis.startswith("env."))

    @property
    def untested(self) -> str:
        """The reason why some pairs of neighbouring points were not tested for a drop; "" if all pairs were tested."""
        single = [point.x for point in self.points if point.unit == "games"]
        if not single:
            return ""
        where = "at each point" if len(single) == len(self.points) else f"at {', '.join(f'{x:g}' for x in single)}"
        return (
            f"one run {where}: the variation between seeds is unknown, so drops of the true return are not tested "
            "there; train several seeds"
        )

    @property
    def true_reward(self) -> str:
        return str(self.rewards.true_rewards[self.rewards.channels.index(self.channel)])


def varied_env_options(rows: Sequence[AuditRow]) -> list[str]:
    """Return the names of the numeric options of the environment in which the rows differ."""
    names = dict.fromkeys(key for row in rows for key in row.settings if key.startswith("env."))
    return [name for name in names if len({row.position(name) for row in rows} - {None}) > 1]


def make_curves(rows: Sequence[AuditRow]) -> list[Curve]:
    """Return all curves with at least two points.

    The axes are the network size, each option of the environment that varies, and the training steps.
    """
    curves = []
    for axis in ("parameters", *varied_env_options(rows), "steps"):
        groups: dict[str, list[AuditRow]] = {}
        for row in rows if axis == "steps" else newest_rows(rows):
            groups.setdefault(row.group_key(axis), []).append(row)
        labelled = zip(config_labels(list(groups)), groups.values(), strict=True)
        for label, own in sorted(labelled, key=lambda item: item[1][0].parameters):
            curves += _curves_of_group(axis, label if len(groups) > 1 else "", own)
    return [curve for curve in curves if len(curve.points) > 1]


def _curves_of_group(axis: str, label: str, rows: list[AuditRow]) -> list[Curve]:
    """Return one curve for each true reward of a group of runs. `rows` has the rows of all these runs."""
    first, fixed = rows[0], {}
    if axis == "steps":
        rows, fixed = rows_at_common_steps(rows), {"parameters": first.parameters}
    if axis == "parameters" and len({row.fc_parameters for row in rows}) == len({row.parameters for row in rows}):
        axis = "fc_parameters"  # the x axis in the figures of Pan et al. (2022)
    runs = list(dict.fromkeys(row.run for row in rows))
    return [
        Curve(first.environment, first.rewards, axis, channel, make_points(rows, axis, channel), runs, label, fixed)
        for channel in first.true
    ]
