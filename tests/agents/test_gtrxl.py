"""GTrXL: slow implementation with one step at a time, bounded cache, resets inside of the sequence, gates, options."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bestiary.agents.memories import GTrXL
from bestiary.agents.memories.gtrxl import Gate, position_encoding
from bestiary.config.resolve import resolve
from bestiary.utils.errors import UserError

T, B, D, M = 11, 3, 5, 4
SIZES: dict[str, Any] = {"hidden": 8, "layers": 2, "heads": 2, "ff": 6, "cache": M}


def make_memory(**options: Any) -> GTrXL:
    torch.manual_seed(0)
    memory = GTrXL(D, GTrXL.Options(**{**SIZES, **options})).double()
    layer: Any
    for layer in memory.layers:
        torch.nn.init.normal_(layer.content_bias)
        torch.nn.init.normal_(layer.position_bias)
    return memory


def random_sequence(reset_rate: float = 0.2, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, B, D, generator=generator, dtype=torch.float64)
    return x, torch.rand(T, B, generator=generator) < reset_rate


def slow_gate(gate: Gate, x: Tensor, y: Tensor) -> Tensor:
    w_r, w_z, w_h = gate.of_y.weight.split(len(x))
    u_r, u_z = gate.of_x.weight.split(len(x))
    r = torch.sigmoid(w_r @ y + u_r @ x)
    z = torch.sigmoid(w_z @ y + u_z @ x - gate.bias)
    return (1 - z) * x + z * torch.tanh(w_h @ y + gate.of_reset_x.weight @ (r * x))


def slow_layer(layer: Any, history: list[Tensor]) -> Tensor:
    """Return the output at the last step of `history`, the inputs of the layer at the steps of one episode."""
    x, entries = history[-1], [layer.attention_norm(h) for h in history[-1 - M :]]
    size = len(x) // layer.heads
    query = (layer.query.weight @ entries[-1]).split(size)
    heads = []
    for h in range(layer.heads):
        scores, values = [], []
        for d, entry in enumerate(reversed(entries)):
            key, value = ((layer.key_value.weight @ entry).split(size)[i] for i in (h, layer.heads + h))
            position = (layer.position.weight @ layer.encoding[d]).split(size)[h]
            score = (query[h] + layer.content_bias[h]) @ key + (query[h] + layer.position_bias[h]) @ position
            scores.append(score / math.sqrt(size))
            values.append(value)
        weights = torch.stack(scores).softmax(0)
        heads.append(sum(w * v for w, v in zip(weights, values, strict=True)))
    x = slow_gate(layer.attention_gate, x, torch.relu(layer.project.weight @ torch.cat(heads)))
    return slow_gate(layer.mlp_gate, x, layer.mlp(x))


@pytest.mark.parametrize("reset_rate", [0.0, 0.2, 1.0])
def test_outputs_equal_a_slow_implementation(reset_rate: float) -> None:
    """The slow implementation stores all inputs of each layer since the start of the episode."""
    memory = make_memory()
    x, done = random_sequence(reset_rate)
    y, _ = memory(x, done, tuple(s.double() for s in memory.initial_state(B)))
    for b in range(B):
        histories: list[list[Tensor]] = [[], []]
        for t in range(T):
            if done[t, b]:
                histories = [[], []]
            h = memory.input(x[t, b])
            for layer, history in zip(memory.layers, histories, strict=True):
                history.append(h)
                h = slow_layer(layer, history)
            torch.testing.assert_close(y[t, b], h)


@pytest.mark.parametrize("length", [1, 2, 4, 5, 7])
def test_pieces_of_any_length_equal_the_sequence(length: int) -> None:
    """Pieces that are shorter and longer than the cache, with resets in them."""
    memory = make_memory()
    x, done = random_sequence()
    start = tuple(s.double() for s in memory.initial_state(B))
    expected, last = memory(x, done, start)
    state, pieces = start, []
    for t in range(0, T, length):
        y, state = memory(x[t : t + length], done[t : t + length], state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces), expected)
    for a, b in zip(state, last, strict=True):
        torch.testing.assert_close(a, b)


def test_a_layer_sees_at_most_the_cache() -> None:
    """With L layers, an output depends on at most L * M earlier steps."""
    for layers in (1, 2):
        memory = make_memory(layers=layers)
        x = random_sequence()[0].requires_grad_()
        y, _ = memory(x, torch.zeros(T, B, dtype=torch.bool), tuple(s.double() for s in memory.initial_state(B)))
        (gradient,) = torch.autograd.grad(y[-1].square().sum(), x)
        reached = gradient.abs().sum((1, 2)) > 0
        assert reached.tolist() == [t >= T - 1 - layers * M for t in range(T)]


def test_nothing_before_a_reset_is_used() -> None:
    memory = make_memory()
    x, done = random_sequence(0.0)
    done[6] = True
    state = tuple(s.double() for s in memory.initial_state(B))
    (gradient,) = torch.autograd.grad(memory(x.requires_grad_(), done, state)[0][6:].square().sum(), x)
    assert not gradient[:6].any()
    _, after = memory(x, done, state)
    _, fresh = memory(x[6:], done[6:], state)
    for a, b in zip(after, fresh, strict=True):
        torch.testing.assert_close(a, b)
    assert after[-1].tolist() == [4.0] * B


def test_state_of_an_old_episode_may_contain_nan() -> None:
    memory = make_memory()
    x, done = random_sequence(0.0)
    done[0] = True
    broken = tuple(torch.full_like(s, math.nan).double() for s in memory.initial_state(B)[:-1])
    y, state = memory(x[:1], done[:1], (*broken, torch.full((B,), 4.0, dtype=torch.float64)))
    assert y.isfinite().all()
    assert all(s.isfinite().all() for s in state)


def test_layers_start_near_the_identity() -> None:
    gate = Gate(16, 8.0)
    x, y = torch.randn(2, 16), torch.randn(2, 16)
    torch.testing.assert_close(gate(x, y), x, rtol=0, atol=0.02)
    assert not torch.allclose(Gate(16, -8.0)(x, y), x, atol=0.5)


def test_position_encoding() -> None:
    encoding = position_encoding(3, 4)
    expected = [[f(d * rate) for f in (math.sin, math.cos) for rate in (1.0, 0.01)] for d in range(3)]
    torch.testing.assert_close(encoding, torch.tensor(expected))


def test_heads_must_divide_the_features() -> None:
    with pytest.raises(UserError, match=r"--memory.heads 3: must divide --memory.hidden 128; try --memory.heads 2"):
        resolve({"env": "toy/recall", "memory": "gtrxl", "memory.heads": 3})
