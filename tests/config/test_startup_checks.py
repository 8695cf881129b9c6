"""Checks of users' components before training starts: T=2 against two steps, first steps of environments, options."""

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import bestiary
from bestiary.cli.main import run_command
from bestiary.config.resolve import resolve
from bestiary.utils.errors import RunError, UserError

NETWORKS = """
    import torch
    import torch.nn as nn
    from bestiary.agents.agent import Output
    from bestiary.agents.distributions import Categorical

    class NoResetInside(nn.Module):
        def __init__(self, input_size):
            super().__init__()
            self.core = nn.LSTM(input_size, 8)
            self.output_size = 8

        def initial_state(self, batch_size):
            return torch.zeros(batch_size, 8), torch.zeros(batch_size, 8)

        def forward(self, x, done, state):
            h, c = (torch.where(done[0, :, None], 0.0, s)[None] for s in state)
            x, (h, c) = self.core(x, (h, c))
            return x, (h[0], c[0])

    class ListState(NoResetInside):
        def initial_state(self, batch_size):
            return list(super().initial_state(batch_size))

    class BatchSecond(NoResetInside):
        def initial_state(self, batch_size):
            return tuple(s[None] for s in super().initial_state(batch_size))[:1]

        def forward(self, x, done, state):
            return x[..., :8], state

    class BatchNorm(nn.Module):
        def __init__(self, spec):
            super().__init__()
            self.norm = nn.BatchNorm1d(spec["vector"].shape[0])
            self.output_size = spec["vector"].shape[0]

        def forward(self, observation):
            return self.norm(observation["vector"])

    class Dropout(BatchNorm):
        def __init__(self, spec):
            super().__init__(spec)
            self.norm = nn.Dropout(0.5)

    class CountsCalls(BatchNorm):
        def __init__(self, spec):
            super().__init__(spec)
            self.norm = nn.Linear(self.output_size, self.output_size)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, observation):
            self.calls = self.calls + 1
            torch.rand(3)
            return super().forward(observation)

    class Plain(nn.Module):
        def __init__(self, observation, action, *, wrong: str = ""):
            super().__init__()
            self.wrong = wrong
            self.head = nn.Linear(observation["vector"].shape[0], action.n + 1)

        def initial_state(self, batch_size):
            return ()

        def forward(self, inputs, state):
            x = self.head(inputs.observation["vector"])
            if self.wrong == "time":
                x = x.cumsum(0)
            value = x[..., 0].squeeze(0) if self.wrong == "squeeze" else x[..., 0]
            if self.wrong == "index":
                value = value + value[1].mean()
            output = Output(Categorical(x[..., 1:]), value)
            return output if self.wrong == "pair" else (output, state)
"""

SMALL: dict[str, Any] = {"env": "toy/chain", "steps": 100, "num_envs": 4, "batch_size": 4, "runtime": "serial"}


@pytest.fixture
def networks() -> str:
    Path("networks.py").write_text(textwrap.dedent(NETWORKS))
    return str(Path("networks.py").resolve())


def refusal(**options: Any) -> str:
    """Return the only problem for which a training is refused. No run folder may be created."""
    with pytest.raises(UserError) as error:
        bestiary.train(**{**SMALL, **options}, run_dir="run")
    assert not Path("run").exists()
    (problem,) = error.value.problems
    assert len(problem.splitlines()) == 1
    return problem


@pytest.mark.parametrize(
    ("kind", "name", "facts"),
    [
        ("memory", "NoResetInside", ("T=2 steps differs from 2 calls with T=1 by 0.", "layer memory.core (LSTM)")),
        ("torso", "BatchNorm", ("T=2 steps differs from 2 calls with T=1 by", "layer torso.norm (BatchNorm1d)")),
        ("torso", "Dropout", ("two calls with the same inputs differ by", "layer torso.norm (Dropout)", "random")),
    ],
)
def test_network_that_differs_between_one_and_two_steps_is_refused(
    networks: str, kind: str, name: str, facts: tuple[str, ...]
) -> None:
    problem = refusal(**{kind: f"{networks}:{name}"})
    assert problem.startswith(f"{kind} {networks}:{name}: ")
    for fact in facts:
        assert fact in problem


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("ListState", "initial_state(3) is a list; expected a flat tuple"),
        ("BatchSecond", "initial_state(3)[0] has shape [1, 3, 8]; expected the batch axis, 3, first"),
    ],
)
def test_state_of_a_wrong_form_is_refused(networks: str, name: str, fact: str) -> None:
    problem = refusal(memory=f"{networks}:{name}")
    assert problem.startswith(f"{networks}:{name}: {fact}")


@pytest.mark.parametrize(
    ("wrong", "facts"),
    [
        ("time", ("agent ", "T=2 steps differs from 2 calls with T=1 by")),
        ("squeeze", ("agent ", "in the shape of value, [2, 3] and [6]")),
        ("index", ("fails on a test batch of T=1 steps and B=3", "IndexError", "networks.py, line ")),
        (
            "pair",
            ("fails on a test batch of T=2 steps and B=3", "forward returned one Output; expected (Output, state)"),
        ),
    ],
)
def test_agent_that_differs_between_one_and_two_steps_is_refused(
    networks: str, wrong: str, facts: tuple[str, ...]
) -> None:
    problem = refusal(**{"agent": f"{networks}:Plain", "agent.wrong": wrong})
    for fact in (f"{networks}:Plain", *facts):
        assert fact in problem


