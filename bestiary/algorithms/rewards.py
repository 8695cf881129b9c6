"""What of a reward is learnt from."""

import torch
from torch import Tensor

MODES = ("auto", "abs_one", "soft_asymmetric", "none")


def squash(reward: Tensor, mode: str, scale: float | None = None) -> Tensor:
    """Scaled first, then clipped. abs_one: clamped to [-1,1]. soft_asymmetric: 5 tanh(r/5), losses at 0.3 of that (IMPALA's
    DMLab runs). auto: abs_one, unless a config knows better."""
    reward = reward if scale is None else reward * scale
    if mode in ("abs_one", "auto"):
        return reward.clamp(-1, 1)
    if mode == "soft_asymmetric":
        squashed = torch.tanh(reward / 5)
        return torch.where(reward < 0, 1.5 * squashed, 5.0 * squashed)
    if mode == "none":
        return reward
    raise ValueError(f"reward mode {mode} is none of {MODES}")
