"""Export a trained agent as a program that runs without Bestiary: ONNX, or a program of `torch.export`.

The program computes one step of a batch of environments. Its inputs and outputs (A actions, batch axis first):

    observation.NAME    observations, as the environment returns them (images uint8)
    reward              rewards of the last actions, float32
    done                bool, True: the first observation of an episode; the program then resets the state
    last_action         last actions, int64
    task                index of the task, int64; an ONNX file has this input only if there are several tasks
    state.K             tensor K of the recurrent state before the step; zeros at the start
    ->
    logits              logits of the policy, [B,A]
    value               values in units of the rewards, [B]
    next_state.K        tensor K of the recurrent state after the step
"""

import json
from pathlib import Path
from typing import Any

import torch

from bestiary import __version__
from bestiary.evaluation.media import check_output
from bestiary.evaluation.step_program import (
    StepArguments,
    StepExample,
    StepProgram,
    check_equal,
    hidden_exporter_messages,
    trace,
)
from bestiary.runs import checkpoints
from bestiary.runs.checkpoints import Checkpoint
from bestiary.runs.run import Run
from bestiary.utils.console import note
from bestiary.utils.errors import UserError
from bestiary.utils.plugins import error_line

METADATA_KEY = "bestiary"  # key of the description in the metadata of an ONNX file


def export_torch(
    run: Run, *, out: str | Path | None = None, checkpoint: int | None = None, overwrite: bool = False
) -> Path:
    """Write the agent as a program for `torch.export.load` (.pt2) and return the path.

    The written program is loaded and compared with the agent on random states. If `out` is None, the file is written
    into the run folder.
    """
    chosen = checkpoints.choose(run.path, checkpoint)
    path = _output_path(run, chosen, out, ".pt2", overwrite)
    program, example = _make_program(run, chosen)
    exported = trace(program, example, "--format torch")
    with hidden_exporter_messages():
        torch.export.save(exported, str(path), extra_files={f"{METADATA_KEY}.json": describe(run, chosen)})
        loaded = torch.export.load(str(path)).module()

    def run_program(arguments: StepArguments) -> list[Any]:
        with torch.no_grad():
            logits, value, state = loaded(*arguments)
        return [logits, value, *state]

    try:
        difference = check_equal(program, exported, example, run_program, "--format torch")
    except BaseException:
        path.unlink()
        raise
    note(f"the program gives the same outputs as the agent on random states (largest difference {difference:.0e})")
    return path


def export_onnx(
    run: Run, *, out: str | Path | None = None, checkpoint: int | None = None, overwrite: bool = False
) -> Path:
    """Write the agent as an ONNX file and return the path.

    The file is written only if ONNX Runtime computes the same outputs as the agent, on random states and with random
    resets (see `check_equal`). If `out` is None, the file is written into the run folder.
    """
    _check_onnx_packages()
    chosen = checkpoints.choose(run.path, checkpoint)
    path = _output_path(run, chosen, out, ".onnx", overwrite)
    program, example = _make_program(run, chosen)
    exported = trace(program, example, "--format onnx")
    model = convert_to_onnx(exported, example, describe(run, chosen))
    difference = check_equal(program, exported, example, OnnxRunner(model, example), "--format onnx")
    path.write_bytes(model)
    note(f"the program gives the same outputs as the agent on random states (largest difference {difference:.0e})")
    return path


def convert_to_onnx(exported: Any, example: StepExample, description: str = "{}") -> bytes:
    """Return the ONNX model of a traced step program. `description` is stored in its metadata.

    Raises:
        UserError: ONNX has no operator for one of the operations of the agent.
    """
    names = [f"observation.{name}" for name in example.observation_spec] + ["reward", "done", "last_action", "task"]
    states = range(len(example.agent.initial_state(1)))
    try:
        with hidden_exporter_messages(), torch.no_grad():
            converted: Any = torch.onnx.export(
                exported,
                (),
                dynamo=True,
                verbose=False,
                input_names=[*names, *(f"state.{k}" for k in states)],
                output_names=["logits", "value", *(f"next_state.{k}" for k in states)],
            )
    except Exception as error:
        raise UserError(
            f"--format onnx: ONNX cannot express this agent ({error_line(error)}); use --format torch"
        ) from error
    model = converted.model_proto
    _name_batch_axis(model)
    if example.num_tasks == 1:
        _fix_task(model)
    model.metadata_props.add(key=METADATA_KEY, value=description)
    return model.SerializeToString()


def _name_batch_axis(model: Any) -> None:
    """Give the symbol of the batch size the name "batch" in an ONNX model."""
    (done,) = (value for value in model.graph.input if value.name == "done")
    symbol = done.type.tensor_type.shape.dim[0].dim_param
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == symbol:
                dim.dim_param = "batch"


def _fix_task(model: Any) -> None:
    """Replace the input `task` of an ONNX model by zeros with the shape of the input `done`."""
    from onnx import helper

    graph = model.graph
    (task,) = (value for value in graph.input if value.name == "task")
    graph.input.remove(task)
    if any("task" in node.input for node in graph.node):
        # `done` is False or True; done AND NOT done is False in all rows, which is 0 as an integer.
        nodes = [
            helper.make_node("Not", ["done"], ["task_not_done"]),
            helper.make_node("And", ["done", "task_not_done"], ["task_false"]),
            helper.make_node("Cast", ["task_false"], ["task"], to=task.type.tensor_type.elem_type),
        ]
        for index, node in enumerate(nodes):
            graph.node.insert(index, node)


class OnnxRunner:
    """Runs an ONNX model with ONNX Runtime on the arguments of a step program."""

    def __init__(self, model: bytes, example: StepExample):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3  # errors only
        self.session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.inputs = {value.name for value in self.session.get_inputs()}
        self.observations = list(example.observation_spec)

    def __call__(self, arguments: StepArguments) -> list[Any]:
        observation, reward, done, last_action, task, state = arguments
        feeds = {f"observation.{name}": observation[name] for name in self.observations}
        feeds |= {"reward": reward, "done": done, "last_action": last_action, "task": task}
        feeds |= {f"state.{k}": tensor for k, tensor in enumerate(state)}
        return self.session.run(None, {name: x.numpy() for name, x in feeds.items() if name in self.inputs})


def describe(run: Run, checkpoint: Checkpoint) -> str:
    """Return a JSON text that describes an exported agent: its run, environments, observations and actions."""
    interface = run.config.interface
    content = {
        "run": run.name,
        "checkpoint_steps": checkpoint.steps,
        "environments": list(run.config.envs),
        "environment_options": run.config.tables()["env"],
        "observations": {n: [s.dtype, *s.shape] for n, s in interface.observation_spec.items()},
        "action_names": list(interface.action_spec.names),
        "bestiary": __version__,
    }
    return json.dumps(content)


def _make_program(run: Run, checkpoint: Checkpoint) -> tuple[StepProgram, StepExample]:
    agent: Any = run.agent(checkpoint)
    program = StepProgram(agent.eval())
    return program, StepExample.of(agent, run.config.interface)


def _output_path(run: Run, checkpoint: Checkpoint, out: str | Path | None, suffix: str, overwrite: bool) -> Path:
    if out is not None:
        return check_output(out, overwrite, (suffix,), "agents in this format")
    return run.new_output_path("exports", f"{checkpoint.steps:012d}", suffix)


def _check_onnx_packages() -> None:
    """Raise UserError if one of the packages for ONNX is missing."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            __import__(name)
        except ImportError as error:
            raise UserError(f"--format onnx: {name} is not installed; run: pip install 'bestiary[onnx]'") from error
