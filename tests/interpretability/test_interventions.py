"""Interventions against slow implementations, an agent whose use of the observation is known, and real games."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import torch

from bestiary.agents.agent import Output
from bestiary.agents.distributions import Categorical
from bestiary.envs import make_env
from bestiary.evaluation.playback import Playback, PlaybackOptions, open_viewer
from bestiary.interpretability import image_edits
from bestiary.interpretability.game_branch import (
    GameBranch,
    format_earlier_actions,
    open_branch,
    parse_earlier_actions,
    repeat_branch,
)
from bestiary.interpretability.image_edits import Rectangle
from bestiary.interpretability.interventions import (
    EXAMPLES,
    FORMATS,
    apply_to_inputs,
    check_interventions,
    measure_effect,
    measure_effects,
    parse_intervention,
)
from bestiary.rollout import Inputs
from bestiary.runs.run import open_run
from bestiary.utils.errors import UserError

RECTANGLE = Rectangle(4, 6, 5, 3)


def make_inputs(image: np.ndarray) -> Inputs:
    one = torch.zeros(1, 1)
    observation = {"image": torch.from_numpy(image)[None, None]}
    return Inputs(observation, one, one.bool(), one.long(), one.long())


def random_image(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (2, 20, 16), np.uint8)


# --- edits of images ---


def test_erase_fills_with_the_median_of_the_ring_pixel_by_pixel() -> None:
    image = random_image()
    expected = image.copy()
    r = RECTANGLE
    for c in range(2):
        ring = [
            int(image[c, y, x])
            for y in range(20)
            for x in range(16)
            if r.y - 2 <= y < r.y + r.height + 2 and r.x - 2 <= x < r.x + r.width + 2
            if not (r.y <= y < r.y + r.height and r.x <= x < r.x + r.width)
        ]
        for y in range(r.y, r.y + r.height):
            for x in range(r.x, r.x + r.width):
                expected[c, y, x] = np.uint8(sorted(ring)[len(ring) // 2 - 1] / 2 + sorted(ring)[len(ring) // 2] / 2)
    np.testing.assert_array_equal(image_edits.erase(image, r), expected)


def test_blur_is_that_of_scipy_inside_of_the_rectangle_and_changes_nothing_outside() -> None:
    image = np.random.default_rng(1).integers(0, 256, (1, 84, 84), np.uint8)
    edited = image_edits.blur(image, RECTANGLE)
    blurred = scipy.ndimage.gaussian_filter(image[0].astype(float), 3).round()
    inside = np.zeros((84, 84), bool)
    inside[RECTANGLE.rows, RECTANGLE.columns] = True
    assert np.abs(edited[0][inside] - blurred[inside]).max() <= 1
    np.testing.assert_array_equal(edited[0][~inside], image[0][~inside])


def test_move_and_copy_paste_the_rectangle_and_cut_it_off_at_the_edge() -> None:
    image = random_image()
    moved, copied = (edit(image, RECTANGLE, 13, 18) for edit in (image_edits.move, image_edits.copy))
    np.testing.assert_array_equal(moved[:, 18:, 13:], image[:, 6:8, 4:7])
    np.testing.assert_array_equal(copied[:, 18:, 13:], image[:, 6:8, 4:7])
    np.testing.assert_array_equal(copied[:, 6:9, 4:9], image[:, 6:9, 4:9])
    np.testing.assert_array_equal(moved[:, 6:9, 4:9], image_edits.erase(image, RECTANGLE)[:, 6:9, 4:9])


def test_scaled_rectangle_covers_the_same_part_of_the_screen() -> None:
    assert Rectangle(80, 105, 2, 4).scaled((210, 160), (84, 84)) == Rectangle(42, 42, 2, 2)
    assert Rectangle(0, 0, 160, 210).scaled((210, 160), (84, 84)) == Rectangle(0, 0, 84, 84)


# --- options ---


@pytest.mark.parametrize("kind", FORMATS)
def test_options_can_be_parsed_and_written_again(kind: str) -> None:
    assert parse_intervention(kind, EXAMPLES[kind]).option == f"--{kind} {EXAMPLES[kind]}"


def test_earlier_actions_can_be_parsed_and_written_again() -> None:
    text = "3:LEFT,5-7:RIGHT,8:LEFT"
    actions = parse_earlier_actions(text)
    assert actions == {3: "LEFT", 5: "RIGHT", 6: "RIGHT", 7: "RIGHT", 8: "LEFT"}
    assert format_earlier_actions(actions) == text
    for wrong in ("LEFT", "3:", "x:LEFT", "7-5:LEFT", "3:LEFT,,", "-1:LEFT"):
        with pytest.raises(UserError, match="STEP:ACTION"):
            parse_earlier_actions(wrong)


@pytest.mark.parametrize(
    ("kind", "text", "facts"),
    [
        ("erase", "30,40,8", ["--erase 30,40,8", "X,Y,WIDTH,HEIGHT"]),
        ("erase", "30,40,8,8", ["84x84"]),
        ("erase", "80,40,8,8", ["--erase 76,40,8,8"]),
        ("erase", "30,40,0,8", ["--erase 30,40,1,8"]),
        ("move", "30,40,8,8,84,0", ["84,0", "83,83"]),
        ("set", "ballx=100", ["ballx", "did you mean ball_x"]),
        ("set", "ball_x=300", ["255"]),
        ("set", "ball_x=1.5", ["whole number", "2"]),
        ("set", "ball_x", ["LABEL=VALUE"]),
        ("action", "JUMP", ["JUMP", "RIGHTFIRE"]),
    ],
)
def test_invalid_interventions_are_reported_with_a_valid_value(kind: str, text: str, facts: list[str]) -> None:
    interface = open_run("zoo/pong").config.interface
    if text == "30,40,8,8":  # valid for images of 84x84 pixels
        check_interventions([parse_intervention(kind, text)], interface)
        return
    with pytest.raises(UserError) as error:
        check_interventions([parse_intervention(kind, text)], interface)
    assert all(fact in str(error.value) for fact in facts), str(error.value)


def test_vector_observations_can_be_erased_by_cells_only() -> None:
    interface = open_run("zoo/warehouse-iam").config.interface
    check_interventions([parse_intervention("erase", "0,0,7,7")], interface)
    with pytest.raises(UserError, match="--blur"):
        check_interventions([parse_intervention("blur", "0,0,2,2")], interface)
    inputs = make_inputs(random_image())
    inputs = replace(inputs, observation={"vector": torch.ones(1, 1, 73)})
    changed = apply_to_inputs([parse_intervention("erase", "0,0,2,1")], inputs, interface)
    vector = changed.observation["vector"][0, 0].numpy()
    assert interface.input_cells is not None
    expected = [0.0 if row == 0 and column < 2 else 1.0 for row, column in interface.input_cells]
    assert vector.tolist() == expected
    assert expected.count(0.0) == 4  # the robot and an item in two cells


# --- effects on an agent whose use of the observation is known ---


class OneRectangleAgent(torch.nn.Module):
    """Agent with two actions that sees only the mean brightness m of one rectangle: logits (m, 0), value 2 m."""

    def __init__(self, rectangle: Rectangle):
        super().__init__()
        self.rectangle = rectangle

    def initial_state(self, batch_size: int) -> tuple:
        return ()

    def forward(self, inputs: Inputs, state: Any) -> Any:
        part = inputs.observation["image"][..., self.rectangle.rows, self.rectangle.columns].float()
        m = part.mean(dim=(2, 3, 4)) / 255
        return Output(Categorical(torch.stack([m, torch.zeros_like(m)], dim=-1)), 2 * m), state


def test_effect_on_an_agent_that_reads_one_rectangle() -> None:
    image = np.zeros((2, 20, 16), np.uint8)
    image[:, RECTANGLE.rows, RECTANGLE.columns] = 255
    inputs, interface = make_inputs(image), open_run("zoo/pong").config.interface
    agent: Any = OneRectangleAgent(RECTANGLE)
    erased = apply_to_inputs([parse_intervention("erase", "4,6,5,3")], inputs, interface)
    effect = measure_effect(agent, inputs, erased, ())
    p = np.exp(1) / (np.exp(1) + 1)
    np.testing.assert_allclose(effect.before, [p, 1 - p], rtol=1e-6)
    np.testing.assert_allclose(effect.after, [0.5, 0.5], rtol=1e-6)
    assert effect.value_change == pytest.approx(-2)
    assert effect.value_score == pytest.approx(2)
    assert effect.policy_score == pytest.approx(0.5)
    assert effect.kl == pytest.approx(p * np.log(2 * p) + (1 - p) * np.log(2 * (1 - p)))
    assert effect.probability_change(0) == pytest.approx(0.5 - p)
    # No edit outside of the rectangle has an effect.
    elsewhere = [apply_to_inputs([parse_intervention("copy", "4,6,5,3,10,12")], inputs, interface)]
    elsewhere += [apply_to_inputs([parse_intervention("erase", "10,12,3,3")], inputs, interface)]
    for one in measure_effects(agent, inputs, elsewhere, ()):
        assert one.kl == 0
        assert one.value_change == 0
    # Half of the rectangle is erased: the mean brightness is 2/5.
    (half,) = measure_effects(
        agent, inputs, [apply_to_inputs([parse_intervention("move", "4,6,3,3,10,12")], inputs, interface)], ()
    )
    assert half.value_after == pytest.approx(2 * 2 / 5)
    assert image[0, 6, 4] == 255  # the original image has not changed


# --- games ---


@pytest.mark.parametrize(("name", "greedy"), [("zoo/pong", False), ("zoo/warehouse-iam", True)])
def test_branch_is_the_game_of_the_video(name: str, greedy: bool) -> None:
    run, options = open_run(name), PlaybackOptions(seed=3, greedy=greedy)
    viewer = open_viewer(run, seed=3)
    frames = [frame for (frame,) in Playback([viewer], length=25, greedy=greedy)]
    branch = open_branch(run, options)
    for frame in frames:
        np.testing.assert_array_equal(branch.screen, frame.screen)
        for kind, array in frame.record.step.observation.items():
            np.testing.assert_array_equal(branch.record.step.observation[kind], array)
        assert branch.record.output.value == frame.record.output.value
        assert branch.next_action() == frame.action
        branch.advance()
    branch.close()


def test_ale_repeats_the_game_of_envpool() -> None:
    run, options = open_run("zoo/pong"), PlaybackOptions(seed=5)
    branch = open_branch(run, options)
    branch.play_to(12)
    other = repeat_branch(run, options, branch, settable=True)
    for _ in range(12):
        assert branch.next_action() == other.next_action()
        for one in (branch, other):
            one.advance()
        np.testing.assert_array_equal(branch.record.step.observation["image"], other.record.step.observation["image"])
        np.testing.assert_array_equal(branch.screen, other.screen)
    branch.close()


@pytest.mark.parametrize(
    ("game", "options"),
    [
        ("Breakout", {}),
        ("SpaceInvaders", {"gray": False, "frame_size": (50, 60)}),
        ("Riverraid", {"force_start": True}),
    ],
)
def test_observations_of_ale_and_envpool_are_equal(game: str, options: dict[str, Any]) -> None:
    pool, other = (make_env(f"atari/{game}", num_envs=1, seed=4, render=True, **options) for _ in range(2))
    first = pool.reset()
    ale = other.unwrapped.use_ale()
    for ale.noops in range(31):
        repeated = other.reset()
        if np.array_equal(first.measures["ram"], repeated.measures["ram"]):
            break
    np.testing.assert_array_equal(first.observation["image"], repeated.observation["image"])
    rng = np.random.default_rng(0)
    lives = set()
    for _ in range(150):
        action = rng.integers(pool.action_spec.n, size=1)
        for one in (pool, other):
            one.send(action)
        steps = [one.recv() for one in (pool, other)]
        np.testing.assert_array_equal(steps[0].observation["image"], steps[1].observation["image"])
        np.testing.assert_array_equal(steps[0].measures["ram"], steps[1].measures["ram"])
        assert steps[0].reward == steps[1].reward
        assert steps[0].done == steps[1].done
        lives.add(int(pool.unwrapped.lives[0]))
        if steps[0].game_over[0]:
            break
    assert game != "Breakout" or len(lives) > 1  # FIRE after a lost life is a hidden step
    pool.close()


@pytest.fixture
def pong_rally() -> tuple[GameBranch, GameBranch]:
    """Return two branches of the same game of Pong at a step with a ball; values can be set in the second one."""
    run, options = open_run("zoo/pong"), PlaybackOptions(seed=3)
    branch = open_branch(run, options)
    while not 60 < branch.labels()["ball_y"] < 150:
        branch.advance()
    return branch, repeat_branch(run, options, branch, settable=True)


def ball_pixels(screen: np.ndarray) -> np.ndarray:
    """Return x and y of the ball's upper left pixel on the screen of Pong."""
    y, x = np.nonzero((screen[34:194] == (236, 236, 236)).all(-1))
    return np.array([x.min(), y.min() + 34])


