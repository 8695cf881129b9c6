"""Checks of users' components before training starts: T=2 against two steps, first steps of environments, options."""

import textwrap
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import bestiary
from bestiary.cli.main import run_command
from bestiary.utils.errors import RunError, UserError
from tests.trusted import resolve_own

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

    class InPlace(NoResetInside):
        def forward(self, x, done, state):
            outputs = []
            for x_t, done_t in zip(x, done):
                for s in state:
                    s.mul_(~done_t[:, None])
                output, (h, c) = self.core(x_t[None], tuple(s[None] for s in state))
                state = (h[0], c[0])
                outputs.append(output)
            return torch.cat(outputs), state

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


def test_memory_that_changes_its_state_in_place_is_refused(networks: str) -> None:
    problem = refusal(memory=f"{networks}:InPlace")
    assert problem.startswith(f"{networks}:InPlace: ")
    assert "changes the tensor 0 of the recurrent state in place" in problem


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
    config = resolve_own({**SMALL, "torso": f"{networks}:CountsCalls"})
    torch.manual_seed(3)
    before = torch.get_rng_state()
    agent: Any = config.make_agent(config.make_vector_env(1, 0))
    assert torch.equal(torch.get_rng_state(), before)
    assert agent.torso.calls == 0


# --- options ---

OPTIONS = """
    from dataclasses import dataclass
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

    class NoDefault(Torso):
        @dataclass(frozen=True)
        class Options:
            width: int
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
        ({"torso": "mine.py:NoDefault"}, ("NoDefault.Options", "width", "no default", "option(")),
        ({"algo": "mine.py:Algo"}, ("mine.py:Algo", "has a class Options", "an argument options")),
    ],
)
def test_arguments_that_are_not_options_are_explained(options: dict[str, Any], facts: tuple[str, ...]) -> None:
    Path("mine.py").write_text(textwrap.dedent(OPTIONS))
    problem = refusal(**options)
    for fact in facts:
        assert fact in problem


def test_option_of_an_environment_with_the_flag_of_a_training_option_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("clash.py").write_text(
        "import gymnasium\n"
        "class Clash(gymnasium.Env):\n"
        "    def __init__(self, *, seed: int = 3): ...\n"
        "    def reset(self, *, seed=None, options=None): ...\n"
        "    def step(self, action): ...\n"
    )
    assert run_command(["train", "clash.py:Clash", "--steps", "10"]) == 2
    error = capsys.readouterr().err
    assert "--seed" in error
    assert "env_seed" in error
    assert len(error.splitlines()) <= 2


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
    import dataclasses
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

    class NumberOfActions(Doubles):
        def __init__(self, num_envs, seed):
            super().__init__(num_envs, seed)
            self.action_spec = ActionSpec(2)

    class OneRow(Doubles):
        def reset(self):
            step = initial_step({"vector": np.zeros((self.num_envs, 2), np.float32)}, {})
            return dataclasses.replace(step, observation={"vector": np.zeros((1, 2), np.float32)})

    class NoSave(Doubles):
        saveable = True

    class NoStep(gymnasium.Env):
        observation_space = Box(-1, 1, (2,))
        action_space = Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.zeros(2, np.float32), {}
"""


