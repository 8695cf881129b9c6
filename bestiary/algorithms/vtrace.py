"""V-trace: off-policy value targets and advantages (Espeholt et al. 2018, section 4.1)."""

from typing import NamedTuple

import torch
from torch import Tensor


class VTrace(NamedTuple):
    """The result of `vtrace`."""

    targets: Tensor  # [T,B,...], value targets v_t
    advantages: Tensor  # [T,B,...], advantages for the policy gradient


@torch.no_grad()
def vtrace(
    log_rhos: Tensor,  # [T,B], log of pi(a_t|x_t) / mu(a_t|x_t)
    rewards: Tensor,  # [T,B], reward of the action at t
    discounts: Tensor,  # [T,B], gamma, or 0 if the action at t ended the episode
    values: Tensor,  # [T,B], V(x_t)
    bootstrap: Tensor,  # [B], V(x_T)
    *,
    rho_bar: float | None = 1.0,
    pg_rho_bar: float | None = 1.0,
    lam: float = 1.0,
) -> VTrace:
    """Compute the value targets v_t and the advantages for the policy gradient, backwards in time.

    pi is the learner's policy, mu the actor's policy, a_t the action and x_t the observation at time t. The importance
    weights pi / mu are clipped to at most `rho_bar` in the targets, and to at most `pg_rho_bar` in the advantages; None
    means no clipping. The paper's coefficients are c_t = `lam` min(1, pi / mu). The tensors may have further axes after
    T and B, which are broadcast against each other.
    """
    if bootstrap.shape != values.shape[1:]:
        raise ValueError(f"bootstrap: expected shape {list(values.shape[1:])}, got {list(bootstrap.shape)}")
    rhos = log_rhos.exp()
    clipped = rhos if rho_bar is None else rhos.clamp(max=rho_bar)
    traces = lam * rhos.clamp(max=1.0)  # c_t of the paper, with c_bar = 1
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
