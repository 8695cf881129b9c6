"""IMPALA's loss, its gradients and its optimizer, each against a statement of its own."""

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from bestiary.agents.agent import BasicAgent, Output
from bestiary.agents.heads import Categorical
from bestiary.agents.memories import LSTM, NoMemory
from bestiary.agents.torsos import MLP
from bestiary.algorithms.impala import Impala
from bestiary.algorithms.rewards import MODES, squash
from bestiary.errors import RunError
from bestiary.rollout import ActionSpec, ArraySpec, Rollout
from bestiary.runtime.learner import Learner

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
    """Random entries with ends of both kinds, rewards beyond [-1,1], and the log-probs of some other policy."""
    g = torch.Generator().manual_seed(seed)
    rollout = Rollout.empty(T, N, SPEC, {}, agent.initial_state(N))
    rollout.observation["vector"] = torch.randn(T + 1, N, 6, generator=g)
    rollout.reward = 3 * torch.randn(T + 1, N, generator=g)
    rollout.done = torch.rand(T + 1, N, generator=g) < 0.3
    rollout.done[T, 0] = True  # one ends with the rollout's last decision
    rollout.truncated = rollout.done & (torch.rand(T + 1, N, generator=g) < 0.5)
    rollout.truncated[T, 0] = True
    rollout.last_action = torch.randint(A, (T + 1, N), generator=g)
    rollout.log_prob = torch.log_softmax(torch.randn(T, N, A, generator=g), -1).gather(-1, rollout.action[..., None])[
        ..., 0
    ]
    rollout.bootstrap = torch.randn(T, N, generator=g) * rollout.truncated[1:]
    return rollout


