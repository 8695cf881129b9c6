"""Checkpoints are written atomically, checked before reading, and run no code."""

import hashlib
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from bestiary.runs.checkpoints import (
    choose,
    list_checkpoints,
    newest_intact,
    remove_old,
    remove_unfinished,
    write_checkpoint,
)
from bestiary.utils.errors import UserError


def write(run: Path, steps: int) -> None:
    tensors = {"model": {"w": torch.full((3, 2), float(steps))}, "optimizer": {"0.m": torch.ones(2)}}
    write_checkpoint(run / "checkpoints", steps, tensors, {"a": np.arange(3, dtype=np.uint64)}, {"steps": steps})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for steps in (100, 200, 300):
        write(tmp_path, steps)
    return tmp_path


def test_written_content_is_read_back(run: Path) -> None:
    checkpoint = choose(run)
    assert checkpoint.steps == 300
    assert checkpoint.find_damage() is None
    torch.testing.assert_close(checkpoint.load_model()["w"], torch.full((3, 2), 300.0))
    np.testing.assert_array_equal(checkpoint.load_actor()["a"], np.arange(3))
    assert checkpoint.load_state() == {"steps": 300}
    assert os.readlink(run / "checkpoints" / "latest") == "000000000300"


def test_the_nearest_checkpoint_is_chosen(run: Path) -> None:
    assert choose(run, 190).steps == 200
    assert choose(run, 10**9).steps == 300


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "delete", "manifest"])
def test_damaged_checkpoint_is_refused_and_newest_intact_one_is_suggested(run: Path, damage: str) -> None:
    file = run / "checkpoints" / "000000000300" / "model.safetensors"
    data = bytearray(file.read_bytes())
    if damage == "truncate":
        file.write_bytes(data[:-5])
    elif damage == "flip":
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "delete":
        file.unlink()
    else:
        (file.parent / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"is damaged: .*--checkpoint 200"):
        choose(run)
    assert choose(run, 200).steps == 200
    intact = newest_intact(run / "checkpoints")
    assert intact is not None
    assert intact.steps == 200


def test_error_if_there_is_no_intact_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no checkpoint yet"):
        choose(tmp_path)
    write(tmp_path, 100)
    (tmp_path / "checkpoints" / "000000000100" / "state.json").write_text("")
    with pytest.raises(UserError, match=r"no undamaged checkpoint.*bestiary train --config"):
        choose(tmp_path)


def test_unfinished_saves_are_ignored_and_removed(run: Path) -> None:
    left = run / "checkpoints" / ".saving-000000000400"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"incomplete")
    (run / "checkpoints" / ".removing-000000000050").mkdir()
    assert [c.steps for c in list_checkpoints(run / "checkpoints")] == [100, 200, 300]
    assert remove_unfinished(run / "checkpoints") == [".removing-000000000050", ".saving-000000000400"]
    assert not left.exists()


def test_damaged_folder_is_renamed_if_a_checkpoint_with_its_steps_is_written(run: Path) -> None:
    (run / "checkpoints" / "000000000300" / "manifest.json").unlink()
    with pytest.raises(UserError, match="is damaged"):
        choose(run)
    write(run, 300)
    assert choose(run).find_damage() is None
    assert (run / "checkpoints" / "damaged-000000000300").is_dir()


def test_first_checkpoint_of_each_interval_and_newest_two_are_kept(tmp_path: Path) -> None:
    for steps in (90, 110, 150, 190, 210, 250, 320, 330, 390):
        write(tmp_path, steps)
    remove_old(tmp_path / "checkpoints", keep_every=100)
    assert [c.steps for c in list_checkpoints(tmp_path / "checkpoints")] == [110, 210, 320, 330, 390]
    remove_old(tmp_path / "checkpoints", keep_every=0)
    assert [c.steps for c in list_checkpoints(tmp_path / "checkpoints")] == [330, 390]


class Canary:
    """An object whose unpickling creates the file `canary`."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.system, ("touch canary",))


def test_linked_folder_is_named(run: Path, tmp_path: Path) -> None:
    write(run, 100)
    (run / "checkpoints").rename(tmp_path / "moved")
    (run / "checkpoints").symlink_to(tmp_path / "moved")
    with pytest.raises(UserError, match="checkpoints is a symbolic link"):
        choose(run)


def test_pickle_in_place_of_the_model_is_not_executed(run: Path, tmp_path: Path) -> None:
    folder = run / "checkpoints" / "000000000300"
    malicious = pickle.dumps(Canary())
    (folder / "model.safetensors").write_bytes(malicious)
    manifest = json.loads((folder / "manifest.json").read_text())
    # An attacker would adapt the manifest, too.
    manifest["model.safetensors"] = {"bytes": len(malicious), "sha256": hashlib.sha256(malicious).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="cannot be read as a file of a checkpoint"):
        choose(run).load_model()
    assert not (tmp_path / "canary").exists()
