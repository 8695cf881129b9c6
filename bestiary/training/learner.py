"""The learner: it computes gradients from rollouts and updates the agent's weights."""

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.agent import Agent, Output, State, find_child
from bestiary.agents.component_defaults import CriticDefaults
from bestiary.algorithms.actor_critic_options import ActorCriticOptions
from bestiary.algorithms.base import MAIN_OPTIMIZER, Algorithm, Batch, LearnContext, LossFunction
from bestiary.algorithms.contract_checks import batch_problem, loss_problem, parameters_problem
from bestiary.algorithms.lr_schedules import SCHEDULES
from bestiary.algorithms.return_statistics import ReturnStatistics
from bestiary.rollout import Inputs, Rollout
from bestiary.training.clipped_optimizer import ClippedOptimizer, describe_tensor
from bestiary.training.devices import autocast
from bestiary.training.waiting_trajectories import WaitingTrajectories
from bestiary.utils import plugins
from bestiary.utils.errors import RunError, UserError

CPU = torch.device("cpu")


@dataclass
class Gradient:
    """The gradient of the summed loss of some trajectories, and other sums over the same trajectories."""

    tensors: tuple[Tensor, ...]  # gradient of each parameter that the optimizer of this batch updates
    sums: dict[str, Tensor]  # loss terms and metrics, summed over steps
    target_moments: Tensor | None  # sums over the value targets, for the statistics of PopArt; None without PopArt
    num_steps: int  # number of steps in these trajectories

    def __add__(self, other: "Gradient") -> "Gradient":
        moments = None
        if self.target_moments is not None and other.target_moments is not None:
            moments = self.target_moments + other.target_moments
        return Gradient(
            torch._foreach_add(self.tensors, other.tensors),
            {name: value + other.sums[name] for name, value in self.sums.items()},
            moments,
            self.num_steps + other.num_steps,
        )


