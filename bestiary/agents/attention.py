"""The attention-augmented agent (Mott et al. 2019): it looks at a few places of the picture, and asks for them from memory.

    vision    two convolutions, then a convolutional LSTM: a map of cells that remember            [B,K+V,h,w]
    keys      K of its channels, values the other V; beside each a fixed basis S of the place      [B,h*w,K+S], [B,h*w,V+S]
    queries   from what the policy's LSTM gave out a step before                                   [B,Q,K+S]
    answers   of each query, a softmax over all cells of key . query, and the values it weighs     [B,Q,V+S]
    policy    an LSTM of answers, queries, last reward and last action; then policy and value

The basis is cos(u y) cos(v x), u and v from 1 to U, over angles that go from 0 to pi across the map: with it a query can name a
place as well as a thing. Against a port that never learnt: ReLUs after the convolutions, peepholes that are parameters, a
forget gate that begins open, rewards clamped, actions one-hot, a sharpness of each query that is learnt, and cells normalised:
what a gated memory gives out is small, and would be lost beside places and queries.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from bestiary.agents.agent import Output, State, decide, merge, orthogonal, whole
from bestiary.agents.critics import Shared
from bestiary.agents.torsos import need_image, scaled
from bestiary.options import option
from bestiary.rollout import ActionSpec, Inputs, ObservationSpec, Tensors


class AttentionAgent(nn.Module):
    """Looks at a few places of a picture at a time, and asks for them from what it remembers (AAA)."""

    parts: ClassVar[tuple[str, ...]] = ("critic",)
    # Full steps from the start, while all weights learn at once what return to expect at all, saturate its LSTM for good.
    defaults: ClassVar[dict[str, Any]] = {"algo.lr": 3e-4, "algo.schedule": "warm"}
    attends: ClassVar[bool] = True

    @dataclass(frozen=True)
    class Options:
        queries: int = option(4, "places it looks at once", low=1, high=64)
        keys: int = option(8, "channels of a key, without the place", low=1)
        values: int = option(120, "channels of a value, without the place", low=1)
        basis: int = option(8, "frequencies of the place, each way", low=1, high=64)
        hidden: int = option(256, "units of the policy's LSTM", low=1)
        center: bool = option(True, "see pictures less their mean, taken in random play before the training")
        inputs: str = option(
            "reward+action",
            "what the policy sees besides: the last reward, clamped to [-1,1], the last action",
            choices=("reward+action", "reward", "action", "none"),
        )

    def __init__(
        self,
        observation: ObservationSpec,
        action: ActionSpec,
        options: Options = Options(),
        *,
        critic: Callable[[int], Any] = Shared,
    ):
        super().__init__()
        o = self.options = options
        self.num_actions, self.sees_reward, self.sees_action = action.n, "reward" in o.inputs, "action" in o.inputs
        self.torso = Vision(observation, o.center)
        channels, height, width = self.torso.map_shape
        self.core = ConvLSTM(channels, o.keys + o.values, (height, width))
        self.norm = nn.LayerNorm(o.keys + o.values)
        self.basis: Tensor
        self.register_buffer("basis", spatial_basis(height, width, o.basis), persistent=False)  # [h*w,S]
        key, value = o.keys + o.basis**2, o.values + o.basis**2
        self.query = nn.Sequential(
            *(nn.Linear(o.hidden, 128), nn.ReLU(), nn.Linear(128, o.queries * key), nn.ReLU()),
            nn.Linear(o.queries * key, o.queries * key),
        )
        self.sharpness = nn.Parameter(torch.zeros(o.queries))  # the logarithm of what logits are multiplied by
        told = o.queries * (value + key) + int(self.sees_reward) + (action.n if self.sees_action else 0)
        self.answer = nn.Sequential(nn.Linear(told, 512), nn.ReLU(), nn.Linear(512, o.hidden))
        self.lstm = nn.LSTMCell(o.hidden, o.hidden)
        self.policy = nn.Linear(o.hidden, action.n)
        self.critic = critic(o.hidden)
        for part in (self.torso, self.query, self.answer):
            orthogonal(part, gain=math.sqrt(2))
        orthogonal(self.policy, gain=0.01)
        orthogonal(self.critic, gain=1.0)
        nn.init.normal_(self.query[-1].bias, std=0.5)  # type: ignore[arg-type]  # an empty memory asks for something, too

    def initial_state(self, batch_size: int) -> State:
        """Vision's h and c [B,K+V,h,w], the policy's h and c [B,hidden]."""
        new = self.policy.weight.new_zeros
        cells = (batch_size, self.core.channels, *self.torso.map_shape[1:])
        return new(cells), new(cells), new(batch_size, self.options.hidden), new(batch_size, self.options.hidden)

    def forward(self, inputs: Inputs, state: State) -> tuple[Output, State]:
        T, B = inputs.done.shape
        seen = self.torso({kind: merge(array) for kind, array in inputs.observation.items()})  # [T*B,C,h,w]
        gates = self.core.listen(seen)  # of all steps at once: they do not depend on the memory
        going_on = (~inputs.done).unsqueeze(-1)  # [T,B,1]
        told = []  # besides what is seen, [T,B,...] each
        if self.sees_reward:
            told.append(inputs.reward.clamp(-1, 1).unsqueeze(-1) * going_on)
        if self.sees_action:
            told.append(F.one_hot(inputs.last_action, self.num_actions) * going_on)
        vision, cell, hidden, carried = state
        outputs, maps = [], []
        # Unbound, not indexed: the way back of an index fills a whole sequence of gates with zeros, at each step.
        for t, heard in enumerate(gates.view(T, B, *gates.shape[1:]).unbind()):
            keep = going_on[t]  # [B,1]
            hidden, carried = (torch.where(keep, s, 0.0) for s in (hidden, carried))
            vision, cell = (torch.where(keep[..., None, None], s, 0.0) for s in (vision, cell))
            vision, cell = self.core(heard, vision, cell)
            answers, queries, weights = self._ask(vision, hidden)
            x = self.answer(torch.cat([answers.flatten(1), queries.flatten(1), *(more[t] for more in told)], dim=-1))
            hidden, carried = self.lstm(x, (hidden, carried))
            outputs.append(hidden)
            maps.append(weights)
        output = decide(self.policy, self.critic, torch.stack(outputs), inputs.task, attention=torch.stack(maps))
        return output, tuple(whole(s) for s in (vision, cell, hidden, carried))

    def _ask(self, vision: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Answers [B,Q,V+S], queries [B,Q,K+S], and where each looked [B,Q,h*w]."""
        cells = self.norm(vision.flatten(2).transpose(1, 2))  # [B,h*w,K+V]
        place = self.basis.expand(len(cells), -1, -1)
        keys = torch.cat([cells[..., : self.options.keys], place], dim=-1)
        values = torch.cat([cells[..., self.options.keys :], place], dim=-1)
        queries = self.query(hidden).unflatten(-1, (self.options.queries, -1))
        logits = queries @ keys.transpose(1, 2) * self.sharpness.exp().unsqueeze(-1)
        weights = logits.softmax(-1)
        return weights @ values, queries, weights


