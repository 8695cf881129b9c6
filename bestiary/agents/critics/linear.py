"""Critics with a linear layer and values in units of the rewards."""

import torch.nn as nn
from torch import Tensor

from bestiary.agents.component_defaults import CriticDefaults
from bestiary.agents.critics.estimate import ValueEstimate, select_task


class SharedCritic(nn.Linear, CriticDefaults):
    """Critic with a single value output, which is used for all tasks."""

    def __init__(self, input_size: int, tasks: int = 1):
        super().__init__(input_size, 1)

    def forward(self, x: Tensor, task: Tensor) -> ValueEstimate:  # type: ignore[override]
        return ValueEstimate(super().forward(x).squeeze(-1))


class PerTaskCritic(nn.Linear, CriticDefaults):
    """Critic with one value output per task, in units of the rewards (not normalised)."""

    def __init__(self, input_size: int, tasks: int = 1):
        super().__init__(input_size, tasks)

    def forward(self, x: Tensor, task: Tensor) -> ValueEstimate:  # type: ignore[override]
        return ValueEstimate(select_task(super().forward(x), task))
