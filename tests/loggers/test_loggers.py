"""Loggers: what the tools store, several loggers at once, loggers in users' files, and failures."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import bestiary
from bestiary.cli.main import run_command
from bestiary.runs.run import open_run
from bestiary.utils.errors import UserError

SMALL: dict[str, Any] = {
    "runtime": "serial",
    "num_envs": 8,
    "batch_size": 8,
    "micro_batch_size": 8,
    "steps": 1_600,
    "log_every": 400,
}
VIDEOS: dict[str, Any] = {"video_every": 800, "valid_every": 800, "valid_episodes": 4}
EXAMPLE = Path(__file__).parents[2] / "examples" / "jsonl_logger.py"

FAILING = """
from bestiary.loggers import Logger

class Failing(Logger):
    def __init__(self, context, *, when: str = "log"):
        self.when = when
        if when == "constructor":
            raise RuntimeError("no connection")
    def log(self, row):
        if self.when == "log":
            raise SystemExit("no connection")
    def log_video(self, name, path, step):
        if self.when == "log_video":
            raise OSError("no connection")
    def close(self):
        if self.when == "close":
            raise KeyError("no connection")
"""


@pytest.fixture(autouse=True)
def loggers_use_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    # The default database of MLflow is created in about 10 s, the folder at once.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def test_tensorboard_has_rows_videos_validations_and_the_learning_curve() -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = bestiary.train("toy/catch", run_dir="r", logger="tensorboard", **SMALL, **VIDEOS)
    events = EventAccumulator(str(run.path / "tensorboard"), {"images": 0})
    events.Reload()
    logged = events.Scalars("return")
    assert [event.step for event in logged] == run.metrics["step"].astype(int).tolist()
    assert [event.value for event in logged] == pytest.approx(run.metrics["return"].tolist())
    assert [e.value for e in events.Scalars("validation/toy/catch")] == pytest.approx(
        run.validations["return"].tolist()
    )
    videos = sorted(run.path.glob("videos/*.gif"))
    assert [event.encoded_image_string for event in events.Images("video/toy/catch")] == [
        v.read_bytes() for v in videos
    ]
    assert [event.step for event in events.Images("video/toy/catch")] == [800, 1600]
    (curve,) = events.Images("learning_curve")
    assert curve.encoded_image_string == (run.path / "learning_curve.png").read_bytes()
    assert curve.width > curve.height > 100


def test_mlflow_and_wandb_have_the_rows_and_a_resumed_run_continues_theirs() -> None:
    from mlflow import MlflowClient

    options = {**SMALL, "logger": "wandb,mlflow", "logger.project": "fishing", "video_every": 800}
    bestiary.train("toy/catch", run_dir="r", **options)
    assert run_command(["resume", "r", "--steps", "2400"]) == 0
    run = open_run("r")
    client = MlflowClient()
    experiment = client.get_experiment_by_name("fishing")
    (logged,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(logged.info.run_id, "return")
    assert [metric.step for metric in history] == run.metrics["step"].astype(int).tolist()
    assert [metric.value for metric in history] == pytest.approx(run.metrics["return"].tolist())
    assert logged.data.params["env.name"] == "['toy/catch']"
    videos = [item.path for item in client.list_artifacts(logged.info.run_id, "videos")]
    assert videos == [f"videos/{n:012d}-sampled.gif" for n in (800, 1600, 2400)]
    figures = [item.path for item in client.list_artifacts(logged.info.run_id, "figures")]
    assert figures == ["figures/learning_curve.png"]
    (run_id,) = {path.name.rpartition("-")[2] for path in Path("r/wandb").glob("offline-run-*")}
    assert run_id == Path("r/wandb_id.txt").read_text()
    assert len(list(Path("r/wandb").rglob("catch*.gif"))) == 3


def test_trackio_has_the_rows() -> None:
    """Trackio is not installed by `make test`, because it does not support Pillow 13 (see docs/runs.md)."""
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    run = bestiary.train("toy/catch", run_dir="r", logger="trackio", **SMALL, **VIDEOS)
    (name,) = SQLiteStorage.get_runs("bestiary")
    assert name == f"r-{Path('r/trackio_id.txt').read_text()}"
    rows = [row for row in SQLiteStorage.get_logs("bestiary", name) if "return" in row]
    assert [row["return"] for row in rows] == pytest.approx(run.metrics["return"].tolist())


def test_own_logger_gets_options_rows_and_videos_and_is_used_again_by_resume() -> None:
    words = "train toy/catch --runtime serial --num-envs 8 --batch-size 8 --micro-batch-size 8 --log-every 400".split()
    logger = ["--logger", f"csv,{EXAMPLE}:JsonLines", "--logger.every", "2", "--video-every", "1600"]
    assert run_command([*words, "--steps", "1600", "--run-dir", "r", *logger]) == 0
    rows = [json.loads(line) for line in Path("r/log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [480, 1280, 1600]
    assert rows[-1]["video/toy/catch"].endswith("videos/000000001600-sampled.gif")
    assert Path("r/plugins").exists()
    assert run_command(["resume", "r", "--steps", "2400"]) == 0
    assert "2400" in Path("r/log.jsonl").read_text().splitlines()[-1]
    assert run_command(["resume", "r", "--steps", "3200", "--logger", "tensorboard"]) == 0
    assert "3200" not in Path("r/log.jsonl").read_text()
    shutil.copytree("r", "copy", symlinks=True)
    flags = ["--logger", f"{EXAMPLE}:JsonLines", "--logger.every", "1"]
    assert run_command(["resume", "copy", "--steps", "4000", *flags]) == 0
    assert "4000" in Path("copy/log.jsonl").read_text()
    assert open_run("copy").config.logger_options.every == 1


def test_logger_of_another_person_is_neither_imported_nor_used(another_user: Any, capsys: Any) -> None:
    source = "open('executed', 'a')\n" + FAILING
    Path("own.py").write_text(source)
    bestiary.train("toy/catch", run_dir="r", logger="own.py:Failing", **SMALL)
    Path("executed").unlink()
    another_user()
    assert run_command(["resume", "r", "--steps", "2400"]) == 2
    assert "--trust-code" in capsys.readouterr().err
    assert not Path("executed").exists()


def test_logger_that_changes_its_row_does_not_change_the_metrics() -> None:
    Path("clearing.py").write_text(
        "from bestiary.loggers import Logger\nclass Clearing(Logger):\n    def log(self, row):\n        row.clear()\n"
    )
    run = bestiary.train("toy/catch", run_dir="r", logger="clearing.py:Clearing", **SMALL)
    assert run.metrics["step"].tolist()[-1] == 1_600


@pytest.mark.parametrize("when", ["constructor", "log", "log_video", "close"])
def test_failing_logger_costs_one_warning(when: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.py").write_text(FAILING)
    names = ["own.py:Failing", f"{EXAMPLE}:JsonLines"]
    options: dict[str, Any] = {**SMALL, "logger": names, "logger.when": when, "video_every": 800}
    run = bestiary.train("toy/catch", run_dir="r", **options)
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    assert "own.py" in warnings[0]
    assert "no connection" in warnings[0]
    assert run.steps == 1600
    assert len(run.metrics["step"]) == len([r for r in Path("r/log.jsonl").read_text().splitlines() if "sps" in r]) == 4


WRONG = [
    ({"logger": "tensorbord"}, "did you mean tensorboard"),
    ({"logger": "tensorboard,tensorboard"}, "given twice"),
    ({"logger": "tensorboard", "logger.project": "x"}, "it is an option of logger wandb and mlflow and trackio"),
    ({"logger": "wandb", "logger.projekt": "x"}, "did you mean --logger.project"),
    ({"logger": "own.py:Failing", "logger.when": 3}, "--logger.when 3"),
    ({"logger": "own.py:Fail"}, "did you mean Failing"),
    ({"logger": "own.py:Other"}, "must be a subclass of bestiary.loggers.Logger"),
    ({"logger": "own.py:Silent"}, "has no method log"),
    (
        {"logger": "own.py:Misspelt"},
        "log_vidoe is not a method of Logger; did you mean log_video",
    ),
    ({"logger": "wandb,own.py:Conflict"}, "rename one of the two options"),
]


@pytest.mark.parametrize(("options", "text"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_wrong_loggers_are_refused_before_training(options: dict[str, Any], text: str) -> None:
    more = """
