"""check_critic: built-in critics pass, and each kind of mistake gets its own line."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.critics import CRITICS, PopArt, ValueEstimate
from bestiary.testing import check_critic
from tests.testing.helpers import assert_one_problem, find_problems


@pytest.mark.parametrize("name", CRITICS)
def test_builtin_critics_pass(name: str) -> None:
    check_critic(name)


class TwoLayer(nn.Module):
    """A correct critic. The tests below break it in one place each."""

    def __init__(self, input_size: int, tasks: int, *, hidden: int = 8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(input_size, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    def forward(self, x: Tensor, task: Tensor) -> Any:
        return ValueEstimate(self.layers(x).squeeze(-1))


def test_correct_critic_passes_with_other_sizes_and_options() -> None:
    check_critic(TwoLayer)
    check_critic(TwoLayer, 3, hidden=5)
    check_critic("popart", beta=0.1, debias=False)


class ReturnsTensor(TwoLayer):
    def forward(self, x: Tensor, task: Tensor) -> Any:
        return self.layers(x).squeeze(-1)


class KeepsLastAxis(TwoLayer):
    def forward(self, x: Tensor, task: Tensor) -> Any:
        return ValueEstimate(self.layers(x))


class DetachesValues(TwoLayer):
    def forward(self, x: Tensor, task: Tensor) -> Any:
        return ValueEstimate(self.layers(x).squeeze(-1).detach())


class MixesRows(TwoLayer):
    def forward(self, x: Tensor, task: Tensor) -> Any:
        values = self.layers(x).squeeze(-1)
        return ValueEstimate(values - values.mean(dim=1, keepdim=True))


class HasOnlySigma(TwoLayer):
    def forward(self, x: Tensor, task: Tensor) -> Any:
        values = self.layers(x).squeeze(-1)
        return ValueEstimate(values, sigma=torch.ones_like(values))


class HasNoStatisticsMethods(TwoLayer):
    keeps_statistics = True


@pytest.mark.parametrize(
    ("critic", "facts"),
    [
        (ReturnsTensor, ("returned a Tensor", "ValueEstimate")),
        (KeepsLastAxis, ("normalised has shape [5, 3, 1]", "expected [T,B] = [5, 3]", "squeeze")),
        (DetachesValues, ("normalised has no gradient",)),
        (MixesRows, ("row 0 of a batch of 3", "must not depend on the other rows")),
        (HasOnlySigma, ("only one of mu and sigma",)),
    ],
)
def test_mistakes_are_explained(critic: type[nn.Module], facts: tuple[str, ...]) -> None:
    assert_one_problem(find_problems(check_critic, critic), critic.__name__, *facts)


def test_missing_methods_of_statistics_are_named() -> None:
    problems = find_problems(check_critic, HasNoStatisticsMethods)
    assert len(problems) == 2
    assert "target_moments" in problems[0]
    assert "update_statistics" in problems[1]


class MeanMoments(PopArt):
    def target_moments(self, targets: Tensor, task: Tensor, rewards: Tensor | None = None) -> Tensor:
        return super().target_moments(targets, task, rewards) / targets.numel()


class NegativeSigma(PopArt):
    def update_statistics(self, moments: Tensor) -> None:
        self.sigma.fill_(-1)


def test_wrong_statistics_are_explained() -> None:
    assert_one_problem(find_problems(check_critic, MeanMoments), "target_moments of a batch", "return sums")
    assert_one_problem(find_problems(check_critic, NegativeSigma), "sigma is not above 0")
