"""The table [search] of a study file: a search for good values of options with Optuna.

    [search]
    trials = 20                         # number of configurations that are tried
    value = "training"                  # maximised: final return of the "training", or return of the last "validation"
    sampler = "tpe"                     # method that chooses the configurations: tpe, random or qmc
    pruner = "median"                   # method that stops bad trials early: none, median or halving

    [search.space]
    lr = { low = 1e-4, high = 1e-2, log = true }
    "memory.hidden" = { low = 32, high = 256, step = 32 }
    memory = ["gru", "lstm"]

Each trial trains the configuration [base] with other values of the options in [search.space], with the seed
`search.seed`. The best configuration is then trained again with the `seeds` of the study file.
"""

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bestiary.studies.study_file import StudyFile, scale_table
from bestiary.utils.errors import UserError
from bestiary.utils.options import check_limits, convert, suggest

if TYPE_CHECKING:
    import optuna

VALUES = ("training", "validation")
SAMPLERS = ("tpe", "random", "qmc")
PRUNERS = ("none", "median", "halving")
RANGE_KEYS = ("low", "high", "log", "step")
# Options that cannot be searched. Results for different values of `env` or `steps` are not comparable. The seed is set
# by other keys of the study file.
FIXED_OPTIONS = ("env", "seed", "steps")
REPORTS_PER_TRIAL = 20  # number of intermediate values of a trial if `interval` is not given


@dataclass(frozen=True)
class Parameter:
    """An option that is searched: a range of numbers or a list of choices."""

    choices: tuple[Any, ...] = ()  # empty: a range
    low: float = 0
    high: float = 0
    log: bool = False  # True: values are drawn on a logarithmic scale
    step: float | None = None  # distance between neighbouring values; None: 1 for integers, otherwise any value

    @property
    def is_integer(self) -> bool:
        return not self.choices and all(isinstance(n, int) for n in (self.low, self.high, self.step or 1))

    @property
    def extremes(self) -> tuple[Any, ...]:
        """The values that are checked before the search starts: all choices, or both ends of the range."""
        return self.choices or (self.low, self.high)

    def distribution(self) -> "optuna.distributions.BaseDistribution":
        """Return the distribution of Optuna from which values are drawn. Choices are represented by labels."""
        from optuna import distributions

        if self.choices:
            return distributions.CategoricalDistribution([choice_label(choice) for choice in self.choices])
        if self.is_integer:
            step = int(self.step or 1)
            return distributions.IntDistribution(int(self.low), int(self.high), log=self.log, step=step)
        return distributions.FloatDistribution(self.low, self.high, log=self.log, step=self.step)

    def option_value(self, drawn: Any) -> Any:
        """Return the value of the option for a value drawn by Optuna. Round non-integers to 4 significant digits."""
        if self.choices:
            return next(choice for choice in self.choices if choice_label(choice) == drawn)
        if self.is_integer:
            return int(drawn)
        return min(max(float(f"{drawn:.4g}"), self.low), self.high)


def choice_label(choice: Any) -> str:
    return choice if isinstance(choice, str) else json.dumps(choice)


@dataclass(frozen=True)
class Search:
    """The content of the table [search]."""

    space: Mapping[str, Parameter]  # option -> values
    trials: int = 20  # number of configurations that are tried
    value: str = "training"  # maximised value, one of VALUES
    sampler: str = "tpe"  # one of SAMPLERS
    pruner: str = "none"  # one of PRUNERS
    startup: int = 5  # pruner "median": number of complete trials before the first trial can be pruned
    warmup: int = 0  # number of steps of a trial before the trial can be pruned
    interval: int = 0  # steps between two intermediate values; 0: a twentieth of the training
    seed: int = 0  # seed of all trials, and of the sampler
    options: Mapping[str, Any] | None = None  # options of all trials: [base] and [scale.NAME.options]

    def point_options(self, drawn: Mapping[str, Any]) -> dict[str, Any]:
        """Return {option: value} of a trial. `drawn` maps each searched option to the value that Optuna drew."""
        return {name: parameter.option_value(drawn[name]) for name, parameter in self.space.items()}

    def fingerprint(self, steps: int) -> str:
        """Return a hash of the settings that the values of the trials depend on. `steps` is the length of a trial."""
        space = {name: repr(parameter) for name, parameter in self.space.items()}
        content = [self.options, space, self.value, self.interval, self.seed, steps]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


# Type and limits of each key of [search], except the space.
_KEYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "trials": (int, {"low": 1, "high": 100_000}),
    "value": (str, {"choices": VALUES}),
    "sampler": (str, {"choices": SAMPLERS}),
    "pruner": (str, {"choices": PRUNERS}),
    "startup": (int, {"low": 1}),
    "warmup": (int, {"low": 0}),
    "interval": (int, {"low": 1}),
    "seed": (int, {"low": 0, "high": 2**32 - 1}),
}


