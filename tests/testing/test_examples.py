"""The components in examples/ and in docs/extending.md pass their checkers."""

import re
from pathlib import Path
from typing import Any

import pytest

import bestiary
from bestiary.testing import check_agent, check_algorithm, check_env, check_memory, check_torso

ROOT = Path(__file__).parents[2]


def write_block(name: str) -> str:
    """Write the code block of docs/extending.md that defines a class to a file. Return the name of the plug-in."""
    page = (ROOT / "docs/extending.md").read_text()
    (block,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if f"class {name}(" in code]
    Path(f"{name.lower()}.py").write_text(block)
    return f"{name.lower()}.py:{name}"


def test_examples_pass() -> None:
    check_env(f"{ROOT}/examples/maze_env.py:Maze", size=7)
    check_env(f"{ROOT}/examples/signal_env.py:Signal", length=4)
    check_torso(f"{ROOT}/examples/tiny_torso.py:Tiny", "toy/catch", width=8)
    check_memory(f"{ROOT}/examples/ema_memory.py:Ema", max_decay=0.9)


def test_agent_and_algorithm_of_the_documentation_pass() -> None:
    check_agent(write_block("Plain"))
    check_algorithm(write_block("OneStep"))


@pytest.mark.parametrize("runtime", ["serial", "local"])
def test_example_vector_environment_and_critic_of_the_documentation_can_be_trained(runtime: str) -> None:
    options: dict[str, Any] = {"critic": write_block("TwoLayer"), "runtime": runtime, "micro_batch_size": 4}
    run = bestiary.train(f"{ROOT}/examples/signal_env.py:Signal", **options, steps=2_000, run_dir="run")
    assert run.steps >= 2_000
