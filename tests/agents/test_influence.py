"""Influence-aware memory: what its memory sees, how attention asks, and that acting and learning compute the same."""

from functools import partial

import pytest
import torch

from bestiary.agents.agent import count_parameters
from bestiary.agents.influence import Attention, InfluenceAgent
from bestiary.agents.memories import GRU, LSTM, NoMemory
from bestiary.agents.torsos import MLP, ResNet, Shallow
from bestiary.errors import UserError
from bestiary.rollout import ActionSpec, ArraySpec, Inputs

T, B, D = 5, 3, 10
SPEC = {"vector": ArraySpec((D,), "float32", sets=(("items", (4, 5, 6)), ("legacy", (0, 4, 5, 6))))}
PLAIN = {"vector": ArraySpec((D,), "float32")}
IMAGES = {"image": ArraySpec((4, 84, 84), "uint8")}
ACTIONS = ActionSpec(tuple("abcd"))
TORSO = partial(MLP, options=MLP.Options(sizes=(16, 8)))
DSETS = ("items", "static", "all", "attention")


def make(dset="auto", spec=SPEC, torso=TORSO, memory=GRU, **options):
    torch.manual_seed(0)
    if memory is not NoMemory:
        memory = partial(memory, options=memory.Options(hidden=7))
    return InfluenceAgent(spec, ACTIONS, InfluenceAgent.Options(dset, **options), torso=torso, memory=memory)


def inputs_of(observation, done=None):
    length, batch = next(iter(observation.values())).shape[:2]
    zeros = torch.zeros(length, batch)
    done = torch.zeros(length, batch, dtype=torch.bool) if done is None else done
    return Inputs(observation, zeros, done, zeros.long(), zeros.long())


def vectors(seed=0):
    return torch.randn(T, B, D, generator=torch.Generator().manual_seed(seed))


