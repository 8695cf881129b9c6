"""The attention-augmented agent: shapes, its formulas, resets, gradients, and that it learns to look."""

import math

import pytest
import torch

from bestiary.agents.attention import AttentionAgent, ConvLSTM, spatial_basis
from bestiary.errors import UserError
from bestiary.resolve import resolve
from bestiary.rollout import ActionSpec, ArraySpec, Inputs

T, B = 4, 3
ACTIONS = ActionSpec(tuple("abcdef"))
SMALL = AttentionAgent.Options(queries=2, keys=3, values=5, basis=2, hidden=16, center=False)


def make(options=SMALL, shape=(1, 24, 24)):
    torch.manual_seed(0)
    return AttentionAgent({"image": ArraySpec(shape, "uint8")}, ACTIONS, options)


def inputs(shape=(1, 24, 24), done=None, length=T):
    generator = torch.Generator().manual_seed(1)
    image = torch.randint(256, (length, B, *shape), dtype=torch.uint8, generator=generator)
    reward = 10 * torch.randn(length, B, generator=generator)
    action = torch.randint(6, (length, B), generator=generator)
    done = torch.zeros(length, B, dtype=torch.bool) if done is None else done
    return Inputs({"image": image}, reward, done, action, torch.zeros(length, B, dtype=torch.int64))


@pytest.mark.parametrize(("shape", "cells"), [((4, 84, 84), (11, 11)), ((3, 210, 160), (27, 20))])
@torch.no_grad()
def test_sizes_of_the_paper(shape, cells):
    agent = make(AttentionAgent.Options(), shape)
    assert agent.torso.map_shape == (64, *cells)
    assert agent.answer[0].in_features == 4 * 184 + 4 * 72 + 1 + 6
    assert [tuple(s.shape) for s in agent.initial_state(2)] == [(2, 128, *cells)] * 2 + [(2, 256)] * 2
    output, state = agent(inputs(shape, length=1), agent.initial_state(B))
    assert output.extras["attention"].shape == (1, B, 4, cells[0] * cells[1])
    torch.testing.assert_close(output.extras["attention"].sum(-1), torch.ones(1, B, 4))
    assert [s.shape for s in state] == [s.shape for s in agent.initial_state(B)]


@torch.no_grad()
def test_one_step_at_a_time_is_the_same():
    agent = make()
    done = torch.rand(T, B, generator=torch.Generator().manual_seed(2)) < 0.4
    batch = inputs(done=done)
    together, after = agent(batch, agent.initial_state(B))
    state = agent.initial_state(B)
    for t in range(T):
        output, state = agent(batch[t : t + 1], state)
        torch.testing.assert_close(output.value[0], together.value[t])
        torch.testing.assert_close(output.extras["attention"][0], together.extras["attention"][t])
    for one, other in zip(state, after, strict=True):
        torch.testing.assert_close(one, other)


@torch.no_grad()
def test_a_reset_forgets_everything():
    agent = make()
    done = torch.zeros(T, B, dtype=torch.bool)
    done[2] = True
    batch = inputs(done=done)
    together, _ = agent(batch, tuple(torch.randn_like(s) for s in agent.initial_state(B)))
    fresh, _ = agent(batch[2:], agent.initial_state(B))
    torch.testing.assert_close(together.value[2:], fresh.value)
    torch.testing.assert_close(together.extras["attention"][2:], fresh.extras["attention"])


def test_everything_is_a_parameter_and_learns():
    agent = make()
    names = dict(agent.named_parameters())
    assert names["core.peepholes"].shape == (3, 8, *agent.torso.map_shape[1:])
    output, _ = agent(inputs(), agent.initial_state(B))
    (output.value.sum() + output.distribution.log_probs[..., 0].sum()).backward()
    for name, parameter in names.items():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@torch.no_grad()
def test_the_basis_by_its_formula():
    basis = spatial_basis(3, 5, 2).view(3, 5, 2, 2)
    for y, x, u, v in ((0, 0, 1, 1), (2, 4, 2, 1), (1, 3, 1, 2)):
        expected = math.cos(u * math.pi * (y + 1) / 3) * math.cos(v * math.pi * (x + 1) / 5)
        assert basis[y, x, u - 1, v - 1] == pytest.approx(expected, abs=1e-6)


