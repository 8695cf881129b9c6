"""Run folders that another person has prepared: links, pipes, damaged files, wrong shapes, control characters."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

import bestiary
from bestiary.cli.main import run_command
from bestiary.config.toml import dump_toml, parse_toml, read_tables
from bestiary.runs.checkpoints import Checkpoint, write_manifest
from bestiary.runs.recordings import open_recording
from bestiary.runs.run import Run, open_run
from bestiary.utils.errors import RunError, UserError

SMALL: dict[str, Any] = {"runtime": "serial", "num_envs": 4, "batch_size": 4, "micro_batch_size": 4, "steps": 320}


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "r"
    bestiary.train("toy/catch", run_dir=str(folder), **SMALL)
    return folder


@pytest.fixture(scope="module")
def warehouse_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "r"
    bestiary.train("warehouse", run_dir=str(folder), **SMALL)
    return folder


def copy_run(run: Path, name: str = "r") -> Run:
    return Run(Path(shutil.copytree(run, name, symlinks=True)))


def change_tensors(checkpoint: Checkpoint, file: str, changes: dict[str, Any]) -> None:
    """Replace tensors of a checkpoint file, and write a manifest that fits."""
    library: Any = safetensors.numpy if file == "actor" else safetensors.torch
    path = checkpoint.path / f"{file}.safetensors"
    path.write_bytes(library.save({**library.load(path.read_bytes()), **changes}))
    write_manifest(checkpoint.path, json.loads((checkpoint.path / "manifest.json").read_text()))


def run_and_read(capsys: pytest.CaptureFixture[str], *command: str) -> tuple[int, str]:
    capsys.readouterr()
    status = run_command(list(command))
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return status, captured.out + captured.err


@pytest.mark.parametrize("name", ["metrics.csv", ".metrics.csv", "lock", "lock_owner.json", "checkpoints/.saving-1"])
def test_resume_does_not_write_through_links(toy_run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy_run(toy_run)
    target = Path("private.txt")
    target.write_text("private")
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(target.absolute())
    status, text = run_and_read(capsys, "resume", "r", "--steps", "640")
    assert status == 2
    assert "symbolic link" in text
    assert target.read_text() == "private"


@pytest.mark.parametrize("name", ["metrics.csv", "lock", "recordings/train-000000000000-0.actions"])
def test_resume_does_not_change_hard_linked_files(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = bestiary.train("toy/catch", run_dir="r", record=True, **SMALL)
    target = Path("private.txt")
    target.write_text("private" * 1_000)
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).hardlink_to(target)
    status, text = run_and_read(capsys, "resume", "r", "--steps", "640")
    assert target.read_text() == "private" * 1_000
    if name == "metrics.csv":  # tables are written to a new file
        assert status == 0, text
    else:
        assert status != 0
        assert "hard link" in text


@pytest.mark.parametrize("link", ["wandb/run", "tensorboard", "wandb/run/logs/debug.log", "wandb/debug.log"])
def test_resume_does_not_give_links_to_loggers(toy_run: Path, link: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy_run(toy_run)
    (run.path / link).parent.mkdir(parents=True, exist_ok=True)
    (run.path / link).symlink_to(Path("elsewhere").absolute())
    status, text = run_and_read(capsys, "resume", "r", "--steps", "640", "--logger", "tensorboard")
    assert status == 2
    assert f"r/{link} is a symbolic link" in text
    assert not Path("elsewhere").exists()


SWAP = """
from pathlib import Path
from bestiary.training.callbacks.base import Callback

class Swap(Callback):
    name = "swap"

    def on_update(self, session, metrics, episodes):
        for name in ("checkpoints", "recordings"):
            folder = session.run.path / name
            if session.learner.steps >= 160 and not folder.is_symlink():
                folder.rename(f"{folder}.moved")
                folder.symlink_to(Path("elsewhere").absolute())
