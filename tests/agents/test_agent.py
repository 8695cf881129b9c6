"""Tests of the basic agent: inputs, masking, initialisation, and equality of single steps and sequences."""

from functools import partial

import pytest
import torch

from bestiary.agents.agent import BasicAgent
from bestiary.agents.iam import IAMAgent
from bestiary.agents.memories import MEMORIES
from bestiary.agents.torsos import MLP, TORSOS, ResNet
from bestiary.rollout import ActionSpec, ArraySpec, Inputs

T, B, A = 6, 3, 4
SPEC = {"vector": ArraySpec((5,), "float32")}
IMAGES = {"image": ArraySpec((1, 36, 36), "uint8")}
ACTIONS = ActionSpec(tuple("abcd"))


def make_agent(memory="none", torso=None, extra_inputs="auto", spec=SPEC):
    torch.manual_seed(0)
    torso = torso or partial(MLP, options=MLP.Options(width=16))
    return BasicAgent(spec, ACTIONS, BasicAgent.Options(extra_inputs), torso=torso, memory=MEMORIES[memory]).eval()


def random_inputs(spec=SPEC, seed=0):
    g = torch.Generator().manual_seed(seed)
    return Inputs(
        {
            kind: torch.randn(T, B, *s.shape, generator=g)
            if s.dtype == "float32"
            else torch.randint(256, (T, B, *s.shape), dtype=torch.uint8, generator=g)
            for kind, s in spec.items()
        },
        reward=torch.randn(T, B, generator=g),
        done=torch.rand(T, B, generator=g) < 0.3,
        last_action=torch.randint(A, (T, B), generator=g),
        task=torch.zeros(T, B, dtype=torch.int64),
    )


def entry(inputs, t):
    """Return entry t as inputs [1,B]."""
    return Inputs(
        {kind: x[t : t + 1] for kind, x in inputs.observation.items()},
        inputs.reward[t : t + 1],
        inputs.done[t : t + 1],
        inputs.last_action[t : t + 1],
        inputs.task[t : t + 1],
    )


@pytest.mark.parametrize("memory", MEMORIES)
@torch.no_grad()
def test_output_and_state_shapes(memory):
    agent = make_agent(memory)
    output, state = agent(random_inputs(), agent.initial_state(B))
    assert output.distribution.logits.shape == (T, B, A)
    assert output.value.shape == (T, B)
    assert [s.shape for s in state] == [s.shape for s in agent.initial_state(B)]


