"""How fast the kernels are, against the loop of torch operations that they replace. One thread each, in turn."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bestiary.kernels import delta_seq, srwm_seq

STEPS, BATCH, HEADS, SIZE = 50, 32, 8, 16  # of learning: T, B, H, E
ACTING = 48  # environments that act at once
RIVALS = ("numba", "reference")


def measure(repeats: int = 7, seconds: float = 0.0) -> list[dict[str, Any]]:
    """For each operation, medians in milliseconds by phase and implementation, and the bytes that backward needs.

    A row: name, bytes (kept for backward, by time step, batch entry and head), and for each phase (forward, learn = forward
    and backward, act = one step of 48 environments) `<phase>_numba_ms`, `<phase>_torch_ms` and `<phase>_speedup`.
    """
    operations = {
        "delta": (lambda steps, batch: _delta(steps, batch, SIZE)),
        "srwm": (lambda steps, batch: _srwm(steps, batch, SIZE)),
        "srwm, 3E+1 columns": (lambda steps, batch: _srwm(steps, batch, 3 * SIZE + 1)),
    }
    with one_thread():
        return [{"name": name, **_row(make, repeats, seconds)} for name, make in operations.items()]


Operation = Callable[[str], tuple[Tensor, ...]]


def _row(make: Callable[[int, int], Operation], repeats: int, seconds: float) -> dict[str, Any]:
    learning, acting = make(STEPS, BATCH), make(1, ACTING)
    kept = kept_bytes(lambda: learning("numba"))
    row: dict[str, Any] = {"bytes": kept / (STEPS * BATCH * HEADS)}
    for phase, run in (
        ("forward", lambda name: _without_gradient(learning, name)),
        ("learn", lambda name: _with_gradient(learning, name)),
        ("act", lambda name: _without_gradient(acting, name)),
    ):
        row |= compared(phase, medians({name: partial(run, name) for name in RIVALS}, repeats, seconds))
    return row


def compared(phase: str, milliseconds: Mapping[str, float]) -> dict[str, float]:
    """The two rivals' times of a phase, and how many times faster the first is."""
    numba, loop = (milliseconds[name] for name in RIVALS)
    return {f"{phase}_numba_ms": numba, f"{phase}_torch_ms": loop, f"{phase}_speedup": loop / numba}


def kept_bytes(call: Callable[[], Any]) -> int:
    """What an operation keeps for its backward pass, beyond its own inputs."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.grad_fn is None and not tensor.requires_grad and tensor.dtype != torch.bool:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call()
    return sum(kept.values())


def _delta(steps: int, batch: int, columns: int) -> Operation:
    q, k = (torch.randn(batch, HEADS, steps, SIZE).softmax(-1).requires_grad_() for _ in range(2))
    v, beta = (
        torch.randn(batch, HEADS, steps, columns).requires_grad_(),
        torch.rand(batch, HEADS, steps, 1).requires_grad_(),
    )
    done, state = torch.rand(steps, batch) < 0.02, torch.zeros(batch, HEADS, SIZE, columns).requires_grad_()
    return lambda name: delta_seq(q, k, v, beta, done, state, implementation=name)


def _srwm(steps: int, batch: int, columns: int) -> Operation:
    widths = (columns, SIZE, SIZE, 4)
    x, done = torch.randn(batch, HEADS, steps, SIZE).softmax(-1).requires_grad_(), torch.rand(steps, batch) < 0.02
    base = tuple((torch.randn(HEADS, SIZE, width) / SIZE**0.5).requires_grad_() for width in widths)
    shift = tuple(torch.zeros(batch, HEADS, SIZE, width).requires_grad_() for width in widths)

    def run(name: str) -> tuple[Tensor, ...]:
        y, last = srwm_seq(x, done, base, shift, implementation=name)
        return y, *last

    return run


@torch.no_grad()
def _without_gradient(operation: Operation, name: str) -> None:
    operation(name)


def _with_gradient(operation: Operation, name: str) -> None:
    operation(name)[0].sum().backward()


def medians(rivals: Mapping[str, Callable[[], Any]], repeats: int, seconds: float) -> dict[str, float]:
    """Milliseconds that each of them takes. They run in turn, each for so many seconds; the first time does not count."""
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for run in rivals.values():
        run()
    for _ in range(repeats):
        for name, run in rivals.items():
            start, calls = time.perf_counter(), 0
            while not calls or time.perf_counter() - start < seconds:
                run()
                calls += 1
            times[name].append((time.perf_counter() - start) * 1e3 / calls)
    return {name: statistics.median(taken) for name, taken in times.items()}


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
