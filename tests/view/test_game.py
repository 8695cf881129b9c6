"""Watched games: the same game as that of `bestiary video`, exact rewinds, overlays, questions and the keyboard."""

import csv
import io
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

import bestiary
from bestiary.cli.main import run_command
from bestiary.evaluation.playback import PlaybackOptions, open_playback
from bestiary.evaluation.video import record_video
from bestiary.interpretability.game_branch import format_earlier_actions
from bestiary.interpretability.image_edits import Rectangle
from bestiary.interpretability.interventions import Intervention
from bestiary.interpretability.saliency import Saliency, SaliencyOptions
from bestiary.runs.recordings import open_recording
from bestiary.runs.run import Run, open_run
from bestiary.utils.errors import UserError
from bestiary.utils.images import enlarge
from bestiary.view.answers import answer_question, saliency_inside
from bestiary.view.catalogue import Catalogue
from bestiary.view.game import GameSetup, WatchedGame
from bestiary.view.overlays import DENSITY, Overlays
from bestiary.view.pages.game_choice import PlayerQuery, make_setup
from bestiary.view.pages.keyboard import action_of_keys

GYMNASIUM_ENV = """
import gymnasium
import numpy as np

class Maze(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        self.t = 0

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), 0.0, self.t == 5, False, {}

    def render(self):
        return np.full((40, 40, 3), 10 * self.t, np.uint8)
"""
PONG_ACTIONS = ("NOOP", "FIRE", "RIGHT", "LEFT", "RIGHTFIRE", "LEFTFIRE")


def decode(png: bytes) -> np.ndarray:
    return np.asarray(PIL.Image.open(io.BytesIO(png)).convert("RGB"))


def play(run: Run, steps: int, **options: object) -> WatchedGame:
    game = WatchedGame(GameSetup(run, PlaybackOptions(**options)))  # type: ignore[arg-type]
    while len(game.steps) < steps and not game.is_over:
        game.advance()
    return game


@pytest.mark.parametrize(
    ("name", "steps", "greedy"), [("zoo/pong", 60, False), ("zoo/pong", 20, True), ("zoo/warehouse-iam", 30, False)]
)
def test_a_watched_game_is_that_of_the_video(name: str, steps: int, greedy: bool) -> None:
    run = open_run(name)
    game = play(run, steps, seed=5, greedy=greedy)
    playback = open_playback(run, PlaybackOptions(length=steps, seed=5, greedy=greedy))
    frames = [frame for (frame,) in playback]
    assert len(frames) == len(game.steps) == steps
    for frame, step in zip(frames, game.steps, strict=True):
        np.testing.assert_array_equal(decode(step.png), enlarge(frame.display_image))
        assert step.choice == frame.action
        assert step.agents[0].value == pytest.approx(float(frame.record.output.value[0, 0]))
        np.testing.assert_allclose(
            step.agents[0].probabilities, frame.record.output.distribution.log_probs[0, 0].exp(), rtol=1e-5
        )
    assert [step.reward for step in game.steps[:-1]] == pytest.approx(
        [float(frame.record.step.reward[0]) for frame in frames[1:]]
    )
    game.close()


def test_the_pictures_are_the_frames_of_the_video_file() -> None:
    run = open_run("zoo/pong")
    path = record_video(run, PlaybackOptions(length=40, seed=2), out="game.gif")
    game = play(run, 40, seed=2)
    with PIL.Image.open(path) as video:
        for number, step in enumerate(game.steps):
            video.seek(number)
            np.testing.assert_array_equal(np.asarray(video.convert("RGB")), decode(step.png))
    game.close()


@pytest.mark.parametrize("name", ["zoo/pong", "zoo/warehouse-iam"])
def test_a_rewound_game_goes_on_in_the_same_way(name: str) -> None:
    """After a rewind, the agent takes the same actions; after another action, the earlier steps are unchanged."""
    game = play(open_run(name), 40, seed=3)
    before = [(step.png, step.agents, step.choice) for step in game.steps]
    game.rewind(15)
    assert len(game.steps) == 16
    while len(game.steps) < 40:
        game.advance()
    assert [(step.png, step.agents, step.choice) for step in game.steps] == before
    assert not game.is_changed
    game.rewind(15)
    other = next(action for action in game.action_names if action != game.steps[15].choice)
    game.advance(other)
    assert game.is_changed
    assert [(step.png, step.agents, step.choice) for step in game.steps[:16]] == before[:16]
    assert game.steps[15].action == other
    game.rewind(10)
    assert not game.is_changed
    game.close()


