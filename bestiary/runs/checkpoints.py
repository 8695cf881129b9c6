"""Checkpoints: the complete state of a training run between two updates.

    checkpoints/000001000000/      named by the number of steps
        model.safetensors          weights of the agent
        optimizer.safetensors      state of the optimizers
        algorithm.safetensors      the algorithm's own parameters and state, if it has any
        actor.safetensors          serial runs: state of the environments, recurrent state, random generator, and sums
                                   over the unfinished episodes; other runs: no tensors
        state.json                 counters, the config, and the state of each callback
        manifest.json              size and SHA-256 hash of each file above; this file is written last
    checkpoints/latest             link to the newest checkpoint
    checkpoints/best               link to the checkpoint with the best validation score
    checkpoints/best-training      link to the checkpoint with the best training return
    checkpoints/best-true          link to the checkpoint with the best true return

The last two links exist only in runs with --reward or --true-reward.

A checkpoint is first written to a temporary folder `.saving-...` and synchronised to disk. Then the folder is renamed.
A reader therefore never sees an incomplete checkpoint. No file is pickled, so loading a checkpoint runs no code.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.numpy

from bestiary.step import Arrays
from bestiary.utils import safe_files
from bestiary.utils.console import note
from bestiary.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor  # imported in functions only, because the import of torch takes more than 1 s

BEST_LINKS = ("best", "best-training", "best-true")  # `remove_old` keeps the checkpoints to which these links point
CHECKPOINT_FILES = (
    "model.safetensors",
    "optimizer.safetensors",
    "algorithm.safetensors",
    "actor.safetensors",
    "state.json",
)
TENSOR_FILES = ("model", "optimizer", "algorithm")  # files of the learner; `algorithm` is written only if not empty


@dataclass(frozen=True)
class Checkpoint:
    """The folder of one checkpoint."""

    path: Path

    @property
    def root(self) -> Path:
        """The run folder. Symbolic links below it are refused when the checkpoint is read."""
        return self.path.parents[1]

    @property
    def steps(self) -> int:
        """The step count of the run when the checkpoint was written."""
        return int(self.path.name)

    def find_damage(self) -> str | None:
        """Compare the files with manifest.json. Return a description of the first damage, or None if there is none."""
        try:
            manifest = json.loads(safe_files.read_text(self.path / "manifest.json", self.root))
            for name in sorted(manifest.keys() | {"model.safetensors", "state.json"}):
                if name not in CHECKPOINT_FILES:
                    return f"manifest.json lists {name!r}, which is not a file of a checkpoint"
                expected_size = manifest[name]["bytes"]
                expected_hash = manifest[name]["sha256"]
                descriptor = safe_files.open_file(self.path / name, os.O_RDONLY, self.root)
                with os.fdopen(descriptor, "rb") as file:
                    size = os.fstat(descriptor).st_size
                    if size > safe_files.MAX_TENSOR_BYTES:
                        return f"{name} has {size} bytes; at most {safe_files.MAX_TENSOR_BYTES} are read"
                    if size != expected_size:
                        return f"{name} has {size} bytes instead of {expected_size}"
                    if hashlib.file_digest(file, "sha256").hexdigest() != expected_hash:
                        return f"{name} differs from its hash in manifest.json"
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def load_model(self) -> "dict[str, Tensor]":
        """Return the weights of the agent by name."""
        return self._load_tensors("model")

    def load_learner(self) -> "dict[str, dict[str, Tensor]]":
        """Return the tensors of the learner: weights, state of the optimizers, and state of the algorithm."""
        tensors: dict[str, dict[str, Tensor]] = {"model": self.load_model(), "algorithm": {}}
        tensors["optimizer"] = self._load_tensors("optimizer")
        if os.path.lexists(self.path / "algorithm.safetensors"):
            tensors["algorithm"] = self._load_tensors("algorithm")
        return tensors

    def load_actor(self) -> Arrays:
        """Return the arrays of the actor (see `Actor.save`)."""
        return self._load("actor.safetensors", safetensors.numpy.load)

    def load_state(self) -> dict[str, Any]:
        """Return the content of state.json. Raise UserError if it is not a JSON object; its values are not checked."""
        try:
            state = json.loads(safe_files.read_text(self.path / "state.json", self.root))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{self.path / 'state.json'} cannot be read: {error}") from error
        if not isinstance(state, dict):
            raise UserError(f"{self.path / 'state.json'} is not a file of a Bestiary checkpoint")
        return state

    def _load_tensors(self, name: str) -> "dict[str, Tensor]":
        """Load the tensors of one of TENSOR_FILES."""
        import safetensors.torch

        return self._load(f"{name}.safetensors", safetensors.torch.load)

    def _load(self, name: str, load: Callable[[bytes], Any]) -> Any:
        """Load a safetensors file of the checkpoint. Raise UserError if the file is missing or not valid."""
        try:
            return load(safe_files.read_bytes(self.path / name, self.root, safe_files.MAX_TENSOR_BYTES))
        # The readers of safetensors raise various errors if the header is damaged.
        except (Exception, MemoryError) as error:
            raise UserError(f"{self.path / name} cannot be read as a file of a checkpoint: {error}") from error


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return all checkpoints in a folder, including damaged checkpoints, from the oldest to the newest."""
    return [
        Checkpoint(path) for path in safe_files.list_folders(folder, folder.parent) if is_checkpoint_name(path.name)
    ]


