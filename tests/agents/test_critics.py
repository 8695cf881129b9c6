"""Critics: PopArt's rule against a slow statement of it, what must not change, and what it makes possible."""

import math

import numpy as np
import pytest
import torch

from bestiary.agents.critics import CRITICS, PerTask, PopArt, Shared, Worth

F, K = 7, 3


def make_popart(seed: int = 0, tasks: int = K, **options) -> PopArt:
    torch.manual_seed(seed)
    return PopArt(F, tasks, PopArt.Options(**options))


def moments_of(critic: PopArt, targets: list[float], tasks: list[int]) -> torch.Tensor:
    return critic.moments(torch.tensor([targets]), torch.tensor([tasks]))


def random_updates(critic: PopArt, count: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        task = torch.randint(0, K, (5, 4), generator=generator)
        targets = torch.randn(5, 4, generator=generator) * 10.0 ** (2 * task) + 100.0 * task
        critic.adapt(critic.moments(targets, task))


@pytest.mark.parametrize("name", CRITICS)
def test_a_value_for_each_entry(name):
    critic = CRITICS[name](F, K)
    x, task = torch.randn(4, 5, F), torch.randint(0, K, (4, 5))
    worth = critic(x, task)
    assert worth.value.shape == worth.normalised.shape == (4, 5)
    assert worth.normalised.requires_grad


def test_shared_is_blind_to_the_task_and_others_are_not():
    x = torch.randn(1, 1, F)
    for critic, blind in ((Shared(F, K), True), (PerTask(F, K), False), (make_popart(), False)):
        values = {critic(x, torch.tensor([[task]])).value.item() for task in range(K)}
        assert len(values) == (1 if blind else K)


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("average", ["moments", "deviations"])
def test_statistics_against_a_slow_statement(average, debias):
    """The rules of the papers and of the fork, a number at a time."""
    critic = make_popart(beta=0.1, average=average, debias=debias)
    mu, nu, sigma, updates = [0.0] * K, [1.0] * K, [1.0] * K, [0] * K
    rng = np.random.default_rng(0)
    for _ in range(20):
        targets = rng.normal(5, 3, 12).astype(np.float32)
        tasks = rng.integers(0, K, 12)
        for k in range(K):
            mine = [float(v) for v, task in zip(targets, tasks, strict=True) if task == k]
            if not mine:
                continue
            mean, second = sum(mine) / len(mine), sum(v * v for v in mine) / len(mine)
            updates[k] += 1
            beta = max(0.1, 1 / (updates[k] + 1)) if debias else 0.1
            mu[k], nu[k] = (1 - beta) * mu[k] + beta * mean, (1 - beta) * nu[k] + beta * second
            spread = math.sqrt(max(second - mean * mean, 0))
            if average == "moments":
                sigma[k] = min(max(math.sqrt(max(nu[k] - mu[k] ** 2, 0)), 1e-4), 1e6)
            else:
                sigma[k] = (1 - beta) * sigma[k] + beta * min(max(spread, 1e-4), 1e6)
        critic.adapt(moments_of(critic, targets.tolist(), tasks.tolist()))
        np.testing.assert_allclose(critic.mu.numpy(), mu, rtol=1e-6)
        np.testing.assert_allclose(critic.sigma.numpy(), sigma, rtol=1e-6)


def test_at_first_statistics_are_plain_averages_of_all_so_far():
    """And so they are of the right size after a handful of updates, not after thousands."""
    critic, rng, batches = make_popart(tasks=1), np.random.default_rng(0), [np.zeros(1)]
    for _ in range(20):
        batches.append(rng.normal(500, 200, 50))
        critic.adapt(moments64(batches[-1]))
    assert critic.mu.item() == pytest.approx(np.mean([batch.mean() for batch in batches]))
    assert critic.nu.item() == pytest.approx(np.mean([1.0, *((batch**2).mean() for batch in batches[1:])]))
    assert 180 < critic.sigma.item() < 240
    slow = make_popart(tasks=1, debias=False)
    for batch in batches[1:]:
        slow.adapt(moments64(batch))
    assert slow.sigma.item() < 50


def test_where_statistics_only_begin_to_be_right_nothing_is_learnt_and_the_value_begins_at_the_mean():
    critic, x = make_popart(tasks=2), torch.randn(1, 50, F)
    task = torch.arange(50).view(1, -1) % 2
    far = critic.moments(torch.full((1, 50), 300.0) * task + torch.randn(1, 50), task)  # of task 1 only
    assert not critic.fits(far)
    before = critic(x, task)
    critic.adapt(far)
    after = critic(x, task)
    other = (task == 0)[0]
    torch.testing.assert_close(after.value[:, other], before.value[:, other], rtol=1e-4, atol=1e-4)
    assert torch.equal(after.normalised[:, ~other], before.normalised[:, ~other])  # as far from the mean as it was
    assert critic.mu[1] == pytest.approx(150, rel=0.05)
    for _ in range(10):
        critic.adapt(far)
    assert critic.fits(far)  # by now they are of its size, and values are preserved
    before = critic(x, task).value
    critic.adapt(far)
    torch.testing.assert_close(critic(x, task).value, before, rtol=1e-4, atol=1e-3)


def test_as_the_papers_write_it_every_update_is_learnt_from():
    critic = make_popart(tasks=1, debias=False)
    assert critic.fits(moments_of(critic, [3e5] * 4, [0] * 4))


@pytest.mark.parametrize("reward", [1.0, 10.0, 1000.0])
@pytest.mark.parametrize("apart", [150, 1_600, 5_000])
def test_what_is_rare_is_learnt_from(reward, apart):
    """A reward that comes once in a thousand updates is far beyond the deviation, and is no new beginning."""
    critic = make_popart(tasks=1)
    none, some = (moments_of(critic, [0.0] * 17 + [r, r, r], [0] * 20) for r in (0.0, reward))
    for _ in range(2):
        for _ in range(apart):
            critic.adapt(none)
        assert critic.sigma < reward / 5
        assert critic.fits(some)
        critic.adapt(some)


def test_a_mean_that_is_far_off_does_not_fit_either():
    """Where deviations within batches are averaged, sigma says nothing about the mean."""
    critic = make_popart(tasks=1, average="deviations")
    far = moments_of(critic, [299.0, 301.0] * 10, [0] * 20)
    assert not critic.fits(far)
    for _ in range(30):
        critic.adapt(far)
    assert critic.fits(far)


@pytest.mark.parametrize("average", ["moments", "deviations"])
def test_adapting_preserves_every_value(average):
    critic = make_popart(beta=0.05, average=average, debias=False)
    x, task = torch.randn(50, 4, F), torch.randint(0, K, (50, 4))
    for seed in range(5):
        before = critic(x, task).value
        random_updates(critic, 1, seed)
        after = critic(x, task).value
        scale = (critic.sigma + critic.mu.abs())[task]  # of the entry's own task
        assert ((after - before).abs() <= 1e-5 * scale).all()
    assert critic.sigma.max() > 50  # they did move


def test_a_task_without_targets_keeps_every_bit():
    critic = make_popart(beta=0.1, debias=False)
    random_updates(critic, 3)
    before = {name: tensor.clone() for name, tensor in critic.state_dict().items()}
    critic.adapt(moments_of(critic, [5.0, -7.0, 900.0], [0, 0, 2]))
    for name, tensor in critic.state_dict().items():
        assert torch.equal(tensor[1], before[name][1]), name
        assert not torch.equal(tensor[0], before[name][0]), name


def test_a_constant_target_is_learnt_as_the_mean_with_the_least_deviation():
    critic = make_popart(tasks=1, beta=0.05)
    for _ in range(1_000):
        critic.adapt(moments_of(critic, [42.0] * 4, [0] * 4))
    assert critic.mu.item() == pytest.approx(42, rel=1e-9)
    assert critic.sigma.item() == pytest.approx(1e-4)


def test_digits_are_not_lost_where_the_mean_is_large():
    """Deviation 1 around a million: in float32, nu - mu^2 would be noise."""
    critic, rng = make_popart(tasks=1, beta=0.05), np.random.default_rng(0)
    for _ in range(800):
        critic.adapt(moments64(1e6 + rng.normal(0, 1, 64)))
    assert critic.sigma.item() == pytest.approx(1, rel=0.2)


def moments64(targets: np.ndarray) -> torch.Tensor:
    return torch.tensor([[len(targets), targets.sum(), (targets**2).sum()]], dtype=torch.float64)


def test_moments_of_groups_add_up():
    critic = make_popart()
    targets, task = torch.randn(6, 8), torch.randint(0, K, (6, 8))
    parts = [critic.moments(targets[:, a:b], task[:, a:b]) for a, b in ((0, 3), (3, 4), (4, 8))]
    torch.testing.assert_close(sum(parts), critic.moments(targets, task))


def test_normalise_is_the_inverse_of_value():
    worth = Worth(torch.randn(3, 2), torch.tensor(5.0).expand(3, 2), torch.tensor(2.0).expand(3, 2))
    torch.testing.assert_close(worth.normalise(worth.value), worth.normalised)
    assert worth[1].normalised.shape == (2,)
    assert torch.equal(
        Worth(worth.normalised).value, worth.normalised
    )  # a plain critic: nothing is scaled, not even by 1


def test_no_gradient_goes_through_the_statistics():
    critic = make_popart()
    assert {name for name, _ in critic.named_parameters()} == {"weight", "bias"}
    assert not critic(torch.randn(1, 1, F), torch.zeros(1, 1, dtype=torch.int64)).value.requires_grad
