"""Tests of the categorical distribution against PyTorch's."""

import pytest
import torch

from bestiary.agents.distributions import Categorical


@pytest.fixture
def logits():
    return 3 * torch.randn(7, 4, 5, generator=torch.Generator().manual_seed(0))  # [T,B,A]


def test_log_prob_and_entropy(logits):
    ours, theirs = Categorical(logits), torch.distributions.Categorical(logits=logits)
    action = torch.randint(5, (7, 4), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    torch.testing.assert_close(ours.log_probs.exp(), theirs.probs)


def test_log_prob_of_known_logits():
    """Logits arange + 10 with T=7 and A=3: rows differ by a constant, so all rows have the same probabilities."""
    logits = (torch.arange(21.0) + 10).view(7, 1, 3)
    action = torch.tensor([0, 1, 2, 0, 1, 2, 0]).view(7, 1)
    by_action = torch.tensor([-2.4076059, -1.4076059, -0.4076059])  # log softmax of (0, 1, 2)
    torch.testing.assert_close(Categorical(logits).log_prob(action), by_action[action])


def test_entropy_of_known_logits():
    logits = torch.tensor([0.0012, 0.321, 0.523, 0.109, 0.416], dtype=torch.float64)
    p = torch.exp(logits) / torch.exp(logits).sum()
    assert Categorical(logits).entropy().item() == pytest.approx(-float((p * p.log()).sum()))
    assert Categorical(torch.zeros(4)).entropy().item() == pytest.approx(1.3862944)  # log 4


def test_kl_divergence(logits):
    other = torch.randn(7, 4, 5, generator=torch.Generator().manual_seed(2))
    theirs = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=logits), torch.distributions.Categorical(logits=other)
    )
    torch.testing.assert_close(Categorical(logits).kl_divergence(Categorical(other)), theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        Categorical(logits).kl_divergence(Categorical(logits + 3)), torch.zeros(7, 4), atol=1e-5, rtol=0
    )


def test_mode(logits):
    assert torch.equal(Categorical(logits).mode(), torch.distributions.Categorical(logits=logits).mode)


def test_sample_frequencies():
    """Frequencies of 100,000 samples are within five standard errors of the probabilities."""
    count = 100_000
    probs = torch.tensor([[0.05, 0.15, 0.8], [0.6, 0.4, 0.0]])
    logits = probs.log().expand(count, 2, 3)  # [T,B,A]
    samples = Categorical(logits).sample(torch.Generator().manual_seed(3))
    assert samples.shape == (count, 2)
    for row in range(2):
        frequency = torch.bincount(samples[:, row], minlength=3) / count
        allowed = 5 * (probs[row] * (1 - probs[row]) / count).sqrt()
        assert ((frequency - probs[row]).abs() <= allowed).all()


def test_sampling_is_reproducible(logits):
    def draw(seed):
        return Categorical(logits).sample(torch.Generator().manual_seed(seed))

    assert torch.equal(draw(0), draw(0))
    assert any(not torch.equal(draw(0), draw(seed)) for seed in (1, 2, 3))


def test_sampling_with_a_generator_does_not_use_the_global_one(logits):
    before = torch.get_rng_state()
    Categorical(logits).sample(torch.Generator().manual_seed(0))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("shape", [(), (2,), (3, 2), (4, 3, 2)])
def test_any_leading_axes(shape):
    logits = torch.zeros(*shape, 3)
    assert Categorical(logits).sample().shape == shape
    assert Categorical(logits).mode().shape == shape
    assert Categorical(logits).entropy().shape == shape


def test_slice_of_time(logits):
    assert torch.equal(Categorical(logits)[:-1].logits, logits[:-1])