class Vision(nn.Module):
    """Two convolutions: 84x84 pixels become 11x11 cells, 210x160 become 27x20."""

    mean: Tensor | None

    def __init__(self, spec: ObservationSpec, center: bool):
        super().__init__()
        need_image(spec, "agent aaa", at_least=16, instead="--agent")
        shape = spec["image"].shape
        self.convolutions = nn.Sequential(
            *(nn.Conv2d(shape[0], 32, 8, stride=4, padding=1), nn.ReLU()),
            *(nn.Conv2d(32, 64, 4, stride=2, padding=2), nn.ReLU()),
        ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        mean = torch.zeros(1, *shape).contiguous(memory_format=torch.channels_last) if center else None
        self.register_buffer("mean", mean)  # in [0,255]
        with torch.no_grad():
            self.map_shape = self.convolutions(torch.zeros(1, *shape)).shape[1:]  # C, h, w

    def forward(self, observation: Tensors) -> Tensor:
        return self.convolutions(scaled(observation["image"], self.mean))

    @property
    def curious(self) -> bool:
        return self.mean is not None

    def acquaint(self, observation: Tensors) -> None:
        assert self.mean is not None
        self.mean.copy_(observation["image"].mean(0, keepdim=True, dtype=torch.float32))


class ConvLSTM(nn.Module):
    """An LSTM whose state is a map, with peepholes (Shi et al. 2015):

    i, f = sigmoid(x * W + h * U + b + p c)      c' = f c + i tanh(...)      o = sigmoid(... + p c')      h' = o tanh(c')
    """

    def __init__(self, inputs: int, channels: int, size: tuple[int, int]):
        super().__init__()
        self.channels = channels
        self.input = nn.Conv2d(inputs, 4 * channels, 3, padding=1)
        self.recurrent = nn.Conv2d(channels, 4 * channels, 3, padding=1, bias=False)
        self.peepholes = nn.Parameter(torch.zeros(3, channels, *size))  # into the input, forget and output gate
        orthogonal(self.input, gain=math.sqrt(2))
        orthogonal(self.recurrent, gain=1.0)
        with torch.no_grad():
            assert self.input.bias is not None
            self.input.bias[channels : 2 * channels] = 1  # remembers, until it has learnt to forget

    def listen(self, x: Tensor) -> Tensor:
        """What the inputs [N,C,h,w] add to the gates, [N,4*channels,h,w]."""
        return self.input(x)

    def forward(self, heard: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        enter, forget, new, leave = (heard + self.recurrent(h)).chunk(4, dim=1)
        peep_enter, peep_forget, peep_leave = self.peepholes
        c = torch.sigmoid(forget + peep_forget * c) * c + torch.sigmoid(enter + peep_enter * c) * torch.tanh(new)
        return torch.sigmoid(leave + peep_leave * c) * torch.tanh(c), c


def spatial_basis(height: int, width: int, frequencies: int) -> Tensor:
    """[h*w, U*U]: cos(u y) cos(v x) at each cell; y and x go from 0, exclusive, to pi across the map."""
    waves = []
    for size in (height, width):
        angles = math.pi * torch.arange(1, size + 1) / size
        waves.append(torch.cos(angles.unsqueeze(1) * torch.arange(1, frequencies + 1)))  # [size,U]
    return torch.einsum("yu,xv->yxuv", *waves).reshape(height * width, frequencies**2)
