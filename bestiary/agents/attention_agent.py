"""Attention-augmented agent (AAA, Mott et al. 2019): soft attention over an image, with queries from an LSTM.

    vision    two convolutions and a convolutional LSTM: a map of h*w cells with K+V channels        [B,K+V,h,w]
    keys      K channels of the map and a fixed spatial basis of S functions                         [B,h*w,K+S]
    values    the other V channels and the same basis                                                [B,h*w,V+S]
    queries   Q queries, computed from the output of the policy LSTM at the previous step            [B,Q,K+S]
    answers   for each query, the weighted sum of the values                                         [B,Q,V+S]
    policy    an LSTM over answers, queries, last reward and last action; then policy and value heads

Each query has one attention weight per cell. The weights are the softmax, over all cells, of the scalar products of the
query and the keys. The spatial basis consists of fixed functions of the location, so that a query can select a location
and not only an object. Each function is a product f(y) g(x), where the row y and the column x go from 0 to pi across
the map. With the option `basis` = "fourier", f(y) is cos(u y) or sin(u y) for one of the frequencies u = 1, ..., U.
g is one of the same 2U functions, applied to x. Therefore S = (2U)^2. With `basis` = "cosine", there are no sines, so
S = U^2.

According to the paper, the basis has 64 channels, is an outer product over the two axes, and has 4 frequencies per
axis. This is only possible with sines and cosines: (2 * 4)^2 = 64. A public re-implementation of this agent uses 8
frequencies and only cosines, which also gives 64 channels (docs/aaa.md).

The multi-task fork of TorchBeast contains this agent, too, but its version does not learn. This implementation differs
from that version as follows. A ReLU follows each convolution. The peephole weights are parameters. The forget gate has
a positive initial bias. Rewards are clamped, and actions are one-hot. The attention logits of each query are multiplied
by a learned scale. Layer norm is applied to the cells of the map, because the outputs of an LSTM are small compared
with the spatial basis and the queries.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.agent import (
    Output,
    apply_heads,
    flatten_time,
    init_orthogonal,
    last_step_features,
    to_float32,
)
from bestiary.agents.component_defaults import AgentDefaults
from bestiary.agents.critics import SharedCritic
from bestiary.agents.memories import State
from bestiary.agents.torsos import SUBTRACT_MEAN_HELP, ImageEncoder, require_image
from bestiary.rollout import ActionSpec, Inputs, ObservationSpec
from bestiary.utils.options import option

# Value of the option `basis` (the kind of positional encoding) -> default number of frequencies per image axis. Both
# defaults give 64 channels.
DEFAULT_FREQUENCIES = {"fourier": 4, "cosine": 8}


class AttentionAgent(nn.Module, AgentDefaults):
    """Attention-augmented agent (AAA). Its policy LSTM computes queries, and each query attends to image locations."""

    components: ClassVar[tuple[str, ...]] = ("critic",)
    # The first updates adapt all weights to the scale of the returns. With the full learning rate, these updates would
    # saturate the policy LSTM for the rest of the run. The schedule `warmup` therefore starts with a low learning rate.
    config_defaults: ClassVar[dict[str, Any]] = {"algo.lr": 3e-4, "algo.lr_schedule": "warmup"}
    has_attention = True

    @dataclass(frozen=True)
    class Options:
        queries: int = option(4, "number of attention queries", low=1, high=64)
        key_channels: int = option(8, "number of channels of a key, without the spatial basis", low=1)
        value_channels: int = option(120, "number of channels of a value, without the spatial basis", low=1)
        basis: str = option(
            "fourier",
            "functions that encode the location in keys and values (fourier: sines and cosines, as in the paper; "
            "cosine: only cosines)",
            choices=("fourier", "cosine"),
        )
        basis_frequencies: int | None = option(
            None,
            "number of frequencies of the spatial basis per axis (default: 4 with --agent.basis fourier, 8 with "
            "cosine; both have 64 channels)",
            low=1,
            high=64,
        )
        hidden: int = option(256, "number of units of the policy LSTM", low=1)
        subtract_mean: bool = option(True, SUBTRACT_MEAN_HELP)
        extra_inputs: str = option(
            "reward+action",
            "inputs of the policy LSTM in addition to queries and answers: the last reward (clamped to [-1,1]), the "
            "last action",
            choices=("reward+action", "reward", "action", "none"),
        )

    def __init__(
        self,
        observation: ObservationSpec,
        action: ActionSpec,
        options: Options = Options(),
        *,
        critic: Callable[[int], Any] = SharedCritic,
    ):
        """Build the agent. `critic` is a function that creates the critic, given its number of inputs."""
        super().__init__()
        o = self.options = options
        self.num_actions = action.n
        self.uses_last_reward = "reward" in o.extra_inputs
        self.uses_last_action = "action" in o.extra_inputs
        self.torso = make_encoder(observation, o.subtract_mean)
        channels, height, width = self.torso.map_shape
        self.core = ConvLSTM(channels, o.key_channels + o.value_channels, (height, width))
        self.norm = nn.LayerNorm(o.key_channels + o.value_channels)
        self.basis: Tensor
        frequencies = o.basis_frequencies or DEFAULT_FREQUENCIES[o.basis]
        self.register_buffer("basis", spatial_basis(height, width, frequencies, o.basis), persistent=False)  # [h*w,S]
        key_size = o.key_channels + self.basis.shape[1]
        value_size = o.value_channels + self.basis.shape[1]
        self.query = nn.Sequential(
            nn.Linear(o.hidden, 128),
            nn.ReLU(),
            nn.Linear(128, o.queries * key_size),
            nn.ReLU(),
            nn.Linear(o.queries * key_size, o.queries * key_size),
        )
        self.sharpness = nn.Parameter(torch.zeros(o.queries))  # [Q], log of the learned scale of the attention logits
        num_features = o.queries * (value_size + key_size) + int(self.uses_last_reward)
        num_features += action.n if self.uses_last_action else 0
        self.answer = nn.Sequential(nn.Linear(num_features, 512), nn.ReLU(), nn.Linear(512, o.hidden))
        self.lstm = nn.LSTMCell(o.hidden, o.hidden)
        self.policy = nn.Linear(o.hidden, action.n)
        self.critic = critic(o.hidden)
        for module in (self.torso, self.query, self.answer):
            init_orthogonal(module, gain=math.sqrt(2))
        init_orthogonal(self.policy, gain=0.01)
        init_orthogonal(self.critic, gain=1.0)
        # The queries are computed from the recurrent state, which is zero at the start of an episode. Without a random
        # bias, all queries would then be equal.
        nn.init.normal_(self.query[-1].bias, std=0.5)  # type: ignore[arg-type]

    def initial_state(self, batch_size: int) -> State:
        """Return four tensors of zeros.

        The first two are the output and the cell of the convolutional LSTM, [B,channels,h,w]. The last two are the
        output and the cell of the policy LSTM, [B,hidden].
        """
        zeros = self.policy.weight.new_zeros
        map_shape = (batch_size, self.core.channels, *self.torso.map_shape[1:])
        vector_shape = (batch_size, self.options.hidden)
        return zeros(map_shape), zeros(map_shape), zeros(vector_shape), zeros(vector_shape)

    def forward(self, inputs: Inputs, state: State) -> tuple[Output, State]:
        T, B = inputs.done.shape
        observation = {kind: flatten_time(array) for kind, array in inputs.observation.items()}
        # The contribution of the inputs to the gates does not depend on the recurrent state, so it is computed for all
        # steps at once.
        gates = self.core.input_gates(self.torso.encode(observation))  # [T*B,4*(K+V),h,w]
        num_actions = self.num_actions if self.uses_last_action else 0
        extra_features = last_step_features(inputs, self.uses_last_reward, num_actions)  # each [T,B,...]
        same_episode = (~inputs.done).unsqueeze(-1)  # [T,B,1]
        vision_h, vision_c, policy_h, policy_c = state
        outputs, all_weights = [], []
        # Use `unbind`, not indexing: the backward pass of each `gates[t]` would allocate zeros for the whole sequence.
        for t, step_gates in enumerate(gates.view(T, B, *gates.shape[1:]).unbind()):
            keep = same_episode[t]  # [B,1]
            policy_h, policy_c = (torch.where(keep, s, 0.0) for s in (policy_h, policy_c))
            vision_h, vision_c = (torch.where(keep[..., None, None], s, 0.0) for s in (vision_h, vision_c))
            vision_h, vision_c = self.core(step_gates, vision_h, vision_c)
            answers, queries, weights = self._attend(vision_h, policy_h)
            features = [answers.flatten(1), queries.flatten(1), *(feature[t] for feature in extra_features)]
            policy_h, policy_c = self.lstm(self.answer(torch.cat(features, dim=-1)), (policy_h, policy_c))
            outputs.append(policy_h)
            all_weights.append(weights)
        attention = torch.stack(all_weights)
        output = apply_heads(self.policy, self.critic, torch.stack(outputs), inputs.task, attention=attention)
        return output, tuple(to_float32(s) for s in (vision_h, vision_c, policy_h, policy_c))

    def _attend(self, vision: Tensor, policy_h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the answers [B,Q,V+S], the queries [B,Q,K+S] and the attention weights [B,Q,h*w].

        Q is the number of queries, K and V are the options `key_channels` and `value_channels`, S is the size of the
        spatial basis. The answer to a query is the sum of the values of all cells, weighted by the attention weights.
        `vision` is the map [B,K+V,h,w] of the convolutional LSTM, `policy_h` [B,hidden] is the output of the policy
        LSTM at the previous step.
        """
        cells = self.norm(vision.flatten(2).transpose(1, 2))  # [B,h*w,K+V]
        basis = self.basis.expand(cells.shape[0], -1, -1)  # not len(cells): torch.export would make it a constant
        keys = torch.cat([cells[..., : self.options.key_channels], basis], dim=-1)
        values = torch.cat([cells[..., self.options.key_channels :], basis], dim=-1)
        queries = self.query(policy_h).unflatten(-1, (self.options.queries, -1))
        logits = queries @ keys.transpose(1, 2) * self.sharpness.exp().unsqueeze(-1)
        weights = logits.softmax(-1)
        return weights @ values, queries, weights


