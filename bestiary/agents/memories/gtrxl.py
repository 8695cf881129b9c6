"""GTrXL (Parisotto et al. 2020): a gated Transformer-XL with a bounded cache of the last steps of the episode.

Each step attends to itself and to the last M steps of the same episode (M = `cache`). A layer computes its output from
its inputs x at the current step and at the M steps before:

    y = relu(attention(layer_norm(x)))        x = gate_1(x, y)
    y = relu(mlp(layer_norm(x)))              x = gate_2(x, y)

The gates are those of a GRU. The bias b is positive at first, so that each layer starts near the identity:

    r = sigmoid(W_r y + U_r x)      z = sigmoid(W_z y + U_z x - b)      h = tanh(W_h y + U_h (r x))
    gate(x, y) = (1 - z) x + z h

The attention weight of the step that is d steps ago depends on the key k_d of that step and on a sinusoidal encoding
p_d of the distance d (Dai et al. 2019). q is the query of the current step, E the number of features of a head, and u,
v are trained vectors of the head:

    softmax over d = 0, ..., M of  ((q + u) . k_d + (q + v) . W_p p_d) / sqrt(E)

The recurrent state is the cache: the inputs of each layer at the last M steps, and the number of these steps that
belong to the current episode. Gradients flow between the steps of a sequence, but not into the state before it.

Letters of shapes: M steps of the cache, H heads, E features per head, F = H * E features.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.component_defaults import MemoryDefaults
from bestiary.agents.memories.base import State
from bestiary.utils.options import option


class GTrXL(nn.Module, MemoryDefaults):
    """Gated Transformer-XL. The state is one cache [B,M,F] per layer, and the number of valid entries [B]."""

    @dataclass(frozen=True)
    class Options:
        hidden: int = option(128, "number of features between the layers", low=2)
        layers: int = option(2, "number of layers", low=1, high=100)
        heads: int = option(4, "number of attention heads per layer", low=1)
        ff: int = option(256, "number of hidden units of the feed-forward block in each memory layer", low=1)
        cache: int = option(64, "number of earlier steps to which a step can attend", low=1, high=100_000)
        gate_bias: float = option(2.0, "initial bias b of the gates (larger: each layer starts nearer to the identity)")

        def __post_init__(self) -> None:
            if self.hidden % self.heads:
                divisors = (h for h in range(1, self.hidden + 1) if self.hidden % h == 0)
                nearest = min(divisors, key=lambda h: abs(h - self.heads))
                raise ValueError(
                    f"--memory.heads {self.heads}: must divide --memory.hidden {self.hidden}; "
                    f"try --memory.heads {nearest}"
                )

    def __init__(self, input_size: int, options: Options = Options()):
        super().__init__()
        self.options = options
        self.input = nn.Linear(input_size, options.hidden)
        self.layers = nn.ModuleList(Layer(options) for _ in range(options.layers))
        self.output_size = options.hidden

    def initial_state(self, batch_size: int) -> State:
        zeros = self.input.weight.new_zeros
        caches = [zeros(batch_size, self.options.cache, self.options.hidden) for _ in self.layers]
        return *caches, zeros(batch_size)

    def forward(self, x: Tensor, done: Tensor, state: State) -> tuple[Tensor, State]:
        *caches, count = state
        visible = visible_entries(done, count, self.options.cache)  # [B,T,M+T]
        new_count = next_count(done, count, self.options.cache)
        in_cache = index_in_cache(self.options.cache, new_count)  # [B,M]
        h = self.input(x).transpose(0, 1)  # [B,T,F]
        new_caches = []
        for layer, cache in zip(self.layers, caches, strict=True):
            # Set entries of earlier episodes to 0. Their attention weight is 0, but 0 * NaN would be NaN.
            kept = torch.where(done[0][:, None, None], 0.0, cache)
            entries = torch.cat([kept.to(h.dtype), h], dim=1)  # [B,M+T,F]
            new_caches.append(torch.where(in_cache.unsqueeze(-1), entries[:, -self.options.cache :], 0.0))
            h = layer(entries, visible)
        return h.transpose(0, 1), (*new_caches, new_count)


class Layer(nn.Module):
    """One layer of GTrXL: attention and a gate, then fully connected layers and a gate (see the module docstring)."""

    def __init__(self, options: GTrXL.Options):
        super().__init__()
        hidden, heads, cache = options.hidden, options.heads, options.cache
        self.cache, self.heads = cache, heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key_value = nn.Linear(hidden, 2 * hidden, bias=False)
        self.position = nn.Linear(hidden, hidden, bias=False)  # W_p
        self.content_bias = nn.Parameter(torch.zeros(heads, hidden // heads))  # u
        self.position_bias = nn.Parameter(torch.zeros(heads, hidden // heads))  # v
        self.project = nn.Linear(hidden, hidden, bias=False)
        self.attention_gate = Gate(hidden, options.gate_bias)
        self.mlp = nn.Sequential(
            nn.LayerNorm(hidden), nn.Linear(hidden, options.ff), nn.ReLU(), nn.Linear(options.ff, hidden), nn.ReLU()
        )
        self.mlp_gate = Gate(hidden, options.gate_bias)
        self.encoding: Tensor
        self.register_buffer("encoding", position_encoding(cache + 1, hidden), persistent=False)  # [M+1,F]

    def forward(self, entries: Tensor, visible: Tensor) -> Tensor:
        """Return the outputs [B,T,F], given the inputs of the layer at M cached steps and T new steps, [B,M+T,F].

        `visible` [B,T,M+T] is True if a new step (second axis) may attend to an entry (third axis).
        """
        x = entries[:, self.cache :]
        x = self.attention_gate(x, torch.relu(self._attend(entries, visible)))
        return self.mlp_gate(x, self.mlp(x))

    def _attend(self, entries: Tensor, visible: Tensor) -> Tensor:
        normed = self.attention_norm(entries)
        query = self.query(normed[:, self.cache :]).unflatten(-1, (self.heads, -1))  # [B,T,H,E]
        key, value = self.key_value(normed).unflatten(-1, (2, self.heads, -1)).unbind(2)  # [B,M+T,H,E]
        positions = self.position(self.encoding).unflatten(-1, (self.heads, -1))  # [M+1,H,E]
        content = torch.einsum("bthe,bjhe->bhtj", query + self.content_bias, key)
        by_distance = torch.einsum("bthe,dhe->bhtd", query + self.position_bias, positions)  # [B,H,T,M+1]
        length = query.shape[1]
        steps = torch.arange(length, device=entries.device)[:, None] + self.cache
        distance = (steps - torch.arange(entries.shape[1], device=entries.device)).clamp(0, self.cache)  # [T,M+T]
        scores = content + by_distance.gather(-1, distance.expand(*by_distance.shape[:3], -1))
        scores = (scores.float() / math.sqrt(query.shape[-1])).masked_fill(~visible[:, None], -math.inf)
        weights = scores.softmax(-1).to(value.dtype)
        return self.project(torch.einsum("bhtj,bjhe->bthe", weights, value).flatten(2))


class Gate(nn.Module):
    """Gate like that of a GRU: computes gate(x, y) of the module docstring."""

    def __init__(self, hidden: int, bias: float):
        super().__init__()
        self.of_y = nn.Linear(hidden, 3 * hidden, bias=False)  # W_r, W_z, W_h
        self.of_x = nn.Linear(hidden, 2 * hidden, bias=False)  # U_r, U_z
        self.of_reset_x = nn.Linear(hidden, hidden, bias=False)  # U_h
        self.bias = nn.Parameter(torch.full((hidden,), bias))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        y_r, y_z, y_h = self.of_y(y).chunk(3, dim=-1)
        x_r, x_z = self.of_x(x).chunk(2, dim=-1)
        z = torch.sigmoid(y_z + x_z - self.bias)
        candidate = torch.tanh(y_h + self.of_reset_x(torch.sigmoid(y_r + x_r) * x))
        return (1 - z) * x + z * candidate


def visible_entries(done: Tensor, count: Tensor, cache: int) -> Tensor:
    """Return bool [B,T,M+T]: whether a step of the sequence may attend to an entry.

    The entries are the M steps in the cache, followed by the T steps of the sequence. A step may attend to itself and
    to those of the M entries before it that belong to the same episode. `count` [B] is the number of valid entries of
    the cache; the valid entries are the last ones.
    """
    length = len(done)
    episode = done.cumsum(0).T  # [B,T]: number of episodes that have started in the sequence up to step t
    in_cache = index_in_cache(cache, count)[:, None, :] & (episode == 0)[:, :, None]  # [B,T,M]
    same_episode = episode[:, :, None] == episode[:, None, :]  # [B,T,T]
    steps = torch.arange(length, device=done.device)[:, None] + cache
    distance = steps - torch.arange(cache + length, device=done.device)  # [T,M+T]
    return torch.cat([in_cache, same_episode], dim=-1) & (distance >= 0) & (distance <= cache)


def next_count(done: Tensor, count: Tensor, cache: int) -> Tensor:
    """Return the number [B] of valid cache entries after T steps: the steps of the current episode, at most M."""
    episode = done.cumsum(0)  # [T,B]
    steps = (episode == episode[-1]).sum(0).to(count.dtype)
    return (torch.where(episode[-1] == 0, count, 0.0) + steps).clamp(max=cache)


def index_in_cache(cache: int, count: Tensor) -> Tensor:
    """Return bool [B,M]: True for the last `count` [B] entries of the cache, which are the valid ones."""
    return torch.arange(cache, device=count.device) >= cache - count[:, None]


def position_encoding(length: int, features: int) -> Tensor:
    """Return the sinusoidal encodings [length,features] of the distances 0 to length-1 (Vaswani et al. 2017)."""
    half = (features + 1) // 2
    rates = torch.exp(-math.log(10_000) * torch.arange(half) / half)
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)[:, :features]
