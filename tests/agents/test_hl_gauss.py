"""HL-Gauss: comparison with a slow implementation, its invariants, its options, and learning."""

import math
import statistics
from typing import Any

import pytest
import torch

from bestiary.agents.critics import HLGauss
from bestiary.agents.critics.hl_gauss import target_histograms
from bestiary.algorithms.impala import Impala
from bestiary.algorithms.ppg import PPG
from bestiary.algorithms.ppo import PPO
from bestiary.config.resolve import resolve
from bestiary.training.factory import make_actors_and_learner
from bestiary.utils.errors import UserError
from tests.agents.test_popart import B, K, T, make_agent, make_rollout
from tests.integration.test_learning import train

F = 5


def make_critic(tasks: int = K, seed: int = 0, **options: Any) -> HLGauss:
    torch.manual_seed(seed)
    critic = HLGauss(F, tasks, HLGauss.Options(**options))
    torch.nn.init.normal_(critic.weight)
    torch.nn.init.normal_(critic.bias)
    return critic


def slow_histogram(target: float, low: float, high: float, bins: int, sigma_ratio: float) -> list[float]:
    """Return the histogram of one target from the distribution function of Python's standard library."""
    width = (high - low) / bins
    normal = statistics.NormalDist(min(max(target, low), high), sigma_ratio * width)
    mass = [normal.cdf(low + (i + 1) * width) - normal.cdf(low + i * width) for i in range(bins)]
    return [m / sum(mass) for m in mass]


@pytest.mark.parametrize("sigma_ratio", [0.5, 0.75, 2.0])
@pytest.mark.parametrize(("low", "high", "bins"), [(-10, 10, 51), (0, 1000, 7), (-3, 1, 2)])
def test_histograms_equal_a_slow_implementation(low: float, high: float, bins: int, sigma_ratio: float) -> None:
    targets = torch.linspace(low - 0.3 * (high - low), high + 0.3 * (high - low), 23)
    ends = [torch.full_like(targets, end) for end in (low, high)]
    histograms = target_histograms(targets, ends[0], ends[1], bins, sigma_ratio)
    for target, histogram in zip(targets.tolist(), histograms, strict=True):
        expected = slow_histogram(target, low, high, bins, sigma_ratio)
        torch.testing.assert_close(histogram, torch.tensor(expected), rtol=1e-4, atol=2e-6)


def test_values_and_losses_equal_a_slow_implementation() -> None:
    """Each task has its own logits and its own range of values."""
    critic = make_critic(low=(-1.0, 0.0), high=(1.0, 500.0), bins=9)
    x, task = torch.randn(3, 4, F), torch.randint(0, K, (3, 4))
    targets = torch.randn(3, 4) * 10.0**task
    estimate = critic(x, task)
    losses = estimate.loss(targets)
    for t in range(3):
        for b in range(4):
            k = int(task[t, b])
            low, high = ((-1.0, 1.0), (0.0, 500.0))[k]
            logits = [float((critic.weight[k, i] @ x[t, b] + critic.bias[k, i]).detach()) for i in range(9)]
            total = sum(math.exp(logit) for logit in logits)
            probs = [math.exp(logit) / total for logit in logits]
            value = sum(p * (low + (i + 0.5) * (high - low) / 9) for i, p in enumerate(probs))
            assert float(estimate.value[t, b]) == pytest.approx(value, rel=1e-4, abs=1e-4)
            histogram = slow_histogram(float(targets[t, b]), low, high, 9, 0.75)
            loss = -sum(q * math.log(p) for q, p in zip(histogram, probs, strict=True))
            assert float(losses[t, b]) == pytest.approx(loss, rel=1e-4)
    assert estimate[1:].loss(targets[1:]).equal(losses[1:])


def test_value_of_a_learned_target_is_the_target() -> None:
    """The loss is smallest if the histogram equals that of the target; its mean is then the target."""
    targets = torch.linspace(-8, 8, 33)
    ends = (torch.full_like(targets, -10.0), torch.full_like(targets, 10.0))
    histograms = target_histograms(targets, *ends, 51, 0.75)
    centres = -10 + 20 * (torch.arange(51) + 0.5) / 51
    torch.testing.assert_close((histograms * centres).sum(-1), targets, rtol=0, atol=2e-3)


