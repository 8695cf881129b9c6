"""Trials of a study. A trial is one run: a variant with a seed. Its progress is stored only in its run folder."""

import contextlib
import os
import shutil
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bestiary.config.config import Config
from bestiary.config.plugin_options import map_plugins
from bestiary.config.toml import flatten
from bestiary.config.training_options import is_compared
from bestiary.runs.machine_options import machine_flags
from bestiary.runs.run import ID_FILE, Run
from bestiary.studies.evaluations import EvaluationPlan, EvaluationRecord, find_records
from bestiary.studies.run_log import failure_reason
from bestiary.studies.study import Study
from bestiary.studies.variants import Variant
from bestiary.utils import safe_files
from bestiary.utils.console import format_count
from bestiary.utils.errors import UserError

LAST_ROW_BYTES = 4096  # number of bytes at the end of metrics.csv that are read to find its last row


@dataclass(frozen=True)
class TrialState:
    """Progress of a trial."""

    kind: str  # done, partial, missing, failed, running or changed
    text: str  # the kind and details, as shown to the user


@dataclass(frozen=True, eq=False)
class Trial:
    """One run of a study, with the paths of its files in the study's folder."""

    variant: Variant
    seed: int
    folder: Path  # folder of the study
    evaluations: tuple[EvaluationPlan, ...] = ()
    predecessor: "Trial | None" = None  # the trial from whose last checkpoint this one starts; None: random weights

    @property
    def name(self) -> str:
        return f"{self.variant.name}-s{self.seed}"

    @property
    def path(self) -> Path:
        return self.folder / self.name

    @property
    def log(self) -> Path:
        return self.folder / "logs" / f"{self.name}.log"

    @property
    def config_path(self) -> Path:
        return self.folder / "configs" / f"{self.name}.toml"

    @cached_property
    def config(self) -> Config:
        games = next((plan.episodes for plan in self.evaluations if plan.is_default), None)
        config = self.variant.with_seed(self.seed, games or 0)
        if self.predecessor is None:
            return config
        return replace(config, training=replace(config.training, init_from=str(self.predecessor.path)))

    @property
    def total_steps(self) -> int:
        assert self.config.training.steps is not None
        return self.config.training.steps

    @property
    def run(self) -> Run:
        return Run(self.path)

    @property
    def exists(self) -> bool:
        return (self.path / "config.toml").is_file()

    @property
    def is_trained(self) -> bool:
        """True if the run has a complete checkpoint at the last step of the training."""
        return self.exists and self.run.steps >= self.total_steps

    @property
    def steps(self) -> int:
        """The number of trained steps.

        It is the larger of two numbers: the steps of the newest checkpoint, and the steps in the last row of
        metrics.csv.
        """
        metrics = self.path / "metrics.csv"
        with contextlib.suppress(OSError, ValueError):
            descriptor = safe_files.open_file(metrics, os.O_RDONLY)
            with os.fdopen(descriptor, "rb") as file:
                file.seek(max(0, os.fstat(descriptor).st_size - LAST_ROW_BYTES))
                complete_rows = file.read().decode().rpartition("\n")[0]
            return max(self.run.steps, int(complete_rows.rpartition("\n")[2].partition(",")[0]))
        return self.run.steps

    def records(self, plan: EvaluationPlan) -> list[EvaluationRecord] | None:
        """Return the results of an evaluation, or None if the trial has not been evaluated in this way."""
        return find_records(self.run, self.config, plan) if self.exists else None

    def next_command(self) -> list[str] | None:
        """Return the arguments of the `bestiary` command that continues the trial, or None if it is done."""
        machine = machine_flags(self.config)
        if not self.exists:
            # Leave out --init-from, because the config file contains it. On the command line, --init-from would also
            # select the options of the other run.
            others = [flag for flag in machine if not flag.startswith("--init-from=")]
            return ["train", "--config", str(self.config_path), "--run-dir", str(self.path), *others]
        if not self.is_trained:
            return ["resume", str(self.path), *machine]
        for plan in self.evaluations:
            if self.records(plan) is None:
                return plan.command(self.path)
        return None

    @property
    def is_blocked(self) -> bool:
        """True if the trial cannot start yet, because the trial from which it starts is not trained."""
        return not self.exists and self.predecessor is not None and not self.predecessor.is_trained

    def state(self) -> TrialState:
        """Return the progress of the trial, read from its files."""
        if self.exists and (changes := self.changed_settings()):
            return TrialState("changed", f"changed: {'; '.join(changes)}")
        if self.next_command() is None:
            return TrialState("done", "done")
        if self.exists and self.run.is_locked:
            return TrialState("running", f"running, {self._progress(self.steps)}")
        if reason := failure_reason(self.log):
            return TrialState("failed", f"failed: {reason}")
        if not self.exists and self.is_blocked:
            assert self.predecessor is not None
            return TrialState("missing", f"missing, starts after {self.predecessor.name}")
        if not self.exists:
            return TrialState("missing", "missing")
        if self.is_trained:
            return TrialState("partial", "trained, not evaluated")
        return TrialState("partial", f"partial, {self._progress(self.run.steps)}")

    def _progress(self, steps: int) -> str:
        return f"{format_count(steps)} of {format_count(self.total_steps)} steps"

    def changed_settings(self) -> list[str]:
        """Return a text "KEY: A in the run, B in the study file" for each setting with two different values."""
        expected = _compared_settings(self.config)
        try:
            found = _compared_settings(self.run.config)
        except UserError as error:  # the config cannot be read, or the file of a plug-in has changed
            return [str(error)]
        if self.predecessor is not None:  # the same path can be written in two ways
            expected.pop("init_from", None)
            found.pop("init_from", None)
        differing = [key for key in {**found, **expected} if expected.get(key) != found.get(key)]
        return [
            f"{key}: {found.get(key, 'none')} in the run, {expected.get(key, 'none')} in the study file"
            for key in differing
        ]

    def remove_incomplete_folder(self) -> None:
        """Remove the run folder if the run was killed while it was creating the folder.

        Raise UserError if the folder contains a checkpoint, or files that a run does not create at its start.
        """
        if not self.path.is_dir() or self.exists:
            return
        own_files = ("checkpoints", "plugins", ID_FILE, "lock", "lock_owner.json")
        other_files = [p for p in self.path.iterdir() if p.name not in own_files and not p.name.startswith(".")]
        if other_files or any((self.path / "checkpoints").glob("*")):
            raise UserError(f"{self.path} exists and is not a run folder; move it to another place")
        shutil.rmtree(self.path)


def make_trials(study: Study, folder: Path) -> list[Trial]:
    """Return the trials of a study, one for each variant and seed.

    A trial comes after the trial from which it starts.
    """
    trials: dict[tuple[Variant, int], Trial] = {}
    for variant in study.variants:
        for seed in study.seeds:
            predecessor = trials[variant.after, seed] if variant.after is not None else None
            trials[variant, seed] = Trial(variant, seed, folder, study.evaluations_of(variant), predecessor)
    return list(trials.values())


def _compared_settings(config: Config) -> dict[str, Any]:
    """Return the settings that must not change when a trial is continued.

    They are the seed and all settings that are not in UNCOMPARED (config/training_options.py). Plug-ins are named
    `CLASS@HASH`, where HASH is the hash of the file. The path of the file therefore does not matter.
    """
    hashes = config.plugin_hashes
    flat = map_plugins(flatten(config.tables()), lambda ref: f"{ref.attribute}@{hashes[str(ref.path)][:8]}")
    return {key: value for key, value in flat.items() if key == "seed" or is_compared(key)}