@torch.no_grad()
def test_the_convolutional_lstm_of_one_cell_is_an_lstm():
    """On a map of one cell, only the middle of each filter counts."""
    torch.manual_seed(0)
    core = ConvLSTM(3, 2, (1, 1))
    core.peepholes.normal_()
    x, h, c = torch.randn(1, 3, 1, 1), torch.randn(1, 2, 1, 1), torch.randn(1, 2, 1, 1)
    assert core.input.bias is not None
    wide = core.input.weight[:, :, 1, 1] @ x[0, :, 0, 0] + core.input.bias
    i, f, g, o = (wide + core.recurrent.weight[:, :, 1, 1] @ h[0, :, 0, 0]).chunk(4)
    p, before = core.peepholes[:, :, 0, 0], c[0, :, 0, 0]
    after = torch.sigmoid(f + p[1] * before) * before + torch.sigmoid(i + p[0] * before) * torch.tanh(g)
    new_h, new_c = core(core.listen(x), h, c)
    torch.testing.assert_close(new_c[0, :, 0, 0], after)
    torch.testing.assert_close(new_h[0, :, 0, 0], torch.sigmoid(o + p[2] * after) * torch.tanh(after))


def test_it_learns_to_tell_where_a_light_is():
    """Four places, one lit at a time: which one is learnt within a hundred batches."""
    agent = make(shape=(1, 32, 32))
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        place = torch.randint(4, (32,), generator=generator)
        image = torch.zeros(1, 32, 1, 32, 32, dtype=torch.uint8)
        for row, where in enumerate(place.tolist()):
            y, x = 20 * (where // 2) + 4, 20 * (where % 2) + 4
            image[0, row, 0, y : y + 5, x : x + 5] = 255
        zeros = torch.zeros(1, 32)
        batch = Inputs({"image": image}, zeros, zeros.bool(), zeros.long(), zeros.long())
        output, _ = agent(batch, agent.initial_state(32))
        loss = -output.distribution.log_prob(place.unsqueeze(0)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.6  # chance is log 6 = 1.8 at first, log 4 = 1.4 when blind


def test_what_it_cannot_see_or_be_made_of():
    with pytest.raises(UserError, match=r"agent aaa needs an image.*--agent basic"):
        AttentionAgent({"vector": ArraySpec((3,), "float32")}, ACTIONS)
    with pytest.raises(UserError, match="unknown option --torso: agent aaa has no torso to choose"):
        resolve({"env": "atari/Pong", "agent": "aaa", "torso": "resnet"})
    assert "torso" not in resolve({"env": "atari/Pong", "agent": "aaa", "torso": "x"}, {"torso": "a preset"}).parts


@pytest.mark.parametrize(
    ("agent", "words", "gray", "stack"),
    [("basic", "gray-stack", True, 4), ("iam", "rgb-stack", False, 4), ("aaa", "rgb-last", False, 1)],
)
def test_input_formats_of_any_agent(agent, words, gray, stack):
    config = resolve({"env": "atari/Pong", "agent": agent, "input": words, "frame_size": "105x80"})
    assert (config.env_options.gray, config.env_options.frame_stack) == (gray, stack)
    pool = config.make_pool(1, 0)
    assert pool.observation_spec["image"].shape == (stack * (1 if gray else 3), 105, 80)
    pool.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"env": "atari/Pong", "input": "rgb"}, "--input rgb: there is gray-stack, rgb-stack, rgb-last"),
        ({"env": "toy/catch", "input": "rgb-last"}, "is for Atari"),
        ({"env": "atari/Pong", "input": "rgb-last", "gray": True}, "--input rgb-last and --gray True contradict"),
    ],
)
def test_inputs_that_cannot_be(given, message):
    with pytest.raises(UserError, match=message):
        resolve(given)


@pytest.mark.parametrize(
    ("given", "lr", "others"),
    [({}, 3e-4, 5e-4), ({"algo": "ppo"}, 3e-4, 2.5e-4), ({"lr": 1e-4}, 1e-4, 1e-4), ({"algo.lr": 2e-4}, 2e-4, 2e-4)],
)
def test_it_has_a_learning_rate_of_its_own_unless_one_is_given(given, lr, others):
    rates = [
        resolve({"env": "atari/Pong", "agent": agent, **given}).make_algorithm().options.lr
        for agent in ("aaa", "basic")
    ]
    assert rates == [lr, others]