def test_gradient_does_not_depend_on_the_scale() -> None:
    """The same histograms and relative targets give the same gradient in a range of any size."""
    gradients = []
    for scale in (1.0, 1000.0):
        critic = make_critic(tasks=1, low=(-scale,), high=(scale,))
        targets = scale * torch.linspace(-0.9, 0.9, 6).view(2, 3)
        torch.manual_seed(1)
        loss = critic(torch.randn(2, 3, F), torch.zeros(2, 3, dtype=torch.int64)).loss(targets).sum()
        gradients.append(torch.autograd.grad(loss, critic.weight)[0])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


def test_targets_outside_of_the_range_are_clamped_and_counted() -> None:
    critic = make_critic(tasks=1)
    estimate = critic(torch.randn(1, 4, F), torch.zeros(1, 4, dtype=torch.int64))
    targets = torch.tensor([[-10.5, 10.0, 1e9, 0.0]])
    assert float(estimate.metrics(targets)["targets_outside"]) == 2
    torch.testing.assert_close(estimate.loss(targets), estimate.loss(targets.clamp(-10, 10)))
    assert estimate.loss(targets).isfinite().all()
    assert estimate.normalise(targets).equal(targets)


def test_new_critic_predicts_the_middle_of_the_range() -> None:
    critic = HLGauss(F, 1, HLGauss.Options(low=(0.0,), high=(6.0,)))
    values = critic(torch.randn(5, 5, F), torch.zeros(5, 5, dtype=torch.int64)).value
    assert values.shape == (5, 5)
    torch.testing.assert_close(values, torch.full((5, 5), 3.0), rtol=0, atol=0.2)


@pytest.mark.parametrize("algorithm", [Impala, PPO, PPG])
def test_algorithms_use_the_loss_of_the_critic(algorithm: Any) -> None:
    """The value loss of each algorithm is the cross-entropy of the histograms."""
    agent, rollout = make_agent(HLGauss), make_rollout()
    extras = {"target": 5 * torch.randn(T, B), "advantage": torch.randn(T, B)}
    rollout = rollout.with_extras(**extras)
    algo = algorithm(algorithm.Options(reward_clipping="abs_one"))
    loss_function = algo.value_loss if algorithm is PPG else algo.loss
    if algorithm is PPG:
        algo.setup(agent)
        algo.value_agent = None
    loss = loss_function(agent, rollout, 0.0)
    output, _ = agent(rollout.inputs(), ())
    targets = loss.targets if algorithm is Impala else extras["target"]
    expected = output.value_estimate[:-1].loss(targets).sum()
    torch.testing.assert_close(loss.sums["value_loss"], expected.detach())
    assert float(loss.sums["targets_outside"]) == float((targets.abs() > 10).sum())


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UserError, match=r"--critic.low 3 must be below --critic.high 2"):
        resolve({"env": "toy/catch", "critic": "hl-gauss", "critic.low": 3, "critic.high": 2})
    with pytest.raises(UserError, match=r"--critic.low has 2 numbers, but --critic.high has 3"):
        resolve({"env": "toy/catch", "critic": "hl-gauss", "critic.low": "1,2", "critic.high": "4,5,6"})
    with pytest.raises(UserError, match=r"--critic.high: 2 numbers for 1 task"):
        make_actors_and_learner(
            resolve({"env": "toy/catch", "critic": "hl-gauss", "critic.high": "4,5", "runtime": "serial"})
        )
    with pytest.raises(UserError, match=r"--algo.value-clip on: not supported by --critic hl-gauss"):
        make_actors_and_learner(
            resolve(
                {"env": "toy/catch", "critic": "hl-gauss", "algo": "ppo", "algo.value_clip": True, "runtime": "serial"}
            )
        )


def test_learns_chain() -> None:
    """Optimal return 1 in 7 steps, as in the test of the shared critic."""
    trained = train(env="toy/chain", critic="hl-gauss", steps="40k", lr=2e-3)
    assert trained.mean_return > 0.98
    assert trained.mean_length < 9
