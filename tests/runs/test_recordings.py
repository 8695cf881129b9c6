"""Recordings: every game of an evaluation or a training can be played again, alone, and is the same one."""

import json
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pytest

import bestiary
from bestiary.analysis.evaluate import evaluate
from bestiary.analysis.movie import film, film_together
from bestiary.analysis.stage import Show, open_replay
from bestiary.cli import run_command
from bestiary.config import make_pool
from bestiary.envs import lookup, make
from bestiary.envs.atari import action_names
from bestiary.errors import UserError
from bestiary.runs.folder import Run
from bestiary.runs.recordings import Game, open_recording, record
from bestiary.runtime.train import resume


def replayed(recording, number):
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
def test_a_game_replayed_alone_is_the_game_that_was_played(env, options):
    seed = np.random.SeedSequence(5).spawn(2)[1]
    pool = make(env, 3, seed, **options)
    recorded = record(pool, Path("r.json"), [env], pool_options(env, **options), seed)
    rng, seen = np.random.default_rng(0), []
    seen.append(recorded.reset())
    for _ in range(140):
        recorded.send(rng.integers(0, pool.action_spec.n, 3))
        seen.append(recorded.recv())
    recorded.close()
    recording = open_recording("r.json")
    assert recording.actions.shape == (140, 3)
    games = recording.games
    for game in [Game(2, 20, 100, 0.0), *games[:1], *games[-1:]]:
        steps = list(recording.replay(game))
        assert len(steps) == game.length + 1
        for step, before in zip(steps, seen[game.first :], strict=False):
            assert step.reward[0] == before.reward[game.env]
            for kind, array in step.observation.items():
                assert (array[0] == before.observation[kind][game.env]).all()
    for game in games:
        assert game.earned == pytest.approx(sum(s.reward[game.env] for s in seen[game.first + 1 :][: game.length]))
        assert seen[game.first + game.length].game_over[game.env]


def pool_options(env, **options):
    return lookup(env).options(**options)


