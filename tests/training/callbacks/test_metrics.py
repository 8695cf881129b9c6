"""Tables of a training: rows of episodes.csv and of metrics.csv."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bestiary
from bestiary.api import resume
from bestiary.rollout import Episode
from bestiary.runs.run import open_run
from bestiary.training.callbacks.metrics import make_episode_row
from bestiary.utils import safe_files

SMALL: dict[str, Any] = {"runtime": "serial", "num_envs": 8, "batch_size": 8, "micro_batch_size": 8}


def test_row_of_an_episode_has_a_column_for_each_reward_and_measure() -> None:
    measures = {"training": 3.0, "true": 1.0, "collected": 2.0}
    episode = Episode(100, "warehouse", 3.0, 10, 6.0, 20, True, 4, measures, {"training": 6.0, "true": 2.0})
    row = make_episode_row(episode, ("true",))
    assert (row["step"], row["return"], row["game_over"], row["collected"]) == (100, 3.0, 1, 2.0)
    assert (row["training_return"], row["true_return"]) == (3.0, 1.0)
    assert (row["game_training_return"], row["game_true_return"]) == (6.0, 2.0)


def test_last_row_of_the_metrics_is_written_if_its_interval_is_shorter() -> None:
    run = bestiary.train("toy/catch", run_dir="r", steps=1_600, log_every=1_000, **SMALL)
    assert run.metrics["step"].tolist() == [1_120, 1_600]
    np.testing.assert_allclose(run.metrics["return"][-1], run.episodes["return"][-100:].mean())


def test_updates_since_the_last_row_are_saved_with_a_checkpoint() -> None:
    options = {**SMALL, "log_every": 1_000, "algo.lr_schedule": "constant", "keep_at": (480,)}
    run = bestiary.train("toy/catch", run_dir="r", steps=1_600, **options)
    losses = run.metrics["loss"].tolist()
    assert len(run.checkpoints[0].load_state()["callbacks"]["metrics"]["pending"]) == 3
    assert resume(open_run("r"), checkpoint=480).metrics["loss"].tolist() == losses


def test_rows_of_a_time_without_disk_space_are_written_later(monkeypatch: pytest.MonkeyPatch) -> None:
    append = safe_files.append_text
    failures: list[str] = []

    def append_except_on_a_full_disk(path: Path, text: str, root: Path | None = None) -> None:
        if 400 < int(text.partition(",")[0]) < 900 and len(failures) < 6:
            failures.append(path.name)
            raise OSError(errno.ENOSPC, "No space left on device")
        append(path, text, root)

    options: dict[str, Any] = {"runtime": "serial", "num_envs": 4, "batch_size": 4, "micro_batch_size": 4}
    with monkeypatch.context() as patch:
        patch.setattr(safe_files, "append_text", append_except_on_a_full_disk)
        full = bestiary.train("toy/catch", run_dir="full", steps=2_000, log_every=80, **options)
    normal = bestiary.train("toy/catch", run_dir="normal", steps=2_000, log_every=80, **options)
    assert {"metrics.csv", "episodes.csv"} <= set(failures)
    assert full.metrics["step"].tolist() == normal.metrics["step"].tolist()
    assert full.metrics["loss"].tolist() == normal.metrics["loss"].tolist()
    assert (full.path / "episodes.csv").read_bytes() == (normal.path / "episodes.csv").read_bytes()
