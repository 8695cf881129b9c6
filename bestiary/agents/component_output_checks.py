"""Check the values that an agent's torso, memory and critic return. Error messages name the faulty component.

Without these checks, a wrong return value raises an exception later, in the code of the agent. The message of this
exception would not name the component.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.critics import ValueEstimate
from bestiary.utils.errors import UserError

STATISTICS_METHODS = ("target_moments", "update_statistics")


@contextmanager
def checked_outputs(agent: nn.Module, names: Mapping[str, str], batch: str) -> Iterator[None]:
    """Return a context in which each value returned by the torso, memory or critic of an agent is checked.

    Args:
        agent: the agent. Its components are its direct submodules `torso`, `memory` and `critic`.
        names: kind of each component to check ("torso", "memory" or "critic") -> its name in messages.
        batch: description of the agent's inputs, for messages.

    Raises:
        UserError: a component returned a value of a wrong type or shape.
    """
    children = dict(agent.named_children())
    with ExitStack() as stack:
        for kind, check in CHECKS.items():
            if kind in children and kind in names:
                hook = children[kind].register_forward_hook(_hook(check, names[kind], batch))
                stack.callback(hook.remove)
        yield


def _hook(check: Callable[[Any, Any, Any], str | None], name: str, batch: str) -> Callable[[Any, Any, Any], None]:
    is_running = False  # prevents recursion: the check of a memory may call the memory again

    def hook(module: Any, args: Any, result: Any) -> None:
        nonlocal is_running
        if is_running:
            return
        is_running = True
        try:
            problem = check(module, args, result)
        finally:
            is_running = False
        if problem is not None:
            raise UserError(f"{name}: {problem} ({batch}; see docs/extending.md)")

    return hook


def features_problem(torso: Any, args: Any, features: Any) -> str | None:
    """Return a message if a torso did not return features [B, output_size], otherwise None."""
    if len(args) != 1 or not isinstance(args[0], dict) or not args[0]:
        return None  # not a call torso(observation): nothing to check
    rows = len(next(iter(args[0].values())))
    return _shape_problem("forward returned", features, "features [B, output_size]", [rows, torso.output_size])


def memory_problem(memory: Any, args: Any, result: Any) -> str | None:
    """Return a message if `forward` or `forward_with_metrics` of a memory returned a wrong value, otherwise None.

    The recurrent state is checked by `sequence_checks.state_problems`.
    """
    if len(args) != 3 or not isinstance(args[1], Tensor):
        return None  # not a call memory(x, done, state): nothing to check
    expected = [*args[1].shape, memory.output_size]
    values = "outputs [T, B, output_size]"
    if not isinstance(result, tuple) or len(result) != 2:
        return f"forward returned {_describe(result)}; expected a pair (outputs, state)"
    problem = _shape_problem("forward returned outputs that are", result[0], values, expected)
    if problem is not None:
        return problem
    if not isinstance(result[1], tuple):
        found = _describe(result[1])
        return f"forward returned the state as {found}; expected a flat tuple of tensors, for example (h,)"
    outputs = result[0]
    method = "forward_with_metrics returned"
    result = memory.forward_with_metrics(*args)
    if not isinstance(result, tuple) or len(result) != 3 or not isinstance(result[2], dict):
        return f"{method} {_describe(result)}; expected (outputs, state, metrics), where metrics is a dict"
    metric_outputs, _, metrics = result
    for name, value in metrics.items():
        if not isinstance(value, Tensor) or value.shape != ():
            return f"{method} the metric {name!r} as {_describe(value)}; expected a scalar tensor, for example a mean"
    problem = _shape_problem(f"{method} outputs that are", metric_outputs, values, expected)
    if problem is None and not torch.allclose(outputs, metric_outputs, rtol=1e-4, atol=1e-5, equal_nan=True):
        difference = (outputs - metric_outputs).abs().max().item()
        return f"{method} outputs that differ by {difference:.3g} from those of forward; they must be equal"
    return problem


def estimate_problem(critic: Any, args: Any, estimate: Any) -> str | None:
    """Return a message if a critic did not return a ValueEstimate with values [T,B], otherwise None."""
    if len(args) != 2 or not isinstance(args[1], Tensor):
        return None  # not a call critic(x, task): nothing to check
    if not isinstance(estimate, ValueEstimate):
        return f"forward returned {_describe(estimate)}; expected bestiary.agents.critics.ValueEstimate"
    problem = _shape_problem("ValueEstimate.normalised is", estimate.normalised, "[T,B]", list(args[1].shape))
    if problem is None and getattr(critic, "keeps_statistics", False):
        problem = "; ".join(statistics_problems(critic)) or None
    return problem


def statistics_problems(critic: Any) -> list[str]:
    """Return a message for each method or running statistic that a critic with `keeps_statistics` lacks."""
    buffers = dict(critic.named_buffers(recurse=False))
    problems = [
        f"keeps_statistics is True, but the method {name} is missing"
        for name in STATISTICS_METHODS
        if not callable(getattr(critic, name, None))
    ]
    if problems:
        return problems
    for name in ("mu", "sigma"):
        if name not in buffers or buffers[name].ndim != 1:
            found = "missing" if name not in buffers else f"a tensor of shape {list(buffers[name].shape)}"
            problems.append(
                f"keeps_statistics is True, but the buffer {name} is {found}; write "
                f"self.register_buffer({name!r}, ...) with one number per task"
            )
    return problems


# Kind of component -> function (module, positional arguments of the call, returned value) -> message or None.
CHECKS: dict[str, Callable[[Any, Any, Any], str | None]] = {
    "torso": features_problem,
    "memory": memory_problem,
    "critic": estimate_problem,
}


def registration_problem(agent: nn.Module) -> str | None:
    """Return a message if an agent stores modules in a plain list, tuple or dict, otherwise None.

    PyTorch does not register such modules, so they are neither trained nor saved in checkpoints. Modules that have no
    trainable parameters, or that are also registered elsewhere, are not reported.
    """
    registered = {id(parameter) for parameter in agent.parameters()}
    for module in agent.modules():
        for name, value in vars(module).items():
            if name.startswith("_") or not isinstance(value, list | tuple | dict):
                continue
            for item in value.values() if isinstance(value, dict) else value:
                if not isinstance(item, nn.Module):
                    continue
                if any(p.requires_grad and id(p) not in registered for p in item.parameters()):
                    container = "nn.ModuleDict" if isinstance(value, dict) else "nn.ModuleList"
                    return (
                        f"{type(module).__name__}.{name} is a {type(value).__name__} of modules, whose parameters are "
                        f"neither trained nor saved; use {container}"
                    )
    return None


def _shape_problem(what: str, found: Any, meaning: str, shape: list[int]) -> str | None:
    if isinstance(found, Tensor) and list(found.shape) == shape:
        return None
    is_wide = isinstance(found, Tensor) and list(found.shape) == [*shape, 1]
    hint = " (.squeeze(-1) removes a last axis of 1)" if is_wide else ""
    return f"{what} {_describe(found)}; expected {meaning} = {shape}{hint}"


def _describe(value: Any) -> str:
    """Return the shape of a tensor, the types of the items of a tuple, or the type of another object."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple):
        return f"{len(value)} values ({', '.join(type(item).__name__ for item in value)})"
    return "None" if value is None else f"an object of type {type(value).__name__}"
