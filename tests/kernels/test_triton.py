"""The Triton kernels without a GPU: what they compute by Triton's interpreter, and that real targets have code for them."""

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

from bestiary.kernels import gpu

ROOT = Path(__file__).parents[2]
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}  # bytes that a program may use
# operation, E, columns, whether forward saves for backward (None: backward): what is launched for heads of these sizes
USED = [
    pytest.param(operation, rows, columns, save, marks=[] if rows == 16 else pytest.mark.slow)
    for operation, rows, columns in (
        *(("delta", 16, 16), ("srwm", 16, 16), ("srwm", 16, 49)),  # the memories as they are unless told otherwise
        *(("delta", 64, 64), ("srwm", 64, 64), ("srwm", 64, 193)),  # the largest heads
        *(("delta", 17, 17), ("srwm", 17, 17), ("srwm", 17, 52)),  # heads that are padded
    )
    for save in (True, False, None)
]


@pytest.mark.parametrize("which", ["few", pytest.param("all", marks=pytest.mark.slow)])
def test_interpreted_kernels_equal_the_loop(which):
    """Forward and backward: one step and many, padded and unpadded sizes, resets, several programs, truncated."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted", which],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 2 * len(FEW if which == "few" else ALL)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("operation", "rows", "columns", "save"), USED)
def test_kernels_compile_for_real_targets(operation, rows, columns, save, capability, tmp_path, monkeypatch):
    """`save` None: backward. Exactly the constants, options and alignments of a launch."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(gpu, f"{operation}_{'backward' if save is None else 'forward'}")
    constants = gpu.specialisation(kernel, rows, columns, bool(save))
    options = {name: constants.pop(name) for name in OPTIONS}

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        return "i32" if name in gpu.RUNTIME else "*u8" if name == "done" else "*fp32"

    signature = {name: kind(name) for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if signature[name][0] == "*"}
    source = ASTSource(kernel, signature, constants, aligned)
    code = compile_for(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert len(code.asm["cubin"]) > 1000
    assert f".target sm_{capability}" in code.asm["ptx"]
    assert code.metadata.shared <= SHARED_MEMORY[capability]
