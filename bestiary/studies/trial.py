"""One run of a study: a variant with a seed. What it is to become, how far it is, and the command that takes it further."""

import contextlib
import json
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bestiary.config import BESIDE, Config
from bestiary.console import short
from bestiary.errors import UserError
from bestiary.runs.folder import Run
from bestiary.studies.attempts import failure
from bestiary.studies.study import Study, Variant
from bestiary.textconfig import flatten


@dataclass(frozen=True)
class State:
    kind: str  # done, part, missing, failed, running, changed
    text: str  # the same for people


@dataclass(frozen=True, eq=False)
class Trial:
    variant: Variant
    seed: int
    folder: Path  # of the study
    evaluate: int = 0

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
        return self.variant.with_seed(self.seed, self.evaluate)

    @property
    def total(self) -> int:
        assert self.config.training.steps is not None
        return self.config.training.steps

    @property
    def run(self) -> Run:
        return Run(self.path)

    @property
    def exists(self) -> bool:
        return (self.path / "config.toml").is_file()

    @property
    def trained(self) -> bool:
        """Its newest checkpoint is at the end. (A checkpoint's folder gets its number only when it is whole.)"""
        return self.exists and self.run.steps >= self.total

    @property
    def steps(self) -> int:
        """Steps done: of the newest checkpoint, or, while it is trained, of the newest row of metrics.csv."""
        with contextlib.suppress(OSError, ValueError):
            with (self.path / "metrics.csv").open("rb") as file:
                file.seek(max(0, (self.path / "metrics.csv").stat().st_size - 4096))
                whole = file.read().decode().rpartition("\n")[0]
            return max(self.run.steps, int(whole.rpartition("\n")[2].partition(",")[0]))
        return self.run.steps

    def evaluation(self) -> dict[str, Any] | None:
        """The statistics of the evaluation that the study asks for, if it has been made."""
        if not self.evaluate or not self.exists:
            return None
        asked = {
            "checkpoint_steps": self.run.steps,
            "games": self.evaluate,
            "policy": "sampled",
            "seed": 0,
            "environment_options": self.config.tables()["env"],
        }
        for path in sorted((self.path / "evaluations").glob("*.json")):
            with contextlib.suppress(OSError, ValueError, KeyError, AttributeError):
                found = json.loads(path.read_text())
                if all(found["protocol"].get(key) == value for key, value in asked.items()):
                    known = found.get("statistics", {"game": {"mean": None}})
                    return {**known["game"], **({"true": known["true"]["mean"]} if "true" in known else {})}
        return None

    def command(self) -> list[str] | None:
        """The words after `bestiary` that take it further; None where it is done."""
        if not self.exists:
            return ["train", "--config", str(self.config_path), "--run-dir", str(self.path)]
        if not self.trained:
            return ["resume", str(self.path)]
        if self.evaluate and self.evaluation() is None:
            return ["eval", str(self.path), "--episodes", str(self.evaluate)]
        return None

    def state(self) -> State:
        if self.exists and (changes := self.changes()):
            return State("changed", f"changed: {'; '.join(changes)}")
        if self.command() is None:
            return State("done", "done")
        if self.exists and self.run.being_written:
            return State("running", f"running, {short(self.steps)} of {short(self.total)}")
        if why := failure(self.log):
            return State("failed", f"failed: {why}")
        if not self.exists:
            return State("missing", "missing")
        if self.trained:
            return State("part", "trained, not evaluated")
        return State("part", f"part, {short(self.run.steps)} of {short(self.total)}")

    def changes(self) -> list[str]:
        """How the run folder's settings differ from what the study's file says now: `steps 5000 there, 9000 in the file`."""
        mine = _settings(self.config)
        try:
            theirs = _settings(self.run.config)
        except UserError as error:  # it cannot be read any more, or one of the user's own parts has changed
            return [str(error)]
        differing = [key for key in {**theirs, **mine} if mine.get(key) != theirs.get(key)]
        return [f"{key} {theirs.get(key, 'none')} there, {mine.get(key, 'none')} in the file" for key in differing]

    def tidy(self) -> None:
        """Remove what a run that was killed while its folder was being made left behind: a folder with nothing in it yet."""
        if not self.path.is_dir() or self.exists:
            return
        strange = [p for p in self.path.iterdir() if p.name not in ("checkpoints", "plugins", ".config.toml")]
        if strange or any((self.path / "checkpoints").glob("*")):
            raise UserError(f"{self.path} exists and is not a run folder; move it away")
        shutil.rmtree(self.path)


def make_trials(study: Study, folder: Path) -> list[Trial]:
    return [Trial(variant, seed, folder, study.evaluate) for variant in study.variants for seed in study.seeds]


def _settings(config: Config) -> dict[str, Any]:
    """What makes a run another run: not how it is logged, saved and cut into groups."""
    flat = {**flatten(config.tables()), **config.plugin_hashes}
    return {key: value for key, value in flat.items() if key == "seed" or key not in BESIDE}
