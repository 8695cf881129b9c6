"""Exported agents compute the outputs of the agent: `bestiary export --format onnx` and `--format torch`."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bestiary
from bestiary.agents import AGENTS
from bestiary.agents.critics import CRITICS
from bestiary.agents.memories import MEMORIES
from bestiary.agents.torsos import TORSOS
from bestiary.cli.main import run_command
from bestiary.config.resolve import resolve
from bestiary.evaluation import agent_export
from bestiary.evaluation.agent_export import OnnxRunner, convert_to_onnx
from bestiary.evaluation.step_program import TOLERANCE, StepExample, StepProgram, check_equal, trace
from bestiary.runs.run import Run

SMALL_FAST_WEIGHTS = {"memory.layers": 1, "memory.hidden": 32, "memory.heads": 2, "memory.ff": 32}


def make_program(**options: Any) -> tuple[StepProgram, StepExample]:
    """Return the step program of an untrained agent, and examples of its arguments."""
    config = resolve(options, {})
    agent: Any = config.make_agent()
    with torch.no_grad():  # the initial policy is nearly uniform; random weights show differences better
        for parameter in agent.policy.parameters():
            parameter.normal_(std=0.3)
    return StepProgram(agent.eval()), StepExample.of(agent, config.interface)


def check_onnx(**options: Any) -> None:
    """Check that ONNX Runtime computes the outputs of an agent, and that the check notices wrong outputs."""
    import onnx

    program, example = make_program(**options)
    exported = trace(program, example, "--format onnx")
    model = convert_to_onnx(exported, example)
    onnx.checker.check_model(onnx.load_from_string(model), full_check=True)
    run = OnnxRunner(model, example)
    assert check_equal(program, exported, example, run, "--format onnx") <= 3 * TOLERANCE

    def wrong(arguments: Any) -> list[Any]:
        *others, last = run(arguments)
        return [*others, last + 1]

    with pytest.raises(bestiary.RunError, match="differs"):
        check_equal(program, exported, example, wrong, "--format onnx")


@pytest.mark.parametrize(
    "options",
    [
        {"env": ["toy/recall"], "memory": "srwm-no-carry", **SMALL_FAST_WEIGHTS},
        {"env": ["atari/Pong", "atari/Carnival"], "torso": "shallow", "torso.width": 16, "critic": "popart"},
    ],
    ids=lambda options: options.get("memory", "popart"),
)
def test_onnx_runtime_computes_the_outputs_of_the_agent(options: dict[str, Any]) -> None:
    check_onnx(**options)


@pytest.mark.slow
@pytest.mark.parametrize(("torso", "memory"), [*itertools.product(TORSOS, MEMORIES)])
def test_onnx_can_express_each_torso_with_each_memory(torso: str, memory: str) -> None:
    check_onnx(env=["atari/Pong"], torso=torso, memory=memory)


@pytest.mark.slow
@pytest.mark.parametrize("critic", CRITICS)
@pytest.mark.parametrize("agent", AGENTS)
def test_onnx_can_express_each_agent_with_each_critic(agent: str, critic: str) -> None:
    check_onnx(env=["atari/Pong", "atari/Carnival"], agent=agent, critic=critic)


@pytest.fixture(scope="module")
def recall_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a short run of an agent with a memory."""
    folder = tmp_path_factory.mktemp("runs") / "recall"
    memory = {"name": "gru", "hidden": 16}
    return bestiary.train("toy/recall", run_dir=str(folder), runtime="serial", steps=2_000, seed=1, memory=memory)


def test_an_exported_agent_acts_like_the_policy(recall_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    import onnxruntime

    assert run_command(["export", str(recall_run.path), "--format", "onnx"]) == 0
    path = capsys.readouterr().out.split("agent: ")[1].strip()
    session = onnxruntime.InferenceSession(path)
    metadata = json.loads(session.get_modelmeta().custom_metadata_map["bestiary"])
    assert metadata["action_names"] == list(recall_run.config.interface.action_spec.names)
    assert metadata["checkpoint_steps"] == recall_run.steps
    shapes = {value.name: value.shape for value in session.get_inputs()}
    assert shapes["done"] == ["batch"]

    num_envs = 4
    env = recall_run.make_vec(num_envs, seed=3)
    policy = recall_run.policy(greedy=True)
    observation, _ = env.reset()
    reward, done = np.zeros(num_envs, np.float32), np.ones(num_envs, bool)
    last_action = np.zeros(num_envs, np.int64)
    state = np.zeros((num_envs, *shapes["state.0"][1:]), np.float32)
    actions = set()
    for _ in range(60):
        feeds = {"observation.vector": observation, "reward": reward, "done": done, "last_action": last_action}
        logits, _, state = session.run(None, {**feeds, "state.0": state})
        last_action = logits.argmax(-1)
        np.testing.assert_array_equal(last_action, policy.act(observation, reward=reward, done=done))
        observation, reward, terminated, truncated, _ = env.step(last_action)
        done = terminated | truncated
        actions |= set(last_action.tolist())
    assert len(actions) > 1


def test_an_exported_torch_program_equals_the_agent(recall_run: Run) -> None:
    path = agent_export.export_torch(recall_run, out="agent.pt2")
    program = torch.export.load(str(path)).module()
    agent: Any = recall_run.agent()
    arguments = StepExample.of(agent, recall_run.config.interface).arguments(7, seed=1)
    with torch.no_grad():
        logits, value, state = program(*arguments)
        expected = StepProgram(agent)(*arguments)
    torch.testing.assert_close((logits, value, *state), (expected[0], expected[1], *expected[2]))


MEMORY = """
import torch.nn as nn
class Counter(nn.Module):
    def __init__(self, input_size):
        super().__init__()
        self.output_size = input_size
    def initial_state(self, batch_size):
        return ()
    def forward(self, x, done, state):
        return (-x if bool(done.all()) else x), state
"""


def test_an_agent_that_cannot_be_traced_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("counter.py").write_text(MEMORY)
    run = bestiary.train("toy/catch", run_dir="r", runtime="serial", steps=500, memory="counter.py:Counter")
    capsys.readouterr()
    for name in ("onnx", "torch"):
        assert run_command(["export", str(run.path), "--format", name]) == 2
        error = capsys.readouterr().err.strip()
        assert "\n" not in error
        assert f"--format {name}" in error
        assert "cannot be expressed" in error
    assert not list(Path("r").rglob("*.onnx")) + list(Path("r").rglob("*.pt2"))


def test_missing_packages_and_options_without_effect_are_named(
    recall_run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_command(["export", str(recall_run.path), "--format", "onnx", "--episodes", "3", "--greedy"]) == 2
    errors = capsys.readouterr().err
    assert "--episodes" in errors
    assert "--greedy" in errors
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert run_command(["export", str(recall_run.path), "--format", "onnx"]) == 2
    assert "pip install 'bestiary[onnx]'" in capsys.readouterr().err
