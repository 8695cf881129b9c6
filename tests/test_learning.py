"""Real learning: worlds whose best return is known are solved, and only by what should solve them.

Settings are such that they succeeded with each of the seeds tried, two or three for most; one seed is fixed here.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
import torch

import bestiary
from bestiary.agents.agent import Agent
from bestiary.agents.memories import MEMORIES
from bestiary.config import Config, lookup_part
from bestiary.envs import make, toy
from bestiary.options import options_of
from bestiary.resolve import resolve
from bestiary.rollout import ArraySpec, Inputs, episodes_of
from bestiary.runtime.build import build
from bestiary.runtime.serial import play

SIGNS, DELAY = 2, 3


@dataclass
class Trained:
    config: Config
    agent: Agent
    ret: float  # mean return of the episodes that ended in the last tenth of the training
    length: float


# few, large updates, of IMPALA where no algorithm is named
PUBLISHED: dict[str, Any] = {"batch_size": 32, "algo.optimizer": "rmsprop", "algo.eps": 0.01, "algo.lam": 1.0}


def train(**options):
    usual = {} if "algo" in options else PUBLISHED
    config = resolve({"seed": 1, "runtime": "serial", "num_envs": 32, **usual, **options})
    (actor,), learner = build(config)
    actor.start()
    total, late = learner.total_steps, []
    while learner.steps < total:
        before, rollouts = learner.steps, play(actor, learner)
        learner.learn(rollouts)
        late += [e for e in episodes_of(rollouts) if before + e.step > 0.9 * total]
        actor.version = learner.version
    actor.pool.close()
    assert learner.skipped == 0
    return Trained(
        config, learner.agent, float(np.mean([e.ret for e in late])), float(np.mean([e.length for e in late]))
    )


def test_bandit():
    """Best 1, blind 0.5."""
    assert train(env="toy/bandit", steps="20k", lr=2e-3).ret > 0.97


def test_chain():
    """Best 1, in 7 steps; walking to and fro takes more and costs 0.01 a step left."""
    trained = train(env="toy/chain", steps="40k", lr=2e-3)
    assert trained.ret > 0.98
    assert trained.length < 9


def test_catch():
    """Best 1, blind below -0.5. Seen as a picture."""
    assert train(env="toy/catch", steps="100k", lr=2e-3).ret > 0.9


def test_catch_from_beginning_to_end(tmp_path):
    """The same through the front door: train into a folder, then evaluate what was saved there."""
    run = bestiary.train("toy/catch", run_dir=str(tmp_path / "run"), steps="100k", lr=2e-3, seed=1, **PUBLISHED)
    assert run.steps >= 100_000
    assert run.metrics["return"][-1] > 0.9
    assert run.metrics["return"][0] < 0
    assert run.evaluate(episodes=100, greedy=True).mean > 0.95


# --- memory ---


# Small; and, of matrices that rewrite themselves, with inputs that differ more from each other than the published ones do
SMALL = {"hidden": 32, "layers": 1, "heads": 2, "ff": 32, "softmax": False, "norm": True}


def train_recall(memory):
    """Without the last action as an input: a player who says the sign all the time reads it off its own actions."""
    own = {f.name for f in fields(options_of(lookup_part("memory", memory)))}
    return train(
        env="toy/recall",
        size=SIGNS,
        delay=DELAY,
        memory=memory,
        steps="20k",
        lr=5e-3,
        unroll_length=2 * (DELAY + 1),  # two episodes: no sign is lost between unrolls
        num_envs=64,
        batch_size=64,
        **{"agent.inputs": "reward", "algo.replay": 2, "algo.optimizer": "adam", "algo.eps": 1e-5},
        **{f"memory.{name}": value for name, value in SMALL.items() if name in own},
    )


@torch.no_grad()
def returns(trained, forget, episodes=1_000, num_envs=50):
    """Mean return of greedy play; with `forget`, the memory is put back to its beginning before every step."""
    pool = trained.config.make_pool(num_envs, seed=123)
    agent = trained.agent
    step, state, last_action = pool.reset(), agent.initial_state(num_envs), np.zeros(num_envs, np.int64)
    total, ended = 0.0, 0
    while ended < episodes:
        output, state = agent(Inputs.of(step, last_action), agent.initial_state(num_envs) if forget else state)
        last_action = output.distribution.mode()[0].numpy()
        pool.send(last_action)
        step = pool.recv()
        total, ended = total + float(step.reward.sum()), ended + int(step.done.sum())
    pool.close()
    return total / ended


FORGETFUL = [name for name in MEMORIES if not lookup_part("memory", name)(8).initial_state(1)]


@pytest.mark.parametrize("memory", [name for name in MEMORIES if name not in FORGETFUL])
def test_memory_recalls(memory):
    """Solved with the memory, and with nothing else: the same agent, made to forget, is as good as guessing."""
    trained = train_recall(memory)
    assert trained.ret > 0.9
    assert returns(trained, forget=False) > 0.9
    assert returns(trained, forget=True) < 1 / SIGNS + 0.1


@pytest.mark.parametrize("memory", FORGETFUL)
def test_no_memory_cannot_recall(memory):
    trained = train_recall(memory)
    assert abs(trained.ret - 1 / SIGNS) < 0.06
    assert abs(returns(trained, forget=False) - 1 / SIGNS) < 0.06


class Beacon(toy.Recall):
    """A light in one of two corners, then the dark, then a bar: say which corner it was. Seen as a picture."""

    kind = "image"

    def __init__(self, n, options):
        super().__init__(n, options)
        self.spec = ArraySpec((1, 16, 16), "uint8")

    def observe(self):
        sign, clock = self.state["sign"], self.state["clock"]
        picture = np.zeros((len(sign), 1, 16, 16), np.uint8)
        picture[(clock == 0) & (sign == 0), 0, 2:7, 2:7] = 255
        picture[(clock == 0) & (sign == 1), 0, 9:14, 9:14] = 255
        picture[clock == self.delay, 0, 7:9] = 255
        return picture


ADAM: dict[str, Any] = {"algo.optimizer": "adam", "algo.eps": 1e-5, "algo.lam": 1.0}


@pytest.mark.parametrize(
    "algorithm",
    [
        {"algo": "impala", "steps": "12k", "batch_size": 32, "unroll_length": 8, **ADAM},
        pytest.param(
            {"algo": "ppo", "steps": "6k", "rollout_length": 8, "algo.minibatches": 2}, marks=pytest.mark.slow
        ),
    ],
    ids=("impala", "ppo"),
)
def test_the_attention_augmented_agent_recalls_where_a_light_was(algorithm, monkeypatch):
    """What it remembers decides, in its cells or its LSTM; made to forget, it guesses."""
    monkeypatch.setitem(toy.WORLDS, "beacon", Beacon)
    monkeypatch.setitem(toy.SIZES, "beacon", SIGNS)
    small = {"agent.queries": 2, "agent.keys": 4, "agent.values": 4, "agent.basis": 4, "agent.hidden": 32}
    alone = {"agent": "aaa", "agent.center": False, "agent.inputs": "none"}
    trained = train(env="toy/beacon", delay=DELAY, lr=3e-3, **algorithm, **small, **alone)
    assert returns(trained, forget=False, episodes=400) > 0.95
    assert returns(trained, forget=True, episodes=400) < 1 / SIGNS + 0.1


def test_last_action_is_a_memory_too():
    """Why the tests above hide it: repeating oneself carries the sign through the dark."""
    pool = make("toy/recall", num_envs=20, size=SIGNS, delay=DELAY)
    step, said, total = pool.reset(), np.zeros(20, np.int64), 0.0
    for _ in range(DELAY + 1):
        signs = step.observation["vector"][:, :SIGNS]  # all zeros in the dark
        said = np.where(signs.any(axis=1), signs.argmax(axis=1), said)
        pool.send(said)
        step = pool.recv()
        total += float(step.reward.sum())
    assert total == 20


SCALES = """
import gymnasium, numpy as np
from gymnasium.spaces import Box, Discrete

