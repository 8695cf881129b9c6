"""Validation of user input: `resolve` turns a flat dict of names and options into a Config.

Flags, TOML files, presets and Python keywords all become entries of one flat dict (see `runs/option_sources.py`), for
example `{"memory": "lstm", "memory.hidden": 512, "steps": "5M"}`. `resolve`

    1. looks up the environments and components by name (`look_up`),
    2. parses the options that each component declares,
    3. lets each component derive the options that the user has not set,
    4. checks that all options fit together, and reports all problems at once.

The parser of `bestiary train` also calls `look_up`, because its flags depend on the chosen environment and components.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bestiary import envs
from bestiary.agents.run_context import RunContext
from bestiary.agents.torsos import default_torso
from bestiary.config.component_kinds import DEFAULT_COMPONENTS
from bestiary.config.components import ComponentConfig, construct_component, lookup_component
from bestiary.config.config import Config, task_interfaces
from bestiary.config.derived_options import check_batches, derive_max_lag, derive_num_envs, derive_pools, derive_runtime
from bestiary.config.logger_options import ALWAYS_ON, find_loggers, merged_options
from bestiary.config.option_merging import expand_env_names
from bestiary.config.option_spellings import unknown_options, values_by_schema
from bestiary.config.origins import GIVEN, trace_names, trace_options
from bestiary.config.plugin_options import map_plugins
from bestiary.config.reward_clipping_check import unclipped_scale
from bestiary.config.training_options import Training
from bestiary.envs.multitask import combine_interfaces, task_name
from bestiary.envs.rewards.wrapper import RewardConfig, RewardWrapper, check_custom_rewards, parse_rewards
from bestiary.envs.vector_env import EnvInterface
from bestiary.loggers import Logger
from bestiary.utils import plugins
from bestiary.utils.errors import UserError
from bestiary.utils.options import (
    options_class,
    parse_options,
    same_options,
)
from bestiary.utils.plugin_names import PluginRef


@dataclass(frozen=True)
class Choices:
    """The environments and components of a run, looked up by name.

    If an environment or its options are invalid, `interfaces` is None, and `env_spec` and `env_options` may also be
    None. Components that were not found are missing in `classes`.
    """

    env_names: tuple[str, ...]
    env_spec: envs.EnvSpec | None
    env_options: Any  # instance of env_spec.options
    interfaces: tuple[EnvInterface, ...] | None  # interface of each environment
    names: Mapping[str, str]  # name of each component, by kind
    classes: Mapping[str, Any]  # class of each component, by kind
    loggers: Mapping[str, type[Logger]]  # class of each logger, by name
    given: Mapping[str, Any]  # the given options, without the names of the environments and components
    defaults: Mapping[str, Any]  # default values that the environment and the agent set for options, by config key

    @property
    def schemas(self) -> dict[str, type]:
        """The options class of each kind of component. The kind "" stands for the training options."""
        env = {} if self.env_spec is None else {"env": self.env_spec.options}
        loggers = {"logger": merged_options(self.loggers.values())} if self.loggers else {}
        components = {kind: options_class(component) for kind, component in self.classes.items()}
        return {"": Training, **env, **components, **loggers}


def resolve(given: Mapping[str, Any], origin: Mapping[str, str] | None = None) -> Config:
    """Check a flat dict of names and options and return a Config.

    `origin` maps a key to a text that names the preset, file or run from which its value comes, for example
    "config a.toml". A key that is not in `origin` was given directly by the user. Plug-ins must have been
    trusted before (`plugin_options.py`). Raise UserError with all problems found. If a name or value is invalid, only
    the names and values are checked, because the other checks would be made with wrong values.
    """
    given = map_plugins(given, lambda ref: ref)
    origin = origin or {}
    problems: list[str] = []

    # 1. Environments and components.
    choices = look_up(given, origin, problems)
    names, classes, env_spec, interfaces = choices.names, choices.classes, choices.env_spec, choices.interfaces
    num_tasks = len(choices.env_names)

    # 2. Options of the environments, the components and the training.
    schemas = choices.schemas
    missing = {"env", *names} - set(schemas)
    if any("--logger" in problem for problem in problems):  # a logger was not found, so its options are unknown
        missing.add("logger")
    problems += unknown_options(choices.given, schemas, missing, origin)
    values = values_by_schema({**choices.defaults, **choices.given}, schemas)
    parsed = {kind: parse_options(schema, values[kind], kind, problems) for kind, schema in schemas.items()}
    if parsed[""] is not None:
        problems += _invalid_callbacks(parsed[""].callback or ())
    if env_spec is None or interfaces is None or len(classes) < len(names) or None in parsed.values():
        raise UserError(*dict.fromkeys(problems))

    # 3. Options that the user has not set. `sources` has the source of each option that the user has set.
    sources = values_by_schema({key: origin.get(key, GIVEN) for key in choices.given}, schemas)
    training = parsed[""]
    if training.steps is None:
        training = dataclasses.replace(training, steps=env_spec.default_steps * num_tasks)
    rewards = RewardConfig(training.reward, training.true_reward)
    reward_scale = _collect_errors(problems, lambda: _check_rewards(rewards, choices))
    training = derive_runtime(training, sources[""], problems)
    training = derive_pools(training, sources[""], num_tasks)
    context = RunContext(
        interface=combine_interfaces(choices.env_names, interfaces),
        critic=names.get("critic"),
        reward_scale=reward_scale,
        pool_size=training.pool_size,
        equal_pools=training.has_equal_pools,
        total_pools=training.total_pools,
        num_envs_given="num_envs" in sources[""],
        learners=training.learners,
    )
    options = _derive_options(names, classes, parsed, context, sources)
    algorithm = construct_component("algo", ComponentConfig(names["algo"], options["algo"]))
    if num_tasks > 1 and "num_envs" not in sources[""]:
        training = dataclasses.replace(training, num_envs=derive_num_envs(training, algorithm, num_tasks))
    training = derive_max_lag(training, algorithm)

    # 4. Check that all options fit together.
    check_batches(training, algorithm, num_tasks, problems)
    if problems:
        raise UserError(*dict.fromkeys(problems))
    loggers = {"logger": parsed["logger"]} if choices.loggers else {}
    final = {"": training, "env": choices.env_options, **options, **loggers}
    default_names = {**DEFAULT_COMPONENTS, **classes["agent"].config_defaults}
    origins = {
        **trace_names(names, default_names, given, origin),
        **trace_options(final, parsed, sources),
    }
    component_configs = {kind: ComponentConfig(names[kind], options[kind]) for kind in classes}
    return _make_config(
        choices.env_names, choices.env_options, component_configs, training, parsed.get("logger"), origins
    )


def look_up(given: Mapping[str, Any], origin: Mapping[str, str], problems: list[str]) -> Choices:
    """Look up the environments and components named in `given`.

    The options of the environments are parsed, because the torso `auto` depends on the observations. Append messages
    about invalid names and options to `problems`. `origin` is explained in `resolve`.
    """
    env_names = expand_env_names(given.get("env", ()))
    env_spec = _collect_errors(problems, lambda: _find_env_spec(env_names))
    names = _choose_components(given, problems)
    unused = DEFAULT_COMPONENTS.keys() - names.keys()
    problems += [
        f"unknown option --{kind}: agent {names['agent']} has no {kind}; remove it"
        for kind in unused
        if kind in given and kind not in origin
    ]
    # A preset or config file may be written for another agent, which has more kinds of components. Ignore options in
    # the file if they belong to these additional kinds.
    options = {
        key: value
        for key, value in given.items()
        if key not in ("env", *DEFAULT_COMPONENTS) and not (key in origin and key.split(".")[0] in unused)
    }
    env_options = interfaces = None
    if env_spec is not None:
        values = values_by_schema(options, {"": Training, "env": env_spec.options})["env"]
        env_options = parse_options(env_spec.options, values, "env", problems)
    if env_options is not None:
        found = _collect_errors(problems, lambda: _find_interfaces(env_names, env_spec, env_options))
        interfaces, env_options = found or (None, env_options)
    if interfaces is not None and names.get("torso") == "auto":
        names["torso"] = default_torso(interfaces[0].observation_spec)
    components = {kind: _find_component(kind, name, problems) for kind, name in names.items()}
    classes = {kind: component for kind, component in components.items() if component is not None}
    defaults = {} if env_spec is None else env_spec.defaults_for(names["algo"], interfaces and interfaces[0])
    if "agent" in classes:
        # Use only the defaults of options, such as "algo.lr". `_choose_components` uses the default names of
        # components.
        agent_defaults = classes["agent"].config_defaults
        defaults = {**defaults, **{key: value for key, value in agent_defaults.items() if "." in key}}
    loggers = find_loggers(given.get("logger"), problems)
    return Choices(env_names, env_spec, env_options, interfaces, names, classes, loggers, options, defaults)


def _derive_options(
    names: Mapping[str, str],
    classes: Mapping[str, Any],
    options: Mapping[str, Any],
    context: RunContext,
    sources: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    """Let each component derive the options that the user has not set. Return {kind: options}.

    The algorithm is first, because other components may use its sequence length (`RunContext.sequence_length`).
    """
    derived = {}
    for kind in sorted(classes, key=lambda kind: kind != "algo"):
        own_context = dataclasses.replace(context, given=frozenset(sources[kind]))
        derived[kind] = classes[kind].derive_options(options[kind], own_context)
        if not isinstance(derived[kind], type(options[kind])):
            raise UserError(
                f"{names[kind]}: derive_options returned {type(derived[kind]).__name__}; it must return the options, "
                "for example dataclasses.replace(options, ...) (see docs/extending.md#options)"
            )
        if kind == "algo":
            algorithm = construct_component(kind, ComponentConfig(names[kind], derived[kind]))
            context = dataclasses.replace(context, sequence_length=algorithm.sequence_length)
    return derived


def _make_config(
    env_names: tuple[str, ...],
    env_options: Any,
    components: dict[str, ComponentConfig],
    training: Training,
    logger_options: Any,
    origins: dict[str, str],
) -> Config:
    """Build the Config. Plug-ins are named by absolute paths, and the hashes of their contents are stored."""
    hashes = {}

    def absolute(ref: PluginRef) -> PluginRef:
        found = ref.absolute()
        hashes[str(found.path)] = plugins.content_hash(found)
        return found

    names = {"env": list(env_names), **{kind: component.name for kind, component in components.items()}}
    named = {name: getattr(training, name) for name in ("reward", "true_reward", "callback", "logger")}
    absolute_names = map_plugins({**names, **named}, absolute)
    own = {name: absolute_names[name] for name in named}
    own["callback"] = tuple(own["callback"] or ()) or None
    own["logger"] = tuple(name for name in own["logger"] or () if name != ALWAYS_ON) or None
    return Config(
        envs=tuple(envs.canonical_name(name) for name in absolute_names["env"]),
        env_options=env_options,
        components={kind: dataclasses.replace(c, name=absolute_names[kind]) for kind, c in components.items()},
        training=dataclasses.replace(training, **own),
        logger_options=logger_options,
        plugin_hashes=hashes,
        origins=origins,
    )


def _collect_errors(problems: list[str], function: Callable[[], Any]) -> Any:
    """Return the result of a function. If the function raises UserError, append its problems and return None."""
    try:
        return function()
    except UserError as error:
        problems.extend(error.problems)
        return None


def _invalid_callbacks(names: Iterable[str]) -> list[str]:
    """Return a problem for each callback name whose form is wrong or whose file does not exist.

    The files are not imported here, because only the process that trains needs their classes.
    """
    problems = []
    for name in names:
        if not isinstance(name, PluginRef):
            problems.append(f"--callback {name}: expected a class in a Python file, for example my_callback.py:Name")
        elif not name.path.is_file():
            problems.append(f"--callback {name}: file {name.path} does not exist")
    return problems


# --- environments ---


def _find_env_spec(names: tuple[str, ...]) -> envs.EnvSpec:
    """Check that all tasks have the same options dataclass and different names. Return the spec of the first task."""
    if not names:
        raise UserError("no environment given; for example: bestiary train atari/Pong (bestiary list envs shows all)")
    first, *others = (envs.lookup_env(name) for name in names)
    for name, other in zip(names[1:], others, strict=True):
        if not same_options(other.options, first.options):
            raise UserError(
                f"{names[0]} and {name} have different options; all tasks must belong to one environment family"
            )
    canonical = [envs.canonical_name(name) for name in names]
    for name, full_name in zip(names, canonical, strict=True):
        if (count := canonical.count(full_name)) > 1:
            raise UserError(f"{name} is given {count} times; the tasks of a run must be different")
    tasks = [task_name(full_name) for full_name in canonical]
    for name, task in zip(names, tasks, strict=True):
        if tasks.count(task) > 1:
            raise UserError(f"{name}: two tasks have the name {task}; rename one of the files")
    return first


def _find_interfaces(names: tuple[str, ...], spec: envs.EnvSpec, options: Any) -> tuple[tuple[EnvInterface, ...], Any]:
    """Return the interface of each task, and the options. Raise UserError if one agent cannot play all tasks.

    If the tasks have different action sets, and the environment family has an option for a common action set, this
    option is set in the returned options. Example: `full_actions` of Atari.
    """
    interfaces = task_interfaces(names, options)
    if len({interface.action_spec for interface in interfaces}) > 1:
        unified = spec.unify_actions(options)
        if unified != options:
            options = unified
            interfaces = task_interfaces(names, options)
    combine_interfaces(names, interfaces)
    return interfaces, options


def _check_rewards(rewards: RewardConfig, choices: Choices) -> float | None:
    """Check that each environment supports the training reward and the true rewards.

    Return the scale that maps the typical training rewards of all tasks to [-1,1], or None if --reward is not given.
    """
    if rewards.is_default:
        return None
    scales = []
    for name, interface in zip(choices.env_names, choices.interfaces or (), strict=True):
        parsed = parse_rewards(rewards, interface)
        scales.append(unclipped_scale(parsed.training, parsed.components))
        if parsed.has_custom:
            pool = RewardWrapper(envs.lookup_env(name).build(2, 0, choices.env_options, False), rewards)
            try:
                check_custom_rewards(pool)
            finally:
                pool.close()
    return None if rewards.training is None else min(scales)


# --- components ---


def _choose_components(given: Mapping[str, Any], problems: list[str]) -> dict[str, str]:
    """Return a dict: kind -> name of the chosen component. If a kind is not given, its default name is used.

    The kinds are "algo", "agent" and the kinds listed in the attribute `components` of the agent class. If the agent
    class was not found, torso, memory and critic are assumed.
    """
    names = {kind: _component_name(given.get(kind, DEFAULT_COMPONENTS[kind])) for kind in ("algo", "agent")}
    agent = _find_component("agent", names["agent"], problems)
    kinds, defaults = ("torso", "memory", "critic"), DEFAULT_COMPONENTS
    if agent is not None:
        kinds, defaults = agent.components, {**DEFAULT_COMPONENTS, **agent.config_defaults}
    return {**names, **{kind: _component_name(given.get(kind, defaults[kind])) for kind in kinds}}


def _component_name(value: Any) -> str:
    return value if isinstance(value, str) else str(value)


def _find_component(kind: str, name: str, problems: list[str]) -> Any:
    """Return the class of a component. If there is no such component, append a problem and return None.

    Also return None for the torso `auto`. `look_up` replaces `auto` by the name of a torso, but this is not possible if
    the observations are unknown.
    """
    if (kind, name) == ("torso", "auto"):
        return None
    return _collect_errors(problems, lambda: lookup_component(kind, name))
