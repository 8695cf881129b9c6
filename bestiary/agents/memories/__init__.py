"""Memories: the recurrent part of an agent, between the torso and the heads. The interface is `base.Memory`."""

import torch.nn as nn

from bestiary.agents.memories.base import Memory, NoMemory, State
from bestiary.agents.memories.delta_net import DeltaNet
from bestiary.agents.memories.recurrent import GRU, LSTM
from bestiary.agents.memories.self_referential import SRWM, FakeSR, SRDelta, SRWMNoCarry

MEMORIES: dict[str, type[nn.Module]] = {
    "none": NoMemory,
    "lstm": LSTM,
    "gru": GRU,
    "delta": DeltaNet,
    "srwm": SRWM,
    "fake-sr": FakeSR,
    "sr-delta": SRDelta,
    "srwm-no-carry": SRWMNoCarry,
}

__all__ = [
    "GRU",
    "LSTM",
    "MEMORIES",
    "SRWM",
    "DeltaNet",
    "FakeSR",
    "Memory",
    "NoMemory",
    "SRDelta",
    "SRWMNoCarry",
    "State",
]
