"""The sum rule of linear transformers in closed form: matrix products instead of a loop over the steps.

Shapes: B batch entries, H heads, T steps, E rows and M columns of a weight matrix.
"""

import torch
from torch import Tensor

CHUNK = 64  # number of steps that are processed at once; the products of queries and keys are [B,H,CHUNK,CHUNK]


def sum_seq(
    q: Tensor,  # [B,H,T,E]
    k: Tensor,  # [B,H,T,E]
    v: Tensor,  # [B,H,T,M]
    done: Tensor,  # [T,B]
    state: Tensor,  # [B,H,E,M]
    truncate: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the sum rule over T steps. Return the outputs o [B,H,T,M] and the final fast weights W [B,H,E,M].

    Each step computes W <- W + k ⊗ v and then o = q W. If `done` is True, W is set to zero before the step. If
    `truncate` is True, no gradient flows from a step to the previous step.
    """
    outputs = []
    for start in range(0, k.shape[2], CHUNK):
        steps = slice(start, start + CHUNK)
        output, state = _sum_chunk(q[:, :, steps], k[:, :, steps], v[:, :, steps], done[steps], state, truncate)
        outputs.append(output)
    return torch.cat(outputs, dim=2), state


def _sum_chunk(q: Tensor, k: Tensor, v: Tensor, done: Tensor, state: Tensor, truncate: bool) -> tuple[Tensor, Tensor]:
    """Compute the sum rule over a few steps, with the arguments and results of `sum_seq`.

    The output of step t is the sum of three parts: the value written at step t, the values written at earlier steps s
    of the same episode, and the value read from the initial state W_0, if no episode has started up to step t:

        o_t = (q_t . k_t) v_t + sum_s (q_t . k_s) v_s + q_t W_0
    """
    episode = done.cumsum(0).T  # [B,T]: number of episodes that have started so far
    earlier = (episode[:, :, None] == episode[:, None, :]).tril(-1)[:, None]  # [B,1,T,T]: s < t, same episode
    output = (q * k).sum(-1, keepdim=True) * v
    if truncate:
        k, v, state = k.detach(), v.detach(), state.detach()
    output = output + (q @ k.transpose(-1, -2)).masked_fill(~earlier, 0) @ v
    output = output + (q @ state).masked_fill((episode > 0)[:, None, :, None], 0)
    last = (episode == episode[:, -1:])[:, None, :, None]  # [B,1,T,1]: steps of the last episode
    kept = state.masked_fill((episode[:, -1] > 0)[:, None, None, None], 0)
    return output, kept + k.masked_fill(~last, 0).transpose(-1, -2) @ v
