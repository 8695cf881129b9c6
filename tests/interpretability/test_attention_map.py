"""Attention maps lie over the inputs that the agent attends to."""

from typing import Any

import numpy as np
import pytest
import torch

from bestiary.agents.iam import IAMAgent
from bestiary.agents.torsos import TORSOS
from bestiary.envs import make_env
from bestiary.interpretability.attention import attention_map
from bestiary.interpretability.overlays import overlay_map


@pytest.mark.parametrize("options", [{}, {"frame_stack": 3}, {"observation": "image"}, {"size": (5, 9)}], ids=str)
def test_each_warehouse_input_is_assigned_to_a_cell(options: dict[str, Any]) -> None:
    pool: Any = make_env("warehouse", num_envs=1, **options)
    (spec,) = pool.observation_spec.values()
    cells_of_inputs = pool.input_cells  # [inputs,2] row and column
    assert len(cells_of_inputs) == np.prod(spec.shape)
    assert (cells_of_inputs.max(axis=0) + 1 == pool.spec.size).all()
    weights = np.zeros((1, len(cells_of_inputs)))
    weights[0, -1] = 1

    class AgentWithoutTorso:
        torso = None

    cells, box = attention_map(weights, AgentWithoutTorso, pool)
    assert cells[tuple(cells_of_inputs[-1])] == 1
    assert cells.sum() == 1
    assert box == (0, 0, 1, 1)
    uniform, _ = attention_map(np.full_like(weights, 1 / len(cells_of_inputs)), AgentWithoutTorso, pool)
    assert not uniform.any()  # uniform attention is not drawn


@pytest.mark.parametrize("torso", ["shallow", "resnet"])
def test_cells_of_the_attention_map_are_drawn_over_their_receptive_fields(torso: str) -> None:
    """The overlay of attention to one cell is centred on the pixels with a non-zero gradient of that cell."""
    pool: Any = make_env("atari/Breakout", num_envs=1)
    pool.close()
    agent: Any = IAMAgent(pool.observation_spec, pool.action_spec, torso=TORSOS[torso])
    _, height, width = agent.torso.map_shape
    for row, column in ((0, 0), (height // 2, width // 2), (height - 1, width - 1)):
        image = torch.rand(1, *pool.observation_spec["image"].shape, requires_grad=True)
        agent.torso.convolutions(image)[0, :, row, column].sum().backward()
        assert image.grad is not None
        field = image.grad[0].abs().sum(0).nonzero().float()  # [pixels,2]
        middle = (field.amax(0) + field.amin(0)) / 2 + 0.5
        inside = ((field.amin(0) > 0) & (field.amax(0) < 83)).tolist()  # not cut off by the edge of the image
        weights = np.zeros((1, height * width))
        weights[0, row * width + column] = 1
        drawn = overlay_map(np.zeros((84, 84, 3), np.uint8), *attention_map(weights, agent, pool))[..., 0].astype(float)
        for axis, profile in enumerate((drawn.sum(1), drawn.sum(0))):
            if inside[axis]:
                centre = (profile * (np.arange(84) + 0.5)).sum() / profile.sum()
                assert centre == pytest.approx(float(middle[axis]), abs=3)


def test_overlay_is_red_where_the_map_is_high() -> None:
    cells = np.zeros((7, 7))
    cells[0, 6] = 1
    image = overlay_map(np.full((70, 70, 3), 100, np.uint8), cells)
    assert image.shape == (70, 70, 3)
    assert (image[60, 5] == 100).all()
    assert image[4, 65, 0] > 150
    assert image[4, 65, 2] < 60
