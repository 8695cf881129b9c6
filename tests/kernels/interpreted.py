"""Comparison of the interpreted Triton kernels with the reference implementation.

`test_triton` runs this module in a separate process, because Triton reads TRITON_INTERPRET when it is imported. The
argument `all` selects all cases.
"""

import sys
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.kernels.helpers import (
    assert_close,
    call_delta,
    call_srwm,
    delta_inputs,
    gated_inputs,
    run_delta,
    run_srwm,
    srwm_inputs,
    to_float32,
)

# batch, heads, length, rows, columns (None: equal to rows), truncate.
# The interpreter is slow: about 40 ms per step and program.
FEW = [
    (1, 1, 1, 16, None, False),
    (1, 1, 130, 17, None, False),  # padded sizes, several chunks
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
        compare("gated delta", gated_inputs, run_delta, call_delta, *case)
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
    """Compare the outputs and gradients of one case, with and without saving for backward."""
    inputs = make(batch, heads, length, rows, columns or rows, reset_rate=0.05 if length > 5 else 0.3)
    expected = run("reference", inputs, truncate)
    try:
        assert_close(run("triton", to_float32(inputs), truncate), expected, 1e-4)
        with torch.no_grad():  # as in actors: the kernel saves nothing for backward
            out, _ = call(to_float32(inputs), implementation="triton")
        assert_close({"out": out}, {"out": expected["out"]}, 1e-4)
    except AssertionError as error:
        pytest.fail(f"{operation} B={batch} H={heads} T={length} E={rows} M={columns}, truncate {truncate}: {error}")
    print(operation, batch, heads, length, rows, columns, truncate)


def patch_modules_once_per_launch() -> None:
    """Make the interpreter patch a module once per kernel launch instead of at each function call.

    Patching takes most of the interpreter's time.
    """
    interpreter: Any = import_module("triton.runtime.interpreter")
    original_call = interpreter.InterpretedFunction.__call__
    original_launch = interpreter.GridExecutor.__call__
    patched: set[str] = set()

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.fn.__module__ in patched:
            return self.rewrite()(*arguments, **options)
        patched.add(self.fn.__module__)
        return original_call(self, *arguments, **options)

    def launch(self: Any, *arguments: Any, **options: Any) -> Any:
        patched.clear()
        return original_launch(self, *arguments, **options)

    interpreter.InterpretedFunction.__call__ = call
    interpreter.GridExecutor.__call__ = launch


if __name__ == "__main__":
    torch.set_num_threads(1)
    patch_modules_once_per_launch()
    main(ALL if sys.argv[1:] == ["all"] else FEW)