def test_an_evaluation_is_recorded_and_filmed_again(catch_runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    run = catch_runs[0]
    evaluation = evaluate(run, episodes=5, num_envs=2, record=True)
    (path,) = (run.path / "recordings").glob("eval-*.json")
    recording = open_recording(path)
    games = recording.games
    assert [g.earned for g in games if g.env == 0] == [e.game_return for e in evaluation.episodes if e.env == 0]
    capsys.readouterr()
    movie = film(run, out="again.gif", length=100, replay=(recording, recording.game(2)))
    assert len(imageio.imread(movie, index=None)) <= games[2].length
    assert capsys.readouterr().err.endswith(f"{games[2].length} steps, return {games[2].earned:g}\n")
    both = film_together(
        catch_runs[:2], out="both.mp4", saliency=True, density=1, replay=(recording, recording.game(1))
    )
    pictures = np.stack(list(imageio.imiter(both)))
    assert pictures.shape == (games[1].length, 226, 3 * 105 + 2 * 4 + 1, 3)
    capsys.readouterr()
    for words, message in (
        ("--game 3", "--game 3: is for --replay"),
        (f"--replay {path} --game 99", "whole games, from 0 on"),
        ("--replay x", "No such file"),
        (f"--replay {path} --greedy", "--greedy: the game of --replay was recorded"),
        (f"--replay {path} --seed 7", "--seed: the game of --replay was recorded"),
        (f"--replay {path} --size 7x7", "--size: the game of --replay was recorded"),
    ):
        assert run_command(["movie", str(run.path), *words.split()]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("runtime", ["serial", "local"])
def test_a_training_is_recorded_and_goes_on_when_resumed(runtime, tmp_path):
    options = {"runtime": runtime, "num_envs": 4, "batch_size": 2, "unroll_length": 10, "record": True}
    run = bestiary.train("toy/catch", run_dir="r", steps=400, **options)
    resume(run, 800)
    found = sorted((run.path / "recordings").glob("*.json"))
    assert len(found) == (1 if runtime == "serial" else 4)
    for path in found:
        recording = open_recording(path)
        assert recording.games
        for number in (0, len(recording.games) - 1):
            earned, steps = replayed(recording, number)
            assert earned == recording.game(number).earned
            assert steps[-1].game_over[0]
    if runtime == "serial":
        assert recording.actions.shape == (200, 4)
        assert len(recording.games) == (run.episodes["game_over"] == 1).sum()


def test_a_game_of_six_actions_is_shown_to_an_agent_of_eighteen_and_the_other_way_round():
    options: dict[str, Any] = {"steps": 40, "num_envs": 4, "batch_size": 4, "unroll_length": 5, "runtime": "serial"}
    all_actions = bestiary.train("atari/Pong", run_dir="all", full_actions=True, frame_size="42x42", **options)
    played = "NOOP FIRE RIGHT LEFTFIRE RIGHT RIGHTFIRE LEFT RIGHT NOOP LEFT LEFT RIGHT".split()
    few, many = (_played_pong(f"{full}.json", played, full) for full in (False, True))
    game = Game(0, 5, 7, 0.0)
    seen = []
    for run, recording in ((bestiary.load("zoo/pong"), few), (all_actions, few), (bestiary.load("zoo/pong"), many)):
        stage = open_replay(run, recording, game)
        assert stage.pool.action_spec.n == (18 if run is all_actions else 6)
        seen.append([scene for (scene,) in Show([stage], length=20, script=recording.script(game))])
        assert [scene.action for scene in seen[-1]] == played[5:]
    for one, *others in zip(*seen, strict=True):
        assert all((one.picture == other.picture).all() for other in others)
    last_actions = [int(scene.moment.inputs.last_action) for scene in seen[1][1:]]
    assert last_actions == [
        action_names("Pong", full=True).index(name) for name in played[5:-1]
    ]  # as the watcher counts them
    beyond = _played_pong("beyond.json", ["NOOP", "LEFT", "UPRIGHT"], True)
    with pytest.raises(UserError, match="pong: cannot follow where UPRIGHT is played; it has only NOOP, FIRE, RIGHT"):
        list(Show([open_replay(bestiary.load("zoo/pong"), beyond, Game(0, 0, 3, 0.0))], length=9, script=["UPRIGHT"]))
    with pytest.raises(UserError, match="pong: cannot follow where UPRIGHT is played"):
        open_replay(bestiary.load("zoo/pong"), beyond, Game(0, 3, 0, 0.0))


def _played_pong(path, names, full):
    seed, options = np.random.SeedSequence(5), {"full_actions": full}
    pool = make("atari/Pong", 1, seed, **options)
    recorded = record(
        pool, Path(path), ["atari/Pong"], pool_options("atari/Pong", **options), np.random.SeedSequence(5)
    )
    recorded.reset()
    for name in names:
        recorded.send(np.array([pool.action_spec.names.index(name)]))
        recorded.recv()
    recorded.close()
    return open_recording(path)


def test_several_tasks(tmp_path):
    """Rows of a mixture are dealt out task by task, and so are their seeds."""
    names, seed = ["procgen/coinrun:easy", "procgen/starpilot:easy"], np.random.SeedSequence(3)
    options = lookup(names[0]).options()
    recorded = record(make_pool(names, options, 4, seed), Path("m.json"), names, options, seed)
    first = recorded.reset()
    recorded.send(np.full(4, 4))
    recorded.recv()
    recorded.close()
    recording = open_recording("m.json")
    for env in range(4):
        game = Game(env, 0, 1, 0.0)
        step = next(iter(recording.replay(game)))
        assert (step.observation["image"][0] == first.observation["image"][env]).all()


def test_a_reward_of_ones_own_is_paid_again(tmp_path):
    options: dict[str, Any] = {"num_envs": 4, "batch_size": 2, "unroll_length": 10, "time_limit": 30}
    run = bestiary.train(
        "warehouse", run_dir="r", steps=400, runtime="serial", reward="scaled:3", record=True, **options
    )
    evaluate(run, episodes=2, record=True)
    train, eval_ = (
        open_recording(next((run.path / "recordings").glob(f"{kind}-*.json"))) for kind in ("train", "eval")
    )
    for recording in (train, eval_):
        for number, game in enumerate(recording.games):
            assert replayed(recording, number)[0] == game.earned
    game = max(train.games, key=lambda game: game.earned)
    assert game.earned >= 3
    stage = open_replay(run, train, game)
    show = Show([stage], length=100, script=train.script(game))
    assert len(list(show)) == 30
    assert show.earned == [game.earned]  # what the agent sees of its reward, too


@pytest.mark.parametrize(
    ("evil", "message"),
    [
        ({"environments": ["{}:Maze"]}, "is not the run's own environment"),
        ({"rewards": {"trained": "{}:pay"}}, "is not the run's own reward"),
        ({"rewards": {"true": "{}:pay"}}, "is not the run's own reward"),
    ],
)
def test_a_strangers_code_is_not_imported(evil, message):
    Path("evil.py").write_text("raise SystemExit('imported')\n")
    about = {"environments": ["toy/catch"], "options": {}, "rewards": {}, "num_envs": 1, "bytes": 1, "actions": ["a"]}
    text = json.dumps({**about, "seed": {"entropy": 1, "spawn_key": []}, **evil})
    Path("e.json").write_text(text.replace("{}:", f"{Path('evil.py').resolve()}:"))
    Path("e.actions").write_bytes(b"\0")
    with pytest.raises(UserError, match=message):
        next(iter(open_recording("e.json").replay(Game(0, 0, 1, 0.0))))


def test_what_is_no_recording():
    about = {"environments": ["toy/catch"], "options": {}, "rewards": {}, "num_envs": 1, "bytes": 1, "actions": ["a"]}
    good = {**about, "seed": {"entropy": 1, "spawn_key": []}}
    for text in ("{}", "[]", "x", json.dumps({**good, "seed": {}}), json.dumps({**good, "rewards": {"x": 1}})):
        Path("x.json").write_text(text)
        with pytest.raises(UserError, match="not a recording"):
            open_recording("x.json")
    with pytest.raises(UserError, match="No such file"):
        open_recording("y.json")
    Path("x.json").write_text(json.dumps(good))
    Path("x.actions").write_bytes(b"\0" * 5)
    for rows, words in (("env,first\n0,0\n", "not the games"), ("env,first,length,return\n0,2,9,0\n", "what was done")):
        Path("x.csv").write_text(rows)
        with pytest.raises(UserError, match=words):
            open_recording("x.json").game(0)
