"""Everything composes: every torso with every memory on every kind of environment, with the real actor and learner."""

import math

import pytest
import torch

from bestiary.agents import AGENTS
from bestiary.agents.critics import CRITICS
from bestiary.agents.memories import MEMORIES
from bestiary.agents.torsos import TORSOS
from bestiary.algorithms import ALGORITHMS
from bestiary.errors import UserError
from bestiary.resolve import resolve
from bestiary.runtime.serial import play
from bestiary.runtime.train import build

ENVS = (
    "toy/catch",  # a picture of 10x5
    "toy/recall",  # a vector
    "warehouse",  # a vector, compiled
    "gymnasium/CartPole-v1",  # a vector, in Python
    "atari/Pong",  # pictures of 4x84x84, in C++
    "procgen/maze:easy",  # pictures of 3x64x64, in C++
)


def refused(torso, env):
    """What a torso says itself that it cannot read: pictures where there are none, and shallow small ones."""
    large = env.startswith(("atari", "procgen"))
    has_image = large or env == "toy/catch"
    return (torso in ("shallow", "resnet") and not has_image) or (torso == "shallow" and not large)


LENGTHS = {  # two updates, each of 4 environments x 5 decisions
    "impala": {"batch_size": 4, "unroll_length": 5},
    "ppo": {"rollout_length": 5, "algo.epochs": 1, "algo.minibatches": 1},
}


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("torso", TORSOS)
@pytest.mark.parametrize("env", ENVS)
def test_composes(env, torso, memory, agent, algo):
    """The critics take turns, lest there be three times as many."""
    if env.startswith(("atari", "procgen")) and (agent == "iam") != (algo == "ppo"):
        pytest.skip("seconds each; both agents and both algorithms have been there")
    turn = list(MEMORIES).index(memory) + list(TORSOS).index(torso) + list(ALGORITHMS).index(algo) + ENVS.index(env)
    config = resolve(
        {
            "env": env,
            "torso": torso,
            "memory": memory,
            "agent": agent,
            "algo": algo,
            "critic": list(CRITICS)[turn % len(CRITICS)],
            "runtime": "serial",
            "num_envs": 4,
            "steps": 40,
            **LENGTHS[algo],
        }
    )
    if refused(torso, env):
        with pytest.raises(UserError, match=f"torso {torso} needs"):
            build(config)
        return
    (actor,), learner = build(config)
    try:
        actor.start()
        before = [p.detach().clone() for p in learner.parameters]
        for _ in range(2):
            for metrics in learner.learn(play(actor, learner)):
                assert all(math.isfinite(value) for value in metrics.values()), metrics
            actor.version = learner.version
    finally:
        actor.pool.close()
    assert (learner.steps, learner.version, learner.skipped) == (40, 2, 0)
    changed = [not torch.equal(a, b) for a, b in zip(before, learner.parameters, strict=True)]
    assert all(changed)
    assert all(p.isfinite().all() for p in learner.parameters)
