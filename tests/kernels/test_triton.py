"""Tests of the Triton kernels without a GPU: results of the interpreter, and compilation for real targets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.interpreted import ALL, FEW

pytest.importorskip("triton", reason="triton is not installed: pip install triton")
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_for

from bestiary.kernels import triton_kernels

ROOT = Path(__file__).parents[2]
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}  # bytes per program, by compute capability
# operation, E, columns, and whether the forward kernel saves for backward (None: backward kernel)
LAUNCHES = [
    pytest.param(operation, rows, columns, save, marks=[] if rows == 16 else pytest.mark.slow)
    for operation, rows, columns in (
        *(
            ("delta", 16, 16),
            ("gated delta", 16, 16),
            ("srwm", 16, 16),
            ("srwm", 16, 49),
        ),  # default sizes of the memories
        *(("delta", 64, 64), ("gated delta", 64, 64), ("srwm", 64, 64), ("srwm", 64, 193)),  # the largest heads
        *(("delta", 17, 17), ("srwm", 17, 17), ("srwm", 17, 52)),  # padded heads
    )
    for save in (True, False, None)
]


@pytest.mark.parametrize("which", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_interpreted_kernels_equal_the_reference(which):
    """Cases: one and many steps, padded and unpadded sizes, resets, several programs, truncated gradients."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted", which],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert len(process.stdout.splitlines()) == 3 * len(FEW if which == "few" else ALL)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("operation", "rows", "columns", "save"), LAUNCHES)
def test_kernels_compile_for_real_targets(operation, rows, columns, save, capability, tmp_path, monkeypatch):
    """Compile with the constants, options and alignments of a real launch. `save` None is the backward kernel."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(triton_kernels, f"{operation.split()[-1]}_{'backward' if save is None else 'forward'}")
    constants = triton_kernels.specialisation(kernel, rows, columns, bool(save), operation == "gated delta")
    options = {name: constants.pop(name) for name in OPTIONS}

    def argument_type(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in triton_kernels.RUNTIME:
            return "i32"
        return "*u8" if name == "done" else "*fp32"

    signature = {name: argument_type(name) for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if signature[name][0] == "*"}
    source = ASTSource(kernel, signature, constants, aligned)
    code = compile_for(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert len(code.asm["cubin"]) > 1000
    assert f".target sm_{capability}" in code.asm["ptx"]
    assert code.metadata.shared <= SHARED_MEMORY[capability]
