"""Generalised advantage estimation (Schulman et al. 2016)."""

from typing import NamedTuple

import torch
from torch import Tensor


class GAE(NamedTuple):
    """The result of `gae`."""

    targets: Tensor  # [T,B], value targets
    advantages: Tensor  # [T,B]


@torch.no_grad()
def gae(
    rewards: Tensor,  # [T,B], reward of the action at t
    discounts: Tensor,  # [T,B], gamma, or 0 if the action at t ended the episode
    values: Tensor,  # [T,B], V(x_t)
    bootstrap: Tensor,  # [B], V(x_T)
    *,
    lam: float = 0.95,
    horizon: int | None = None,
) -> GAE:
    """Compute the advantages A_t = delta_t + gamma lam A_{t+1}, backwards in time, and the value targets A_t + V(x_t).

    delta_t is the TD error r_t + gamma V(x_{t+1}) - V(x_t), with the reward r_t and the value V of the observation x_t.
    At the end of an episode, `discounts` contains 0 instead of gamma. If `horizon` is given, the T steps are split into
    blocks of `horizon` steps. At the last step t of a block, A_{t+1} is replaced by 0.
    """
    if bootstrap.shape != values.shape[1:]:
        raise ValueError(f"bootstrap: expected shape {list(values.shape[1:])}, got {list(bootstrap.shape)}")
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
