"""The configuration of an imported run: translated from the flags of the original program and from its network."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bestiary.compat.flag_types import Program
from bestiary.compat.original_networks import Network
from bestiary.compat.torchbeast import GROUPS
from bestiary.compat.translate import find_program, translate
from bestiary.config.config import Config
from bestiary.config.option_merging import override_options
from bestiary.config.option_spellings import LOCATION_OPTIONS
from bestiary.config.resolve import resolve
from bestiary.envs.atari_games import ACTIONS
from bestiary.envs.original_names import bestiary_names
from bestiary.utils.console import plural
from bestiary.utils.errors import UserError

PROCGEN_CHANNELS = 3
# Flags that do not describe the experiment. `use_wandb` would also send data to another computer.
UNUSED_FLAGS = ("mode", "xpid", "savedir", "seed", "use_wandb", "project_name")
MAX_TRAJECTORIES = 100_000  # maximum value of num_actors and batch_size, as for --num-envs and --batch-size
UNUSED_OPTIONS = (*LOCATION_OPTIONS, "seed")


def find_original(flags: Mapping[str, Any], network: Network) -> Program:
    """Return the original program that wrote a checkpoint. The flags and the network show which program it was."""
    if network.channels == PROCGEN_CHANNELS:
        return find_program("torchbeast_procgen.polybeast")
    is_poly = "pipes_basename" in flags if flags else network.options["torso"] == "resnet"
    return find_program("torchbeast.polybeast" if is_poly else "torchbeast.monobeast")


def make_config(path: Any, flags: Mapping[str, Any], network: Network, envs: Sequence[str]) -> Config:
    """Return the configuration of an imported run.

    Args:
        path: path of the checkpoint, for messages.
        flags: values of flags of the original program, by name. If a flag is missing, its default value is used.
        network: the network of the checkpoint.
        envs: names of the environments. If it is empty, the flags must contain the names.

    Raises:
        UserError: the environments are unknown, or the network does not fit them.
    """
    program = find_original(flags, network)
    names = [name for text in envs for name in (bestiary_names(text) or (text,))]
    if not names and "env" not in flags:
        raise UserError(f"{path} does not contain the name of its environment; add --env, for example --env atari/Pong")
    # The name in the file must not be the name of a plug-in or of a Python module, because this code would be
    # executed.
    env = str(flags.get("env"))
    if not names and env not in GROUPS and not bestiary_names(env):
        raise UserError(f"{path}: its environment {env[:100]} is not known; name the environment with --env")
    for name in ("num_actors", "batch_size"):
        number = flags.get(name, 1)
        if type(number) is not int or not 1 <= number <= MAX_TRAJECTORIES:
            raise UserError(f"{path}: its flag {name} is {number}; expected a number from 1 to {MAX_TRAJECTORIES}")
    flags = {**flags, **_env_flags(program, names)}
    options = override_options(_translated(program, flags), network.options)
    options |= {"env": names} if names else {}
    options["agent.reset_inputs"] = False
    # The last reward is an input of all networks and is clamped. Exception: the ResNet of the PopArt fork does not
    # clamp the last reward if rewards are not clipped.
    is_popart_fork = "use_popart" in flags and options["torso"] == "resnet"
    options["agent.clamp_reward"] = not (is_popart_fork and flags.get("reward_clipping") == "none")
    config = resolve(options)
    is_full = network.num_actions == len(ACTIONS) != config.interface.action_spec.n
    if is_full and program.name.startswith("torchbeast."):
        config = resolve({**options, "full_actions": True})
    _check_sizes(path, config, network)
    return config


def _env_flags(program: Program, names: Sequence[str]) -> dict[str, Any]:
    """Return the flags of the original program that select the environments `names`, which were given by the user.

    `translate` needs these flags, because the number of tasks affects the number of parallel environments.
    """
    if not names:
        return {}
    if program.name.startswith("torchbeast."):
        return {"env": ",".join(names)}
    if not all(name.startswith("procgen/") for name in names):
        raise UserError(
            f"--env {' '.join(names)}: the network expects images with {PROCGEN_CHANNELS} channels; expected ProcGen "
            "games, for example procgen/maze:easy"
        )
    game, _, mode = names[0].removeprefix("procgen/").partition(":")
    return {
        "env": f"procgen:procgen-{game}-v0",
        "multi_env": len(names),
        **({"distribution_mode": mode} if mode else {}),
    }


def _translated(program: Program, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Translate flags of an original program, for example TorchBeast, to arguments of `config.resolve.resolve`."""
    words = translate(program.name, list(_command_line(program, flags))).commands[0][1:]
    first_flag = next(index for index, word in enumerate(words) if word.startswith("--"))
    pairs = zip(words[first_flag::2], words[first_flag + 1 :: 2], strict=True)
    options: dict[str, Any] = {flag.removeprefix("--").replace("-", "_"): value for flag, value in pairs}
    options["env"] = list(words[:first_flag])
    return {name: value for name, value in options.items() if name not in UNUSED_OPTIONS}


def _command_line(program: Program, flags: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of a command line that gives these flags. Unknown and unused flags are left out."""
    for flag in program.flags:
        value = flags.get(flag.name)
        if value is None or value is False or flag.name in UNUSED_FLAGS:
            continue
        yield f"--{flag.name}" if flag.kind is bool else f"--{flag.name}={value}"


def _check_sizes(path: Any, config: Config, network: Network) -> None:
    """Raise UserError if the environments have another number of actions, tasks or image channels than the network."""
    interface = config.interface
    games = ", ".join(config.envs)
    if interface.action_spec.n != network.num_actions:
        raise UserError(
            f"{path}: the network has {network.num_actions} actions, but {games} has {interface.action_spec.n}; "
            "use --env to give the environments on which the network was trained"
        )
    if network.critic == "popart" and len(interface.tasks) != network.num_values:
        raise UserError(
            f"{path}: the network has {plural(network.num_values, 'value head')}, one per game, but the games are "
            f"{games}; name all games of the training, in their order, with --env"
        )
    channels = interface.observation_spec["image"].shape[0]
    if channels != network.channels:
        raise UserError(
            f"{path}: the network expects images with {network.channels} channels, but the images of {games} have "
            f"{channels}"
        )
