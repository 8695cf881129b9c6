"""From what users write to a Config.

There is one way, whoever wrote it: a flag, a TOML file, a preset or a Python keyword becomes an entry of one flat dict
(`{"memory": "lstm", "memory.hidden": 512, "steps": "5M"}`), and `resolve` checks the dict in two stages: first the choices of
parts, then the options of just those parts. All problems are reported at once.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bestiary import envs, plugins
from bestiary.agents.torsos import suitable
from bestiary.config import DEFAULTS, REGISTRIES, Config, Part, Training, lookup_part
from bestiary.envs.mixture import check_alike, task_name
from bestiary.envs.pool import Pool
from bestiary.envs.rewards import RewardedPool, Rewards, try_rewards
from bestiary.errors import UserError
from bestiary.options import construct, convert, field_types, options_of, parse_options, same_options, suggest
from bestiary.rollout import ObservationSpec
from bestiary.settle import (
    check_batches,
    enough_envs,
    settle_batch,
    settle_max_lag,
    settle_reward,
    settle_runtime,
    settle_scale,
    settle_span,
)
from bestiary.textconfig import flatten, read_preset, read_toml


def resolve(given: Mapping[str, Any], origin: Mapping[str, str] | None = None) -> Config:
    """Check a flat dict of names and options and make it a Config; raises UserError with all problems found."""
    given, problems = dict(given), list[str]()
    names = env_names(given.pop("env", ()))
    family = _attempt(problems, lambda: _find_family(names))
    _understand_popart(given, problems)
    _understand_input(given, names, origin or {}, problems)
    choice = _choose_parts(given, origin or {}, problems)
    given = {**_wishes(choice["agent"]), **given}  # of two spellings of one option, the later one counts
    schemas: dict[str, type] = {"": Training}
    env_options = tried = None
    if family is not None:
        schemas["env"] = family.options
        env_options = parse_options(family.options, _sort(given, schemas)["env"], "env", problems)
    if family is not None and env_options is not None:
        tried = _attempt(problems, lambda: _try_envs(names, family, env_options))
        if tried is not None:
            observation, env_options = tried
            if choice.get("torso") == "auto":
                choice["torso"] = suitable(observation)
    chosen = {kind: part for kind, name in choice.items() if (part := _find_part(kind, name, problems)) is not None}
    schemas |= {kind: options_of(part) for kind, part in chosen.items()}
    values = _sort(given, schemas)
    problems += _unknown(given, schemas, {"env", *choice} - set(schemas), origin or {})
    parsed = {kind: parse_options(schemas[kind], values[kind], kind, problems) for kind in chosen}
    training = parse_options(Training, values[""], "", problems)
    if training is not None and training.steps is None and family is not None:
        training = dataclasses.replace(training, steps=family.default_steps * len(names))
    if parsed.get("algo") is not None:
        parsed["algo"] = settle_reward(parsed["algo"], choice.get("critic"))
    if training is not None and tried is not None:
        rewarded = _attempt(problems, lambda: _try_rewards(names, env_options, training))
        if rewarded is not None and parsed.get("algo") is not None:
            parsed["algo"] = settle_scale(parsed["algo"], rewarded)
    if training is not None and parsed.get("algo") is not None:
        training = settle_runtime(training, "runtime" in values[""], problems)
        if len(names) > 1 and "batch_size" not in values["algo"]:
            parsed["algo"] = settle_batch(
                chosen["algo"], parsed["algo"], training, len(names), "num_envs" in values[""]
            )
        algorithm = construct(chosen["algo"], options=parsed["algo"])
        if parsed.get("memory") is not None:
            parsed["memory"] = settle_span(parsed["memory"], algorithm)
        if len(names) > 1 and "num_envs" not in values[""]:
            training = dataclasses.replace(training, num_envs=enough_envs(training, algorithm, len(names)))
        training = settle_max_lag(training, algorithm)
        check_batches(training, algorithm, max(1, len(names)), problems)
    if problems:
        raise UserError(*dict.fromkeys(problems))

    rewards = {flag: getattr(training, flag) for flag in ("reward", "true_reward")}
    own = [name for text in rewards.values() for name in plugins.named_in(text or "")]
    placed = plugins.renamed(rewards, lambda path, name: plugins.absolute(f"{path}:{name}"))
    training = dataclasses.replace(training, **placed)
    used = [n for n in (*names, *choice.values(), *own) if plugins.is_plugin(n)]
    hashes = {str(plugins.split(plugins.absolute(n))[0]): plugins.digest(plugins.split(n)[0]) for n in used}
    absolute = {n: plugins.absolute(n) if plugins.is_plugin(n) else n for n in choice.values()}
    return Config(
        envs=tuple(envs.canonical(n) for n in names),
        env_options=env_options,
        parts={kind: Part(absolute[choice[kind]], parsed[kind]) for kind in chosen},
        training=training,
        plugin_hashes=hashes,
    )


def env_names(env: Any) -> tuple[str, ...]:
    """Names as given; `atari/{Pong,Breakout}` is two, as most shells have it."""
    names = (env,) if isinstance(env, str) else tuple(env) if isinstance(env, list | tuple) else (env,)
    if not all(isinstance(name, str) for name in names):
        raise UserError(f"env = {env!r}: expected the name of an environment, such as atari/Pong")
    return tuple(expanded for name in names for expanded in _expand(name))


def _expand(name: str) -> list[str]:
    braces = re.fullmatch(r"([^{}]*)\{([^{}]*)\}([^{}]*)", name)
    return [f"{braces[1]}{word}{braces[3]}" for word in braces[2].split(",")] if braces else [name]


def _find_family(names: tuple[str, ...]) -> envs.Family:
    if not names:
        raise UserError("which environment? For example: bestiary train atari/Pong (bestiary list envs shows all)")
    first, *others = (envs.lookup(name) for name in names)
    for name, other in zip(names[1:], others, strict=True):
        if not same_options(other.options, first.options):
            raise UserError(f"{names[0]} and {name} have different options: the tasks of a run are of one family")
    whole = [envs.canonical(name) for name in names]
    for name, one in zip(names, whole, strict=True):
        if whole.count(one) > 1:
            raise UserError(f"{name} is there {whole.count(one)} times: the tasks of a run are different ones")
    called = [task_name(one) for one in whole]
    for name, one in zip(names, called, strict=True):
        if called.count(one) > 1:
            raise UserError(f"{name}: two tasks would be called {one}; rename one of the files")
    return first


def _understand_popart(given: dict[str, Any], problems: list[str]) -> None:
    """`--popart` is short for `--critic popart`."""
    if "popart" not in given:
        return
    try:
        wanted = convert(given.pop("popart"), bool)
    except ValueError as error:
        problems.append(f"--popart: {error}")
        return
    chosen = str(given.get("critic", "popart" if wanted else DEFAULTS["critic"]))
    if wanted != (chosen == "popart"):
        problems.append(f"--popart {'on' if wanted else 'off'} and --critic {chosen} contradict each other")
    given["critic"] = chosen


INPUTS = {"gray-stack": (True, None), "rgb-stack": (False, None), "rgb-last": (False, 1)}  # gray, and how many frames


def _understand_input(
    given: dict[str, Any], names: tuple[str, ...], origin: Mapping[str, str], problems: list[str]
) -> None:
    """`--input rgb-last` is short for `--gray off --frame-stack 1`; `rgb-stack` and `gray-stack` leave the stack as it is."""
    if "input" not in given:
        return
    wanted = str(given.pop("input"))
    if wanted not in INPUTS:
        return problems.append(f"--input {wanted}: there is {', '.join(INPUTS)}{suggest(wanted, INPUTS)}")
    if not all(name.startswith("atari/") for name in names):
        return problems.append(f"--input {wanted}: is for Atari; other environments show what they show")
    gray, depth = INPUTS[wanted]
    for name, kind, value in (("gray", bool, gray), ("frame_stack", int, depth)):
        spelled = [key for key in (name, f"env.{name}") if key in given]
        if value is None:
            continue
        for key in spelled:
            said = _attempt_value(given[key], kind)
            if key not in origin and said is not None and said != value:
                flag = f"--{name.replace('_', '-')}"
                problems.append(f"--input {wanted} and {flag} {given[key]} contradict each other")
            del given[key]
        given[name] = value


def _attempt_value(value: Any, kind: Any) -> Any:
    try:
        return convert(value, kind)
    except ValueError:
        return None


def _try_rewards(names: tuple[str, ...], options: Any, training: Training) -> list[RewardedPool]:
    """The rewards in every environment; raises UserError where they cannot be had there."""
    rewards = Rewards(training.reward, training.true_reward)
    pools: list[RewardedPool] = []
    if rewards.plain:
        return pools
    for name in names:
        pools.append(RewardedPool(envs.lookup(name).build(2, 0, options, False), rewards))
        try:
            try_rewards(pools[-1])
        finally:
            pools[-1].close()
    return pools


def layers(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Presets, then config files, then what was given directly, each over the one before; and where each key came from."""
    direct = flatten(options)
    given: dict[str, Any] = {}
    origin: dict[str, str] = {}
    if direct.get("init_from") is not None:
        given = _inherited(str(direct["init_from"]))
        origin = dict.fromkeys(given, f"the run {direct['init_from']}")
    for source, read in (("preset", read_preset), ("config", lambda path: read_toml(Path(path)))):
        named = direct.pop(source, None)
        if named is not None:
            layer = read(str(named))
            given = over(given, layer)
            origin |= dict.fromkeys(layer, f"{source} {named}")
    if "popart" in direct and "critic" not in direct:  # stands for a critic, so it replaces one from further below
        wanted = _attempt_value(direct["popart"], bool)
        if wanted or given.get("critic") == "popart":
            direct["critic"] = "popart" if wanted else DEFAULTS["critic"]
    given = over(given, direct)
    return given, {key: where for key, where in origin.items() if key not in direct}


