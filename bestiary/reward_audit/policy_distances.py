"""Distances between two policies in the same state.

The arguments of all functions are log-probabilities [...,A] of A actions: `log_p` of the trusted policy p, and `log_q`
of the audited policy q. The result has the shape [...].

kl           Kullback-Leibler divergence, sum p log(p/q), in nats: 0 to infinity
reverse_kl   sum q log(q/p), in nats: 0 to infinity
js           Jensen-Shannon divergence, in bits: 0 to 1
js_distance  square root of js, which is a metric: 0 to 1
hellinger    Hellinger distance, the Euclidean norm of (sqrt p - sqrt q) / sqrt 2: 0 to 1
tv           total variation, half of sum |p - q|: 0 to 1
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1).clamp(min=0)  # 0 log 0 = 0


def js(log_p: Tensor, log_q: Tensor) -> Tensor:
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return ((kl(log_p, log_m) + kl(log_q, log_m)) / (2 * math.log(2))).clamp(max=1)


def hellinger(log_p: Tensor, log_q: Tensor) -> Tensor:
    difference = (log_p / 2).exp() - (log_q / 2).exp()
    return (difference.square().sum(-1) / 2).sqrt().clamp(max=1)


def tv(log_p: Tensor, log_q: Tensor) -> Tensor:
    return ((log_p.exp() - log_q.exp()).abs().sum(-1) / 2).clamp(max=1)


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": kl,
    "reverse_kl": lambda log_p, log_q: kl(log_q, log_p),
    "js": js,
    "js_distance": lambda log_p, log_q: js(log_p, log_q).sqrt(),
    "hellinger": hellinger,
    "tv": tv,
}


def summarise_steps(values: np.ndarray) -> dict[str, float]:
    """Return the mean, the maximum and the range (maximum minus minimum) of a distance over all steps."""
    return {"mean": float(values.mean()), "max": float(values.max()), "range": float(np.ptp(values))}
