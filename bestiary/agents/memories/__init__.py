"""Memories: what an agent carries from one step to the next.

    y, state = memory(x, done, state)      # x [T,B,D], done [T,B] -> y [T,B,output_size]
    memory.initial_state(B)                # a flat tuple of tensors, batch axis first; all zeros where nothing is remembered

`done[t]` says that entry t opens a new episode: the state is reset before x[t] is consumed. One call over T steps and T
calls over one step are the same mathematics.

A memory may have numbers to tell while it learns, for metrics.csv. Then it has, besides,

    y, state, measures = memory.watch(x, done, state)      # the same, and means by name, which stay on the device
"""

import torch.nn as nn

from bestiary.agents.memories.fast_weights import SRWM, Delta, FakeSR, SRDelta, SRWMNoCarry
from bestiary.agents.memories.none import NoMemory
from bestiary.agents.memories.recurrent import GRU, LSTM

MEMORIES: dict[str, type[nn.Module]] = {
    "none": NoMemory,
    "lstm": LSTM,
    "gru": GRU,
    "delta": Delta,
    "srwm": SRWM,
    "fake-sr": FakeSR,
    "sr-delta": SRDelta,
    "srwm-no-carry": SRWMNoCarry,
}
