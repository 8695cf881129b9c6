"""Tests of PopArt with IMPALA and PPO: units of the losses, and updates of the statistics."""

import numpy as np
import pytest
import torch

from bestiary.agents.agent import BasicAgent
from bestiary.agents.critics import PerTaskCritic, PopArt, SharedCritic
from bestiary.agents.memories import NoMemory
from bestiary.agents.torsos import MLP
from bestiary.algorithms.base import Batch
from bestiary.algorithms.impala import Impala
from bestiary.algorithms.ppo import PPO
from bestiary.rollout import ActionSpec, ArraySpec, Rollout
from bestiary.training.learner import Learner

T, B, A, K, D = 5, 6, 3, 2, 4
OBSERVATION = {"vector": ArraySpec((D,), "float32")}


def make_agent(critic=PopArt, tasks: int = K, seed: int = 0) -> BasicAgent:
    torch.manual_seed(seed)
    options = BasicAgent.Options(extra_inputs="none")
    action = ActionSpec(tuple("abc"))
    return BasicAgent(
        OBSERVATION,
        action,
        options,
        torso=lambda spec: MLP(spec, MLP.Options(width=8)),
        memory=NoMemory,
        critic=lambda size: critic(size, tasks),
    )


def make_rollout(tasks: int = K, seed: int = 0) -> Rollout:
    """Return a random rollout. Environment b has task b mod K, whose rewards have scale 100^task."""
    generator = torch.Generator().manual_seed(seed)
    rollout = Rollout.empty(T, B, OBSERVATION, {}, ())
    rollout.observation["vector"].normal_(generator=generator)
    rollout.task[:] = torch.arange(B) % tasks
    rollout.reward.normal_(generator=generator).mul_(100.0**rollout.task)
    rollout.done[:] = torch.rand(T + 1, B, generator=generator) < 0.2
    rollout.last_action.random_(0, A, generator=generator)
    rollout.log_prob.uniform_(-1.5, -0.8, generator=generator)
    rollout.value.normal_(generator=generator)
    return rollout


def with_statistics(agent: BasicAgent) -> BasicAgent:
    agent.critic.mu.copy_(torch.tensor([0.3, -40.0]))
    agent.critic.sigma.copy_(torch.tensor([1.7, 90.0]))
    agent.critic.nu.copy_(agent.critic.sigma**2 + agent.critic.mu**2)
    return agent


def test_impala_loss_equals_a_slow_implementation():
    """V-trace is in units of the rewards; errors and advantages are in normalised units of the own task."""
    agent, rollout = with_statistics(make_agent()), make_rollout()
    options = Impala.Options(reward_clipping="none", lam=0.9)
    with torch.no_grad():
        output, _ = agent(rollout.inputs(), ())
        features = agent.torso({"vector": rollout.observation["vector"].flatten(0, 1)})
        outputs = torch.nn.functional.linear(features, agent.critic.weight, agent.critic.bias).view(T + 1, B, K).numpy()
        log_probs = output.distribution.log_probs.numpy()
    mu, sigma = agent.critic.mu.numpy(), agent.critic.sigma.numpy()
    policy_loss = value_loss = 0.0
    for b in range(B):
        k = b % K
        n = outputs[:, b, k].astype(np.float64)
        v = sigma[k] * n + mu[k]
        vs = list(v)
        rhos = [np.exp(log_probs[t, b, rollout.action[t, b]] - rollout.log_prob[t, b].item()) for t in range(T)]
        reward = rollout.reward[1:, b].double().numpy()
        discount = 0.99 * (~rollout.done[1:, b]).double().numpy()
        correction = 0.0
        for t in reversed(range(T)):
            delta = min(1, rhos[t]) * (reward[t] + discount[t] * v[t + 1] - v[t])
            correction = delta + discount[t] * 0.9 * min(1, rhos[t]) * correction
            vs[t] = v[t] + correction
        for t in range(T):
            advantage = min(1, rhos[t]) * ((reward[t] + discount[t] * vs[t + 1] - mu[k]) / sigma[k] - n[t])
            policy_loss -= log_probs[t, b, rollout.action[t, b]] * advantage
            value_loss += 0.5 * ((vs[t] - mu[k]) / sigma[k] - n[t]) ** 2
    loss = Impala(options).loss(agent, rollout)
    assert loss.sums["policy_loss"].item() == pytest.approx(policy_loss, rel=1e-4)
    assert loss.sums["value_loss"].item() == pytest.approx(value_loss, rel=1e-4)


@pytest.mark.parametrize("algorithm", [Impala(), PPO()])
def test_initial_gradients_equal_those_of_the_shared_critic(algorithm):
    """With one task, the per-task critic and PopArt with initial statistics have the same gradients."""
    rollout = algorithm.dummy_batch(make_rollout(tasks=1)).rollout
    gradients = {}
    for critic in (SharedCritic, PerTaskCritic, PopArt):
        agent = make_agent(critic, tasks=1)
        loss = algorithm.loss(agent, rollout, 0.0)
        gradients[critic] = torch.autograd.grad(loss.total, list(agent.parameters()))
    for critic in (PerTaskCritic, PopArt):
        for gradient, expected in zip(gradients[critic], gradients[SharedCritic], strict=True):
            assert torch.equal(gradient, expected)


