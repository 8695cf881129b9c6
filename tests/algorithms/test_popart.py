"""PopArt within the algorithms: what is normalised, what is not, and when the statistics move."""

import numpy as np
import pytest
import torch

from bestiary.agents.agent import BasicAgent
from bestiary.agents.critics import PerTask, PopArt, Shared
from bestiary.agents.memories import NoMemory
from bestiary.agents.torsos import MLP
from bestiary.algorithms.impala import Impala
from bestiary.algorithms.ppo import PPO
from bestiary.rollout import ActionSpec, ArraySpec, Rollout
from bestiary.runtime.learner import Learner

T, B, A, K, D = 5, 6, 3, 2, 4
OBSERVATION = {"vector": ArraySpec((D,), "float32")}


def make_agent(critic=PopArt, tasks: int = K, seed: int = 0) -> BasicAgent:
    torch.manual_seed(seed)
    options = BasicAgent.Options(inputs="none")
    action = ActionSpec(tuple("abc"))
    return BasicAgent(
        OBSERVATION, action, options, torso=lambda spec: MLP(spec, MLP.Options(width=8)), memory=NoMemory,
        critic=lambda size: critic(size, tasks),
    )  # fmt: skip


def make_rollout(tasks: int = K, seed: int = 0) -> Rollout:
    """Noise; column b plays task b mod K, whose rewards are of scale 100^task."""
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


def test_impala_against_a_slow_statement():
    """V-trace in the units of the rewards; errors and advantages in the critic's; the critic's own head, and no other."""
    agent, rollout = with_statistics(make_agent()), make_rollout()
    options = Impala.Options(reward="none", lam=0.9)
    with torch.no_grad():
        output, _ = agent(rollout.inputs(), ())
        features = agent.torso({"vector": rollout.observation["vector"].flatten(0, 1)})
        every = torch.nn.functional.linear(features, agent.critic.weight, agent.critic.bias).view(T + 1, B, K).numpy()
        log_probs = output.distribution.log_probs.numpy()
    mu, sigma = agent.critic.mu.numpy(), agent.critic.sigma.numpy()
    policy_loss = value_loss = 0.0
    for b in range(B):
        k = b % K
        n = every[:, b, k].astype(np.float64)
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
    found = Impala(options).loss(agent, rollout)
    assert found.sums["policy_loss"].item() == pytest.approx(policy_loss, rel=1e-4)
    assert found.sums["value_loss"].item() == pytest.approx(value_loss, rel=1e-4)


@pytest.mark.parametrize("algorithm", [Impala(), PPO()])
def test_off_it_is_the_plain_learner(algorithm):
    """One task: per-task, and PopArt that has not moved yet, give the very gradients of the shared critic."""
    rollout = algorithm.example(make_rollout(tasks=1))
    losses = {}
    for critic in (Shared, PerTask, PopArt):
        agent = make_agent(critic, tasks=1)
        loss = algorithm.loss(agent, rollout, 0.0)
        losses[critic] = torch.autograd.grad(loss.total, list(agent.parameters()))
    for critic in (PerTask, PopArt):
        for mine, plain in zip(losses[critic], losses[Shared], strict=True):
            assert torch.equal(mine, plain)


@pytest.mark.parametrize("group_size", [1, 4, 6])
def test_statistics_move_once_an_update_by_all_of_its_targets(group_size):
    agent, rollout = make_agent(), make_rollout()
    targets = Impala(Impala.Options(reward="none")).loss(agent, rollout).targets
    assert targets is not None
    learner = Learner(agent, Impala(Impala.Options(reward="none")), 1000, group_size)
    learner.update(rollout)
    for k in range(K):
        expected = targets[:, k::K].double().mean().item() / 2  # the first of them: half of it is the beginning
        assert agent.critic.mu[k].item() == pytest.approx(expected, rel=1e-5)
    assert agent.critic.sigma[1] > agent.critic.sigma[0]


def test_an_update_beyond_all_measure_moves_only_the_statistics():
    agent, rollout = make_agent(), make_rollout()
    learner = Learner(agent, Impala(Impala.Options(reward="none")), 1000, 6)
    before = {name: tensor.clone() for name, tensor in agent.named_parameters()}
    learner.update(rollout)  # task 1 has rewards of scale 100, and sigma is 1
    assert agent.critic.sigma[1] > 30
    for name, tensor in agent.named_parameters():
        assert torch.equal(tensor, before[name]) or name.startswith("critic"), name
    assert learner.version == 1
    for seed in range(1, 12):
        learner.update(make_rollout(seed=seed))
    assert not torch.equal(agent.policy.weight, before["policy.weight"])  # by now it learns


def test_an_update_that_is_not_finite_moves_nothing():
    agent, rollout = make_agent(), make_rollout()
    rollout.reward[2, 1] = float("nan")
    learner = Learner(agent, Impala(Impala.Options(reward="none")), 1000, 6)
    before = {name: tensor.clone() for name, tensor in agent.state_dict().items()}
    learner.update(rollout)
    assert learner.skipped == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in agent.state_dict().items())


def test_ppo_divides_advantages_by_the_tasks_deviation():
    agent, rollout = with_statistics(make_agent()), make_rollout()
    options = PPO.Options(rollout_length=T, reward="none", normalize=False, lam=0.0)
    prepared = PPO(options).prepare(agent, [rollout])
    advantage, target = prepared.extras["advantage"], prepared.extras["target"]
    sigma = agent.critic.sigma.float()[rollout.task[:-1]]
    torch.testing.assert_close(advantage * sigma, target - rollout.value, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("value_clip", [False, True])
def test_ppos_critic_errs_in_units_of_the_tasks_deviation(value_clip):
    """One decision at a time, from what the network gives out: half the squared distance of n from (target - mu) / sigma;
    where the value is clipped, the larger of that and of the distance from n kept near what it was."""
    agent, rollout = with_statistics(make_agent()), make_rollout()
    algorithm = PPO(PPO.Options(rollout_length=T, reward="none", value_clip=value_clip, clip=0.05))
    batch = algorithm.prepare(agent, [rollout])
    loss = algorithm.loss(agent, batch, 0.0)
    with torch.no_grad():
        output, _ = agent(batch.inputs()[:T], batch.state)
    expected = 0.0
    for t in range(T):
        for b in range(batch.num_envs):
            k = int(batch.task[t, b])
            mu, sigma = float(agent.critic.mu[k]), float(agent.critic.sigma[k])
            n, wanted = float(output.worth.normalised[t, b]), (float(batch.extras["target"][t, b]) - mu) / sigma
            error = (wanted - n) ** 2
            if value_clip:
                before = (float(batch.value[t, b]) - mu) / sigma
                near = before + min(max(n - before, -0.05), 0.05)
                error = max(error, (wanted - near) ** 2)
            expected += error / 2
    assert float(loss.sums["value_loss"]) == pytest.approx(expected, rel=1e-4)