@pytest.mark.parametrize(
    ("env", "options", "facts"),
    [
        ("Old", {"old": "reset"}, ("reset returned one object of type ndarray", "(observation, info)")),
        ("Old", {"old": "step"}, ("step returned 4 values", "terminated, truncated", "old Gym")),
        ("Old", {"old": "error"}, ("mine.py, line ", "ZeroDivisionError: simulation failed")),
        ("OldSeed", {}, ("reset does not accept a seed",)),
        ("LegacySeed", {}, ("mine.py, line ", "seed")),
        ("NoTasks", {}, ("attribute tasks is missing", "self.tasks")),
        ("NumberOfActions", {}, ("ActionSpec(names=2)", "tuple of names")),
        ("OneRow", {}, ("reset: observation['vector'] is float32[1, 2]", "float32[2, 2]")),
        ("NoSave", {}, ("saveable is True", "save and load are missing")),
        ("NoStep", {}, ("mine.py:NoStep: the method step is missing",)),
        ("Doubles", {}, ("reset: observation['vector'] is float64[2, 2]", "float32[2, 2]")),
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


def test_wrong_number_of_rows_in_a_later_step_stops_the_run_with_one_line() -> None:
    Path("rows.py").write_text(
        textwrap.dedent("""
            import dataclasses
            import numpy as np
            from bestiary.envs.vector_env import VectorEnv, initial_step
            from bestiary.rollout import ActionSpec, ArraySpec, Step

            class Rows(VectorEnv):
                def __init__(self, num_envs, seed):
                    self.num_envs = num_envs
                    self.observation_spec = {"vector": ArraySpec((1,), "float32")}
                    self.action_spec = ActionSpec(("a", "b"))
                    self.measures_spec = {}
                    self.tasks = ("rows",)
                    self.calls = 0

                def reset(self):
                    return initial_step({"vector": np.zeros((self.num_envs, 1), np.float32)}, {})

                def send(self, actions): ...

                def recv(self):
                    self.calls += 1
                    step = dataclasses.replace(self.reset(), done=np.zeros(self.num_envs, bool))
                    step = dataclasses.replace(step, game_over=step.done)
                    return step if self.calls < 10 else dataclasses.replace(step, done=step.done[:-1])
        """)
    )
    with pytest.raises(RunError, match=r"rows: recv: done is bool\[3\].*bool\[4\].*step 40") as error:
        bestiary.train(**{**SMALL, "env": "rows.py:Rows"}, run_dir="r")
    assert len(str(error.value).splitlines()) == 1


def test_command_line_reports_a_refused_component_with_status_2(
    networks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["train", "toy/chain", "--memory", f"{networks}:NoResetInside"]) == 2
    errors = capsys.readouterr().err
    assert len(errors.strip().splitlines()) == 1
    assert "NoResetInside" in errors


# --- values that components return, and their attributes ---

RETURNS = """
    import dataclasses
    from dataclasses import dataclass
    import torch
    import torch.nn as nn
    from bestiary.agents.agent import Output
    from bestiary.agents.critics import ValueEstimate
    from bestiary.agents.distributions import Categorical
    from bestiary.algorithms.base import Algorithm, Loss
    from bestiary.training.callbacks.base import Callback
    from bestiary.utils.options import option

    class Torso(nn.Module):
        def __init__(self, spec):
            super().__init__()
            self.layer = nn.Linear(spec["vector"].shape[0], 6)
            self.output_size = 6

        def forward(self, observation):
            return self.layer(observation["vector"])

    class Wide(Torso):
        def __init__(self, spec):
            super().__init__(spec)
            self.output_size = 12

    class Empty(Torso):
        def __init__(self, spec, *, width: int = 0):
            super().__init__(spec)
            self.layer = nn.Linear(spec["vector"].shape[0], width)
            self.output_size = width

    class NoReturn(Torso):
        def forward(self, observation):
            self.layer(observation["vector"])

    class WrongInputs(Torso):
        extra_inputs = "reward"

    class NoOptions(Torso):
        @dataclass(frozen=True)
        class Options:
            size: int | None = option(None, "size")

        @classmethod
        def derive_options(cls, options, context):
            dataclasses.replace(options, size=3)

        def __init__(self, spec, options):
            super().__init__(spec)

    class NoState(nn.Module):
        def __init__(self, input_size):
            super().__init__()
            self.output_size = input_size

        def initial_state(self, batch_size):
            return ()

        def forward(self, x, done, state):
            return x

    class StateTensor(NoState):
        def initial_state(self, batch_size):
            return torch.zeros(batch_size, 2)

        def forward(self, x, done, state):
            (total,) = state
            return x, state

    class PlainList(Torso):
        def __init__(self, spec):
            super().__init__(spec)
            self.layers = [nn.Linear(6, 6)]

        def forward(self, observation):
            return self.layers[0](self.layer(observation["vector"]))

    class BareState(NoState):
        def initial_state(self, batch_size):
            return (torch.zeros(batch_size, 2),)

        def forward(self, x, done, state):
            return x, state[0]

    class VectorMetric(NoState):
        def forward(self, x, done, state):
            return x, state

        def forward_with_metrics(self, x, done, state):
            return x, state, {"size": x.abs()}

    class DoubledOutputs(VectorMetric):
        def forward_with_metrics(self, x, done, state):
            return 2 * x, state, {}

    class Critic(nn.Module):
        def __init__(self, input_size, tasks):
            super().__init__()
            self.layer = nn.Linear(input_size, 1)

        def forward(self, x, task):
            return self.layer(x).squeeze(-1)

    class WideCritic(Critic):
        def forward(self, x, task):
            return ValueEstimate(self.layer(x))

    class NoMethods(Critic):
        keeps_statistics = True

        def forward(self, x, task):
            return ValueEstimate(self.layer(x).squeeze(-1))

    class NoBuffers(NoMethods):
        def target_moments(self, targets, task, rewards): ...
        def update_statistics(self, moments): ...

    class Agent(nn.Module):
        components = ("torso", "head")

        def initial_state(self, batch_size): ...
        def forward(self, inputs, state): ...

    class AgentDefaults(Agent):
        components = ("torso",)
        config_defaults = {"memori": "gru"}

    class Tiny(nn.Module):
        def __init__(self, observation, action):
            super().__init__()
            self.layer = nn.Linear(observation["vector"].shape[0], action.n + 1)

        def initial_state(self, batch_size):
            return ()

        def distribution(self, x):
            return Categorical(x)

        def forward(self, inputs, state):
            x = self.layer(inputs.observation["vector"])
            return Output(self.distribution(x), x[..., 0]), state

    class Logits(Tiny):
        def distribution(self, x):
            return x[..., 1:]

    class TorchDistribution(Tiny):
        def distribution(self, x):
            return torch.distributions.Categorical(logits=x[..., 1:])

    class NoLoss(Algorithm): ...

    class OnlyLoss(Algorithm):
        def loss(self, agent, batch, progress):
            output, _ = agent(batch.inputs(), batch.state)
            return Loss(output.value.square().sum(), {})

    class WrongSetup(OnlyLoss):
        def setup(self): ...

    class NoLoad(OnlyLoss):
        def save(self): ...

    class NoSuperInit(OnlyLoss):
        def __init__(self, options): ...

    class NoSize(OnlyLoss):
        def batch_size(self, num_envs, pools): ...

    class OwnOptions(OnlyLoss):
        @dataclass(frozen=True)
        class Options:
            lr: float = option(0.1, "learning rate")

    class TextSize(OnlyLoss):
        @dataclass(frozen=True)
        class Options(Algorithm.Options):
            batch_size: str = option("large", "size")

    class DictOption(Torso):
        def __init__(self, spec, *, sizes: dict = {}):
            super().__init__(spec)

    class Misspelled(Callback):
        def on_updates(self, session, metrics, episodes): ...
"""


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"torso": "Wide"}, ("mine.py:Wide: ", "tensor of shape [6, 6]", "[B, output_size] = [6, 12]")),
        ({"torso": "Empty"}, ("mine.py:Empty: output_size is 0", "at least 1")),
        ({"torso": "NoReturn"}, ("mine.py:NoReturn: forward returned None", "[6, 6]")),
        ({"torso": "WrongInputs"}, ("extra_inputs is 'reward'", "tuple", "reward, action")),
        ({"torso": "NoOptions"}, ("mine.py:NoOptions: derive_options returned NoneType", "must return the options")),
        ({"memory": "NoState"}, ("mine.py:NoState: ", "expected a pair (outputs, state)")),
        ({"memory": "StateTensor"}, ("mine.py:StateTensor: initial_state(3) is a Tensor", "flat tuple")),
        ({"memory": "VectorMetric"}, ("forward_with_metrics", "'size'", "[2, 3, ", "scalar")),
        ({"critic": "Critic"}, ("mine.py:Critic: ", "[2, 3]", "ValueEstimate")),
        ({"critic": "WideCritic"}, ("mine.py:WideCritic: ", "[2, 3, 1]", "[T,B] = [2, 3]", "squeeze(-1)")),
        ({"agent": "Agent"}, ("components is ('torso', 'head')", "torso, memory, critic")),
        ({"agent": "AgentDefaults"}, ("config_defaults has the key 'memori'", "'memory' or 'algo.lr'")),
        ({"algo": "WrongSetup"}, ("setup has the arguments (self)", "expected setup(self, agent)")),
        ({"torso": "PlainList"}, ("mine.py:PlainList", "PlainList.layers", "list", "nn.ModuleList")),
        ({"algo": "NoLoad"}, ("mine.py:NoLoad", "save", "load(self, tensors)")),
        ({"algo": "NoSuperInit"}, ("mine.py:NoSuperInit", "super().__init__(options)")),
        ({"memory": "DoubledOutputs"}, ("forward_with_metrics", "differ", "forward")),
        ({"critic": "NoMethods"}, ("mine.py:NoMethods", "keeps_statistics", "target_moments")),
        ({"critic": "NoBuffers"}, ("mine.py:NoBuffers", "keeps_statistics", "mu", "register_buffer")),
        ({"algo": "NoSize"}, ("NoSize: batch_size(num_envs, pools) is None", "integer of at least 1")),
        ({"memory": "BareState"}, ("mine.py:BareState: ", "the state as a tensor of shape [3, 2]", "flat tuple")),
        ({"agent": "Tiny"}, ("mine.py:Tiny: the logits", "(2, 3, 3)", "[T,B,A] = (2, 3, 2)")),
        ({"agent": "Logits"}, ("mine.py:Logits: ", "distribution is a torch.Tensor", "distributions.Categorical")),
        ({"agent": "TorchDistribution"}, ("torch.distributions", "bestiary.agents.distributions.Categorical")),
        ({"algo": "NoLoss"}, ("mine.py:NoLoss: has no method loss", "loss(self, agent, batch, progress)")),
        ({"algo": "OwnOptions"}, ("Options has no lr_schedule", "rollout_length", "Options(Algorithm.Options)")),
        ({"algo": "TextSize"}, ("Options.batch_size has the type str", "the type int", "another name")),
        ({"torso": "DictOption"}, ("DictOption: the default of argument sizes", "dict", "int, float, bool, str")),
        ({"callback": "Misspelled"}, ("on_updates is not a method of Callback", "did you mean on_update")),
    ],
)
def test_wrong_return_value_or_attribute_of_a_component_is_refused(
    options: dict[str, str], facts: tuple[str, ...]
) -> None:
    Path("mine.py").write_text(textwrap.dedent(RETURNS))
    problem = refusal(**{kind: f"mine.py:{name}" for kind, name in options.items()})
    for fact in facts:
        assert fact in problem


