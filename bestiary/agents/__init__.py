"""Agents: neural networks that map observations to policies and values.

An agent consists of a torso, a memory, a policy head and a critic.
"""

import torch.nn as nn

from bestiary.agents.agent import BasicAgent
from bestiary.agents.attention_agent import AttentionAgent
from bestiary.agents.iam import IAMAgent

AGENTS: dict[str, type[nn.Module]] = {"basic": BasicAgent, "iam": IAMAgent, "aaa": AttentionAgent}