def slow_loss(logits, values, rollout, o):
    """The loss in float64 loops, from its definition; logits [T+1,N,A] and values [T+1,N] are the learner's."""
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
            kept = reward[t + 1, n]
            if o.reward in ("auto", "abs_one"):
                kept = min(1.0, max(-1.0, kept))
            r.append(kept + (o.discount * bootstrap[t, n] if rollout.truncated[t + 1, n] else 0.0))
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
    total = policy_loss + o.baseline * value_loss - o.entropy * entropy
    return {"loss": total, "policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}


# --- the loss ---


@pytest.mark.parametrize("memory", ["none", "lstm"])
@pytest.mark.parametrize(
    "options",
    [
        Impala.Options(),
        Impala.Options(reward="none", rho_bar=2.5, pg_rho_bar=1.7, lam=0.8, discount=0.9, entropy=0.1, baseline=0.25),
    ],
    ids=["defaults", "all else"],
)
def test_loss_equals_slow_statement(memory, options):
    agent = make_agent(memory)
    rollout = make_rollout(agent)
    assert rollout.truncated[1:].any()
    assert (rollout.done & ~rollout.truncated)[1:].any()
    found = Impala(options).loss(agent, rollout)
    loss, sums = found.total, found.sums
    output, _ = agent(rollout.inputs(), rollout.state)
    slow = slow_loss(output.distribution.logits, output.value, rollout, options)
    for name, value in {"loss": loss, **sums}.items():
        if name in slow:
            np.testing.assert_allclose(value.detach().item(), slow[name], rtol=1e-4, err_msg=name)
    assert {"policy_loss", "value_loss", "entropy", "value", "rho"} <= set(sums)
    assert not any(value.requires_grad for value in sums.values())


class Table(nn.Module):
    """An agent that is nothing but its outputs, so that gradients with respect to them can be read off."""

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


def test_nothing_crosses_an_end():
    """The decision at 2 runs into a time limit: later rewards change no gradient up to there, the bootstrap does."""
    table = Table(6, 1)
    rollout = make_rollout(table, N=1)
    rollout.done[:] = rollout.truncated[:] = False
    rollout.bootstrap[:] = 0
    rollout.done[3] = rollout.truncated[3] = True
    before, _ = gradients_of(table, rollout)
    rollout.reward[5] = -rollout.reward[5]  # of the decision at 4
    after, _ = gradients_of(table, rollout)
    assert torch.equal(before[:3], after[:3])
    assert not torch.equal(before[3:], after[3:])
    rollout.bootstrap[2] = 0.7
    bootstrapped, _ = gradients_of(table, rollout)
    assert not torch.isclose(after[:3], bootstrapped[:3]).any()
    assert torch.equal(after[3:], bootstrapped[3:])


def test_first_entry_belongs_to_the_rollout_before():
    """reward[0], done[0] and truncated[0] follow no decision of this rollout, so the loss does not know them."""
    table = Table(6, 5)
    rollout = make_rollout(table)
    loss = Impala().loss(table, rollout).total
    rollout.reward[0], rollout.done[0], rollout.truncated[0] = 100.0, ~rollout.done[0], True
    again = Impala().loss(table, rollout).total
    assert loss.item() == again.item()


def test_policy_gradient_is_softmax_minus_one_hot_times_advantage():
    table = Table(6, 5)
    rollout = make_rollout(table)
    d_logits, d_values = gradients_of(table, rollout, entropy=0, baseline=0)
    policy = torch.softmax(table.logits.detach()[:-1], -1)
    one_hot = F.one_hot(rollout.action, A)
    # One number, the advantage, explains all A components of a decision's gradient.
    direction = policy - one_hot
    advantage = (d_logits[:-1] * direction).sum(-1) / direction.square().sum(-1)
    torch.testing.assert_close(d_logits[:-1], direction * advantage[..., None])
    assert advantage.abs().min() > 1e-6
    assert not d_values.any()  # nothing flows through the advantages
    assert not d_logits[-1].any()  # the last entry decides nothing


def test_advantage_of_a_single_decision_by_hand():
    """T=1, on-policy, nothing ends: the advantage is r + gamma V' - V; both gradients follow from it."""
    table = Table(1, 1)
    rollout = Rollout.empty(1, 1, SPEC, {}, ())
    rollout.reward[1], rollout.last_action[1] = 0.5, 2
    log_pi = torch.log_softmax(table.logits.detach()[0, 0], -1)
    rollout.log_prob = log_pi[2].view(1, 1)
    v, after = table.values.detach()[:, 0]
    advantage = 0.5 + 0.99 * after - v
    d_logits, d_values = gradients_of(table, rollout, entropy=0, baseline=1)
    one_hot = torch.tensor([0.0, 0.0, 1.0])
    torch.testing.assert_close(d_logits[0, 0], (log_pi.exp() - one_hot) * advantage)
    torch.testing.assert_close(d_values[:, 0], torch.stack([-advantage, torch.zeros_like(v)]))


def test_value_loss_is_half_the_squared_error():
    """One decision that ends the episode, on-policy: the error is r - V; loss half its square, gradient the error."""
    for error in (1.4, 3.43, 5.2, 0.33):
        table = Table(1, 1)
        table.values.data = torch.tensor([[0.25], [9.0]], dtype=torch.float64)
        rollout = Rollout.empty(1, 1, SPEC, {}, ())
        rollout.reward[1], rollout.done[1] = 0.25 + error, True
        rollout.log_prob = Categorical(table.logits.detach()[0]).log_prob(torch.tensor([0])).view(1, 1)
        sums = Impala(Impala.Options(reward="none")).loss(table, rollout).sums
        _, d_values = gradients_of(table, rollout, reward="none", entropy=0, baseline=0.5)
        assert float(sums["value_loss"]) == pytest.approx(0.5 * error**2, rel=1e-6)
        np.testing.assert_allclose(d_values[:, 0], [-0.5 * error, 0.0], rtol=1e-6)


def test_entropy_gradient():
    """d(-H)/d logit_k = p_k (log p_k + H), summed and not averaged."""
    table = Table(6, 5)
    rollout = make_rollout(table)
    with_bonus, _ = gradients_of(table, rollout, entropy=0.3, baseline=0)
    without, _ = gradients_of(table, rollout, entropy=0, baseline=0)
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


# --- sums: any cut of the batch is the same batch ---


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_groups_add_up_to_the_whole(group_size, memory):
    agent = make_agent(memory).double()
    rollout = make_rollout(agent, N=5)
    rollout.observation["vector"] = rollout.observation["vector"].double()
    if memory == "lstm":
        rollout.state = tuple(torch.randn_like(s) for s in rollout.state)
    found = Learner(agent, Impala(), 1000, group_size=5).gradients(rollout)
    whole, sums = found.parameters, found.sums
    found = Learner(agent, Impala(), 1000, group_size=group_size).gradients(rollout)
    parts, part_sums = found.parameters, found.sums
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    for name, value in sums.items():
        torch.testing.assert_close(part_sums[name], value, rtol=1e-5, atol=1e-5)


def test_doubled_batch_has_doubled_gradient():
    """Summed, never averaged: the same trajectories twice have twice the gradient."""
    agent = make_agent()
    rollout = make_rollout(agent, N=3)
    twice = make_rollout(agent, N=6)
    for name in ("reward", "done", "truncated", "last_action", "log_prob", "bootstrap"):
        setattr(twice, name, torch.cat([getattr(rollout, name)] * 2, dim=1))
    twice.observation = {k: torch.cat([v, v], dim=1) for k, v in rollout.observation.items()}
    once = Learner(agent, Impala(), 1000, group_size=16).gradients(rollout).parameters
    double = Learner(agent, Impala(), 1000, group_size=16).gradients(twice).parameters
    for a, b in zip(once, double, strict=True):
        torch.testing.assert_close(2 * a, b, rtol=1e-4, atol=1e-4)


# --- rewards ---


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("none", [-10.0, -0.5, 0.0, 0.5, 10.0]),
        ("auto", [-1.0, -0.5, 0.0, 0.5, 1.0]),
        ("abs_one", [-1.0, -0.5, 0.0, 0.5, 1.0]),
        # 1.5 tanh(-2), 1.5 tanh(-0.1), 0, 5 tanh(0.1), 5 tanh(2)
        ("soft_asymmetric", [-1.446041, -0.149502, 0.0, 0.498340, 4.820138]),
    ],
)
def test_reward_modes(mode, expected):
    squashed = squash(torch.tensor([-10.0, -0.5, 0.0, 0.5, 10.0]), mode)
    np.testing.assert_allclose(squashed, expected, rtol=1e-5)
    assert mode in MODES


