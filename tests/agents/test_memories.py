"""Tests of the memory interface, for every memory: sequences equal single steps, resets, state, gradients."""

import pytest
import torch

from bestiary.agents.memories import GRU, LSTM, MEMORIES

T, B, D = 9, 4, 6


def make_memory(name, seed=0, size=D):
    torch.manual_seed(seed)
    return MEMORIES[name](size).eval()


WITH_STATE = [name for name in MEMORIES if make_memory(name).initial_state(1)]


def random_inputs(seed=0):
    """Return x [T,B,D] and done [T,B].

    Row 0 has no reset, row 1 one at the start, row 2 two in succession, row 3 one at the end.
    """
    x = torch.randn(T, B, D, generator=torch.Generator().manual_seed(seed))
    done = torch.zeros(T, B, dtype=torch.bool)
    done[0, 1] = done[3, 2] = done[4, 2] = done[T - 1, 3] = True
    return x, done


def used_state(memory, seed=7):
    """Return the state after a few random steps."""
    x = torch.randn(3, B, D, generator=torch.Generator().manual_seed(seed))
    _, state = memory(x, torch.zeros(3, B, dtype=torch.bool), memory.initial_state(B))
    return state


def assert_close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MEMORIES)
@torch.no_grad()
def test_single_steps_equal_the_sequence(name):
    memory = make_memory(name)
    x, done = random_inputs()
    sequence, after = memory(x, done, used_state(memory))
    assert sequence.shape == (T, B, memory.output_size)
    state = used_state(memory)
    for t in range(T):
        output, state = memory(x[t : t + 1], done[t : t + 1], state)
        assert_close(output[0], sequence[t])
    assert len(state) == len(after)
    for a, b in zip(state, after, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("cut", [1, 4, 8])
@pytest.mark.parametrize("name", MEMORIES)
@torch.no_grad()
def test_two_subsequences_equal_the_sequence(name, cut):
    memory = make_memory(name)
    x, done = random_inputs()
    sequence, after = memory(x, done, used_state(memory))
    first, state = memory(x[:cut], done[:cut], used_state(memory))
    second, end = memory(x[cut:], done[cut:], state)
    assert_close(torch.cat([first, second]), sequence)
    for a, b in zip(end, after, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("name", MEMORIES)
@torch.no_grad()
def test_rows_are_independent(name):
    """The outputs of a row do not depend on the other rows or their resets."""
    memory = make_memory(name)
    x, done = random_inputs()
    state = used_state(memory)
    sequence, after = memory(x, done, state)
    for row in range(B):
        alone, alone_after = memory(x[:, [row]], done[:, [row]], tuple(s[[row]] for s in state))
        assert_close(alone[:, 0], sequence[:, row])
        for a, b in zip(alone_after, after, strict=True):
            assert_close(a[0], b[row])


@pytest.mark.parametrize("name", MEMORIES)
@torch.no_grad()
def test_state_is_a_flat_tuple_with_batch_first(name):
    memory = make_memory(name)
    x, done = random_inputs()
    initial = memory.initial_state(B)
    _, after = memory(x, done, initial)
    for state in (initial, after):
        assert isinstance(state, tuple)
        assert all(isinstance(s, torch.Tensor) and s.shape[0] == B for s in state)
    assert [s.shape for s in after] == [s.shape for s in initial]
    assert [s.dtype for s in after] == [s.dtype for s in initial]


@pytest.mark.parametrize("name", MEMORIES)
def test_initial_state_is_zero(name):
    memory = make_memory(name)
    for batch in (1, 3):
        state = memory.initial_state(batch)
        assert all(s.shape[0] == batch and not s.any() and not s.requires_grad for s in state)


@pytest.mark.parametrize("name", MEMORIES)
@torch.no_grad()
def test_reset_equals_the_initial_state(name):
    """After a reset, outputs and state equal those of a new episode. (Integer state, a step counter, is not reset.)"""
    memory = make_memory(name)
    x, done = random_inputs()
    fresh, fresh_after = memory(x[4:], torch.zeros_like(done[4:]), memory.initial_state(B))
    done[:] = False
    done[4] = True
    output, after = memory(x, done, used_state(memory))
    assert_close(output[4:], fresh)
    for a, b in zip(after, fresh_after, strict=True):
        if a.is_floating_point():
            assert_close(a, b)


@pytest.mark.parametrize("name", WITH_STATE)
@torch.no_grad()
def test_reset_clears_non_finite_state(name):
    """Multiplying the state by zero would not do: 0 * nan is nan."""
    memory = make_memory(name)
    x, done = random_inputs()
    done[0] = True
    state = tuple(torch.full_like(s, float("nan")) if s.is_floating_point() else s for s in used_state(memory))
    output, after = memory(x, done, state)
    assert output.isfinite().all()
    assert all(s.isfinite().all() for s in after)


@pytest.mark.parametrize("name", MEMORIES)
@torch.no_grad()
def test_input_state_is_not_modified(name):
    """The actor stores the state before entry 0 in its rollout."""
    memory = make_memory(name)
    x, done = random_inputs()
    state = used_state(memory)
    before = tuple(s.clone() for s in state)
    memory(x, done, state)
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))


