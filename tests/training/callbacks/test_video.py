"""Videos during training: they do not change the training, and a video that fails does not stop it."""

from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pytest

import bestiary
from bestiary.evaluation.playback import PlaybackOptions
from bestiary.evaluation.video import record_video
from bestiary.runs.run import Run

EXAMPLE = Path(__file__).parents[3] / "examples" / "maze_env.py"
SMALL: dict[str, Any] = {
    "runtime": "serial",
    "num_envs": 8,
    "batch_size": 8,
    "micro_batch_size": 8,
    "steps": 1_600,
    "memory": "gru",
}


def weights(run: Run) -> dict[str, Any]:
    return run.agent().state_dict()


ENVS = ["toy/recall", "gymnasium/CartPole-v1", pytest.param("atari/Pong", marks=pytest.mark.slow)]


@pytest.mark.parametrize("env", ENVS)
def test_videos_do_not_change_the_training(env: str) -> None:
    options = {**SMALL, "steps": 640, "torso": "shallow"} if env.startswith("atari") else SMALL
    plain = bestiary.train(env, run_dir="plain", **options)
    filmed = bestiary.train(env, run_dir="filmed", video_every=320, **options)
    assert len(list(filmed.path.glob("videos/*.gif"))) == options["steps"] // 320
    ours, theirs = weights(filmed), weights(plain)
    assert ours.keys() == theirs.keys()
    assert all(bool((ours[name] == theirs[name]).all()) for name in ours)
    assert filmed.metrics["return"].tolist() == pytest.approx(plain.metrics["return"].tolist(), nan_ok=True, abs=0)
    assert filmed.episodes["return"].tolist() == plain.episodes["return"].tolist()


def test_video_shows_the_game_of_the_same_checkpoint() -> None:
    run = bestiary.train("toy/recall", run_dir="r", video_at_end=True, **SMALL)
    (path,) = run.path.glob("videos/*.gif")
    later = record_video(run, PlaybackOptions(length=2_000), out="later.gif")
    np.testing.assert_array_equal(imageio.imread(path), imageio.imread(later))


def test_a_resumed_run_continues_the_interval() -> None:
    run = bestiary.train("toy/chain", run_dir="r", video_every=700, **{**SMALL, "steps": 1_000})
    assert len(list(run.path.glob("videos/*.gif"))) == 2  # at 700 and at the end
    run = bestiary.resume(run, steps=1_200)
    assert len(list(run.path.glob("videos/*.gif"))) == 3  # not at 1,000, but at the new end


def test_each_task_has_a_video() -> None:
    Path("maze.py").write_text(
        EXAMPLE.read_text().replace("class Maze(", "class Other(") + "\n\nclass Maze(Other): ...\n"
    )
    names = "maze.py:{Maze,Other}"
    run = bestiary.train(
        names, run_dir="r", video_at_end=True, **{**SMALL, "steps": 400, "num_envs": 4, "batch_size": 4}
    )
    assert {path.name.rpartition("-0")[0] for path in run.path.glob("videos/*.gif")} == {"maze-Maze", "maze-Other"}


def test_failed_video_costs_a_warning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("blind.py").write_text(
        "import gymnasium as gym, numpy as np\n"
        "class Blind(gym.Env):\n"
        "    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)\n"
        "    action_space = gym.spaces.Discrete(2)\n"
        "    metadata = {'render_modes': ['rgb_array']}\n"
        "    def __init__(self, render_mode=None): self.render_mode = render_mode\n"
        "    def reset(self, seed=None, options=None):\n"
        "        self.t = 0\n"
        "        return np.zeros(2, np.float32), {}\n"
        "    def step(self, action):\n"
        "        self.t += 1\n"
        "        return np.zeros(2, np.float32), 1.0, self.t == 5, False, {}\n"
        "    def render(self): raise ValueError('no screen')\n"
    )
    run = bestiary.train("blind.py:Blind", run_dir="r", video_every=800, **SMALL)
    errors = capsys.readouterr().err
    assert errors.count("was not recorded") == 2
    assert "no screen" in errors
    assert run.steps == 1_600