def pictures():
    return torch.randint(256, (T, B, 4, 84, 84), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("memory", [GRU, LSTM, NoMemory])
@pytest.mark.parametrize("dset", DSETS)
@torch.no_grad()
def test_one_step_at_a_time_is_the_same(dset, memory):
    agent = make(dset, memory=memory, **({"heads": 2} if dset == "attention" else {}))
    done = torch.rand(T, B, generator=torch.Generator().manual_seed(1)) < 0.4
    x = vectors()
    whole, after = agent(inputs_of({"vector": x}, done), agent.initial_state(B))
    state = agent.initial_state(B)
    for t in range(T):
        output, state = agent(inputs_of({"vector": x[t : t + 1]}, done[t : t + 1]), state)
        torch.testing.assert_close(output.value[0], whole.value[t])
        torch.testing.assert_close(output.distribution.logits[0], whole.distribution.logits[t])
    for one, other in zip(state, after, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dset", DSETS)
@torch.no_grad()
def test_a_reset_forgets_everything(dset):
    agent = make(dset)
    x, done = vectors(), torch.zeros(T, B, dtype=torch.bool)
    done[2] = True
    whole, _ = agent(inputs_of({"vector": x}, done), agent.initial_state(B))
    fresh, _ = agent(inputs_of({"vector": x[2:]}, done[2:]), agent.initial_state(B))
    torch.testing.assert_close(whole.value[2:], fresh.value)


@pytest.mark.parametrize(
    ("dset", "seen"), [("items", {4, 5, 6}), ("auto", {4, 5, 6}), ("legacy", {0, 4, 5, 6}), ("0,7:9", {0, 7, 8})]
)
def test_the_memory_sees_the_d_set_and_nothing_else(dset, seen):
    agent = make(dset)
    x = vectors().requires_grad_()
    remembered = agent.memory(
        agent.dset(x.flatten(0, 1)).view(T, B, -1), torch.zeros(T, B).bool(), agent.initial_state(B)
    )
    remembered[0].sum().backward()
    assert set(torch.nonzero(x.grad.abs().sum((0, 1))).flatten().tolist()) == seen
    assert agent.memory.core.input_size == len(seen)


def test_the_present_is_seen_whole():
    agent = make("items")
    x = vectors().requires_grad_()
    output, _ = agent(inputs_of({"vector": x}), agent.initial_state(B))
    output.value.sum().backward()
    assert (x.grad.abs().sum((0, 1)) > 0).all()


def test_without_a_list_of_the_environments_the_memory_sees_all():
    assert make(spec=PLAIN).dset.output_size == D


@pytest.mark.parametrize("heads", [1, 3])
@torch.no_grad()
def test_attention_over_inputs(heads):
    agent = make("attention", heads=heads)
    x = vectors()
    output, _ = agent(inputs_of({"vector": x}), agent.initial_state(B))
    weights = output.extras["attention"]
    assert weights.shape == (T, B, heads, D)
    torch.testing.assert_close(weights.sum(-1), torch.ones(T, B, heads))
    let_through, _ = agent.dset(*agent.dset.prepare(x[0]), torch.zeros(B, 7))
    torch.testing.assert_close(let_through, torch.einsum("bhd,bd->bh", weights[0], x[0]))


@pytest.mark.parametrize(("torso", "cells", "channels"), [(Shallow, 49, 64), (ResNet, 121, 32)])
@torch.no_grad()
def test_attention_over_the_cells_of_a_picture(torso, cells, channels):
    """A head gives the memory its patch and its weights: 64 + 49 numbers with the three convolutions."""
    agent = make("auto", IMAGES, torso, heads=2)
    output, _ = agent(inputs_of({"image": pictures()}), agent.initial_state(B))
    weights = output.extras["attention"]
    assert weights.shape == (T, B, 2, cells)
    torch.testing.assert_close(weights.sum(-1), torch.ones(T, B, 2))
    assert agent.memory.core.input_size == 2 * (channels + cells)


@torch.no_grad()
def test_attention_by_its_formula():
    torch.manual_seed(0)
    attention = Attention(inputs=6, cells=4, heads=1, units=5)
    attention.listen_to(3)
    cells, last = torch.randn(1, 6, 2, 2), torch.randn(1, 3)
    _, weights = attention(*attention.prepare(cells), last)
    regions = [cells[0, :, i, j] for i in (0, 1) for j in (0, 1)]
    scores = [
        attention.score[0] @ torch.tanh(attention.key.weight @ v + attention.query.weight @ last[0]) for v in regions
    ]
    torch.testing.assert_close(weights[0, 0], torch.softmax(torch.stack(scores), 0))


def test_attention_learns_through_time():
    """What is looked at now depends on what was seen before, and the gradient knows."""
    agent = make("attention")
    x = vectors().requires_grad_()
    output, _ = agent(inputs_of({"vector": x}), agent.initial_state(B))
    (output.extras["attention"][-1] * torch.randn(B, 1, D)).sum().backward()
    assert x.grad[0].abs().sum() > 0
    assert x.grad[-1].abs().sum() > 0
    assert agent.dset.query.weight.grad.abs().sum() > 0


@torch.no_grad()
def test_attention_does_not_ask_with_another_episodes_memory():
    agent = make("attention")
    done = torch.ones(1, B, dtype=torch.bool)
    states = [agent.initial_state(B), tuple(torch.randn_like(s) for s in agent.initial_state(B))]
    maps = [agent(inputs_of({"vector": vectors()[:1]}, done), state)[0].extras["attention"] for state in states]
    assert torch.equal(*maps)


@torch.no_grad()
def test_static_is_one_linear_layer_of_each_cell():
    agent = make("static", IMAGES, Shallow, predictors=3)
    assert agent.memory.core.input_size == 3 * 49
    cells = torch.randn(2, 64, 7, 7)
    expected = torch.stack([agent.dset.linear(cells[:, :, i, j]) for i in range(7) for j in range(7)], dim=1)
    torch.testing.assert_close(agent.dset(cells), expected.flatten(1))


def test_parameters_of_the_papers_agent():
    """73 -> 512 -> 256 beside a GRU of 128 on 24 inputs; the heads on 384."""
    spec = {"vector": ArraySpec((73,), "float32", sets=(("items", tuple(range(49, 73))),))}
    agent = InfluenceAgent(
        spec,
        ACTIONS,
        torso=partial(MLP, options=MLP.Options(sizes=(512, 256))),
        memory=partial(GRU, options=GRU.Options(hidden=128)),
    )
    torso = 73 * 512 + 512 + 512 * 256 + 256
    memory = 3 * (24 * 128 + 128 * 128 + 2 * 128)
    assert count_parameters(agent.torso) == torso
    assert count_parameters(agent) == torso + memory + 384 * 5 + 5


@pytest.mark.parametrize(
    ("dset", "spec", "torso", "message"),
    [
        ("4:11", SPEC, TORSO, "this environment has inputs 0 to 9"),
        ("12", SPEC, TORSO, "this environment has inputs 0 to 9"),
        ("item", SPEC, TORSO, "did you mean items"),
        ("5:2", SPEC, TORSO, "there is nothing in 5:2"),
        ("0:99999999999", SPEC, TORSO, "this environment has inputs 0 to 9"),
        ("0:4", IMAGES, Shallow, "of a picture, the memory sees static, all, attention"),
    ],
)
def test_bad_d_sets_get_one_clear_line(dset, spec, torso, message):
    with pytest.raises(UserError, match=message):
        make(dset, spec, torso)
