"""Where tensors live: the CPU, or a GPU that was asked for or found. And what computes there."""

from contextlib import AbstractContextManager, nullcontext

import torch

from bestiary import kernels
from bestiary.agents.memories import MEMORIES
from bestiary.config import Config, Training
from bestiary.errors import UserError


def placement(training: Training) -> tuple[torch.device, torch.device]:
    """Where actors act, and where the learner learns."""
    learner = choose_device(training.device)
    if training.actor_device == "auto":
        return learner, learner
    actors = choose_device(training.actor_device, "--actor-device")
    if actors != learner and training.runtime == "serial":
        raise UserError(
            f"--actor-device {training.actor_device}: a serial run acts with the very agent that learns "
            f"(--device {training.device}); --runtime local has agents of its own for actors"
        )
    return actors, learner


def learns_on(training: Training) -> str:
    """The kind of device that the learner has; on a cluster it need not be on this machine."""
    on_cluster = training.runtime == "cluster" and training.device != "auto"
    return training.device if on_cluster else choose_device(training.device).type


def choose_device(name: str, flag: str = "--device") -> torch.device:
    """`auto` (a GPU where there is one), `cpu`, `cuda` or `cuda:1`."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"{flag} {name}: expected auto, cpu, cuda or cuda:0") from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise UserError(f"{flag} {name}: this machine has {count or 'no'} CUDA device{'s' * (count != 1)}")
        return torch.device("cuda", device.index or 0)
    if device.type != "cpu" or device.index:
        raise UserError(f"{flag} {name}: expected auto, cpu, cuda or cuda:0")
    return device


def check_device(config: Config) -> None:
    """Refuse devices that this machine does not have, and a kernel that does not compute where the learner learns."""
    if config.training.runtime == "cluster":
        if config.training.device not in ("auto", "cpu", "cuda"):
            raise UserError(f"--device {config.training.device}: on a cluster auto, cpu or cuda; Ray says which one")
        actors, learner = torch.device("cpu"), torch.device(learns_on(config.training))
    else:
        actors, learner = placement(config.training)
    memory = config.parts.get("memory")
    if memory is None or memory.name not in MEMORIES or not hasattr(memory.options, "kernel"):
        return
    wanted = memory.options.kernel
    try:
        kernels.choose(wanted, learner.type)
        kernels.choose(wanted if actors.type == learner.type else "auto", actors.type)
    except UserError as error:
        raise UserError(*(f"--memory.kernel {wanted}: {line}" for line in error.problems)) from None


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """The context that the network runs in: bfloat16 for the operations that stand it, or nothing special."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bfloat16" else nullcontext()