def test_unknown_reward_mode():
    with pytest.raises(ValueError, match="abs_two"):
        squash(torch.zeros(1), "abs_two")


# --- the update ---


def snapshot(agent):
    return [parameter.detach().clone() for parameter in agent.parameters()]


def make_learner(agent, total_steps=10_000, max_bad_updates=10, **options):
    options = {"optimizer": "rmsprop", "batch_size": 5, **options}
    return Learner(agent, Impala(Impala.Options(**options)), total_steps, group_size=2, max_bad_updates=max_bad_updates)


def test_two_rmsprop_updates_by_hand():
    """s = alpha s + (1-alpha) g^2;  w = w - lr g / (sqrt(s) + eps), eps outside the root; lr falls linearly."""
    agent = make_agent()
    learner = make_learner(agent, total_steps=300, lr=0.01, alpha=0.9, eps=0.05, max_grad_norm=1e9)
    square = [torch.zeros_like(p) for p in agent.parameters()]
    weights = snapshot(agent)
    for update, lr in enumerate((0.01, 0.01 * (1 - 30 / 300))):  # 6 x 5 decisions in an update
        rollout = make_rollout(agent, seed=update)
        gradients = learner.gradients(rollout).parameters
        square = [0.9 * s + 0.1 * g * g for s, g in zip(square, gradients, strict=True)]
        weights = [w - lr * g / (s.sqrt() + 0.05) for w, g, s in zip(weights, gradients, square, strict=True)]
        (metrics,) = learner.learn([rollout])
        assert metrics["lr"] == pytest.approx(lr)
        for expected, parameter in zip(weights, agent.parameters(), strict=True):
            torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-7)
    assert (learner.steps, learner.version, learner.skipped) == (60, 2, 0)


