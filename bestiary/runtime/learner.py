"""The learner: turns rollouts into better weights."""

import math

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.agent import Agent
from bestiary.algorithms.impala import Impala
from bestiary.errors import RunError
from bestiary.rollout import Rollout


class Learner:
    """An agent, its optimizer and its progress; everything that an update changes."""

    def __init__(self, agent: Agent, algorithm: Impala, total_steps: int, group_size: int, max_bad_updates: int = 10):
        self.agent, self.algorithm = agent, algorithm
        self.total_steps, self.group_size, self.max_bad_updates = total_steps, group_size, max_bad_updates
        self.parameters = list(agent.parameters())
        self.optimizer = algorithm.make_optimizer(self.parameters)
        self.steps = 0  # decisions learnt from
        self.version = 0  # updates made; the name of the weights
        self.skipped = 0  # updates left out because they were not finite
        self.skipped_in_a_row = 0

    def update(self, rollout: Rollout) -> dict[str, float]:
        """One step of the optimizer on one batch of trajectories; returns what is worth logging."""
        gradients, sums = self.gradients(rollout)
        norm = nn.utils.get_total_norm(gradients)
        finite = bool(torch.isfinite(norm)) and all(map(math.isfinite, sums.values()))
        lr = self.learning_rate()
        if finite:
            self._step(gradients, norm, lr)
        self._count(finite)
        decisions = rollout.length * rollout.num_envs
        self.steps += decisions
        means = {name: value / decisions for name, value in sums.items()}
        lag = self.version - int(finite) - float(rollout.version.float().mean())
        return {**means, "grad_norm": float(norm), "lr": lr, "lag": lag, "skipped": self.skipped}

    def gradients(self, rollout: Rollout) -> tuple[list[Tensor], dict[str, float]]:
        """The gradient of the summed loss: that of each group of trajectories, added up in their order."""
        total: list[Tensor] = []
        sums: dict[str, float] = {}
        for group in rollout.groups(self.group_size):
            loss, parts = self.algorithm.loss(self.agent, group)
            gradient = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
            total = list(gradient) if not total else list(torch._foreach_add(total, gradient))
            for name, value in {"loss": loss.detach(), **parts}.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        return total, sums

    def learning_rate(self) -> float:
        """Linear to zero over the run's total steps, or constant."""
        options = self.algorithm.options
        left = 1 - min(self.steps, self.total_steps) / self.total_steps if options.schedule == "linear" else 1.0
        return options.lr * left

    def _step(self, gradients: list[Tensor], norm: Tensor, lr: float) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
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
            state.setdefault(int(index), {})[name] = value
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})
        self.steps, self.version, self.skipped = counters["steps"], counters["version"], counters["skipped"]
