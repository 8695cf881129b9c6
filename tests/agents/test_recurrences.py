"""GRU and LSTM against PyTorch's own layers and against finite differences, with resets."""

import pytest
import torch

from bestiary.agents.memories import GRU, LSTM

D, H = 4, 5


def make(part, layers: int = 1):
    torch.manual_seed(0)
    return part(D, part.Options(hidden=H, layers=layers)).double()


def inputs(part, T: int, B: int, layers: int = 1):
    x = torch.randn(T, B, D, dtype=torch.float64, requires_grad=True)
    state = tuple(torch.randn(B, layers, H, dtype=torch.float64, requires_grad=True) for _ in range(part.parts))
    return x, state


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("part", [GRU, LSTM])
def test_without_resets_it_is_pytorchs_layer(part, layers):
    memory = make(part, layers)
    x, state = inputs(part, 6, 3, layers)
    y, after = memory(x, torch.zeros(6, 3, dtype=torch.bool), state)
    layered = tuple(s.transpose(0, 1).contiguous() for s in state)
    expected, last = memory.core(x, layered if part is LSTM else layered[0])
    torch.testing.assert_close(y, expected)
    for mine, theirs in zip(after, last if part is LSTM else (last,), strict=True):
        torch.testing.assert_close(mine, theirs.transpose(0, 1))
    weigh = [torch.randn_like(t) for t in (y, *after)]
    leaves = [x, *state, *memory.parameters()]
    loss = sum((w * t).sum() for w, t in zip(weigh, (y, *after), strict=True))
    theirs = (expected, *(t.transpose(0, 1) for t in (last if part is LSTM else (last,))))
    same = sum((w * t).sum() for w, t in zip(weigh, theirs, strict=True))
    for mine, other in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(same, leaves), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("part", [GRU, LSTM])
def test_gradients_with_resets_by_finite_differences(part):
    memory = make(part)
    x, state = inputs(part, 5, 3)
    done = torch.tensor([[1, 0, 0], [0, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 0]], dtype=torch.bool)

    def run(x, *leaves):
        y, after = memory(x, done, leaves[: part.parts])
        return (y, *after)

    assert torch.autograd.gradcheck(run, (x, *state, *memory.parameters()))


@pytest.mark.parametrize("part", [GRU, LSTM])
def test_nothing_crosses_a_reset(part):
    memory = make(part)
    x, state = inputs(part, 4, 2)
    done = torch.zeros(4, 2, dtype=torch.bool)
    done[2, 0] = True
    y, _ = memory(x, done, state)
    (gradient,) = torch.autograd.grad(y[2:, 0].sum(), x)
    assert gradient[:2, 0].abs().max() == 0
    fresh, _ = memory(x[2:, :1], torch.zeros(2, 1, dtype=torch.bool), memory.initial_state(1))
    torch.testing.assert_close(y[2:, :1], fresh)


@pytest.mark.parametrize("part", [GRU, LSTM])
def test_half_precision_around_it_does_not_reach_in(part):
    memory = make(part).float()
    x = torch.randn(3, 2, D)
    done = torch.zeros(3, 2, dtype=torch.bool)
    plain, _ = memory(x, done, memory.initial_state(2))
    with torch.autocast("cpu", torch.bfloat16):
        y, state = memory(x, done, memory.initial_state(2))
    assert torch.equal(y, plain)
    assert all(s.dtype == torch.float32 for s in state)
