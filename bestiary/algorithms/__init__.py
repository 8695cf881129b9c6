"""Algorithms by name."""

from bestiary.algorithms.impala import Impala

ALGORITHMS: dict[str, type] = {"impala": Impala}
