"""An optimizer with its parameters: gradient norms, clipped steps, and the checked state of a checkpoint."""

import copy
from collections.abc import Sequence

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.training.weights import match_memory_layout
from bestiary.utils.errors import UserError


class ClippedOptimizer:
    """An optimizer, its parameters, and the top-level module (torso, policy, ...) to which each parameter belongs."""

    def __init__(self, optimizer: torch.optim.Optimizer, named_parameters: dict[str, nn.Parameter]):
        names = {id(parameter): name for name, parameter in named_parameters.items()}
        self.optimizer = optimizer
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        owners = [names[id(parameter)].split(".")[0] for parameter in self.parameters]
        self.module_names = list(dict.fromkeys(owners))
        indices = [self.module_names.index(owner) for owner in owners]
        self.module_indices = torch.tensor(indices, device=self.parameters[0].device)

    def module_norms(self, norms: Tensor) -> Tensor:
        """Return the gradient norm of each module [M], given the gradient norm of each parameter [P]."""
        return norms.new_zeros(len(self.module_names)).index_add_(0, self.module_indices, norms.square()).sqrt()

    def step(self, tensors: Sequence[Tensor], norm: Tensor, max_norm: float, lr: float) -> None:
        """Clip the gradient to the norm `max_norm`, and perform an optimizer step with learning rate `lr`.

        `tensors` is the gradient, one tensor per parameter. `norm` is its norm before clipping.
        """
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.grad = match_memory_layout(parameter, tensor)
        nn.utils.clip_grads_with_norm_(self.parameters, max_norm, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def save(self) -> dict[str, Tensor]:
        """Return the state of the optimizer as tensors.

        A name such as `3.exp_avg` consists of the index of the parameter and the name of the tensor in the optimizer.
        """
        return {
            f"{index}.{name}": value
            for index, values in self.optimizer.state_dict()["state"].items()
            for name, value in values.items()
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore the tensors that `save` returned.

        Raises:
            UserError: the tensors do not fit the optimizer. Without this check, native code of the optimizer could
                write to memory outside of the tensors.
        """
        self._check(tensors)
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            index, name = key.split(".", 1)
            parameter = self.parameters[int(index)]
            if value.shape == parameter.shape:
                value = match_memory_layout(parameter, value)
            state.setdefault(int(index), {})[name] = value
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})

    def _check(self, tensors: dict[str, Tensor]) -> None:
        """Raise UserError unless `tensors` is empty or has the form of the optimizer's state after a step.

        Before the first step, the state is empty. The names, types and shapes are checked only for the optimizers of
        PyTorch and Bestiary. For a user's optimizer, only the parameter index in each name is checked, and whether the
        values are finite.
        """
        problems = []
        for key, value in tensors.items():
            index = key.split(".", 1)[0]
            if "." not in key or not index.isdecimal() or int(index) >= len(self.parameters):
                problems.append(f"{key}: there is no such parameter")
            elif value.is_floating_point() and not bool(value.isfinite().all()):
                problems.append(f"{key}: the values are not finite")
        if tensors and not problems and type(self.optimizer).__module__.startswith(("torch.optim", "bestiary.")):
            expected = self._state_after_a_step()
            for key in sorted(expected.keys() | tensors.keys()):
                texts = [describe_tensor(found.get(key)) for found in (tensors, expected)]
                if texts[0] != texts[1]:
                    problems.append(f"{key}: {texts[0]} in the checkpoint, {texts[1]} expected")
                elif key.endswith((".step", ".exp_avg_sq", ".square_avg")) and bool((tensors[key] < 0).any()):
                    problems.append(f"{key}: the values are negative")
        if problems:
            raise UserError("the state of the optimizer in the checkpoint does not fit this run:", *problems[:8])

    def _state_after_a_step(self) -> dict[str, Tensor]:
        """Return the tensors that `save` would return after the first step. The optimizer itself does not change."""
        copied = copy.deepcopy(self.optimizer)
        for group in copied.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        copied.step()
        return {
            f"{index}.{name}": value
            for index, values in copied.state_dict()["state"].items()
            for name, value in values.items()
        }


def describe_tensor(tensor: Tensor | None) -> str:
    """Return the type and shape of a tensor as text, for example "float32 (3, 2)"; "missing" if it is None."""
    return "missing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
