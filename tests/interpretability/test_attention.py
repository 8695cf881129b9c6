"""Attention videos: panels for the game and for each head, the written weights, and agents without attention."""

import json
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pytest

import bestiary
from bestiary.cli.main import run_command
from bestiary.envs.atari_games import action_names
from bestiary.evaluation.playback import PlaybackOptions
from bestiary.interpretability.attention import render_attention
from bestiary.runs.run import Run
from bestiary.utils.errors import UserError

SMALL: dict[str, Any] = {
    "steps": 40,
    "num_envs": 4,
    "batch_size": 4,
    "rollout_length": 5,
    "runtime": "serial",
    "log_every": 20,
}


def test_attention_agent_has_a_panel_and_weights_for_each_head():
    more: dict[str, Any] = {
        "agent.queries": 3,
        "agent.value_channels": 8,
        "agent.hidden": 16,
        "agent.subtract_mean": False,
        "gray": False,
        "frame_stack": 1,
    }
    run = bestiary.train("atari/Pong", run_dir="r", agent="aaa", frame_size="42x42", **SMALL, **more)
    (path,) = render_attention(run, PlaybackOptions(start=3, length=4), out="a.mp4")
    assert np.stack(list(imageio.imiter(path))).shape == (4, 226, 4 * 160 + 3 * 4, 3)
    with np.load("a.npz") as found:
        assert found["weights"].shape == (4, 3, 6, 6)
        np.testing.assert_allclose(found["weights"].sum((2, 3)), 1, rtol=1e-5)
        assert found["step"].tolist() == [3, 4, 5, 6]
        assert set(found["action"]) <= set(action_names("Pong", full=False))
        assert found["logits"].shape == (4, 6)
        assert found["value_estimate"].shape == (4,)
        protocol = json.loads(str(found["protocol"]))
    assert protocol["run"] == "r"
    assert (protocol["environment"], protocol["policy"], protocol["seed"]) == ("atari/Pong", "sampled", 0)
    Path("p-00003.png").write_text("precious")
    with pytest.raises(UserError, match=r"p-00003\.png exists"):
        render_attention(run, PlaybackOptions(length=4), out="p.png")
    assert run_command(f"video {run.path} --attention --length 3 --out m.gif".split()) == 0
    assert run_command(f"look saliency {run.path} --length 2 --density 20 --out s.gif".split()) == 0


def test_attention_of_the_iam_agent_in_the_warehouse():
    more: dict[str, Any] = {"agent.dset": "attention", "agent.heads": 2, "memory.hidden": 8}
    run = bestiary.train("warehouse", run_dir="r", agent="iam", **SMALL, **more)
    frames = np.stack(list(imageio.imiter(render_attention(run, PlaybackOptions(length=3), out="w.gif")[0])))
    assert frames.shape[2] > 3 * 100
    with np.load("w.npz") as found:
        assert found["weights"].shape[:2] == (3, 2)


def test_agent_without_attention_is_refused(catch_runs: list[Run]) -> None:
    with pytest.raises(UserError, match=r"has no attention; .*--agent iam"):
        render_attention(catch_runs[0], out="a.gif")
