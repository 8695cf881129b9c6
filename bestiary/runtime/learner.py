"""The learner: turns rollouts into better weights."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.agent import Agent, Output, State
from bestiary.algorithms.algorithm import Algorithm
from bestiary.algorithms.schedules import SCHEDULES
from bestiary.errors import RunError
from bestiary.rollout import Inputs, Rollout
from bestiary.runtime.devices import autocast
from bestiary.runtime.snapshots import laid_out_as

CPU = torch.device("cpu")


@dataclass
class Gradient:
    """Of one group of trajectories: for each parameter, and what else adds up over groups."""

    parameters: tuple[Tensor, ...]
    sums: dict[str, Tensor]
    moments: Tensor | None  # of the value targets, for a critic that adapts to them
    decisions: int  # that it is of

    def __add__(self, other: "Gradient") -> "Gradient":
        return Gradient(
            torch._foreach_add(self.parameters, other.parameters),
            {name: value + other.sums[name] for name, value in self.sums.items()},
            None if self.moments is None or other.moments is None else self.moments + other.moments,
            self.decisions + other.decisions,
        )


class Learner:
    """An agent, its optimizer and its progress; everything that an update changes."""

    def __init__(
        self,
        agent: Agent,
        algorithm: Algorithm,
        total_steps: int,
        group_size: int,
        max_bad_updates: int = 10,
        device: torch.device = CPU,
        precision: str = "float32",
        seed: int = 0,
    ):
        self.agent, self.algorithm, self.device, self.precision = agent, algorithm, device, precision
        self.total_steps, self.group_size, self.max_bad_updates = total_steps, group_size, max_bad_updates
        self.parameters = list(agent.parameters())
        owners = [name.split(".")[0] for name, _ in agent.named_parameters()]
        self.parts = list(dict.fromkeys(owners))  # of the agent, such as torso and policy
        self.owners = torch.tensor([self.parts.index(owner) for owner in owners], device=device)
        critic = getattr(agent, "critic", None)
        self.adaptive: Any = (
            critic if hasattr(critic, "adapt") else None
        )  # a critic that follows its targets, such as PopArt
        self.optimizer = algorithm.make_optimizer(self.parameters)
        self.map: Callable[[Callable[[Rollout], Gradient], Iterable[Rollout]], Iterable[Gradient]] = map
        self.learners = 1  # that share every batch out among themselves, and ...
        self.total: Callable[[Gradient], Gradient] = lambda own: own  # ... what they all found, from what one found
        self.steps = 0  # decisions learnt from, all learners together
        self.seed = seed  # of what the algorithm shuffles
        self.version = 0  # updates made; the name of the weights
        self.skipped = 0  # updates left out because they were not finite
        self.skipped_in_a_row = 0

    def learn(self, rollouts: Sequence[Rollout]) -> list[dict[str, float]]:
        """All updates that so many rollouts as the algorithm takes at once bring."""
        shuffling = torch.Generator().manual_seed(self._shuffling_seed())
        moved = [rollout.to(self.device) for rollout in rollouts]
        metrics = self.algorithm.learn(self.think, moved, self.update, shuffling)
        self.steps += self.learners * sum(rollout.decisions for rollout in rollouts)
        return metrics

    def update(self, batch: Rollout) -> dict[str, float]:
        """One step of the optimizer on one batch of trajectories; returns what is worth logging."""
        found = self.total(self.gradients(batch))
        gradients, sums, decisions = found.parameters, found.sums, found.decisions
        if self.algorithm.averages:
            gradients = torch._foreach_div(gradients, decisions)
        norms = torch.stack(torch._foreach_norm(gradients))
        norm = torch.linalg.vector_norm(norms)
        of_parts = norms.new_zeros(len(self.parts)).index_add_(0, self.owners, norms.square()).sqrt()
        # the one time that the host waits for the device
        numbers = torch.stack([*sums.values(), norm, *of_parts]).tolist()
        finite, lr = all(map(math.isfinite, numbers)), self.learning_rate()
        lag = self.version - float(batch.version.float().mean())
        max_lag = self.version - int(batch.version.min())
        adapting = finite and found.moments is not None
        unfit = adapting and not self.adaptive.fits(
            found.moments
        )  # by what its errors were measured: nothing is learnt
        if finite and not unfit:
            self._step(gradients, norm, lr)
        if adapting:
            self.adaptive.adapt(found.moments)
        self._count(finite)
        named = dict(zip([*sums, "grad_norm", *(f"grad_norm/{part}" for part in self.parts)], numbers, strict=True))
        named |= {name: named[name] / decisions for name in sums}
        named |= {} if found.moments is None else {"unfit": float(unfit)}
        return {**named, "lr": lr, "lag": lag, "max_lag": max_lag}

    def gradients(self, batch: Rollout) -> Gradient:
        """The gradient of the summed loss: that of each group of trajectories, added up in their order."""
        return reduce(add, self.map(self.gradient, batch.groups(self.group_size)))

    @torch.no_grad()
    def think(self, inputs: Inputs, state: State) -> tuple[Output, State]:
        """What the agent makes of some inputs now."""
        with autocast(self.device, self.precision):
            return self.agent(inputs, state)

    def gradient(self, group: Rollout) -> Gradient:
        with autocast(self.device, self.precision):
            loss = self.algorithm.loss(self.agent, group, self.progress)
        gradient = torch.autograd.grad(loss.total, self.parameters, materialize_grads=True)
        moments = None
        if self.adaptive is not None and loss.targets is not None:
            moments = self.adaptive.moments(loss.targets, group.task[:-1])
        sums = {"loss": loss.total.detach(), **loss.sums}
        return Gradient(gradient, sums, moments, group.decisions)

    def learning_rate(self) -> float:
        """Of the next update, from what it is at the start and the schedule over the run's total steps."""
        options = self.algorithm.options
        return options.lr * SCHEDULES[options.schedule](self.progress)

    @property
    def progress(self) -> float:
        """Of the run, 0 to 1."""
        return min(self.steps, self.total_steps) / self.total_steps

    def _step(self, gradients: Sequence[Tensor], norm: Tensor, lr: float) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = laid_out_as(parameter, gradient)
        nn.utils.clip_grads_with_norm_(self.parameters, self.algorithm.options.max_grad_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _count(self, finite: bool) -> None:
        self.version += int(finite)
        self.skipped += int(not finite)
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= self.max_bad_updates:
            raise RunError(
                f"{self.skipped_in_a_row} updates in a row were not finite (last at step {self.steps}): the weights were "
                "left as they were. A smaller --lr, or --algo.reward abs_one, often helps"
            )

    def _shuffling_seed(self) -> int:
        """Another for every step of the run, and always the same: nothing to save for an exact resume."""
        return int(np.random.SeedSequence([self.seed, self.steps]).generate_state(1)[0])

    def save(self) -> dict[str, dict[str, Tensor]]:
        """Tensors by file and name; the counters are in `counters`."""
        moments = {
            f"{index}.{name}": value
            for index, values in self.optimizer.state_dict()["state"].items()
            for name, value in values.items()
        }
        return {"model": dict(self.agent.state_dict()), "optimizer": moments}

    def counters(self) -> dict[str, int]:
        return {"steps": self.steps, "version": self.version, "skipped": self.skipped}

    def load(self, tensors: dict[str, dict[str, Tensor]], counters: dict[str, int]) -> None:
        self.agent.load_state_dict(tensors["model"])
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors["optimizer"].items():
            index, name = key.split(".", 1)
            parameter = self.parameters[int(index)]
            moment = value.shape == parameter.shape
            state.setdefault(int(index), {})[name] = laid_out_as(parameter, value) if moment else value
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})
        self.steps, self.version, self.skipped = counters["steps"], counters["version"], counters["skipped"]