@pytest.mark.parametrize("memory", MEMORIES)
@torch.no_grad()
def test_single_steps_equal_the_sequence(memory):
    """T calls with one step (actor) and one call with T steps (learner) give the same policy and values."""
    agent = make_agent(memory)
    inputs = random_inputs()
    assert inputs.done[1:].any()
    sequence, _ = agent(inputs, agent.initial_state(B))
    state = agent.initial_state(B)
    for t in range(T):
        output, state = agent(entry(inputs, t), state)
        torch.testing.assert_close(output.value[0], sequence.value[t], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(output.distribution.logits[0], sequence.distribution.logits[t], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("field", ["reward", "last_action"])
@torch.no_grad()
def test_last_reward_and_action_are_masked_at_episode_starts(field):
    """At entries with done, last reward and last action belong to the previous episode and have no effect."""
    agent = make_agent()
    inputs = random_inputs()
    before, _ = agent(inputs, ())
    changed = random_inputs()
    setattr(changed, field, (getattr(changed, field) + 1) % A)
    after, _ = agent(changed, ())
    same = torch.isclose(before.value, after.value, rtol=0, atol=1e-7)
    assert inputs.done.any()
    assert (~inputs.done).any()
    assert torch.equal(same, inputs.done)


@torch.no_grad()
def test_masked_features_are_zero():
    agent = make_agent()
    inputs = random_inputs()
    inputs.done[:] = True
    output, _ = agent(inputs, ())
    features = torch.cat(
        [agent.torso({"vector": inputs.observation["vector"].flatten(0, 1)}), torch.zeros(T * B, 1 + A)], 1
    )
    torch.testing.assert_close(output.value.flatten(), agent.critic(features, None).value)


@torch.no_grad()
def test_order_of_features():
    """Features are the torso's output, the reward clamped to [-1,1] and the one-hot last action, in this order."""
    agent = make_agent()
    inputs = random_inputs()
    inputs.done[:] = False
    inputs.reward *= 5
    assert inputs.reward.abs().max() > 1
    one_hot = torch.eye(A)[inputs.last_action]
    torso = agent.torso({"vector": inputs.observation["vector"].flatten(0, 1)}).view(T, B, -1)
    features = torch.cat([torso, inputs.reward.clamp(-1, 1)[..., None], one_hot], dim=-1)
    output, _ = agent(inputs, ())
    torch.testing.assert_close(output.distribution.logits, agent.policy(features))
    torch.testing.assert_close(output.value, agent.critic(features, None).value)


@pytest.mark.parametrize(
    ("extra_inputs", "uses_last_reward", "uses_last_action"),
    [("reward+action", True, True), ("reward", True, False), ("action", False, True), ("none", False, False)],
)
@torch.no_grad()
def test_extra_inputs(extra_inputs, uses_last_reward, uses_last_action):
    agent = make_agent(extra_inputs=extra_inputs)
    assert agent.memory.output_size == 16 + uses_last_reward + A * uses_last_action
    given, other = random_inputs(), random_inputs()
    given.done[:] = other.done[:] = False
    other.reward = other.reward + 0.1
    assert uses_last_reward != torch.equal(agent(given, ())[0].value, agent(other, ())[0].value)
    other = random_inputs()
    other.done[:] = False
    other.last_action = (other.last_action + 1) % A
    assert uses_last_action != torch.equal(agent(given, ())[0].value, agent(other, ())[0].value)


def test_auto_extra_inputs_are_those_of_the_published_agent():
    resnet = make_agent(torso=ResNet, spec=IMAGES)
    assert (resnet.uses_last_reward, resnet.uses_last_action) == (True, False)
    shallow = make_agent(torso=TORSOS["shallow"], spec=IMAGES)
    assert (shallow.uses_last_reward, shallow.uses_last_action) == (True, True)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("torso", TORSOS)
def test_every_parameter_gets_a_gradient(torso, memory):
    agent = make_agent(memory, TORSOS[torso], spec=IMAGES)
    inputs = random_inputs(IMAGES)
    output, _ = agent(inputs, agent.initial_state(B))
    (output.distribution.logits.square().sum() + output.value.square().sum()).backward()
    for name, parameter in agent.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_orthogonal_initialisation():
    agent = BasicAgent({"image": ArraySpec((4, 84, 84), "uint8")}, ACTIONS)
    for module, gain in ((agent.torso.layers[0], 2**0.5), (agent.torso.convolutions[2], 2**0.5), (agent.policy, 0.01)):
        rows = module.weight.detach().flatten(1)
        assert torch.allclose(rows @ rows.T, gain**2 * torch.eye(len(rows)), atol=1e-4)
        assert not module.bias.detach().any()
    default = BasicAgent(IMAGES, ACTIONS, BasicAgent.Options(init="torch"))
    assert default.policy.bias.detach().any()


@pytest.mark.parametrize(
    ("activation", "function"), [("tanh", torch.tanh), ("relu", torch.relu), ("none", torch.clone)]
)
@pytest.mark.parametrize("agent_class", [BasicAgent, IAMAgent])
def test_layers_before_the_heads(agent_class, activation, function):
    """The logits and values are those of the layers applied by hand; without the options, the heads are linear."""
    torch.manual_seed(0)
    options = agent_class.Options(policy_layers=(8, 5), value_layers=(3,), head_activation=activation)
    agent = agent_class(SPEC, ACTIONS, options, torso=MLP, memory=MEMORIES["gru"])
    features = {}

    def keep(name, module):
        module.register_forward_hook(lambda _, inputs, output: features.update({name: (inputs[0], output)}))

    for name in ("policy_mlp", "value_mlp", "policy"):
        keep(name, getattr(agent, name))
    output, _ = agent(random_inputs(), agent.initial_state(B))
    x = features["policy_mlp"][0]
    assert torch.equal(x, features["value_mlp"][0])
    for layer in (agent.policy_mlp[0], agent.policy_mlp[2]):
        x = function(x @ layer.weight.T + layer.bias)
    torch.testing.assert_close(features["policy"][1], x @ agent.policy.weight.T + agent.policy.bias)
    layer = agent.value_mlp[0]
    value = function(features["value_mlp"][0] @ layer.weight.T + layer.bias)
    torch.testing.assert_close(output.value, agent.critic(value, random_inputs().task).value)
    rows = agent.policy_mlp[0].weight.detach()
    assert torch.allclose(rows @ rows.T, 2 * torch.eye(len(rows)), atol=1e-4)

    plain = agent_class(SPEC, ACTIONS, torso=MLP, memory=MEMORIES["gru"])
    assert (plain.policy_mlp, plain.value_mlp) == (None, None)
    assert plain.policy.in_features == features["policy_mlp"][0].shape[-1]
