"""Reinforcement-learning algorithms. An algorithm forms batches, computes their losses and creates the optimizers."""

from bestiary.algorithms.clear import Clear
from bestiary.algorithms.impala import Impala
from bestiary.algorithms.ppg import PPG
from bestiary.algorithms.ppo import PPO

ALGORITHMS: dict[str, type] = {"impala": Impala, "ppo": PPO, "ppg": PPG, "clear": Clear}
