"""Random and damaged content of each file of a run folder: each reader succeeds or raises UserError."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import bestiary
from bestiary.config.toml import read_tables
from bestiary.evaluation.learning_curves import finished_tasks
from bestiary.runs.checkpoints import Checkpoint
from bestiary.runs.csv_tables import CsvTable, read_columns, read_rows
from bestiary.runs.listing import describe_run
from bestiary.runs.recordings import open_recording
from bestiary.runs.run import Run
from bestiary.studies.folder_report import MediaSpace, _render_run
from bestiary.training.saved_state import check_saved_state
from bestiary.utils.errors import UserError

FAST = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
SLOW = settings(FAST, max_examples=2_000)

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with an evaluation and a recording."""
    folder = tmp_path_factory.mktemp("fuzz") / "r"
    options: dict[str, Any] = {"runtime": "serial", "num_envs": 2, "batch_size": 2, "micro_batch_size": 2, "steps": 160}
    run = bestiary.train("toy/catch", run_dir=str(folder), record=True, log_every=40, **options)
    bestiary.evaluate(run, episodes=2)
    return folder


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Return random bytes, a part of the content, the content with changed bytes, or JSON with a changed value."""
    kind = draw(st.sampled_from(["random", "cut", "changed", "inserted", "value"]))
    if kind == "random":
        return draw(st.binary(max_size=200))
    place = draw(st.integers(0, len(content)))
    if kind == "cut":
        return content[:place]
    if kind == "value":
        with contextlib.suppress(ValueError):
            return json.dumps(draw(_with_changed_value(json.loads(content)))).encode()
    new = draw(st.binary(min_size=1, max_size=8))
    return content[:place] + new + content[place + (len(new) if kind == "changed" else 0) :]


@st.composite
def _with_changed_value(draw: st.DrawFn, value: Any) -> Any:
    """Return a JSON value in which one inner value is replaced or removed."""
    if isinstance(value, dict) and value and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(value)))
        if draw(st.integers(0, 5)) == 0:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: draw(_with_changed_value(value[key]))}
    if isinstance(value, list) and value and draw(st.integers(0, 3)):
        index = draw(st.integers(0, len(value) - 1))
        return [*value[:index], draw(_with_changed_value(value[index])), *value[index + 1 :]]
    return draw(JSON_VALUES)


def read_all_config(run: Run) -> None:
    describe_run(run.path)
    read_tables(run.path / "config.toml", in_run_folder=True)
    run.raw_config  # noqa: B018
    run.config  # noqa: B018


def read_checkpoint(run: Run) -> None:
    checkpoint = Checkpoint(run.path / "checkpoints" / f"{160:012d}")
    checkpoint.find_damage()
    for read in (checkpoint.load_model, checkpoint.load_learner, checkpoint.load_actor):
        with contextlib.suppress(UserError):
            read()
    check_saved_state(checkpoint.load_state())
    run.agent(checkpoint)


def read_tables_of_run(run: Run) -> None:
    describe_run(run.path)
    for name in ("metrics.csv", "episodes.csv"):
        with contextlib.suppress(UserError):
            read_rows(run.path / name)
            CsvTable(run.path / name, keep_rows=3)
    read_columns(run.path / "episodes.csv")
    read_columns(run.path / "metrics.csv")
    with contextlib.suppress(KeyError):  # a missing column; the report catches this error
        finished_tasks(run)


def read_recording(run: Run) -> None:
    recording = open_recording(next((run.path / "recordings").glob("*.json")))
    recording.game_actions(recording.game(0))
    recording.make_env(recording.game(0)).close()


def read_report(run: Run) -> None:
    list(_render_run(run, MediaSpace(2**30)))


CASES: dict[str, tuple[str, Callable[[Run], None]]] = {
    "config": ("config.toml", read_all_config),
    "manifest": ("checkpoints/*/manifest.json", read_checkpoint),
    "state": ("checkpoints/*/state.json", read_checkpoint),
    "model": ("checkpoints/*/model.safetensors", read_checkpoint),
    "optimizer": ("checkpoints/*/optimizer.safetensors", read_checkpoint),
    "actor": ("checkpoints/*/actor.safetensors", read_checkpoint),
    "metrics": ("metrics.csv", read_tables_of_run),
    "episodes": ("episodes.csv", read_tables_of_run),
    "recording": ("recordings/*.json", read_recording),
    "actions": ("recordings/*.actions", read_recording),
    "games": ("recordings/*.csv", read_recording),
    "evaluation": ("evaluations/*.json", read_report),
}


def fuzz(case: str, run_folder: Path, data: st.DataObject) -> None:
    pattern, read = CASES[case]
    copy = Path("copy")
    if not copy.exists():
        shutil.copytree(run_folder, copy, symlinks=True)
    original = next(path for path in run_folder.glob(pattern) if not path.parent.is_symlink())
    path = copy / original.relative_to(run_folder)
    path.write_bytes(data.draw(damaged(original.read_bytes())))
    with contextlib.suppress(UserError):
        read(Run(copy))


@pytest.mark.parametrize("case", CASES)
@FAST
@given(data=st.data())
def test_damaged_file_is_read_or_refused(case: str, run_folder: Path, data: st.DataObject) -> None:
    fuzz(case, run_folder, data)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@SLOW
@given(data=st.data())
def test_damaged_file_is_read_or_refused_slow(case: str, run_folder: Path, data: st.DataObject) -> None:
    fuzz(case, run_folder, data)
