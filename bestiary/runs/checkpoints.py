"""Checkpoints: all of a training at one update boundary, written so that a reader sees all of it or none.

    checkpoints/000001000000/      named for the steps done
        model.safetensors          the agent's weights
        optimizer.safetensors      the optimizer's moments
        actor.safetensors          pools, memories, random streams, running episodes: what exact resume needs
        state.json                 counters, and how many rows the tables had
        manifest.json              size and SHA-256 of the files above; written last
    checkpoints/latest             a link to the newest
    checkpoints/best               a link to the one that validation liked most
    checkpoints/best-trained       where a run has a reward of its own: to the one whose games had the best trained return,
    checkpoints/best-true          and to the one whose games had the best true return

A checkpoint is written to a folder `.saving-...` beside its place, flushed to the disk, and renamed. Nothing here is
pickled: opening a checkpoint runs no code.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.numpy
import safetensors.torch
from torch import Tensor

from bestiary.console import note
from bestiary.errors import UserError
from bestiary.rollout import Arrays

BESTS = ("best", "best-trained", "best-true")  # links to checkpoints that are kept
FILES = ("model.safetensors", "optimizer.safetensors", "actor.safetensors", "state.json")


@dataclass(frozen=True)
class Checkpoint:
    path: Path

    @property
    def steps(self) -> int:
        return int(self.path.name)

    def problem(self) -> str | None:
        """What is wrong with the files, in words; None where all are as they were written."""
        try:
            manifest = json.loads((self.path / "manifest.json").read_text())
            for name in manifest.keys() | {"model.safetensors", "state.json"}:
                size, expected = manifest[name]["bytes"], manifest[name]["sha256"]
                if (self.path / name).stat().st_size != size:
                    return f"{name} has {(self.path / name).stat().st_size} bytes instead of {size}"
                if _sha256(self.path / name) != expected:
                    return f"{name} differs from its hash in manifest.json"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def model(self) -> dict[str, Tensor]:
        return self._read("model.safetensors", safetensors.torch.load_file)

    def optimizer(self) -> dict[str, Tensor]:
        return self._read("optimizer.safetensors", safetensors.torch.load_file)

    def actor(self) -> Arrays:
        return self._read("actor.safetensors", safetensors.numpy.load_file)

    def _read(self, name: str, load: Callable[[Path], Any]) -> Any:
        try:
            return load(self.path / name)
        except (safetensors.SafetensorError, OSError) as error:
            raise UserError(f"{self.path / name} is not a file of a Bestiary checkpoint: {error}") from error

    def state(self) -> dict[str, Any]:
        return json.loads((self.path / "state.json").read_text())


def checkpoints(folder: Path) -> list[Checkpoint]:
    """All checkpoints of a run, oldest first, damaged ones too: a folder gets its number only when it is whole."""
    found = [Checkpoint(path) for path in folder.glob("[0-9]*") if re.fullmatch(r"\d{12}", path.name)]
    return sorted(found, key=lambda checkpoint: checkpoint.steps)


def write_checkpoint(
    folder: Path,
    steps: int,
    tensors: dict[str, dict[str, Tensor]],
    actor: Arrays,
    state: dict[str, Any],
) -> Checkpoint:
    """Write all files beside the checkpoint's place, flush them, and move the folder there in one go."""
    temporary, final = folder / f".saving-{steps:012d}", folder / f"{steps:012d}"
    if final.exists():
        if Checkpoint(final).problem() is None:
            return Checkpoint(final)
        final.rename(unused(folder / f"damaged-{final.name}"))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        for name in ("model", "optimizer"):
            contiguous = {key: value.detach().contiguous() for key, value in tensors[name].items()}
            (temporary / f"{name}.safetensors").write_bytes(safetensors.torch.save(contiguous))
        (temporary / "actor.safetensors").write_bytes(safetensors.numpy.save(actor))
        (temporary / "state.json").write_text(json.dumps(state, indent=1))
        manifest = {
            name: {"bytes": (temporary / name).stat().st_size, "sha256": _sha256(temporary / name)} for name in FILES
        }
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
        for name in (*FILES, "manifest.json"):
            _flush(temporary / name)
        _flush(temporary)
        temporary.rename(final)
        _flush(folder)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _point_latest(folder, final.name)
    return Checkpoint(final)


def remove_unfinished(folder: Path) -> list[str]:
    """Clear away what an interrupted save or removal left behind; returns the names of what was removed."""
    left = sorted([*folder.glob(".saving-*"), *folder.glob(".removing-*")])
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in left]


def remove_old(folder: Path, ladder: int, marks: Iterable[int] = (), newest: int = 2) -> None:
    """Keep the newest checkpoints, the best, the first at or after each of `marks` and, every `ladder` steps, the first at or
    after that many; remove the others."""
    found = checkpoints(folder)
    keep, rung = {c.steps for c in found[-newest:]} | {best(folder, name) for name in BESTS}, -1
    for mark in marks:
        keep |= {c.steps for c in found if c.steps >= mark and not any(mark <= d.steps < c.steps for d in found)}
    for checkpoint in found:
        if ladder and checkpoint.steps // ladder > rung:
            rung = checkpoint.steps // ladder
            if rung > 0:
                keep.add(checkpoint.steps)
    for checkpoint in found:
        if checkpoint.steps not in keep:
            going = folder / f".removing-{checkpoint.path.name}"
            checkpoint.path.rename(going)  # first, so that a half-removed one is never taken for a checkpoint
            shutil.rmtree(going, ignore_errors=True)


def best(folder: Path, name: str = "best") -> int | None:
    """The steps of the checkpoint that validation liked most, or of another of BESTS."""
    found = folder / name
    return int(found.resolve().name) if found.is_dir() else None


def newest_good(folder: Path) -> Checkpoint | None:
    return next((c for c in reversed(checkpoints(folder)) if c.problem() is None), None)


def choose(run: Path, steps: int | None = None) -> Checkpoint:
    """The newest checkpoint, or the nearest to `steps`; refuses a damaged one and names the newest good one."""
    folder = run / "checkpoints"
    found = checkpoints(folder)
    if not found:
        raise UserError(f"{run} has no checkpoint yet")
    chosen = found[-1] if steps is None else min(found, key=lambda c: abs(c.steps - steps))
    if (problem := chosen.problem()) is not None:
        good = newest_good(folder)
        anew = f"no other is good; start anew with: bestiary train --config {run / 'config.toml'}"
        offer = f"the newest good one is --checkpoint {good.steps}" if good else anew
        raise UserError(f"{chosen.path} is damaged: {problem}; {offer}")
    if steps is not None and chosen.steps != steps:
        note(f"the checkpoint of {run} nearest to step {steps} is at {chosen.steps}")
    return chosen


def unused(path: Path) -> Path:
    """The path itself, or with -2, -3 ... before its suffix: the first that does not exist."""
    number, candidate = 2, path
    while candidate.exists():
        candidate, number = path.with_name(f"{path.stem}-{number}{path.suffix}"), number + 1
    return candidate


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _point_latest(folder: Path, name: str) -> None:
    link(folder / "latest", name)


def link(place: Path, target: str) -> None:
    """Make `place` a link to `target`, replacing an older link; leaves a real file or folder alone."""
    if place.exists() and not place.is_symlink():
        return
    with contextlib.suppress(OSError):  # a convenience; some file systems have no links
        temporary = place.with_name(f".{place.name}-{os.getpid()}")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(place)