class Small(gymnasium.Env):
    observation_space, action_space, scale = Box(0, 1, (3,)), Discrete(2), 1.0
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return self.look(), {}
    def look(self):
        self.cue = int(self.np_random.integers(2))
        return np.array([self.cue, 1 - self.cue, self.scale > 1], np.float32)
    def step(self, action):
        right = self.cue if self.scale == 1 else 1 - self.cue
        return self.look(), self.scale * float(action == right), True, False, {}

class Large(Small):
    scale = 1000.0
"""


@pytest.mark.parametrize(
    "options",
    [
        {"algo": "impala", "batch_size": 4, "steps": "40k"},
        {"algo": "ppo", "rollout_length": 32, "steps": "30k"},
    ],
    ids=lambda options: options["algo"],
)
def test_two_tasks_whose_rewards_differ_a_thousandfold(options, tmp_path):
    """PopArt learns both. A value for each task without it does not learn the small one."""
    (tmp_path / "scales.py").write_text(SCALES)
    plain, popart = (small_and_large({**options, **more}) for more in ({"critic": "per-task"}, POPART))
    assert min(popart) > 0.95
    assert plain[0] < 0.7


POPART: dict[str, Any] = {"critic": "popart"}


def small_and_large(options):
    """Shares of right answers in the last fifth of a training."""
    base = {"runtime": "serial", "num_envs": 16, "torso.width": 32, "lr": 2e-3, "algo.reward": "none"}
    config = resolve({"env": ["scales.py:Small", "scales.py:Large"], **base, **options})
    (actor,), learner = build(config)
    actor.start()
    late: dict[str, list[float]] = {"scales.py:Small": [], "scales.py:Large": []}
    while learner.steps < learner.total_steps:
        rollouts = play(actor, learner)
        learner.learn(rollouts)
        actor.version = learner.version
        if learner.steps > 0.8 * learner.total_steps:
            for episode in episodes_of(rollouts):
                late[episode.task].append(episode.ret > 0)
    actor.pool.close()
    return [float(np.mean(answers)) for answers in late.values()]