@pytest.mark.parametrize("name", WITH_STATE)
@torch.no_grad()
def test_outputs_depend_on_earlier_inputs_of_the_episode(name):
    """A different first input changes later outputs, unless there is a reset in between."""
    memory = make_memory(name)
    x, done = random_inputs()
    done[:] = False
    other = x.clone()
    other[0] += 1.0
    a, _ = memory(x, done, memory.initial_state(B))
    b, _ = memory(other, done, memory.initial_state(B))
    assert (a[3] - b[3]).abs().amax(dim=-1).min() > 1e-6
    done[2] = True
    a, _ = memory(x, done, memory.initial_state(B))
    b, _ = memory(other, done, memory.initial_state(B))
    assert_close(a[2:], b[2:])


@pytest.mark.parametrize("name", WITH_STATE)
def test_gradient_passes_through_time_but_not_through_a_reset(name):
    memory = make_memory(name)
    x, done = random_inputs()
    x.requires_grad_()
    done[:] = False
    done[3, 1] = True
    output, _ = memory(x, done, memory.initial_state(B))
    (gradient,) = torch.autograd.grad(output[4].square().sum(), x)
    assert (gradient[0, [0, 2, 3]].abs().sum(dim=-1) > 0).all()
    assert not gradient[:3, 1].any()
    assert gradient[3, 1].any()


@pytest.mark.parametrize("name", MEMORIES)
def test_every_parameter_gets_a_gradient(name):
    memory = make_memory(name)
    x, done = random_inputs()
    output, _ = memory(x, done, memory.initial_state(B))
    parameters = dict(memory.named_parameters())
    gradients = torch.autograd.grad(output.square().sum(), list(parameters.values())) if parameters else ()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert gradient.abs().sum() > 0, parameter


@pytest.mark.parametrize(("kind", "num_tensors"), [(LSTM, 2), (GRU, 1)])
@torch.no_grad()
def test_state_shape_with_several_layers(kind, num_tensors):
    memory = kind(D, kind.Options(hidden=5, layers=3))
    state = memory.initial_state(B)
    assert [tuple(s.shape) for s in state] == [(B, 3, 5)] * num_tensors
    x, done = random_inputs()
    output, after = memory(x, done, state)
    assert output.shape == (T, B, 5)
    assert [tuple(s.shape) for s in after] == [(B, 3, 5)] * num_tensors


@torch.no_grad()
def test_lstm_without_resets_equals_pytorch():
    memory = make_memory("lstm")
    x, done = random_inputs()
    expected, _ = memory.core(x)
    output, _ = memory(x, torch.zeros_like(done), memory.initial_state(B))
    assert torch.equal(output, expected)
