"""Convolutions of windows are convolutions of whole pictures, wherever the windows are."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn

from bestiary.agents.agent import BasicAgent
from bestiary.agents.torsos import Residual, ResNet, Shallow
from bestiary.analysis import nearby as module
from bestiary.analysis.nearby import Nearby, nearby
from bestiary.analysis.saliency import Method, Saliency
from bestiary.rollout import ActionSpec, ArraySpec, Inputs


class Doubled(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def hooked(layers: nn.Sequential) -> nn.Sequential:
    layers[0].register_forward_hook(lambda layer, given, out: out + 1)
    return layers


class Negative(nn.Sequential):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return -super().forward(input)


def residual(**parts: nn.Module) -> nn.Sequential:
    """A block some of whose convolutions are others."""
    block = Residual(4)
    for name, part in parts.items():
        setattr(block, name, part)
    return nn.Sequential(nn.Conv2d(3, 4, 3), block, nn.Conv2d(4, 4, 3))


STACKS: dict[str, Any] = {
    "shallow": lambda: Shallow({"image": ArraySpec((3, 50, 45), "uint8")}).convolutions,
    "resnet": lambda: ResNet({"image": ArraySpec((3, 50, 45), "uint8")}).convolutions,
    "rows that nothing sees": lambda: nn.Sequential(
        nn.Conv2d(3, 5, 4, stride=3), nn.ReLU(), nn.Conv2d(5, 2, 2, stride=2)
    ),
    "kernels that are not square": lambda: nn.Sequential(
        nn.Conv2d(3, 4, (5, 2), stride=(3, 1), padding=(2, 0)), nn.MaxPool2d((2, 3), (1, 2), (1, 1)), nn.Conv2d(4, 4, 1)
    ),
    "layers that it does not know": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, dilation=2), nn.BatchNorm2d(4).eval(), nn.Conv2d(4, 4, 3)
    ),
    "strides beyond the kernel": lambda: nn.Sequential(nn.Conv2d(3, 4, 2, stride=3), nn.Conv2d(4, 4, 3)),
    "edges that are mirrored": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")),
    "layers of somebody's own": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), Doubled(4, 4, 3), nn.Conv2d(4, 4, 3)),
    "layers with a hook": lambda: hooked(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())),
    "blocks of somebody's own": lambda: residual(first=Doubled(4, 4, 3, padding=1)),
    "blocks with mirrored edges": lambda: residual(second=nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")),
    "a layer of a block with a hook": lambda: residual(first=hooked(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1)))[0]),
}


def windowed(corners: list[tuple[int, int]], size: tuple[int, int] = (7, 9)) -> torch.Tensor:
    """A picture [3,50,45], and others that differ from it in a window."""
    pictures = torch.rand(3, 50, 45).repeat(1 + len(corners), 1, 1, 1)
    for picture, (y, x) in zip(pictures[1:], corners, strict=True):
        picture[:, y : y + size[0], x : x + size[1]] = torch.rand(3, *size)
    return pictures


@pytest.mark.parametrize("name", STACKS)
def test_windows_anywhere_come_out_as_whole_pictures_do(name: str) -> None:
    torch.manual_seed(0)
    layers, random = STACKS[name](), np.random.default_rng(0)
    edges = [(y, x) for y in (0, 1, 43, 42) for x in (0, 1, 36, 35)]
    middles = [(int(random.integers(44)), int(random.integers(37))) for _ in range(16)]
    with torch.no_grad():
        for size in ((7, 9), (1, 1)):
            pictures = windowed(edges + middles, size)
            torch.testing.assert_close(Nearby(layers)(pictures), layers(pictures), rtol=1e-4, atol=1e-5)


def test_pictures_that_are_the_same_and_pictures_that_are_quite_different() -> None:
    layers = STACKS["resnet"]()
    with torch.no_grad():
        for pictures in (torch.rand(1, 3, 50, 45), torch.rand(3, 50, 45).repeat(4, 1, 1, 1), torch.rand(4, 3, 50, 45)):
            torch.testing.assert_close(Nearby(layers)(pictures), layers(pictures), rtol=1e-4, atol=1e-5)


def test_only_windows_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a patch of 7x9 pixels, the first maps of a deep net are computed in a small part."""
    seen: list[torch.Size] = []
    over = module.over

    def watched(layer: Any, maps: torch.Tensor, padding: tuple[int, int]) -> torch.Tensor:
        seen.append(maps.shape)
        return over(layer, maps, padding)

    monkeypatch.setattr(module, "over", watched)
    with torch.no_grad():
        Nearby(STACKS["resnet"]())(windowed([(20, 20)] * 8))
    windows = [shape for shape in seen if shape[0] == 8]
    assert windows[0][1:3] == (11, 13)  # what the pixels around the patch see
    assert len(windows) >= 6
    assert all(windows[i][1] <= 25 for i in range(6))  # of 50 rows, then 25


@pytest.mark.parametrize("torso", [Shallow, ResNet])
@pytest.mark.parametrize("mode", ["occlude", "searchlight"])
def test_saliency_is_the_same(torso: Any, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    spec = {"image": ArraySpec((2, 48, 40), "uint8")}
    agent = BasicAgent(spec, ActionSpec(("a", "b", "c", "d")), torso=torso)
    nn.init.normal_(agent.policy.weight)  # else nearly uniform
    one = torch.zeros(1, 1)
    image = torch.randint(0, 256, (1, 1, 2, 48, 40), dtype=torch.uint8)
    inputs = Inputs({"image": image}, one, one.bool(), one.long(), one.long())
    lens = Saliency(agent, spec, Method(4, mode=mode))
    assert isinstance(lens.agent.torso.convolutions, Nearby)
    assert not isinstance(agent.torso.convolutions, Nearby)  # the agent itself is left alone
    monkeypatch.setattr("bestiary.analysis.saliency.nearby", lambda agent: agent)
    plain = Saliency(agent, spec, Method(4, mode=mode))
    assert plain.agent is agent
    found, expected = lens(inputs, ()), plain(inputs, ())
    np.testing.assert_allclose(found.policy, expected.policy, rtol=1e-3, atol=1e-8)
    np.testing.assert_allclose(found.value, expected.value, rtol=1e-3, atol=1e-8)
    assert expected.policy.min() > 0


def test_agents_without_such_convolutions_are_left_alone() -> None:
    agent: nn.Module = nn.Linear(2, 2)
    assert nearby(agent) is agent


@pytest.mark.parametrize("what", ["as it is", "a stack of somebody's own", "a stack with a hook"])
def test_stacks_that_compute_something_else_are_left_alone(what: str) -> None:
    agent = BasicAgent({"image": ArraySpec((3, 50, 45), "uint8")}, ActionSpec(("a", "b")), torso=Shallow)
    stack = agent.torso.convolutions
    if what == "a stack of somebody's own":
        agent.torso.convolutions = Negative(*stack)
    elif what == "a stack with a hook":
        stack.register_forward_hook(lambda layer, given, out: out + 1)
    assert (nearby(agent) is agent) == (what != "as it is")
