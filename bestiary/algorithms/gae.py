"""Generalised advantage estimation (Schulman et al. 2016)."""

from typing import NamedTuple

import torch
from torch import Tensor


class GAE(NamedTuple):
    targets: Tensor  # [T,B] what the value should be
    advantages: Tensor  # [T,B]


@torch.no_grad()
def gae(
    rewards: Tensor,  # [T,B] what the decision at t brought
    discounts: Tensor,  # [T,B] gamma, 0 where the decision at t ended the episode
    values: Tensor,  # [T,B] V(x_t)
    bootstrap: Tensor,  # [B] V(x_T)
    *,
    lam: float = 0.95,
    horizon: int | None = None,
) -> GAE:
    """From the last step back: A_t = delta_t + gamma lam A_{t+1}. With a horizon, the sum ends at each of its multiples."""
    if bootstrap.shape != values.shape[1:]:
        raise ValueError(f"bootstrap {tuple(bootstrap.shape)} does not fit values {tuple(values.shape)}")
    deltas = rewards + discounts * torch.cat([values[1:], bootstrap[None]]) - values
    advantage = torch.zeros_like(bootstrap)
    advantages = []
    for t in reversed(range(len(values))):
        if horizon is not None and (t + 1) % horizon == 0:
            advantage = torch.zeros_like(bootstrap)
        advantage = deltas[t] + discounts[t] * lam * advantage
        advantages.append(advantage)
    stacked = torch.stack(advantages[::-1])
    return GAE(values + stacked, stacked)