def test_first_adam_update_by_hand():
    """At the first step both moments are unbiased: w = w - lr g / (|g| + eps)."""
    agent = make_agent()
    learner = make_learner(agent, lr=0.01, eps=0.05, optimizer="adam", max_grad_norm=1e9)
    rollout, weights = make_rollout(agent), snapshot(agent)
    gradients = learner.gradients(rollout).parameters
    learner.update(rollout)
    for before, g, parameter in zip(weights, gradients, agent.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach(), before - 0.01 * g / (g.abs() + 0.05), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("max_grad_norm", [0.5, 40.0, 1e9])
def test_gradients_are_clipped_by_global_norm(max_grad_norm):
    """With alpha=0 and a huge eps = lr, RMSprop's step lr g / (|g| + eps) is g: what was applied can be read off."""
    agent = make_agent()
    scale = 1e6
    learner = make_learner(agent, lr=scale, alpha=0.0, eps=scale, max_grad_norm=max_grad_norm, reward="none")
    rollout = make_rollout(agent)
    rollout.reward *= 30  # so that the norm is well above 40
    gradients = learner.gradients(rollout).parameters
    norm = float(torch.cat([g.flatten() for g in gradients]).double().norm())
    assert 40 < norm < 1e6
    before = snapshot(agent)
    metrics = learner.update(rollout)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    parts = {name.partition("/")[2]: value for name, value in metrics.items() if name.startswith("grad_norm/")}
    assert list(parts) == [name for name, part in agent.named_children() if list(part.parameters())]
    owners = [name.split(".")[0] for name, _ in agent.named_parameters()]
    for part, value in parts.items():
        own = [g.flatten() for g, owner in zip(gradients, owners, strict=True) if owner == part]
        assert value == pytest.approx(float(torch.cat(own).double().norm()), rel=1e-4)
    for b, g, parameter in zip(before, gradients, agent.parameters(), strict=True):
        applied = b - parameter.detach()
        torch.testing.assert_close(applied, g * min(1.0, max_grad_norm / norm), rtol=1e-2, atol=1e-5 * norm)


def test_default_clip_is_forty():
    assert Impala.Options().max_grad_norm == 40.0


@pytest.mark.parametrize(("steps", "left"), [(0, 1.0), (250, 0.75), (1000, 0.0), (1500, 0.0)])
def test_linear_schedule(steps, left):
    learner = make_learner(make_agent(), total_steps=1000, lr=0.008)
    learner.steps = steps
    assert learner.learning_rate() == pytest.approx(0.008 * left)


def test_constant_schedule():
    learner = make_learner(make_agent(), total_steps=1000, lr=0.008, schedule="constant")
    learner.steps = 900
    assert learner.learning_rate() == 0.008


def test_metrics_are_means_over_decisions():
    agent = make_agent()
    rollout = make_rollout(agent)
    rollout.version[:] = 0
    learner = make_learner(agent)
    learner.version = 3
    sums = learner.gradients(rollout).sums
    metrics = learner.update(rollout)
    for name, value in sums.items():
        assert metrics[name] == pytest.approx(value / 30), name
    assert metrics["lag"] == 3


# --- what is not finite ---


@pytest.mark.parametrize("poison", ["reward", "observation", "log_prob", "bootstrap"])
def test_update_that_is_not_finite_is_skipped(poison):
    agent = make_agent()
    learner = make_learner(agent, reward="none")
    learner.learn([make_rollout(agent)])  # so that the optimizer has moments
    weights = {name: w.clone() for name, w in agent.state_dict().items()}
    moments = {name: m.clone() for name, m in learner.save()["optimizer"].items()}
    rollout = make_rollout(agent, seed=1)
    target = rollout.observation["vector"] if poison == "observation" else getattr(rollout, poison)
    target[1, 0] = float("nan")
    learner.learn([rollout])
    assert (learner.skipped, learner.skipped_in_a_row, learner.version) == (1, 1, 1)
    assert learner.steps == 60  # they were played, and the schedule goes on
    for name, weight in agent.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    for name, moment in learner.save()["optimizer"].items():
        assert torch.equal(moment, moments[name]), name
    learner.update(make_rollout(agent, seed=2))
    assert (learner.skipped, learner.skipped_in_a_row, learner.version) == (1, 0, 2)


@pytest.mark.parametrize("tolerated", [0, 1, 2])
def test_run_stops_after_too_many_bad_updates_in_a_row(tolerated):
    agent = make_agent()
    learner = make_learner(agent, max_bad_updates=tolerated + 1, reward="none")
    good, bad = make_rollout(agent), make_rollout(agent, seed=1)
    bad.reward[2, 1] = float("inf")
    for _ in range(3):  # a good one in between starts the count anew
        for _ in range(tolerated):
            learner.update(bad)
        learner.update(good)
    for _ in range(tolerated):
        learner.update(bad)
    before = snapshot(agent)
    with pytest.raises(RunError, match=f"{tolerated + 1} updates in a row"):
        learner.update(bad)
    assert all(torch.equal(a, b) for a, b in zip(before, agent.parameters(), strict=True))
