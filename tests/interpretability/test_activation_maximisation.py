"""Activation maximisation: filters with a known optimum, filters of a trained agent, and the command."""

from typing import Any, cast

import imageio.v3 as imageio
import numpy as np
import pytest
import torch
import torch.nn as nn

import bestiary
from bestiary.cli.main import run_command
from bestiary.interpretability.activation_maximisation import (
    find_layer,
    layer_activations,
    maximise_filters,
    tile_images,
)
from bestiary.rollout import ArraySpec
from bestiary.runs.run import Run

SPEC = {"image": ArraySpec((2, 12, 12), "uint8")}


class KnownFilters(nn.Module):
    """Agent with three filters, maximised by white frames, black frames, and a black frame before a white one."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        with torch.no_grad():
            for filter, (older, newer) in enumerate([(1, 1), (-1, -1), (-1, 1)]):
                self.conv.weight[filter, 0] = older
                self.conv.weight[filter, 1] = newer

    def initial_state(self, batch_size):
        return ()

    def forward(self, inputs, state):
        return self.conv(inputs.observation["image"].flatten(0, 1) / 255), state


def test_known_filters_are_maximised_by_their_optimum():
    white, black, change = maximise_filters(KnownFilters(), SPEC, "conv", [0, 1, 2])
    assert (white == 255).all()
    assert (black == 0).all()
    assert (change[0] == 0).all()
    assert (change[1] == 255).all()


def test_filter_of_a_trained_agent_is_activated_more_than_by_noise():
    run = bestiary.load("zoo/pong")
    pool, agent = run.config.make_vector_env(1, 0), cast(nn.Module, run.agent())
    pool.close()
    spec = {"image": pool.observation_spec["image"]}
    name = find_layer(agent, "2")
    maximised = torch.from_numpy(maximise_filters(agent, spec, name, [3, 7])).float()
    noise = torch.randint(256, maximised.shape, generator=torch.Generator().manual_seed(0)).float()
    with torch.no_grad():
        own, baseline = (layer_activations(agent, spec, name, images).mean((2, 3)) for images in (maximised, noise))
    assert own[0, 3] > baseline[:, 3].max() + 0.1
    assert own[1, 7] > baseline[:, 7].max() + 0.1


def test_tiled_image_has_all_frames_in_their_colours():
    gray = [np.full((4, 84, 84), k, np.uint8) for k in range(6)]
    found = tile_images(gray, frames=4)
    assert set(np.unique(found)) == set(range(6))
    height, width = found.shape[:2]
    assert ((height + 4) // 88) * ((width + 4) // (4 * 84 + 4)) >= 6
    colour = np.zeros((3, 84, 84), np.uint8)
    colour[0] = 200
    assert (tile_images([colour]) == (200, 0, 0)).all()
    assert tile_images([colour], frames=3).shape == (84, 3 * 84, 3)  # three grey frames


def test_command_writes_an_image_and_refuses_wrong_arguments(
    catch_runs: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {
        "torso": "resnet",
        "torso.channels": (4,),
        "torso.width": 8,
        "num_envs": 4,
        "batch_size": 4,
    }
    bestiary.train("toy/catch", run_dir="r", steps=80, **options)
    assert run_command(["look", "filters", "r", "--draw", "2.first", "--out", "d.png"]) == 0
    assert "d.png" in capsys.readouterr().out
    assert imageio.imread("d.png").shape[2] == 3
    for words, message in (
        ("r --draw 9", "--draw 9: unknown layer; available: 0, 2.first, 2.second"),
        ("r --draw 0 --out d.png", "exists; choose another"),
        ("r --draw 0 --out d.svg", "images are .png"),
        ("r r --draw 0", "--draw 0"),
        (f"{catch_runs[0].path} --draw 0", "no convolutions"),
    ):
        assert run_command(["look", "filters", *words.split()]) == 2
        assert message in capsys.readouterr().err