def is_checkpoint_name(name: str) -> bool:
    """Return whether a name could be the name of a checkpoint folder, that is, whether it consists of 12 digits."""
    return re.fullmatch(r"[0-9]{12}", name) is not None


def write_checkpoint(
    folder: Path,
    steps: int,
    tensors: "dict[str, dict[str, Tensor]]",
    actor: Arrays,
    state: dict[str, Any],
) -> Checkpoint:
    """Write a checkpoint atomically and update the link `latest`.

    `tensors` has the keys "model" and "optimizer" and optionally "algorithm". If there is already an undamaged
    checkpoint with the same step count, nothing is written. A damaged checkpoint with the same step count is renamed to
    `damaged-...`.
    """
    import safetensors.torch

    name, temporary = f"{steps:012d}", f".saving-{steps:012d}"
    safe_files.make_folder(folder, folder.parent)
    # Open all files relative to the descriptor of the folder. Another user might replace the folder by a link during
    # the training.
    with safe_files.open_parent(folder / name, folder.parent) as parent:
        if name in os.listdir(parent):
            if Checkpoint(folder / name).find_damage() is None:
                return Checkpoint(folder / name)
            damaged = unused_path(folder / f"damaged-{name}").name
            os.rename(name, damaged, src_dir_fd=parent, dst_dir_fd=parent)
        shutil.rmtree(temporary, ignore_errors=True, dir_fd=parent)
        os.mkdir(temporary, dir_fd=parent)
        try:
            files: dict[str, Callable[[], bytes]] = {}
            for part in (part for part in TENSOR_FILES if part != "algorithm" or tensors.get(part)):
                contiguous = {key: value.detach().contiguous() for key, value in tensors[part].items()}
                files[f"{part}.safetensors"] = partial(safetensors.torch.save, contiguous)
            files["actor.safetensors"] = partial(safetensors.numpy.save, actor)
            files["state.json"] = lambda: json.dumps(state, indent=1).encode()
            _write_files(temporary, parent, files)
            os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
            os.fsync(parent)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True, dir_fd=parent)
            raise
    replace_link(folder / "latest", name, folder.parent)
    return Checkpoint(folder / name)


