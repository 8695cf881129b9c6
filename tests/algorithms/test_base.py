"""The base class of algorithms: defaults, a user's algorithm in each runtime, own parameters, optimizers and state."""

from pathlib import Path
from typing import Any

import pytest
import torch

import bestiary
from bestiary.algorithms import ALGORITHMS
from bestiary.algorithms.base import MAIN_OPTIMIZER
from bestiary.training.factory import make_actors_and_learner
from bestiary.training.serial import collect_rollouts
from bestiary.utils.errors import RunError, UserError
from tests.trusted import resolve_own

ONLY_LOSS = """
from bestiary.algorithms.base import Algorithm, Loss


class Reinforce(Algorithm):
    def loss(self, agent, batch, progress):
        output, _ = agent(batch.inputs(), batch.state)
        log_probs = output.distribution[:-1].log_prob(batch.action)
        loss = -(log_probs * batch.reward[1:].flip(0).cumsum(0).flip(0)).sum()
        return Loss(loss, {"policy_loss": loss.detach()})
"""

# An algorithm with two losses, two optimizers, an own parameter (a learned return baseline) and an own counter.
STATEFUL = """
import torch
from torch import nn
from bestiary.algorithms.base import Algorithm, Batch, Loss
from bestiary.algorithms.optimizers import make_adam


class TwoLosses(Algorithm):
    def setup(self, agent):
        self.baseline = nn.Parameter(torch.zeros(()))
        self.num_batches = 0

    def parameters(self):
        return {"baseline": self.baseline}

    def make_optimizers(self, parameters):
        *policy, baseline = parameters
        main = make_adam(policy, self.options.lr, self.options.eps)
        other = make_adam([baseline], self.options.lr, self.options.eps)
        other.param_groups[0]["lr_factor"] = 10.0
        return {"main": main, "baseline": other}

    def batches(self, rollouts, context):
        for batch in super().batches(rollouts, context):
            metrics = yield batch
            assert "loss" in metrics
            self.num_batches += 1
            if self.num_batches % 2 == 0:
                yield Batch(batch.rollout, self.baseline_loss, optimizer="baseline")

    def loss(self, agent, batch, progress):
        output, _ = agent(batch.inputs(), batch.state)
        log_probs = output.distribution[:-1].log_prob(batch.action)
        loss = -(log_probs * (batch.reward[1:] - self.baseline.detach())).sum()
        return Loss(loss, {})

    def baseline_loss(self, agent, batch, progress):
        loss = (batch.reward[1:] - self.baseline).square().sum()
        return Loss(loss, {"baseline_loss": loss.detach()})

    def save(self):
        return {"num_batches": torch.tensor(self.num_batches)}

    def load(self, tensors):
        self.num_batches = int(tensors["num_batches"])
"""

SMALL: dict[str, Any] = {
    "env": "toy/chain",
    "num_envs": 8,
    "batch_size": 4,
    "rollout_length": 5,
    "torso": "mlp",
    "log_every": 40,
    "algo.lr_schedule": "constant",
}


def write(source: str, name: str) -> str:
    Path("mine.py").write_text(source)
    return f"mine.py:{name}"


@pytest.mark.parametrize("runtime", ["serial", "local"])
def test_algorithm_that_defines_only_loss_can_be_trained(runtime: str) -> None:
    algo = write(ONLY_LOSS, "Reinforce")
    run = bestiary.train(**SMALL, algo=algo, runtime=runtime, steps=800, run_dir="r")
    assert run.metrics["updates"][-1] == 40  # 800 steps, 20 steps per update
    assert "policy_loss" in run.metrics
    assert not list(Path("r/checkpoints").glob("*/algorithm.safetensors"))  # it has no state of its own


@pytest.mark.xdist_group("ray")
def test_algorithm_that_defines_only_loss_can_be_trained_on_a_cluster() -> None:
    algo = write(ONLY_LOSS, "Reinforce")
    options = {**SMALL, "algo": algo, "cluster": "local", "actors": 1, "pools": 2, "learners": 2}
    run = bestiary.train(**options, steps=800, run_dir="r")
    assert run.steps == 800
    assert run.metrics["updates"][-1] == 40


WRONG = """
import torch
from bestiary.algorithms.base import Algorithm, Batch, Loss


class Plain(Algorithm):
    def loss(self, agent, batch, progress):
        output, _ = agent(batch.inputs(), batch.state)
        return output.value.square().mean()


class Rollouts(Algorithm):
    def batches(self, rollouts, context):
        yield from rollouts


class List(Algorithm):
    def batches(self, rollouts, context):
        return [Batch(rollouts[0], self.loss)]


class OneOptimizer(Plain):
    def make_optimizers(self, parameters):
        return torch.optim.Adam(parameters)


class SavesNumber(Algorithm):
    def loss(self, agent, batch, progress):
        output, _ = agent(batch.inputs(), batch.state)
        return Loss(output.value.sum(), {})

    def save(self):
        return {"count": 3}

    def load(self, tensors): ...


class TwoArguments(Algorithm):
    def loss(self, agent, batch):
        ...
"""


