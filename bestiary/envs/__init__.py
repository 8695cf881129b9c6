"""Vector environments: the interface, the environment families, preprocessing, rewards and multi-task composition."""

from bestiary.envs.registry import (
    EnvSpec,
    ScoreRange,
    canonical_name,
    lookup_env,
    lookup_score_range,
    make_env,
    make_vec,
    with_mode,
)
from bestiary.envs.vector_env import VectorEnv

__all__ = [
    "EnvSpec",
    "ScoreRange",
    "VectorEnv",
    "canonical_name",
    "lookup_env",
    "lookup_score_range",
    "make_env",
    "make_vec",
    "with_mode",
]