def _write_files(folder: str, parent: int, files: Mapping[str, Callable[[], bytes]]) -> None:
    """Write files and manifest.json to a folder, and wait until they are on disk.

    `parent` is the descriptor of the folder that contains `folder`. `files` maps the name of each file to a function
    that returns the content of the file. In this way, only the content of one file is in memory at a time.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        manifest = {}
        for name, get_content in files.items():
            content = get_content()
            manifest[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            safe_files.write_new(name, content, descriptor)
        safe_files.write_new("manifest.json", json.dumps(manifest, indent=1).encode(), descriptor)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(folder: Path, names: Iterable[str]) -> None:
    """Write manifest.json with the size and the hash of each file in `names`."""
    manifest = {name: {"bytes": (folder / name).stat().st_size, "sha256": _sha256(folder / name)} for name in names}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


def remove_unfinished(folder: Path) -> list[str]:
    """Remove what a training process that was killed has left: incomplete checkpoints, temporary files and links.

    `folder` is the folder with the checkpoints. Return the names of the incomplete checkpoints. Temporary files in
    other subfolders of the run remain, because another process may be writing them, for example an evaluation.
    """
    left = [path.name for path in safe_files.list_folders(folder, folder.parent)]
    left = [name for name in left if name.startswith((".saving-", ".removing-"))]
    if left:
        with safe_files.open_parent(folder / "x", folder.parent) as parent:
            for name in left:
                shutil.rmtree(name, ignore_errors=True, dir_fd=parent)
    for place in (folder.parent, folder):
        with contextlib.suppress(OSError), safe_files.open_parent(place / "x", folder.parent) as parent:
            for name in os.listdir(parent):
                if name.startswith(safe_files.TEMPORARY_PREFIX):
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=parent)
    return left


def remove_old(folder: Path, keep_every: int, keep_at: Iterable[int] = (), keep_newest: int = 2) -> list[str]:
    """Remove old checkpoints and return their names.

    These checkpoints are kept:
    - the `keep_newest` newest checkpoints;
    - the checkpoints to which the BEST_LINKS point;
    - the first checkpoint at or after each multiple of `keep_every` steps (none if `keep_every` is 0);
    - the first checkpoint at or after each step in `keep_at`.
    """
    found = list_checkpoints(folder)
    kept = {c.steps for c in found[-keep_newest:]} | {best_steps(folder, name) for name in BEST_LINKS}
    for steps in keep_at:
        kept |= {c.steps for c in found if c.steps >= steps and not any(steps <= d.steps < c.steps for d in found)}
    if keep_every:
        last_multiple = 0
        for checkpoint in found:
            if checkpoint.steps // keep_every > last_multiple:
                last_multiple = checkpoint.steps // keep_every
                kept.add(checkpoint.steps)
    removed = [checkpoint.path.name for checkpoint in found if checkpoint.steps not in kept]
    with safe_files.open_parent(folder / "x", folder.parent) as parent:
        for name in removed:
            # Rename the folder first. If its removal fails halfway, the remaining files do not look like a checkpoint.
            os.rename(name, f".removing-{name}", src_dir_fd=parent, dst_dir_fd=parent)
            shutil.rmtree(f".removing-{name}", ignore_errors=True, dir_fd=parent)
    return removed


def best_steps(folder: Path, name: str = "best") -> int | None:
    """Return the step count of the checkpoint to which the link `name` points, or None if there is no such link."""
    try:
        target = os.readlink(folder / name)
    except OSError:  # there is no such link
        return None
    # Ignore a link that does not point to a checkpoint in this folder.
    return int(target) if is_checkpoint_name(target) and (folder / target).is_dir() else None


def newest_intact(folder: Path) -> Checkpoint | None:
    """Return the newest undamaged checkpoint, or None if there is none."""
    return next((c for c in reversed(list_checkpoints(folder)) if c.find_damage() is None), None)


def choose(run_path: Path, steps: int | None = None) -> Checkpoint:
    """Return the newest checkpoint of a run or, if `steps` is given, the checkpoint nearest to this step.

    Raise UserError if the run has no checkpoint, or if the chosen checkpoint is damaged.
    """
    folder = run_path / "checkpoints"
    found = list_checkpoints(folder)
    if not found and folder.is_symlink():
        raise UserError(f"{folder} is a symbolic link, which is not followed; replace it by its target")
    if not found:
        raise UserError(f"{run_path} has no checkpoint yet")
    chosen = found[-1] if steps is None else min(found, key=lambda c: abs(c.steps - steps))
    damage = chosen.find_damage()
    if damage is not None:
        intact = newest_intact(folder)
        if intact is not None:
            advice = f"the newest undamaged checkpoint is --checkpoint {intact.steps}"
        else:
            advice = (
                "this run has no undamaged checkpoint; train from step 0 with: "
                f"bestiary train --config {run_path / 'config.toml'}"
            )
        raise UserError(f"{chosen.path} is damaged: {damage}; {advice}")
    if steps is not None and chosen.steps != steps:
        note(f"{run_path} has no checkpoint at step {steps}; using the nearest checkpoint, at step {chosen.steps}")
    return chosen


def abandon_later(folder: Path, steps: int) -> list[tuple[str, str]]:
    """Rename the checkpoints after `steps` to abandoned-*. Return pairs (old name, new name)."""
    renamed = []
    for checkpoint in list_checkpoints(folder):
        if checkpoint.steps > steps:
            new_path = unused_path(checkpoint.path.with_name(f"abandoned-{checkpoint.path.name}"))
            checkpoint.path.rename(new_path)
            renamed.append((checkpoint.path.name, new_path.name))
    return renamed


def unused_path(path: Path) -> Path:
    """Return `path` if it does not exist. Otherwise return the first path NAME-2, NAME-3, ... that does not exist."""
    number = 2
    candidate = path
    while os.path.lexists(candidate):
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
        number += 1
    return candidate


def replace_link(path: Path, target: str, root: Path | None = None) -> None:
    """Make `path` a symbolic link to `target`. Replace an older link, but do nothing if `path` is a file or folder.

    `root` is a folder that contains the link (default: the folder in which the link is). Symbolic links in the part of
    `path` after `root` are not followed.

    Errors are ignored, because these links are only a convenience and some file systems do not support them.
    """
    if os.path.lexists(path) and not path.is_symlink():
        return
    with contextlib.suppress(OSError), safe_files.open_parent(path, root) as parent:
        temporary = f"{safe_files.TEMPORARY_PREFIX}{os.getpid()}-{path.name}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=parent)
        os.symlink(target, temporary, dir_fd=parent)
        os.replace(temporary, path.name, src_dir_fd=parent, dst_dir_fd=parent)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
