"""One contract for every memory: T calls over one step and one call over T steps are the same, resets included."""

import pytest
import torch

from bestiary.agents.memories import GRU, LSTM, MEMORIES

T, B, D = 9, 4, 6


def make(name, seed=0, size=D):
    torch.manual_seed(seed)
    return MEMORIES[name](size).eval()


REMEMBERING = [name for name in MEMORIES if make(name).initial_state(1)]


def random_inputs(seed=0):
    """x [T,B,D] and done [T,B]: row 0 never resets, row 1 at the first entry, row 2 twice running, row 3 at the end."""
    x = torch.randn(T, B, D, generator=torch.Generator().manual_seed(seed))
    done = torch.zeros(T, B, dtype=torch.bool)
    done[0, 1] = done[3, 2] = done[4, 2] = done[T - 1, 3] = True
    return x, done


def used_state(memory, seed=7):
    """A state as a few steps leave it, different in every row."""
    x = torch.randn(3, B, D, generator=torch.Generator().manual_seed(seed))
    _, state = memory(x, torch.zeros(3, B, dtype=torch.bool), memory.initial_state(B))
    return state


def assert_same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MEMORIES)
@torch.no_grad()
def test_steps_equal_the_sequence(name):
    memory = make(name)
    x, done = random_inputs()
    whole, after = memory(x, done, used_state(memory))
    assert whole.shape == (T, B, memory.output_size)
    state = used_state(memory)
    for t in range(T):
        output, state = memory(x[t : t + 1], done[t : t + 1], state)
        assert_same(output[0], whole[t])
    assert len(state) == len(after)
    for a, b in zip(state, after, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("cut", [1, 4, 8])
@pytest.mark.parametrize("name", MEMORIES)
@torch.no_grad()
def test_a_sequence_may_be_cut_anywhere(name, cut):
    """The learner replays rollouts from the state that the actor had: two pieces are the whole."""
    memory = make(name)
    x, done = random_inputs()
    whole, after = memory(x, done, used_state(memory))
    first, state = memory(x[:cut], done[:cut], used_state(memory))
    second, end = memory(x[cut:], done[cut:], state)
    assert_same(torch.cat([first, second]), whole)
    for a, b in zip(end, after, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("name", MEMORIES)
@torch.no_grad()
def test_rows_are_independent(name):
    """Each row alone gives what it gives among the others, whose resets are none of its business."""
    memory = make(name)
    x, done = random_inputs()
    state = used_state(memory)
    whole, after = memory(x, done, state)
    for row in range(B):
        alone, alone_after = memory(x[:, [row]], done[:, [row]], tuple(s[[row]] for s in state))
        assert_same(alone[:, 0], whole[:, row])
        for a, b in zip(alone_after, after, strict=True):
            assert_same(a[0], b[row])


@pytest.mark.parametrize("name", MEMORIES)
@torch.no_grad()
def test_state_is_a_flat_tuple_batch_first(name):
    memory = make(name)
    x, done = random_inputs()
    initial = memory.initial_state(B)
    _, after = memory(x, done, initial)
    for state in (initial, after):
        assert isinstance(state, tuple)
        assert all(isinstance(s, torch.Tensor) and s.shape[0] == B for s in state)
    assert [s.shape for s in after] == [s.shape for s in initial]
    assert [s.dtype for s in after] == [s.dtype for s in initial]


@pytest.mark.parametrize("name", MEMORIES)
def test_initial_state_of_any_batch(name):
    memory = make(name)
    for batch in (1, 3):
        state = memory.initial_state(batch)
        assert all(s.shape[0] == batch and not s.any() and not s.requires_grad for s in state)


@pytest.mark.parametrize("name", MEMORIES)
@torch.no_grad()
def test_reset_really_forgets(name):
    """From a reset on, outputs and state are those of a new beginning, whatever came before. (What counts the steps of an
    unroll goes on: episodes are nothing to it.)"""
    memory = make(name)
    x, done = random_inputs()
    fresh, fresh_after = memory(x[4:], torch.zeros_like(done[4:]), memory.initial_state(B))
    done[:] = False
    done[4] = True
    output, after = memory(x, done, used_state(memory))
    assert_same(output[4:], fresh)
    for a, b in zip(after, fresh_after, strict=True):
        if a.is_floating_point():
            assert_same(a, b)


@pytest.mark.parametrize("name", REMEMBERING)
@torch.no_grad()
def test_reset_forgets_even_what_is_not_finite(name):
    """0 * nan is nan: a state gone wrong must not outlive its episode."""
    memory = make(name)
    x, done = random_inputs()
    done[0] = True
    state = tuple(torch.full_like(s, float("nan")) if s.is_floating_point() else s for s in used_state(memory))
    output, after = memory(x, done, state)
    assert output.isfinite().all()
    assert all(s.isfinite().all() for s in after)


@pytest.mark.parametrize("name", MEMORIES)
@torch.no_grad()
def test_state_given_is_left_as_it_is(name):
    """The actor keeps the state before entry 0 in its rollout."""
    memory = make(name)
    x, done = random_inputs()
    state = used_state(memory)
    before = tuple(s.clone() for s in state)
    memory(x, done, state)
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))


@pytest.mark.parametrize("name", REMEMBERING)
@torch.no_grad()
def test_remembers(name):
    """Another first input changes the last output, unless the episode begins anew in between."""
    memory = make(name)
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
    assert_same(a[2:], b[2:])


@pytest.mark.parametrize("name", REMEMBERING)
def test_gradient_flows_through_time_but_not_through_a_reset(name):
    memory = make(name)
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
def test_every_parameter_learns(name):
    memory = make(name)
    x, done = random_inputs()
    output, _ = memory(x, done, memory.initial_state(B))
    parameters = dict(memory.named_parameters())
    gradients = torch.autograd.grad(output.square().sum(), list(parameters.values())) if parameters else ()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert gradient.abs().sum() > 0, parameter


@pytest.mark.parametrize(("kind", "parts"), [(LSTM, 2), (GRU, 1)])
@torch.no_grad()
def test_layers_and_units(kind, parts):
    memory = kind(D, kind.Options(hidden=5, layers=3))
    state = memory.initial_state(B)
    assert [tuple(s.shape) for s in state] == [(B, 3, 5)] * parts
    x, done = random_inputs()
    output, after = memory(x, done, state)
    assert output.shape == (T, B, 5)
    assert [tuple(s.shape) for s in after] == [(B, 3, 5)] * parts


@torch.no_grad()
def test_lstm_without_resets_is_pytorchs():
    memory = make("lstm")
    x, done = random_inputs()
    expected, _ = memory.core(x)
    output, _ = memory(x, torch.zeros_like(done), memory.initial_state(B))
    assert torch.equal(output, expected)
