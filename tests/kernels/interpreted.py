"""Run by test_triton in a process of its own: Triton reads TRITON_INTERPRET when it is imported."""

import sys
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.kernels.helpers import assert_near, delta_inputs, run_delta, run_srwm, single, srwm_inputs

# batch, heads, length, rows, columns (None: as many as rows), truncate. The interpreter is slow: 20 ms a step and program
CASES = [
    (2, 2, 1, 16, None, False),
    (2, 2, 1, 17, None, False),
    (1, 1, 1, 64, None, False),
    (1, 1, 130, 16, None, False),
    (1, 1, 130, 17, None, False),
    (1, 1, 130, 64, None, False),
    (2, 2, 5, 5, 16, False),
    (1, 2, 5, 4, 13, True),
]


def main(operation: str) -> None:
    make, run = {"delta": (delta_inputs, run_delta), "srwm": (srwm_inputs, run_srwm)}[operation]
    for batch, heads, length, rows, columns, truncate in CASES:
        inputs = make(batch, heads, length, rows, columns or rows, share=0.05 if length > 5 else 0.3)
        truth = run("reference", inputs, truncate)
        try:
            assert_near(run("triton", single(inputs), truncate), truth, 1e-4)
        except AssertionError as error:
            pytest.fail(
                f"{operation} B={batch} H={heads} T={length} E={rows} M={columns}, truncate {truncate}: {error}"
            )
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
    main(sys.argv[1])