class Learner:
    """Owns everything that an update changes: the agent, the algorithm, the optimizers, and counters.

    Args:
        agent: agent to train.
        algorithm: algorithm that forms batches and computes the loss.
        total_steps: number of steps of the run, at which the learning-rate schedule ends.
        micro_batch_size: number of trajectories whose gradient is computed at once.
        max_skipped_updates: number of consecutive skipped updates after which the run stops (see `update`).
        device: device of the agent.
        precision: floating-point precision of the forward and backward pass: float32 or bfloat16.
        seed: seed for shuffling trajectories.
        num_tasks: number of tasks, for the normalisation of rewards.
        batch_size: number of new trajectories per update. The algorithm receives a multiple of this number. The
            remaining trajectories wait for the next call of `learn`. None: the algorithm receives all trajectories.
    """

    def __init__(
        self,
        agent: Agent,
        algorithm: Algorithm,
        total_steps: int,
        micro_batch_size: int,
        max_skipped_updates: int = 10,
        device: torch.device = CPU,
        precision: str = "float32",
        seed: int = 0,
        num_tasks: int = 1,
        batch_size: int | None = None,
    ):
        self.agent = agent
        self.algorithm = algorithm
        self.total_steps = total_steps
        self.waiting = WaitingTrajectories(batch_size)
        self.micro_batch_size = micro_batch_size
        self.max_skipped_updates = max_skipped_updates
        self.device = device
        self.precision = precision
        self.seed = seed
        critic = find_child(agent, "critic")
        # The critic if it keeps running statistics of the value targets, for example PopArt. None for any other critic.
        self.popart: Any = critic if isinstance(critic, CriticDefaults) and critic.keeps_statistics else None
        # Statistics for the normalisation of rewards (--algo.reward-clipping return_std); None without normalisation.
        self.return_statistics = None if algorithm.return_discount is None else ReturnStatistics(num_tasks)
        algorithm.setup(agent)
        own_parameters = algorithm.parameters()
        if (problem := parameters_problem(own_parameters)) is not None:
            raise RunError(f"{self._name}.parameters {problem}")
        named_parameters = dict(agent.named_parameters())
        agent_names = {id(parameter): name for name, parameter in named_parameters.items()}
        for name, parameter in own_parameters.items():
            if id(parameter) in agent_names:
                raise RunError(
                    f"{self._name}.parameters returned {name!r}, which is the parameter {agent_names[id(parameter)]} "
                    "of the agent; return only the algorithm's own parameters"
                )
        named_parameters |= {f"algorithm.{name}": parameter for name, parameter in own_parameters.items()}
        # Frozen parameters, for example of a pretrained torso, are not trained.
        self.parameters = [parameter for parameter in named_parameters.values() if parameter.requires_grad]
        optimizers = algorithm.make_optimizers(self.parameters)
        if not isinstance(optimizers, dict):
            found = type(optimizers).__name__
            raise RunError(f"{self._name}.make_optimizers returned a {found}; expected a dict of optimizers by name")
        self.optimizers = {
            name: ClippedOptimizer(optimizer, named_parameters) for name, optimizer in optimizers.items()
        }
        # Function that computes the gradients of all micro-batches. A runtime with threads replaces the built-in `map`
        # by the `map` of a thread pool, which computes several gradients in parallel.
        self.parallel_map: Callable[[Callable[[Rollout], Gradient], Iterable[Rollout]], Iterable[Gradient]] = map
        # On a cluster, each batch may be split among several learners. The two functions below are then replaced by
        # functions that return the sum over all learners.
        self.num_learners = 1
        self.all_reduce_gradient: Callable[[Gradient], Gradient] = lambda gradient: gradient
        self.all_reduce: Callable[[Tensor], Tensor] = lambda tensor: tensor
        self.steps = 0  # number of steps that all learners together have trained on
        self.version = 0  # version of the weights: number of updates, not counting skipped updates
        self.skipped_updates = 0  # number of updates that were skipped because their loss or gradient was not finite
        self.consecutive_skips = 0  # number of skipped updates since the last update that was not skipped

    def learn(self, rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
        """Perform all updates that the algorithm computes from these rollouts. Return the metrics of each update.

        If the batches do not fit exactly, the last trajectories wait for the next call.
        """
        rollouts = [rollout.to(self.device) for rollout in rollouts]
        num_steps = self.num_learners * sum(rollout.num_steps for rollout in rollouts)
        if self.return_statistics is not None:
            rollouts = self.return_statistics.normalise(rollouts, self.all_reduce)
        rollouts = self.waiting.complete(rollouts)
        metrics = self._update_all(rollouts) if rollouts else []
        self.steps += num_steps
        return metrics

    def _update_all(self, rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
        """Perform an update with each batch that the algorithm forms. Return the metrics of each update."""
        batches = self.algorithm.batches(rollouts, self.context())
        if not isinstance(batches, Generator):
            found = type(batches).__name__
            raise RunError(f"{self._name}.batches returned a {found}; it must be a generator: yield each Batch")
        metrics: list[dict[str, float]] = []
        batch = next(batches, None)
        while batch is not None:
            metrics.append(self.update(batch))
            try:
                batch = batches.send(metrics[-1])
            except StopIteration:
                batch = None
        return metrics

    def context(self) -> LearnContext:
        """Return the functions and the random generator that `Algorithm.batches` may use."""
        # The seed depends only on the run's seed and step, so that a resumed run shuffles in the same way.
        seed = int(np.random.SeedSequence([self.seed, self.steps]).generate_state(1)[0])
        return LearnContext(self.infer, torch.Generator().manual_seed(seed), self.all_reduce)

    def update(self, batch: Batch) -> dict[str, float]:
        """Perform one optimizer step on a batch and return its metrics.

        If the loss or the gradient is not finite, the update is skipped: no optimizer step is performed.

        With PopArt, the running statistics may not fit the value targets of this batch yet. The value loss then has the
        wrong scale. In this case, the statistics are updated first, and the gradient is computed again.
        """
        if (problem := batch_problem(batch, self.optimizers)) is not None:
            raise RunError(f"{self._name}.batches {problem}")
        optimizer = self.optimizers[batch.optimizer]
        gradient = self.all_reduce_gradient(self.batch_gradient(batch))
        moments = gradient.target_moments
        wrong_scale = moments is not None and bool(moments.isfinite().all()) and not self.popart.accepts(moments)
        if wrong_scale:
            self.popart.update_statistics(moments)
            gradient = self.all_reduce_gradient(self.batch_gradient(batch))
        tensors, sums, num_steps = gradient.tensors, gradient.sums, gradient.num_steps
        if self.algorithm.mean_loss:
            tensors = torch._foreach_div(tensors, num_steps)
        norms = torch.stack(torch._foreach_norm(tensors))
        total_norm = torch.linalg.vector_norm(norms)
        module_norms = optimizer.module_norms(norms)
        # `tolist` makes the CPU wait for the GPU. All numbers are copied together, so the CPU waits only once per
        # update.
        numbers = torch.stack([*sums.values(), total_norm, *module_norms]).tolist()
        finite = all(map(math.isfinite, numbers))
        lr = self.learning_rate()
        new_versions = batch.rollout.version[:, : batch.num_new]
        policy_lag = self.version - float(new_versions.float().mean())
        max_policy_lag = self.version - int(new_versions.min())
        if finite:
            optimizer.step(tensors, total_norm, self.algorithm.options.max_grad_norm, lr)
            if moments is not None and not wrong_scale:
                self.popart.update_statistics(moments)
        self._count_update(finite)
        names = [*sums, "grad_norm", *(f"grad_norm/{module}" for module in optimizer.module_names)]
        metrics = dict(zip(names, numbers, strict=True))
        metrics |= {name: metrics[name] / num_steps for name in sums}
        if max_policy_lag == 0 and "abs_log_ratio" in metrics:
            # Actor and learner used the same weights. The log ratio of their action probabilities must then be 0, apart
            # from rounding. A larger value shows an error in the agent or in its memory.
            metrics["abs_log_ratio_lag0"] = metrics["abs_log_ratio"]
        if moments is not None:
            metrics["recomputed_updates"] = float(wrong_scale)
        if self.return_statistics is not None:
            metrics["return_std"] = float(self.return_statistics.deviation.mean())
        return {**metrics, "lr": lr, "policy_lag": policy_lag, "max_policy_lag": max_policy_lag}

    def batch_gradient(self, batch: Batch) -> Gradient:
        """Return the gradient of the summed loss of a batch. Gradients of micro-batches are added in a fixed order."""
        parameters = self.optimizers[batch.optimizer].parameters
        function = partial(self.micro_batch_gradient, parameters, batch.loss)
        return reduce(add, self.parallel_map(function, batch.rollout.split(self.micro_batch_size)))

    def micro_batch_gradient(
        self, parameters: list[nn.Parameter], loss_function: LossFunction, micro_batch: Rollout
    ) -> Gradient:
        """Return the gradient of the summed loss of one micro-batch."""
        with autocast(self.device, self.precision):
            loss = loss_function(self.agent, micro_batch, self.progress)
        if (problem := loss_problem(loss)) is not None:
            raise RunError(f"{getattr(loss_function, '__qualname__', 'loss')} {problem}")
        tensors = torch.autograd.grad(loss.total, parameters, materialize_grads=True)
        moments = None
        if self.popart is not None and loss.targets is not None:
            moments = self.popart.target_moments(loss.targets, micro_batch.task[:-1], micro_batch.reward[1:])
        sums = {"loss": loss.total.detach(), **loss.sums}
        return Gradient(tensors, sums, moments, micro_batch.num_steps)

    @torch.no_grad()
    def infer(self, inputs: Inputs, state: State) -> tuple[Output, State]:
        """Run the agent with its current weights, without gradients."""
        with autocast(self.device, self.precision):
            return self.agent(inputs, state)

    def learning_rate(self) -> float:
        """Return the learning rate of the next update: the initial rate times the factor of the schedule."""
        options = self.algorithm.options
        progress = self.progress
        if isinstance(options, ActorCriticOptions) and options.lr_schedule_steps is not None:
            progress = min(1.0, self.steps / options.lr_schedule_steps)
        return options.lr * SCHEDULES[options.lr_schedule](progress)

    @property
    def _name(self) -> str:
        """The name of the algorithm's class, for messages."""
        return type(self.algorithm).__name__

    @property
    def progress(self) -> float:
        """Return the completed fraction of the run, from 0 to 1."""
        return min(self.steps, self.total_steps) / self.total_steps

    def _count_update(self, finite: bool) -> None:
        """Count an update, or a skipped update if `finite` is False.

        Raise RunError after too many consecutive skips.
        """
        self.version += int(finite)
        self.skipped_updates += int(not finite)
        self.consecutive_skips = 0 if finite else self.consecutive_skips + 1
        if self.consecutive_skips >= self.max_skipped_updates:
            raise RunError(
                f"{self.consecutive_skips} consecutive updates were not finite (last at step {self.steps}) and were "
                "skipped; try a smaller --lr or --algo.reward-clipping abs_one"
            )

    def save(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of the checkpoint files `model`, `optimizer` and `algorithm`.

        The file `optimizer` contains the tensors of all optimizers. The name of a tensor starts with the name of its
        optimizer and a slash; tensors of the main optimizer have no such prefix. `counters` returns the rest of the
        state.
        """
        optimizer_tensors = {
            _optimizer_prefix(name) + key: value
            for name, optimizer in self.optimizers.items()
            for key, value in optimizer.save().items()
        }
        own_parameters = {f"parameter.{name}": value.data for name, value in self.algorithm.parameters().items()}
        own_state = {f"state.{name}": value for name, value in self.algorithm.save().items()}
        if not all(isinstance(value, Tensor) for value in own_state.values()):
            raise RunError(f"{self._name}.save must return a dict of tensors, for example {{'count': torch.tensor(3)}}")
        statistics = {} if self.return_statistics is None else self.return_statistics.save()
        return {
            "model": dict(self.agent.state_dict()),
            "optimizer": optimizer_tensors,
            "algorithm": {
                **own_parameters,
                **own_state,
                **{f"return_statistics.{name}": value for name, value in statistics.items()},
                **{f"waiting.{name}": value for name, value in self.waiting.save().items()},
            },
        }

    def counters(self) -> dict[str, int]:
        """Return the counters of steps and updates, which are saved together with the tensors."""
        return {"steps": self.steps, "version": self.version, "skipped_updates": self.skipped_updates}

    def load(self, tensors: dict[str, dict[str, Tensor]], counters: dict[str, int]) -> None:
        """Restore the tensors returned by `save` and the counters returned by `counters`.

        Raises:
            UserError: the tensors or the counters do not fit this learner.
        """
        for name in ("steps", "version", "skipped_updates"):
            if type(counters.get(name)) is not int or not 0 <= counters[name] < 2**63:
                raise UserError(f"state.json: {name} is {counters.get(name)!r}; expected a whole number from 0 on")
        for name, parameter in self.algorithm.parameters().items():
            found, expected = (
                describe_tensor(value) for value in (tensors["algorithm"].get(f"parameter.{name}"), parameter)
            )
            if found != expected:
                raise UserError(f"algorithm.safetensors: {name} is {found} in the checkpoint; expected {expected}")
        self.agent.load_state_dict(tensors["model"])
        for name, optimizer in self.optimizers.items():
            optimizer.load(_with_prefix(tensors["optimizer"], _optimizer_prefix(name)))
        with torch.no_grad():
            for name, parameter in self.algorithm.parameters().items():
                parameter.copy_(tensors["algorithm"][f"parameter.{name}"])
        try:
            self.algorithm.load(_with_prefix(tensors["algorithm"], "state."))
            if self.return_statistics is not None:
                self.return_statistics.load(_with_prefix(tensors["algorithm"], "return_statistics."))
            self.waiting.load(_with_prefix(tensors["algorithm"], "waiting."), self.device)
        except (KeyError, ValueError, TypeError, IndexError, RuntimeError, ZeroDivisionError) as error:
            raise UserError(f"algorithm.safetensors does not fit {self._name}: {plugins.error_line(error)}") from error
        self.steps = counters["steps"]
        self.version = counters["version"]
        self.skipped_updates = counters["skipped_updates"]


def _optimizer_prefix(name: str) -> str:
    """Return the prefix of an optimizer's tensor names in a checkpoint. The main optimizer has no prefix."""
    return "" if name == MAIN_OPTIMIZER else f"{name}/"


def _with_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with a prefix, and remove the prefix from the names.

    If the prefix is empty (main optimizer), return the tensors whose names contain no slash.
    """
    if not prefix:
        return {name: tensor for name, tensor in tensors.items() if "/" not in name}
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
