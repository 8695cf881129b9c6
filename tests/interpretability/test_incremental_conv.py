"""Incremental convolutions equal ordinary convolutions of whole images, for windows at any position."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn

from bestiary.agents.agent import BasicAgent
from bestiary.agents.torsos import ResidualBlock, ResNet, Shallow
from bestiary.interpretability import incremental_conv as module
from bestiary.interpretability.incremental_conv import IncrementalConvolutions, with_incremental_convolutions
from bestiary.interpretability.saliency import Saliency, SaliencyOptions
from bestiary.rollout import ActionSpec, ArraySpec, Inputs


class DoubledConv(nn.Conv2d):
    """User-defined subclass of a known layer that computes something else."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def hooked(layers: nn.Sequential) -> nn.Sequential:
    layers[0].register_forward_hook(lambda layer, given, out: out + 1)
    return layers


class NegatedSequential(nn.Sequential):
    """User-defined subclass of a known stack that computes something else."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return -super().forward(input)


def residual(**layers: nn.Module) -> nn.Sequential:
    """Return a stack with a residual block in which the given layers are replaced."""
    block = ResidualBlock(4)
    for name, layer in layers.items():
        setattr(block, name, layer)
    return nn.Sequential(nn.Conv2d(3, 4, 3), block, nn.Conv2d(4, 4, 3))


STACKS: dict[str, Any] = {
    "shallow": lambda: Shallow({"image": ArraySpec((3, 50, 45), "uint8")}).convolutions,
    "resnet": lambda: ResNet({"image": ArraySpec((3, 50, 45), "uint8")}).convolutions,
    "rows that no output depends on": lambda: nn.Sequential(
        nn.Conv2d(3, 5, 4, stride=3), nn.ReLU(), nn.Conv2d(5, 2, 2, stride=2)
    ),
    "non-square kernels": lambda: nn.Sequential(
        nn.Conv2d(3, 4, (5, 2), stride=(3, 1), padding=(2, 0)), nn.MaxPool2d((2, 3), (1, 2), (1, 1)), nn.Conv2d(4, 4, 1)
    ),
    "unsupported layers": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, dilation=2), nn.BatchNorm2d(4).eval(), nn.Conv2d(4, 4, 3)
    ),
    "stride larger than the kernel": lambda: nn.Sequential(nn.Conv2d(3, 4, 2, stride=3), nn.Conv2d(4, 4, 3)),
    "reflection padding": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")),
    "user-defined layer": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), DoubledConv(4, 4, 3), nn.Conv2d(4, 4, 3)),
    "layer with a hook": lambda: hooked(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())),
    "user-defined layer in a block": lambda: residual(first=DoubledConv(4, 4, 3, padding=1)),
    "reflection padding in a block": lambda: residual(second=nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")),
    "layer with a hook in a block": lambda: residual(first=hooked(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1)))[0]),
}


def windowed(corners: list[tuple[int, int]], size: tuple[int, int] = (7, 9)) -> torch.Tensor:
    """Return an image [3,50,45] and copies of it, each with a random window."""
    images = torch.rand(3, 50, 45).repeat(1 + len(corners), 1, 1, 1)
    for image, (y, x) in zip(images[1:], corners, strict=True):
        image[:, y : y + size[0], x : x + size[1]] = torch.rand(3, *size)
    return images


@pytest.mark.parametrize("name", STACKS)
def test_windows_at_any_position_give_the_same_maps_as_whole_images(name: str) -> None:
    torch.manual_seed(0)
    layers, random = STACKS[name](), np.random.default_rng(0)
    edges = [(y, x) for y in (0, 1, 43, 42) for x in (0, 1, 36, 35)]
    middles = [(int(random.integers(44)), int(random.integers(37))) for _ in range(16)]
    with torch.no_grad():
        for size in ((7, 9), (1, 1)):
            images = windowed(edges + middles, size)
            torch.testing.assert_close(IncrementalConvolutions(layers)(images), layers(images), rtol=1e-4, atol=1e-5)


def test_identical_and_completely_different_images() -> None:
    layers = STACKS["resnet"]()
    with torch.no_grad():
        for images in (torch.rand(1, 3, 50, 45), torch.rand(3, 50, 45).repeat(4, 1, 1, 1), torch.rand(4, 3, 50, 45)):
            torch.testing.assert_close(IncrementalConvolutions(layers)(images), layers(images), rtol=1e-4, atol=1e-5)


def test_first_layers_are_computed_only_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a patch of 7x9 pixels, the first layers of a ResNet run on small windows."""
    shapes: list[torch.Size] = []
    run_layer = module.run_layer

    def recorded(layer: Any, maps: torch.Tensor, padding: tuple[int, int]) -> torch.Tensor:
        shapes.append(maps.shape)
        return run_layer(layer, maps, padding)

    monkeypatch.setattr(module, "run_layer", recorded)
    with torch.no_grad():
        IncrementalConvolutions(STACKS["resnet"]())(windowed([(20, 20)] * 8))
    windows = [shape for shape in shapes if shape[0] == 8]
    assert windows[0][1:3] == (11, 13)  # the receptive field of all outputs that depend on the patch
    assert len(windows) >= 6
    assert all(windows[i][1] <= 25 for i in range(6))  # the maps have 50 rows, then 25


@pytest.mark.parametrize("torso", [Shallow, ResNet])
@pytest.mark.parametrize("mode", ["occlude", "searchlight"])
def test_saliency_is_the_same_with_and_without_incremental_convolutions(
    torso: Any, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    spec = {"image": ArraySpec((2, 48, 40), "uint8")}
    agent = BasicAgent(spec, ActionSpec(("a", "b", "c", "d")), torso=torso)
    nn.init.normal_(agent.policy.weight)  # the default initialisation is nearly uniform
    one = torch.zeros(1, 1)
    image = torch.randint(0, 256, (1, 1, 2, 48, 40), dtype=torch.uint8)
    inputs = Inputs({"image": image}, one, one.bool(), one.long(), one.long())
    incremental = Saliency(agent, spec, SaliencyOptions(4, mode=mode))
    assert isinstance(incremental.agent.torso.convolutions, IncrementalConvolutions)
    assert not isinstance(agent.torso.convolutions, IncrementalConvolutions)  # the agent itself is unchanged
    monkeypatch.setattr("bestiary.interpretability.saliency.with_incremental_convolutions", lambda agent: agent)
    plain = Saliency(agent, spec, SaliencyOptions(4, mode=mode))
    assert plain.agent is agent
    found, expected = incremental(inputs, ()), plain(inputs, ())
    np.testing.assert_allclose(found.policy, expected.policy, rtol=1e-3, atol=1e-8)
    np.testing.assert_allclose(found.value, expected.value, rtol=1e-3, atol=1e-8)
    assert expected.policy.min() > 0


def test_agent_without_convolutions_is_returned_unchanged() -> None:
    agent: nn.Module = nn.Linear(2, 2)
    assert with_incremental_convolutions(agent) is agent


@pytest.mark.parametrize("kind", ["unmodified", "user-defined stack", "stack with a hook"])
def test_stack_that_may_compute_something_else_is_unchanged(kind: str) -> None:
    agent = BasicAgent({"image": ArraySpec((3, 50, 45), "uint8")}, ActionSpec(("a", "b")), torso=Shallow)
    stack = agent.torso.convolutions
    if kind == "user-defined stack":
        agent.torso.convolutions = NegatedSequential(*stack)
    elif kind == "stack with a hook":
        stack.register_forward_hook(lambda layer, given, out: out + 1)
    assert (with_incremental_convolutions(agent) is agent) == (kind != "unmodified")