def make_encoder(spec: ObservationSpec, subtract_mean: bool) -> ImageEncoder:
    """Return an encoder of two convolutions. It maps 84x84 pixels to 11x11 cells, and 210x160 pixels to 27x20 cells.

    Raise UserError if the environment has no image or the image is too small.
    """
    require_image(spec, "agent aaa", min_size=16, flag="--agent")
    convolutions = nn.Sequential(
        nn.Conv2d(spec["image"].shape[0], 32, 8, stride=4, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, stride=2, padding=2),
        nn.ReLU(),
    )
    return ImageEncoder(spec, convolutions, subtract_mean)


class ConvLSTM(nn.Module):
    """Convolutional LSTM with peepholes: the cell is an input of the gates (Shi et al. 2015).

    Each gate has its own weights W, U, b and p. x is the input, h the previous output, c the previous cell, and * a
    convolution:

        input and forget gate   i, f = sigmoid(W * x + U * h + b + p c)
        cell                    c' = f c + i tanh(W * x + U * h + b)
        output gate             o = sigmoid(W * x + U * h + b + p c')
        output                  h' = o tanh(c')
    """

    def __init__(self, inputs: int, channels: int, size: tuple[int, int]):
        super().__init__()
        self.channels = channels
        self.input = nn.Conv2d(inputs, 4 * channels, 3, padding=1)
        self.recurrent = nn.Conv2d(channels, 4 * channels, 3, padding=1, bias=False)
        self.peepholes = nn.Parameter(torch.zeros(3, channels, *size))  # p of the input, forget and output gate
        init_orthogonal(self.input, gain=math.sqrt(2))
        init_orthogonal(self.recurrent, gain=1.0)
        with torch.no_grad():
            assert self.input.bias is not None
            self.input.bias[channels : 2 * channels] = 1  # the forget gate is open initially

    def input_gates(self, x: Tensor) -> Tensor:
        """Return W * x + b for the four gates, [B,4*channels,h,w], given the inputs x [B,C,h,w].

        This part of the gates does not depend on the recurrent state.
        """
        return self.input(x)

    def forward(self, gates: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Compute one step. Return the new output and the new cell, both [B,channels,h,w].

        `gates` is the result of `input_gates` for this step, `h` the previous output and `c` the previous cell.
        """
        input_gate, forget_gate, candidate, output_gate = (gates + self.recurrent(h)).chunk(4, dim=1)
        input_peephole, forget_peephole, output_peephole = self.peepholes
        kept = torch.sigmoid(forget_gate + forget_peephole * c) * c
        c = kept + torch.sigmoid(input_gate + input_peephole * c) * torch.tanh(candidate)
        return torch.sigmoid(output_gate + output_peephole * c) * torch.tanh(c), c


def spatial_basis(height: int, width: int, frequencies: int, kind: str) -> Tensor:
    """Return the S channels of the spatial basis at each cell of a map with h rows and w columns, [h*w,S].

    Each channel is a product f(y) g(x). For the kind "cosine", f(y) is cos(u y) with an integer u from 1 to
    `frequencies`. For the kind "fourier", f(y) is cos(u y) or sin(u y). g is one of the same functions, applied to x.
    Across the map, y and x go from 0 (exclusive) to pi.
    """
    waves = []
    for size in (height, width):
        angles = math.pi * torch.arange(1, size + 1).unsqueeze(1) / size * torch.arange(1, frequencies + 1)  # [size,U]
        functions = [angles.cos()] if kind == "cosine" else [angles.cos(), angles.sin()]
        waves.append(torch.cat(functions, dim=1))
    return torch.einsum("yu,xv->yxuv", *waves).reshape(height * width, -1)
