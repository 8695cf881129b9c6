"""Reading of checkpoints of TorchBeast and its forks (`model.tar`), in a child process (`checkpoint_reader.py`)."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from bestiary.compat import checkpoint_reader
from bestiary.compat.checkpoint_reader import Contents, plain_values
from bestiary.utils import safe_files
from bestiary.utils.errors import UserError
from bestiary.utils.temp_dirs import make_temp_dir

MAX_FILE_BYTES = 4 * 2**30
MAX_SECONDS = 300.0


@dataclass(frozen=True)
class OriginalCheckpoint:
    """A checkpoint of TorchBeast or of one of its forks."""

    path: Path
    contents: Contents
    weights: dict[str, Tensor]  # weights and buffers by their original names, in the order of the original network
    optimizer: dict[str, Tensor]  # state by name, for example "3.square_avg" for parameter 3


def read_checkpoint(path: Path, max_seconds: float = MAX_SECONDS) -> OriginalCheckpoint:
    """Read a checkpoint of TorchBeast or of a fork. PyTorch reads it with its restricted unpickler, which runs no code.

    Raises:
        UserError: the file cannot be read or is damaged; it contains other things than tensors, numbers and text; or it
            needs more memory or time than the limits for a file of its size.
    """
    if path.is_symlink():
        raise UserError(f"{path} is a symbolic link; give the path of the file to which it points")
    try:
        descriptor = safe_files.open_file(path, os.O_RDONLY, max_bytes=MAX_FILE_BYTES)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    folder = make_temp_dir("bestiary-import-")
    try:
        # -P: do not import modules from the working directory. Its files may come from another person.
        command = [sys.executable, "-P", checkpoint_reader.__file__, str(folder)]
        quiet = subprocess.DEVNULL
        subprocess.run(command, stdin=descriptor, stdout=quiet, stderr=quiet, timeout=max_seconds, check=False)
        return _read_results(path, folder)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{path} cannot be imported: reading it took more than {max_seconds:g} s") from error
    finally:
        os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)


def _read_results(path: Path, folder: Path) -> OriginalCheckpoint:
    """Return the results of the child process in `folder`. Raise UserError if it refused the file or crashed."""
    try:
        result = json.loads(safe_files.read_text(folder / "contents.json"))
        if "error" in result:
            raise UserError(f"{path} cannot be imported: {_one_line(result['error'])}")
        tensors = safetensors.torch.load(safe_files.read_bytes(folder / "tensors.safetensors", max_bytes=2**36))
    except (OSError, ValueError) as error:
        message = "the process that read it crashed, probably because it needed too much memory"
        raise UserError(f"{path} cannot be imported: {message}") from error
    contents = Contents(**result)
    optimizer = {
        name.removeprefix("optimizer/"): tensor for name, tensor in tensors.items() if name.startswith("optimizer/")
    }
    return OriginalCheckpoint(path, contents, {name: tensors[f"model/{name}"] for name in contents.names}, optimizer)


def read_meta(path: Path) -> dict[str, Any]:
    """Return the flags in a file meta.json of TorchBeast. Raise UserError if the file has none."""
    try:
        arguments = json.loads(safe_files.read_text(path))["args"]
        if not isinstance(arguments, dict):
            raise TypeError
        return plain_values(arguments)
    except OSError as error:
        raise UserError(f"--meta {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"--meta {path}: not a meta.json of TorchBeast: the entry 'args' is missing") from error


def _one_line(text: str) -> str:
    return " ".join(str(text).split())