"""


def test_folders_that_become_links_during_the_training_are_not_followed(capsys: pytest.CaptureFixture[str]) -> None:
    """Several users may write to the run folder."""
    Path("swap.py").write_text(SWAP)
    Path("elsewhere/000000000080").mkdir(parents=True)
    Path("elsewhere/.saving-000000000320").mkdir()
    options = {**SMALL, "record": True, "save_every": 80, "max_failed_saves": 2, "callback": "swap.py:Swap"}
    with pytest.raises(RunError, match="symbolic link"):
        bestiary.train("toy/catch", run_dir="r", **options)
    assert sorted(path.name for path in Path("elsewhere").rglob("*")) == [".saving-000000000320", "000000000080"]
    assert open_run("r").checkpoints == []
    assert len(list(Path("r/checkpoints.moved").glob("0*"))) > 0


def test_links_of_wandb_do_not_prevent_resume(toy_run: Path) -> None:
    run = copy_run(toy_run)
    (run.path / "wandb/run-1/logs").mkdir(parents=True)
    (run.path / "wandb/latest-run").symlink_to("run-1")
    (run.path / "wandb/debug.log").symlink_to("run-1/logs/debug.log")
    (run.path / "wandb/run-1/logs/debug-core.log").symlink_to(Path("cache/core.log").absolute())
    assert run_command(["resume", "r", "--steps", "640"]) == 0


def test_names_with_formulas_are_drawn_as_text(toy_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a$\\frac$", "b$x_{$"):
        shutil.copytree(toy_run, name, symlinks=True)
    assert run_and_read(capsys, "compare", "a$\\frac$", "b$x_{$", "--out", "c.png")[0] == 0
    assert run_and_read(capsys, "report", ".", "--no-draw", "--out", "r.html")[0] == 0


def test_output_is_not_written_through_a_link_without_target(toy_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy_run(toy_run)
    for name in ("c.csv", "a.npz", "v.gif"):
        Path(name).symlink_to(Path("new").absolute())
    for command in ("compare r --out c.png", "export r --length 5 --rollouts 1 --out a.npz", "video r --out v.gif"):
        status, text = run_and_read(capsys, *command.split())
        assert status == 2
        assert "exist" in text
    assert not Path("new").exists()


def test_evaluation_is_not_written_through_a_linked_folder(toy_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy_run(toy_run)
    Path("elsewhere").mkdir()
    (run.path / "evaluations").symlink_to(Path("elsewhere").absolute())
    status, text = run_and_read(capsys, "eval", "r", "--episodes", "2")
    assert status == 0
    assert "not saved" in text
    assert "r at step 320, sampled" in text  # the results are shown
    assert list(Path("elsewhere").iterdir()) == []


def test_report_does_not_embed_linked_files(toy_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy_run(toy_run)
    Path("private.gif").write_bytes(b"private")
    (run.path / "videos").mkdir(exist_ok=True)
    (run.path / "videos" / "x.gif").symlink_to(Path("private.gif").absolute())
    status, _ = run_and_read(capsys, "report", ".", "--no-draw", "--out", "report.html")
    assert status == 0
    assert "cHJpdmF0ZQ" not in Path("report.html").read_text()  # base64 of "private"


@pytest.mark.parametrize(
    "command", ["intervene r --erase 0,0,2,2 --continue 3", "look interventions r --episodes 1 --every 2"]
)
def test_second_table_is_not_written_through_a_link(
    toy_run: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """These commands write a second CSV file, whose name is longer than the names of the other files."""
    run = copy_run(toy_run)
    Path("private").write_text("private")
    (run.path / "interpretability").mkdir(exist_ok=True)
    for stem in ("intervention-000000000320-0-steps", "interventions-000000000320-rows"):
        (run.path / "interpretability" / f"{stem}.csv").symlink_to(Path("private").absolute())
    status, text = run_and_read(capsys, *command.split())
    assert status == 0, text
    assert Path("private").read_text() == "private"
    assert len(list((run.path / "interpretability").glob("*-2*.csv"))) == 2


@pytest.mark.parametrize("name", ["metrics.csv", "episodes.csv", "plugins"])
def test_card_contains_no_linked_files(toy_run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder of a card will be published."""
    run = copy_run(toy_run)
    Path("private").mkdir()
    Path("private/key").write_text("private")
    path = run.path / name
    path.unlink(missing_ok=True)
    path.symlink_to(Path("private" if name == "plugins" else "private/key").absolute())
    status, text = run_and_read(capsys, "card", "r", "--out", "card", "--episodes", "2", "--no-video")
    copied = [file for file in Path("card").rglob("*") if file.is_file()]
    assert [file for file in copied if "private" in file.read_text(errors="replace")] == []
    if name != "plugins":  # a card without plug-ins is complete
        assert status == 2
        assert f"{name} cannot be copied" in text
        assert not copied


