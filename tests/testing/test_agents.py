"""check_torso and check_agent: built-in components pass, and each kind of mistake gets its own line."""

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from bestiary.agents import AGENTS
from bestiary.agents.agent import Output
from bestiary.agents.distributions import Categorical
from bestiary.agents.torsos import TORSOS
from bestiary.rollout import Inputs
from bestiary.testing import check_agent, check_torso
from bestiary.utils.errors import UserError
from tests.testing.helpers import assert_one_problem, find_problems

State = tuple[Tensor, ...]


@pytest.mark.parametrize("name", TORSOS)
def test_builtin_torsos_pass(name: str) -> None:
    check_torso(name)


@pytest.mark.parametrize("name", AGENTS)
def test_builtin_agents_pass(name: str) -> None:
    check_agent(name)


class Layer(nn.Module):
    """A correct torso for images."""

    def __init__(self, spec: Any):
        super().__init__()
        if "image" not in spec:
            raise UserError("torso Layer: needs an image")
        self.convolution = nn.Conv2d(spec["image"].shape[0], 4, 8, stride=8)
        self.output_size = 4

    def forward(self, observation: dict[str, Tensor]) -> Tensor:
        return self.convolution(observation["image"].float() / 255).mean((2, 3))


def test_torso_that_accepts_only_images_passes() -> None:
    check_torso(Layer)
    check_torso("mlp", "toy/chain", width=8)


class ForBytes(Layer):
    def forward(self, observation: dict[str, Tensor]) -> Tensor:
        return self.convolution(observation["image"]).mean((2, 3))


class WithBatchNorm(Layer):
    def __init__(self, spec: Any):
        super().__init__(spec)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, observation: dict[str, Tensor]) -> Tensor:
        return self.norm(super().forward(observation))


class Unflattened(Layer):
    def forward(self, observation: dict[str, Tensor]) -> Tensor:
        return self.convolution(observation["image"].float() / 255)


def test_torso_for_float_images_is_reported_with_the_line_of_the_error() -> None:
    assert_one_problem(find_problems(check_torso, ForBytes), "forward", "RuntimeError", f"{__file__}, line ")


def test_batch_normalisation_is_reported_with_its_layer() -> None:
    problems = find_problems(check_torso, WithBatchNorm)
    assert any(
        "differs from 5 calls with T=1" in problem and "layer norm (BatchNorm1d)" in problem for problem in problems
    )


def test_torso_with_a_wrong_shape_is_reported() -> None:
    assert_one_problem(find_problems(check_torso, Unflattened), "[5, 3, 4, 10, 10]", "[5, 3, 4]")


def test_torso_that_refuses_the_environment_is_reported() -> None:
    assert_one_problem(find_problems(check_torso, Layer, "toy/chain"), "refuses", "vector float32[8]", "needs an image")


# --- agents ---


class Heads(nn.Module):
    """A correct agent without torso, with a running mean of its features as memory."""

    def __init__(self, observation: Any, action: Any, *, size: int = 6):
        super().__init__()
        self.layer = nn.Linear(observation["vector"].shape[0] + 1, size)
        self.policy = nn.Linear(size, action.n)
        self.value = nn.Linear(size, 1)

    def initial_state(self, batch_size: int) -> Any:
        return (self.layer.weight.new_zeros(batch_size, self.layer.out_features),)

    def last_reward(self, inputs: Inputs) -> Tensor:
        return inputs.reward * ~inputs.done

    def features(self, inputs: Inputs, state: State) -> tuple[Tensor, State]:
        x = self.layer(torch.cat([inputs.observation["vector"], self.last_reward(inputs)[..., None]], -1))
        (mean,) = state
        outputs = []
        for x_t, done_t in zip(x, inputs.done, strict=True):
            mean = 0.5 * torch.where(done_t[:, None], 0.0, mean) + 0.5 * x_t
            outputs.append(mean)
        return torch.stack(outputs), (mean,)

    def forward(self, inputs: Inputs, state: State) -> Any:
        x, state = self.features(inputs, state)
        return Output(Categorical(self.policy(x)), self.value(x).squeeze(-1)), state


def test_correct_agent_passes() -> None:
    check_agent(Heads)
    check_agent(Heads, "toy/chain", size=3)


class UnmaskedReward(Heads):
    def last_reward(self, inputs: Inputs) -> Tensor:
        return inputs.reward


class ValueWithAxis(Heads):
    def forward(self, inputs: Inputs, state: State) -> Any:
        x, state = self.features(inputs, state)
        return Output(Categorical(self.policy(x)), self.value(x)), state


class TorchDistribution(Heads):
    def forward(self, inputs: Inputs, state: State) -> Any:
        x, state = self.features(inputs, state)
        return Output(torch.distributions.Categorical(logits=self.policy(x)), self.value(x).squeeze(-1)), state  # type: ignore[arg-type]


class PlainTuple(Heads):
    def forward(self, inputs: Inputs, state: State) -> Any:
        x, state = self.features(inputs, state)
        return (self.policy(x), self.value(x)), state


class SqueezesTime(Heads):
    def forward(self, inputs: Inputs, state: State) -> Any:
        output, state = super().forward(inputs, state)
        return Output(output.distribution, output.value.squeeze(0)), state


class DetachedValue(Heads):
    def forward(self, inputs: Inputs, state: State) -> Any:
        output, state = super().forward(inputs, state)
        return Output(output.distribution, output.value.detach()), state


class NormalisesOverTime(Heads):
    def forward(self, inputs: Inputs, state: State) -> Any:
        output, state = super().forward(inputs, state)
        return Output(
            Categorical(F.layer_norm(output.distribution.logits, output.distribution.logits.shape)), output.value
        ), state


WRONG_AGENTS: list[tuple[type, tuple[str, ...]]] = [
    (UnmaskedReward, ("inputs.reward of the previous episode", "~inputs.done")),
    (ValueWithAxis, ("Output.value has shape [5, 3, 1]", "[5, 3]", "squeeze(-1)")),
    (TorchDistribution, ("torch.distributions.categorical.Categorical", "bestiary.agents.distributions.Categorical")),
    (PlainTuple, ("forward returned (tuple, tuple)", "Output")),
    (SqueezesTime, ("in the shape of value, [5, 3] and [15]",)),
    (DetachedValue, ("value has no gradient",)),
    (NormalisesOverTime, ("T=5 steps differs from 5 calls with T=1", "in logits")),
]


@pytest.mark.parametrize(("agent", "facts"), WRONG_AGENTS, ids=[agent.__name__ for agent, _ in WRONG_AGENTS])
def test_each_mistake_in_an_agent_has_its_line(agent: type, facts: tuple[str, ...]) -> None:
    problems = find_problems(check_agent, agent)
    assert any(all(fact in problem for fact in facts) for problem in problems), problems
