"""Attention: a panel for the game and one for each head, drawn where the head looks; and who has none."""

import json
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pytest

import bestiary
from bestiary.analysis.look_attention import look_attention
from bestiary.cli import run_command
from bestiary.envs.atari import action_names
from bestiary.errors import UserError
from bestiary.runs.folder import Run

SMALL: dict[str, Any] = {
    "steps": 40,
    "num_envs": 4,
    "batch_size": 4,
    "unroll_length": 5,
    "runtime": "serial",
    "log_every": 20,
}


def test_all_heads_of_the_attention_agent():
    more: dict[str, Any] = {
        "agent.queries": 3,
        "agent.values": 8,
        "agent.hidden": 16,
        "agent.center": False,
        "input": "rgb-last",
    }
    run = bestiary.train("atari/Pong", run_dir="r", agent="aaa", frame_size="42x42", **SMALL, **more)
    (path,) = look_attention(run, out="a.mp4", start=3, length=4)
    assert np.stack(list(imageio.imiter(path))).shape == (4, 226, 4 * 160 + 3 * 4, 3)
    with np.load("a.npz") as found:
        assert found["weights"].shape == (4, 3, 6, 6)
        np.testing.assert_allclose(found["weights"].sum((2, 3)), 1, rtol=1e-5)
        assert found["step"].tolist() == [3, 4, 5, 6]
        assert set(found["action"]) <= set(action_names("Pong", full=False))
        assert found["logits"].shape == (4, 6)
        assert found["worth"].shape == (4,)
        protocol = json.loads(str(found["protocol"]))
    assert protocol["run"] == "r"
    assert (protocol["environment"], protocol["policy"], protocol["seed"]) == ("atari/Pong", "sampled", 0)
    Path("p-00003.png").write_text("precious")
    with pytest.raises(UserError, match=r"p-00003\.png exists"):
        look_attention(run, out="p.png", length=4)
    assert run_command(f"movie {run.path} --attention --length 3 --out m.gif".split()) == 0
    assert run_command(f"look saliency {run.path} --length 2 --density 20 --out s.gif".split()) == 0


def test_influence_aware_memory_in_the_warehouse():
    more: dict[str, Any] = {"agent.dset": "attention", "agent.heads": 2, "memory.hidden": 8}
    run = bestiary.train("warehouse", run_dir="r", agent="iam", **SMALL, **more)
    pictures = np.stack(list(imageio.imiter(look_attention(run, out="w.gif", length=3)[0])))
    assert pictures.shape[2] > 3 * 100
    with np.load("w.npz") as found:
        assert found["weights"].shape[:2] == (3, 2)


def test_an_agent_without_attention(catch_runs: list[Run]) -> None:
    with pytest.raises(UserError, match="its agent has no attention to draw; --agent iam"):
        look_attention(catch_runs[0], out="a.gif")
