"""What came of a study: a row for each variant, from the runs that are trained to their end.

A run's final return is the mean return of the whole games of the last tenth of its training. A row has the mean and the
interquartile mean of its runs' final returns, and the mean of their final true returns where they watch a true reward. Where
the environment is in the grid and `[normalise]` says what counts as 0 and as 1 in each, rows follow that take all environments
together.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from bestiary.analysis.compare import TRUE, Group, final_return, games_of, make_group
from bestiary.errors import UserError
from bestiary.studies.statistics import interval, iqm
from bestiary.studies.study import Study
from bestiary.studies.trial import Trial


@dataclass(frozen=True)
class Outcome:
    """What one run came to; None where it has not."""

    trial: Trial
    trained: bool
    final: float | None = None
    evaluated: float | None = None
    true_return: float | None = None
    true_evaluated: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Row:
    label: str
    environments: tuple[str, ...]
    parameters: tuple[int, ...]
    outcomes: list[Outcome]  # of all runs planned
    scores: list[np.ndarray] = field(default_factory=list)  # one array an environment, one score a finished run

    @property
    def finished(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.trained]

    def numbers(self) -> dict[str, float]:
        """The statistics by name; without those that nothing is known about yet."""
        found: dict[str, float] = {}
        if self.scores:
            scores = np.concatenate(self.scores)
            found |= {"mean": float(scores.mean()), "iqm": iqm(self.scores)}
            if len(scores) > len(self.scores):
                found["ci_low"], found["ci_high"] = interval(self.scores)
            found |= {"lowest": float(scores.min()), "highest": float(scores.max())}
        for name in ("true_return", "evaluated", "true_evaluated"):
            known = [value for outcome in self.outcomes if (value := getattr(outcome, name)) is not None]
            if known and len(self.environments) == 1:
                found[name] = float(np.mean(known))
        timed = [(o.seconds, o.trial.run.steps) for o in self.outcomes if o.seconds]
        if timed:
            seconds, steps = np.sum(timed, axis=0)
            found |= {"minutes": float(seconds) / len(timed) / 60, "steps_per_second": float(steps / seconds)}
        return found


def collect(trials: list[Trial]) -> list[Outcome]:
    """Read every run folder; what is unfinished, missing or broken gives an outcome with nothing in it."""
    return [_outcome(trial) if trial.trained else Outcome(trial, False) for trial in trials]


def _outcome(trial: Trial) -> Outcome:
    final = true = seconds = None
    with suppress(UserError):  # it ended before any game did
        final = final_return(trial.run)
        true = final_return(trial.run, column=TRUE) if TRUE in trial.run.episodes else None
    with suppress(OSError, ValueError, KeyError):  # a damaged checkpoint
        seconds = float(trial.run.checkpoints[-1].state()["seconds"])
    evaluation = trial.evaluation() or {}
    return Outcome(trial, True, final, evaluation.get("mean"), true, evaluation.get("true"), seconds)


def rows(study: Study, outcomes: list[Outcome]) -> list[Row]:
    """A row a variant; then, where asked for, a row for each family of variants that differ only in their environment."""
    made = []
    for variant in study.variants:
        own = [outcome for outcome in outcomes if outcome.trial.variant is variant]
        scores = _finals(own)
        made.append(Row(variant.name, variant.config.envs, (variant.parameters,), own, [scores] if len(scores) else []))
    families = dict.fromkeys(variant.family for variant in study.variants) if study.normalise else {}
    for family in families:
        members = [row for row in made if row.outcomes[0].trial.variant.family == family]
        if len(members) > 1 and all(row.scores for row in members):
            made.append(_together(family, members, study.normalise))
    return made


def _together(family: str, members: list[Row], normalise: dict[str, tuple[float, float]]) -> Row:
    scores = []
    for row in members:
        low, high = normalise[row.environments[0]]
        scores.append((row.scores[0] - low) / (high - low))
    return Row(
        f"{family} (normalised, {len(members)} environments)",
        tuple(row.environments[0] for row in members),
        tuple(dict.fromkeys(row.parameters[0] for row in members)),
        [outcome for row in members for outcome in row.outcomes],
        scores,
    )


def _finals(outcomes: Iterable[Outcome]) -> np.ndarray:
    return np.array([outcome.final for outcome in outcomes if outcome.final is not None])


def curves(study: Study, trials: list[Trial]) -> dict[str, dict[str, list[Group]]]:
    """Learning curves by environment, one a variant with a band over its seeds; unfinished runs as far as they are.

    Of a study with variants at several points of a grid, a panel for each point."""
    figures: dict[str, dict[str, list[Group]]] = {}
    for variant in study.variants:
        runs = [trial.run for trial in trials if trial.variant is variant and _has_games(trial)]
        if runs:
            panel, label = (variant.point, variant.own) if variant.own else ("", variant.name)
            panels = figures.setdefault(variant.config.envs[0], {})
            panels.setdefault(panel, []).append(make_group(label, runs))
    return figures


def _has_games(trial: Trial) -> bool:
    try:
        return trial.exists and len(games_of(trial.run)[0]) > 0
    except UserError:
        return False
