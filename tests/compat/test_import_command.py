"""The commands of Bestiary work with an imported run."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bestiary.agents.agent import BasicAgent
from bestiary.cli.main import run_command
from bestiary.envs.atari_games import action_names
from bestiary.rollout import ActionSpec, ArraySpec, Inputs
from bestiary.runs.run import open_run
from tests.compat.recreated_networks import AtariNet, ResNet, checkpoint_of, init_
from tests.compat.test_import_networks import MONO, POLY, REWARD

SMALL = {
    **REWARD,
    "use_lstm": True,
    "hidden_size": 8,
    "num_layers": 1,
    "num_actors": 4,
    "unroll_length": 20,
    "total_steps": 8160,
}
UPDATES = 100  # of 4 x 20 steps

HEADER = (
    "# _tick,_time,step,mean_episode_return,mean_episode_true_return,episode_returns,total_loss,pg_loss,baseline_loss,"
    "entropy_loss\n"
)
LOGS = (
    HEADER
    + '0,100.0,80,nan,nan,"()",8.0,1.0,2.0,-0.5\n'
    + '1,110.0,160,5.0,50.0,"(5.0,)",16.0,1.0,2.0,-0.5\n'
    + HEADER
    + '2,190.0,8000,7.0,70.0,"(5.0, 9.0)",4.0,1.0,2.0,-0.5\n'
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an imported run, runs/imported."""
    folder = tmp_path_factory.mktemp("import")
    network = AtariNet(18, lstm=True, width=8, depth=1)
    init_(network, seed=1)
    torch.save(checkpoint_of(network, SMALL, UPDATES), folder / "model.tar")
    (folder / "logs.csv").write_text(LOGS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_command(["import", "model.tar", "--logs", "logs.csv", "--name", "imported"]) == 0
    return folder


def test_the_folder_of_the_checkpoint_becomes_a_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models/Pong").mkdir(parents=True)
    Path("models/Pong/logs.csv").write_text(LOGS)
    torch.save(checkpoint_of(AtariNet(6, lstm=False), MONO, 10), "models/Pong/model.tar")
    before = Path("models/Pong/model.tar").read_bytes()
    arguments = ["import", "models/Pong/model.tar", "--logs", "models/Pong/logs.csv", "--run-dir", "models/Pong"]
    assert run_command(arguments) == 0
    assert open_run("models/Pong").steps == 10 * 4 * 80
    assert Path("models/Pong/model.tar").read_bytes() == before
    assert run_command(arguments) == 2  # an existing run is not replaced


def test_import_does_not_replace_files_beside_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(checkpoint_of(AtariNet(6, lstm=False), MONO, 10), "model.tar")
    Path("metrics.csv").write_text("my own table")
    assert run_command(["import", "model.tar", "--run-dir", "."]) == 2
    assert Path("metrics.csv").read_text() == "my own table"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.csv", "model.tar"]


def test_logs_become_metrics(folder: Path) -> None:
    rows = list(csv.DictReader((folder / "runs/imported/metrics.csv").open()))
    assert [row["step"] for row in rows] == ["160", "8000"]  # one row for each --log-every interval
    assert [row["seconds"] for row in rows] == ["10.0", "90.0"]
    assert [row["frames"] for row in rows] == ["640", "32000"]
    assert [float(row["return"]) for row in rows] == [5.0, 7.0]
    assert [float(row["true_return"]) for row in rows] == [50.0, 70.0]
    # TorchBeast logs sums over 80 steps; the value loss includes the factor 0.5, the entropy the factor -0.01.
    assert float(rows[0]["loss"]) == pytest.approx((8 + 16) / 2 / 80)
    assert float(rows[0]["value_loss"]) == pytest.approx(2 / 80 / 0.5)
    assert float(rows[0]["entropy"]) == pytest.approx(0.5 / 80 / 0.01)


def test_imported_run_is_evaluated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    arguments = ["--episodes", "1", "--num-envs", "1", "--time-limit", "40"]
    assert run_command(["eval", "runs/imported", *arguments]) == 0
    assert list((folder / "runs/imported/evaluations").glob("*.json"))


def test_imported_run_is_drawn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert run_command(["video", "runs/imported", "--length", "10", "--out", "a.gif"]) == 0
    assert run_command(["look", "saliency", "runs/imported", "--length", "2", "--out", "b.gif"]) == 0
    assert (folder / "a.gif").stat().st_size > 0
    assert (folder / "b.gif").stat().st_size > 0


def test_training_starts_from_an_imported_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    arguments = ["--init-from", "runs/imported", "--steps", "80", "--num-envs", "4", "--keep-at", "0", "--name", "new"]
    assert run_command(["train", "atari/Riverraid", "--rollout-length", "20", *arguments]) == 0
    source = open_run("runs/imported").checkpoints[0].load_model()
    start = open_run("runs/new").checkpoints[0].load_model()
    assert all(torch.equal(start[name], source[name]) for name in source)


def test_imported_run_is_resumed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    run = open_run("runs/imported")
    steps = UPDATES * 80
    before = run.checkpoints[-1].load_learner()["optimizer"]
    assert run.steps == steps
    assert run_command(["resume", "runs/imported"]) == 0
    run = open_run("runs/imported")
    assert run.steps == 8160
    after = run.checkpoints[-1].load_learner()["optimizer"]
    updates = (8160 - steps) // 80
    assert after.keys() == before.keys()
    # The state of the optimizer continues: its number of updates is that of the file plus the new ones.
    assert all(after[key] == before[key] + updates for key in before if key.endswith(".step"))
    state = json.loads((run.checkpoints[-1].path / "state.json").read_text())
    assert state["version"] == UPDATES + updates
    assert list(run.metrics["step"][:2]) == [160, 8000]  # the rows of logs.csv remain
    assert run.metrics["step"][-1] == 8160


def test_flags_are_read_from_meta_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(checkpoint_of(AtariNet(6, lstm=False), {}, 10, train=False), "model.tar")
    Path("meta.json").write_text(json.dumps({"args": {**MONO, "device": None}, "env": {"HOME": "/root"}, "git": None}))
    assert run_command(["import", "model.tar", "--meta", "meta.json", "--name", "imported"]) == 0
    run = open_run("runs/imported")
    assert run.config.envs == ("atari/Pong",)
    assert run.steps == 10 * 4 * 80
    assert run.checkpoints[-1].load_learner()["optimizer"] == {}  # the file has no state of the optimizer


def test_unusable_optimizer_state_is_left_out_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = checkpoint_of(ResNet(6), POLY, 10)
    data["optimizer_state_dict"]["state"][3]["square_avg"] = torch.zeros(2)
    torch.save(data, "model.tar")
    assert run_command(["import", "model.tar", "--env", "atari/Pong", "--name", "imported"]) == 0
    assert "optimizer is not imported" in capfd.readouterr().err
    assert open_run("runs/imported").checkpoints[-1].load_learner()["optimizer"] == {}


@pytest.mark.parametrize(("option", "reward", "done"), [("clamp_reward", 7.0, False), ("reset_inputs", 0.5, True)])
def test_options_keep_the_inputs_of_torchbeast(option: str, reward: float, done: bool) -> None:
    actions = ActionSpec(action_names("Pong", full=False))
    observation = {"image": ArraySpec((4, 84, 84), "uint8")}

    def features(**options: Any) -> torch.Tensor:
        agent = BasicAgent(observation, actions, BasicAgent.Options(**options))
        found: list[torch.Tensor] = []
        agent.memory.register_forward_pre_hook(lambda module, arguments: found.append(arguments[0]))
        inputs = Inputs(
            {"image": torch.zeros(1, 1, 4, 84, 84, dtype=torch.uint8)},
            torch.full((1, 1), reward),
            torch.full((1, 1), done),
            torch.full((1, 1), 2),
            torch.zeros(1, 1, dtype=torch.int64),
        )
        agent(inputs, agent.initial_state(1))
        return found[0][0, 0, -7:]  # reward and one-hot action

    kept = [reward, 0, 0, 1, 0, 0, 0]
    assert features(**{option: False}).tolist() == kept
    assert features().tolist() == ([0] * 7 if done else [1.0, *kept[1:]])
