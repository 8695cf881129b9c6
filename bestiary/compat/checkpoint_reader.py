"""Program that reads one file of `torch.save` from standard input: `python checkpoint_reader.py FOLDER < model.tar`.

The file may come from another person, so it is not trusted. PyTorch's restricted unpickler (`weights_only=True`) reads
it and builds only tensors, containers, numbers and text. Memory, time and the size of the output are limited. The
results are written to FOLDER:

    tensors.safetensors    model/NAME: weights and buffers; optimizer/INDEX.NAME: state of the optimizer per parameter
    contents.json          the dataclass Contents, or {"error": TEXT}

`checkpoint_file.py` runs this program in a child process and reads its results. The program imports no other module of
Bestiary.
"""

import json
import os
import pickle
import re
import resource
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import safetensors.torch
import torch
from torch import Tensor

MAX_TENSORS = 10_000
MAX_NAME_LENGTH = 200
MAX_TEXT_LENGTH = 1_000
MEMORY_FACTOR = 6  # memory limit, in file sizes; the file, its tensors and two copies of the tensors need about 4
MEMORY_RESERVE = 512 * 2**20  # further memory that the process may use after the start, in bytes
GIT_LFS_START = b"version https://git-lfs"
OUTPUT_RESERVE = 64 * 2**20  # bytes that the results may have in addition to twice the size of the file
TENSOR_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8)


class Refused(Exception):
    """The file cannot be read; the message is the reason."""


@dataclass
class Contents:
    """What a checkpoint contains besides its tensors."""

    names: list[str] = field(default_factory=list)  # names of weights and buffers, in the order of the network
    num_optimized: int = 0  # number of parameters of the optimizer
    flags: dict[str, Any] = field(default_factory=dict)  # flags of the original program
    updates: int | None = None  # number of updates, counted by the learning-rate scheduler
    steps: int | None = None  # number of steps of the training


