"""The functions `check_memory`, `check_torso` and `check_agent`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from bestiary.agents.component_defaults import with_defaults
from bestiary.agents.memories.base import State
from bestiary.agents.run_context import RunContext
from bestiary.agents.sequence_checks import call_agent, call_memory, unchanged
from bestiary.agents.torsos import default_torso
from bestiary.algorithms.base import Algorithm
from bestiary.config.component_kinds import DEFAULT_COMPONENTS
from bestiary.config.components import ComponentConfig, build_module, lookup_component
from bestiary.envs.vector_env import EnvInterface
from bestiary.rollout import ActionSpec, ArraySpec, Inputs, Tensors
from bestiary.testing.envs import find_env
from bestiary.testing.network_checks import B, Subject, T, check_masked_inputs, check_recurrent, output_problems
from bestiary.testing.problem_report import Component, ComponentError, Report, StageFailed, find_component
from bestiary.utils.errors import UserError
from bestiary.utils.options import construct, options_class

ACTIONS = ActionSpec(("left", "stay", "right"))
TASKS = ("first", "second")
# The observations with which torsos and agents are checked if no environment is given.
INTERFACES = (
    EnvInterface(TASKS, {"image": ArraySpec((4, 84, 84), "uint8")}, ACTIONS),
    EnvInterface(TASKS, {"vector": ArraySpec((8,), "float32")}, ACTIONS),
)


def check_memory(component: Any, input_size: int = 16, /, **options: Any) -> None:
    """Check a memory: shapes, recurrent state, resets and gradients.

    Also check that the rows of a batch do not affect each other, and that one call with T steps gives the same result
    as T calls with one step.

    Args:
        component: class, `path/to/file.py:Name`, or name of a built-in memory.
        input_size: number of input features.
        options: options of the memory.

    Raises:
        ComponentError: the memory breaks a rule. The message lists all problems, one line each.
    """
    found = find_component("memory", component, options, num_arguments=1)
    report = found.report
    interface = EnvInterface(TASKS, {"vector": ArraySpec((input_size,), "float32")}, ACTIONS)

    def check() -> None:
        memory = build(found, "memory", interface, input_size)
        require_output_size(report, memory)
        check_recurrent(Subject(report, memory, call_memory(memory), initial_state_of(memory), interface))

    report.run(check)
    report.finish()


def check_torso(component: Any, env: Any = None, /, **options: Any) -> None:
    """Check a torso: shape and type of its features, gradients, and that the rows of a batch do not affect each other.

    Args:
        component: class, `path/to/file.py:Name`, or name of a built-in torso.
        env: name or class of the environment whose observations are used. By default the torso is checked with images
            [4,84,84] and with vectors [8]; it must accept at least one of them.
        options: options of the torso.

    Raises:
        ComponentError: the torso breaks a rule. The message lists all problems, one line each.
    """
    found = find_component("torso", component, options, num_arguments=1)
    report = found.report

    def check(interface: EnvInterface, torso: nn.Module) -> None:
        require_output_size(report, torso)

        def call(inputs: Inputs, state: State) -> tuple[Tensors, State]:
            features = torso({kind: x.flatten(0, 1) for kind, x in inputs.observation.items()})
            if isinstance(features, Tensor) and features.shape[:1] == (inputs.done.numel(),):
                features = features.unflatten(0, inputs.done.shape)
            return {"output": features}, state

        check_recurrent(Subject(report, torso, call, lambda batch_size: (), interface))

    check_interfaces(found, env, lambda interface: build(found, "torso", interface, interface.observation_spec), check)


def check_agent(component: Any, env: Any = None, /, **options: Any) -> None:
    """Check an agent: outputs, recurrent state, resets and gradients.

    Also check that the rows of a batch do not affect each other, and that one call with T steps gives the same result
    as T calls with one step. If the agent is composed of a torso, a memory and a critic, its default torso, memory and
    critic are used.

    Args:
        component: class, `path/to/file.py:Name`, or name of a built-in agent.
        env: name or class of the environment whose observations and actions are used. By default the agent is checked
            with images [4,84,84] and with vectors [8]; it must accept at least one of them.
        options: options of the agent.

    Raises:
        ComponentError: the agent breaks a rule. The message lists all problems, one line each.
    """
    found = find_component("agent", component, options, num_arguments=2)
    report = found.report

    def make(interface: EnvInterface) -> nn.Module:
        defaults = {**DEFAULT_COMPONENTS, **getattr(found.cls, "config_defaults", {})}
        inner = {}
        for kind in getattr(found.cls, "components", ()):
            name = default_torso(interface.observation_spec) if defaults[kind] == "auto" else defaults[kind]
            cls = lookup_component(kind, name)
            component = ComponentConfig(name, derived_options(cls, kind, options_class(cls)(), interface))
            inner[kind] = partial(build_module, kind, component, len(interface.tasks))
        return build(found, "agent", interface, interface.observation_spec, interface.action_spec, **inner)

    def check(interface: EnvInterface, agent: nn.Module) -> None:
        subject = Subject(report, agent, call_agent(agent), initial_state_of(agent), interface)
        inputs = subject.inputs()
        with report.errors_of(f"forward with T={T} steps and B={B} trajectories"), unchanged(agent):
            result = agent(inputs, subject.initial_state(B))
        report.require(*output_problems(result, interface.action_spec.n))
        check_recurrent(subject)
        check_masked_inputs(subject)

    check_interfaces(found, env, make, check)


# --- construction ---


def derived_options(cls: Any, kind: str, options: Any, interface: EnvInterface) -> Any:
    """Return the options after `derive_options` of the network class has set the options that the user did not give."""
    context = RunContext(interface, sequence_length=Algorithm.Options().rollout_length)
    return with_defaults(cls, kind).derive_options(options, context)


def build(found: Component, kind: str, interface: EnvInterface, *args: Any, **inner: Any) -> nn.Module:
    """Construct a network. If an exception is raised, report it as a problem.

    UserError and KeyError are not reported but passed on to the caller: a network raises them to reject observations
    that it does not support (see `check_interfaces`).

    Args:
        found: class and options of the network.
        kind: kind of the network, for example "memory".
        interface: interface of the environment, from which `derive_options` of the network derives missing options.
        args: positional arguments of the constructor.
        inner: further keyword arguments of the constructor.
    """
    report = found.report
    try:
        options = derived_options(found.cls, kind, found.options, interface)
    except (UserError, KeyError):
        raise
    except Exception as error:
        report.require(f"derive_options failed: {report.describe(error)}")
    if not isinstance(options, type(found.options)):
        report.require(f"derive_options returned {type(options).__name__}; it must return the options")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = construct(found.cls, *args, options=options, **inner)
    except (UserError, KeyError):
        raise
    except Exception as error:
        report.require(f"the constructor failed: {report.describe(error)}")
    if not isinstance(module, nn.Module):
        report.require(f"the constructor returned a {type(module).__name__}; derive the class from torch.nn.Module")
    return module


def check_interfaces(
    found: Component,
    env: Any,
    make: Callable[[EnvInterface], nn.Module],
    check: Callable[[EnvInterface, nn.Module], None],
) -> None:
    """Check a network with the observations of `env` or, if `env` is None, with all INTERFACES that it accepts.

    A network rejects observations by raising UserError, or KeyError if a kind of observation that it uses is missing.
    """
    report = found.report
    interfaces = INTERFACES if env is None else (interface_of(env),)
    refusals = []
    for interface in interfaces:
        try:
            check(interface, make(interface))
        except (UserError, KeyError) as error:
            kinds = ", ".join(
                f"{kind} {spec.dtype}{list(spec.shape)}" for kind, spec in interface.observation_spec.items()
            )
            text = str(error) if isinstance(error, UserError) else report.describe(error)
            refusals.append(f"the constructor refuses observations {kinds}: {text}")
        except StageFailed:
            continue
        except Exception as error:
            report.add(f"a check could not be finished: {report.describe(error)}")
    if len(refusals) == len(interfaces):
        report.add(*refusals)
        if env is None:
            report.add("images [4,84,84] and vectors [8] are both refused; pass an environment as the second argument")
    report.finish()


def interface_of(env: Any) -> EnvInterface:
    """Return the interface of an environment, given by its name or class."""
    spec, report = find_env(env)
    try:
        return spec.interface(spec.options())
    except (Exception, SystemExit) as error:
        raise ComponentError(
            f"{report.name}: the environment could not be created: {report.describe(error)}"
        ) from error


def initial_state_of(module: Any) -> Callable[[int], State]:
    return module.initial_state


def require_output_size(report: Report, module: Any) -> None:
    """Require that a memory or torso has an integer attribute `output_size`."""
    size = getattr(module, "output_size", None)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        report.require(f"output_size is {size!r}; the constructor must set self.output_size to the number of outputs")
