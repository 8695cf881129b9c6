"""Tests of the influence-aware memory: d-sets, attention, resets, and equality of single steps and sequences."""

import itertools
from functools import partial

import pytest
import torch

from bestiary.agents.agent import count_parameters
from bestiary.agents.iam import Attention, IAMAgent
from bestiary.agents.memories import GRU, LSTM, NoMemory
from bestiary.agents.torsos import MLP, ResNet, Shallow
from bestiary.config.resolve import resolve
from bestiary.rollout import ActionSpec, ArraySpec, Inputs
from bestiary.runs.option_sources import merge_sources
from bestiary.utils.errors import UserError

T, B, D = 5, 3, 10
SPEC = {"vector": ArraySpec((D,), "float32", sets=(("items", (4, 5, 6)), ("legacy", (0, 4, 5, 6))))}
PLAIN = {"vector": ArraySpec((D,), "float32")}
IMAGES = {"image": ArraySpec((4, 84, 84), "uint8")}
ACTIONS = ActionSpec(tuple("abcd"))
TORSO = partial(MLP, options=MLP.Options(sizes=(16, 8)))
DSETS = ("items", "static", "all", "attention")


def make_agent(dset="auto", spec=SPEC, torso=TORSO, memory=GRU, **options):
    torch.manual_seed(0)
    if memory is not NoMemory:
        memory = partial(memory, options=memory.Options(hidden=7))
    return IAMAgent(spec, ACTIONS, IAMAgent.Options(dset, **options), torso=torso, memory=memory)


def make_inputs(observation, done=None):
    length, batch = next(iter(observation.values())).shape[:2]
    zeros = torch.zeros(length, batch)
    done = torch.zeros(length, batch, dtype=torch.bool) if done is None else done
    return Inputs(observation, zeros, done, zeros.long(), zeros.long())


def random_vectors(seed=0):
    return torch.randn(T, B, D, generator=torch.Generator().manual_seed(seed))


