"""Memories: what an agent carries from one step to the next.

    y, state = memory(x, done, state)      # x [T,B,D], done [T,B] -> y [T,B,output_size]
    memory.initial_state(B)                # a flat tuple of tensors, batch axis first; all zeros where nothing is remembered

`done[t]` says that entry t opens a new episode: the state is reset before x[t] is consumed. One call over T steps and T
calls over one step are the same mathematics.
"""

import torch.nn as nn

from bestiary.agents.memories.none import NoMemory
from bestiary.agents.memories.recurrent import GRU, LSTM

MEMORIES: dict[str, type[nn.Module]] = {"none": NoMemory, "lstm": LSTM, "gru": GRU}
