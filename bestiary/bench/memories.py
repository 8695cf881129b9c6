"""Measure the speed of the recurrent memory modules (`bestiary bench --config kernels`).

    operations    The time of the two recurrences of fast-weight memories (the delta rule and the self-referential
                  weight matrix) in one thread. Each has two implementations: a Numba kernel and a reference in PyTorch.
    memories      The time of each complete memory module in one thread: forward pass, forward and backward pass, and
                  acting (one step). If the module uses a kernel, both implementations are measured. The time of acting
                  is also compared with the inference time of a ResNet torso.
    learning      The time of one learner update on ProcGen for each memory module, on all cores. The ratio to the time
                  of an update with an LSTM is also reported.

The speed of a machine varies over time. Therefore compared implementations or memories are measured in turn, and
medians are reported. Ratios of these times are more reliable than the times themselves.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from bestiary.agents.memories import MEMORIES
from bestiary.agents.torsos import ResNet
from bestiary.bench.kernels import (
    BATCH,
    NUM_ENVS,
    STEPS,
    bench_operations,
    compare_times,
    median_times,
    single_threaded,
)
from bestiary.bench.phases import make_learning_phase
from bestiary.config.resolve import resolve
from bestiary.rollout import ArraySpec
from bestiary.utils.console import note, stdout
from bestiary.utils.options import field_types, options_class

IMAGE_SPEC = ArraySpec((3, 64, 64), "uint8")
FEATURES = 257  # input size of a memory in ProcGen: 256 features of the ResNet, and the last reward
MEASURED_MEMORIES = [name for name in MEMORIES if name != "none"]
PROCGEN = {
    "env": "procgen/starpilot:easy",
    "levels": "0:200",
    "torso": "resnet",
    "torso.subtract_mean": False,
    "rollout_length": STEPS,
    "batch_size": 8,
    "num_envs": 16,
}


def bench_memories(repeats: int, seconds: float) -> dict[str, Any]:
    """Run the three measurements of the module docstring. Return the result for `--json`, with times in ms."""
    short_seconds = seconds / 25
    note("kernels: measuring operations")
    operations = bench_operations(repeats, short_seconds)
    note("kernels: measuring recurrent memory modules")
    with single_threaded():
        resnet_ms = _measure_resnet(repeats, short_seconds)
        memories = [{"name": name, **_measure_memory(name, repeats, short_seconds)} for name in MEASURED_MEMORIES]
    for row in memories:
        row["act_relative_to_resnet"] = row["act_ms"] / resnet_ms
    note("kernels: measuring learner updates on ProcGen")
    learning = _measure_learning(repeats)
    return {
        "config": "kernels",
        "resnet_ms": resnet_ms,
        "operations": operations,
        "memories": memories,
        "learning": learning,
    }


def _measure_resnet(repeats: int, seconds: float) -> float:
    """Return the inference time of the ResNet torso for a batch of NUM_ENVS images, in milliseconds."""
    torso = ResNet({"image": IMAGE_SPEC}, ResNet.Options(subtract_mean=False))
    images = torch.randint(256, (NUM_ENVS, *IMAGE_SPEC.shape), dtype=torch.uint8)
    images = images.contiguous(memory_format=torch.channels_last)
    return median_times({"resnet": torch.no_grad()(lambda: torso({"image": images}))}, repeats, seconds)["resnet"]


def _measure_memory(name: str, repeats: int, seconds: float) -> dict[str, Any]:
    """Measure a memory with its default options and, if it uses a kernel, also with the reference implementation."""
    memory_class: Any = MEMORIES[name]
    variants = {"default": memory_class(FEATURES)}
    if "kernel" in field_types(options_class(memory_class)):
        variants["reference"] = memory_class(FEATURES, memory_class.Options(kernel="reference"))
        variants["reference"].load_state_dict(variants["default"].state_dict())
    row: dict[str, Any] = {"state_size": sum(tensor.numel() for tensor in variants["default"].initial_state(1))}
    for phase, make in (("forward", _forward), ("forward_backward", _forward_backward), ("act", _act)):
        times = median_times({variant: make(memory) for variant, memory in variants.items()}, repeats, seconds)
        row[f"{phase}_ms"] = times["default"]
        if "reference" in times:
            comparison = compare_times(phase, {"numba": times["default"], "reference": times["reference"]})
            row |= {key: comparison[key] for key in (f"{phase}_reference_ms", f"{phase}_speedup")}
    return row


def _forward(memory: Any) -> Callable[[], Any]:
    return torch.no_grad()(partial(memory, *_inputs(STEPS, BATCH), memory.initial_state(BATCH)))


def _forward_backward(memory: Any) -> Callable[[], Any]:
    x, done = _inputs(STEPS, BATCH)
    x.requires_grad_()
    parameters = [x, *memory.parameters()]

    def run() -> None:
        y, _ = memory(x, done, memory.initial_state(BATCH))
        torch.autograd.grad(y.sum(), parameters)

    return run


def _act(memory: Any) -> Callable[[], Any]:
    return torch.no_grad()(partial(memory, *_inputs(1, NUM_ENVS), memory.initial_state(NUM_ENVS)))


def _inputs(steps: int, batch: int) -> tuple[Tensor, Tensor]:
    """Return random features [T,B,FEATURES] and random episode starts [T,B]."""
    return torch.randn(steps, batch, FEATURES), torch.rand(steps, batch) < 0.02


def _measure_learning(repeats: int) -> list[dict[str, Any]]:
    """Measure the time of one learner update on ProcGen for each recurrent memory module. Return one row per module."""
    with ExitStack() as stack:
        updates = {}
        for name in MEASURED_MEMORIES:
            config = resolve({**PROCGEN, "memory": name, "steps": 10**9})
            updates[name] = make_learning_phase(config, 4, stack).run
        times = median_times(updates, repeats, 0.0)
    return [{"name": name, "update_ms": ms, "relative_to_lstm": ms / times["lstm"]} for name, ms in times.items()]


PHASES = ("forward", "forward_backward", "act")


def print_memories(result: dict[str, Any]) -> None:
    """Print the result of `bench_memories` as two tables."""
    size = f"T={STEPS}, B={BATCH}; phase act: T=1, B={NUM_ENVS}; median milliseconds"
    columns = [title for phase in PHASES for title in (phase.replace("_", "+"), "reference", "speedup")]
    table = _make_table(
        "operation", f"operations, with Numba and with the reference implementation ({size})", *columns, "saved bytes"
    )
    for row in result["operations"]:
        keys = [f"{phase}_{key}" for phase in PHASES for key in ("numba_ms", "reference_ms", "speedup")]
        table.add_row(row["name"], *(f"{row[key]:.3g}" for key in keys), f"{row['saved_bytes']:,.0f}")
    stdout.print(table)
    columns = [title for phase in PHASES for title in (phase.replace("_", "+"), "speedup")]
    table = _make_table("memory", f"memories ({size})", "state", *columns, "act/ResNet", "update", "update/LSTM")
    for row, learning in zip(result["memories"], result["learning"], strict=True):
        keys = [f"{phase}_{key}" for phase in PHASES for key in ("ms", "speedup")]
        table.add_row(
            row["name"],
            f"{row['state_size']:,}",
            *(f"{row[key]:.3g}" if key in row else "" for key in keys),
            f"{row['act_relative_to_resnet']:.3f}",
            f"{learning['update_ms']:,.0f}",
            f"{learning['relative_to_lstm']:.2f}",
        )
    stdout.print(table)
    note(
        "speedup: speed relative to the reference implementation; state: number of elements of the recurrent state of "
        "one environment; saved bytes: memory that the forward pass with Numba saves for the backward pass, per step, "
        "batch entry and head; act/ResNet: time of act divided by the time of the ResNet torso; update/LSTM: time of "
        "an update divided by the time of an update with an LSTM"
    )


def _make_table(first_column: str, title: str, *columns: str) -> Table:
    table = Table(first_column, title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table