def test_set_moves_the_ball_in_all_stacked_frames_and_in_the_game(
    pong_rally: tuple[GameBranch, GameBranch],
) -> None:
    branch, other = pong_rally
    before = branch.labels()
    new_x = 150 if before["ball_x"] < 130 else 90
    effect = other.intervene([parse_intervention("set", f"ball_x={new_x}")])
    assert other.labels()["ball_x"] == new_x
    assert abs(ball_pixels(other.screen)[0] - (new_x - 49)) <= 2
    assert effect.policy_score > 0
    # The stack differs from the old one only near the old and the new place of the ball, and near moving paddles.
    old, new = (b.record.inputs.observation["image"][0, 0].numpy().astype(int) for b in (branch, other))
    changed_columns = np.flatnonzero((np.abs(new - old) > 30).any(axis=(0, 1)))
    near = [(x - 49) * 84 / 160 for x in (before["ball_x"], new_x)]
    assert all(min(abs(c - x) for x in (*near, 8, 74)) < 12 for c in changed_columns)
    # Both games go on; in the second one, the ball flies on from its new place with the same velocity.
    for one in (branch, other):
        one.advance("NOOP")
    travelled = branch.labels()["ball_x"] - before["ball_x"]
    assert abs(other.labels()["ball_x"] - new_x - travelled) <= 2
    branch.close()