class Other: ...
class Silent(Logger): ...
class Misspelt(Failing):
    def log_vidoe(self, name, path, step): ...
class Conflict(Logger):
    def __init__(self, context, *, project: int = 3): ...
    def log(self, row): ...
"""
    Path("own.py").write_text(FAILING + more)
    with pytest.raises(UserError) as error:
        bestiary.train("toy/catch", run_dir="r", **SMALL, **options)
    assert text in str(error.value)
    assert len(error.value.problems) == 1
    assert not Path("r").exists()


def test_resume_refuses_an_option_that_no_logger_has(capsys: pytest.CaptureFixture[str]) -> None:
    bestiary.train("toy/catch", run_dir="r", **SMALL)
    assert run_command(["resume", "r", "--steps", "2400", "--logger.project", "x"]) == 2
    assert "add --logger wandb or mlflow" in capsys.readouterr().err


def test_options_of_loggers_are_no_other_experiment() -> None:
    first = bestiary.train("toy/catch", run_dir="a", **SMALL)
    options: dict[str, Any] = {"logger": [f"{EXAMPLE}:JsonLines"], "logger.every": 3}
    second = bestiary.train("toy/catch", run_dir="b", **SMALL, **options)
    assert first.config.group_key() == second.config.group_key()
    assert second.config.tables()["logger"]["every"] == 3
