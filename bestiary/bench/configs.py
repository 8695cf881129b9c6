"""The names of all benchmarks, and the training configurations of the throughput benchmark."""

from typing import TYPE_CHECKING, Any

from bestiary.runs.option_sources import merge_sources

if TYPE_CHECKING:
    from bestiary.config.config import Config

# Benchmarks that do not measure a training run: KERNELS measures memory modules, SALIENCY measures saliency maps.
KERNELS = "kernels"
SALIENCY = "saliency"

IMPALA_BATCH = {"num_envs": 64, "batch_size": 32}  # the IMPALA paper uses the same batch size
MULTI_TASK: dict[str, Any] = {"torso": "shallow", "critic": "popart", "num_envs": 48, "batch_size": 24}
WAREHOUSE = {
    "env": "warehouse",
    "algo": "ppo",
    "num_envs": 256,
    "rollout_length": 32,
    "algo.sequence_length": 8,
    "algo.epochs": 3,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "atari-shallow": {"env": "atari/Pong", "torso": "shallow", **IMPALA_BATCH},
    "atari-resnet": {"env": "atari/Pong", "torso": "resnet", **IMPALA_BATCH},
    "atari-lstm": {"env": "atari/Pong", "torso": "shallow", "memory": "lstm", **IMPALA_BATCH},
    "pong": {"preset": "pong"},
    "riverraid": {"env": "atari/Riverraid", "torso": "shallow", **IMPALA_BATCH},
    "riverraid-rewards": {"env": "atari/Riverraid", "torso": "shallow", "reward": "pacifist:20", **IMPALA_BATCH},
    "warehouse-iam": {**WAREHOUSE, "agent": "iam", "torso.sizes": (512, 256), "memory": "gru", "memory.hidden": 128},
    "warehouse-fnn": {**WAREHOUSE, "agent.extra_inputs": "none", "torso.sizes": (693, 256)},
    "toy": {"env": "toy/catch", **IMPALA_BATCH},
    # NameThisGame is the slowest game of `six-games`. With random actions, SpaceInvaders is equally slow.
    "slowest-game": {"env": "atari/NameThisGame", **MULTI_TASK},
    "six-games": {"env": "atari/{AirRaid,Carnival,DemonAttack,NameThisGame,Pong,SpaceInvaders}", **MULTI_TASK},
    "procgen": {"env": "procgen/starpilot:easy", "levels": "0:200", "torso": "resnet", **IMPALA_BATCH},
}


def make_bench_config(name: str, **options: Any) -> "Config":
    """Return the configuration `name` of CONFIGS for a benchmark. `options` replace values of the configuration.

    The training has 1e9 steps, so that it does not end before the benchmark. It saves no checkpoints.
    """
    from bestiary.config.resolve import resolve  # imported late: it imports torch, which is slow

    endless = {"steps": 10**9, "log_every": 500, "save_minutes": 10**6, "save_every": 0}
    return resolve(merge_sources({**CONFIGS[name], **endless, **options})[0])
