"""Each game of a recorded evaluation or training can be replayed exactly, without the other games."""

import json
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pytest

import bestiary
from bestiary.api import resume
from bestiary.cli.main import run_command
from bestiary.config.config import make_vector_env
from bestiary.envs import lookup_env, make_env
from bestiary.envs.atari_games import action_names
from bestiary.evaluation.evaluate import evaluate
from bestiary.evaluation.playback import Playback, PlaybackOptions, open_replay
from bestiary.evaluation.video import record_video
from bestiary.interpretability.side_by_side import record_side_by_side
from bestiary.runs.recordings import RecordedGame, make_recording_wrapper, open_recording
from bestiary.runs.run import Run
from bestiary.utils.errors import UserError

METADATA = {
    "environments": ["toy/catch"],
    "environment_options": {},
    "rewards": {},
    "num_envs": 1,
    "bytes_per_action": 1,
    "action_names": ["a"],
    "seed": {"entropy": 1, "spawn_key": []},
}


def replay_game(recording, number):
    """Return the return and the steps of a replayed game."""
    steps = list(recording.replay(recording.game(number)))
    return sum(float(step.reward[0]) for step in steps[1:]), steps


@pytest.mark.parametrize(
    ("env", "options"),
    [
        ("toy/catch", {}),
        ("warehouse", {}),
        ("gymnasium/CartPole-v1", {}),
        pytest.param("procgen/starpilot:easy", {"levels": "0:100"}, marks=pytest.mark.slow),
        ("atari/Breakout", {"sticky": 0.25, "flicker": 0.3}),
    ],
)
def test_replayed_game_equals_the_recorded_game(env, options):
    seed = np.random.SeedSequence(5).spawn(2)[1]
    pool = make_env(env, 3, seed, **options)
    recorded = make_recording_wrapper(pool, Path("r.json"), [env], make_options(env, **options), seed)
    rng = np.random.default_rng(0)
    recorded_steps = [recorded.reset()]
    for _ in range(140):
        recorded.send(rng.integers(0, pool.action_spec.n, 3))
        recorded_steps.append(recorded.recv())
    recorded.close()
    recording = open_recording("r.json")
    assert recording.actions.shape == (140, 3)
    games = recording.games
    for game in [RecordedGame(2, 20, 100, 0.0), *games[:1], *games[-1:]]:
        steps = list(recording.replay(game))
        assert len(steps) == game.length + 1
        for step, expected in zip(steps, recorded_steps[game.first_step :], strict=False):
            assert step.reward[0] == expected.reward[game.env]
            for kind, array in step.observation.items():
                assert (array[0] == expected.observation[kind][game.env]).all()
    for game in games:
        assert game.game_return == pytest.approx(
            sum(s.reward[game.env] for s in recorded_steps[game.first_step + 1 :][: game.length])
        )
        assert recorded_steps[game.first_step + game.length].game_over[game.env]


def make_options(env, **options):
    return lookup_env(env).options(**options)


