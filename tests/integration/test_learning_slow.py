"""Learning tests that take minutes; `make test-slow` runs them."""

from pathlib import Path
from typing import Any

import pytest

import bestiary

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_cartpole_with_the_defaults() -> None:
    run = bestiary.train("gymnasium/CartPole-v1", run_dir="r")
    assert bestiary.evaluate(run, episodes=100, greedy=True).mean > 150  # a random policy reaches about 20


def test_maze_of_the_examples_with_torso_and_memory_of_the_examples() -> None:
    components: dict[str, Any] = {"torso": f"{EXAMPLES}/tiny_torso.py:Tiny", "memory": f"{EXAMPLES}/ema_memory.py:Ema"}
    run = bestiary.train(f"{EXAMPLES}/maze_env.py:Maze", run_dir="r", **components)
    assert bestiary.evaluate(run, episodes=100, greedy=True).mean > 0.85  # optimal 0.930, random -0.37


def test_popart_learns_tasks_with_frequent_and_rare_rewards() -> None:
    """A random policy opens the lock of the task Rare once in 2,187 episodes. The task Late has no reward yet."""
    tasks = f"{EXAMPLES}/lock_tasks.py:{{Frequent,Rare,Late}}"
    run = bestiary.train(tasks, run_dir="r", critic="popart", runtime="serial", steps="200k")
    assert run.metrics["lock_tasks.py:Frequent/return"][-1] > 65  # optimal 70
    assert run.metrics["lock_tasks.py:Rare/return"][-1] > 0.9  # optimal 1
    assert run.metrics["lock_tasks.py:Late/sigma"][-1] == 1
