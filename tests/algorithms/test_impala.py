"""Tests of IMPALA: loss, gradients, optimizer updates, and skipped updates."""

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from bestiary.agents.agent import BasicAgent, Output
from bestiary.agents.distributions import Categorical
from bestiary.agents.memories import LSTM, NoMemory
from bestiary.agents.torsos import MLP
from bestiary.algorithms.base import Batch
from bestiary.algorithms.impala import Impala
from bestiary.rollout import ActionSpec, ArraySpec, Rollout
from bestiary.training.learner import Learner
from bestiary.utils.errors import RunError

SPEC = {"vector": ArraySpec((6,), "float32")}
ACTIONS = ActionSpec(("a", "b", "c"))
A = ACTIONS.n


def make_agent(memory="none", seed=0):
    torch.manual_seed(seed)
    return BasicAgent(
        SPEC,
        ACTIONS,
        torso=lambda spec: MLP(spec, MLP.Options(width=16, depth=2)),
        memory=(lambda size: LSTM(size, LSTM.Options(hidden=8))) if memory == "lstm" else NoMemory,
    )


def make_rollout(agent, T=6, N=5, seed=0):
    """Return random entries with terminated and truncated episodes, rewards beyond [-1,1], and off-policy actions."""
    g = torch.Generator().manual_seed(seed)
    rollout = Rollout.empty(T, N, SPEC, {}, agent.initial_state(N))
    rollout.observation["vector"] = torch.randn(T + 1, N, 6, generator=g)
    rollout.reward = 3 * torch.randn(T + 1, N, generator=g)
    rollout.done = torch.rand(T + 1, N, generator=g) < 0.3
    rollout.done[T, 0] = True  # one episode ends with the last step
    rollout.truncated = rollout.done & (torch.rand(T + 1, N, generator=g) < 0.5)
    rollout.truncated[T, 0] = True
    rollout.last_action = torch.randint(A, (T + 1, N), generator=g)
    rollout.log_prob = torch.log_softmax(torch.randn(T, N, A, generator=g), -1).gather(-1, rollout.action[..., None])[
        ..., 0
    ]
    rollout.bootstrap = torch.randn(T, N, generator=g) * rollout.truncated[1:]
    return rollout


