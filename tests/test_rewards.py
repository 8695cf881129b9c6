"""Rewards from the command line to the run folder and back."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bestiary
from bestiary.agents.agent import count_parameters
from bestiary.agents.torsos import Shallow
from bestiary.cli import run_command
from bestiary.resolve import resolve
from bestiary.rollout import ArraySpec, Inputs
from bestiary.runs.folder import open_run
from bestiary.runtime.train import describe

SMALL: dict[str, Any] = {
    "runtime": "serial",
    "num_envs": 16,
    "batch_size": 16,
    "group_size": 16,
    "save_every": 0,
    "log_every": 800,
}


def test_channels_are_kept_apart_and_the_run_remembers(capsys: pytest.CaptureFixture[str]) -> None:
    trained, true = "on_shelf=1,left_half=-0.5@every=2", "collected=1; expired=-1"
    rewards: dict[str, Any] = {"reward": trained, "true_reward": true, "algo.reward_scale": 0.5}
    run = bestiary.train("warehouse", run_dir="w", steps=3_200, **rewards, **SMALL)
    episodes, metrics = run.episodes, run.metrics
    np.testing.assert_array_equal(episodes["return"], episodes["trained_return"])
    np.testing.assert_array_equal(episodes["true_return"], episodes["collected"])
    np.testing.assert_array_equal(episodes["true_return_2"], -episodes["expired"])
    np.testing.assert_array_equal(episodes["game_true_return"], episodes["true_return"])
    assert (episodes["trained_return"] <= episodes["on_shelf"]).all()
    assert metrics["trained_return"][-1] == pytest.approx(episodes["trained_return"][-100:].mean())
    assert metrics["true_return"][-1] == pytest.approx(episodes["true_return"][-100:].mean())
    assert metrics["learnt_reward"][-1] == pytest.approx(0.5 * metrics["trained_return"][-1] / 100, abs=0.1)
    assert "trained on on_shelf=1,left_half=-0.5@every=2, times 0.5" in capsys.readouterr().err

    for best in ("best-trained", "best-true"):  # kept, and found again
        assert run_command(["eval", "w", "--episodes", "4", "--checkpoint", best]) == 0
    path = max(Path("w/evaluations").glob("*-4.json"))
    assert "true return of a game" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert found["protocol"]["rewards"] == {"trained": trained, "true": true}
    assert 0 < found["protocol"]["fully_connected"] < found["protocol"]["parameters"]
    with path.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    assert found["statistics"]["true"]["mean"] == pytest.approx(np.mean([float(r["collected"]) for r in rows]))
    assert found["statistics"]["true_per_step"]["mean"] == pytest.approx(found["statistics"]["true"]["mean"] / 100)
    assert found["statistics"]["game"]["mean"] == pytest.approx(np.mean([float(r["trained_return"]) for r in rows]))


def test_a_resumed_run_is_the_run_that_was_never_stopped() -> None:
    options = {"reward": "collected=1@steps=10:80,changed=-0.1", "alarm_games": 2, "alarm_windows": 2, **SMALL}
    options["algo.schedule"] = "constant"
    whole = bestiary.train("warehouse", run_dir="whole", steps=3_840, **options)
    bestiary.train("warehouse", run_dir="parts", steps=1_920, **options)
    assert run_command(["resume", "parts", "--steps", "3840"]) == 0
    parts = open_run("parts")
    ours, theirs = (run.checkpoints[-1].model() for run in (whole, parts))
    assert all((ours[name] == theirs[name]).all() for name in ours)
    assert (whole.path / "episodes.csv").read_text() == (parts.path / "episodes.csv").read_text()
    states = [run.checkpoints[-1].state() for run in (whole, parts)]
    assert states[0]["alarms"] == states[1]["alarms"]


def test_no_reward_leaves_everything_as_it_was() -> None:
    run = bestiary.train("warehouse", run_dir="plain", steps=1_920, **SMALL)
    assert not {"trained_return", "true_return", "alive", "on_shelf"} & set(run.episodes)
    assert "reward" not in {key for key in run.settings if "." not in key}
    assert run.config.parts["algo"].options.reward_scale is None


def test_a_reward_of_the_users_own(capsys: pytest.CaptureFixture[str]) -> None:
    file = Path("mine.py")
    file.write_text("def careful(measures):\n    return measures['reward'] - 0.01 * measures['alive']\n")
    words = "train toy/chain --reward mine.py:careful --steps 1k --runtime serial --run-dir own --group-size 4"
    assert run_command(words.split()) == 0
    episodes = open_run("own").episodes
    expected = episodes["true_return"] - 0.01 * episodes["length"]
    np.testing.assert_allclose(episodes["trained_return"], expected, atol=1e-4)
    file.write_text(file.read_text() + "# changed\n")
    capsys.readouterr()
    assert run_command(["eval", "own", "--episodes", "2"]) == 2
    assert "has changed since the run was made" in capsys.readouterr().err
    assert run_command(["eval", "own", "--episodes", "2", "--trust-code"]) == 0

    file.write_text("calls = []\ndef late(m):\n    calls.append(1)\n    return m['reward'] / (len(calls) < 30)\n")
    capsys.readouterr()
    words = words.replace("careful", "late").replace("own", "late")
    with np.errstate(all="ignore"):
        assert run_command(words.split()) == 1
    errors = capsys.readouterr().err
    assert "--reward" in errors
    assert "a reward is a finite number (after step " in errors
    steps = int(errors.split("(after step ")[1].split()[0])
    assert steps == 28 * open_run("late").settings["num_envs"]  # one call was the trial before any work


def test_functions_beside_other_true_rewards_are_kept_with_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("def twice(measures):\n    return 2 * measures['reward']\n")
    run = bestiary.train(
        "warehouse", run_dir="two", steps=1_600, true_reward="expired=-1; mine.py:twice; mine.py:twice", **SMALL
    )
    np.testing.assert_array_equal(run.episodes["true_return_2"], 2 * run.episodes["return"])
    assert len(list(Path("two/plugins").iterdir())) == 1
    Path("mine.py").unlink()
    assert run_command(["eval", "two", "--episodes", "2"]) == 2
    assert "mine.py is no longer there" in capsys.readouterr().err
    assert run_command(["eval", "two", "--episodes", "2", "--trust-code"]) == 0


MISTAKES = [
    ("train warehouse --reward gold=1", "warehouse has no component gold; it has reward, alive, changed, collected"),
    ("train warehouse --reward fuel:10", "fuel is a reward of atari/Riverraid, not of warehouse"),
    ("train warehouse --true-reward collected=much", "the weight of collected is 'much', which is no number"),
    ("train warehouse --reward scaled:2,reward=1", "scaled and reward=... contradict each other"),
    ("train warehouse --reward collected=1e39 --dry-run", "the weight of collected is 1e39: at most 1e+30"),
    ("train warehouse --reward collected=1@life=2 --dry-run", "never counts: warehouse has one life"),
    ("train warehouse --reward nothing.py:careful", "there is no file nothing.py"),
    ("train warehouse --reward broken.py:zero", "broken.py, line 2: ZeroDivisionError"),
    ("train warehouse --algo.schedule steps", "expected one of linear, constant, warm, halving, staggered"),
    ("train atari/Pong --force-start", "--force-start: is for Riverraid"),
    ("list rewards", "rewards of which environment?"),
    ("list rewards toy/nix", "the toys are"),
    ("audit nothing", "nothing: there is no such run"),
    ("export nothing", "nothing: there is no such run"),
]


@pytest.mark.parametrize(("words", "expected"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_mistakes(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.py").write_text("def zero(measures):\n    return 1 / 0\n")
    assert run_command(words.split()) == 2
    errors = capsys.readouterr().err
    assert expected in errors
    assert all(line.startswith("bestiary: ") for line in errors.strip().splitlines())


def test_list_rewards(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["list", "rewards", "atari/Riverraid"]) == 0
    listed = capsys.readouterr().out
    for name in ("fuel_shot=WEIGHT", "pacifist:STRENGTH[:BASE=10]", "alive=WEIGHT", "peaceful:STRENGTH"):
        assert name in listed
    assert run_command(["list", "rewards", "warehouse"]) == 0
    listed = capsys.readouterr().out
    assert "left_half=WEIGHT" in listed
    assert "pacifist" not in listed


def test_what_is_learnt_from_fits_unless_told_otherwise() -> None:
    def scale(env: str = "warehouse", **options: str) -> float | None:
        return resolve({"env": env, **options}).parts["algo"].options.reward_scale

    assert scale() is None
    assert scale(true_reward="collected=1") is None
    assert scale("atari/Riverraid", reward="pacifist:20") == pytest.approx(0.1)
    assert scale(reward="survival:10") == pytest.approx(0.1)
    assert scale(reward="survival:10", **{"algo.reward_scale": "1"}) == 1
    assert scale(reward="survival:10", **{"algo.reward": "none"}) is None


def test_what_the_clip_hides_is_said_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "warehouse", "--reward", "on_shelf=5", "--dry-run"]
    assert run_command(words) == 0
    assert "warning" not in capsys.readouterr().err
    assert run_command([*words, "--algo.reward-scale", "1"]) == 0
    assert "on_shelf=5 is learnt from just as if its weight were larger" in capsys.readouterr().err
    assert run_command(["train", "atari/Pong", "--reward", "scaled:10", "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert "what is learnt from is what would be without --reward. --algo.reward none would keep it apart" in said


PICTURES = {"env": "warehouse", "size": "20x20", "observation": "image"}


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"env": "toy/chain"}, "the last trained one, clamped to [-1,1] (--agent.inputs)"),
        ({"env": "toy/chain", "agent.inputs": "action"}, "none (--agent.inputs)"),
        ({"env": "toy/chain", "agent": "iam"}, "none"),
        ({**PICTURES, "agent": "aaa"}, "the last trained one, clamped to [-1,1] (--agent.inputs)"),
        ({**PICTURES, "agent": "aaa", "agent.inputs": "action"}, "none (--agent.inputs)"),
    ],
)
def test_whether_the_agent_sees_the_reward_is_said_truly(options: dict[str, str], seen: str) -> None:
    config = resolve({"reward": "survival:1", **options})
    said = describe(config)
    assert f"seen by the agent: {seen}\n" in said
    assert ("of them in the torso's fully connected layers" in said) == ("torso" in config.parts)
    pool = config.make_pool(2, 0)
    step, agent = pool.reset(), config.make_agent(pool)
    pool.close()
    inputs = [Inputs.of(replace(step, reward=np.full(2, r), done=~step.done), np.zeros(2, np.int64)) for r in (-1, 1)]
    with torch.no_grad():
        one, other = (agent(given, agent.initial_state(2))[0].value for given in inputs)
    assert bool((one != other).any()) == (not seen.startswith("none"))


@pytest.mark.parametrize(
    ("width", "counts"),
    [
        (256, (803_072, 868_864, 934_656)),
        (512, (1_606_144, 1_868_800, 2_131_456)),
        (1024, (3_212_288, 4_261_888, 5_311_488)),
        (2048, (6_424_576, 10_620_928, 14_817_280)),
        (4096, (12_849_152, 29_630_464, 46_411_776)),
    ],
)
def test_the_published_sizes(width: int, counts: tuple[int, ...]) -> None:
    spec = {"image": ArraySpec((4, 84, 84), "uint8")}
    for depth, expected in enumerate(counts, start=1):
        with torch.device("meta"):
            torso = Shallow(spec, Shallow.Options(width=width, depth=depth, center=False))
        assert count_parameters(torso.layers) == expected
        assert count_parameters(torso.convolutions) == 77_984
        weights = [id(p) for p in torso.layers.parameters()]
        assert len(set(weights)) == 2 * depth  # no layer is another one's twin
