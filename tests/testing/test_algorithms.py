"""check_algorithm: built-in algorithms pass, and each kind of mistake gets its own line."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

from bestiary.algorithms import ALGORITHMS
from bestiary.algorithms.base import Algorithm, Batch, Loss
from bestiary.config.components import REGISTRIES
from bestiary.testing import check_algorithm
from bestiary.utils.options import option
from tests.testing.helpers import assert_one_problem, find_problems

# Options with which the auxiliary phase of PPG is part of the check.
SHORT: dict[str, dict[str, Any]] = {
    "ppo": {"rollout_length": 16, "epochs": 2},
    "ppg": {"rollout_length": 16, "minibatches": 2, "aux_interval": 2, "aux_epochs": 1},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_builtin_algorithms_pass(name: str) -> None:
    check_algorithm(name, **SHORT.get(name, {}))


class Reinforce(Algorithm):
    """A correct algorithm. The tests below break it in one place each."""

    def loss(self, agent: Any, batch: Any, progress: float) -> Any:
        output, _ = agent(batch.inputs(), batch.state)
        log_probs = output.distribution[:-1].log_prob(batch.action)
        returns = batch.reward[1:].flip(0).cumsum(0).flip(0)
        total = -(log_probs * returns).sum() - 0.01 * output.distribution.entropy().sum()
        return Loss(total, {"policy_loss": total.detach()})


def test_correct_algorithm_passes_as_a_class_and_as_a_file() -> None:
    before = dict(REGISTRIES["algo"])
    check_algorithm(Reinforce)
    assert REGISTRIES["algo"] == before
    Path("mine.py").write_text(
        "from bestiary.algorithms.base import Algorithm, Loss\n"
        "class Mine(Algorithm):\n"
        "    def loss(self, agent, batch, progress):\n"
        "        output, _ = agent(batch.inputs(), batch.state)\n"
        "        total = (output.value[:-1] - batch.reward[1:]).square().sum()\n"
        "        return Loss(total, {})\n"
    )
    check_algorithm("mine.py:Mine", "toy/chain", lr=1e-3, rollout_length=5)
    assert sorted(path.name for path in Path().iterdir()) == ["mine.py"]  # no run folder is left


class Baseline(Reinforce):
    """A correct algorithm with an option, an own parameter and own state."""

    @dataclass(frozen=True)
    class Options(Algorithm.Options):
        rate: float = option(0.1, "step size of the mean reward", low=0, high=1)

    def setup(self, agent: Any) -> None:
        self.scale = nn.Parameter(torch.ones(()))
        self.mean = torch.zeros(())

    def parameters(self) -> Any:
        return {"scale": self.scale}

    def batches(self, rollouts: Any, context: Any) -> Any:
        for batch in super().batches(rollouts, context):
            rewards = batch.rollout.reward[1:]
            centred = (rewards - self.mean).expand_as(batch.rollout.value)
            yield replace(batch, rollout=batch.rollout.with_extras(centred=centred))
            self.mean = self.mean.lerp(rewards.mean(), self.options.rate)

    def dummy_batch(self, rollout: Any) -> Batch:
        return Batch(rollout.with_extras(centred=rollout.reward[1:]), self.loss)

    def loss(self, agent: Any, batch: Any, progress: float) -> Any:
        output, _ = agent(batch.inputs(), batch.state)
        log_probs = output.distribution[:-1].log_prob(batch.action)
        total = -(log_probs * batch.extras["centred"]).sum() * self.scale
        return Loss(total, {"policy_loss": total.detach()})

    def save(self) -> Any:
        return {"mean": self.mean}

    def load(self, tensors: Any) -> None:
        self.mean = tensors["mean"]


def test_correct_algorithm_with_parameters_and_state_passes() -> None:
    check_algorithm(Baseline, rate=0.5)


def with_loss(change: Callable[[Loss, Any], Any]) -> type[Algorithm]:
    """Return an algorithm whose loss is changed by a function of the Loss and the batch."""

    class Changed(Reinforce):
        def loss(self, agent: Any, batch: Any, progress: float) -> Any:
            return change(super().loss(agent, batch, progress), batch)

    return Changed


class NormalisedOverBatch(Reinforce):
    def loss(self, agent: Any, batch: Any, progress: float) -> Any:
        output, _ = agent(batch.inputs(), batch.state)
        rewards = batch.reward[1:]
        total = -(output.distribution[:-1].log_prob(batch.action) * (rewards - rewards.mean()) / rewards.std()).sum()
        return Loss(total, {})


class ChangesTheBatch(Reinforce):
    def loss(self, agent: Any, batch: Any, progress: float) -> Any:
        batch.reward.mul_(0.5)
        return super().loss(agent, batch, progress)


class Noisy(Reinforce):
    def loss(self, agent: Any, batch: Any, progress: float) -> Any:
        loss = super().loss(agent, batch, progress)
        return Loss(loss.total * torch.rand(()), loss.sums)


class Fails(Reinforce):
    def loss(self, agent: Any, batch: Any, progress: float) -> Any:
        return batch.extras["advantage"]


class NoBatches(Reinforce):
    def batches(self, rollouts: Any, context: Any) -> Any:
        return [Batch(rollouts[0], self.loss)]


class PlainRollouts(Reinforce):
    def batches(self, rollouts: Any, context: Any) -> Any:
        yield from rollouts


class UnknownOptimizer(Reinforce):
    def batches(self, rollouts: Any, context: Any) -> Any:
        yield Batch(rollouts[0], self.loss, optimizer="other")


class TwiceAsManyUpdates(Reinforce):
    def batches(self, rollouts: Any, context: Any) -> Any:
        yield from super().batches(rollouts, context)
        yield from super().batches(rollouts, context)


class LargerBatches(Reinforce):
    def batches(self, rollouts: Any, context: Any) -> Any:
        yield Batch(rollouts[0], self.loss)


class NotSaved(Baseline):
    def save(self) -> Any:
        return {}

    def load(self, tensors: Any) -> None: ...


class SavesNumbers(Baseline):
    def save(self) -> Any:
        return {"mean": float(self.mean)}


class NoDummyBatch(Baseline):
    def dummy_batch(self, rollout: Any) -> Batch:
        return Batch(rollout, self.loss)


class UntrainedParameter(Baseline):
    def make_optimizers(self, parameters: Any) -> Any:
        return super().make_optimizers(parameters[:-1])


class WrongShard(Reinforce):
    def shard(self, learners: int) -> Any:
        return type(self)(self.options)


class ShardIsNumber(Reinforce):
    def shard(self, learners: int) -> Any:
        return learners


class KeywordOptions(Reinforce):
    def __init__(self, *, coefficient: float = 0.1):
        super().__init__()


class NoLength(Reinforce):
    @property
    def sequence_length(self) -> Any:
        return 20.0


class FailsInThreads(Reinforce):
    """Works only in the thread that constructed the agent, so it fails with --runtime local."""

    def setup(self, agent: Any) -> None:
        import threading

        self.thread = threading.current_thread()

    def loss(self, agent: Any, batch: Any, progress: float) -> Any:
        import threading

        if threading.current_thread() is not self.thread:
            raise RuntimeError("wrong thread")
        return super().loss(agent, batch, progress)


WRONG_ALGORITHMS: dict[str, tuple[type, tuple[str, ...]]] = {
    "tensor": (with_loss(lambda loss, batch: loss.total), ("loss", "a tensor of shape []", "Loss(total, sums)")),
    "None": (with_loss(lambda loss, batch: None), ("returned a NoneType", "Loss(total, sums)")),
    "vector total": (
        with_loss(lambda loss, batch: Loss(loss.total * torch.ones(3), {})),
        ("total has shape [3]", "scalar", ".sum()"),
    ),
    "detached": (with_loss(lambda loss, batch: Loss(loss.total.detach(), {})), ("total has no gradient",)),
    "number in sums": (
        with_loss(lambda loss, batch: Loss(loss.total, {"a": 3.0})),  # type: ignore[dict-item]
        ("sums['a'] has type float", "scalar tensor"),
    ),
    "gradient in sums": (
        with_loss(lambda loss, batch: Loss(loss.total, {"a": loss.total})),
        ("sums['a'] has a gradient", ".detach()"),
    ),
    "mean in sums": (
        with_loss(lambda loss, batch: Loss(loss.total, {"a": loss.total.detach() / batch.num_steps})),
        ("sums['a'] is", "for its parts together", ".sum() instead of .mean()"),
    ),
    "not finite": (with_loss(lambda loss, batch: Loss(loss.total / 0, {})), ("total is", "finite")),
    "targets": (
        with_loss(lambda loss, batch: Loss(loss.total, {}, batch.reward)),
        ("targets have shape [21, 8]", "[20, 8]"),
    ),
    "mean": (
        with_loss(lambda loss, batch: Loss(loss.total / batch.num_steps, {})),
        ("gradient of a batch of 4 trajectories differs", "100.0% of its largest entry", "looks like a mean"),
    ),
    "normalised": (NormalisedOverBatch, ("gradient of a batch", "whole batch", "in batches", "extras")),
    "zero gradient": (with_loss(lambda loss, batch: Loss(loss.total * 0, {})), ("all losses are zero",)),
    "in place": (ChangesTheBatch, ("changes reward of the rollout in place",)),
    "random": (Noisy, ("loss is random", "differ by")),
    "exception": (Fails, ("KeyError: 'advantage'", f"{__file__}, line ", "dummy_batch")),
    "list of batches": (NoBatches, ("batches returned a list", "generator")),
    "rollouts": (PlainRollouts, ("batches yielded a Rollout", "Batch(rollout, loss)")),
    "optimizer": (UnknownOptimizer, ("optimizer='other'", "make_optimizers returned main")),
    "updates": (TwiceAsManyUpdates, ("4 updates from one set of rollouts", "at most 2")),
    "batch size": (LargerBatches, ("8 new trajectories", "batch_size() is 4")),
    "unsaved state": (NotSaved, ("after save and load, the next updates differ", "of the largest weight")),
    "saved numbers": (SavesNumbers, ("save must return a dict of tensors",)),
    "dummy batch": (NoDummyBatch, ("the loss of dummy_batch failed: KeyError: 'centred'", "dummy_batch must add")),
    "untrained parameter": (UntrainedParameter, ("parameters()['scale'] is in none of the optimizers",)),
    "shard": (WrongShard, ("shard(2)", "4 trajectories", "None")),
    "shard type": (ShardIsNumber, ("shard(2) returned a int",)),
    "constructor": (KeywordOptions, ("the constructor failed", "class Options", "an argument options")),
    "length": (NoLength, ("sequence_length is 20.0", "integer")),
    "threads": (FailsInThreads, ("training with --runtime local failed", "RuntimeError: wrong thread", "line ")),
}


@pytest.mark.parametrize("mistake", WRONG_ALGORITHMS)
def test_each_mistake_in_an_algorithm_has_its_line(mistake: str) -> None:
    algorithm, facts = WRONG_ALGORITHMS[mistake]
    assert_one_problem(find_problems(check_algorithm, algorithm), *facts)


def test_class_that_is_not_an_algorithm_is_reported() -> None:
    class Mine:
        def loss(self) -> None: ...

    assert_one_problem(find_problems(check_algorithm, Mine), "Mine: must be a subclass of", "Algorithm")


def test_invalid_options_are_reported_together() -> None:
    problems = find_problems(check_algorithm, Baseline, rate=2, discont=0.9)
    assert len(problems) == 2
    assert any("rate 2: must be at most 1" in problem for problem in problems)
    assert any("discont; did you mean discount" in problem for problem in problems)
