"""Memories: the recurrent part of an agent, between the torso and the heads. The interface is `base.Memory`."""

import torch.nn as nn

from bestiary.agents.memories.base import Memory, NoMemory, State
from bestiary.agents.memories.deep_feedforward import DeepFeedForward
from bestiary.agents.memories.delta_delta import DeltaDelta
from bestiary.agents.memories.delta_net import DeltaNet
from bestiary.agents.memories.delta_product import DeltaProduct
from bestiary.agents.memories.gated_delta import GatedDelta
from bestiary.agents.memories.gtrxl import GTrXL
from bestiary.agents.memories.linear_transformer import LinearTransformer
from bestiary.agents.memories.recurrent import GRU, LSTM
from bestiary.agents.memories.recurrent_delta import DeltaRNN, RecurrentDelta
from bestiary.agents.memories.self_referential import SRWM, FakeSR, SRDelta, SRWMNoCarry

MEMORIES: dict[str, type[nn.Module]] = {
    "none": NoMemory,
    "lstm": LSTM,
    "gru": GRU,
    "delta": DeltaNet,
    "gated-delta": GatedDelta,
    "delta-product": DeltaProduct,
    "srwm": SRWM,
    "fake-sr": FakeSR,
    "sr-delta": SRDelta,
    "srwm-no-carry": SRWMNoCarry,
    "linear-transformer": LinearTransformer,
    "recurrent-delta": RecurrentDelta,
    "delta-rnn": DeltaRNN,
    "delta-delta": DeltaDelta,
    "gtrxl": GTrXL,
    "deep-ff": DeepFeedForward,
}

__all__ = [
    "GRU",
    "LSTM",
    "MEMORIES",
    "SRWM",
    "DeepFeedForward",
    "DeltaDelta",
    "DeltaNet",
    "DeltaProduct",
    "DeltaRNN",
    "FakeSR",
    "GTrXL",
    "GatedDelta",
    "LinearTransformer",
    "Memory",
    "NoMemory",
    "RecurrentDelta",
    "SRDelta",
    "SRWMNoCarry",
    "State",
]
