"""Warm start: `--init-from RUN` initialises an agent with the weights of another run.

The new agent has the same components as the source run, unless other components are selected on the command line. The
weights of torso and memory are copied unchanged. The policy head has one row of weights per action, and each row is
copied from the action with the same name. A critic with one value per task has one row of weights per task, and each
row is copied from the task with the same name. Rows without a match keep their random initialisation. If the source run
has another type of critic, the whole critic keeps its random initialisation, because the values would have another
meaning.

If the agent observes its last action, the weights for this input are matched by the index of the action, even if the
actions with the same index have different names. A match by name is not possible: these weights are part of the
memory's weights, and this module does not know which weights belong to which action.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bestiary.agents.agent import Agent, find_child
from bestiary.agents.component_defaults import AgentDefaults
from bestiary.agents.critics import HLGauss, PopArt, SharedCritic
from bestiary.algorithms.base import Algorithm
from bestiary.config.config import Config
from bestiary.envs.vector_env import EnvInterface
from bestiary.runs import checkpoints
from bestiary.runs.run import Run, open_run
from bestiary.training.stored_trajectories import check_stored_trajectories
from bestiary.utils import plugins
from bestiary.utils.console import note
from bestiary.utils.errors import UserError


@torch.no_grad()
def load_pretrained(agent: Agent, interface: EnvInterface, source: Run) -> str:
    """Load the newest weights of the run `source` into a new agent. Return a description of the loaded weights.

    Raises:
        UserError: the weights do not fit the agent.
    """
    saved = checkpoints.choose(source.path).load_model()
    description = copy_weights(agent, interface, source.config, saved, f"--init-from {source.path}")
    return f"weights of {source.path} at step {source.steps}{description}"


@torch.no_grad()
def copy_weights(
    agent: Agent, interface: EnvInterface, source: Config, saved: Mapping[str, Tensor], name_of_source: str
) -> str:
    """Copy weights of another agent into a new agent. Return a description of the weights that are not copied.

    Args:
        source: configuration of the agent that has the weights `saved`.
        name_of_source: start of error messages, for example "--init-from runs/pong".

    Raises:
        UserError: the weights do not fit the agent.
    """
    critic = find_child(agent, "critic")
    source_critic = find_child(source.make_agent(), "critic")
    weights = agent.state_dict()
    # The names of the rows: the policy head has one row per action, the critic one row per task.
    source_rows = {"policy": source.interface.action_spec.names, "critic": source.interface.tasks}
    rows = {"policy": interface.action_spec.names, "critic": interface.tasks}
    if isinstance(critic, SharedCritic):
        del source_rows["critic"]  # the shared critic has one value for all tasks
    problems: list[str] = []
    new_rows: dict[str, list[str]] = {}  # "policy" or "critic" -> names of rows that keep their random initialisation
    for name, tensor in weights.items():
        head = name.split(".")[0]
        if head == "critic" and not _same_meaning(critic, source_critic):
            new_rows[head] = list(rows[head])
        elif name not in saved:
            problems.append(f"{name}: not in the source run")
        elif saved[name].dtype != tensor.dtype or saved[name].dim() != tensor.dim():
            problems.append(_mismatch(name, saved[name], tensor))
        elif bool(saved[name].isnan().any()):
            problems.append(f"{name}: the values in the source run are not finite")
        elif head in source_rows and len(source_rows[head]) == len(saved[name]) and len(rows[head]) == len(tensor):
            if saved[name].shape[1:] != tensor.shape[1:]:
                problems.append(_mismatch(name, saved[name], tensor))
                continue
            for row, key in enumerate(rows[head]):
                if key in source_rows[head]:
                    tensor[row] = saved[name][source_rows[head].index(key)]
                elif key not in new_rows.setdefault(head, []):
                    new_rows[head].append(key)
        elif saved[name].shape == tensor.shape:
            tensor.copy_(saved[name])
        else:
            problems.append(_mismatch(name, saved[name], tensor))
    source_actions, actions = source_rows["policy"], rows["policy"]
    if problems:
        if len(source_actions) != len(actions):
            problems.insert(
                0,
                f"the source run has {len(source_actions)} actions, this run has {len(actions)} "
                "(with --full-actions on, all Atari games have the same actions)",
            )
        raise UserError(f"{name_of_source}: its weights do not fit this agent: {problems[0]}")
    agent.load_state_dict(weights)
    if isinstance(critic, PopArt):
        # The returns may have another scale than in the source run. PopArt adapts its statistics faster while its
        # counter of updates is low, so the counter is set to 0.
        critic.updates.zero_()
    notes = [f"new {head} outputs for {', '.join(keys)}" for head, keys in new_rows.items()]
    different = [names for names in zip(source_actions, actions, strict=False) if names[0] != names[1]]
    if different and isinstance(agent, AgentDefaults) and agent.uses_last_action:
        source_action, action = different[0]
        notes.append(
            f"the observed last action is matched by index: {source_action} in the source run is {action} in this run"
        )
    return "".join(f"; {text}" for text in notes)


def _same_meaning(critic: Any, source_critic: Any) -> bool:
    """Return whether the outputs of two critics have the same meaning, so that their weights can be copied."""
    if isinstance(critic, HLGauss) and isinstance(source_critic, HLGauss):
        return critic.options == source_critic.options  # the bins of the histograms
    return type(critic) is type(source_critic)


def _mismatch(name: str, saved: Tensor, own: Tensor) -> str:
    """Return a message about a tensor that has different types or shapes in the source run and in this run."""
    if saved.dtype != own.dtype:
        return f"{name}: type {saved.dtype} in the source run, {own.dtype} in this run"
    return f"{name}: shape {list(saved.shape)} in the source run, {list(own.shape)} in this run"


def load_pretrained_state(config: Config, algorithm: Algorithm) -> None:
    """Load the algorithm's state, for example a replay buffer, from the run given by --init-from.

    Do nothing if --init-from is not given, if that run was trained with another algorithm, or if
    `algorithm.inherits_state` is false.
    """
    source = _find_source_of_state(config, algorithm)
    if source is None:
        return
    checkpoint = checkpoints.choose(source.path)
    saved = checkpoint.load_learner()["algorithm"]
    check_stored_trajectories(source.config, saved, checkpoint.path)
    state = {name.removeprefix("state."): tensor for name, tensor in saved.items() if name.startswith("state.")}
    tasks = config.interface.tasks
    indices = [tasks.index(task) if task in tasks else -1 for task in source.config.interface.tasks]
    try:
        description = algorithm.load_pretrained(state, indices)
    except (KeyError, ValueError, TypeError, IndexError, RuntimeError) as error:
        raise UserError(f"--init-from {source.path}: algorithm.safetensors: {plugins.error_line(error)}") from error
    if description:
        note(f"from {source.path}: {description}")


def check_pretrained_state(config: Config) -> None:
    """Check that the algorithm can use the state (a replay buffer) of the run given by --init-from.

    If the algorithm loads no state from that run, nothing is checked.

    Raises:
        UserError: the observations, actions, tasks or rewards of the two runs do not fit, so that the state cannot be
            used.
    """
    source = _find_source_of_state(config, config.make_algorithm())
    if source is None:
        return
    own, other = config.interface, source.config.interface
    if (own.observation_spec, own.action_spec) != (other.observation_spec, other.action_spec):
        raise UserError(
            f"--init-from {source.path}: its replay buffer has other observations or actions; use an environment with "
            "the same observations and actions (Atari: --full-actions), or add --algo.inherit-buffer off"
        )
    if config.make_algorithm().sequence_length != source.config.make_algorithm().sequence_length:
        raise UserError(
            f"--init-from {source.path}: the trajectories in its replay buffer have "
            f"{source.config.make_algorithm().sequence_length} steps; use the same --rollout-length, or add "
            "--algo.inherit-buffer off"
        )
    normalises = config.make_algorithm().return_discount is not None
    if normalises != (source.config.make_algorithm().return_discount is not None):
        raise UserError(
            f"--init-from {source.path}: the rewards in its replay buffer do not fit, because only "
            f"{'this run' if normalises else 'that run'} has --algo.reward-clipping return_std; use the same reward "
            "clipping, or add --algo.inherit-buffer off"
        )
    missing = [task for task in other.tasks if task not in own.tasks]
    if missing and config.components["critic"].name != "shared":
        raise UserError(
            f"--init-from {source.path}: its replay buffer contains trajectories of {', '.join(missing)}, but the "
            "critic of this run has no value for these tasks; use --critic shared, or add --algo.inherit-buffer off"
        )


def _find_source_of_state(config: Config, algorithm: Algorithm) -> Run | None:
    """Return the run given by --init-from if the algorithm loads its state from that run, otherwise None."""
    if config.training.init_from is None or not algorithm.inherits_state:
        return None
    source = open_run(config.training.init_from)
    return source if source.config.components["algo"].name == config.components["algo"].name else None
