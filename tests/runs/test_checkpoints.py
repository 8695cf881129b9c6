"""Checkpoints: whole or not there, checked on reading, never code."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from bestiary.errors import UserError
from bestiary.runs.checkpoints import checkpoints, choose, newest_good, remove_old, remove_unfinished, write_checkpoint


def write(run: Path, steps: int) -> None:
    tensors = {"model": {"w": torch.full((3, 2), float(steps))}, "optimizer": {"0.m": torch.ones(2)}}
    write_checkpoint(run / "checkpoints", steps, tensors, {"a": np.arange(3, dtype=np.uint64)}, {"steps": steps})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for steps in (100, 200, 300):
        write(tmp_path, steps)
    return tmp_path


def test_what_was_written_is_read_back(run: Path) -> None:
    checkpoint = choose(run)
    assert checkpoint.steps == 300
    assert checkpoint.problem() is None
    torch.testing.assert_close(checkpoint.model()["w"], torch.full((3, 2), 300.0))
    np.testing.assert_array_equal(checkpoint.actor()["a"], np.arange(3))
    assert checkpoint.state() == {"steps": 300}
    assert os.readlink(run / "checkpoints" / "latest") == "000000000300"


def test_the_nearest_checkpoint_is_chosen(run: Path) -> None:
    assert choose(run, 190).steps == 200
    assert choose(run, 10**9).steps == 300


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "delete", "manifest"])
def test_a_damaged_checkpoint_is_refused_and_the_newest_good_one_named(run: Path, damage: str) -> None:
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
    good = newest_good(run / "checkpoints")
    assert good is not None
    assert good.steps == 200


def test_no_good_checkpoint_left_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no checkpoint yet"):
        choose(tmp_path)
    write(tmp_path, 100)
    (tmp_path / "checkpoints" / "000000000100" / "state.json").write_text("")
    with pytest.raises(UserError, match="no other is good; start anew with"):
        choose(tmp_path)


def test_unfinished_saves_are_not_seen_and_cleared_away(run: Path) -> None:
    left = run / "checkpoints" / ".saving-000000000400"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    (run / "checkpoints" / ".removing-000000000050").mkdir()
    assert [c.steps for c in checkpoints(run / "checkpoints")] == [100, 200, 300]
    assert remove_unfinished(run / "checkpoints") == [".removing-000000000050", ".saving-000000000400"]
    assert not left.exists()


def test_a_damaged_folder_is_set_aside_when_its_steps_come_round_again(run: Path) -> None:
    (run / "checkpoints" / "000000000300" / "manifest.json").unlink()
    with pytest.raises(UserError, match="is damaged"):
        choose(run)
    write(run, 300)
    assert choose(run).problem() is None
    assert (run / "checkpoints" / "damaged-000000000300").is_dir()


def test_the_ladder_and_the_newest_two_stay(tmp_path: Path) -> None:
    for steps in (90, 110, 150, 190, 210, 250, 320, 330, 390):
        write(tmp_path, steps)
    remove_old(tmp_path / "checkpoints", ladder=100)
    assert [c.steps for c in checkpoints(tmp_path / "checkpoints")] == [110, 210, 320, 330, 390]
    remove_old(tmp_path / "checkpoints", ladder=0)
    assert [c.steps for c in checkpoints(tmp_path / "checkpoints")] == [330, 390]


class Canary:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.system, ("touch canary",))


def test_a_pickle_in_place_of_a_checkpoint_is_not_executed(run: Path, tmp_path: Path) -> None:
    folder = run / "checkpoints" / "000000000300"
    evil = pickle.dumps(Canary())
    (folder / "model.safetensors").write_bytes(evil)
    import hashlib

    manifest = json.loads((folder / "manifest.json").read_text())  # the attacker mends the manifest too
    manifest["model.safetensors"] = {"bytes": len(evil), "sha256": hashlib.sha256(evil).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="not a file of a Bestiary checkpoint"):
        choose(run).model()
    assert not (tmp_path / "canary").exists()
