"""The function `check_critic`."""

import copy
from typing import Any

import torch
from torch import Tensor

from bestiary.agents.component_defaults import with_defaults
from bestiary.agents.component_output_checks import statistics_problems
from bestiary.agents.critics import ValueEstimate
from bestiary.agents.memories.base import State
from bestiary.agents.sequence_checks import unchanged
from bestiary.envs.vector_env import EnvInterface
from bestiary.rollout import ArraySpec, Inputs, Tensors
from bestiary.testing.network_checks import B, Subject, T, check_recurrent
from bestiary.testing.networks import ACTIONS, TASKS, build
from bestiary.testing.problem_report import Report, find_component


def check_critic(component: Any, input_size: int = 16, /, **options: Any) -> None:
    """Check a critic: the shapes of its estimates, its gradients and its running statistics.

    Also check that no estimate depends on other time steps or other rows of the batch.

    Args:
        component: class, `path/to/file.py:Name`, or name of a built-in critic.
        input_size: number of input features.
        options: options of the critic.

    Raises:
        ComponentError: the critic breaks a rule. The message lists all problems, one line each.
    """
    found = find_component("critic", component, options, num_arguments=2)
    report = found.report
    interface = EnvInterface(TASKS, {"vector": ArraySpec((input_size,), "float32")}, ACTIONS)

    def check() -> None:
        critic = build(found, "critic", interface, input_size, len(TASKS))

        def call(inputs: Inputs, state: State) -> tuple[Tensors, State]:
            return {"normalised": critic(inputs.observation["vector"], inputs.task).normalised}, state

        subject = Subject(report, critic, call, lambda batch_size: (), interface)
        inputs = subject.inputs()
        with report.errors_of(f"forward with T={T} steps and B={B} trajectories"), unchanged(critic):
            estimate = critic(inputs.observation["vector"], inputs.task)
        report.require(*estimate_problems(estimate))
        check_recurrent(subject)
        if with_defaults(found.cls, "critic").keeps_statistics:
            check_statistics(report, copy.deepcopy(critic), inputs)

    report.run(check)
    report.finish()


def estimate_problems(estimate: Any) -> list[str]:
    """Return a list of problems of `estimate`, the result of a critic for inputs [T,B]."""
    if not isinstance(estimate, ValueEstimate):
        return [f"forward returned a {type(estimate).__name__}; expected bestiary.agents.critics.ValueEstimate"]
    problems = []
    for name in ("normalised", "mu", "sigma"):
        array = getattr(estimate, name)
        if isinstance(array, float) and name != "normalised":
            continue
        if not isinstance(array, Tensor):
            problems.append(f"ValueEstimate.{name} is a {type(array).__name__}; expected a tensor [T,B]")
        elif list(array.shape) != [T, B]:
            hint = " (.squeeze(-1) removes a last axis of 1)" if list(array.shape) == [T, B, 1] else ""
            problems.append(f"ValueEstimate.{name} has shape {list(array.shape)}; expected [T,B] = {[T, B]}{hint}")
        elif array.dtype != torch.float32:
            problems.append(f"ValueEstimate.{name} has type {array.dtype}; expected torch.float32")
    if isinstance(estimate.mu, float) != isinstance(estimate.sigma, float):
        problems.append("ValueEstimate has only one of mu and sigma as a tensor; pass both, or none of them")
    return problems


def check_statistics(report: Report, critic: Any, inputs: Inputs) -> None:
    """Check the methods that update the running statistics of the value targets. Calling them changes the critic."""
    report.require(*statistics_problems(critic))
    targets = 10 * torch.randn(T, B, generator=torch.Generator().manual_seed(0))
    with report.errors_of("target_moments"):
        whole = critic.target_moments(targets, inputs.task, inputs.reward)
        parts = [critic.target_moments(targets[t], inputs.task[t], inputs.reward[t]) for t in (slice(2), slice(2, T))]
    if not isinstance(whole, Tensor):
        report.require(f"target_moments returned a {type(whole).__name__}; expected a tensor")
    if not torch.allclose(whole, parts[0] + parts[1]):
        report.require("target_moments of a batch differs from the sum of target_moments of its parts; return sums")
    with report.errors_of("update_statistics"):
        critic.update_statistics(whole)
        estimate = critic(inputs.observation["vector"], inputs.task)
    report.require(*estimate_problems(estimate))
    valid = torch.isfinite(estimate.mu).all() and torch.isfinite(estimate.sigma).all() and (estimate.sigma > 0).all()
    if not valid:
        report.add("after update_statistics, mu or sigma is not finite, or sigma is not above 0")