@pytest.mark.parametrize(
    ("name", "runtime", "message"),
    [
        ("Plain", "serial", r"Plain.loss returned a tensor of shape \[\]; it must return .*Loss"),
        ("Plain", "local", r"Plain.loss returned a tensor of shape \[\]; it must return .*Loss"),
        ("Rollouts", "serial", r"Rollouts.batches yielded a Rollout; it must yield .*Batch"),
        ("List", "serial", r"List.batches returned a list; it must be a generator"),
        ("OneOptimizer", "serial", r"OneOptimizer.make_optimizers returned a Adam; expected a dict"),
        ("SavesNumber", "serial", r"SavesNumber.save must return a dict of tensors"),
    ],
)
def test_wrong_result_of_a_method_stops_the_run_with_one_line(name: str, runtime: str, message: str) -> None:
    algo = write(WRONG, name)
    with pytest.raises(RunError, match=message) as error:
        bestiary.train(**SMALL, algo=algo, runtime=runtime, steps=800, run_dir="r")
    assert len(str(error.value).splitlines()) == 1


def test_loss_with_wrong_arguments_is_refused() -> None:
    with pytest.raises(UserError, match=r"loss has the arguments \(self, agent, batch\); expected .*progress"):
        resolve_own({**SMALL, "algo": write(WRONG, "TwoArguments")})


def test_several_losses_and_optimizers_train_their_own_parameters() -> None:
    algo = write(STATEFUL, "TwoLosses")
    (actor,), learner = make_actors_and_learner(resolve_own({**SMALL, "algo": algo, "runtime": "serial", "steps": 800}))
    actor.start()
    algorithm: Any = learner.algorithm
    assert learner.optimizers[MAIN_OPTIMIZER].parameters == list(learner.agent.parameters())
    assert learner.optimizers["baseline"].parameters == [algorithm.baseline]
    before = [parameter.clone() for parameter in learner.agent.parameters()]
    first, second, third = learner.learn(collect_rollouts(actor, learner))
    actor.pool.close()
    assert "baseline_loss" not in first
    assert "baseline_loss" not in second
    assert "grad_norm/policy" in second
    assert {name for name in third if name.startswith("grad_norm/")} == {"grad_norm/algorithm"}
    assert third["lr"] == learner.algorithm.options.lr
    # The first step of Adam moves a parameter by the learning rate, here multiplied by lr_factor.
    assert abs(algorithm.baseline.item()) == pytest.approx(10 * learner.algorithm.options.lr, rel=1e-3)
    assert any(not torch.equal(a, b) for a, b in zip(before, learner.agent.parameters(), strict=True))


FROZEN_TORSO = """
from torch import nn


class Frozen(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.fixed = nn.Linear(spec["vector"].shape[0], 8).requires_grad_(False)
        self.trained = nn.Linear(8, 8)
        self.output_size = 8

    def forward(self, observation):
        return self.trained(self.fixed(observation["vector"]))
"""


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_frozen_parameters_are_not_trained(algo: str) -> None:
    sizes: dict[str, Any] = {"ppg": {"rollout_length": 16, "algo.aux_interval": 1}, "ppo": {"rollout_length": 16}}
    options: dict[str, Any] = {"env": "toy/chain", "num_envs": 8, "runtime": "serial", **sizes.get(algo, {})}
    config = resolve_own({**options, "algo": algo, "torso": write(FROZEN_TORSO, "Frozen")})
    (actor,), learner = make_actors_and_learner(config)
    actor.start()
    agent: Any = learner.agent
    fixed, trained = agent.torso.fixed.weight.clone(), agent.torso.trained.weight.clone()
    for _ in range(2):
        learner.learn(collect_rollouts(actor, learner))
    actor.pool.close()
    assert torch.equal(agent.torso.fixed.weight, fixed)
    assert not torch.equal(agent.torso.trained.weight, trained)


def test_own_parameters_state_and_optimizers_are_resumed_exactly() -> None:
    algo = write(STATEFUL, "TwoLosses")
    options = {**SMALL, "algo": algo, "runtime": "serial", "steps": 1_200}
    uninterrupted = bestiary.train(**options, run_dir="uninterrupted")
    resumed = bestiary.resume(bestiary.train(**{**options, "steps": 520, "run_dir": "resumed"}), steps=1_200)
    expected, found = (run.checkpoints[-1].load_learner() for run in (uninterrupted, resumed))
    assert set(expected["algorithm"]) == {"parameter.baseline", "state.num_batches"}
    assert int(expected["algorithm"]["state.num_batches"]) == 60
    assert any(name.startswith("baseline/") for name in expected["optimizer"])
    for file, tensors in expected.items():
        assert tensors.keys() == found[file].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, found[file][name]), f"{file} {name}"


def test_class_that_is_not_an_algorithm_is_refused() -> None:
    Path("mine.py").write_text("class Mine:\n    def loss(self, agent, batch, progress): ...\n")
    with pytest.raises(UserError, match=r"--algo mine.py:Mine: must be a subclass of .*Algorithm"):
        resolve_own({**SMALL, "algo": "mine.py:Mine"})
