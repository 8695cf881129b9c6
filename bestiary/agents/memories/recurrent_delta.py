"""Recurrent memories with the delta rule (Irie et al. 2021): outputs of a step are inputs of the next step.

    recurrent-delta   the previous output of a head changes its query, key, value and learning rate
    delta-rnn         a second matrix is read with the previous output as the query; the result is added to the output

The steps of a sequence are computed one after the other, because each step needs the output of the previous step.

Letters of shapes: H heads, E features per head.
"""

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.memories.base import State
from bestiary.agents.memories.delta_net import FEATURE_MAPS, apply_delta_rule
from bestiary.agents.memories.fast_weights import (
    FastWeightMemory,
    LayerMetrics,
    RecurrenceOptions,
    merge_heads,
    record_metrics,
    split_heads,
)
from bestiary.kernels import delta_seq

softmax = FEATURE_MAPS["softmax"]


class RecurrentDelta(FastWeightMemory):
    """DeltaNet in which queries, keys, values and learning rates also depend on the previous output of their head."""

    Options = RecurrenceOptions

    def __init__(self, input_size: int, options: RecurrenceOptions = RecurrenceOptions()):
        super().__init__(input_size, options, [RecurrentDeltaMixer(options) for _ in range(options.layers)])


class RecurrentDeltaMixer(nn.Module):
    """The recurrent part of one layer of RecurrentDelta.

    Its state consists of the fast weights [B,H,E,E] and the previous output of each head [B,H,E]. The parameters
    `recurrent` map the previous output to changes of query, key, value and learning rate.
    """

    def __init__(self, options: RecurrenceOptions):
        super().__init__()
        heads, size = options.heads, options.size
        self.options = options
        self.norm = nn.LayerNorm(options.hidden)
        self.slow = nn.Linear(options.hidden, heads * (3 * size + 1), bias=False)
        widths = (size, size, size, 1)
        self.recurrent = nn.ParameterList(torch.randn(heads, size, width) * size**-0.5 for width in widths)
        self.project = nn.Linear(heads * size, options.hidden, bias=False)
        self.state_shapes = ((heads, size, size), (heads, size))

    def forward(
        self, h: Tensor, done: Tensor, state: State, metrics: LayerMetrics | None = None
    ) -> tuple[Tensor, State]:
        qkvb = split_heads(self.slow(self.norm(h)), self.options.heads)  # [B,H,T,3E+1]
        recurrent = torch.cat(tuple(self.recurrent), dim=-1)  # [H,E,3E+1]
        weights, last = state
        outputs = []
        logits = []
        for t in range(len(done)):
            last = previous_output(last, done[t], self.options)
            step = qkvb[:, :, t] + torch.einsum("bhe,hem->bhm", last.tanh(), recurrent)
            y, weights = apply_delta_rule(
                step.unsqueeze(2), done[t : t + 1], weights, softmax, self.options, metrics=None
            )
            last = y[:, :, 0]
            outputs.append(last)
            logits.append(step[..., -1])
        record_metrics(metrics, "delta", (weights,), torch.stack(logits).sigmoid())
        return self.project(merge_heads(torch.stack(outputs, dim=2))), (weights, last)


class DeltaRNN(FastWeightMemory):
    """DeltaNet with a second matrix per head, which is read with the previous output of the head as the query.

    The value that is read from the second matrix is added to the output of the first matrix. The delta rule updates
    both matrices.
    """

    Options = RecurrenceOptions

    def __init__(self, input_size: int, options: RecurrenceOptions = RecurrenceOptions()):
        super().__init__(input_size, options, [DeltaRNNMixer(options) for _ in range(options.layers)])


class DeltaRNNMixer(nn.Module):
    """The recurrent part of one layer of DeltaRNN.

    Its state consists of the two matrices of each head, both [B,H,E,E], and the previous outputs [B,H,E].
    """

    def __init__(self, options: RecurrenceOptions):
        super().__init__()
        heads, size = options.heads, options.size
        self.options = options
        self.norm = nn.LayerNorm(options.hidden)
        self.slow = nn.Linear(options.hidden, heads * (5 * size + 2), bias=False)
        self.project = nn.Linear(heads * size, options.hidden, bias=False)
        self.state_shapes = ((heads, size, size), (heads, size, size), (heads, size))

    def forward(
        self, h: Tensor, done: Tensor, state: State, metrics: LayerMetrics | None = None
    ) -> tuple[Tensor, State]:
        size = self.options.size
        columns = split_heads(self.slow(self.norm(h)), self.options.heads)
        qkv, key, value, logits = columns.split((3 * size, size, size, 2), dim=-1)  # logits: one per matrix
        first, second, last = state
        qkvb = torch.cat([qkv, logits[..., :1]], dim=-1)
        read, first = apply_delta_rule(qkvb, done, first, softmax, self.options, metrics)
        key = softmax(key)
        beta = logits[..., 1:].sigmoid()
        arguments = self.options.kernel_arguments(value)
        outputs = []
        for t in range(len(done)):
            now = slice(t, t + 1)
            query = softmax(previous_output(last, done[t], self.options)).unsqueeze(2)
            y, second = delta_seq(
                query, key[:, :, now], value[:, :, now], beta[:, :, now], done[now], second, **arguments
            )
            last = read[:, :, t] + y[:, :, 0]
            outputs.append(last)
        record_metrics(metrics, "delta", (second,), beta)
        return self.project(merge_heads(torch.stack(outputs, dim=2))), (first, second, last)


def previous_output(last: Tensor, done: Tensor, options: RecurrenceOptions) -> Tensor:
    """Return the previous outputs [B,H,E], which are zero at the first step of an episode.

    With the option `truncate`, no gradient flows through the previous outputs.
    """
    last = last.detach() if options.truncate == "step" else last
    return last.masked_fill(done[:, None, None], 0)