def random_images():
    return torch.randint(256, (T, B, 4, 84, 84), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("memory", [GRU, LSTM, NoMemory])
@pytest.mark.parametrize("dset", DSETS)
@torch.no_grad()
def test_single_steps_equal_the_sequence(dset, memory):
    agent = make_agent(dset, memory=memory, **({"heads": 2} if dset == "attention" else {}))
    done = torch.rand(T, B, generator=torch.Generator().manual_seed(1)) < 0.4
    x = random_vectors()
    sequence, after = agent(make_inputs({"vector": x}, done), agent.initial_state(B))
    state = agent.initial_state(B)
    for t in range(T):
        output, state = agent(make_inputs({"vector": x[t : t + 1]}, done[t : t + 1]), state)
        torch.testing.assert_close(output.value[0], sequence.value[t])
        torch.testing.assert_close(output.distribution.logits[0], sequence.distribution.logits[t])
    for one, other in zip(state, after, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dset", DSETS)
@torch.no_grad()
def test_reset_clears_the_state(dset):
    agent = make_agent(dset)
    x, done = random_vectors(), torch.zeros(T, B, dtype=torch.bool)
    done[2] = True
    sequence, _ = agent(make_inputs({"vector": x}, done), agent.initial_state(B))
    fresh, _ = agent(make_inputs({"vector": x[2:]}, done[2:]), agent.initial_state(B))
    torch.testing.assert_close(sequence.value[2:], fresh.value)


@pytest.mark.parametrize(
    ("dset", "indices"), [("items", {4, 5, 6}), ("auto", {4, 5, 6}), ("legacy", {0, 4, 5, 6}), ("0,7:9", {0, 7, 8})]
)
def test_memory_depends_only_on_the_dset(dset, indices):
    agent = make_agent(dset)
    x = random_vectors().requires_grad_()
    output, _ = agent.memory(
        agent.dset(x.flatten(0, 1)).view(T, B, -1), torch.zeros(T, B).bool(), agent.initial_state(B)
    )
    output.sum().backward()
    assert set(torch.nonzero(x.grad.abs().sum((0, 1))).flatten().tolist()) == indices
    assert agent.memory.core.input_size == len(indices)


def test_value_depends_on_the_whole_observation():
    agent = make_agent("items")
    x = random_vectors().requires_grad_()
    output, _ = agent(make_inputs({"vector": x}), agent.initial_state(B))
    output.value.sum().backward()
    assert (x.grad.abs().sum((0, 1)) > 0).all()


def test_default_dset_is_all_if_the_environment_names_none():
    assert make_agent(spec=PLAIN).dset.output_size == D


@pytest.mark.parametrize("heads", [1, 3])
@torch.no_grad()
def test_attention_over_inputs(heads):
    agent = make_agent("attention", heads=heads)
    x = random_vectors()
    output, _ = agent(make_inputs({"vector": x}), agent.initial_state(B))
    weights = output.extras["attention"]
    assert weights.shape == (T, B, heads, D)
    torch.testing.assert_close(weights.sum(-1), torch.ones(T, B, heads))
    attended, _ = agent.dset(*agent.dset.values_and_keys(x[0]), torch.zeros(B, 7))
    torch.testing.assert_close(attended, torch.einsum("bhd,bd->bh", weights[0], x[0]))


@pytest.mark.parametrize(("torso", "cells", "channels"), [(Shallow, 49, 64), (ResNet, 121, 32)])
@torch.no_grad()
def test_attention_over_the_cells_of_a_feature_map(torso, cells, channels):
    """The output of a head is its weighted cell and its weights: 64 + 49 numbers with the shallow torso."""
    agent = make_agent("auto", IMAGES, torso, heads=2)
    output, _ = agent(make_inputs({"image": random_images()}), agent.initial_state(B))
    weights = output.extras["attention"]
    assert weights.shape == (T, B, 2, cells)
    torch.testing.assert_close(weights.sum(-1), torch.ones(T, B, 2))
    assert agent.memory.core.input_size == 2 * (channels + cells)


@torch.no_grad()
def test_attention_equals_its_formula():
    torch.manual_seed(0)
    attention = Attention(inputs=6, cells=4, heads=1, units=5)
    attention.make_query_layer(3)
    cells, last = torch.randn(1, 6, 2, 2), torch.randn(1, 3)
    _, weights = attention(*attention.values_and_keys(cells), last)
    regions = [cells[0, :, i, j] for i in (0, 1) for j in (0, 1)]
    scores = [
        attention.score[0] @ torch.tanh(attention.key.weight @ v + attention.query.weight @ last[0]) for v in regions
    ]
    torch.testing.assert_close(weights[0, 0], torch.softmax(torch.stack(scores), 0))


def test_gradient_of_attention_passes_through_time():
    """The attention weights of the last step depend on the first observation."""
    agent = make_agent("attention")
    x = random_vectors().requires_grad_()
    output, _ = agent(make_inputs({"vector": x}), agent.initial_state(B))
    (output.extras["attention"][-1] * torch.randn(B, 1, D)).sum().backward()
    assert x.grad[0].abs().sum() > 0
    assert x.grad[-1].abs().sum() > 0
    assert agent.dset.query.weight.grad.abs().sum() > 0


@torch.no_grad()
def test_attention_ignores_the_state_of_the_previous_episode():
    agent = make_agent("attention")
    done = torch.ones(1, B, dtype=torch.bool)
    states = [agent.initial_state(B), tuple(torch.randn_like(s) for s in agent.initial_state(B))]
    maps = [
        agent(make_inputs({"vector": random_vectors()[:1]}, done), state)[0].extras["attention"] for state in states
    ]
    assert torch.equal(*maps)


@torch.no_grad()
def test_static_applies_one_linear_layer_to_each_cell():
    agent = make_agent("static", IMAGES, Shallow, predictors=3)
    assert agent.memory.core.input_size == 3 * 49
    cells = torch.randn(2, 64, 7, 7)
    expected = torch.stack([agent.dset.linear(cells[:, :, i, j]) for i in range(7) for j in range(7)], dim=1)
    torch.testing.assert_close(agent.dset(cells), expected.flatten(1))


def test_number_of_parameters_equals_the_paper():
    """Torso 73 -> 512 -> 256, GRU with 128 units and 24 inputs, heads on 384 features."""
    spec = {"vector": ArraySpec((73,), "float32", sets=(("items", tuple(range(49, 73))),))}
    agent = IAMAgent(
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
        ("4:11", SPEC, TORSO, "this environment has only the inputs 0 to 9"),
        ("12", SPEC, TORSO, "this environment has only the inputs 0 to 9"),
        ("item", SPEC, TORSO, "did you mean items"),
        ("5:2", SPEC, TORSO, "5:2 is empty"),
        ("0:99999999999", SPEC, TORSO, "this environment has only the inputs 0 to 9"),
        ("0:4", IMAGES, Shallow, "expected one of static, all, attention"),
    ],
)
def test_invalid_dsets_are_refused(dset, spec, torso, message):
    with pytest.raises(UserError, match=message):
        make_agent(dset, spec, torso)


@torch.no_grad()
def test_biases_of_the_attention_change_the_weights():
    """The weights with biases are those of the definition: softmax of score . tanh(keys + query), with both biases."""
    agent = make_agent("attention", attention_bias=True)
    x = random_vectors()
    torch.nn.init.normal_(agent.dset.key.bias)
    torch.nn.init.normal_(agent.dset.query.bias)
    output, _ = agent(make_inputs({"vector": x}), agent.initial_state(B))
    key, query = agent.dset.key, agent.dset.query
    context = torch.tanh(x[0] @ key.weight.T + key.bias + query.bias)  # the memory's previous output is zero
    weights = (context @ agent.dset.score[0].T).softmax(-1)
    torch.testing.assert_close(output.extras["attention"][0, :, 0], weights)
    assert not any(name.endswith(("key.bias", "query.bias")) for name in make_agent("attention").state_dict())


def test_biases_without_attention_are_refused():
    with pytest.raises(UserError, match="attention-bias"):
        make_agent("items", attention_bias=True)


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [("iam-bislip", 211_781), ("gru-bislip", 27_013), ("fnn1-bislip", 185_989), ("iam-breakout", 363_365)],
)
def test_presets_have_the_sizes_of_the_published_networks(preset, parameters):
    """73 inputs, 25 of them in the d-set, 4 actions; Breakout: convolutions of 32, 64 and 64 channels, 49 cells.

    warehouse    FNN 73-512-256-64, GRU 25 -> 64, actor 128-64-4, critic 128-1
    Breakout     FNN 3136-64-64-64, attention with 128 units and biases, GRU 113 -> 64, actor 128-64-64-4, critic
                 128-64-64-1; the bias of the attention's score is left out, because softmax removes it
    """

    def linear(*sizes):
        return sum(n * m + m for n, m in itertools.pairwise(sizes))

    def gru(inputs, hidden):
        return 3 * hidden * (inputs + hidden + 2)

    convolutions = (8 * 8 * 4 * 32 + 32) + (4 * 4 * 32 * 64 + 64) + (3 * 3 * 64 * 64 + 64)
    attention = linear(64, 128) + linear(64, 128) + 128
    expected = {
        "iam-bislip": linear(73, 512, 256, 64) + gru(25, 64) + linear(128, 64, 4) + linear(128, 1),
        "gru-bislip": gru(73, 64) + linear(64, 4) + linear(64, 1),
        "fnn1-bislip": linear(73, 512, 256, 64) + linear(64, 4) + linear(64, 1),
        "iam-breakout": convolutions + linear(3136, 64, 64, 64) + attention + gru(113, 64)
        + linear(128, 64, 64, 4) + linear(128, 64, 64, 1),
    }  # fmt: skip
    assert expected[preset] == parameters
    given, origin = merge_sources({"preset": preset})
    assert count_parameters(resolve(given, origin).make_agent()) == parameters
