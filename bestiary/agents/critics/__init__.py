"""Critics: value heads. `critic(x, task)` maps features x [T,B,F] and task indices [T,B] to a ValueEstimate.

shared      one value for all tasks
per-task    one value per task, in units of the task's rewards
popart      one value per task, normalised by running statistics of the task's value targets
hl-gauss    one histogram of values per task, which is trained by classification
"""

import torch.nn as nn

from bestiary.agents.critics.estimate import ValueEstimate
from bestiary.agents.critics.hl_gauss import HistogramEstimate, HLGauss
from bestiary.agents.critics.linear import PerTaskCritic, SharedCritic
from bestiary.agents.critics.popart import WARMUP_UPDATES, PopArt

CRITICS: dict[str, type[nn.Module]] = {
    "shared": SharedCritic,
    "per-task": PerTaskCritic,
    "popart": PopArt,
    "hl-gauss": HLGauss,
}

__all__ = [
    "CRITICS",
    "WARMUP_UPDATES",
    "HLGauss",
    "HistogramEstimate",
    "PerTaskCritic",
    "PopArt",
    "SharedCritic",
    "ValueEstimate",
]