OWN_PARAMETERS = """
    import torch.nn as nn
    from bestiary.algorithms.base import Algorithm, Loss

    class List(Algorithm):
        def setup(self, agent):
            self.head = nn.Linear(2, 1)

        def parameters(self):
            return list(self.head.parameters())

        def loss(self, agent, batch, progress):
            output, _ = agent(batch.inputs(), batch.state)
            return Loss(output.value.square().sum(), {"value": self.number(output)})

        def number(self, output):
            return output.value.sum().detach()

    class Module(List):
        def parameters(self):
            return {"head": self.head}

    class Shared(List):
        def setup(self, agent):
            self.agent = agent

        def parameters(self):
            return dict(self.agent.policy.named_parameters())

    class Column(List):
        def parameters(self):
            return {}

        def loss(self, agent, batch, progress):
            loss = super().loss(agent, batch, progress)
            return Loss(loss.total, {"step": loss.total.detach()})

    class Number(List):
        def parameters(self):
            return dict(self.head.named_parameters())

        def number(self, output):
            return output.value.sum().item()
"""


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("List", ("List.parameters returned a list", "dict of nn.Parameter by name")),
        ("Module", ("Module.parameters returned a Linear as 'head'", "named_parameters()")),
        ("Shared", ("Shared.parameters returned 'weight'", "policy.weight of the agent")),
        ("Column", ("sums['step']", "column of metrics.csv", "another name")),
        ("Number", ("sums['value'] has type float", ".detach(), without .item()")),
    ],
)
def test_wrong_return_value_of_an_algorithm_stops_the_run_with_one_line(name: str, facts: tuple[str, ...]) -> None:
    Path("mine.py").write_text(textwrap.dedent(OWN_PARAMETERS))
    with pytest.raises(RunError) as error:
        bestiary.train(**SMALL, algo=f"mine.py:{name}", run_dir="run")
    assert len(str(error.value).splitlines()) == 1
    for fact in facts:
        assert fact in str(error.value)


