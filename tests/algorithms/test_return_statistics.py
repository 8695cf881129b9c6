"""Reward normalisation: against a slow implementation of its definition, in all algorithms, and in checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bestiary
from bestiary.algorithms.actor_critic_loss import learner_rewards
from bestiary.algorithms.return_statistics import DISCOUNTED_RETURN, ReturnStatistics
from bestiary.config.resolve import resolve
from bestiary.rollout import Rollout
from bestiary.training.factory import make_actors_and_learner
from bestiary.utils.errors import UserError
from tests.trusted import resolve_own

# Episodes have 3 to 9 steps. The second task pays 50 times as much as the first.
TASKS = """
import gymnasium, numpy as np
from gymnasium.spaces import Box, Discrete


class Small(gymnasium.Env):
    observation_space, action_space, factor = Box(-1, 1, (2,)), Discrete(2), 1.0

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(3, 10))
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.left -= 1
        reward = self.factor * (float(self.np_random.normal()) + action)
        return np.full(2, self.left / 10, np.float32), reward, self.left == 0, False, {}


class Large(Small):
    factor = 50.0
"""
TWO_TASKS = ["tasks.py:Small", "tasks.py:Large"]
OPTIONS: dict[str, Any] = {
    "env": "toy/recall",
    "algo.reward_clipping": "return_std",
    "runtime": "serial",
    "num_envs": 4,
    "rollout_length": 7,
    "batch_size": 4,
    "algo.discount": 0.9,
    "torso": "mlp",
    "steps": 4_000,
}


def scale_rewards(rollout: Rollout, factors: torch.Tensor) -> Rollout:
    """Return a rollout as if the environments had paid other rewards: multiplied by one factor per environment."""
    returns = rollout.extras[DISCOUNTED_RETURN] * factors
    return replace(rollout, reward=rollout.reward * factors, extras={DISCOUNTED_RETURN: returns})


def slow_rewards(rollouts: list[Rollout], discount: float, tasks: list[int]) -> list[np.ndarray]:
    """Normalise rewards from the definition: all returns since the start of the run, environment by environment.

    The initial statistics have the weight of 1e-4 steps with the mean 0 and the variance 1.
    """
    normalised = []
    for last in range(len(rollouts)):
        reward = np.concatenate([r.reward[1:].double().numpy() for r in rollouts[: last + 1]])
        first = np.concatenate([r.done[:-1].numpy() for r in rollouts[: last + 1]])
        result = rollouts[last].reward[1:].double().numpy().copy()
        for task in set(tasks):
            returns = []
            for n in (n for n, own in enumerate(tasks) if own == task):
                total = 0.0
                for t in range(len(reward)):
                    total = reward[t, n] + (0.0 if first[t, n] else discount * total)
                    returns.append(total)
            weight = len(returns) + 1e-4
            mean = sum(returns) / weight
            squares = sum(x**2 for x in returns) + 1e-4  # the initial variance 1
            deviation = np.sqrt(squares / weight - mean**2 + 1e-8)
            own = np.array(tasks) == task
            result[:, own] = np.clip(result[:, own] / deviation, -10, 10)
        normalised.append(result)
    return normalised


def test_rewards_are_divided_by_the_deviation_of_all_discounted_returns_of_their_task() -> None:
    """Episodes begin and end within rollouts of 7 steps, and some of them last longer than a rollout."""
    Path("tasks.py").write_text(TASKS)
    (actor,), learner = make_actors_and_learner(resolve_own({**OPTIONS, "env": TWO_TASKS}))
    actor.start()
    rollouts = [actor.collect() for _ in range(5)]
    tasks = rollouts[0].task[0].tolist()
    assert sorted(tasks) == [0, 0, 1, 1]
    assert sum(int(r.done[1:].sum()) for r in rollouts) > 10
    expected = slow_rewards(rollouts, 0.9, tasks)
    found = []
    assert learner.return_statistics is not None
    for rollout in rollouts:
        (normalised,) = learner.return_statistics.normalise([rollout], lambda tensor: tensor)
        found.append(learner_rewards(normalised, learner.algorithm.options).numpy())
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    raw = np.stack([r.reward[1:].numpy() for r in rollouts])
    assert np.abs(raw).max() > 10 * np.abs(np.array(found)).max() > 0


def test_rewards_far_beyond_the_deviation_are_clipped_to_ten() -> None:
    statistics = ReturnStatistics(1)
    statistics.update(*(torch.tensor([x], dtype=torch.float64) for x in (1000.0, 0.0, 10.0)))
    assert statistics.deviation.item() == pytest.approx(0.1, rel=1e-3)
    (actor,), _ = make_actors_and_learner(resolve(OPTIONS))
    actor.start()
    rollout = actor.collect()
    rollout.reward[1:] = 0.5
    rollout.reward[3:] = -5.0
    rollout.extras[DISCOUNTED_RETURN].zero_()
    (normalised,) = statistics.normalise([rollout], lambda tensor: tensor)
    rewards = learner_rewards(normalised, resolve(OPTIONS).components["algo"].options)
    assert rewards[0, 0] == pytest.approx(5, rel=0.05)
    assert rewards[2:].unique().tolist() == [-10]


@pytest.mark.parametrize("algo", ["impala", "clear", "ppo", "ppg"])
def test_each_algorithm_is_independent_of_the_scale_of_the_rewards(algo: str) -> None:
    """With rewards times 1,000, the weights after 3 learning phases are the same; without normalisation, they differ.

    The agent does not observe the rewards.
    """
    options = {**OPTIONS, "algo": algo, "agent.extra_inputs": "none"}
    if algo in ("ppo", "ppg"):
        options.pop("batch_size")
        options |= {"algo.sequence_length": 7, "algo.minibatches": 2}
    if algo == "ppg":
        options |= {"algo.aux_interval": 2}

    def weights(clipping: str, factor: float) -> torch.Tensor:
        (actor,), learner = make_actors_and_learner(resolve({**options, "algo.reward_clipping": clipping}))
        actor.start()
        for _ in range(3):
            rollout = actor.collect()
            if clipping == "return_std":
                rollout = scale_rewards(rollout, torch.full((4,), factor))
            else:
                rollout.reward *= factor
            learner.learn([rollout])
        return torch.cat([parameter.detach().flatten() for parameter in learner.agent.parameters()])

    # Not bit for bit, because of the constant 1e-8 beside the variance and of the initial variance.
    torch.testing.assert_close(weights("return_std", 1.0), weights("return_std", 1000.0), rtol=1e-2, atol=1e-5)
    assert (weights("none", 1.0) - weights("none", 1000.0)).abs().max() > 1e-3


def test_the_deviation_is_logged_and_saved() -> None:
    Path("tasks.py").write_text(TASKS)
    run = bestiary.train(run_dir="run", **{**OPTIONS, "env": TWO_TASKS, "steps": 1_000})
    saved = run.checkpoints[-1].load_learner()["algorithm"]
    deviation = (saved["return_statistics.variance"] + 1e-8).sqrt()
    assert deviation.shape == (2,)
    assert run.metrics["return_std"].tolist()[-1] == pytest.approx(float(deviation.mean()), rel=0.2)


def test_invalid_statistics_in_a_checkpoint_are_refused() -> None:
    statistics = ReturnStatistics(2)
    for name, wrong in (
        ("count", torch.ones(3, dtype=torch.float64)),
        ("mean", torch.full((2,), float("nan"), dtype=torch.float64)),
        ("variance", torch.full((2,), -1.0, dtype=torch.float64)),
        ("variance", torch.ones(2)),
    ):
        with pytest.raises(ValueError, match=name):
            statistics.load({**statistics.save(), name: wrong})
    with pytest.raises(ValueError, match="count"):
        statistics.load({})


def test_a_reward_scale_that_would_have_no_effect_is_refused() -> None:
    with pytest.raises(UserError, match=r"--algo\.reward-scale 2"):
        resolve({**OPTIONS, "algo.reward_scale": 2.0})
    # Environments with vectors have a default scale, which is not used.
    config = resolve({"env": "gymnasium/CartPole-v1", "algo.reward_clipping": "return_std"})
    assert config.components["algo"].options.reward_scale is None


def test_a_replay_buffer_with_other_rewards_is_refused() -> None:
    small: dict[str, Any] = {"runtime": "serial", "steps": 160, "num_envs": 8, "batch_size": 8, "algo": "clear"}
    bestiary.train("toy/catch", run_dir="first", **small)
    with pytest.raises(UserError, match="return_std"):
        bestiary.train(
            "toy/catch", run_dir="second", init_from="first", **{**small, "algo.reward_clipping": "return_std"}
        )
    assert not Path("second").exists()