def test_setting_a_value_to_what_it_is_has_no_effect(pong_rally: tuple[GameBranch, GameBranch]) -> None:
    branch, other = pong_rally
    effect = other.intervene([parse_intervention("set", f"ball_x={branch.labels()['ball_x']:g}")])
    np.testing.assert_array_equal(effect.before, effect.after)
    for _ in range(10):
        for one in (branch, other):
            one.advance("NOOP")
        assert branch.labels() == other.labels()
    branch.close()


def test_action_is_taken_once_and_the_rest_of_the_game_uses_the_same_random_numbers() -> None:
    run, options = open_run("zoo/warehouse-iam"), PlaybackOptions(seed=1)
    branch = open_branch(run, options)
    branch.play_to(10)
    other = repeat_branch(run, options, branch)
    other.intervene([parse_intervention("action", branch.next_action())])
    continuations = [one.play_on(1000) for one in (branch, other)]
    assert continuations[0] == continuations[1]
    assert continuations[0].game_over
    third = open_branch(run, options)
    third.play_to(10)
    third.intervene([parse_intervention("action", "up")])
    assert third.play_on(5).actions[0] == "up"


def test_warehouse_state_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_env("warehouse", num_envs=2, seed=0)
    pool.reset()
    for _ in range(12):
        pool.send(np.array([0, 3]))
        pool.recv()
    labels = pool.read_labels()
    np.testing.assert_array_equal(np.stack([labels[f"age_{k}"] for k in range(24)], 1), pool.unwrapped.ages)
    observation = pool.set_labels({"robot_row": 2, "robot_column": 4, "age_5": 6, "item_7": 0, "item_8": 1})["vector"]
    labels = pool.read_labels()
    assert labels["age_5"].tolist() == [6, 6]
    assert labels["item_7"].tolist() == [0, 0]
    assert labels["item_8"].tolist() == [1, 1]
    assert observation[:, :49].argmax(1).tolist() == [2 * 7 + 4] * 2
    items = np.stack([labels[f"item_{k}"] for k in range(24)], 1)
    np.testing.assert_array_equal(observation[:, 49:], items)
    pool.unwrapped._check_saved(pool.save())  # the items are valid, and sorted by age
    state = pool.unwrapped.state
    for items_of_env, ages, count in zip(state.items, state.ages, state.counts, strict=True):
        listed = [int(ages[k]) for k in items_of_env[:count]]
        assert listed == sorted(listed, reverse=True)
        assert count == (ages >= 0).sum()


def test_step_after_the_end_of_the_game_is_refused() -> None:
    with pytest.raises(UserError, match=r"--step 500.*100"):
        open_branch(open_run("zoo/warehouse-iam"), PlaybackOptions()).play_to(500)


def test_user_environments_have_no_labels() -> None:
    pool = make_env("toy/catch", num_envs=1)
    pool.reset()
    assert pool.read_labels() == {}
    interface = pool.interface
    with pytest.raises(UserError, match="no labelled quantities"):
        check_interventions([parse_intervention("set", "ball_x=1")], interface)
