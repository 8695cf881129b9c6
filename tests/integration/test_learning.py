"""Learning: tasks with a known optimal return are solved, and memory tasks only with a memory.

The settings succeeded with all tested seeds, two or three for most tests; one seed is fixed here.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
import torch

import bestiary
from bestiary.agents.agent import Agent
from bestiary.agents.memories import MEMORIES
from bestiary.config.components import lookup_component
from bestiary.config.config import Config
from bestiary.config.resolve import resolve
from bestiary.envs import make_env, toy
from bestiary.rollout import ArraySpec, Inputs, collect_episodes
from bestiary.training.factory import make_actors_and_learner
from bestiary.training.serial import collect_rollouts
from bestiary.utils.options import options_class
from tests.trusted import resolve_own

SIGNS, DELAY = 2, 3


@dataclass
class Trained:
    config: Config
    agent: Agent
    # Means of the episodes that ended in the last tenth of the training.
    mean_return: float
    mean_length: float


# Few, large updates; used for IMPALA unless a test names an algorithm.
PUBLISHED: dict[str, Any] = {"batch_size": 32, "algo.optimizer": "rmsprop", "algo.eps": 0.01, "algo.lam": 1.0}


def train(**options):
    defaults = {} if "algo" in options else PUBLISHED
    return train_config(resolve({"seed": 1, "runtime": "serial", "num_envs": 32, **defaults, **options}))


def train_config(config: Config) -> Trained:
    (actor,), learner = make_actors_and_learner(config)
    actor.start()
    total_steps, late_episodes = learner.total_steps, []
    while learner.steps < total_steps:
        before, rollouts = learner.steps, collect_rollouts(actor, learner)
        learner.learn(rollouts)
        late_episodes += [e for e in collect_episodes(rollouts) if before + e.step > 0.9 * total_steps]
        actor.version = learner.version
    actor.pool.close()
    assert learner.skipped_updates == 0
    return Trained(
        config,
        learner.agent,
        float(np.mean([e.episode_return for e in late_episodes])),
        float(np.mean([e.length for e in late_episodes])),
    )


def test_bandit():
    """Optimal return 1, random 0.5."""
    assert train(env="toy/bandit", steps="20k", lr=2e-3).mean_return > 0.97


def test_chain():
    """Optimal return 1 in 7 steps; each step to the left costs 0.01."""
    trained = train(env="toy/chain", steps="40k", lr=2e-3)
    assert trained.mean_return > 0.98
    assert trained.mean_length < 9


def test_catch():
    """Optimal return 1, random below -0.5; image observations."""
    assert train(env="toy/catch", steps="100k", lr=2e-3).mean_return > 0.9


@pytest.mark.parametrize("env", ["toy/chain", "toy/catch"])
def test_clear_and_ppg(env):
    """Optimal return 1 in both environments."""
    clear = {**PUBLISHED, "algo": "clear", "algo.buffer_size": 300}
    ppg = {"algo": "ppg", "rollout_length": 16, "algo.minibatches": 4, "algo.discount": 0.99}
    ppg |= {"algo.aux_interval": 4, "algo.aux_epochs": 3}
    for algorithm in (clear, ppg):
        assert train(env=env, steps="60k", lr=3e-3, **algorithm).mean_return > 0.9


def test_catch_with_train_and_evaluate(tmp_path):
    """The same with the public API: train into a run folder, then evaluate the saved agent."""
    run = bestiary.train("toy/catch", run_dir=str(tmp_path / "run"), steps="100k", lr=2e-3, seed=1, **PUBLISHED)
    assert run.steps >= 100_000
    assert run.metrics["return"][-1] > 0.9
    assert run.metrics["return"][0] < 0
    assert bestiary.evaluate(run, episodes=100, greedy=True).mean > 0.95


# --- memory ---


# Small memories. Self-referential memories get inputs that differ more from each other than the published settings.
SMALL = {"hidden": 32, "layers": 1, "heads": 2, "ff": 32, "softmax": False, "norm": True}


def train_recall(memory):
    """Train on toy/recall without the last action as input, because an agent could store the sign in its actions."""
    option_names = {f.name for f in fields(options_class(lookup_component("memory", memory)))}
    return train(
        env="toy/recall",
        size=SIGNS,
        delay=DELAY,
        memory=memory,
        steps="20k",
        lr=5e-3,
        rollout_length=2 * (DELAY + 1),  # two episodes, so that no sign is lost between rollouts
        num_envs=64,
        batch_size=64,
        **{"agent.extra_inputs": "reward", "algo.reuse": 2, "algo.optimizer": "adam", "algo.eps": 1e-5},
        **{f"memory.{name}": value for name, value in SMALL.items() if name in option_names},
    )


@torch.no_grad()
def evaluate(trained, reset_state, episodes=1_000, num_envs=50):
    """Return the mean return of greedy actions; with `reset_state`, the recurrent state is reset before each step."""
    pool = trained.config.make_vector_env(num_envs, seed=123)
    agent = trained.agent
    step, state, last_action = pool.reset(), agent.initial_state(num_envs), np.zeros(num_envs, np.int64)
    reward_sum, num_episodes = 0.0, 0
    while num_episodes < episodes:
        output, state = agent(
            Inputs.from_step(step, last_action), agent.initial_state(num_envs) if reset_state else state
        )
        last_action = output.distribution.mode()[0].numpy()
        pool.send(last_action)
        step = pool.recv()
        reward_sum += float(step.reward.sum())
        num_episodes += int(step.done.sum())
    pool.close()
    return reward_sum / num_episodes


WITHOUT_STATE = [name for name in MEMORIES if not lookup_component("memory", name)(8).initial_state(1)]


@pytest.mark.parametrize("memory", [name for name in MEMORIES if name not in WITHOUT_STATE])
def test_memory_solves_recall(memory):
    """The task is solved with the memory only: the same agent with a reset state is as good as random guessing."""
    trained = train_recall(memory)
    assert trained.mean_return > 0.9
    assert evaluate(trained, reset_state=False) > 0.9
    assert evaluate(trained, reset_state=True) < 1 / SIGNS + 0.1


@pytest.mark.parametrize("memory", WITHOUT_STATE)
def test_agent_without_memory_does_not_solve_recall(memory):
    trained = train_recall(memory)
    assert abs(trained.mean_return - 1 / SIGNS) < 0.06
    assert abs(evaluate(trained, reset_state=False) - 1 / SIGNS) < 0.06


class Beacon(toy.Recall):
    """Image version of recall: a light in one of two corners, blank images, then a bar; the action names the corner."""

    kind = "image"

    def __init__(self, n, options):
        super().__init__(n, options)
        self.spec = ArraySpec((1, 16, 16), "uint8")

    def observe(self):
        sign, clock = self.state["sign"], self.state["clock"]
        image = np.zeros((len(sign), 1, 16, 16), np.uint8)
        image[(clock == 0) & (sign == 0), 0, 2:7, 2:7] = 255
        image[(clock == 0) & (sign == 1), 0, 9:14, 9:14] = 255
        image[clock == self.delay, 0, 7:9] = 255
        return image


ADAM: dict[str, Any] = {"algo.optimizer": "adam", "algo.eps": 1e-5, "algo.lam": 1.0}


@pytest.mark.parametrize(
    "algorithm",
    [
        {"algo": "impala", "steps": "12k", "batch_size": 32, "rollout_length": 8, **ADAM},
        pytest.param(
            {"algo": "ppo", "steps": "6k", "rollout_length": 8, "algo.minibatches": 2}, marks=pytest.mark.slow
        ),
    ],
    ids=("impala", "ppo"),
)
def test_attention_augmented_agent_solves_image_recall(algorithm, monkeypatch):
    """The agent needs its recurrent state: with a reset state it is as good as random guessing."""
    monkeypatch.setitem(toy.TOY_GAMES, "beacon", Beacon)
    monkeypatch.setitem(toy.DEFAULT_SIZES, "beacon", SIGNS)
    small = {
        "agent.queries": 2,
        "agent.key_channels": 4,
        "agent.value_channels": 4,
        "agent.basis_frequencies": 2,
        "agent.hidden": 32,
    }
    agent = {"agent": "aaa", "agent.subtract_mean": False, "agent.extra_inputs": "none"}
    trained = train(env="toy/beacon", delay=DELAY, lr=3e-3, **algorithm, **small, **agent)
    assert evaluate(trained, reset_state=False, episodes=400) > 0.95
    assert evaluate(trained, reset_state=True, episodes=400) < 1 / SIGNS + 0.1


def test_last_action_can_replace_a_memory():
    """The reason why the tests above hide it: a policy that repeats its last action solves recall."""
    pool = make_env("toy/recall", num_envs=20, size=SIGNS, delay=DELAY)
    step, action, total = pool.reset(), np.zeros(20, np.int64), 0.0
    for _ in range(DELAY + 1):
        signs = step.observation["vector"][:, :SIGNS]  # all zeros during the delay
        action = np.where(signs.any(axis=1), signs.argmax(axis=1), action)
        pool.send(action)
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
        return self.observe(), {}
    def observe(self):
        self.cue = int(self.np_random.integers(2))
        return np.array([self.cue, 1 - self.cue, self.scale > 1], np.float32)
    def step(self, action):
        right = self.cue if self.scale == 1 else 1 - self.cue
        return self.observe(), self.scale * float(action == right), True, False, {}

class Large(Small):
    scale = 1000.0
"""