def _inherited(source: str) -> dict[str, Any]:
    """What a run that begins with another's weights is made of, where nothing else is said: the agent and its parts; and in an
    environment of the same family, how many frames it sees and which actions it has."""
    from bestiary.runs.folder import open_run  # here, because a run's folder needs us to read its config

    settings = flatten(open_run(source).config.tables())
    kinds = ("agent", "torso", "memory", "critic")
    inherited = ("env", "env.frame_stack", "env.full_actions")
    return {k: v for k, v in settings.items() if v is not None and (k in inherited or k.split(".")[0] in kinds)}


def over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`, its keys last: of two spellings of one option, the later one counts.

    Where `above` chooses another part, the options of the part below go with it."""
    replaced = {kind for kind in DEFAULTS if kind in above and kind in below and above[kind] != below[kind]}
    if "env" in above and "env" in below and _families(above["env"]) != _families(below["env"]):
        replaced.add("env")
    kept = {k: v for k, v in below.items() if k not in above and k.split(".")[0] not in replaced - {k}}
    return {**kept, **above}


def _families(env: Any) -> set[str]:
    return {name if plugins.is_plugin(name) else re.split("[/:]", name)[0] for name in env_names(env)}


def _choose_parts(given: dict[str, Any], origin: Mapping[str, str], problems: list[str]) -> dict[str, str]:
    """The names of the algorithm, the agent and the parts that the agent is composed of; takes them out of `given`."""
    choice = {kind: str(given.pop(kind, DEFAULTS[kind])) for kind in ("algo", "agent")}
    agent = _find_part("agent", choice["agent"], problems)
    for kind in getattr(agent, "parts", () if agent else ("torso", "memory")):
        choice[kind] = str(given.pop(kind, {**DEFAULTS, **getattr(agent, "defaults", {})}[kind]))
    for kind in DEFAULTS.keys() - choice.keys() if hasattr(agent, "parts") else ():
        if kind in given and kind not in origin:
            del given[kind]
            problems.append(f"unknown option --{kind}: agent {choice['agent']} has no {kind} to choose")
        for key in [key for key in given if key.split(".")[0] == kind and key in origin]:
            del given[key]  # of a preset that was made for another agent
    return choice


def _wishes(agent: str) -> dict[str, Any]:
    """Options of other parts that an agent has defaults of its own for."""
    defaults = getattr(_find_part("agent", agent, []), "defaults", {})
    return {key: value for key, value in defaults.items() if "." in key}


def _find_part(kind: str, name: str, problems: list[str]) -> Any:
    return None if (kind, name) == ("torso", "auto") else _attempt(problems, lambda: lookup_part(kind, name))


def _spellings(schemas: Mapping[str, type]) -> dict[str, tuple[str, str]]:
    """Every way to write an option, to the part and field it sets: `memory.hidden`, `lr` or `algo.lr`, `sticky`."""
    spellings: dict[str, tuple[str, str]] = {}
    for kind in sorted(schemas, key=lambda kind: kind == ""):  # a flat name that two claim is the training's own
        for f in dataclasses.fields(schemas[kind]):
            if kind:
                spellings[f"{kind}.{f.name}"] = (kind, f.name)
            if kind in ("", "env") or f.metadata.get("everyday"):
                spellings[f.name] = (kind, f.name)
    return spellings


def _sort(given: Mapping[str, Any], schemas: Mapping[str, type]) -> dict[str, dict[str, Any]]:
    """Raw values by the part that each belongs to."""
    spellings, values = _spellings(schemas), {kind: dict[str, Any]() for kind in schemas}
    for key, value in given.items():
        if key in spellings:
            kind, name = spellings[key]
            values[kind][name] = value
    return values


def _unknown(
    given: Mapping[str, Any], schemas: Mapping[str, type], missing: set[str], origin: Mapping[str, str]
) -> list[str]:
    """A problem for each option that belongs to no chosen part. Of parts not found (`missing`) nothing is known."""
    spellings, problems = _spellings(schemas), []
    names = [*spellings, *DEFAULTS, "popart", "input", "preset", "config", "name", "run_dir", "if_exists", "dry_run"]
    for key in given:
        kind = key.split(".")[0] if "." in key else ""
        if key in spellings or kind in missing or (not kind and missing & {"env", "algo"}):
            continue
        shown = key.replace("_", "-")
        where = f" (in {origin[key]})" if key in origin else ""
        near = suggest(f"--{shown}", [f"--{s.replace('_', '-')}" for s in names if not s.startswith("env.")])
        if key in ("name", "run_dir", "if_exists"):
            near = ": where a run goes is said on the command line, not in a file"
        problems.append(f"unknown option --{shown}{where}{_owner(key) or near}")
    return problems


def _owner(key: str) -> str:
    """Where the option would be valid, if another part had been chosen."""
    kind, dot, name = key.partition(".")
    owners = [n for n, part in REGISTRIES.get(kind, {}).items() if name in field_types(options_of(part))]
    return f": it is an option of {kind} {' and '.join(owners)}" if dot and owners else ""


def _attempt(problems: list[str], function: Any) -> Any:
    try:
        return function()
    except UserError as error:
        problems.extend(error.problems)
        return None


def _try_envs(names: tuple[str, ...], family: envs.Family, options: Any) -> tuple[ObservationSpec, Any]:
    """What is seen in all environments, and options under which they have the same actions; or why there are none."""
    pools = _build_each(names, options)
    if len({pool.action_spec for pool in pools}) > 1 and (united := family.unite(options)) != options:
        options, pools = united, _build_each(names, united)
    check_alike(names, pools)
    return pools[0].observation_spec, options


def _build_each(names: tuple[str, ...], options: Any) -> list[Pool]:
    pools = []
    try:
        for name in names:
            pools.append(envs.lookup(name).build(1, 0, options, False))
            pools[-1].close()
    except (UserError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise UserError(f"the environment cannot be made: {type(error).__name__}: {error}") from error
    return pools