def test_recorded_evaluation_can_be_drawn_as_video(catch_runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    run = catch_runs[0]
    evaluation = evaluate(run, episodes=5, num_envs=2, record=True)
    (path,) = (run.path / "recordings").glob("eval-*.json")
    recording = open_recording(path)
    games = recording.games
    assert [g.game_return for g in games if g.env == 0] == [e.game_return for e in evaluation.episodes if e.env == 0]
    capsys.readouterr()
    video = record_video(run, PlaybackOptions(length=100, replay=(recording, recording.game(2))), out="again.gif")
    assert len(imageio.imread(video, index=None)) <= games[2].length
    assert capsys.readouterr().err.endswith(f"{games[2].length} steps; return of each game: {games[2].game_return:g}\n")
    replay = PlaybackOptions(length=200, replay=(recording, recording.game(1)))
    both = record_side_by_side(catch_runs[:2], replay, out="both.mp4", saliency=True, density=1)
    images = np.stack(list(imageio.imiter(both)))
    assert images.shape == (games[1].length, 226, 3 * 105 + 2 * 4 + 1, 3)
    capsys.readouterr()
    for words, message in (
        ("--game 3", "--replay"),
        (f"--replay {path} --game 99", "--game 99"),
        ("--replay x", "No such file"),
        (f"--replay {path} --greedy", "--greedy: "),
        (f"--replay {path} --seed 7", "--seed: "),
        (f"--replay {path} --size 7x7", "--size: "),
    ):
        assert run_command(["video", str(run.path), *words.split()]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("runtime", ["serial", "local"])
def test_recording_of_a_training_continues_after_resume(runtime, tmp_path):
    options = {"runtime": runtime, "num_envs": 4, "batch_size": 2, "rollout_length": 10, "record": True}
    run = bestiary.train("toy/catch", run_dir="r", steps=400, **options)
    resume(run, 800)
    paths = sorted((run.path / "recordings").glob("*.json"))
    assert len(paths) == (1 if runtime == "serial" else 4)
    for path in paths:
        recording = open_recording(path)
        assert recording.games
        for number in (0, len(recording.games) - 1):
            game_return, steps = replay_game(recording, number)
            assert game_return == recording.game(number).game_return
            assert steps[-1].game_over[0]
    if runtime == "serial":
        assert recording.actions.shape == (200, 4)
        assert len(recording.games) == (run.episodes["game_over"] == 1).sum()


def test_game_with_6_actions_is_replayed_for_an_agent_with_18_and_vice_versa():
    options: dict[str, Any] = {"steps": 40, "num_envs": 4, "batch_size": 4, "rollout_length": 5, "runtime": "serial"}
    all_actions = bestiary.train("atari/Pong", run_dir="all", full_actions=True, frame_size="42x42", **options)
    played = "NOOP FIRE RIGHT LEFTFIRE RIGHT RIGHTFIRE LEFT RIGHT NOOP LEFT LEFT RIGHT".split()
    few, many = (_record_pong(f"{full}.json", played, full) for full in (False, True))
    game = RecordedGame(0, 5, 7, 0.0)
    seen = []
    for run, recording in ((bestiary.load("zoo/pong"), few), (all_actions, few), (bestiary.load("zoo/pong"), many)):
        viewer = open_replay(run, recording, game)
        assert viewer.pool.action_spec.n == (18 if run is all_actions else 6)
        seen.append([frame for (frame,) in Playback([viewer], length=20, actions=recording.game_actions(game))])
        assert [frame.action for frame in seen[-1]] == played[5:]
    for one, *others in zip(*seen, strict=True):
        assert all((one.screen == other.screen).all() for other in others)
    last_actions = [int(frame.record.inputs.last_action) for frame in seen[1][1:]]
    # The agent observes the actions in its own numbering.
    assert last_actions == [action_names("Pong", full=True).index(name) for name in played[5:-1]]
    beyond = _record_pong("beyond.json", ["NOOP", "LEFT", "UPRIGHT"], True)
    viewer = open_replay(bestiary.load("zoo/pong"), beyond, RecordedGame(0, 0, 3, 0.0))
    with pytest.raises(UserError, match=r"pong: .*UPRIGHT.*NOOP, FIRE, RIGHT"):
        list(Playback([viewer], length=9, actions=["UPRIGHT"]))
    with pytest.raises(UserError, match=r"pong: .*UPRIGHT"):
        open_replay(bestiary.load("zoo/pong"), beyond, RecordedGame(0, 3, 0, 0.0))


def _record_pong(path, names, full):
    """Record one game of Pong with the named actions, in the full or the minimal action set."""
    seed, options = np.random.SeedSequence(5), {"full_actions": full}
    pool = make_env("atari/Pong", 1, seed, **options)
    recorded = make_recording_wrapper(
        pool, Path(path), ["atari/Pong"], make_options("atari/Pong", **options), np.random.SeedSequence(5)
    )
    recorded.reset()
    for name in names:
        recorded.send(np.array([pool.action_spec.names.index(name)]))
        recorded.recv()
    recorded.close()
    return open_recording(path)


@pytest.mark.parametrize("first_env", [0, 3])
def test_environments_of_several_tasks_are_replayed_with_their_own_seeds(tmp_path, first_env):
    names, seed = ["procgen/coinrun:easy", "procgen/starpilot:easy"], np.random.SeedSequence(3)
    options = lookup_env(names[0]).options()
    pool = make_vector_env(names, options, 4, seed, first_env=first_env)
    recorded = make_recording_wrapper(pool, Path("m.json"), names, options, seed, first_env=first_env)
    first = recorded.reset()
    recorded.send(np.full(4, 4))
    recorded.recv()
    recorded.close()
    recording = open_recording("m.json")
    for env in range(4):
        game = RecordedGame(env, 0, 1, 0.0)
        step = next(iter(recording.replay(game)))
        assert (step.observation["image"][0] == first.observation["image"][env]).all()


def test_replay_computes_the_training_reward(tmp_path):
    options: dict[str, Any] = {"num_envs": 4, "batch_size": 2, "rollout_length": 10, "time_limit": 30}
    run = bestiary.train(
        "warehouse", run_dir="r", steps=400, runtime="serial", reward="scaled:3", record=True, **options
    )
    evaluate(run, episodes=2, record=True)
    train, eval_ = (
        open_recording(next((run.path / "recordings").glob(f"{kind}-*.json"))) for kind in ("train", "eval")
    )
    for recording in (train, eval_):
        for number, game in enumerate(recording.games):
            assert replay_game(recording, number)[0] == game.game_return
    game = max(train.games, key=lambda game: game.game_return)
    assert game.game_return >= 3
    viewer = open_replay(run, train, game)
    playback = Playback([viewer], length=100, actions=train.game_actions(game))
    assert len(list(playback)) == 30
    assert playback.returns == [game.game_return]  # the agent observes the training reward


@pytest.mark.parametrize(
    ("malicious", "message"),
    [
        ({"environments": ["{}:Maze"]}, ":Maze: .*is not executed"),
        ({"rewards": {"training": "{}:pay"}}, ":pay: .*is not executed"),
        ({"rewards": {"true": "{}:pay"}}, ":pay: .*is not executed"),
        ({"rewards": {"true": "alive=1; {}:pay "}}, ":pay: .*is not executed"),
    ],
)
def test_code_of_an_untrusted_recording_is_not_executed(malicious, message):
    Path("evil.py").write_text("raise SystemExit('imported')\n")
    text = json.dumps({**METADATA, **malicious})
    Path("e.json").write_text(text.replace("{}:", f"{Path('evil.py').resolve()}:"))
    Path("e.actions").write_bytes(b"\0")
    with pytest.raises(UserError, match=message):
        next(iter(open_recording("e.json").replay(RecordedGame(0, 0, 1, 0.0))))


def test_files_that_are_not_recordings_are_refused():
    invalid: list[dict[str, Any]] = [{"seed": {}}, {"rewards": {"x": 1}}, {"rewards": {"training": None, "true": []}}]
    for text in ("{}", "[]", "x", *(json.dumps({**METADATA, **values}) for values in invalid)):
        Path("x.json").write_text(text)
        with pytest.raises(UserError, match="not a recording"):
            open_recording("x.json")
    with pytest.raises(UserError, match="No such file"):
        open_recording("y.json")
    Path("x.json").write_text(json.dumps(METADATA))
    Path("x.actions").write_bytes(b"\0" * 5)
    for rows, words in (
        ("env,first_step\n0,0\n", "is not the CSV file of a recording"),
        ("env,first_step,length,return\n0,2,9,0\n", "actions of this game are missing"),
    ):
        Path("x.csv").write_text(rows)
        with pytest.raises(UserError, match=words):
            open_recording("x.json").game(0)


RECORDED: dict[str, Any] = {"record": True, "runtime": "serial", "num_envs": 4, "batch_size": 4, "steps": 400}


def test_saved_recording_contains_all_actions_before_the_checkpoint() -> None:
    """A process that is killed later, in the middle of a game, must not lose actions that the checkpoint contains."""
    seed = np.random.SeedSequence(1)
    pool = make_env("toy/catch", 2, seed)
    recorded = make_recording_wrapper(pool, Path("r.json"), ["toy/catch"], make_options("toy/catch"), seed)
    recorded.reset()
    actions = np.array([[1, 2], [0, 1], [2, 2]])
    for action in actions:
        recorded.send(action)
        recorded.recv()
    state = recorded.save()
    assert np.fromfile("r.actions", np.uint8).reshape(-1, 2).tolist() == actions.tolist()
    assert state.keys() == pool.save().keys()


def test_recording_with_missing_actions_is_continued_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    run = bestiary.train("toy/catch", run_dir="r", **RECORDED)
    path = next((run.path / "recordings").glob("*.actions"))
    path.write_bytes(path.read_bytes()[:-7])
    resume(run, steps=800)
    assert "lacks the last 7 bytes before step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("header", "row"),
    [
        ("env,first_step,length,return", "1,-1e300,5,1"),
        ("env,first_step,length,return", "1,x,5,1"),
        ("env,first_step,length,return", "1,0,-5,1"),
        ("env,first_step,length,return", "9,0,5,1"),
        ("env,first_step,return", "1,0,1"),
        ("first_step,length,return", "0,5,1"),
    ],
)
def test_damaged_table_of_a_recording_is_rejected_by_resume(header: str, row: str) -> None:
    run = bestiary.train("toy/catch", run_dir="r", **RECORDED)
    next((run.path / "recordings").glob("*.csv")).write_text(f"{header}\n{row}\n")
    with pytest.raises(UserError, match=r"train-000000000000-0\.csv is"):
        resume(run, steps=800)
