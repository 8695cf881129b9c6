"""Agents: what acts. Whole recipes by name; each is composed of the parts that it names."""

import torch.nn as nn

from bestiary.agents.agent import BasicAgent
from bestiary.agents.attention import AttentionAgent
from bestiary.agents.influence import InfluenceAgent

AGENTS: dict[str, type[nn.Module]] = {"basic": BasicAgent, "iam": InfluenceAgent, "aaa": AttentionAgent}
