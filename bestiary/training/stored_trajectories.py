"""Check of the trajectories in checkpoints: those of a replay buffer, and those that wait for the next batch.

A run folder may be damaged or come from another person. Compiled code uses the task, the actions and the recurrent
state of a trajectory without a check. Therefore this module checks the names, types, shapes and values of all tensors.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from bestiary.algorithms.replay_buffer import pack_trajectories
from bestiary.config.config import Config
from bestiary.rollout import Rollout
from bestiary.training.clipped_optimizer import describe_tensor
from bestiary.utils.errors import UserError

# Prefixes of the names of tensors in algorithm.safetensors.
STATE_PREFIX = "state."  # tensors of `Algorithm.save`
WAITING_PREFIX = "waiting."  # tensors of `WaitingTrajectories.save`
GROUPS = ("observation.", "measures.", "extras.", "state.")  # second prefix, for example in waiting.observation.image


def check_stored_trajectories(config: Config, tensors: Mapping[str, Tensor], source: object) -> None:
    """Raise UserError if the trajectories in a checkpoint do not fit the run with this config.

    `tensors` is the content of algorithm.safetensors. `source` is the path of the checkpoint, for the message.
    """
    algorithm = config.make_algorithm()
    stored_extras = algorithm.stored_extras(config.interface.action_spec.n)
    for prefix, extras in ((STATE_PREFIX, stored_extras), (WAITING_PREFIX, algorithm.normalised_extras())):
        found = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        if extras is not None and any(name == "reward" or name.startswith(GROUPS) for name in found):
            _check(config, found, extras, source)


def _check(config: Config, found: Mapping[str, Tensor], extras: Mapping[str, tuple[int, ...]], source: object) -> None:
    """Raise UserError if the trajectories `found` do not fit the run.

    `extras` maps the name of each extra tensor of a trajectory to its shape, without the axes for time and batch.
    """
    expected = _expected_tensors(config, extras)
    reward = found.get("reward", torch.zeros(0))
    count = reward.shape[1] if reward.dim() == 2 else 0  # number of trajectories
    problems = [f"{name}: not expected" for name in found if name.startswith(GROUPS) and name not in expected]
    for name, example in expected.items():
        shape = list(example.shape)
        shape[0 if name.startswith("state.") else 1] = count
        wanted = describe_tensor(torch.empty(shape, dtype=example.dtype, device="meta"))
        tensor = found.get(name)
        if count == 0 or tensor is None or describe_tensor(tensor) != wanted:
            problems.append(f"{name}: {describe_tensor(tensor)} in the checkpoint, {wanted} expected")
        elif tensor.is_floating_point() and not name.startswith("measures.") and not bool(tensor.isfinite().all()):
            problems.append(f"{name}: the values are not finite")
    limits = {"task": len(config.interface.tasks), "last_action": config.interface.action_spec.n}
    if not problems:
        for name, limit in limits.items():
            if not bool(((found[name] >= 0) & (found[name] < limit)).all()):
                problems.append(f"{name}: the values must be in 0..{limit - 1}")
    if problems:
        raise UserError(f"{source}: the stored trajectories do not fit this run:", *problems[:8])


def _expected_tensors(config: Config, extras: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the tensors of one trajectory, with the names, types and shapes of stored trajectories but any values."""
    interface, length = config.interface, config.make_algorithm().sequence_length
    state = config.make_agent().initial_state(1)
    rollout = Rollout.empty(length, 1, interface.observation_spec, interface.measures_spec, state)
    rollout.extras = {name: torch.zeros(length, 1, *shape) for name, shape in extras.items()}
    return pack_trajectories(rollout)
