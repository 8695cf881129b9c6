"""Scaling, clipping and normalisation of training rewards."""

import torch
from torch import Tensor

REWARD_CLIPPING = ("auto", "abs_one", "soft_asymmetric", "return_std", "none")


def transform_reward(reward: Tensor, clipping: str, scale: float | None = None) -> Tensor:
    """Return the rewards, multiplied by `scale` (None: unchanged) and then clipped.

    Clipping modes for a reward r:
        abs_one: clamp r to [-1,1].
        soft_asymmetric: 5 tanh(r/5), multiplied by 0.3 if r is negative (Espeholt et al. 2018, for DMLab).
        none: no clipping.
        return_std: not possible here, because it needs running statistics: use `learner_rewards`.
        auto: the same as abs_one. With PopArt, `auto` does not occur: `derive_rewards` has replaced it by `none`.
    """
    reward = reward if scale is None else reward * scale
    if clipping in ("abs_one", "auto"):
        return reward.clamp(-1, 1)
    if clipping == "soft_asymmetric":
        squashed = torch.tanh(reward / 5)
        return torch.where(reward < 0, 1.5 * squashed, 5.0 * squashed)
    if clipping == "none":
        return reward
    if clipping == "return_std":
        raise ValueError("reward clipping return_std needs running statistics: use learner_rewards(rollout, options)")
    raise ValueError(f"reward clipping {clipping}: expected one of {', '.join(REWARD_CLIPPING)}")
