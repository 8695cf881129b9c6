"""Independent re-creations of the original networks in plain PyTorch, for the tests of the import.

They process one step after the other with the names, shapes and formulas of the originals, and use no code of Bestiary.
"""

import itertools
import math
from collections import OrderedDict
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


def init_(module: nn.Module, seed: int) -> None:
    """Draw all parameters from a normal distribution, so that no output is nearly constant."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            fan_in = parameter[0].numel() if parameter.dim() > 1 else 16
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(fan_in))


class PopArtHead(nn.Module):
    """Linear value heads with the statistics mu and sigma."""

    mu: Tensor
    sigma: Tensor

    def __init__(self, features: int, tasks: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(tasks, features))
        self.bias = nn.Parameter(torch.zeros(tasks))
        self.register_buffer("mu", torch.zeros(tasks))
        self.register_buffer("sigma", torch.ones(tasks))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.T + self.bias) * self.sigma + self.mu


class Recreation(nn.Module):
    """Base class: the loop over time. A subclass computes the features and one step of the core."""

    policy: Any
    baseline: Any

    def features(self, step: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError

    def initial_state(self, batch: int) -> list[Tensor]:
        return []

    def core_step(self, x: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        return x, state

    def forward(self, steps: list[dict[str, Tensor]], state: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return logits [T,B,A], values [T,B,K] and the state after the last step. The state has batch axis 1."""
        logits = []
        values = []
        for step in steps:
            keep = 1.0 - step["done"].float()
            state = [s * keep.view(1, -1, *[1] * (s.dim() - 2)) for s in state]
            x, state = self.core_step(self.features(step), state)
            logits.append(self.policy(x))
            values.append(self.baseline(x))
        return torch.stack(logits), torch.stack(values), state