def test_check_changes_neither_buffers_nor_the_random_generator(networks: str) -> None:
    config = resolve({**SMALL, "torso": f"{networks}:CountsCalls"})
    torch.manual_seed(3)
    before = torch.get_rng_state()
    agent: Any = config.make_agent(config.make_vector_env(1, 0))
    assert torch.equal(torch.get_rng_state(), before)
    assert agent.torso.calls == 0


# --- options ---

OPTIONS = """
    import torch.nn as nn
    from bestiary.algorithms.base import Algorithm

    class Torso(nn.Module):
        def __init__(self, spec, width=8):
            super().__init__()
            self.layer = nn.Linear(spec["vector"].shape[0], width)
            self.output_size = width

        def forward(self, observation):
            return self.layer(observation["vector"])

    class Required(Torso):
        def __init__(self, spec, width):
            super().__init__(spec, width)

    class Algo(Algorithm):
        def __init__(self, *, coefficient: float = 0.1):
            super().__init__()

        def loss(self, agent, batch, progress): ...
"""

RULE = "options are keyword-only arguments with a default"


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"torso": "mine.py:Torso", "torso.width": 4}, ("unknown option --torso.width", "not keyword-only", RULE)),
        (
            {"torso": "mine.py:Required"},
            ("mine.py:Required", "missing a required argument: 'width'", RULE, "*, width="),
        ),
        ({"algo": "mine.py:Algo"}, ("mine.py:Algo", "has a class Options", "last positional argument")),
    ],
)
def test_arguments_that_are_not_options_are_explained(options: dict[str, Any], facts: tuple[str, ...]) -> None:
    Path("mine.py").write_text(textwrap.dedent(OPTIONS))
    problem = refusal(**options)
    for fact in facts:
        assert fact in problem


def test_positional_argument_of_an_environment_is_explained() -> None:
    Path("mine.py").write_text(
        textwrap.dedent(ENVS) + "\nclass Sized(Old):\n    def __init__(self, size=3):\n        super().__init__()\n"
    )
    for text in (
        refusal(env="mine.py:Sized", size=4),
        _problem(lambda: bestiary.make_env("mine.py:Sized", size=4)),
    ):
        assert "size is an argument of the constructor, but not keyword-only" in text
        assert RULE in text


def _problem(function: Any) -> str:
    with pytest.raises(UserError) as error:
        function()
    return str(error.value)


# --- environments ---

ENVS = """
    import gymnasium
    import numpy as np
    from gymnasium.spaces import Box, Discrete
    from bestiary.envs.vector_env import VectorEnv, initial_step
    from bestiary.rollout import ActionSpec, ArraySpec, Step

    class Old(gymnasium.Env):
        observation_space = Box(-1, 1, (2,))
        action_space = Discrete(2)

        def __init__(self, *, old: str = "", after: int = 0):
            self.old = old
            self.after = after
            self.count = 0

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            observation = np.zeros(2, np.float32)
            return observation if self.old == "reset" else (observation, {})

        def step(self, action):
            self.count += 1
            if self.old == "error":
                raise ZeroDivisionError("simulation failed")
            values = np.zeros(2, np.float32), 1.0, False, self.count % 5 == 0, {}
            return values[:3] + values[4:] if self.old == "step" and self.count > self.after else values

    class OldSeed(Old):
        def reset(self):
            return np.zeros(2, np.float32)

    class Doubles(VectorEnv):
        def __init__(self, num_envs, seed):
            self.num_envs = num_envs
            self.observation_spec = {"vector": ArraySpec((2,), "float32")}
            self.action_spec = ActionSpec(("a", "b"))
            self.measures_spec = {}
            self.tasks = ("doubles",)

        def reset(self):
            return initial_step({"vector": np.zeros((self.num_envs, 2))}, {})

    class LegacySeed(Doubles):
        def __init__(self, num_envs, seed):
            super().__init__(num_envs, seed)
            self.rng = np.random.RandomState(seed)

    class NoTasks(Doubles):
        def __init__(self, num_envs, seed):
            super().__init__(num_envs, seed)
            del self.tasks
"""


@pytest.mark.parametrize(
    ("env", "options", "facts"),
    [
        ("Old", {"old": "reset"}, ("reset returned one object of type ndarray", "(observation, info)")),
        ("Old", {"old": "step"}, ("step returned 4 values", "terminated, truncated", "old Gym")),
        ("Old", {"old": "error"}, ("mine.py, line ", "ZeroDivisionError: simulation failed")),
        ("OldSeed", {}, ("reset does not accept a seed",)),
        ("LegacySeed", {}, ("mine.py, line ", "seed")),
        ("NoTasks", {}, ("the attribute tasks is missing",)),
        ("Doubles", {}, ("reset: observation['vector'] is float64[1, 2]", "float32[1, 2]")),
    ],
)
def test_environment_that_fails_in_its_first_steps_is_refused(
    env: str, options: dict[str, Any], facts: tuple[str, ...]
) -> None:
    Path("mine.py").write_text(textwrap.dedent(ENVS))
    problem = refusal(env=f"mine.py:{env}", **options)
    for fact in facts:
        assert fact in problem


def test_old_return_values_in_a_later_step_stop_the_run_with_one_line() -> None:
    Path("mine.py").write_text(textwrap.dedent(ENVS))
    with pytest.raises(RunError, match=r"mine.py:Old: step returned 4 values") as error:
        bestiary.train(**{**SMALL, "env": "mine.py:Old"}, old="step", after=3, run_dir="run")
    assert len(str(error.value).splitlines()) == 1


def test_command_line_reports_a_refused_component_with_status_2(
    networks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["train", "toy/chain", "--memory", f"{networks}:NoResetInside"]) == 2
    errors = capsys.readouterr().err
    assert len(errors.strip().splitlines()) == 1
    assert "NoResetInside" in errors