@pytest.mark.parametrize("micro_batch_size", [1, 4, 6])
def test_statistics_are_updated_once_per_update_with_all_targets(micro_batch_size):
    agent, rollout = make_agent(), make_rollout()
    targets = Impala(Impala.Options(reward_clipping="none")).loss(agent, rollout).targets
    assert targets is not None
    learner = Learner(agent, Impala(Impala.Options(reward_clipping="none")), 1000, micro_batch_size)
    learner.update(Batch(rollout, learner.algorithm.loss))
    for k in range(K):
        expected = targets[:, k::K].double().mean().item() / 2  # first update: average with the initial mean 0
        assert agent.critic.mu[k].item() == pytest.approx(expected, rel=1e-5)
    assert agent.critic.sigma[1] > agent.critic.sigma[0]


def test_targets_of_a_wrong_scale_update_the_statistics_before_the_network():
    """The update equals one with statistics that were updated before, without rescaling task 1."""
    rollout = make_rollout()
    algorithm = Impala(Impala.Options(reward_clipping="none"))
    agent, expected_agent = make_agent(), make_agent()
    learner = Learner(agent, algorithm, 1000, 6)
    metrics = learner.update(Batch(rollout, algorithm.loss))  # rewards of task 1 have scale 100, sigma is 1
    assert metrics["recomputed_updates"] == 1
    assert learner.version == 1

    expected = Learner(expected_agent, Impala(Impala.Options(reward_clipping="none")), 1000, 6)
    critic = expected_agent.critic
    targets = algorithm.loss(expected_agent, rollout).targets
    critic.update_statistics(critic.target_moments(targets, rollout.task[:-1], rollout.reward[1:]))
    assert critic.sigma[1] > 30
    statistics = {name: buffer.clone() for name, buffer in critic.named_buffers()}
    critic.accepts = lambda moments: True
    critic.update_statistics = lambda moments: None
    expected.update(Batch(rollout, expected.algorithm.loss))
    for name, tensor in agent.named_parameters():
        torch.testing.assert_close(tensor, expected_agent.get_parameter(name))
    for name, buffer in agent.critic.named_buffers():
        torch.testing.assert_close(buffer, statistics[name])


def test_errors_of_a_wrong_scale_are_bounded():
    """The rewards of task 1 have scale 100, but sigma is 1: without a bound, its errors would dominate the loss."""
    agent, rollout = make_agent(), make_rollout()
    loss = Impala(Impala.Options(reward_clipping="none")).loss(agent, rollout)
    assert loss.sums["value_loss"].item() <= 0.5 * 10**2 * T * B
    agent.critic.options = PopArt.Options(debias=False)
    assert Impala(Impala.Options(reward_clipping="none")).loss(agent, rollout).sums["value_loss"] > 1e4


def test_non_finite_update_changes_nothing():
    agent, rollout = make_agent(), make_rollout()
    rollout.reward[2, 1] = float("nan")
    learner = Learner(agent, Impala(Impala.Options(reward_clipping="none")), 1000, 6)
    before = {name: tensor.clone() for name, tensor in agent.state_dict().items()}
    learner.update(Batch(rollout, learner.algorithm.loss))
    assert learner.skipped_updates == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in agent.state_dict().items())


def test_ppo_divides_advantages_by_sigma():
    agent, rollout = with_statistics(make_agent()), make_rollout()
    options = PPO.Options(rollout_length=T, reward_clipping="none", normalise_advantages=False, lam=0.0)
    prepared = PPO(options).prepare([rollout], Learner(agent, Impala(), 1000, 6).context())
    advantage, target = prepared.extras["advantage"], prepared.extras["target"]
    sigma = agent.critic.sigma.float()[rollout.task[:-1]]
    torch.testing.assert_close(advantage * sigma, target - rollout.value, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("value_clip", [False, True])
def test_ppo_value_loss_is_in_normalised_units(value_clip):
    """Each step adds half the squared error of n with respect to (target - mu) / sigma. With value clipping, the larger
    of the errors of n and of n clipped to the range around its old value counts."""
    agent, rollout = with_statistics(make_agent()), make_rollout()
    algorithm = PPO(PPO.Options(rollout_length=T, reward_clipping="none", value_clip=value_clip, clip=0.05))
    batch = algorithm.prepare([rollout], Learner(agent, algorithm, 1000, 6).context())
    loss = algorithm.loss(agent, batch, 0.0)
    with torch.no_grad():
        output, _ = agent(batch.inputs()[:T], batch.state)
    expected = 0.0
    for t in range(T):
        for b in range(batch.num_envs):
            k = int(batch.task[t, b])
            mu, sigma = float(agent.critic.mu[k]), float(agent.critic.sigma[k])
            n = float(output.value_estimate.normalised[t, b])
            target = (float(batch.extras["target"][t, b]) - mu) / sigma
            error = (target - n) ** 2
            if value_clip:
                old = (float(batch.value[t, b]) - mu) / sigma
                clipped = old + min(max(n - old, -0.05), 0.05)
                error = max(error, (target - clipped) ** 2)
            expected += error / 2
    assert float(loss.sums["value_loss"]) == pytest.approx(expected, rel=1e-4)
