"""Tests of critics: PopArt against a slow implementation, its invariants, wrong scales, rare rewards, bounds."""

import math

import numpy as np
import pytest
import torch

from bestiary.agents.critics import CRITICS, PerTaskCritic, PopArt, SharedCritic, ValueEstimate

F, K = 7, 3


def make_popart(seed: int = 0, tasks: int = K, **options) -> PopArt:
    torch.manual_seed(seed)
    return PopArt(F, tasks, PopArt.Options(**options))


def moments_of(critic: PopArt, targets: list[float], tasks: list[int]) -> torch.Tensor:
    return critic.target_moments(torch.tensor([targets]), torch.tensor([tasks]))


def random_updates(critic: PopArt, count: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        task = torch.randint(0, K, (5, 4), generator=generator)
        targets = torch.randn(5, 4, generator=generator) * 10.0 ** (2 * task) + 100.0 * task
        critic.update_statistics(critic.target_moments(targets, task))


@pytest.mark.parametrize("name", CRITICS)
def test_output_shape(name):
    critic = CRITICS[name](F, K)
    x, task = torch.randn(4, 5, F), torch.randint(0, K, (4, 5))
    estimate = critic(x, task)
    assert estimate.value.shape == estimate.normalised.shape == (4, 5)
    assert estimate.normalised.requires_grad


def test_only_the_shared_critic_ignores_the_task():
    x = torch.randn(1, 1, F)
    for critic, ignores_task in ((SharedCritic(F, K), True), (PerTaskCritic(F, K), False), (make_popart(), False)):
        values = {critic(x, torch.tensor([[task]])).value.item() for task in range(K)}
        assert len(values) == (1 if ignores_task else K)


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("average", ["moments", "deviations"])
def test_statistics_equal_a_slow_implementation(average, debias):
    critic = make_popart(beta=0.1, average=average, debias=debias)
    mu, nu, sigma, updates = [0.0] * K, [1.0] * K, [1.0] * K, [0] * K
    rng = np.random.default_rng(0)
    for _ in range(20):
        targets = rng.normal(5, 3, 12).astype(np.float32)
        tasks = rng.integers(0, K, 12)
        rewards = (rng.random(12) < 0.1).astype(np.float32)
        for k in range(K):
            own = [float(v) for v, task in zip(targets, tasks, strict=True) if task == k]
            if not own:
                continue
            mean, second = sum(own) / len(own), sum(v * v for v in own) / len(own)
            rewarded = bool(rewards[tasks == k].any())
            updates[k] += rewarded
            beta = 0.1
            if debias and rewarded:
                beta = max(0.1, 1 / (updates[k] + 1))
            elif debias and not updates[k]:
                beta = 0.0
            mu[k], nu[k] = (1 - beta) * mu[k] + beta * mean, (1 - beta) * nu[k] + beta * second
            deviation = math.sqrt(max(second - mean * mean, 0))
            if average == "moments":
                sigma[k] = min(max(math.sqrt(max(nu[k] - mu[k] ** 2, 0)), 1e-4), 1e6)
            else:
                sigma[k] = (1 - beta) * sigma[k] + beta * min(max(deviation, 1e-4), 1e6)
        arrays = (torch.from_numpy(array).unsqueeze(0) for array in (targets, tasks, rewards))
        critic.update_statistics(critic.target_moments(*arrays))
        np.testing.assert_allclose(critic.mu.numpy(), mu, rtol=1e-6)
        np.testing.assert_allclose(critic.sigma.numpy(), sigma, rtol=1e-6)


def test_debiased_statistics_are_plain_averages_at_first():
    """They have the right scale after a few updates; without debiasing, only after thousands."""
    critic, rng, batches = make_popart(tasks=1), np.random.default_rng(0), [np.zeros(1)]
    for _ in range(20):
        batches.append(rng.normal(500, 200, 50))
        critic.update_statistics(moments64(batches[-1]))
    assert critic.mu.item() == pytest.approx(np.mean([batch.mean() for batch in batches]))
    assert critic.nu.item() == pytest.approx(np.mean([1.0, *((batch**2).mean() for batch in batches[1:])]))
    assert 180 < critic.sigma.item() < 240
    biased = make_popart(tasks=1, debias=False)
    for batch in batches[1:]:
        biased.update_statistics(moments64(batch))
    assert biased.sigma.item() < 50


def test_early_targets_on_another_scale_move_the_values_to_the_mean():
    critic, x = make_popart(tasks=2), torch.randn(1, 50, F)
    task = torch.arange(50).view(1, -1) % 2
    far = critic.target_moments(torch.full((1, 50), 300.0) * task + torch.randn(1, 50), task)  # only task 1
    assert not critic.accepts(far)
    before = critic(x, task)
    critic.update_statistics(far)
    after = critic(x, task)
    is_task_0 = (task == 0)[0]
    torch.testing.assert_close(after.value[:, is_task_0], before.value[:, is_task_0], rtol=1e-4, atol=1e-4)
    assert torch.equal(after.normalised[:, ~is_task_0], before.normalised[:, ~is_task_0])
    assert critic.mu[1] == pytest.approx(150, rel=0.05)
    for _ in range(10):
        critic.update_statistics(far)
    assert critic.accepts(far)  # the statistics have adapted, and values are preserved from now on
    before = critic(x, task).value
    critic.update_statistics(far)
    torch.testing.assert_close(critic(x, task).value, before, rtol=1e-4, atol=1e-3)


def test_targets_with_a_distant_mean_are_on_another_scale():
    """If deviations within batches are averaged, sigma does not depend on the mean."""
    critic = make_popart(tasks=1, average="deviations")
    far = moments_of(critic, [299.0, 301.0] * 10, [0] * 20)
    assert not critic.accepts(far)
    for _ in range(30):
        critic.update_statistics(far)
    assert critic.accepts(far)


def test_sigma_does_not_collapse_before_the_first_reward():
    """After 3,333 updates of zeros, a first return of 1 is still about 1 in normalised units."""
    critic = make_popart(tasks=1)
    zeros = moments_of(critic, [0.0] * 20, [0] * 20)
    for _ in range(3_333):
        critic.update_statistics(zeros)
    assert critic.sigma.item() == 1
    estimate = critic(torch.zeros(1, 1, F), torch.zeros(1, 1, dtype=torch.int64))
    assert estimate.normalise(torch.ones(1, 1)).item() == pytest.approx(1)


def test_targets_of_the_untrained_network_do_not_change_the_statistics():
    """Without any reward, targets are values of the network: not zero, but without information about the scale."""
    critic = make_popart(tasks=2)
    task = torch.arange(20).view(1, -1) % 2
    reward = torch.zeros(1, 20)
    reward[0, 1] = 1.0  # only task 1 has a reward
    for _ in range(1_000):
        critic.update_statistics(critic.target_moments(1e-3 * torch.randn(1, 20), task, reward))
    assert critic.sigma[0] == 1
    assert critic.updates.tolist() == [0, 1_000]
    assert critic.sigma[1] < 0.1


@pytest.mark.parametrize("reward", [0.5, 1.0, 1000.0])
def test_sigma_stays_near_the_scale_of_rare_rewards(reward):
    """One update in 100 has a reward. Sigma fits the rewards within a few of them, and never collapses in between."""
    critic = make_popart(tasks=1)
    without, with_reward = (moments_of(critic, [0.0] * 17 + [r, r, r], [0] * 20) for r in (0.0, reward))
    ratios = []
    for _ in range(30):
        for _ in range(99):
            critic.update_statistics(without)
        ratios.append(reward / critic.sigma.item())
        critic.update_statistics(with_reward)
    assert max(ratios[1:]) < 10
    assert min(ratios[20:]) > 0.2


def test_errors_and_advantages_are_bounded_at_any_time():
    """Also after the first updates, if rewards suddenly grow or become rare. Targets near the value are unchanged."""
    critic, x, task = make_popart(tasks=1), torch.randn(1, 6, F), torch.zeros(1, 6, dtype=torch.int64)
    random_targets = torch.randn(1, 6, generator=torch.Generator().manual_seed(0))
    for _ in range(500):
        critic.update_statistics(critic.target_moments(random_targets, task))
    estimate = critic(x, task)
    errors = estimate.normalise(1e6 * random_targets) - estimate.normalised
    torch.testing.assert_close(errors, 10 * random_targets.sign())
    torch.testing.assert_close(estimate.normalise_difference(1e6 * random_targets), 10 * random_targets.sign())
    near = estimate.value + 3 * estimate.sigma
    torch.testing.assert_close(estimate.normalise(near) - estimate.normalised, torch.full((1, 6), 3.0))
    assert estimate[0].max_error == 10


def test_the_rule_of_the_papers_accepts_all_targets_and_bounds_nothing():
    critic = make_popart(tasks=1, debias=False)
    assert critic.accepts(moments_of(critic, [3e5] * 4, [0] * 4))
    estimate = critic(torch.zeros(1, 1, F), torch.zeros(1, 1, dtype=torch.int64))
    assert estimate.normalise(torch.full((1, 1), 3e5)).item() == pytest.approx(3e5)
    assert estimate.normalise_difference(torch.tensor(-3e5)).item() == pytest.approx(-3e5)


@pytest.mark.parametrize("average", ["moments", "deviations"])
def test_updating_the_statistics_preserves_values(average):
    critic = make_popart(beta=0.05, average=average, debias=False)
    x, task = torch.randn(50, 4, F), torch.randint(0, K, (50, 4))
    for seed in range(5):
        before = critic(x, task).value
        random_updates(critic, 1, seed)
        after = critic(x, task).value
        scale = (critic.sigma + critic.mu.abs())[task]
        assert ((after - before).abs() <= 1e-5 * scale).all()
    assert critic.sigma.max() > 50  # the statistics did change


def test_task_without_targets_does_not_change():
    critic = make_popart(beta=0.1, debias=False)
    random_updates(critic, 3)
    before = {name: tensor.clone() for name, tensor in critic.state_dict().items()}
    critic.update_statistics(moments_of(critic, [5.0, -7.0, 900.0], [0, 0, 2]))
    for name, tensor in critic.state_dict().items():
        assert torch.equal(tensor[1], before[name][1]), name
        assert not torch.equal(tensor[0], before[name][0]), name


def test_constant_target_gives_the_smallest_sigma():
    critic = make_popart(tasks=1, beta=0.05)
    for _ in range(1_000):
        critic.update_statistics(moments_of(critic, [42.0] * 4, [0] * 4))
    assert critic.mu.item() == pytest.approx(42, rel=1e-9)
    assert critic.sigma.item() == pytest.approx(1e-4)


def test_precision_with_a_large_mean():
    """Standard deviation 1 around a mean of 1e6: in float32, nu - mu^2 would be noise."""
    critic, rng = make_popart(tasks=1, beta=0.05), np.random.default_rng(0)
    for _ in range(800):
        critic.update_statistics(moments64(1e6 + rng.normal(0, 1, 64)))
    assert critic.sigma.item() == pytest.approx(1, rel=0.2)


def moments64(targets: np.ndarray) -> torch.Tensor:
    return torch.tensor([[len(targets), targets.sum(), (targets**2).sum(), len(targets)]], dtype=torch.float64)


def test_moments_of_micro_batches_add_up():
    critic = make_popart()
    targets, task = torch.randn(6, 8), torch.randint(0, K, (6, 8))
    moments = [critic.target_moments(targets[:, a:b], task[:, a:b]) for a, b in ((0, 3), (3, 4), (4, 8))]
    torch.testing.assert_close(sum(moments), critic.target_moments(targets, task))


def test_normalise_inverts_value():
    estimate = ValueEstimate(torch.randn(3, 2), torch.tensor(5.0).expand(3, 2), torch.tensor(2.0).expand(3, 2))
    torch.testing.assert_close(estimate.normalise(estimate.value), estimate.normalised)
    assert estimate[1].normalised.shape == (2,)
    assert torch.equal(ValueEstimate(estimate.normalised).value, estimate.normalised)  # without statistics


def test_statistics_have_no_gradient():
    critic = make_popart()
    assert {name for name, _ in critic.named_parameters()} == {"weight", "bias"}
    assert not critic(torch.randn(1, 1, F), torch.zeros(1, 1, dtype=torch.int64)).value.requires_grad