def read_search(file: StudyFile, seeds: tuple[int, ...], problems: list[str]) -> Search | None:
    """Return the table [search] of a study file, or None if there is none. Append wrong values to `problems`."""
    if "search" not in file.tables:
        return None
    table = file.tables["search"]
    if not isinstance(table, Mapping):
        problems.append(f"{file.location('', 'search')}: search: expected a table [search]")
        return None
    for other in ("grid", "variant", "dashed"):
        if other in file.tables:
            problems.append(
                f"{file.location('', other)}: {other} cannot be combined with [search]; move its options to [base] or "
                "[search.space]"
            )
    values: dict[str, Any] = {}
    scaled = scale_table(file, "search")
    entries = [("search", key, value) for key, value in table.items() if key != "space"]
    entries += [(f"scale {file.scale} search", key, value) for key, value in scaled.items()]
    for where, key, value in entries:
        if key not in _KEYS:
            known = (*_KEYS, "space")
            problems.append(f"{file.location(where, key)}: search: unknown key {key}{suggest(key, known)}")
            continue
        kind, limits = _KEYS[key]
        try:
            values[key] = convert(value, kind)
            check_limits(values[key], limits)
        except (ValueError, TypeError) as error:
            problems.append(f"{file.location(where, key)}: search: {key} = {value!r}: {error}")
    space = _read_space(file, table.get("space"), problems)
    search = Search(space, **values) if not problems else None
    if search is not None and search.seed in seeds:
        problems.append(
            f"{file.location('', 'seeds')}: seeds: {search.seed} is the seed of the search; the best configuration "
            "must be trained again with other seeds"
        )
    return search


def _read_space(file: StudyFile, table: Any, problems: list[str]) -> dict[str, Parameter]:
    where = "search space"
    if not isinstance(table, Mapping) or not table:
        location = file.location(where) if table is not None else file.location("search")
        problems.append(
            f"{location}: [search.space] has no options; for example: lr = {{ low = 1e-4, high = 1e-2, log = true }}"
        )
        return {}
    space = {}
    for name, value in _flatten_space(table).items():
        location = file.location(where, name)
        if name in FIXED_OPTIONS:
            problems.append(f"{location}: {name} cannot be searched, because results would not be comparable")
            continue
        try:
            space[name] = _read_parameter(value)
        except ValueError as error:
            problems.append(f"{location}: {name} = {_shown(value)}: {error}")
    return space


def _flatten_space(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return {option: range or list}. The options of a component may stand in a table of their own."""
    flat = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        is_component = isinstance(value, Mapping) and any(isinstance(v, Mapping | list) for v in value.values())
        if is_component and not set(value) <= set(RANGE_KEYS):
            for inner, inner_value in value.items():
                flat[name if inner == "name" else f"{name}.{inner.replace('-', '_')}"] = inner_value
        else:
            flat[name] = value
    return flat


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) < 80 else f"{text[:77]}..."


def _read_parameter(value: Any) -> Parameter:
    """Convert a value of [search.space]. Raise ValueError if it is neither a range nor a list of choices."""
    if isinstance(value, list):
        labels = [choice_label(choice) for choice in value]
        if len(value) < 2 or len(set(labels)) < len(labels):
            raise ValueError("expected at least two different choices")
        return Parameter(choices=tuple(value))
    if not isinstance(value, Mapping):
        raise ValueError("expected a range { low = 1e-4, high = 1e-2 } or a list of choices")
    for key in value:
        if key not in RANGE_KEYS:
            raise ValueError(f"unknown key {key}{suggest(key, RANGE_KEYS)} (keys: {', '.join(RANGE_KEYS)})")
    for key in ("low", "high"):
        if key not in value:
            raise ValueError(f"{key} is missing")
    for key in ("low", "high", "step"):
        if not isinstance(value.get(key, 1), int | float) or isinstance(value.get(key), bool):
            raise ValueError(f"{key} must be a number")
    low, high, step, log = value["low"], value["high"], value.get("step"), value.get("log")
    if low >= high:
        raise ValueError(f"low must be below high; try low = {high:g}, high = {low:g}")
    if log not in (None, True, False):
        raise ValueError("log must be true or false")
    if log and low <= 0:
        raise ValueError(f"a range with log = true must be positive; try low = {high / 1000:g}")
    if step is not None and (log or not 0 < step <= high - low):
        problem = "step cannot be combined with log" if log else f"step must be above 0 and at most {high - low:g}"
        raise ValueError(problem)
    return Parameter(low=low, high=high, step=step, log=bool(log))


def points_to_check(search: Search) -> list[dict[str, Any]]:
    """Return points of the search space. Each extreme value of each option occurs in at least one point."""
    first = {name: parameter.extremes[0] for name, parameter in search.space.items()}
    others = [{**first, name: value} for name, parameter in search.space.items() for value in parameter.extremes[1:]]
    return [first, *others]


def make_sampler(search: Search, number: int) -> "optuna.samplers.BaseSampler":
    """Return the sampler for the trial with this number.

    The sampler depends only on the seed of the search and on the earlier trials. A search that was killed therefore
    continues with the same values as an uninterrupted search.
    """
    from optuna import samplers

    if search.sampler == "qmc":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna warns that the arguments of this sampler may change
            return samplers.QMCSampler(seed=search.seed, scramble=True, warn_independent_sampling=False)
    seed = int(hashlib.sha256(f"{search.seed} {number}".encode()).hexdigest()[:8], 16)
    if search.sampler == "random":
        return samplers.RandomSampler(seed=seed)
    return samplers.TPESampler(seed=seed, n_startup_trials=min(10, max(2, search.trials // 3)))


def make_pruner(search: Search, interval: int) -> "optuna.pruners.BasePruner":
    """Return the pruner. `interval` is the number of steps between two intermediate values."""
    from optuna import pruners

    if search.pruner == "median":
        return pruners.MedianPruner(n_startup_trials=search.startup, n_warmup_steps=search.warmup)
    if search.pruner == "halving":
        return pruners.SuccessiveHalvingPruner(min_resource=max(search.warmup, interval), reduction_factor=3)
    return pruners.NopPruner()


def check_installed(path: Path) -> None:
    """Raise UserError if Optuna is not installed. `path` is the study file."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise UserError(f"{path}: [search]: optuna is not installed; run: pip install 'bestiary[search]'") from error
