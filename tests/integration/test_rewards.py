"""Training and true rewards from the command line to the run folder and the evaluation."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bestiary
from bestiary.agents.agent import count_parameters
from bestiary.agents.torsos import Shallow
from bestiary.cli.main import run_command
from bestiary.config.resolve import resolve
from bestiary.rollout import ArraySpec, Inputs
from bestiary.runs.run import open_run
from bestiary.training.config_summary import describe

SMALL: dict[str, Any] = {
    "runtime": "serial",
    "num_envs": 16,
    "batch_size": 16,
    "micro_batch_size": 16,
    "save_every": 0,
    "log_every": 800,
}


def test_training_and_true_returns_are_logged_separately_and_saved_with_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    training, true = "on_shelf=1,left_half=-0.5@every=2", "collected=1; expired=-1"
    rewards: dict[str, Any] = {"reward": training, "true_reward": true, "algo.reward_scale": 0.5}
    run = bestiary.train("warehouse", run_dir="w", steps=3_200, **rewards, **SMALL)
    episodes, metrics = run.episodes, run.metrics
    np.testing.assert_array_equal(episodes["return"], episodes["training_return"])
    np.testing.assert_array_equal(episodes["true_return"], episodes["collected"])
    np.testing.assert_array_equal(episodes["true_return_2"], -episodes["expired"])
    np.testing.assert_array_equal(episodes["game_true_return"], episodes["true_return"])
    assert (episodes["training_return"] <= episodes["on_shelf"]).all()
    assert metrics["training_return"][-1] == pytest.approx(episodes["training_return"][-100:].mean())
    assert metrics["true_return"][-1] == pytest.approx(episodes["true_return"][-100:].mean())
    assert metrics["transformed_reward"][-1] == pytest.approx(0.5 * metrics["training_return"][-1] / 100, abs=0.1)
    assert "training: on_shelf=1,left_half=-0.5@every=2, times 0.5" in capsys.readouterr().err

    for best in ("best-training", "best-true"):
        assert run_command(["eval", "w", "--episodes", "4", "--checkpoint", best]) == 0
    path = max(Path("w/evaluations").glob("*-4.json"))
    assert "true return of a game" in capsys.readouterr().out
    evaluation = json.loads(path.read_text())
    assert evaluation["protocol"]["rewards"] == {"training": training, "true": true}
    assert 0 < evaluation["protocol"]["fc_parameters"] < evaluation["protocol"]["parameters"]
    with path.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    statistics = evaluation["statistics"]
    assert statistics["game_true_return"]["mean"] == pytest.approx(np.mean([float(r["collected"]) for r in rows]))
    per_step = statistics["true_reward_per_step"]["mean"]
    assert per_step == pytest.approx(statistics["game_true_return"]["mean"] / 100)
    assert statistics["game_return"]["mean"] == pytest.approx(np.mean([float(r["training_return"]) for r in rows]))


def test_resumed_run_equals_an_uninterrupted_run() -> None:
    options = {"reward": "collected=1@steps=10:80,changed=-0.1", "monitor_games": 2, "monitor_windows": 2, **SMALL}
    options["algo.lr_schedule"] = "constant"
    uninterrupted = bestiary.train("warehouse", run_dir="uninterrupted", steps=3_840, **options)
    bestiary.train("warehouse", run_dir="resumed", steps=1_920, **options)
    assert run_command(["resume", "resumed", "--steps", "3840"]) == 0
    resumed = open_run("resumed")
    ours, theirs = (run.checkpoints[-1].load_model() for run in (uninterrupted, resumed))
    assert all((ours[name] == theirs[name]).all() for name in ours)
    assert (uninterrupted.path / "episodes.csv").read_text() == (resumed.path / "episodes.csv").read_text()
    states = [run.checkpoints[-1].load_state() for run in (uninterrupted, resumed)]
    assert states[0]["callbacks"]["reward_monitor"] == states[1]["callbacks"]["reward_monitor"] != {}


def test_run_without_reward_option_has_no_reward_columns() -> None:
    run = bestiary.train("warehouse", run_dir="plain", steps=1_920, **SMALL)
    assert not {"training_return", "true_return", "alive", "on_shelf"} & set(run.episodes)
    assert "reward" not in {key for key in run.raw_config if "." not in key}
    assert run.config.components["algo"].options.reward_scale is None


def test_reward_function_of_a_user_file(capsys: pytest.CaptureFixture[str], another_user: Callable[[], None]) -> None:
    file = Path("mine.py")
    file.write_text("def careful(measures):\n    return measures['reward'] - 0.01 * measures['alive']\n")
    words = "train toy/chain --reward mine.py:careful --steps 1k --runtime serial --run-dir own --micro-batch-size 4"
    assert run_command(words.split()) == 0
    episodes = open_run("own").episodes
    expected = episodes["true_return"] - 0.01 * episodes["length"]
    np.testing.assert_allclose(episodes["training_return"], expected, atol=1e-4)
    file.write_text(file.read_text() + "# changed\n")
    capsys.readouterr()
    assert run_command(["eval", "own", "--episodes", "2"]) == 0
    assert "has changed since the run was created" in capsys.readouterr().err
    another_user()
    assert run_command(["eval", "own", "--episodes", "2"]) == 2
    assert run_command(["eval", "own", "--episodes", "2", "--trust-code"]) == 0

    file.write_text("calls = []\ndef late(m):\n    calls.append(1)\n    return m['reward'] / (len(calls) < 30)\n")
    capsys.readouterr()
    words = words.replace("careful", "late").replace("own", "late")
    with np.errstate(all="ignore"):
        assert run_command(words.split()) == 1
    errors = capsys.readouterr().err
    assert "--reward" in errors
    assert "rewards must be finite (after step " in errors
    steps = int(errors.split("(after step ")[1].split()[0])
    assert steps == 28 * open_run("late").raw_config["num_envs"]  # one call was the check before training


def test_reward_functions_among_several_true_rewards_are_saved_with_the_run(
    capsys: pytest.CaptureFixture[str], another_user: Callable[[], None]
) -> None:
    Path("mine.py").write_text("def twice(measures):\n    return 2 * measures['reward']\n")
    run = bestiary.train(
        "warehouse", run_dir="two", steps=1_600, true_reward="expired=-1; mine.py:twice; mine.py:twice", **SMALL
    )
    np.testing.assert_array_equal(run.episodes["true_return_2"], 2 * run.episodes["return"])
    assert len(list(Path("two/plugins").iterdir())) == 1
    Path("mine.py").unlink()
    assert run_command(["eval", "two", "--episodes", "2"]) == 0
    assert "mine.py: this file is missing, has changed" in capsys.readouterr().err
    another_user()
    assert run_command(["eval", "two", "--episodes", "2"]) == 2
    assert run_command(["eval", "two", "--episodes", "2", "--trust-code"]) == 0


MISTAKES = [
    ("train warehouse --reward gold=1", "warehouse has no component gold; it has reward, alive, changed, collected"),
    (
        "train warehouse --reward fuel:10",
        "fuel needs the components score and fuel_shot, but warehouse does not have all of them",
    ),
    ("train warehouse --true-reward collected=much", "the weight of collected is 'much', which is not a number"),
    ("train warehouse --reward scaled:2,reward=1", "scaled and reward=... contradict each other"),
    (
        "train warehouse --reward collected=1e39 --dry-run",
        "the weight of collected is 1e39, but it must be from -1e+30 to 1e+30",
    ),
    ("train warehouse --reward collected=1@life=2 --dry-run", "never counts: warehouse has one life"),
    ("train warehouse --reward nothing.py:careful", "file nothing.py does not exist"),
    ("train warehouse --reward broken.py:zero", "broken.py, line 2: ZeroDivisionError"),
    ("train warehouse --algo.lr-schedule steps", "expected one of linear, constant, warmup, halving, staggered"),
    ("train atari/Pong --force-start", "--force-start: only for Riverraid"),
    ("list rewards", "list rewards: no environment given"),
    ("list rewards toy/nix", "unknown toy environment"),
    ("audit nothing", "nothing: there is no such run"),
    ("export nothing", "nothing: there is no such run"),
]


@pytest.mark.parametrize(("words", "expected"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_invalid_commands_are_rejected(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_reward_scale_avoids_clipping_by_default() -> None:
    def scale(env: str = "warehouse", **options: str) -> float | None:
        return resolve({"env": env, **options}).components["algo"].options.reward_scale

    assert scale() is None
    assert scale(true_reward="collected=1") is None
    assert scale("atari/Riverraid", reward="pacifist:20") == pytest.approx(0.1)
    assert scale(reward="survival:10") == pytest.approx(0.1)
    assert scale(reward="survival:10", **{"algo.reward_scale": "1"}) == 1
    assert scale(reward="survival:10", **{"algo.reward_clipping": "none"}) is None


def test_effects_of_clipping_are_reported_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "warehouse", "--reward", "on_shelf=5", "--dry-run"]
    assert run_command(words) == 0
    assert "warning" not in capsys.readouterr().err
    assert run_command([*words, "--algo.reward-scale", "1"]) == 0
    assert "on_shelf=5 has the same effect after clipping" in capsys.readouterr().err
    assert run_command(["train", "atari/Pong", "--reward", "scaled:10", "--dry-run"]) == 0
    warning = capsys.readouterr().err
    assert "--reward has no effect" in warning
    assert "--algo.reward-clipping none" in warning


IMAGES = {"env": "warehouse", "size": "20x20", "observation": "image"}


@pytest.mark.parametrize(
    ("options", "observed"),
    [
        ({"env": "toy/chain"}, "last training reward, clamped to [-1,1] (--agent.extra-inputs)"),
        ({"env": "toy/chain", "agent.clamp_reward": "off"}, "last training reward (--agent.extra-inputs)"),
        ({"env": "toy/chain", "agent.extra_inputs": "action"}, "none (--agent.extra-inputs)"),
        ({"env": "toy/chain", "agent": "iam"}, "none"),
        ({**IMAGES, "agent": "aaa"}, "last training reward, clamped to [-1,1] (--agent.extra-inputs)"),
        ({**IMAGES, "agent": "aaa", "agent.extra_inputs": "action"}, "none (--agent.extra-inputs)"),
    ],
)
def test_description_states_whether_the_agent_observes_the_reward(options: dict[str, str], observed: str) -> None:
    config = resolve({"reward": "survival:1", **options})
    description = describe(config)
    assert f"observed by the agent: {observed}\n" in description
    assert ("of them in the torso's fully connected layers" in description) == ("torso" in config.components)
    pool = config.make_vector_env(2, 0)
    step, agent = pool.reset(), config.make_agent(pool)
    pool.close()
    inputs = [
        Inputs.from_step(replace(step, reward=np.full(2, r), done=~step.done), np.zeros(2, np.int64)) for r in (-1, 1)
    ]
    with torch.no_grad():
        one, other = (agent(given, agent.initial_state(2))[0].value for given in inputs)
    assert bool((one != other).any()) == (not observed.startswith("none"))


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
def test_parameter_counts_of_the_published_sizes(width: int, counts: tuple[int, ...]) -> None:
    spec = {"image": ArraySpec((4, 84, 84), "uint8")}
    for depth, expected in enumerate(counts, start=1):
        with torch.device("meta"):
            torso = Shallow(spec, Shallow.Options(width=width, depth=depth, subtract_mean=False))
        assert count_parameters(torso.layers) == expected
        assert count_parameters(torso.convolutions) == 77_984
        weights = [id(p) for p in torso.layers.parameters()]
        assert len(set(weights)) == 2 * depth  # no two layers share their weights
