"""Drawings: pictures that excite filters whose taste is known, and of real agents."""

from typing import Any, cast

import imageio.v3 as imageio
import numpy as np
import pytest
import torch
import torch.nn as nn

import bestiary
from bestiary.analysis.drawings import excite, given_out, sheet, which_layer
from bestiary.cli import run_command
from bestiary.rollout import ArraySpec
from bestiary.runs.folder import Run

SPEC = {"image": ArraySpec((2, 12, 12), "uint8")}


class Tastes(nn.Module):
    """Its filters like light, darkness, and what moved: light in the newer frame and darkness in the older one."""

    def __init__(self):
        super().__init__()
        self.eye = nn.Conv2d(2, 3, 3)
        with torch.no_grad():
            for filter, (older, newer) in enumerate([(1, 1), (-1, -1), (-1, 1)]):
                self.eye.weight[filter, 0], self.eye.weight[filter, 1] = older, newer

    def initial_state(self, batch_size):
        return ()

    def forward(self, inputs, state):
        return self.eye(inputs.observation["image"].flatten(0, 1) / 255), state


def test_filters_whose_taste_is_known():
    light, dark, moved = excite(Tastes(), SPEC, "eye", [0, 1, 2])
    assert (light == 255).all()
    assert (dark == 0).all()
    assert (moved[0] == 0).all()
    assert (moved[1] == 255).all()


def test_a_real_filter_is_excited_more_than_by_noise():
    run = bestiary.load("zoo/pong")
    pool, agent = run.config.make_pool(1, 0), cast(nn.Module, run.agent())
    pool.close()
    spec = {"image": pool.observation_spec["image"]}
    name = which_layer(agent, "2")
    drawn = torch.from_numpy(excite(agent, spec, name, [3, 7])).float()
    noise = torch.randint(256, drawn.shape, generator=torch.Generator().manual_seed(0)).float()
    with torch.no_grad():
        given, usual = (given_out(agent, spec, name, pictures).mean((2, 3)) for pictures in (drawn, noise))
    assert given[0, 3] > usual[:, 3].max() + 0.1
    assert given[1, 7] > usual[:, 7].max() + 0.1


def test_a_sheet_has_all_frames_and_colours():
    gray = [np.full((4, 84, 84), k, np.uint8) for k in range(6)]
    found = sheet(gray, frames=4)
    assert set(np.unique(found)) == set(range(6))
    height, width = found.shape[:2]
    assert ((height + 4) // 88) * ((width + 4) // (4 * 84 + 4)) >= 6
    colour = np.zeros((3, 84, 84), np.uint8)
    colour[0] = 200
    assert (sheet([colour]) == (200, 0, 0)).all()
    assert sheet([colour], frames=3).shape == (84, 3 * 84, 3)  # three gray frames


def test_the_command(catch_runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {
        "torso": "resnet",
        "torso.channels": (4,),
        "torso.width": 8,
        "num_envs": 4,
        "batch_size": 4,
    }
    bestiary.train("toy/catch", run_dir="r", steps=80, **options)
    assert run_command(["look", "filters", "r", "--draw", "2.first", "--out", "d.png"]) == 0
    assert capsys.readouterr().out == "drawings: d.png\n"
    assert imageio.imread("d.png").shape[2] == 3
    for words, message in (
        ("r --draw 9", "--draw 9: its convolutions are 0, 2.first, 2.second"),
        ("r --draw 0 --out d.png", "exists; choose another"),
        ("r --draw 0 --out d.svg", "drawings are .png"),
        ("r r --draw 0", "--draw 0: of one run at a time"),
        (f"{catch_runs[0].path} --draw 0", "has no convolutions"),
    ):
        assert run_command(["look", "filters", *words.split()]) == 2
        assert message in capsys.readouterr().err
