"""Everything composes: torsos, memories, agents, critics and algorithms on every kind of environment, with the real actor and
learner. By default the memories take turns with the other parts, and each goes to four worlds; `make test-slow` runs all other
combinations."""

import itertools
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
from bestiary.runtime.build import build
from bestiary.runtime.serial import play

ENVS = (
    "warehouse",  # a vector, compiled
    "gymnasium/CartPole-v1",  # a vector, in Python
    "atari/Pong",  # pictures of 4x84x84, in C++
    "procgen/maze:easy",  # pictures of 3x64x64, in C++
    "toy/catch",  # a picture of 10x5
    "toy/recall",  # a vector
)
COMPOSED = [
    name for name, agent in AGENTS.items() if "memory" in getattr(agent, "parts", ())
]  # of parts; the others are whole
LENGTHS = {  # two updates, each of 4 environments x 5 decisions
    "impala": {"batch_size": 4, "unroll_length": 5},
    "ppo": {"rollout_length": 5, "algo.epochs": 1, "algo.minibatches": 1},
}


def readable(torso, env):
    """Not by a torso's own word: pictures where there are none, and shallow small ones."""
    large = env.startswith(("atari", "procgen"))
    return torso == "mlp" or large or (torso == "resnet" and env == "toy/catch")


def cases():
    """Every composition of a torso that reads the environment, an agent, an algorithm and a memory; `slow` where it is not this
    memory's turn, or where Atari and ProcGen, seconds each, have had both agents and both algorithms."""
    turns = itertools.count()
    for env, torso, agent, algo in itertools.product(ENVS, TORSOS, COMPOSED, ALGORITHMS):
        if not readable(torso, env):
            continue
        turn = next(turns)
        enough = env.startswith(("atari", "procgen")) and (agent == "iam") != (algo == "ppo")
        for index, memory in enumerate(MEMORIES):
            due = index == (turn + turn // 4) % len(MEMORIES) and not enough  # each with both agents, in time
            critic = list(CRITICS)[(turn + index) % len(CRITICS)]
            yield pytest.param(env, torso, memory, agent, algo, critic, marks=[] if due else pytest.mark.slow)


@pytest.mark.parametrize(("env", "torso", "memory", "agent", "algo", "critic"), list(cases()))
def test_composes(env, torso, memory, agent, algo, critic):
    two_updates(env=env, torso=torso, memory=memory, agent=agent, algo=algo, critic=critic)


def meetings():
    """Every memory on the first four environments with every algorithm, with and without PopArt; by default one of the four on
    each environment, another one on the next."""
    for (e, env), (m, memory) in itertools.product(enumerate(ENVS[:4]), enumerate(MEMORIES)):
        for turn, (algo, critic) in enumerate(itertools.product(ALGORITHMS, ("shared", "popart"))):
            due = turn == (e + m) % 4
            yield pytest.param(env, memory, algo, critic, marks=[] if due else pytest.mark.slow)


@pytest.mark.parametrize(("env", "memory", "algo", "critic"), list(meetings()))
def test_every_memory_learns_everywhere(env, memory, algo, critic):
    two_updates(env=env, memory=memory, algo=algo, critic=critic)


@pytest.mark.parametrize(("env", "torso"), [c for c in itertools.product(ENVS, TORSOS) if not readable(*reversed(c))])
def test_what_a_torso_cannot_read_is_refused(env, torso):
    with pytest.raises(UserError, match=f"torso {torso} needs"):
        build(resolve({"env": env, "torso": torso, "num_envs": 4, "batch_size": 4, "runtime": "serial"}))


@pytest.mark.parametrize(
    ("algo", "env", "critic"), [("impala", "atari/Pong", "shared"), ("ppo", "atari/Pong", "popart")]
)
def test_the_attention_agent_composes(algo, env, critic):
    small = {"agent.values": 8, "agent.keys": 4, "agent.basis": 2, "agent.hidden": 16, "agent.center": False}
    two_updates(env=env, algo=algo, critic=critic, agent="aaa", **small)


def test_a_curious_torso_composes():
    """The others do without the random play that it is shown before."""
    two_updates(env="atari/Pong", algo="impala", **{"torso.center": True})


def two_updates(**options):
    given = {"runtime": "serial", "num_envs": 4, "steps": 40, **LENGTHS[options["algo"]], **options}
    torso = given.get("torso", "shallow" if options["env"].startswith(("atari", "procgen")) else "mlp")
    if torso != "mlp" and options.get("agent") != "aaa":
        given.setdefault("torso.center", False)
    if given.get("critic") == "popart":
        given["critic.debias"] = False  # else the first updates may move statistics only
    (actor,), learner = build(resolve(given))
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