def test_old_records_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the memory for records is used up, the inputs of earlier steps are found by playing the game again."""
    run = open_run("zoo/warehouse-iam")
    complete = play(run, 25, seed=1)
    monkeypatch.setattr("bestiary.view.game.MAX_RECORD_BYTES", 20_000)
    game = play(run, 25, seed=1)
    assert 0 not in game.records
    for t in (0, 7):
        one, other = complete.records_at(t)[0], game.records_at(t)[0]
        for kind, tensor in one.inputs.observation.items():
            assert (tensor == other.inputs.observation[kind]).all()
        for a, b in zip(one.state, other.state, strict=True):
            assert (a == b).all()
    complete.close()
    game.close()


def test_a_recorded_game_is_watched(catch_runs: list[Run]) -> None:
    options = {"steps": 400, "num_envs": 4, "batch_size": 4, "runtime": "serial", "record": True}
    run = bestiary.train("toy/catch", run_dir="recorded", **options)  # type: ignore[arg-type]
    recording = open_recording(next(Path("recorded/recordings").glob("*.json")))
    number = len(recording.games) - 1
    game = recording.game(number)
    watched = play(run, 100, replay=(recording, game))
    assert watched.is_over
    assert [step.action for step in watched.steps] == recording.game_actions(game)
    assert sum(step.reward or 0 for step in watched.steps) == pytest.approx(game.game_return)
    assert not watched.is_changed
    watched.rewind(3)
    other = next(action for action in watched.action_names if action != recording.game_actions(game)[3])
    watched.advance(other)
    assert watched.is_changed
    watched.close()


def test_a_second_agent_sees_the_same_game(catch_runs: list[Run]) -> None:
    first, second = catch_runs[0], catch_runs[2]
    game = WatchedGame(GameSetup(first, PlaybackOptions(seed=4), [(second, None)]))
    alone = play(first, 100, seed=4)
    while not game.is_over:
        game.advance()
    assert [step.png for step in game.steps] == [step.png for step in alone.steps]
    assert [step.agents[0] for step in game.steps] == [step.agents[0] for step in alone.steps]
    assert game.steps[3].agents[0] != game.steps[3].agents[1]
    game.rewind(2)
    assert len(game.steps) == 3
    game.close()
    alone.close()
    with pytest.raises(UserError):
        WatchedGame(GameSetup(first, PlaybackOptions(), [(open_run("zoo/pong"), None)]))


def test_a_plugin_of_a_stranger_must_be_trusted(another_user: Callable[[], None]) -> None:
    """The player refuses a run with an unknown plug-in; the table of runs shows it without importing it."""
    Path("own").mkdir()
    Path("own/maze.py").write_text(GYMNASIUM_ENV)
    small = {"steps": 80, "num_envs": 4, "batch_size": 4, "runtime": "serial"}
    bestiary.train("own/maze.py:Maze", run_dir="theirs/run", **small)  # type: ignore[arg-type]
    another_user()
    catalogue = Catalogue([Path("theirs")])
    assert catalogue.summary("run").state == "finished"
    assert "maze.py" in catalogue.summary("run").envs
    with pytest.raises(UserError, match="--trust-code"):
        WatchedGame(make_setup(catalogue, PlayerQuery("run")))
    game = WatchedGame(make_setup(Catalogue([Path("theirs")], trust_code=True), PlayerQuery("run")))
    assert len(game.action_names) == 2
    game.close()


def test_saliency_of_a_step_equals_that_of_the_tool() -> None:
    run = open_run("zoo/pong")
    game = play(run, 4, seed=1)
    overlays = Overlays(game)
    assert not overlays.is_ready("saliency: both", 2)
    maps = overlays.saliency_maps(2)
    assert overlays.is_ready("saliency: both", 2)
    *_, frame = (frame for (frame,) in open_playback(run, PlaybackOptions(length=3, seed=1)))
    tool = Saliency(run.agent(), run.config.interface.observation_spec, SaliencyOptions(default_density=DENSITY))
    expected = tool(frame.record.inputs, frame.record.state)
    np.testing.assert_allclose(maps.policy, expected.policy, rtol=1e-4, atol=1e-9)
    assert decode(overlays.picture("saliency: both", 2)).shape == decode(game.steps[2].png).shape
    game.close()


def test_attention_is_offered_for_agents_that_have_it() -> None:
    game = play(open_run("zoo/warehouse-iam"), 2)
    kinds = Overlays(game).kinds()
    has_attention = getattr(game.main.viewer.agent, "has_attention", False)
    assert any(kind.startswith("attention") for kind in kinds) == has_attention
    assert not any(kind.startswith("saliency") for kind in kinds)  # the agent observes no image
    for kind in kinds:
        decode(Overlays(game).picture(kind, 1))
    game.close()


def test_saliency_inside_a_rectangle() -> None:
    class Maps:
        policy = np.arange(12.0).reshape(3, 4)
        value = -policy

    assert saliency_inside(Maps, 4, Rectangle(4, 4, 5, 5)) == (10.0, -5.0)  # patches at rows 4, 8 and columns 4, 8
    assert saliency_inside(Maps, 4, Rectangle(5, 5, 2, 2)) == (5.0, -5.0)  # no patch inside: the nearest one


def test_questions_about_a_step() -> None:
    """Erasing the ball changes the output, erasing background does not, and the original game stays as it was."""
    game = play(open_run("zoo/pong"), 60, seed=0)
    overlays = Overlays(game)
    before = [step.png for step in game.steps]
    labels = game.steps[59].labels
    assert {"ball_x", "ball_y"} <= set(labels)

    def saliency(step: int) -> tuple[object, int]:
        return overlays.saliency_maps(step), overlays.saliencies[0].density

    everything = Intervention("erase", Rectangle(0, 20, 84, 50))
    answer = answer_question(game, 59, [everything], 0, saliency)
    assert answer.effect.kl > 0.01
    assert answer.saliency is not None
    assert answer.saliency[0] == overlays.saliency_maps(59).policy[5:18].max()
    nothing = answer_question(game, 59, [Intervention("erase", Rectangle(40, 22, 2, 2))], 0, None)
    assert nothing.effect.policy_score < answer.effect.policy_score
    action = answer_question(game, 59, [Intervention("action", action="LEFT")], 10, None)
    assert action.changed is not None
    assert action.as_played is not None
    assert action.changed.actions[0] == "LEFT"
    assert action.as_played.actions[0] == game.steps[59].choice
    moved = answer_question(game, 59, [Intervention("set", label="ball_y", value=labels["ball_y"] - 30)], 0, None)
    assert moved.effect.policy_score > 0
    with pytest.raises(UserError):
        answer_question(game, 59, [Intervention("erase", Rectangle(80, 80, 20, 20))], 0, None)
    assert [step.png for step in game.steps] == before
    game.close()


def value_of_command(options: str) -> float:
    """Return the value before the intervention that `bestiary intervene` measures."""
    assert run_command([*shlex.split(f"intervene {options}"), "--out", "c.png", "--overwrite"]) == 0
    rows = {row["quantity"]: row for row in csv.DictReader(Path("c.csv").read_text().splitlines())}
    return float(rows["value"]["before"])


def test_a_changed_game_is_repeated_by_the_command() -> None:
    """The command with the changed actions reaches the same state as the game in the browser."""
    game = play(open_run("zoo/warehouse-iam"), 11, seed=3)
    unchanged = play(open_run("zoo/warehouse-iam"), 21, seed=3)
    other = next(name for name in game.action_names if name != game.steps[10].choice)
    for action in (other, None, other):
        game.advance(action)
    while len(game.steps) < 21:
        game.advance()
    changes = game.changed_actions(20)
    assert changes[10] == other
    assert set(changes) <= {10, 12}  # the agent may have chosen the same action at step 12
    assert game.changed_actions(10) == {}
    options = f"--seed 3 --step 20 --earlier-actions {format_earlier_actions(changes)} --action up --continue 0"
    value = value_of_command(f"zoo/warehouse-iam {options}")
    assert value == pytest.approx(game.steps[20].agents[0].value, rel=1e-4)
    assert value != pytest.approx(unchanged.steps[20].agents[0].value, rel=1e-4)
    game.close()
    unchanged.close()


def test_a_recorded_game_is_repeated_by_the_command() -> None:
    options = {"steps": 400, "num_envs": 4, "batch_size": 4, "runtime": "serial", "record": True}
    run = bestiary.train("toy/catch", run_dir="recorded", **options)  # type: ignore[arg-type]
    recording = open_recording(next(Path("recorded/recordings").glob("*.json")))
    watched = play(run, 100, replay=(recording, recording.game(5)))
    value = value_of_command(f"recorded --replay {recording.path} --game 5 --step 6 --action left --continue 0")
    assert value == pytest.approx(watched.steps[6].agents[0].value, rel=1e-4)
    other = next(name for name in watched.action_names if name != watched.steps[2].action)
    watched.rewind(2)
    watched.advance(other)
    while len(watched.steps) < 7:
        watched.advance()
    earlier = format_earlier_actions(watched.changed_actions(6))
    value = value_of_command(
        f"recorded --replay {recording.path} --game 5 --step 6 --earlier-actions {earlier} --action left --continue 0"
    )
    assert value == pytest.approx(watched.steps[6].agents[0].value, rel=1e-4)
    watched.close()


@pytest.mark.parametrize(
    ("pressed", "action"),
    [
        (set(), "NOOP"),
        ({"ArrowRight"}, "RIGHT"),
        ({"d", " "}, "RIGHTFIRE"),
        ({" "}, "FIRE"),
        ({"ArrowUp"}, "NOOP"),
        ({"ArrowUp", "ArrowLeft"}, "LEFT"),
        ({"3"}, "LEFT"),
        ({"9"}, None),
    ],
)
def test_keys_of_the_player(pressed: set[str], action: str | None) -> None:
    assert action_of_keys(pressed, PONG_ACTIONS) == action
    assert action_of_keys({"ArrowUp"}, ("up", "down", "left", "right")) == "up"


def test_direction_is_preferred_if_no_action_combines_it_with_fire() -> None:
    assert action_of_keys({"ArrowLeft", " "}, ("NOOP", "FIRE", "RIGHT", "LEFT")) == "LEFT"