def test_manifest_and_pipes_cannot_leave_the_folder_or_block(toy_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy_run(toy_run)
    checkpoint = run.checkpoints[-1]
    manifest = json.loads((checkpoint.path / "manifest.json").read_text())
    changed = {**manifest, "../../../pipe": {"bytes": 0, "sha256": ""}}
    os.mkfifo("pipe")
    (checkpoint.path / "manifest.json").write_text(json.dumps(changed))
    damage = checkpoint.find_damage()
    assert damage is not None
    assert "../pipe" in damage
    (checkpoint.path / "manifest.json").write_text(json.dumps(manifest))
    (checkpoint.path / "state.json").unlink()
    os.mkfifo(checkpoint.path / "state.json")
    assert run_and_read(capsys, "eval", "r", "--episodes", "2")[0] == 2
    (run.path / "metrics.csv").unlink()
    os.mkfifo(run.path / "metrics.csv")
    copy_run(toy_run, "other")
    status, text = run_and_read(capsys, "runs", ".")
    assert status == 0
    assert "other" in text  # the damaged run does not prevent the listing of the others
    assert "unreadable" in text
    assert run_and_read(capsys, "report", ".", "--no-draw", "--out", "report.html")[0] == 0


@pytest.mark.parametrize("change", ["shape", "dtype", "index", "nan", "negative"])
def test_optimizer_state_that_does_not_fit_is_rejected(
    toy_run: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_run(toy_run)
    state = run.checkpoints[-1].load_learner()["optimizer"]
    key = min(name for name in state if name.endswith(("exp_avg_sq", "square_avg")) and state[name].numel() > 1)
    changes = {
        "shape": {key: torch.zeros(1)},
        "dtype": {key: state[key].double()},
        "index": {"999.exp_avg": torch.zeros(1)},
        "nan": {key: torch.full_like(state[key], float("nan"))},
        "negative": {key: torch.full_like(state[key], -1.0)},
    }
    change_tensors(run.checkpoints[-1], "optimizer", changes[change])
    status, text = run_and_read(capsys, "resume", "r", "--steps", "640")
    assert status == 2
    assert "optimizer" in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pool.robots", np.full(4, 10**9)),
        ("pool.robots", np.zeros(400, np.int64)),
        ("pool.items", None),
        ("pool.counts", np.full(4, 10**6)),
        ("pool.ages", np.zeros((4, 1), np.int16)),
        ("last_actions", np.full(4, 99)),
        ("step.task", np.full(4, -5)),
        ("generator", np.zeros(3, np.uint8)),
        ("generator", np.full(5056, 255, np.uint8)),
    ],
)
def test_environment_state_that_does_not_fit_is_rejected(
    warehouse_run: Path, name: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_run(warehouse_run)
    if value is None:
        value = np.full_like(run.checkpoints[-1].load_actor()[name], 12_345)
    change_tensors(run.checkpoints[-1], "actor", {name: value})
    status, text = run_and_read(capsys, "resume", "r", "--steps", "640")
    assert status == 2
    assert "actor.safetensors" in text


def test_weights_that_are_not_finite_are_rejected(toy_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy_run(toy_run)
    name, weights = next(iter(run.checkpoints[-1].load_model().items()))
    change_tensors(run.checkpoints[-1], "model", {name: torch.full_like(weights, float("nan"))})
    status, text = run_and_read(capsys, "eval", "r", "--episodes", "2")
    assert status == 2
    assert "not finite" in text


@pytest.mark.parametrize("content", ["[]", "{}", '{"steps": "x"}', "[" * 100_000, '{"config": 3}', "null"])
def test_state_file_with_wrong_structure_is_rejected(
    toy_run: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_run(toy_run)
    checkpoint = run.checkpoints[-1]
    (checkpoint.path / "state.json").write_text(content)
    write_manifest(checkpoint.path, json.loads((checkpoint.path / "manifest.json").read_text()))
    status, text = run_and_read(capsys, "resume", "r", "--steps", "640")
    assert status == 2
    assert "state.json" in text


def test_link_to_the_best_checkpoint_must_name_a_checkpoint(toy_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy_run(toy_run)
    (run.path / "checkpoints" / "best").symlink_to("/etc")
    assert run_and_read(capsys, "eval", "r", "--checkpoint", "best", "--episodes", "2")[0] == 2
    assert run_and_read(capsys, "resume", "r", "--steps", "640")[0] == 0


def test_names_with_markup_and_control_characters_are_shown_as_text(
    toy_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("[/x]", "sweep[red]", "a\x1b[31mb"):
        copy_run(toy_run, name)
    status, text = run_and_read(capsys, "runs", ".")
    assert status == 0
    assert "[/x]" in text
    assert "sweep[red]" in text
    assert "\x1b[31m" not in text
    assert open_run("[/x]").steps == 320


@pytest.mark.parametrize(
    "command",
    [
        ["audit", "RUN", "--episodes", "2"],
        ["video", "RUN"],
        ["resume", "RUN"],
        ["look", "actions", "RUN", "--episodes", "1"],
    ],
    ids=lambda command: command[0],
)
def test_commands_show_the_name_of_a_run_as_text(
    toy_run: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("b\x1b[31m[").mkdir()
    name = copy_run(toy_run, "b\x1b[31m[/x]").path  # two folders; rich would read [/x] as a closing tag
    status, text = run_and_read(capsys, *(str(name) if word == "RUN" else word for word in command))
    assert status == 0, text
    assert "\x1b[31m" not in text
    assert "b\\x1b[31m[" in text


def test_environments_of_a_wrong_type_are_rejected(toy_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("r", "other"):
        run = copy_run(toy_run, name)
    config = run.path / "config.toml"
    config.write_text("env = 3\nsteps = 320\n")
    status, text = run_and_read(capsys, "compare", "r", "other", "--out", "c.png")
    assert status == 2
    assert "env is '3'" in text


def test_huge_sparse_files_are_refused(toy_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy_run(toy_run)
    checkpoint = run.checkpoints[-1].path
    os.truncate(checkpoint / "model.safetensors", 2**40)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["model.safetensors"]["bytes"] = 2**40
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    os.truncate(run.path / "metrics.csv", 2**40)
    status, text = run_and_read(capsys, "eval", "r", "--episodes", "2")
    assert status == 2
    assert "model.safetensors has 1099511627776 bytes; at most" in text
    copy_run(toy_run, "other")
    status, text = run_and_read(capsys, "runs", ".")
    assert status == 0
    assert "at most" in text
    assert run_and_read(capsys, "report", ".", "--no-draw", "--out", "report.html")[0] == 0


def test_recording_with_rewards_of_a_wrong_type_is_rejected(toy_run: Path) -> None:
    bestiary.evaluate(Run(toy_run), episodes=2, record=True)
    path = next((toy_run / "recordings").glob("*.json"))
    metadata = json.loads(path.read_text())
    for content in (json.dumps({**metadata, "rewards": {"training": None, "true": 3}}), "[" * 100_000):
        path.write_text(content)
        with pytest.raises(UserError, match="is not a recording"):
            open_recording(path)


@pytest.mark.parametrize("name", ["rows", "log_intervals", "pending"])
def test_missing_value_in_the_state_of_a_callback_is_rejected(
    toy_run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = copy_run(toy_run).checkpoints[-1]
    state = checkpoint.load_state()
    state["callbacks"]["metrics"][name] = None
    (checkpoint.path / "state.json").write_text(json.dumps(state))
    write_manifest(checkpoint.path, json.loads((checkpoint.path / "manifest.json").read_text()))
    status, text = run_and_read(capsys, "resume", "r", "--steps", "640")
    assert status == 2
    assert f"callbacks/metrics/{name} is 'None'" in text


@pytest.mark.parametrize("option", ["seed", "steps", "num_envs"])
@pytest.mark.parametrize(
    "command", ["eval r --episodes 1", "resume r --steps 640", "compare r --out c.png", "study s.toml"]
)
def test_integer_that_python_cannot_convert_to_text_is_rejected(
    toy_run: Path, option: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(toy_run, "r", symlinks=True)
    huge = f"{option} = 0x{'f' * 6000}\n"
    text = Path("r/config.toml").read_text()
    Path("r/config.toml").write_text(re.sub(rf"^{option} = .*\n", huge, text, flags=re.MULTILINE))
    Path("s.toml").write_text(f'seeds = [1]\n[base]\nenv = "toy/catch"\n{huge}')
    assert run_command(command.split()) == 2
    assert "24000 bits" in capsys.readouterr().err


# --- files that need much more time or memory than their size ---


@pytest.mark.parametrize("key", ["a" + ".a" * 20_000, "'a'" + " . 'a'" * 20_000, '"="' + '."="' * 20_000])
def test_long_keys_in_a_config_are_refused(toy_run: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The time that the parser of the standard library needs for such a key grows quadratically."""
    run = copy_run(toy_run)
    (run.path / "config.toml").write_text(f"{key} = 1\n{(run.path / 'config.toml').read_text()}")
    copy_run(toy_run, "other")
    status, text = run_and_read(capsys, "runs", ".")
    assert status == 0
    assert "other" in text
    assert "parts" in text
    assert run_and_read(capsys, "eval", "r", "--episodes", "1")[0] == 2


def test_large_config_is_refused(toy_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy_run(toy_run)
    (run.path / "config.toml").write_text(f"{'#' * 2**20}\n{(run.path / 'config.toml').read_text()}")
    status, text = run_and_read(capsys, "eval", "r", "--episodes", "1")
    assert status == 2
    assert "1048576" in text


def _table_with_many_columns() -> str:
    return "a," * 400_000 + "step\n" + "1\n" * 10_000


def _table_with_short_rows() -> str:
    return ",".join(f"c{k}" for k in range(9_000)) + "\n" + "1\n" * 10_000


def _table_with_long_cells() -> str:
    long_row = ",".join(["x" * 9_000] * 99)
    short_row = ",".join(["a"] * 99)
    return "\n".join([",".join(f"c{k}" for k in range(99)), long_row, *[short_row] * 10_000]) + "\n"


@pytest.mark.parametrize("make", [_table_with_many_columns, _table_with_short_rows, _table_with_long_cells])
def test_tables_that_would_need_much_more_memory_than_their_size_are_refused(
    toy_run: Path, make: Callable[[], str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_run(toy_run)
    (run.path / "metrics.csv").write_text(make())
    copy_run(toy_run, "other")
    status, text = run_and_read(capsys, "runs", ".")
    assert status == 0
    assert "other" in text
    assert "unreadable: r/metrics.csv is damaged" in text


def test_table_with_short_rows_is_not_filled_up(toy_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy_run(toy_run)
    (run.path / "config_changes.csv").write_text(_table_with_short_rows())
    status, text = run_and_read(capsys, "resume", "r", "--steps", "640")
    assert status == 2
    assert "cells of the columns in the header" in text


def test_report_limits_the_size_of_all_files_together(toy_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each file is small enough, and the files need no space on the disk."""
    run = copy_run(toy_run)
    for folder, name, size in (("videos", "v{}x.gif", 4 * 2**20 - 1), ("evaluations", "e{}.json", 40 * 2**20)):
        (run.path / folder).mkdir(exist_ok=True)
        for number in range(40):
            path = run.path / folder / name.format(number)
            path.touch()
            os.truncate(path, size)
    assert run_and_read(capsys, "report", ".", "--no-draw", "--out", "report.html")[0] == 0
    assert 60 * 2**20 < Path("report.html").stat().st_size < 100 * 2**20
    assert "v9x.gif is left out" in Path("report.html").read_text()


def test_curves_of_very_many_tasks_are_not_drawn(toy_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy_run(toy_run)
    tasks = [f"toy/catch{k}" for k in range(200)]
    config = (run.path / "config.toml").read_text()
    (run.path / "config.toml").write_text(config.replace('"toy/catch"', ", ".join(f'"{task}"' for task in tasks)))
    header, row, *_ = (run.path / "episodes.csv").read_text().splitlines()
    rows = [row.replace("toy/catch", task) for task in tasks]
    (run.path / "episodes.csv").write_text("\n".join([header, *rows]) + "\n")
    assert run_and_read(capsys, "report", ".", "--no-draw", "--out", "report.html")[0] == 0
    assert "no learning curves: the runs have 200 tasks" in Path("report.html").read_text()
    status, text = run_and_read(capsys, "compare", "r", "--out", "c.png")
    assert status == 2
    assert "200 tasks" in text


@pytest.fixture
def nested_run(toy_run: Path) -> Iterator[None]:
    """Create the run `r` with 1,500 nested folders, and remove them after the test.

    `rm` removes them, because shutil.rmtree, with which pytest removes old folders, exceeds the recursion limit.
    """
    folder = copy_run(toy_run).path.resolve()
    descriptor = os.open(folder, os.O_RDONLY)
    for _ in range(1_500):
        os.mkdir("d", dir_fd=descriptor)
        inner = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)
    yield
    subprocess.run(["rm", "-rf", str(folder / "d")], check=True)


@pytest.mark.usefixtures("nested_run")
def test_deeply_nested_folders_do_not_end_commands(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run_and_read(capsys, "runs", ".")
    assert status == 0
    assert "320" in text
    assert run_and_read(capsys, "report", ".", "--no-draw", "--out", "report.html")[0] == 0
    status, text = run_and_read(capsys, "resume", "r", "--steps", "640")
    assert status == 2
    assert "folders inside each other" in text


# --- values of tensors and of state.json ---


@pytest.fixture(scope="module")
def clear_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with a replay buffer and with compiled code that uses the recurrent state."""
    folder = tmp_path_factory.mktemp("hostile") / "r"
    bestiary.train("toy/catch", run_dir=str(folder), algo="clear", memory="delta", **SMALL)
    return folder


@pytest.mark.parametrize("command", ["resume", "train --init-from"])
@pytest.mark.parametrize("change", ["state shape", "state type", "action", "task", "nan", "length", "missing", "count"])
def test_replay_buffer_that_does_not_fit_is_rejected(
    clear_run: Path, change: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_run(clear_run)
    stored = run.checkpoints[-1].load_learner()["algorithm"]
    state, reward, task, action = (stored[f"state.{name}"] for name in ("state.0", "reward", "task", "last_action"))
    changes = {
        "state shape": {"state.state.0": state[:, :1].clone()},
        "state type": {"state.state.0": state.double()},
        "action": {"state.last_action": torch.full_like(action, 99)},
        "task": {"state.task": torch.full_like(task, -1)},
        "nan": {"state.reward": torch.full_like(reward, torch.nan)},
        "length": {"state.reward": reward[:-1].clone()},
        "missing": {"state.extras.other": reward[:-1].clone()},
        "count": {"state.num_seen": torch.tensor(-5)},
    }
    change_tensors(run.checkpoints[-1], "algorithm", changes[change])
    words = ["resume", "r", "--steps", "640"]
    if command != "resume":
        sizes = ["--num-envs", "4", "--batch-size", "4", "--micro-batch-size", "4", "--steps", "320"]
        words = ["train", "toy/catch", "--init-from", "r", "--algo", "clear", "--runtime", "serial", *sizes]
    status, text = run_and_read(capsys, *words)
    assert status == 2
    assert "num_seen is -5" in text if change == "count" else "trajectories do not fit" in text


def test_replay_buffer_with_other_sequence_length_is_rejected(
    clear_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_run(clear_run)
    words = ["train", "toy/catch", "--init-from", "r", "--algo", "clear", "--rollout-length", "10", "--num-envs", "4"]
    status, text = run_and_read(capsys, *words, "--batch-size", "4", "--steps", "320")
    assert status == 2
    assert "--rollout-length" in text


@pytest.mark.parametrize("value", [torch.zeros(()), torch.zeros(3, dtype=torch.int64), torch.full((3,), torch.nan)])
def test_weights_for_a_warm_start_that_do_not_fit_are_rejected(
    toy_run: Path, value: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_run(toy_run)
    change_tensors(run.checkpoints[-1], "model", {"policy.bias": value})
    status, text = run_and_read(capsys, "train", "toy/catch", "--init-from", "r", "--steps", "320")
    assert status == 2
    assert "policy.bias" in text


def test_weights_with_an_infinite_output_end_an_evaluation(toy_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy_run(toy_run)
    weights = run.checkpoints[-1].load_model()["policy.weight"]
    change_tensors(run.checkpoints[-1], "model", {"policy.weight": torch.full_like(weights, 3e38)})
    status, text = run_and_read(capsys, "eval", "r", "--episodes", "2")
    assert status == 1
    assert "not finite" in text


def test_generator_state_with_which_torch_reads_outside_of_its_array_is_rejected(
    toy_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_run(toy_run)
    state = run.checkpoints[-1].load_actor()["generator"].copy()
    state[8:12].view(np.int32)[0] = 624  # words that are left
    state[16:24].view(np.uint64)[0] = 624  # index of the next word
    change_tensors(run.checkpoints[-1], "actor", {"generator": state})
    status, text = run_and_read(capsys, "resume", "r", "--steps", "640")
    assert status == 2
    assert "generator" in text


@pytest.mark.parametrize(
    "monitor",
    [
        {},
        {"x": 1},
        {"recent_returns": [[1.0]], "num_alerts": 0, "games_since_check": 0},
        {"recent_returns": [], "num_alerts": "x", "games_since_check": 0},
    ],
)
def test_state_of_the_reward_monitor_that_does_not_fit_is_rejected(
    monitor: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = bestiary.train("toy/catch", run_dir="r", true_reward="reward=1", **SMALL)
    checkpoint = run.checkpoints[-1]
    state = checkpoint.load_state()
    (name,) = state["callbacks"]["reward_monitor"]
    state["callbacks"]["reward_monitor"][name] = monitor
    (checkpoint.path / "state.json").write_text(json.dumps(state))
    write_manifest(checkpoint.path, json.loads((checkpoint.path / "manifest.json").read_text()))
    status, text = run_and_read(capsys, "resume", "r", "--steps", "640")
    assert status == 2
    assert "reward_monitor" in text


# --- texts ---


def test_control_characters_do_not_reach_the_terminal_in_titles_and_warnings(toy_run: Path) -> None:
    shutil.copytree(toy_run, "a\x1b\x07b", symlinks=True)
    for words in (["eval", "a\x1b\x07b", "--episodes", "1"], ["compare", "a\x1b\x07b", "--out", "c.png"]):
        command = [sys.executable, "-P", "-m", "bestiary", *words]
        result = subprocess.run(command, capture_output=True)
        assert result.returncode == 0, result.stderr
        lines = (result.stdout + result.stderr).splitlines()
        assert [line for line in lines if b"\x1b" in line or b"\x07" in line] == []


@pytest.mark.parametrize(
    "command",
    [
        "report . --no-draw --out r.html",
        "compare RUN r --out c.png",
        "audit RUN --episodes 2",
        "look actions RUN --episodes 1",
        "card RUN --episodes 2 --no-video",
    ],
    ids=lambda command: command.split()[0],
)
def test_name_with_bytes_that_are_not_text_is_escaped(
    toy_run: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = os.fsdecode(b"bad\xff")
    for folder in ("r", name):
        copy_run(toy_run, folder)
    status, text = run_and_read(capsys, *(name if word == "RUN" else word for word in command.split()))
    assert status == 0, text
    if command.startswith("report"):
        assert "bad\\udcff" in Path("r.html").read_text()


def test_control_characters_of_a_config_are_escaped_when_it_is_printed(
    toy_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Path("c.toml")
    device = "cpu\x9b31m\u202e\u2028[env]"
    config.write_text(dump_toml({**read_tables(toy_run / "config.toml"), "device": device}))
    status, text = run_and_read(capsys, "train", "--config", "c.toml", "--dry-run")
    assert status == 0, text
    assert [c for c in text if not c.isprintable() and c != "\n"] == []
    printed = text[: text.index("\n\n", text.index("[versions]"))] if "[versions]" in text else text
    assert parse_toml(printed.partition("\n\n[")[0])["device"] == device


def test_name_with_line_break_is_drawn_in_a_video(toy_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a\nb", "c"):
        copy_run(toy_run, name)
    assert run_and_read(capsys, "video", "a\nb", "c", "--out", "v.gif", "--length", "2")[0] == 0


def test_names_with_formulas_are_drawn_as_text_in_python(toy_run: Path) -> None:
    shutil.copytree(toy_run, "a$\\frac$", symlinks=True)
    run = bestiary.load("a$\\frac$")
    metrics = (run.path / "metrics.csv").read_text()
    (run.path / "metrics.csv").write_text(metrics.replace("return", "x$_{$/return").replace("loss", "y$_{$/return", 1))
    run.plot().savefig("a.png")
    run.metrics.plot().savefig("b.png")


@pytest.mark.parametrize("name", ["return", "length", "game_return", "game_length"])
def test_sums_of_episodes_that_are_not_finite_are_rejected(
    toy_run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A length that is not finite would end the training with a traceback at the end of the episode."""
    run = copy_run(toy_run)
    change_tensors(run.checkpoints[-1], "actor", {f"episode_tracker.{name}": np.full(4, np.inf)})
    status, text = run_and_read(capsys, "resume", "r", "--steps", "640")
    assert status == 2
    assert f"episode_tracker.{name}: the values are not finite" in text


@pytest.fixture(scope="module")
def popart_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "r"
    bestiary.train("toy/catch", run_dir=str(folder), critic="popart", **SMALL)
    return folder


@pytest.mark.parametrize(("name", "value"), [("sigma", 0.0), ("nu", np.inf), ("mu", -np.inf), ("updates", -1.0)])
@pytest.mark.parametrize("command", [("resume", "r", "--steps", "640"), ("eval", "r", "--episodes", "2")])
def test_invalid_statistics_of_popart_are_rejected(
    popart_run: Path, name: str, value: float, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_run(popart_run)
    change_tensors(run.checkpoints[-1], "model", {f"critic.{name}": torch.full((1,), value, dtype=torch.float64)})
    status, text = run_and_read(capsys, *command)
    assert status == 2
    assert "statistics of PopArt" in text
