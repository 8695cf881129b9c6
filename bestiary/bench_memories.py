"""`bestiary bench --config kernels`: what memories cost, alone and beside what else an agent does.

    operations    the recurrences of the fast-weight memories, compiled and as a loop of torch operations; one thread
    memories      every memory whole: forward, forward and backward, acting; the loop in place of the compiled recurrence;
                  acting beside the inference of the ResNet that goes before it; one thread
    learning      a whole step of a ProcGen learner, beside that of one with an LSTM; all cores

Rivals run in turn, and medians are reported: of noisy machines only ratios tell anything.
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
from bestiary.console import note, stdout
from bestiary.kernels.bench import ACTING, BATCH, STEPS, compared, measure, medians, one_thread
from bestiary.options import field_types, options_of
from bestiary.resolve import resolve
from bestiary.rollout import ArraySpec

PICTURES = ArraySpec((3, 64, 64), "uint8")
FEATURES = 257  # what a memory sees in ProcGen: of the ResNet 256, and the last reward
MEASURED = [name for name in MEMORIES if name != "none"]
PROCGEN = {
    "env": "procgen/starpilot:easy",
    "levels": "0:200",
    "torso": "resnet",
    "torso.center": False,
    "unroll_length": STEPS,
    "batch_size": 8,
    "num_envs": 16,
}


def bench_memories(repeats: int, seconds: float) -> dict[str, Any]:
    """Three lists of rows, as in `--json`; times in milliseconds."""
    briefly = seconds / 25
    note("kernels: the operations")
    operations = measure(repeats, briefly)
    note("kernels: every memory")
    with one_thread():
        resnet = _resnet_ms(repeats, briefly)
        memories = [{"name": name, **_memory_row(name, repeats, briefly)} for name in MEASURED]
    for row in memories:
        row["act_of_resnet"] = row["act_ms"] / resnet
    note("kernels: steps of a ProcGen learner")
    learning = _learning_rows(repeats)
    return {
        "config": "kernels",
        "resnet_ms": resnet,
        "operations": operations,
        "memories": memories,
        "learning": learning,
    }


def _resnet_ms(repeats: int, seconds: float) -> float:
    """Inference of as many pictures as there are environments that act at once."""
    torso = ResNet({"image": PICTURES}, ResNet.Options(center=False))
    images = torch.randint(256, (ACTING, *PICTURES.shape), dtype=torch.uint8)
    images = images.contiguous(memory_format=torch.channels_last)
    return medians({"resnet": torch.no_grad()(lambda: torso({"image": images}))}, repeats, seconds)["resnet"]


def _memory_row(name: str, repeats: int, seconds: float) -> dict[str, Any]:
    """As built by default; where it has a recurrence of ours, also with the loop."""
    part: Any = MEMORIES[name]
    built = {"": part(FEATURES)}
    if "kernel" in field_types(options_of(part)):
        built["loop"] = part(FEATURES, part.Options(kernel="reference"))
        built["loop"].load_state_dict(built[""].state_dict())
    row: dict[str, Any] = {"state": sum(tensor.numel() for tensor in built[""].initial_state(1))}
    for phase, make in (("forward", _forward), ("learn", _learn), ("act", _act)):
        times = medians({which: make(memory) for which, memory in built.items()}, repeats, seconds)
        row[f"{phase}_ms"] = times[""]
        if "loop" in times:
            both = compared(phase, {"numba": times[""], "reference": times["loop"]})
            row |= {key: both[key] for key in (f"{phase}_torch_ms", f"{phase}_speedup")}
    return row


def _forward(memory: Any) -> Callable[[], Any]:
    return torch.no_grad()(partial(memory, *_inputs(STEPS, BATCH), memory.initial_state(BATCH)))


def _learn(memory: Any) -> Callable[[], Any]:
    x, done = _inputs(STEPS, BATCH)
    x.requires_grad_()
    parameters = [x, *memory.parameters()]

    def go() -> None:
        y, _ = memory(x, done, memory.initial_state(BATCH))
        torch.autograd.grad(y.sum(), parameters)

    return go


def _act(memory: Any) -> Callable[[], Any]:
    return torch.no_grad()(partial(memory, *_inputs(1, ACTING), memory.initial_state(ACTING)))


def _inputs(steps: int, batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(steps, batch, FEATURES), torch.rand(steps, batch) < 0.02


def _learning_rows(repeats: int) -> list[dict[str, Any]]:
    from bestiary.bench import learn_piece

    with ExitStack() as stack:
        steps = {
            name: learn_piece(resolve({**PROCGEN, "memory": name, "steps": 10**9}), 4, stack)[1] for name in MEASURED
        }
        times = medians(steps, repeats, 0.0)
    return [{"name": name, "step_ms": ms, "of_lstm": ms / times["lstm"]} for name, ms in times.items()]


PHASES = ("forward", "learn", "act")


def show(result: dict[str, Any]) -> None:
    size = f"T={STEPS}, B={BATCH}; acting: {ACTING} environments; milliseconds, medians"
    rivals = ("forward", "loop", "x", "with backward", "loop", "x", "acting", "loop", "x")
    table = _table(f"operations, compiled and as a loop ({size})", *rivals, "bytes kept")
    for row in result["operations"]:
        cells = [f"{row[f'{phase}_{what}']:.3g}" for phase in PHASES for what in ("numba_ms", "torch_ms", "speedup")]
        table.add_row(row["name"], *cells, f"{row['bytes']:,.0f}")
    stdout.print(table)
    phases = ("forward", "x", "with backward", "x", "acting", "x")
    table = _table(f"memories ({size})", "state", *phases, "of the ResNet's", "learner's step", "of the LSTM's")
    for row, learning in zip(result["memories"], result["learning"], strict=True):
        cells = [f"{row[key]:.3g}" if key in row else "" for p in PHASES for key in (f"{p}_ms", f"{p}_speedup")]
        ends = f"{row['act_of_resnet']:.3f}", f"{learning['step_ms']:,.0f}", f"{learning['of_lstm']:.2f}"
        table.add_row(row["name"], f"{row['state']:,}", *cells, *ends)
    stdout.print(table)
    note("x: times as fast as the loop of torch operations; state: numbers an environment; bytes: for a step of a head")


def _table(title: str, *columns: str) -> Table:
    table = Table("", title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table