@pytest.mark.parametrize(
    "options",
    [
        {"algo": "impala", "batch_size": 4, "steps": "40k"},
        {"algo": "ppo", "rollout_length": 32, "algo.epochs": 4, "algo.minibatches": 4, "steps": "30k"},
    ],
    ids=lambda options: options["algo"],
)
def test_popart_learns_two_tasks_whose_rewards_differ_by_a_factor_of_1000(options, tmp_path):
    """PopArt learns both tasks. A critic with one value per task does not learn the task with small rewards."""
    (tmp_path / "scales.py").write_text(SCALES)
    plain, popart = (accuracies({**options, "critic": critic}) for critic in ("per-task", "popart"))
    assert min(popart) > 0.95
    assert plain[0] < 0.7


def accuracies(options):
    """Return the fraction of correct actions in the small and in the large task, in the last fifth of the training."""
    base = {"runtime": "serial", "num_envs": 16, "torso.width": 32, "lr": 2e-3}
    base |= {"algo.reward_clipping": "none", "algo.reward_scale": 1.0}
    config = resolve_own({"env": ["scales.py:Small", "scales.py:Large"], **base, **options})
    (actor,), learner = make_actors_and_learner(config)
    actor.start()
    correct: dict[str, list[float]] = {"scales.py:Small": [], "scales.py:Large": []}
    while learner.steps < learner.total_steps:
        rollouts = collect_rollouts(actor, learner)
        learner.learn(rollouts)
        actor.version = learner.version
        if learner.steps > 0.8 * learner.total_steps:
            for episode in collect_episodes(rollouts):
                correct[episode.task].append(episode.episode_return > 0)
    actor.pool.close()
    return [float(np.mean(values)) for values in correct.values()]


def test_ppo_learns_cartpole_with_the_defaults_of_gymnasium() -> None:
    """A random policy reaches about 22; before the environment's own defaults, 100k steps reached 33."""
    config = resolve({"env": "gymnasium/CartPole-v1", "algo": "ppo", "runtime": "serial", "steps": 16_000, "seed": 1})
    assert train_config(config).mean_return > 60
