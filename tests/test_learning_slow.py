"""Longer learning, for real: minutes each. `make test-slow` runs these."""

from pathlib import Path

import pytest

import bestiary

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parent.parent / "examples"


def test_cartpole_with_the_defaults() -> None:
    run = bestiary.train("gymnasium/CartPole-v1", run_dir="r")
    assert run.evaluate(100, greedy=True).mean > 150  # a blind player keeps the pole up for about 20 steps


def test_the_maze_of_the_examples_with_the_parts_of_the_examples() -> None:
    parts = {"torso": f"{EXAMPLES}/tiny_torso.py:Tiny", "memory": f"{EXAMPLES}/ema_memory.py:Ema"}
    run = bestiary.train(f"{EXAMPLES}/maze_env.py:Maze", run_dir="r", **parts)
    assert run.evaluate(100, greedy=True).mean > 0.85  # the best is 0.930, a blind player's -0.37
