"""Permanent checkpoints at chosen steps (--keep-at), including the initial weights, and failed saves."""

import errno
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import bestiary
from bestiary.api import resume
from bestiary.runs import checkpoints
from bestiary.runs.run import Run
from bestiary.training.callbacks.checkpoints import CheckpointManager
from bestiary.utils import safe_files

SMALL: dict[str, Any] = {
    "runtime": "serial",
    "num_envs": 8,
    "batch_size": 8,
    "torso": "mlp",
    "torso.width": 16,
    "save_every": 0,
}


def test_checkpoint_at_a_requested_step_is_kept():
    run = bestiary.train("toy/catch", run_dir="r", steps=3_200, keep_at=(1_000, 1_900), save_minutes=1e-9, **SMALL)
    assert [c.steps for c in run.checkpoints][:2] == [1_120, 1_920]
    assert len(run.checkpoints) == 4  # the two newest are kept, too


@pytest.mark.parametrize("runtime", ["serial", "local"])
def test_initial_weights_can_be_kept(runtime):
    """The checkpoint of step 0 contains the loaded weights, and a run resumed from it repeats the original run."""
    options: dict[str, Any] = {**SMALL, "runtime": runtime}
    first = bestiary.train("toy/catch", run_dir="first", steps=1_600, **options)
    run = bestiary.train("toy/catch", run_dir="r", steps=1_600, init_from="first", keep_at=(0,), **options)
    assert [c.steps for c in run.checkpoints] == [0, 1_600]
    for name, weights in first.agent().state_dict().items():
        assert torch.equal(run.agent(0).state_dict()[name], weights), name
    copied = Path(shutil.copytree("r", "copied", symlinks=True))
    shutil.rmtree(copied / "checkpoints" / f"{1_600:012d}")
    shutil.rmtree("first")  # the source run is not needed to resume
    resumed = resume(Run(copied))
    assert [c.steps for c in resumed.checkpoints] == [0, 1_600]
    if runtime == "serial":
        for name, weights in run.agent(1_600).state_dict().items():
            assert torch.equal(resumed.agent(1_600).state_dict()[name], weights), name


def test_full_disk_frees_old_checkpoints_and_saves_again(monkeypatch, capsys) -> None:
    """The disk has space for one rolling checkpoint besides the permanent one."""
    write = checkpoints.write_checkpoint

    def write_if_there_is_space(folder: Path, *args: Any):
        if len(checkpoints.list_checkpoints(folder)) >= 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(folder, *args)

    monkeypatch.setattr(checkpoints, "write_checkpoint", write_if_there_is_space)
    run = bestiary.train("toy/catch", run_dir="r", steps=1_600, keep_at=(300,), save_minutes=1e-9, **SMALL)
    assert [c.steps for c in run.checkpoints] == [320, 1_440, 1_600]
    assert "No space left on device: removed the old checkpoints" in capsys.readouterr().err


def test_full_disk_frees_old_checkpoints_if_rows_of_a_table_could_not_be_written(monkeypatch, capsys) -> None:
    """There is space for the rows only after an old checkpoint was removed. Saving writes rows that are in memory."""
    append = safe_files.append_text

    def append_if_there_is_space(path: Path, text: str, root: Path | None = None) -> None:
        if len(checkpoints.list_checkpoints(Path("r/checkpoints"))) >= 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(path, text, root)

    monkeypatch.setattr(safe_files, "append_text", append_if_there_is_space)
    run = bestiary.train("toy/catch", run_dir="r", steps=1_600, save_minutes=1e-9, **SMALL)
    assert run.steps == 1_600
    errors = capsys.readouterr().err
    assert "No space left on device: removed the old checkpoints" in errors
    assert "was not saved" not in errors
    assert run.metrics["step"].tolist() == sorted(set(run.metrics["step"]))


def test_attempts_to_save_are_spread_over_minutes() -> None:
    manager = CheckpointManager()
    delays = []
    for manager.failed_saves in range(1, 9):
        delays.append(manager.retry_seconds)
    assert delays == [15, 30, 60, 120, 240, 480, 600, 600]
