"""V-trace: value targets and advantages for decisions that an older policy made (Espeholt et al. 2018, section 4.1)."""

from typing import NamedTuple

import torch
from torch import Tensor


class VTrace(NamedTuple):
    targets: Tensor  # [T,B,...] v_t, what the value should be
    advantages: Tensor  # [T,B,...] what weighs the policy's gradient


@torch.no_grad()
def vtrace(
    log_rhos: Tensor,  # [T,B] log of pi(a_t|x_t) / mu(a_t|x_t)
    rewards: Tensor,  # [T,B] what the decision at t brought
    discounts: Tensor,  # [T,B] gamma, 0 where the decision at t ended the episode
    values: Tensor,  # [T,B] V(x_t)
    bootstrap: Tensor,  # [B] V(x_T)
    *,
    rho_bar: float | None = 1.0,
    pg_rho_bar: float | None = 1.0,
    lam: float = 1.0,
) -> VTrace:
    """The sums of section 4.1, from the last step back. Further axes behind [T,B] broadcast."""
    if bootstrap.shape != values.shape[1:]:
        raise ValueError(f"bootstrap {tuple(bootstrap.shape)} does not fit values {tuple(values.shape)}")
    rhos = log_rhos.exp()
    clipped = rhos if rho_bar is None else rhos.clamp(max=rho_bar)
    traces = lam * rhos.clamp(max=1.0)  # c_t of the paper, c_bar = 1
    next_values = torch.cat([values[1:], bootstrap[None]])  # V(x_{t+1})
    deltas = clipped * (rewards + discounts * next_values - values)

    correction = torch.zeros_like(bootstrap)  # v_t - V(x_t)
    corrections = []
    for t in reversed(range(len(values))):
        correction = deltas[t] + discounts[t] * traces[t] * correction
        corrections.append(correction)
    targets = values + torch.stack(corrections[::-1])

    next_targets = torch.cat([targets[1:], bootstrap[None]])  # v_{t+1}
    weights = rhos if pg_rho_bar is None else rhos.clamp(max=pg_rho_bar)
    return VTrace(targets, weights * (rewards + discounts * next_targets - values))
