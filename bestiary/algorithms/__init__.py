"""Algorithms by name."""

from bestiary.algorithms.impala import Impala
from bestiary.algorithms.ppo import PPO

ALGORITHMS: dict[str, type] = {"impala": Impala, "ppo": PPO}
