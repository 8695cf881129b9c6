"""Tests of the attention-augmented agent: shapes, formulas, resets, gradients, learning, and input formats."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from bestiary.agents.attention_agent import AttentionAgent, ConvLSTM, spatial_basis
from bestiary.config.resolve import resolve
from bestiary.rollout import ActionSpec, ArraySpec, Inputs
from bestiary.utils.errors import UserError

T, B = 4, 3
ACTIONS = ActionSpec(tuple("abcdef"))
SMALL = AttentionAgent.Options(
    queries=2, key_channels=3, value_channels=5, basis_frequencies=2, hidden=16, subtract_mean=False
)


def make_agent(options=SMALL, shape=(1, 24, 24)):
    torch.manual_seed(0)
    return AttentionAgent({"image": ArraySpec(shape, "uint8")}, ACTIONS, options)


def make_inputs(shape=(1, 24, 24), done=None, length=T):
    generator = torch.Generator().manual_seed(1)
    image = torch.randint(256, (length, B, *shape), dtype=torch.uint8, generator=generator)
    reward = 10 * torch.randn(length, B, generator=generator)
    action = torch.randint(6, (length, B), generator=generator)
    done = torch.zeros(length, B, dtype=torch.bool) if done is None else done
    return Inputs({"image": image}, reward, done, action, torch.zeros(length, B, dtype=torch.int64))


@pytest.mark.parametrize(("shape", "cells"), [((4, 84, 84), (11, 11)), ((3, 210, 160), (27, 20))])
@torch.no_grad()
def test_sizes_equal_the_paper(shape, cells):
    agent = make_agent(AttentionAgent.Options(), shape)
    assert agent.torso.map_shape == (64, *cells)
    assert agent.answer[0].in_features == 4 * 184 + 4 * 72 + 1 + 6
    assert [tuple(s.shape) for s in agent.initial_state(2)] == [(2, 128, *cells)] * 2 + [(2, 256)] * 2
    output, state = agent(make_inputs(shape, length=1), agent.initial_state(B))
    assert output.extras["attention"].shape == (1, B, 4, cells[0] * cells[1])
    torch.testing.assert_close(output.extras["attention"].sum(-1), torch.ones(1, B, 4))
    assert [s.shape for s in state] == [s.shape for s in agent.initial_state(B)]


@torch.no_grad()
def test_single_steps_equal_the_sequence():
    agent = make_agent()
    done = torch.rand(T, B, generator=torch.Generator().manual_seed(2)) < 0.4
    batch = make_inputs(done=done)
    sequence, after = agent(batch, agent.initial_state(B))
    state = agent.initial_state(B)
    for t in range(T):
        output, state = agent(batch[t : t + 1], state)
        torch.testing.assert_close(output.value[0], sequence.value[t])
        torch.testing.assert_close(output.extras["attention"][0], sequence.extras["attention"][t])
    for one, other in zip(state, after, strict=True):
        torch.testing.assert_close(one, other)


@torch.no_grad()
def test_reset_clears_the_state():
    agent = make_agent()
    done = torch.zeros(T, B, dtype=torch.bool)
    done[2] = True
    batch = make_inputs(done=done)
    sequence, _ = agent(batch, tuple(torch.randn_like(s) for s in agent.initial_state(B)))
    fresh, _ = agent(batch[2:], agent.initial_state(B))
    torch.testing.assert_close(sequence.value[2:], fresh.value)
    torch.testing.assert_close(sequence.extras["attention"][2:], fresh.extras["attention"])


def test_every_parameter_gets_a_gradient():
    agent = make_agent()
    names = dict(agent.named_parameters())
    assert names["core.peepholes"].shape == (3, 8, *agent.torso.map_shape[1:])
    output, _ = agent(make_inputs(), agent.initial_state(B))
    (output.value.sum() + output.distribution.log_probs[..., 0].sum()).backward()
    for name, parameter in names.items():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "functions"), [("cosine", [math.cos]), ("fourier", [math.cos, math.sin])], ids=["cosine", "fourier"]
)
def test_spatial_basis_equals_its_formula(kind, functions):
    waves = [(function, u) for function in functions for u in (1, 2)]
    basis = spatial_basis(3, 5, 2, kind).view(3, 5, len(waves), len(waves))
    for y, x in itertools.product(range(3), range(5)):
        for (k, (f, u)), (j, (g, v)) in itertools.product(enumerate(waves), repeat=2):
            expected = f(u * math.pi * (y + 1) / 3) * g(v * math.pi * (x + 1) / 5)
            assert basis[y, x, k, j] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["fourier", "cosine"])
def test_both_bases_have_64_channels_by_default(kind):
    """The published agent has keys of 8 + 64 channels and values of 120 + 64 channels."""
    agent = make_agent(AttentionAgent.Options(basis=kind), (4, 84, 84))
    assert agent.basis.shape[1] == 64
    assert agent.query[-1].out_features == 4 * (8 + 64)
    assert torch.linalg.matrix_rank(agent.basis) == 64  # no function is a combination of the others


def test_sines_and_cosines_are_the_default():
    assert torch.equal(make_agent(AttentionAgent.Options(), (4, 84, 84)).basis, spatial_basis(11, 11, 4, "fourier"))


@torch.no_grad()
def test_conv_lstm_with_one_cell_is_an_lstm():
    """On a map of one cell only the centre of each filter has an effect."""
    torch.manual_seed(0)
    core = ConvLSTM(3, 2, (1, 1))
    core.peepholes.normal_()
    x, h, c = torch.randn(1, 3, 1, 1), torch.randn(1, 2, 1, 1), torch.randn(1, 2, 1, 1)
    assert core.input.bias is not None
    from_input = core.input.weight[:, :, 1, 1] @ x[0, :, 0, 0] + core.input.bias
    i, f, g, o = (from_input + core.recurrent.weight[:, :, 1, 1] @ h[0, :, 0, 0]).chunk(4)
    p, before = core.peepholes[:, :, 0, 0], c[0, :, 0, 0]
    after = torch.sigmoid(f + p[1] * before) * before + torch.sigmoid(i + p[0] * before) * torch.tanh(g)
    new_h, new_c = core(core.input_gates(x), h, c)
    torch.testing.assert_close(new_c[0, :, 0, 0], after)
    torch.testing.assert_close(new_h[0, :, 0, 0], torch.sigmoid(o + p[2] * after) * torch.tanh(after))


@pytest.mark.parametrize("basis", ["fourier", "cosine"])
def test_learns_to_locate_a_bright_square(basis):
    """A square is in one of four locations; the agent learns to report which one within 200 batches."""
    agent = make_agent(replace(SMALL, basis=basis), shape=(1, 32, 32))
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        location = torch.randint(4, (32,), generator=generator)
        image = torch.zeros(1, 32, 1, 32, 32, dtype=torch.uint8)
        for row, index in enumerate(location.tolist()):
            y, x = 20 * (index // 2) + 4, 20 * (index % 2) + 4
            image[0, row, 0, y : y + 5, x : x + 5] = 255
        zeros = torch.zeros(1, 32)
        batch = Inputs({"image": image}, zeros, zeros.bool(), zeros.long(), zeros.long())
        output, _ = agent(batch, agent.initial_state(32))
        loss = -output.distribution.log_prob(location.unsqueeze(0)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.6  # uniform policy: log 6 = 1.8; ignoring the image: log 4 = 1.4


def test_unsupported_observations_and_components_are_refused():
    with pytest.raises(UserError, match=r"agent aaa needs an image.*--agent basic"):
        AttentionAgent({"vector": ArraySpec((3,), "float32")}, ACTIONS)
    with pytest.raises(UserError, match="--torso: agent aaa has no torso"):
        resolve({"env": "atari/Pong", "agent": "aaa", "torso": "resnet"})
    assert "torso" not in resolve({"env": "atari/Pong", "agent": "aaa", "torso": "x"}, {"torso": "a preset"}).components


@pytest.mark.parametrize(("agent", "gray", "stack"), [("basic", True, 4), ("iam", False, 4), ("aaa", False, 1)])
def test_observations_of_any_agent_may_be_grey_or_coloured(agent, gray, stack):
    config = resolve({"env": "atari/Pong", "agent": agent, "gray": gray, "frame_stack": stack, "frame_size": "105x80"})
    assert config.interface.observation_spec["image"].shape == (stack * (1 if gray else 3), 105, 80)


@pytest.mark.parametrize(
    ("given", "lr", "basic_lr"),
    [({}, 3e-4, 5e-4), ({"algo": "ppo"}, 3e-4, 2.5e-4), ({"lr": 1e-4}, 1e-4, 1e-4), ({"algo.lr": 2e-4}, 2e-4, 2e-4)],
)
def test_default_learning_rate_differs_from_the_basic_agent(given, lr, basic_lr):
    rates = [
        resolve({"env": "atari/Pong", "agent": agent, **given}).make_algorithm().options.lr
        for agent in ("aaa", "basic")
    ]
    assert rates == [lr, basic_lr]