class LSTMCore(Recreation):
    """Adds the LSTM of TorchBeast, computed gate by gate."""

    core: nn.LSTM | None

    def initial_state(self, batch: int) -> list[Tensor]:
        if self.core is None:
            return []
        return [torch.zeros(self.core.num_layers, batch, self.core.hidden_size) for _ in range(2)]

    def core_step(self, x: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        if self.core is None:
            return x, state
        hidden, cells = [], []
        for layer in range(self.core.num_layers):
            weights = dict(self.core.named_parameters())
            h, c = state[0][layer], state[1][layer]
            gates = F.linear(x, weights[f"weight_ih_l{layer}"], weights[f"bias_ih_l{layer}"])
            gates = gates + F.linear(h, weights[f"weight_hh_l{layer}"], weights[f"bias_hh_l{layer}"])
            i, f, g, o = gates.chunk(4, dim=-1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            x = o.sigmoid() * c.tanh()
            hidden.append(x)
            cells.append(c)
        return x, [torch.stack(hidden), torch.stack(cells)]


class AtariNet(LSTMCore):
    """The small network of MonoBeast. `depth` > 1: the reward-misspecification fork, where fc is a list of layers."""

    def __init__(self, actions: int, lstm: bool, width: int = 512, depth: int | None = None):
        super().__init__()
        self.conv1 = nn.Conv2d(4, 32, 8, stride=4)
        self.conv2 = nn.Conv2d(32, 64, 4, stride=2)
        self.conv3 = nn.Conv2d(64, 64, 3, stride=1)
        sizes = [3136] + [width] * (depth or 1)
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
        self.fc: Any = layers[0] if depth is None else nn.ModuleList(layers)
        self.actions = actions
        size = width + 1 + actions
        self.core = nn.LSTM(size, size, 2) if lstm else None
        self.policy = nn.Linear(size, actions)
        self.baseline = nn.Linear(size, 1)

    def features(self, step: dict[str, Tensor]) -> Tensor:
        x = step["frame"].float() / 255.0
        for convolution in (self.conv1, self.conv2, self.conv3):
            x = F.relu(convolution(x))
        x = x.reshape(len(x), -1)
        for layer in self.fc if isinstance(self.fc, nn.ModuleList) else [self.fc]:
            x = F.relu(layer(x))
        reward = step["reward"].clamp(-1, 1).unsqueeze(1)
        action = torch.eye(self.actions)[step["last_action"]]
        return torch.cat([x, reward, action], dim=1)


class ResNet(LSTMCore):
    """The deep network of PolyBeast, of the PopArt fork (`tasks`, `clamp`) and of the ProcGen fork (`channels` 3)."""

    def __init__(
        self, actions: int, lstm: bool = False, popart_tasks: int | None = None, clamp: bool = True, channels: int = 4
    ):
        super().__init__()
        self.feat_convs = nn.ModuleList()
        self.resnet1 = nn.ModuleList()
        self.resnet2 = nn.ModuleList()
        inputs = channels
        for width in (16, 32, 32):
            self.feat_convs.append(
                nn.Sequential(nn.Conv2d(inputs, width, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1))
            )
            for blocks in (self.resnet1, self.resnet2):
                convolutions = [nn.Conv2d(width, width, 3, padding=1) for _ in range(2)]
                blocks.append(nn.Sequential(nn.ReLU(), convolutions[0], nn.ReLU(), convolutions[1]))
            inputs = width
        self.fc = nn.Linear(3872 if channels == 4 else 2048, 256)
        self.clamp = clamp
        self.core = nn.LSTM(257, 256, 1) if lstm else None
        self.make_heads(256 if lstm else 257, actions, popart_tasks)

    def make_heads(self, size: int, actions: int, popart_tasks: int | None) -> None:
        self.policy = nn.Linear(size, actions)
        self.baseline = nn.Linear(size, 1) if popart_tasks is None else PopArtHead(size, popart_tasks)

    def features(self, step: dict[str, Tensor]) -> Tensor:
        x = step["frame"].float() / 255.0
        for convolution, first, second in zip(self.feat_convs, self.resnet1, self.resnet2, strict=True):
            x = convolution(x)
            x = x + first(x)
            x = x + second(x)
        x = F.relu(self.fc(F.relu(x).reshape(len(x), -1)))
        reward = step["reward"].clamp(-1, 1) if self.clamp else step["reward"]
        return torch.cat([x, reward.unsqueeze(1)], dim=1)


class FeedForward(nn.Module):
    """Residual feed-forward block."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.ff_layers = nn.Sequential(
            nn.Linear(hidden, width), nn.ReLU(), nn.Dropout(0.0), nn.Linear(width, hidden), nn.Dropout(0.0)
        )
        self.layer_norm = nn.LayerNorm(hidden)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.ff_layers(self.layer_norm(h))


class DeltaLayer(nn.Module):
    """One step of DeltaNet for a batch: state W [1,B,H,E,E]."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads, self.size = heads, hidden // heads
        self.slow_net = nn.Linear(hidden, heads * (3 * self.size + 1), bias=False)
        self.layer_norm = nn.LayerNorm(hidden)
        self.out_linear = nn.Linear(hidden, hidden, bias=False)

    def shapes(self) -> list[tuple[int, ...]]:
        return [(self.heads, self.size, self.size)]

    def forward(self, h: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        outputs, after = [], []
        e = self.size
        for b in range(len(h)):
            projected = self.slow_net(self.layer_norm(h[b])).view(self.heads, 3 * e + 1)
            heads, matrices = [], []
            for n in range(self.heads):
                q, k, v = (projected[n, part * e : (part + 1) * e] for part in range(3))
                q, k = F.elu(q) + 1, F.elu(k) + 1
                q, k = q / (q.sum() + 1e-5), k / (k.sum() + 1e-5)
                beta = projected[n, 3 * e].sigmoid()
                w = state[0][0, b, n]
                w = w + torch.outer(k, beta * (v - k @ w))
                heads.append(q @ w)
                matrices.append(w)
            outputs.append(torch.cat(heads))
            after.append(torch.stack(matrices))
        return h + self.out_linear(torch.stack(outputs)), [torch.stack(after).unsqueeze(0)]


class SelfReferentialLayer(nn.Module):
    """One step of SRWM, of SR-Delta (`delta`) or of Fake SR (`fake`) for a batch."""

    def __init__(self, hidden: int, heads: int, kind: str):
        super().__init__()
        self.heads, self.size, self.kind = heads, hidden // heads, kind
        columns = 3 * self.size + 1 if kind == "sr-delta" else self.size
        self.W_y = nn.Parameter(torch.zeros(1, heads, self.size, columns))
        if kind != "fake-sr":
            self.W_q = nn.Parameter(torch.zeros(1, heads, self.size, self.size))
            self.W_k = nn.Parameter(torch.zeros(1, heads, self.size, self.size))
            self.w_b = nn.Parameter(torch.zeros(1, heads, self.size, 4))
        self.layer_norm = nn.LayerNorm(hidden)  # not used, as in the original
        self.out_linear = nn.Linear(hidden, hidden, bias=False)

    def base(self) -> list[Tensor]:
        return [self.W_y] if self.kind == "fake-sr" else [self.W_y, self.W_q, self.W_k, self.w_b]

    def shapes(self) -> list[tuple[int, ...]]:
        if self.kind == "fake-sr":
            return []
        shapes = [tuple(weight.shape[1:]) for weight in self.base()]
        return shapes + ([(self.heads, self.size, self.size)] if self.kind == "sr-delta" else [])

    def forward(self, h: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        e = self.size
        outputs = []
        new_state = [s.clone() for s in state]
        for b in range(len(h)):
            heads = []
            for n in range(self.heads):
                x = h[b, n * e : (n + 1) * e]
                if self.kind == "fake-sr":
                    heads.append(x @ self.W_y[0, n])
                    continue
                x = x.softmax(0)
                current = [base[0, n] + shift[0, b, n] for base, shift in zip(self.base(), state, strict=False)]
                y, q, k, beta = (x @ w for w in current)
                q, k, beta = q.softmax(0), k.softmax(0), beta.sigmoid()
                for block, w in enumerate(current):
                    difference = q @ w - k @ w
                    new_state[block][0, b, n] += beta[block] * torch.outer(k, difference)
                if self.kind == "sr-delta":
                    query, key = y[:e].softmax(0), y[e : 2 * e].softmax(0)
                    memory = state[4][0, b, n]
                    memory = memory + torch.outer(key, y[3 * e].sigmoid() * (y[2 * e : 3 * e] - key @ memory))
                    new_state[4][0, b, n] = memory
                    y = query @ memory
                heads.append(y)
            outputs.append(torch.cat(heads))
        return h + self.out_linear(torch.stack(outputs)), new_state


class FastWeightCore(nn.Module):
    """The core of the ProcGen agents: input projection, then layers of a mixer and a feed-forward block."""

    def __init__(self, inputs: int, hidden: int, heads: int, layers: int, width: int, kind: str):
        super().__init__()
        self.input_proj = nn.Linear(inputs, hidden)
        mixers = [
            DeltaLayer(hidden, heads) if kind == "delta" else SelfReferentialLayer(hidden, heads, kind)
            for _ in range(layers)
        ]
        blocks = nn.ModuleList(mixers)
        if kind == "delta":
            self.fwm_layers = blocks
        else:
            self.sr_layers = blocks
        self.ff_layers = nn.ModuleList(FeedForward(hidden, width) for _ in range(layers))

    def mixers(self) -> Any:
        return self.sr_layers if "sr_layers" in self._modules else self.fwm_layers


class ProcGenNet(ResNet):
    """The ResNet with a core of fast weights."""

    def __init__(self, kind: str, hidden: int = 16, heads: int = 2, layers: int = 2, width: int = 24):
        super().__init__(15, channels=3)
        self.core: Any = FastWeightCore(257, hidden, heads, layers, width, kind)
        self.resets_every_step = False
        del self.policy, self.baseline  # the heads come after the core, as in the original
        self.make_heads(hidden, 15, None)

    def initial_state(self, batch: int) -> list[Tensor]:
        shapes = [shape for mixer in self.core.mixers() for shape in mixer.shapes()]
        return [torch.zeros(1, batch, *shape) for shape in shapes]

    def core_step(self, x: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        if self.resets_every_step:
            state = [torch.zeros_like(s) for s in state]
        h = self.core.input_proj(x)
        remaining, after = list(state), []
        for mixer, block in zip(self.core.mixers(), self.core.ff_layers, strict=True):
            count = len(mixer.shapes())
            h, new = mixer(h, remaining[:count])
            after += new
            remaining = remaining[count:]
            h = block(h)
        return h, after


def checkpoint_of(
    network: nn.Module, flags: dict[str, Any], updates: int, train: bool = True, momentum: float = 0.0
) -> dict[str, Any]:
    """Return the dict that the original programs save. With `train`, the optimizer has made one step."""
    optimizer = torch.optim.RMSprop(network.parameters(), lr=0.0, momentum=momentum, eps=0.01, alpha=0.99)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    if train:
        for parameter in network.parameters():
            parameter.grad = torch.rand_like(parameter)
        optimizer.step()
    scheduler.last_epoch = updates
    return {
        "model_state_dict": OrderedDict((name, value.clone()) for name, value in network.state_dict().items()),
        "optimizer_state_dict": optimizer.state_dict(),
        "scheduler_state_dict": scheduler.state_dict(),
        "flags": flags,
    }
