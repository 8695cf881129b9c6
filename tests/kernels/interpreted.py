"""Run by test_triton in a process of its own: Triton reads TRITON_INTERPRET when it is imported. `all` runs every case."""

import sys
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.kernels.helpers import (
    assert_near,
    call_delta,
    call_srwm,
    delta_inputs,
    run_delta,
    run_srwm,
    single,
    srwm_inputs,
)

# batch, heads, length, rows, columns (None: as many as rows), truncate. The interpreter is slow: 40 ms a step and program
FEW = [
    (1, 1, 1, 16, None, False),
    (1, 1, 130, 17, None, False),  # padded, over many chunks
    (1, 1, 2, 64, None, False),
    (2, 2, 2, 5, 16, True),
]
ALL = [
    *FEW,
    (2, 2, 1, 17, None, False),
    (1, 1, 1, 64, None, False),
    (1, 1, 130, 16, None, False),
    (1, 1, 130, 64, None, False),
    (2, 2, 5, 5, 16, False),
    (1, 2, 5, 4, 13, True),
]


def main(cases: list[tuple[int, int, int, int, int | None, bool]]) -> None:
    for case in cases:
        compare("delta", delta_inputs, run_delta, call_delta, *case)
        compare("srwm", srwm_inputs, run_srwm, call_srwm, *case)


def compare(
    operation: str,
    make: Any,
    run: Any,
    call: Any,
    batch: int,
    heads: int,
    length: int,
    rows: int,
    columns: int | None,
    truncate: bool,
) -> None:
    inputs = make(batch, heads, length, rows, columns or rows, share=0.05 if length > 5 else 0.3)
    truth = run("reference", inputs, truncate)
    try:
        assert_near(run("triton", single(inputs), truncate), truth, 1e-4)
        with torch.no_grad():  # what acts: a kernel that saves nothing
            out, _ = call(single(inputs), implementation="triton")
        assert_near({"out": out}, {"out": truth["out"]}, 1e-4)
    except AssertionError as error:
        pytest.fail(f"{operation} B={batch} H={heads} T={length} E={rows} M={columns}, truncate {truncate}: {error}")
    print(operation, batch, heads, length, rows, columns, truncate)


def prepare_once() -> None:
    """The interpreter prepares a module at each call of its functions, which takes most of the time: once a launch will do."""
    interpreter: Any = import_module("triton.runtime.interpreter")
    prepared_call, launch = interpreter.InterpretedFunction.__call__, interpreter.GridExecutor.__call__
    prepared: set[str] = set()

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.fn.__module__ in prepared:
            return self.rewrite()(*arguments, **options)
        prepared.add(self.fn.__module__)
        return prepared_call(self, *arguments, **options)

    def launch_anew(self: Any, *arguments: Any, **options: Any) -> Any:
        prepared.clear()
        return launch(self, *arguments, **options)

    interpreter.InterpretedFunction.__call__, interpreter.GridExecutor.__call__ = call, launch_anew


if __name__ == "__main__":
    torch.set_num_threads(1)
    prepare_once()
    main(ALL if sys.argv[1:] == ["all"] else FEW)