# --- environments: options object, state, reward, measures ---

ENVS_WITH_OPTIONS = """
    from dataclasses import dataclass
    import gymnasium
    import numpy as np
    from gymnasium.spaces import Box, Discrete
    from bestiary.envs.vector_env import VectorEnv, initial_step
    from bestiary.rollout import ActionSpec, ArraySpec, Step
    from bestiary.utils.options import option

    class Sized(gymnasium.Env):
        metadata = {"render_modes": ["rgb_array"]}
        action_space = Discrete(2)
        reward = 1.0

        @dataclass(frozen=True)
        class Options:
            size: int = option(3, "size", low=1)

        def __init__(self, render_mode=None, options=None):
            self.render_mode = render_mode
            self.size = options.size
            self.observation_space = Box(-1, 1, (options.size,))

        def reset(self, seed=None, options=None):
            super().reset(seed=seed)
            return np.zeros(self.size, np.float32), {}

        def step(self, action):
            return np.zeros(self.size, np.float32), self.reward, False, True, {}

        def render(self):
            return np.zeros((4, 4, 3), np.uint8)

    class OptionsFirst(Sized):
        def __init__(self, options, render_mode=None):
            super().__init__(render_mode, options)

    class RequiredMode(Sized):
        def __init__(self, render_mode, options):
            super().__init__(render_mode, options)

    class ArrayReward(Sized):
        reward = np.ones(1)

    class OneMeasure(Sized):
        info_measures = "success"

    class Saved(VectorEnv):
        saveable = True

        def __init__(self, num_envs, seed):
            self.num_envs = num_envs
            self.observation_spec = {"vector": ArraySpec((1,), "float32")}
            self.action_spec = ActionSpec(("a", "b"))
            self.measures_spec = {}
            self.tasks = ("saved",)
            self.rngs = [np.random.default_rng(seed)]

        def observe(self):
            return {"vector": np.zeros((self.num_envs, 1), np.float32)}

        def reset(self):
            return initial_step(self.observe(), {})

        def send(self, actions): ...

        def recv(self):
            n = self.num_envs
            no = np.zeros(n, bool)
            return Step(self.observe(), np.zeros(n, np.float32), no, no, no, np.zeros(n, np.int64))

        def save(self):
            return {"rngs": [rng.bit_generator.state for rng in self.rngs]}

        def load(self, state): ...
"""


