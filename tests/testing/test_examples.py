"""The components in examples/ and in docs/extending.md pass their checkers."""

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

import bestiary
from bestiary.testing import check_agent, check_algorithm, check_critic, check_env, check_memory, check_torso

ROOT = Path(__file__).parents[2]


def write_block(name: str) -> str:
    """Write the code block of docs/extending.md that defines a class to a file. Return the name of the plug-in."""
    page = (ROOT / "docs/extending.md").read_text()
    (block,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if f"class {name}(" in code]
    Path(f"{name.lower()}.py").write_text(block)
    return f"{name.lower()}.py:{name}"


def write_algorithms() -> None:
    """Write OneStep of docs/extending.md, and the three algorithms of the page that are derived from it, to mine.py."""
    imports = (
        "from dataclasses import dataclass\n"
        "import torch\n"
        "import torch.nn as nn\n"
        "from bestiary.algorithms.base import Batch\n"
        "from bestiary.rollout import concatenate\n"
        "from bestiary.utils.options import option\n"
    )
    names = ("OneStep", "Repeated", "RewardPrediction", "SeparateHead")
    one_step, *others = (Path(write_block(name).partition(":")[0]).read_text() for name in names)
    Path("mine.py").write_text("\n".join([one_step, imports, *others]))


def test_examples_pass() -> None:
    check_env(f"{ROOT}/examples/maze_env.py:Maze", size=7)
    check_env(f"{ROOT}/examples/signal_env.py:Signal", length=4)
    check_torso(f"{ROOT}/examples/tiny_torso.py:Tiny", "toy/catch", width=8)
    check_memory(f"{ROOT}/examples/ema_memory.py:Ema", max_decay=0.9)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("maze_env", "Maze"),
        ("signal_env", "Signal"),
        ("tiny_torso", "Tiny"),
        ("ema_memory", "Ema"),
        ("early_stop", "EarlyStop"),
        ("jsonl_logger", "JsonLines"),
    ],
)
def test_the_documentation_shows_the_whole_examples(file: str, name: str) -> None:
    """A reader of the page, who has no examples/, can copy them."""
    block = Path(write_block(name).partition(":")[0]).read_text()
    docstring, _, code = (ROOT / f"examples/{file}.py").read_text().partition('"""\n\n')
    assert docstring.startswith('"""')
    assert block == code


def test_agent_and_algorithm_of_the_documentation_pass() -> None:
    check_agent(write_block("Plain"))
    check_algorithm(write_block("OneStep"))
    check_critic(write_block("TwoLayer"), hidden=32)


@pytest.mark.parametrize("name", ["Repeated", "RewardPrediction", "SeparateHead"])
def test_algorithms_of_the_documentation_with_own_batches_and_parameters_pass(name: str) -> None:
    write_algorithms()
    check_algorithm(f"mine.py:{name}")


@pytest.mark.xdist_group("ray")
def test_algorithm_of_the_documentation_with_own_parameters_can_be_trained_on_a_cluster() -> None:
    write_algorithms()
    options: dict[str, Any] = {"num_envs": 4, "micro_batch_size": 4, "torso": "mlp", "torso.width": 16}
    options |= {"algo": "mine.py:RewardPrediction", "cluster": "local", "actors": 1, "pools": 1}
    run = bestiary.train("toy/catch", **options, steps=400, run_dir="run")
    assert run.steps == 400
    assert all(0 <= error < float("inf") for error in run.metrics["prediction_error"])


def test_saved_state_of_the_documentation_passes() -> None:
    page = (ROOT / "docs/extending.md").read_text()
    (methods,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "bit_generator.state" in code]
    signal = (ROOT / "examples/signal_env.py").read_text()
    body = textwrap.indent(f"saveable = True\n\n{methods}", 4 * " ")
    Path("mine.py").write_text(f"import json\n{signal}\n{body}")
    check_env("mine.py:Signal")


@pytest.mark.parametrize("runtime", ["serial", "local"])
def test_example_vector_environment_and_critic_of_the_documentation_can_be_trained(runtime: str) -> None:
    options: dict[str, Any] = {"critic": write_block("TwoLayer"), "runtime": runtime, "micro_batch_size": 4}
    run = bestiary.train(f"{ROOT}/examples/signal_env.py:Signal", **options, steps=2_000, run_dir="run")
    assert run.steps >= 2_000
