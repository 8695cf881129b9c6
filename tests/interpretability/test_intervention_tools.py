"""The tools `intervene`, `look interventions` and `look probes`: known effects, written files and error messages."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import scipy.stats
import torch

from bestiary.cli.main import run_command
from bestiary.evaluation.playback import PlaybackOptions
from bestiary.interpretability.game_branch import open_branch
from bestiary.interpretability.image_edits import Rectangle
from bestiary.interpretability.intervention_study import (
    ALL,
    choose_detection,
    gradient_saliency,
    measure_objects,
    rank_correlation,
    summarise_measurements,
)
from bestiary.interpretability.observed_objects import find_objects, median_background
from bestiary.interpretability.probe_report import STATE, activations, layer_names, make_targets, make_untrained_agent
from bestiary.interpretability.sampled_steps import SampledStep, Samples, SamplingOptions, play_and_sample
from bestiary.rollout import Inputs
from bestiary.runs.run import open_run
from bestiary.step import ActionSpec, ArraySpec
from tests.interpretability.test_interventions import OneRectangleAgent


def read_csv(path: str) -> list[dict[str, str]]:
    with Path(path).open() as file:
        return list(csv.DictReader(file))


# --- effects of objects on an agent whose use of the image is known ---

READ, IGNORED = Rectangle(4, 6, 4, 4), Rectangle(20, 20, 4, 4)  # two white objects on a black background


def make_samples(games: int, steps: int) -> Samples:
    """Return steps of an environment that shows two objects, and a background without them."""
    pool_interface = open_run("zoo/pong").config.interface
    interface = type(pool_interface)(("toy",), {"image": ArraySpec((1, 32, 32), "uint8")}, ActionSpec(("a", "b")))
    image = np.zeros((1, 32, 32), np.uint8)
    for rectangle in (READ, IGNORED):
        image[:, rectangle.rows, rectangle.columns] = 255
    one = torch.zeros(1, 1)
    inputs = Inputs({"image": torch.from_numpy(image)[None, None]}, one, one.bool(), one.long(), one.long())
    sampled = [SampledStep(g, t, inputs, ((),), {}, 0, [{}]) for g in range(games) for t in range(steps)]
    return Samples(sampled, np.zeros((5, 1, 32, 32), np.uint8), interface)


def test_objects_are_the_regions_that_differ_from_the_background() -> None:
    samples = make_samples(1, 1)
    background = median_background(samples)
    image = samples.steps[0].inputs.observation["image"][0, 0].numpy()
    found = find_objects(samples.steps[0], image, background, "changes")
    assert [int(one.region.sum()) for one in found] == [36, 36]  # 4x4 pixels and a margin of one pixel
    expected = np.zeros((32, 32), bool)
    expected[5:11, 3:9] = True
    assert any((one.region == expected).all() for one in found)


def test_erasing_only_has_an_effect_on_the_object_that_the_agent_reads() -> None:
    agent: Any = OneRectangleAgent(READ)
    measurements = measure_objects(agent, make_samples(3, 2), "changes")
    p = np.exp(1) / (np.exp(1) + 1)
    kl = p * np.log(2 * p) + (1 - p) * np.log(2 * (1 - p))
    erased = [m for m in measurements if m.kind == "erase"]
    assert len(erased) == 3 * 2 * 2
    effective = [m for m in erased if m.effect.kl > 0]
    assert len(effective) == len(erased) // 2
    for m in effective:
        assert m.effect.kl == pytest.approx(kl, rel=1e-5)
        assert m.effect.value_change == pytest.approx(-2, rel=1e-5)
        assert m.effect.probability_change(m.action) == pytest.approx(0.5 - p, rel=1e-5)
        assert m.policy_saliency > 0
    for m in erased:
        if m.effect.kl == 0:
            assert (m.effect.kl, m.effect.value_change, m.policy_saliency) == (0, 0, 0)
    # The mean over games of one object that matters and one that does not is half of the effect.
    (summary,) = [s for s in summarise_measurements(measurements) if (s.kind, s.quantity) == ("erase", "kl")]
    assert summary.mean == pytest.approx(kl / 2, rel=1e-5)
    assert (summary.games, summary.measurements) == (3, 12)


def test_rank_correlation_is_spearmans_with_ties() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 5, 40), rng.integers(0, 5, 40)
    assert rank_correlation(x, y) == pytest.approx(scipy.stats.spearmanr(x, y).statistic)
    assert np.isnan(rank_correlation(x, np.zeros(40)))


# --- the warehouse agent ---


@pytest.fixture(scope="module")
def warehouse() -> tuple[Any, Samples]:
    run = open_run("zoo/warehouse-iam")
    agent = run.agent()
    untrained = make_untrained_agent(run, agent)
    return (agent, untrained), play_and_sample(run, [agent, untrained], SamplingOptions(episodes=3, every=10))


def test_sampled_steps_are_those_of_the_games(warehouse: tuple[Any, Samples]) -> None:
    agents, samples = warehouse
    assert sorted(set(samples.games.tolist())) == [0, 1, 2]
    for game in range(3):
        ages = [step.step for step in samples.steps if step.game == game]
        assert np.diff(ages).tolist() == [10] * 9
    for step in samples.steps:
        vector = step.inputs.observation["vector"][0, 0].numpy()
        assert [step.labels[f"item_{k}"] for k in range(24)] == vector[49:].tolist()
        for agent, state in zip(agents, step.states, strict=True):
            assert [s.shape[0] for s in state] == [1] * len(agent.initial_state(1))


def test_gradient_saliency_is_the_derivative_times_the_input(warehouse: tuple[Any, Samples]) -> None:
    (agent, _), samples = warehouse
    step = samples.steps[2]
    policy, value = gradient_saliency(agent, step, "vector")
    vector = step.inputs.observation["vector"]
    entry = int(vector[0, 0, 49:].argmax()) + 49
    outputs = []
    for shift in (-1e-2, 1e-2):
        moved = vector.clone()
        moved[0, 0, entry] += shift
        inputs = Inputs(
            {"vector": moved}, step.inputs.reward, step.inputs.done, step.inputs.last_action, step.inputs.task
        )
        with torch.no_grad():
            output, _ = agent(inputs, step.states[0])
        outputs.append((output.distribution.logits[0, 0].numpy(), float(output.value[0, 0])))
    slopes = (outputs[1][0] - outputs[0][0]) / 2e-2
    assert policy[entry] == pytest.approx(0.5 * (slopes**2).sum(), rel=0.05)
    assert value[entry] == pytest.approx(0.5 * ((outputs[1][1] - outputs[0][1]) / 2e-2) ** 2, rel=0.05, abs=1e-4)
    assert (policy[vector[0, 0].numpy() == 0] == 0).all()


def test_activations_are_those_of_the_agent(warehouse: tuple[Any, Samples]) -> None:
    (agent, untrained), samples = warehouse
    layers = layer_names(agent, samples.steps)
    assert layers == ["torso.layers.0", "torso.layers.2", "memory.core", STATE]
    steps = samples.steps[:70]
    x = activations(agent, "torso.layers.0", steps, 0)
    layer = agent.torso.layers[0]
    inputs = np.stack([step.inputs.observation["vector"][0, 0].numpy() for step in steps])
    expected = inputs @ layer.weight.detach().numpy().T + layer.bias.detach().numpy()
    np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-4)
    # The recurrent state after a step is the state before the next step of the game.
    run = open_run("zoo/warehouse-iam")
    samples = play_and_sample(run, [agent, untrained], SamplingOptions(episodes=1, every=1))
    for index, one in enumerate((agent, untrained)):
        states = activations(one, STATE, samples.steps, index)
        before = np.stack([step.states[index][0].flatten().numpy() for step in samples.steps])
        np.testing.assert_allclose(states[:-1], before[1:], atol=1e-5)


def test_targets_are_nan_where_the_item_does_not_exist(warehouse: tuple[Any, Samples]) -> None:
    _, samples = warehouse
    targets = make_targets(samples.steps, samples.interface)
    assert {name: len(values) for name, values in targets.items()} == {
        "robot_row": 1,
        "robot_column": 1,
        "item positions": 24,
        "item ages": 24,
    }
    for item, age in zip(targets["item positions"], targets["item ages"], strict=True):
        np.testing.assert_array_equal(np.isfinite(age), item == 1)


# --- commands ---


def test_intervene_writes_the_effect_and_both_continuations(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "intervene zoo/warehouse-iam --seed 3 --step 20 --set robot_row=2 --action up --continue 15"
    assert run_command([*arguments.split(), "--out", "a.png"]) == 0
    rows = {row["quantity"]: row for row in read_csv("a.csv")}
    branch = open_branch(open_run("zoo/warehouse-iam"), PlaybackOptions(seed=3))
    branch.play_to(20)
    probabilities = branch.record.output.distribution.log_probs[0, 0].exp().numpy()
    for name, p in zip(branch.interface.action_spec.names, probabilities, strict=True):
        assert float(rows[f"probability {name}"]["before"]) == pytest.approx(p, abs=1e-5)
    assert float(rows["value"]["before"]) == pytest.approx(float(branch.record.output.value), rel=1e-4)
    assert float(rows["kl"]["after"]) > 0
    steps = read_csv("a-steps.csv")
    assert len(steps) == 15
    assert steps[0]["action_after"] == "up"
    played = branch.play_on(15)
    assert [row["action_before"] for row in steps] == played.actions
    assert float(rows["return of the continuation"]["before"]) == played.game_return
    assert PIL.Image.open("a.png").size[0] > 800
    output = capsys.readouterr()
    assert "P(up)" in output.out
    assert "KL" in output.err
    assert run_command([*arguments.split(), "--out", "a.png"]) == 2
    assert "--overwrite" in capsys.readouterr().err


def test_intervene_compares_the_effect_with_the_saliency_of_the_region() -> None:
    arguments = "intervene zoo/pong --greedy --step 3 --erase 70,20,14,50 --out b.png"
    assert run_command(arguments.split()) == 0
    rows = {row["quantity"]: row for row in read_csv("b.csv")}
    assert float(rows["policy saliency of the region"]["after"]) >= 0
    assert float(rows["policy score"]["after"]) >= 0
    assert not Path("b-steps.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ("intervene zoo/warehouse-iam", ["no intervention", "--erase"]),
        ("intervene zoo/warehouse-iam --blur 0,0,2,2", ["--blur", "no images"]),
        ("intervene zoo/warehouse-iam --set age_3=8", ["age_3=8", "7"]),
        ("intervene zoo/warehouse-iam --step 200 --action up", ["--step 200", "100"]),
        ("intervene zoo/pong --set ball=3", ["ball=3", "ball_x"]),
        ("intervene zoo/pong --step 9 --erase 0,0,2,2 --earlier-actions 3:JUMP", ["3:JUMP", "RIGHTFIRE"]),
        ("intervene zoo/pong --step 9 --erase 0,0,2,2 --earlier-actions 9:LEFT", ["9:LEFT", "--step 9"]),
        ("intervene scripted:nearest --env warehouse --action up", ["scripted:nearest"]),
        ("look interventions zoo/warehouse-iam --objects labels", ["--objects labels", "items"]),
        ("look probes zoo/warehouse-iam --episodes 1", ["--episodes 1", "2"]),
    ],
)
def test_wrong_input_is_one_line(arguments: str, facts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(fact in error for fact in facts), error


def test_set_without_ale_py_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ale_py", None)
    assert run_command("intervene zoo/pong --step 0 --set ball_x=3".split()) == 2
    assert "bestiary[interventions]" in capsys.readouterr().err


def test_look_interventions_writes_means_over_games(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("look interventions zoo/warehouse-iam --episodes 3 --every 20 --out c.png".split()) == 0
    rows, means = read_csv("c-rows.csv"), read_csv("c.csv")
    (mean,) = [r for r in means if (r["object"], r["change"], r["quantity"]) == (ALL, "erase", "kl")]
    games = [[float(r["kl"]) for r in rows if (r["game"], r["change"]) == (str(g), "erase")] for g in range(3)]
    assert float(mean["mean"]) == pytest.approx(np.mean([np.mean(values) for values in games]), rel=1e-4)
    assert float(mean["ci_low"]) < float(mean["mean"]) < float(mean["ci_high"])
    assert mean["games"] == "3"
    assert mean["interval"] == "Student's t"
    assert Path("c.png").stat().st_size > 10_000
    output = capsys.readouterr().out
    assert "all objects" in output
    assert "Student's t" in output


def test_look_probes_compares_with_an_untrained_network_and_the_observation() -> None:
    assert run_command("look probes zoo/warehouse-iam --episodes 4 --every 4 --out d.png".split()) == 0
    rows = read_csv("d.csv")
    assert {row["network"] for row in rows} == {"trained", "untrained", "observation"}
    r2 = {(row["quantity"], row["network"], row["layer"]): float(row["r2"]) for row in rows}
    assert r2["item positions", "observation", "observation"] > 0.9  # the observation contains the items
    assert r2["item ages", "observation", "observation"] < 0.3
    assert all((row["games"], row["interval"]) == ("4", "Student's t") for row in rows)
    assert Path("d.png").stat().st_size > 10_000


def test_detection_depends_on_the_environment() -> None:
    assert choose_detection(open_run("zoo/pong"), "auto") == "labels"
    assert choose_detection(open_run("zoo/pong"), "changes") == "changes"
    assert choose_detection(open_run("zoo/warehouse-iam"), "auto") == "items"


# --- published results ---

DOCS = Path(__file__).parents[2] / "docs/results"
OBJECTS = {"opponent's paddle": "enemy", "own paddle": "player", "all": "all objects"}
QUANTITIES = ("kl", "value_change", "policy_rank_correlation", "value_rank_correlation")


@pytest.mark.parametrize(
    ("table", "title"),
    [
        ("interventions-pong.csv", "Interventions in Pong"),
        ("interventions-warehouse.csv", "Interventions in the warehouse"),
    ],
)
def test_the_results_page_has_the_numbers_of_its_csv_files(table: str, title: str) -> None:
    part = (DOCS / "interventions.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")][1:]
    rows = {(row["object"], row["change"], row["quantity"]): row for row in read_csv(str(DOCS / table))}
    assert len(lines) >= 8
    assert {row["interval"] for row in rows.values()} == {"Student's t"}  # 4 to 10 games
    for name, change, *cells in lines:
        for cell, quantity in zip(cells, QUANTITIES, strict=True):
            row = rows[OBJECTS.get(name, name), change, quantity]
            shown = [word.strip("[],") for word in cell.split()]
            step = 10 ** -len(shown[0].partition(".")[2])
            exact = np.array([float(row[column]) for column in ("mean", "ci_low", "ci_high")])
            exact = exact.clip(max=1) if "correlation" in quantity else exact
            np.testing.assert_allclose([float(number) for number in shown], exact, rtol=0, atol=0.501 * step)
