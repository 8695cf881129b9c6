"""Files that cannot be imported are refused with one line and status 2, and nothing is written or executed."""

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bestiary.cli.main import run_command
from bestiary.compat.checkpoint_file import read_checkpoint, read_meta
from bestiary.utils.errors import UserError
from tests.compat.recreated_networks import AtariNet, ResNet, checkpoint_of
from tests.compat.test_import_networks import MONO, POLY, POPART, REWARD

SMALL = {**REWARD, "hidden_size": 8, "num_layers": 1}


def small_checkpoint() -> dict[str, Any]:
    return checkpoint_of(AtariNet(18, lstm=False, width=8, depth=1), SMALL, updates=3)


class RunsCode:
    """An object that creates a file when it is unpickled without restrictions."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def save(path: Path, **changes: Any) -> None:
    torch.save({**small_checkpoint(), **changes}, path)


def save_weights(path: Path, **changes: Any) -> None:
    """Write a checkpoint with other tensors. None removes a tensor; two underscores stand for a dot."""
    data = small_checkpoint()
    weights = data["model_state_dict"] | {name.replace("__", "."): value for name, value in changes.items()}
    save(path, model_state_dict={name: value for name, value in weights.items() if value is not None})


def truncate(path: Path, legacy: bool) -> None:
    torch.save(small_checkpoint(), path, _use_new_zipfile_serialization=not legacy)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def overwrite_middle(path: Path) -> None:
    save(path)
    content = bytearray(path.read_bytes())
    start = content.index(b"data.pkl") + 100
    content[start : start + 400] = os.urandom(400)
    path.write_bytes(content)


def change_weights(path: Path) -> None:
    """Write a checkpoint and change one bit of its largest tensor, which `torch.load` does not notice."""
    save(path)
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
    content[largest.header_offset + largest.file_size // 2] ^= 64
    path.write_bytes(content)


def compress(path: Path) -> None:
    """Write a ZIP bomb: an archive of torch.save in which 64 MB of zeros take 64 kB."""
    torch.save({"model_state_dict": {"policy.weight": torch.zeros(2**24)}}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


def allocate(path: Path) -> None:
    """Write an archive whose pickle creates a bytearray of 16 GB."""
    program = b"\x80\x02cbuiltins\nbytearray\n\x8a\x06" + struct.pack("<q", 2**34)[:6] + b"\x85R."
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/version", "3\n")


def link(path: Path) -> None:
    save(path.with_name("target.tar"))
    path.symlink_to("target.tar")


def text(path: Path) -> None:
    path.write_text("<html>404</html>\n")


def git_lfs_pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 8740000\n")


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({"model_state_dict": RunsCode(path.with_name("executed"))}, protocol=2))


def plugin(path: Path) -> None:
    """Write a checkpoint that names a Python file beside it as its environment."""
    executed = path.with_name("executed")
    path.with_name("evil.py").write_text(f"import os\n\nos.mkdir({str(executed)!r})\n")
    save(path, flags={**SMALL, "env": f"{path.with_name('evil.py')}:Env"})


def module(path: Path) -> None:
    """Write a checkpoint that names a Python module beside it as its environment."""
    plugin(path)
    save(path, flags={**SMALL, "env": "gymnasium/evil:Env-v0"})


FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda path: None, "No such file"),
    "folder": (lambda path: path.mkdir(), "not a regular file"),
    "pipe": (os.mkfifo, "not a regular file"),
    "link": (link, "symbolic link"),
    "empty": (lambda path: path.touch(), "damaged"),
    "text": (text, "damaged"),
    "pointer of Git LFS": (git_lfs_pointer, "git lfs pull"),
    "truncated": (lambda path: truncate(path, legacy=False), "damaged"),
    "truncated, old format": (lambda path: truncate(path, legacy=True), "damaged"),
    "overwritten": (overwrite_middle, "cannot be imported"),
    "changed weights": (change_weights, "checksum"),
    "runs code": (lambda path: save(path, stats=RunsCode(path.with_name("executed"))), "mkdir"),
    "runs code, plain pickle": (pickled, "mkdir"),
    "names a plug-in": (plugin, "--env"),
    "names a module": (module, "--env"),
    "many actors": (lambda path: save(path, flags={**SMALL, "num_actors": 2**40}), "num_actors"),
    "empty tensor": (lambda path: save_weights(path, fc__0__weight=torch.zeros(2**40, 0)), "fc.0.weight"),
    # An agent with these sizes would have 50 GB.
    "wide layer": (lambda path: save_weights(path, fc__0__weight=torch.zeros(4_000_000, 1)), "torso.layers.0"),
    "compressed": (compress, "compressed"),
    "huge allocation": (allocate, "memory"),
    "huge view": (lambda path: save_weights(path, conv1__weight=torch.zeros(1).expand(2**40)), "bytes"),
    "sparse": (lambda path: save_weights(path, policy__bias=torch.zeros(18).to_sparse()), "policy.bias"),
    "name with control characters": (
        lambda path: save_weights(path, **{"a\n\x1b[31mb": torch.zeros(3)}),
        "is not a name of a tensor",
    ),
    "environment with control characters": (
        lambda path: save(path, flags={**SMALL, "env": "Riverraid\n\x1b[31mNoFrameskip-v4"}),
        "does not contain the name of its environment",
    ),
    "not a tensor": (lambda path: save_weights(path, policy__bias="text"), "policy.bias"),
    "no state dict": (lambda path: torch.save([1, 2], path), "model_state_dict"),
    "no heads": (lambda path: save_weights(path, policy__weight=None), "policy.weight"),
    "unknown tensor": (lambda path: save_weights(path, vision__weight=torch.zeros(3)), "vision.weight"),
    "missing tensor": (lambda path: save_weights(path, conv2__bias=None), "torso.convolutions.2.bias"),
    "wrong shape": (lambda path: save_weights(path, conv2__bias=torch.zeros(65)), "(65,)"),
    "not finite": (lambda path: save_weights(path, conv2__bias=torch.full((64,), torch.nan)), "not finite"),
    "unknown game": (lambda path: save(path, flags={**SMALL, "env": "NoSuchGameNoFrameskip-v4"}), "NoSuchGame"),
    "no environment": (lambda path: torch.save(checkpoint_of(ResNet(6), POLY, 1), path), "--env"),
    "wrong number of games": (
        lambda path: torch.save(checkpoint_of(ResNet(6, popart_tasks=3), POPART, 1), path),
        "3 value heads",
    ),
    "no ProcGen game": (
        lambda path: torch.save(checkpoint_of(ResNet(15, channels=3), {**POLY, "env": "PongNoFrameskip-v4"}, 1), path),
        "ProcGen",
    ),
    "wrong number of actions": (
        lambda path: torch.save(checkpoint_of(AtariNet(7, lstm=False), MONO, 1), path),
        "7 actions",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_file_is_refused_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    make, expected = FILES[case]
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "model.tar")
    assert run_command(["import", "model.tar", "--name", "imported"]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("bestiary: ")
    assert expected in lines[0]
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "executed").exists()


def test_reading_is_stopped_after_the_time_limit(tmp_path: Path) -> None:
    save(tmp_path / "model.tar")
    with pytest.raises(UserError, match="more than"):
        read_checkpoint(tmp_path / "model.tar", max_seconds=0.01)


@pytest.mark.parametrize("content", ["", "[]", '{"args": 3}', "{" * 100_000])
def test_damaged_meta_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "model.tar")
    (tmp_path / "meta.json").write_text(content)
    assert run_command(["import", "model.tar", "--meta", "meta.json", "--name", "imported"]) == 2
    assert not (tmp_path / "runs").exists()


def test_texts_of_a_meta_file_with_control_characters_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text(json.dumps({"args": {"env": "a\nb", "batch_size": 4, "device": None}}))
    assert read_meta(tmp_path / "meta.json") == {"batch_size": 4}


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", "# _tick,_time,step\n0,1.0,nan\n", 'x"\0'])
def test_damaged_log_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "model.tar")
    (tmp_path / "logs.csv").write_text(content)
    assert run_command(["import", "model.tar", "--logs", "logs.csv", "--name", "imported"]) == 2
    assert not (tmp_path / "runs").exists()


def test_existing_run_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "model.tar")
    assert run_command(["import", "model.tar", "--name", "imported"]) == 0
    before = (tmp_path / "runs/imported/run_id.txt").read_text()
    assert run_command(["import", "model.tar", "--name", "imported"]) == 2
    assert (tmp_path / "runs/imported/run_id.txt").read_text() == before
