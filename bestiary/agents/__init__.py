"""Agents: neural networks that map observations to policies and values.

An agent usually has four parts: a torso (encodes the observation), a memory (the recurrent part), a policy head and a
critic (the value head).
"""

import torch.nn as nn

from bestiary.agents.agent import BasicAgent
from bestiary.agents.attention_agent import AttentionAgent
from bestiary.agents.iam import IAMAgent

AGENTS: dict[str, type[nn.Module]] = {"basic": BasicAgent, "iam": IAMAgent, "aaa": AttentionAgent}
