"""Choice of the devices of actors and learner, checks of these devices, and the context for mixed precision."""

from contextlib import AbstractContextManager, nullcontext

import torch

from bestiary import kernels
from bestiary.agents.memories.fast_weights import RecurrenceOptions
from bestiary.config.config import Config
from bestiary.config.training_options import Training
from bestiary.utils.errors import UserError


def choose_devices(training: Training) -> tuple[torch.device, torch.device]:
    """Return the device of the actors and the device of the learner.

    Raises:
        UserError: a device does not exist, or a serial run has different devices for actors and learner.
    """
    learner = choose_device(training.device)
    if training.actor_device == "auto":
        return learner, learner
    actors = choose_device(training.actor_device, "--actor-device")
    if actors != learner and training.runtime == "serial":
        raise UserError(
            f"--actor-device {training.actor_device}: a serial run has one agent for acting and learning, which uses "
            f"--device {training.device}; use --runtime local, or the same device for both"
        )
    return actors, learner


def learner_device_type(training: Training) -> str:
    """Return the type of the learner's device: cpu or cuda.

    On a cluster, the learner may run on another machine. Therefore this machine may lack the device given by --device.
    """
    explicit_on_cluster = training.runtime == "cluster" and training.device != "auto"
    return training.device if explicit_on_cluster else choose_device(training.device).type


def choose_device(name: str, flag: str = "--device") -> torch.device:
    """Return the device with this name: auto (a GPU if there is one, otherwise the CPU), cpu, cuda or cuda:N.

    Raises:
        UserError: the name is not valid or this machine has no such device. The message contains `flag`.
    """
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"{flag} {name}: expected auto, cpu, cuda or cuda:N (for example cuda:0)") from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise UserError(f"{flag} {name}: this machine has {count or 'no'} CUDA device{'s' * (count != 1)}")
        return torch.device("cuda", device.index or 0)
    if device.type != "cpu" or device.index:
        raise UserError(f"{flag} {name}: expected auto, cpu, cuda or cuda:N (for example cuda:0)")
    return device


def check_devices(config: Config) -> None:
    """Check that the devices exist and that the kernel of the agent's memory (--memory.kernel) runs on them.

    Raises:
        UserError: a device does not exist on this machine, or the kernel does not run on it.
    """
    if config.training.runtime == "cluster":
        if config.training.device not in ("auto", "cpu", "cuda"):
            raise UserError(
                f"--device {config.training.device}: on a cluster, Ray assigns the GPUs; expected auto, cpu or cuda"
            )
        actors, learner = torch.device("cpu"), torch.device(learner_device_type(config.training))
    else:
        actors, learner = choose_devices(config.training)
    memory = config.components.get("memory")
    if memory is None or not isinstance(memory.options, RecurrenceOptions):
        return
    kernel = memory.options.kernel
    try:
        kernels.load_implementation(kernel, learner.type)
        kernels.load_implementation(kernel if actors.type == learner.type else "auto", actors.type)
    except UserError as error:
        raise UserError(*(f"--memory.kernel {kernel}: {line}" for line in error.problems)) from None


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """Return the context in which the network runs: for bfloat16, `torch.autocast`; for float32, an empty context."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bfloat16" else nullcontext()