@pytest.mark.parametrize("name", ["Sized", "OptionsFirst"])
def test_options_object_of_an_environment_may_precede_or_follow_render_mode(name: str) -> None:
    Path("mine.py").write_text(textwrap.dedent(ENVS_WITH_OPTIONS))
    for render in (False, True):
        with closing(bestiary.make_env(f"mine.py:{name}", render=render, size=5)) as pool:
            assert pool.reset().observation["vector"].shape == (1, 5)
            if render:
                assert pool.render()[0].shape == (4, 4, 3)


@pytest.mark.parametrize(
    ("env", "facts"),
    [
        ("RequiredMode", ("'render_mode'", "render_mode=None")),
        ("ArrayReward", ("mine.py:ArrayReward: step returned reward", "shape [1]", "number")),
        ("OneMeasure", ("info_measures is 'success'", "('success',)")),
        ("Saved", ("mine.py:Saved: save: the entry 'rngs'", "list", "NumPy arrays")),
    ],
)
def test_wrong_return_value_or_attribute_of_an_environment_is_refused(env: str, facts: tuple[str, ...]) -> None:
    Path("mine.py").write_text(textwrap.dedent(ENVS_WITH_OPTIONS))
    problem = refusal(env=f"mine.py:{env}")
    for fact in facts:
        assert fact in problem
