"""Combinations of torsos, memories, agents, critics and algorithms on all kinds of environments, with real updates.

By default each combination of the other components is tested with one memory; `make test-slow` runs all combinations.
"""

import itertools
import math
from typing import Any

import pytest
import torch

from bestiary.agents import AGENTS
from bestiary.agents.critics import CRITICS
from bestiary.agents.memories import MEMORIES
from bestiary.agents.torsos import TORSOS
from bestiary.algorithms import ALGORITHMS
from bestiary.config.resolve import resolve
from bestiary.training.factory import make_actors_and_learner
from bestiary.training.serial import collect_rollouts
from bestiary.utils.errors import UserError

ENVS = (
    "warehouse",  # vector, compiled with Numba
    "gymnasium/CartPole-v1",  # vector, Python
    "atari/Pong",  # images of 4x84x84, C++
    "procgen/maze:easy",  # images of 3x64x64, C++
    "toy/catch",  # image of 10x5
    "toy/recall",  # vector
)
# Agents that consist of a torso, a memory and heads.
COMPOSED = [name for name, agent in AGENTS.items() if "memory" in getattr(agent, "components", ())]
# Each update is of 4 environments x 5 steps.
LENGTHS: dict[str, dict[str, Any]] = {
    "impala": {"batch_size": 4, "rollout_length": 5},
    "clear": {"batch_size": 4, "rollout_length": 5},
    "ppg": {
        "rollout_length": 5,
        "algo.minibatches": 1,
        "algo.aux_interval": 2,
        "algo.aux_epochs": 1,
        "algo.value_network": "shared",
    },
    "ppo": {"rollout_length": 5, "algo.epochs": 1, "algo.minibatches": 1},
}


def accepts(torso, env):
    """Return whether the torso accepts the observations: only `mlp` needs no image, `shallow` needs large images."""
    large = env.startswith(("atari", "procgen"))
    return torso == "mlp" or large or (torso != "shallow" and env == "toy/catch")


def cases():
    """Yield all valid combinations of environment, torso, agent, algorithm and memory.

    Combinations are marked `slow` except for one memory each. On Atari and ProcGen, which take seconds, each agent is
    tested with one algorithm.
    """
    counter = itertools.count()
    for env, torso, agent, algo in itertools.product(ENVS, TORSOS, COMPOSED, ALGORITHMS):
        if not accepts(torso, env):
            continue
        count = next(counter)
        skip = env.startswith(("atari", "procgen")) and (agent == "iam") != (algo == "ppo")
        for index, memory in enumerate(MEMORIES):
            # `count // 4` shifts the sequence, so that each memory meets both agents.
            selected = index == (count + count // 4) % len(MEMORIES) and not skip
            critic = list(CRITICS)[(count + index) % len(CRITICS)]
            if (algo, critic) == ("ppg", "popart"):
                critic = "shared"
            yield pytest.param(env, torso, memory, agent, algo, critic, marks=[] if selected else pytest.mark.slow)


@pytest.mark.parametrize(("env", "torso", "memory", "agent", "algo", "critic"), list(cases()))
def test_components_combine(env, torso, memory, agent, algo, critic):
    perform_two_updates(env=env, torso=torso, memory=memory, agent=agent, algo=algo, critic=critic)


def memory_cases():
    """Yield all memories on the first four environments with all algorithms, with and without PopArt.

    One combination of algorithm and critic is tested by default, a different one on each environment.
    """
    pairs = [pair for pair in itertools.product(ALGORITHMS, ("shared", "popart")) if pair != ("ppg", "popart")]
    for (e, env), (m, memory) in itertools.product(enumerate(ENVS[:4]), enumerate(MEMORIES)):
        for k, (algo, critic) in enumerate(pairs):
            selected = k == (e + m) % len(pairs)
            yield pytest.param(env, memory, algo, critic, marks=[] if selected else pytest.mark.slow)


@pytest.mark.parametrize(("env", "memory", "algo", "critic"), list(memory_cases()))
def test_memories_combine_with_environments_and_algorithms(env, memory, algo, critic):
    perform_two_updates(env=env, memory=memory, algo=algo, critic=critic)


@pytest.mark.parametrize(("env", "torso"), [c for c in itertools.product(ENVS, TORSOS) if not accepts(*reversed(c))])
def test_torso_rejects_observations_that_it_does_not_support(env, torso):
    with pytest.raises(UserError, match=f"torso {torso} needs"):
        make_actors_and_learner(
            resolve({"env": env, "torso": torso, "num_envs": 4, "batch_size": 4, "runtime": "serial"})
        )


@pytest.mark.parametrize(
    ("algo", "env", "critic"), [("impala", "atari/Pong", "shared"), ("ppo", "atari/Pong", "popart")]
)
def test_attention_augmented_agent_combines(algo, env, critic):
    small = {
        "agent.value_channels": 8,
        "agent.key_channels": 4,
        "agent.basis_frequencies": 1,
        "agent.hidden": 16,
        "agent.subtract_mean": False,
    }
    perform_two_updates(env=env, algo=algo, critic=critic, agent="aaa", **small)


def test_torso_that_needs_calibration_combines():
    """The other tests switch calibration off."""
    perform_two_updates(env="atari/Pong", algo="impala", **{"torso.subtract_mean": True})


def perform_two_updates(**options):
    """Train for two updates and check that they are finite and change all parameters."""
    given = {"runtime": "serial", "num_envs": 4, "steps": 40, **LENGTHS[options["algo"]], **options}
    torso = given.get("torso", "shallow" if options["env"].startswith(("atari", "procgen")) else "mlp")
    if torso != "mlp" and options.get("agent") != "aaa":
        given.setdefault("torso.subtract_mean", False)
    if given.get("critic") == "popart":
        given["critic.debias"] = False  # otherwise the first updates may change only the statistics
    (actor,), learner = make_actors_and_learner(resolve(given))
    try:
        actor.start()
        before = [p.detach().clone() for p in learner.parameters]
        for _ in range(2):
            for metrics in learner.learn(collect_rollouts(actor, learner)):
                assert all(math.isfinite(value) for value in metrics.values()), metrics
            actor.version = learner.version
    finally:
        actor.pool.close()
    num_updates = 5 if options["algo"] == "ppg" else 2  # 2 of the policy, 2 of the values, and an auxiliary one
    assert (learner.steps, learner.version, learner.skipped_updates) == (40, num_updates, 0)
    changed = [not torch.equal(a, b) for a, b in zip(before, learner.parameters, strict=True)]
    assert all(changed)
    assert all(p.isfinite().all() for p in learner.parameters)
