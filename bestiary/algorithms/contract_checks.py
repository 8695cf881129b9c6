"""Checks whether a user's algorithm follows the contract of `Algorithm`: its methods and their results."""

import inspect
from collections.abc import Collection
from typing import Any

import torch.nn as nn
from torch import Tensor

from bestiary.algorithms.base import Algorithm, Batch, Loss
from bestiary.utils.options import field_types

# The methods that a subclass of Algorithm may define, and their arguments.
METHODS: dict[str, tuple[str, ...]] = {
    "loss": ("agent", "batch", "progress"),
    "batches": ("rollouts", "context"),
    "rollouts_per_learn": ("num_envs", "pools"),
    "batch_size": ("num_envs", "pools"),
    "validate": ("num_envs", "pools"),
    "fits_exactly": ("num_envs", "pools"),
    "dummy_batch": ("rollout",),
    "shard": ("learners",),
    "setup": ("agent",),
    "parameters": (),
    "make_optimizers": ("parameters",),
    "save": (),
    "load": ("tensors",),
    "stored_extras": ("num_actions",),
}

# Member of Algorithm -> options that its default implementation reads.
OPTIONS_OF_DEFAULTS: dict[str, tuple[str, ...]] = {
    "sequence_length": ("rollout_length",),
    "batch_size": ("batch_size",),
    "rollouts_per_learn": ("batch_size",),
    "epochs": ("reuse",),
    "make_optimizers": ("optimizer", "eps", "alpha", "momentum"),
}

# Columns of metrics.csv that a loss must not report, because it would overwrite them.
RESERVED_COLUMNS = frozenset(
    (
        "step frames seconds sps games envs_in_first_game return true_return training_return game_length updates loss "
        "grad_norm lr policy_lag max_policy_lag skipped_updates recomputed_updates abs_log_ratio_lag0 return_std "
        "reward_hacking_alerts"
    ).split()
)


def algorithm_problem(component: Any) -> str | None:
    """Return a message if a user's class is not a valid algorithm, otherwise None.

    The class must be a subclass of Algorithm and define `loss` or `batches`. Its methods must accept the arguments with
    which they are called. Its options must include the options that the learner reads. A class that saves state must
    also load it.
    """
    if not (isinstance(component, type) and issubclass(component, Algorithm)):
        return "must be a subclass of bestiary.algorithms.base.Algorithm"
    if component.loss is Algorithm.loss and component.batches is Algorithm.batches:
        return "has no method loss; define loss(self, agent, batch, progress)"
    for name, arguments in METHODS.items():
        signature = inspect.signature(getattr(component, name))
        try:
            signature.bind(None, *arguments)
        except TypeError:
            expected = ", ".join(("self", *arguments))
            return f"{name} has the arguments {signature}; expected {name}({expected})"
    if (problem := _options_problem(component)) is not None:
        return problem
    if component.save is not Algorithm.save and component.load is Algorithm.load:
        return (
            "defines save but not load, so its state would be lost if a run is resumed; also define load(self, tensors)"
        )
    return None


def _options_problem(component: type[Algorithm]) -> str | None:
    """Return a message if the options lack an option that the learner reads, or change the type of such an option."""
    options: Any = component.Options
    needed = ["lr", "lr_schedule", "max_grad_norm"]
    for member, names in OPTIONS_OF_DEFAULTS.items():
        if getattr(component, member) is getattr(Algorithm, member):
            needed += names
    missing = [name for name in dict.fromkeys(needed) if not hasattr(options, name)]
    if missing:
        return f"Options has no {', '.join(missing)}; write class Options(Algorithm.Options), which has these options"
    types, base_types = field_types(options), field_types(Algorithm.Options)
    for name in dict.fromkeys(needed):
        if types.get(name, base_types[name]) != base_types[name]:
            return (
                f"Options.{name} has the type {_type_name(types[name])}, but the option {name} of Algorithm.Options "
                f"has the type {_type_name(base_types[name])}; use the same type or another name"
            )
    return None


def _type_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def parameters_problem(parameters: Any) -> str | None:
    """Return a message if `Algorithm.parameters` did not return trainable parameters by name, otherwise None."""
    rule = "it must return a dict of nn.Parameter by name, for example dict(self.head.named_parameters())"
    if not isinstance(parameters, dict):
        return f"returned a {type(parameters).__name__}; {rule}"
    for name, parameter in parameters.items():
        if not isinstance(parameter, nn.Parameter):
            return f"returned a {type(parameter).__name__} as {name!r}; {rule}"
    return None


def loss_problem(loss: Any) -> str | None:
    """Return a message if `loss`, the result of a loss function, is not a valid Loss, otherwise None.

    Check types and shapes, and that `total` requires a gradient. Do not check the values.
    """
    if not isinstance(loss, Loss):
        found = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        return f"returned {found}; it must return bestiary.algorithms.base.Loss(total, sums)"
    if not isinstance(loss.total, Tensor) or loss.total.shape != ():
        found = f"shape {list(loss.total.shape)}" if isinstance(loss.total, Tensor) else type(loss.total).__name__
        return f"returned a Loss whose total has {found}; it must be a scalar tensor: add .sum()"
    if not loss.total.requires_grad:
        return "returned a Loss whose total has no gradient; compute it from the output of the agent, without detach"
    if not isinstance(loss.sums, dict):
        return f"returned a Loss whose sums are a {type(loss.sums).__name__}; expected a dict of scalar tensors"
    for name, value in loss.sums.items():
        if not isinstance(value, Tensor) or value.shape != ():
            found = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
            hint = "add .sum()" if isinstance(value, Tensor) else "use .sum().detach(), without .item()"
            return f"returned a Loss whose sums[{name!r}] has {found}; expected a scalar tensor: {hint}"
        if name in RESERVED_COLUMNS or name.startswith("grad_norm/"):
            return f"returned a Loss with sums[{name!r}], but {name} is another column of metrics.csv; use another name"
    return None


def batch_problem(batch: Any, optimizers: Collection[str]) -> str | None:
    """Return a message if `batch`, an object that `Algorithm.batches` yielded, is not a valid Batch, otherwise None.

    `optimizers` are the names of the optimizers that `Algorithm.make_optimizers` returned.
    """
    if not isinstance(batch, Batch):
        return f"yielded a {type(batch).__name__}; it must yield bestiary.algorithms.base.Batch(rollout, loss)"
    if batch.optimizer not in optimizers:
        return f"yielded a Batch with optimizer={batch.optimizer!r}; make_optimizers returned {', '.join(optimizers)}"
    return None