def slow_loss(logits, values, rollout, o):
    """Compute the loss from its definition, in float64 loops; logits [T+1,N,A] and values [T+1,N] are the learner's."""
    T, N = rollout.log_prob.shape
    logits, values = (x.detach().numpy().astype(np.float64) for x in (logits, values))
    reward, done, behaviour, bootstrap = (
        x.numpy().astype(np.float64) for x in (rollout.reward, rollout.done, rollout.log_prob, rollout.bootstrap)
    )
    policy_loss = value_loss = entropy = 0.0
    for n in range(N):
        log_pi = [row - np.log(np.sum(np.exp(row))) for row in logits[:, n]]
        action = [int(rollout.last_action[t + 1, n]) for t in range(T)]
        rho = [np.exp(log_pi[t][action[t]] - behaviour[t, n]) for t in range(T)]
        r, gamma = [], []
        for t in range(T):
            transformed = reward[t + 1, n]
            if o.reward_clipping in ("auto", "abs_one"):
                transformed = min(1.0, max(-1.0, transformed))
            r.append(transformed + (o.discount * bootstrap[t, n] if rollout.truncated[t + 1, n] else 0.0))
            gamma.append(0.0 if done[t + 1, n] else o.discount)
        v = list(values[:, n])  # v_T is the bootstrap itself
        correction = 0.0
        for t in reversed(range(T)):
            delta = min(o.rho_bar, rho[t]) * (r[t] + gamma[t] * values[t + 1, n] - values[t, n])
            correction = delta + gamma[t] * o.lam * min(1.0, rho[t]) * correction
            v[t] = values[t, n] + correction
        for t in range(T):
            advantage = min(o.pg_rho_bar, rho[t]) * (r[t] + gamma[t] * v[t + 1] - values[t, n])
            policy_loss += -log_pi[t][action[t]] * advantage
            value_loss += 0.5 * (v[t] - values[t, n]) ** 2
            entropy += -np.sum(np.exp(log_pi[t]) * log_pi[t])
    total = policy_loss + o.value_coef * value_loss - o.entropy_coef * entropy
    return {"loss": total, "policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}


# --- the loss ---


@pytest.mark.parametrize("memory", ["none", "lstm"])
@pytest.mark.parametrize(
    "options",
    [
        Impala.Options(),
        Impala.Options(
            reward_clipping="none",
            rho_bar=2.5,
            pg_rho_bar=1.7,
            lam=0.8,
            discount=0.9,
            entropy_coef=0.1,
            value_coef=0.25,
        ),
    ],
    ids=["defaults", "others"],
)
def test_loss_equals_a_slow_implementation(memory, options):
    agent = make_agent(memory)
    rollout = make_rollout(agent)
    assert rollout.truncated[1:].any()
    assert (rollout.done & ~rollout.truncated)[1:].any()
    loss = Impala(options).loss(agent, rollout)
    output, _ = agent(rollout.inputs(), rollout.state)
    slow = slow_loss(output.distribution.logits, output.value, rollout, options)
    for name, value in {"loss": loss.total, **loss.sums}.items():
        if name in slow:
            np.testing.assert_allclose(value.detach().item(), slow[name], rtol=1e-4, err_msg=name)
    assert {"policy_loss", "value_loss", "entropy", "value", "rho"} <= set(loss.sums)
    assert not any(value.requires_grad for value in loss.sums.values())


class Table(nn.Module):
    """Agent whose parameters are its outputs, so that their gradients can be checked."""

    def __init__(self, T, N):
        super().__init__()
        torch.manual_seed(1)
        self.logits = nn.Parameter(torch.randn(T + 1, N, A, dtype=torch.float64))
        self.values = nn.Parameter(torch.randn(T + 1, N, dtype=torch.float64))

    def initial_state(self, batch_size):
        return ()

    def forward(self, inputs, state):
        return Output(Categorical(self.logits), self.values), state


def gradients_of(table, rollout, **options):
    loss = Impala(Impala.Options(**options)).loss(table, rollout).total
    return torch.autograd.grad(loss, (table.logits, table.values), materialize_grads=True)


def test_gradients_do_not_cross_episode_ends():
    """The action at 2 hits a time limit: later rewards do not change the gradients before it, the bootstrap does."""
    table = Table(6, 1)
    rollout = make_rollout(table, N=1)
    rollout.done[:] = rollout.truncated[:] = False
    rollout.bootstrap[:] = 0
    rollout.done[3] = rollout.truncated[3] = True
    before, _ = gradients_of(table, rollout)
    rollout.reward[5] = -rollout.reward[5]  # of the action at 4
    after, _ = gradients_of(table, rollout)
    assert torch.equal(before[:3], after[:3])
    assert not torch.equal(before[3:], after[3:])
    rollout.bootstrap[2] = 0.7
    bootstrapped, _ = gradients_of(table, rollout)
    assert not torch.isclose(after[:3], bootstrapped[:3]).any()
    assert torch.equal(after[3:], bootstrapped[3:])


def test_loss_does_not_depend_on_the_first_reward():
    """reward[0], done[0] and truncated[0] result from an action of the previous rollout."""
    table = Table(6, 5)
    rollout = make_rollout(table)
    loss = Impala().loss(table, rollout).total
    rollout.reward[0], rollout.done[0], rollout.truncated[0] = 100.0, ~rollout.done[0], True
    again = Impala().loss(table, rollout).total
    assert loss.item() == again.item()


def test_policy_gradient_is_softmax_minus_one_hot_times_advantage():
    table = Table(6, 5)
    rollout = make_rollout(table)
    d_logits, d_values = gradients_of(table, rollout, entropy_coef=0, value_coef=0)
    policy = torch.softmax(table.logits.detach()[:-1], -1)
    one_hot = F.one_hot(rollout.action, A)
    # One number, the advantage, determines all A components of the gradient of a step.
    direction = policy - one_hot
    advantage = (d_logits[:-1] * direction).sum(-1) / direction.square().sum(-1)
    torch.testing.assert_close(d_logits[:-1], direction * advantage[..., None])
    assert advantage.abs().min() > 1e-6
    assert not d_values.any()  # no gradient through the advantages
    assert not d_logits[-1].any()  # the last entry has no action


def test_gradients_of_a_single_step():
    """T=1, on-policy, no episode end: the advantage is r + gamma V' - V, and both gradients follow from it."""
    table = Table(1, 1)
    rollout = Rollout.empty(1, 1, SPEC, {}, ())
    rollout.reward[1], rollout.last_action[1] = 0.5, 2
    log_pi = torch.log_softmax(table.logits.detach()[0, 0], -1)
    rollout.log_prob = log_pi[2].view(1, 1)
    v, next_v = table.values.detach()[:, 0]
    advantage = 0.5 + 0.99 * next_v - v
    d_logits, d_values = gradients_of(table, rollout, entropy_coef=0, value_coef=1)
    one_hot = torch.tensor([0.0, 0.0, 1.0])
    torch.testing.assert_close(d_logits[0, 0], (log_pi.exp() - one_hot) * advantage)
    torch.testing.assert_close(d_values[:, 0], torch.stack([-advantage, torch.zeros_like(v)]))


def test_value_loss_is_half_the_squared_error():
    """One on-policy step that ends the episode: the error is r - V."""
    for error in (1.4, 3.43, 5.2, 0.33):
        table = Table(1, 1)
        table.values.data = torch.tensor([[0.25], [9.0]], dtype=torch.float64)
        rollout = Rollout.empty(1, 1, SPEC, {}, ())
        rollout.reward[1], rollout.done[1] = 0.25 + error, True
        rollout.log_prob = Categorical(table.logits.detach()[0]).log_prob(torch.tensor([0])).view(1, 1)
        sums = Impala(Impala.Options(reward_clipping="none")).loss(table, rollout).sums
        _, d_values = gradients_of(table, rollout, reward_clipping="none", entropy_coef=0, value_coef=0.5)
        assert float(sums["value_loss"]) == pytest.approx(0.5 * error**2, rel=1e-6)
        np.testing.assert_allclose(d_values[:, 0], [-0.5 * error, 0.0], rtol=1e-6)


def test_entropy_gradient():
    """d(-H)/d logit_k = p_k (log p_k + H), summed over steps."""
    table = Table(6, 5)
    rollout = make_rollout(table)
    with_bonus, _ = gradients_of(table, rollout, entropy_coef=0.3, value_coef=0)
    without, _ = gradients_of(table, rollout, entropy_coef=0, value_coef=0)
    log_p = torch.log_softmax(table.logits.detach()[:-1], -1)
    entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
    torch.testing.assert_close((with_bonus - without)[:-1], 0.3 * log_p.exp() * (log_p + entropy))


def test_every_parameter_gets_a_gradient():
    for memory in ("none", "lstm"):
        agent = make_agent(memory)
        loss = Impala().loss(agent, make_rollout(agent)).total
        loss.backward()
        for name, parameter in agent.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.abs().sum() > 0, name


# --- the loss is a sum over steps ---


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_gradients_of_micro_batches_add_up(micro_batch_size, memory):
    agent = make_agent(memory).double()
    rollout = make_rollout(agent, N=5)
    rollout.observation["vector"] = rollout.observation["vector"].double()
    if memory == "lstm":
        rollout.state = tuple(torch.randn_like(s) for s in rollout.state)
    whole = Learner(agent, Impala(), 1000, micro_batch_size=5).batch_gradient(Batch(rollout, Impala().loss))
    summed = Learner(agent, Impala(), 1000, micro_batch_size=micro_batch_size).batch_gradient(
        Batch(rollout, Impala().loss)
    )
    for a, b in zip(whole.tensors, summed.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    for name, value in whole.sums.items():
        torch.testing.assert_close(summed.sums[name], value, rtol=1e-5, atol=1e-5)


def test_doubled_batch_has_doubled_gradient():
    agent = make_agent()
    rollout = make_rollout(agent, N=3)
    twice = make_rollout(agent, N=6)
    for name in ("reward", "done", "truncated", "last_action", "log_prob", "bootstrap"):
        setattr(twice, name, torch.cat([getattr(rollout, name)] * 2, dim=1))
    twice.observation = {k: torch.cat([v, v], dim=1) for k, v in rollout.observation.items()}
    once = Learner(agent, Impala(), 1000, micro_batch_size=16).batch_gradient(Batch(rollout, Impala().loss)).tensors
    double = Learner(agent, Impala(), 1000, micro_batch_size=16).batch_gradient(Batch(twice, Impala().loss)).tensors
    for a, b in zip(once, double, strict=True):
        torch.testing.assert_close(2 * a, b, rtol=1e-4, atol=1e-4)


# --- updates ---


def copy_parameters(agent):
    return [parameter.detach().clone() for parameter in agent.parameters()]


def make_learner(agent, total_steps=10_000, max_skipped_updates=10, **options):
    options = {"optimizer": "rmsprop", "batch_size": 5, **options}
    return Learner(
        agent,
        Impala(Impala.Options(**options)),
        total_steps,
        micro_batch_size=2,
        max_skipped_updates=max_skipped_updates,
    )


def test_two_rmsprop_updates():
    """s = alpha s + (1-alpha) g^2;  w = w - lr g / (sqrt(s) + eps); linear learning-rate schedule."""
    agent = make_agent()
    learner = make_learner(agent, total_steps=300, lr=0.01, alpha=0.9, eps=0.05, max_grad_norm=1e9)
    square = [torch.zeros_like(p) for p in agent.parameters()]
    weights = copy_parameters(agent)
    for update, lr in enumerate((0.01, 0.01 * (1 - 30 / 300))):  # 6 x 5 steps per update
        rollout = make_rollout(agent, seed=update)
        gradients = learner.batch_gradient(Batch(rollout, learner.algorithm.loss)).tensors
        square = [0.9 * s + 0.1 * g * g for s, g in zip(square, gradients, strict=True)]
        weights = [w - lr * g / (s.sqrt() + 0.05) for w, g, s in zip(weights, gradients, square, strict=True)]
        (metrics,) = learner.learn([rollout])
        assert metrics["lr"] == pytest.approx(lr)
        for expected, parameter in zip(weights, agent.parameters(), strict=True):
            torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-7)
    assert (learner.steps, learner.version, learner.skipped_updates) == (60, 2, 0)


def test_first_adam_update():
    """At the first update, bias correction gives w = w - lr g / (|g| + eps)."""
    agent = make_agent()
    learner = make_learner(agent, lr=0.01, eps=0.05, optimizer="adam", max_grad_norm=1e9)
    rollout, weights = make_rollout(agent), copy_parameters(agent)
    gradients = learner.batch_gradient(Batch(rollout, learner.algorithm.loss)).tensors
    learner.update(Batch(rollout, learner.algorithm.loss))
    for before, g, parameter in zip(weights, gradients, agent.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach(), before - 0.01 * g / (g.abs() + 0.05), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("max_grad_norm", [0.5, 40.0, 1e9])
def test_gradients_are_clipped_by_global_norm(max_grad_norm):
    """With alpha = 0 and a huge eps = lr, the RMSprop step lr g / (|g| + eps) is the applied gradient g."""
    agent = make_agent()
    scale = 1e6
    learner = make_learner(agent, lr=scale, alpha=0.0, eps=scale, max_grad_norm=max_grad_norm, reward_clipping="none")
    rollout = make_rollout(agent)
    rollout.reward *= 30  # makes the norm larger than 40
    gradients = learner.batch_gradient(Batch(rollout, learner.algorithm.loss)).tensors
    norm = float(torch.cat([g.flatten() for g in gradients]).double().norm())
    assert 40 < norm < 1e6
    before = copy_parameters(agent)
    metrics = learner.update(Batch(rollout, learner.algorithm.loss))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    component_norms = {
        name.partition("/")[2]: value for name, value in metrics.items() if name.startswith("grad_norm/")
    }
    assert list(component_norms) == [name for name, child in agent.named_children() if list(child.parameters())]
    owners = [name.split(".")[0] for name, _ in agent.named_parameters()]
    for component, value in component_norms.items():
        own = [g.flatten() for g, owner in zip(gradients, owners, strict=True) if owner == component]
        assert value == pytest.approx(float(torch.cat(own).double().norm()), rel=1e-4)
    for b, g, parameter in zip(before, gradients, agent.parameters(), strict=True):
        applied = b - parameter.detach()
        torch.testing.assert_close(applied, g * min(1.0, max_grad_norm / norm), rtol=1e-2, atol=1e-5 * norm)


def test_default_max_grad_norm():
    assert Impala.Options().max_grad_norm == 40.0


@pytest.mark.parametrize(("steps", "left"), [(0, 1.0), (250, 0.75), (1000, 0.0), (1500, 0.0)])
def test_linear_schedule(steps, left):
    learner = make_learner(make_agent(), total_steps=1000, lr=0.008)
    learner.steps = steps
    assert learner.learning_rate() == pytest.approx(0.008 * left)


def test_constant_schedule():
    learner = make_learner(make_agent(), total_steps=1000, lr=0.008, lr_schedule="constant")
    learner.steps = 900
    assert learner.learning_rate() == 0.008


@pytest.mark.parametrize(
    ("steps", "factor"),
    [(0, 1 / 2), (10_000_000, 1 / 4), (30_000_000, 1 / 8), (50_000_000, 1 / 16), (85_000_000, 1 / 64), (1e9, 0)],
)
def test_stages_at_fixed_steps_of_the_river_raid_code(steps, factor):
    """The stages do not depend on the steps of the run."""
    options = {"lr": 4e-4, "lr_schedule": "staggered", "lr_schedule_steps": 100_000_000}
    learner = make_learner(make_agent(), total_steps=50_000_000, **options)
    learner.steps = int(steps)
    assert learner.learning_rate() == pytest.approx(4e-4 * factor)


def test_metrics_are_means_over_steps():
    agent = make_agent()
    rollout = make_rollout(agent)
    rollout.version[:] = 0
    learner = make_learner(agent)
    learner.version = 3
    sums = learner.batch_gradient(Batch(rollout, learner.algorithm.loss)).sums
    metrics = learner.update(Batch(rollout, learner.algorithm.loss))
    for name, value in sums.items():
        assert metrics[name] == pytest.approx(value / 30), name
    assert metrics["policy_lag"] == 3


# --- non-finite updates ---


@pytest.mark.parametrize("field", ["reward", "observation", "log_prob", "bootstrap"])
def test_non_finite_update_is_skipped(field):
    agent = make_agent()
    learner = make_learner(agent, reward_clipping="none")
    learner.learn([make_rollout(agent)])  # gives the optimizer a state
    weights = {name: w.clone() for name, w in agent.state_dict().items()}
    moments = {name: m.clone() for name, m in learner.save()["optimizer"].items()}
    rollout = make_rollout(agent, seed=1)
    target = rollout.observation["vector"] if field == "observation" else getattr(rollout, field)
    target[1, 0] = float("nan")
    learner.learn([rollout])
    assert (learner.skipped_updates, learner.consecutive_skips, learner.version) == (1, 1, 1)
    assert learner.steps == 60  # the steps count for the schedule
    for name, weight in agent.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    for name, moment in learner.save()["optimizer"].items():
        assert torch.equal(moment, moments[name]), name
    learner.update(Batch(make_rollout(agent, seed=2), learner.algorithm.loss))
    assert (learner.skipped_updates, learner.consecutive_skips, learner.version) == (1, 0, 2)


@pytest.mark.parametrize("tolerated", [0, 1, 2])
def test_run_stops_after_too_many_skipped_updates_in_a_row(tolerated):
    agent = make_agent()
    learner = make_learner(agent, max_skipped_updates=tolerated + 1, reward_clipping="none")
    good, bad = make_rollout(agent), make_rollout(agent, seed=1)
    bad.reward[2, 1] = float("inf")
    for _ in range(3):  # a good update resets the count
        for _ in range(tolerated):
            learner.update(Batch(bad, learner.algorithm.loss))
        learner.update(Batch(good, learner.algorithm.loss))
    for _ in range(tolerated):
        learner.update(Batch(bad, learner.algorithm.loss))
    before = copy_parameters(agent)
    with pytest.raises(RunError, match=f"{tolerated + 1} consecutive updates"):
        learner.update(Batch(bad, learner.algorithm.loss))
    assert all(torch.equal(a, b) for a, b in zip(before, agent.parameters(), strict=True))


def test_a_shard_of_a_subclass_is_of_the_same_class():
    class OwnLoss(Impala):
        pass

    shard = OwnLoss(Impala.Options(batch_size=8)).shard(2)
    assert type(shard) is OwnLoss
    assert shard.options.batch_size == 4
    assert Impala(Impala.Options(batch_size=5)).shard(2) is None
