"""Evaluations of a study: which games the trained agents play, and the results in the run folders.

evaluate = 200                      # each agent plays 200 games of each of its training environments

[[evaluate]]                        # several evaluations, or other options
name = "test levels"
episodes = 200
levels = ["0:200", "1000:1200"]
greedy = true
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bestiary.config.config import Config
from bestiary.config.option_merging import expand_env_names
from bestiary.envs import canonical_name
from bestiary.envs.levels import parse_levels
from bestiary.evaluation.evaluate import default_games
from bestiary.evaluation.run_outputs import read_evaluations
from bestiary.runs.run import Run
from bestiary.studies.study_file import StudyFile, list_of_tables
from bestiary.utils.errors import UserError
from bestiary.utils.options import suggest

DEFAULT_NAME = "evaluation"


@dataclass(frozen=True)
class EvaluationPlan:
    """One evaluation of a study. Its fields are the options of `bestiary eval`."""

    name: str = DEFAULT_NAME
    episodes: int | None = None  # games of each task and range of levels; None: the default of `bestiary eval`
    env: tuple[str, ...] = ()  # environments; empty: the training environments of the run
    levels: tuple[str, ...] = ()  # ranges of levels; empty: the training levels
    checkpoints: str = "newest"  # newest or all
    greedy: bool = False
    seed: int = 0
    max_steps: int = 27_000
    variants: tuple[str, ...] = ()  # variants whose runs are evaluated; empty: all

    @property
    def is_default(self) -> bool:
        """True if training itself can make this evaluation at its end (option eval_at_end)."""
        return self == EvaluationPlan(self.name, self.episodes, variants=self.variants) and self.episodes is not None

    @property
    def games(self) -> int:
        """The number of games per task and range of levels, as saved in the protocol of the evaluation.

        If the ranges have different numbers of games, this is the largest number.
        """
        return self.episodes or max(map(default_games, self.levels), default=100)

    def command(self, run: Path) -> list[str]:
        """Return the arguments of the `bestiary` command that evaluates a run."""
        words = ["eval", str(run)]
        if self.episodes is not None:
            words += ["--episodes", str(self.episodes)]
        words += ["--env", *self.env] if self.env else []
        words += ["--levels", *self.levels] if self.levels else []
        words += ["--checkpoints", "all"] if self.checkpoints == "all" else []
        words += ["--greedy"] if self.greedy else []
        words += ["--seed", str(self.seed)] if self.seed else []
        words += ["--max-steps", str(self.max_steps)] if self.max_steps != EvaluationPlan.max_steps else []
        return words

    def is_done_by(self, protocol: Mapping[str, Any], config: Config, steps: int) -> bool:
        """Return whether a saved evaluation was made as this plan requires.

        `protocol` contains the settings that were saved with the evaluation. `steps` is the step count of the run's
        newest checkpoint.
        """
        required = {
            "environments": list(self.env or config.envs),
            "environment_options": config.tables()["env"],
            "games": self.games,
            "policy": "greedy" if self.greedy else "sampled",
            "seed": self.seed,
            "max_steps": self.max_steps,
        }
        if any(protocol[key] != value for key, value in required.items()):
            return False
        if list(self.levels) != protocol.get("levels", []) or "reset_state_every" in protocol:
            return False
        if self.checkpoints == "all":
            # An evaluation is saved after each checkpoint. If it was interrupted, it does not contain the newest
            # checkpoint.
            return protocol.get("checkpoints", [None])[-1] == steps
        return protocol.get("checkpoint_steps") == steps


@dataclass(frozen=True)
class EvaluationRecord:
    """Results of the games that one checkpoint of a run has played in one task and on one range of levels."""

    task: str
    levels: str  # range of levels; empty if the task has no levels
    role: str  # how the training used the levels: train, valid, test or empty (see `level_role`)
    checkpoint: int  # number of steps of the checkpoint
    games: int  # number of games
    mean: float  # mean return
    normalised: float | None  # mean normalised return; None if the task has no score range
    true_mean: float | None  # mean true return; None if the run has no true reward


def find_records(run: Run, config: Config, plan: EvaluationPlan) -> list[EvaluationRecord] | None:
    """Return the results of an evaluation of a run, or None if the evaluation has not been made."""
    steps = run.steps
    for content in read_evaluations(run):
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
            if plan.is_done_by(content["protocol"], config, steps):
                return list(_read_records(content, config, steps))
    return None


def _read_records(content: Mapping[str, Any], config: Config, steps: int) -> Iterator[EvaluationRecord]:
    for result in content.get("results", [content]):
        statistics = result["statistics"]
        yield EvaluationRecord(
            task=str(result.get("task", config.envs[0])),
            levels=str(result.get("levels", "")),
            role=str(result.get("role", "")),
            checkpoint=int(result.get("checkpoint", steps)),
            games=int(statistics["game_return"]["n"]),
            mean=float(statistics["game_return"]["mean"]),
            normalised=_mean(statistics, "normalised_return"),
            true_mean=_mean(statistics, "game_true_return"),
        )


def _mean(statistics: Mapping[str, Any], name: str) -> float | None:
    return float(statistics[name]["mean"]) if name in statistics else None


# --- reading from the study file ---


def read_plans(file: StudyFile, variants: list[str], problems: list[str]) -> tuple[EvaluationPlan, ...]:
    """Return the evaluations of a study file. Wrong values are appended to `problems`.

    `variants` are the names that the key `variants` may contain.
    """
    value, scaled = file.tables.get("evaluate", 0), file.selected_scale.get("evaluate", {})
    if not isinstance(scaled, Mapping):
        scaled = {"episodes": scaled}
    if _is_integer(value) and value >= 0:
        tables: list[Mapping[str, Any]] = [{"episodes": value}] if value else []
    elif isinstance(value, list):
        tables = list_of_tables(file, "evaluate", problems)
    else:
        problems.append(
            f"{file.location('', 'evaluate')}: evaluate = {value!r}: expected a number of games, such as 100, or "
            "[[evaluate]] tables"
        )
        return ()
    read = [
        _read_plan(file, f"evaluate {number}", {**table, **scaled}, variants, problems)
        for number, table in enumerate(tables)
    ]
    plans = [plan for plan in read if plan is not None]
    names = [plan.name for plan in plans]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"{file.location('', 'evaluate')}: two evaluations have the name {name}; rename one of them")
    return tuple(plans)


def _read_plan(
    file: StudyFile, table: str, options: dict[str, Any], variants: list[str], problems: list[str]
) -> EvaluationPlan | None:
    known = [field.name for field in fields(EvaluationPlan)]
    checks = {
        "name": ("a text", lambda v: isinstance(v, str) and v != ""),
        "episodes": ("a number of games >= 1", lambda v: _is_integer(v) and v >= 1),
        "env": ("a list of environments", _is_list_of_texts),
        "levels": ('a list of ranges, such as ["0:200"]', _is_list_of_texts),
        "checkpoints": ("newest or all", lambda v: v in ("newest", "all")),
        "greedy": ("true or false", lambda v: isinstance(v, bool)),
        "seed": ("an integer >= 0", lambda v: _is_integer(v) and v >= 0),
        "max_steps": ("a number of steps >= 1", lambda v: _is_integer(v) and v >= 1),
        "variants": ("a list of variants", _is_list_of_texts),
    }
    found = len(problems)
    for key, value in options.items():
        if key not in known:
            problems.append(f"{file.location(table, key)}: unknown key {key} of an evaluation{suggest(key, known)}")
        elif not checks[key][1](value):
            problems.append(f"{file.location(table, key)}: {key} = {value!r}: expected {checks[key][0]}")
        elif key == "variants":
            for name in value:
                if name not in variants:
                    problems.append(f"{file.location(table, key)}: there is no variant {name}{suggest(name, variants)}")
        elif key in ("env", "levels"):
            try:
                if key == "env":
                    value = [canonical_name(name) for name in expand_env_names(value)]
                else:
                    list(map(parse_levels, value))
            except (UserError, ValueError) as error:
                problems.append(f"{file.location(table, key)}: {error}")
        options[key] = tuple(value) if isinstance(value, list) else value
    return EvaluationPlan(**options) if len(problems) == found else None


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
