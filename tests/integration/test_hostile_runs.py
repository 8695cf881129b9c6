"""Run folders that another person has prepared: links, pipes, damaged files, wrong shapes, control characters."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

import bestiary
from bestiary.cli.main import run_command
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
