"""Measure the kernels of fast-weight memories: compare the Numba implementation with the reference in PyTorch.

All measurements use one thread. The two implementations are measured alternately, because the speed of a machine
varies over time.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bestiary.kernels import delta_seq, srwm_seq

STEPS = 50  # number of time steps T in training
BATCH = 32  # batch size B in training
HEADS = 8  # number of heads H
SIZE = 16  # size E of the queries and keys of a head
NUM_ENVS = 48  # batch size when the agent acts: number of environments
IMPLEMENTATIONS = ("numba", "reference")


def bench_operations(repeats: int = 7, seconds: float = 0.0) -> list[dict[str, Any]]:
    """Measure each operation of the kernels and return one row per operation.

    The phases are `forward`, `forward_backward` and `act` (the forward pass of one step of NUM_ENVS environments).
    `repeats` and `seconds` are arguments of `median_times`, which measures the times. A row has these keys:

        name                    name of the operation
        saved_bytes             bytes that the forward pass of the Numba implementation saves for the backward pass, per
                                step, batch entry and head
        <phase>_numba_ms        time of the Numba implementation
        <phase>_reference_ms    time of the reference implementation
        <phase>_speedup         time of the reference implementation divided by the time of the Numba implementation
    """
    operations = {
        "delta": lambda steps, batch: _make_delta(steps, batch, SIZE),
        "srwm": lambda steps, batch: _make_srwm(steps, batch, SIZE),
        "srwm, 3E+1 columns": lambda steps, batch: _make_srwm(steps, batch, 3 * SIZE + 1),
    }
    with single_threaded():
        return [{"name": name, **_measure_operation(make, repeats, seconds)} for name, make in operations.items()]


Operation = Callable[[str], tuple[Tensor, ...]]  # runs the named implementation and returns its outputs


def _measure_operation(make: Callable[[int, int], Operation], repeats: int, seconds: float) -> dict[str, Any]:
    sequence = make(STEPS, BATCH)
    single_step = make(1, NUM_ENVS)
    saved = saved_bytes(lambda: sequence("numba"))
    row: dict[str, Any] = {"saved_bytes": saved / (STEPS * BATCH * HEADS)}
    for phase, run in (
        ("forward", lambda name: _run_forward(sequence, name)),
        ("forward_backward", lambda name: _run_forward_backward(sequence, name)),
        ("act", lambda name: _run_forward(single_step, name)),
    ):
        times = median_times({name: partial(run, name) for name in IMPLEMENTATIONS}, repeats, seconds)
        row |= compare_times(phase, times)
    return row


def compare_times(phase: str, milliseconds: Mapping[str, float]) -> dict[str, float]:
    """Return the columns of a phase: the times of both implementations, and the speedup of Numba over the reference."""
    numba, reference = (milliseconds[name] for name in IMPLEMENTATIONS)
    return {f"{phase}_numba_ms": numba, f"{phase}_reference_ms": reference, f"{phase}_speedup": reference / numba}


def saved_bytes(call: Callable[[], Any]) -> int:
    """Return the number of bytes that an operation saves for its backward pass, not counting its inputs."""
    sizes: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        if tensor.grad_fn is None and not tensor.requires_grad and tensor.dtype != torch.bool:
            sizes[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        call()
    return sum(sizes.values())


def _make_delta(steps: int, batch: int, columns: int) -> Operation:
    """Return an Operation that computes the delta rule. All calls use the same random inputs."""
    q, k = (torch.randn(batch, HEADS, steps, SIZE).softmax(-1).requires_grad_() for _ in range(2))
    v = torch.randn(batch, HEADS, steps, columns).requires_grad_()
    beta = torch.rand(batch, HEADS, steps, 1).requires_grad_()
    done = torch.rand(steps, batch) < 0.02
    state = torch.zeros(batch, HEADS, SIZE, columns).requires_grad_()
    return lambda name: delta_seq(q, k, v, beta, done, state, implementation=name)


def _make_srwm(steps: int, batch: int, columns: int) -> Operation:
    """Return an Operation that computes the self-referential weight matrix. All calls use the same random inputs."""
    widths = (columns, SIZE, SIZE, 4)
    x = torch.randn(batch, HEADS, steps, SIZE).softmax(-1).requires_grad_()
    done = torch.rand(steps, batch) < 0.02
    base = tuple((torch.randn(HEADS, SIZE, width) / SIZE**0.5).requires_grad_() for width in widths)
    shift = tuple(torch.zeros(batch, HEADS, SIZE, width).requires_grad_() for width in widths)

    def run(name: str) -> tuple[Tensor, ...]:
        y, final_shift = srwm_seq(x, done, base, shift, implementation=name)
        return y, *final_shift

    return run


@torch.no_grad()
def _run_forward(operation: Operation, name: str) -> None:
    operation(name)


def _run_forward_backward(operation: Operation, name: str) -> None:
    operation(name)[0].sum().backward()


def median_times(functions: Mapping[str, Callable[[], Any]], repeats: int, seconds: float) -> dict[str, float]:
    """Return the median duration of one call of each function, in milliseconds.

    After one warm-up call of each function, the functions are measured in turn, `repeats` times. In each measurement,
    a function is called repeatedly until `seconds` have passed, but at least once.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for run in functions.values():
        run()
    for _ in range(repeats):
        for name, run in functions.items():
            start = time.perf_counter()
            calls = 0
            while not calls or time.perf_counter() - start < seconds:
                run()
                calls += 1
            times[name].append((time.perf_counter() - start) * 1e3 / calls)
    return {name: statistics.median(values) for name, values in times.items()}


@contextmanager
def single_threaded() -> Iterator[None]:
    """Context in which PyTorch operations run in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