class IgnoredObject:
    """Placeholder for NumPy types and numbers, which PolyBeast stores in its statistics. Bestiary does not use them."""

    def __new__(cls, *arguments: Any) -> "IgnoredObject":
        return super().__new__(cls)

    def __init__(self, *arguments: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


# The unpickler creates an IgnoredObject wherever the file names one of these functions, so NumPy is not called.
IGNORED = ("numpy.dtype", "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")


def main(folder: Path) -> None:
    """Read the file at standard input and write the results to `folder`."""
    file_bytes = os.fstat(sys.stdin.fileno()).st_size
    limit_resources(file_bytes)
    try:
        contents, tensors = read_checkpoint(sys.stdin.buffer, file_bytes)
        safetensors.torch.save_file(tensors, folder / "tensors.safetensors")
        result = asdict(contents)
    except Refused as error:
        result = {"error": str(error)}
    except (MemoryError, RecursionError):
        result = {"error": "reading it needs more memory than a checkpoint of this size should need"}
    except Exception as error:  # the readers of PyTorch raise various errors for damaged files
        result = {"error": describe(error)}
    (folder / "contents.json").write_text(json.dumps(result))


def limit_resources(file_bytes: int) -> None:
    """Limit the memory of this process and the size of its files, in proportion to the size of the checkpoint.

    The memory that the process already uses is added to the limit, because PyTorch itself maps up to several GB.
    """
    status = Path("/proc/self/statm")
    if status.exists():  # Linux; other systems do not enforce a limit on address space
        used = int(status.read_text().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, used + MEMORY_FACTOR * file_bytes + MEMORY_RESERVE)
    _limit(resource.RLIMIT_FSIZE, 2 * file_bytes + OUTPUT_RESERVE)
    _limit(resource.RLIMIT_CORE, 0)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def read_checkpoint(file: IO[bytes], file_bytes: int) -> tuple[Contents, dict[str, Tensor]]:
    """Return the contents and the tensors of a checkpoint. Raise Refused if it is not a checkpoint of TorchBeast."""
    check_archive(file, file_bytes)
    with torch.serialization.safe_globals([(IgnoredObject, name) for name in IGNORED]):
        data = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(data, dict) or not isinstance(data.get("model_state_dict"), Mapping):
        raise Refused("it has no model_state_dict, so it is not a checkpoint of TorchBeast or of its forks")
    contents = Contents()
    tensors: dict[str, Tensor] = {}
    for name, value in data["model_state_dict"].items():
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_NAME_LENGTH:
            raise Refused(f"{str(name)[:60]!r} is not a name of a tensor")
        contents.names.append(name)
        tensors[f"model/{name}"] = checked_tensor(name, value)
    state, contents.num_optimized = optimizer_state(data.get("optimizer_state_dict"))
    tensors |= state
    if len(tensors) > MAX_TENSORS:
        raise Refused(f"it has {len(tensors)} tensors; at most {MAX_TENSORS} are read")
    if (size := sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())) > 2 * file_bytes:
        raise Refused(f"its tensors have {size} bytes, the file only {file_bytes}")
    contents.flags = plain_values(data.get("flags"))
    contents.updates = _count(data.get("scheduler_state_dict"), "last_epoch")
    contents.steps = _count(data.get("stats"), "step")
    # Copy the tensors, because some may share memory, and the format safetensors does not allow this.
    return contents, {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def check_archive(file: IO[bytes], file_bytes: int) -> None:
    """Raise Refused for a pointer of Git LFS, and for a ZIP archive that is compressed or damaged.

    An archive counts as damaged, too, if its parts together are larger than the file.
    """
    try:
        if file.read(len(GIT_LFS_START)) == GIT_LFS_START:
            raise Refused("it is only a pointer of Git LFS; download the file with: git lfs pull")
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
                if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                    raise Refused("its archive is compressed; torch.save writes archives that are not compressed")
                if len(entries) > MAX_TENSORS or sum(entry.file_size for entry in entries) > file_bytes:
                    raise Refused("the parts of its archive are larger than the file")
                # torch.load does not compare checksums, so it would read weights with changed bits.
                if (damaged := archive.testzip()) is not None:
                    raise Refused(f"it is damaged: the checksum of its part {damaged[:MAX_NAME_LENGTH]!r} is wrong")
    finally:
        file.seek(0)


def checked_tensor(name: str, value: Any) -> Tensor:
    """Return a tensor of the file. Raise Refused if it is not an ordinary tensor in the memory of the CPU."""
    is_plain = isinstance(value, Tensor) and type(value) in (Tensor, torch.nn.Parameter)
    if not is_plain or value.layout != torch.strided or value.device.type != "cpu" or value.dtype not in TENSOR_TYPES:
        raise Refused(f"{name} is not an ordinary tensor of numbers")
    # A tensor of the shape [1000000000, 0] needs no data. With such a tensor, a small file could request a huge
    # network.
    if value.numel() == 0:
        raise Refused(f"{name} is empty")
    return value


def optimizer_state(saved: Any) -> tuple[dict[str, Tensor], int]:
    """Return the state of the optimizer as tensors, and the number of its parameters.

    The names have the form optimizer/INDEX.NAME, and INDEX is the position of the parameter in the optimizer. Older
    versions of PyTorch identify parameters by memory addresses, which are replaced by positions. If the file has no
    usable state, return ({}, 0).
    """
    if not isinstance(saved, Mapping):
        return {}, 0
    groups, state = saved.get("param_groups"), saved.get("state")
    if not isinstance(groups, list) or not isinstance(state, Mapping):
        return {}, 0
    keys = [key for group in groups if isinstance(group, Mapping) for key in group.get("params", ())]
    tensors = {}
    for position, key in enumerate(keys[:MAX_TENSORS]):
        values = state.get(key, {})
        for name, value in values.items() if isinstance(values, Mapping) else ():
            full_name = f"optimizer/{position}.{str(name)[:MAX_NAME_LENGTH]}"
            if type(value) in (int, float):  # older versions of PyTorch count steps with an int
                tensors[full_name] = torch.tensor(float(value))
            elif isinstance(value, Tensor):
                tensors[full_name] = checked_tensor(full_name, value)
    return tensors, len(keys)


def plain_values(saved: Any) -> dict[str, Any]:
    """Return the numbers, texts and booleans of a dict. Other values, for example devices, are left out.

    Texts with control characters are left out, too, because messages would contain them.
    """
    if not isinstance(saved, Mapping):
        return {}
    items = list(saved.items())[:MAX_TENSORS]
    return {key[:MAX_NAME_LENGTH]: value for key, value in items if isinstance(key, str) and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_TEXT_LENGTH and value.isprintable()
    return type(value) in (bool, float) or (type(value) is int and abs(value) < 2**62)


def _count(saved: Any, key: str) -> int | None:
    value = saved.get(key) if isinstance(saved, Mapping) else None
    return value if type(value) is int and 0 <= value < 2**62 else None


def describe(error: Exception) -> str:
    """Return the reason why PyTorch did not load the file, in one line."""
    text = str(error)
    if isinstance(error, pickle.UnpicklingError) and (found := re.search(r"GLOBAL (\S+)", text)):
        return f"it contains Python objects ({found[1]}), which could run code; only tensors and numbers are read"
    if "allocate" in text or "bad_alloc" in text:
        return "reading it needs more memory than a checkpoint of this size should need"
    text = text.partition("WeightsUnpickler error:")[2] or text  # PyTorch puts advice before the reason
    reason = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"it is damaged, or torch.save has not written it ({reason.partition('. ')[0][:150]})"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
