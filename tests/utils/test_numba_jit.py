"""Disk cache of functions compiled by Numba."""

import os
import subprocess
import sys
from pathlib import Path

KERNEL = """
import constants
from constants import FACTOR
from bestiary.utils.numba_jit import cached_njit

def scale(x):
    return FACTOR * x

scale = cached_njit(scale, depends_on=(constants.__file__,))
print(scale(2), sum(scale.stats.cache_hits.values()))
"""


def test_change_of_a_dependency_invalidates_the_cache(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    command = [sys.executable, "-B", "-c", "import kernel"]
    env = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}"}

    def run(factor: int) -> str:
        constants = tmp_path / "constants.py"
        source = f"FACTOR = {factor}\n"
        if not constants.exists() or constants.read_text() != source:
            constants.write_text(source)
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout

    assert run(3) == "6 0\n"
    assert run(3) == "6 1\n"  # loaded from the cache
    assert run(5) == "10 0\n"  # compiled again


RENAMED = """
from typing import NamedTuple
from bestiary.utils.numba_jit import cached_njit

class NAME(NamedTuple):
    x: int

@cached_njit
def get(pair):
    return pair.x

print(get(NAME(7)), sum(get.stats.cache_hits.values()))
"""


def test_cache_with_the_type_of_a_renamed_class_is_replaced(tmp_path: Path) -> None:
    command = [sys.executable, "-B", "-c", "import kernel"]
    env = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}"}

    def run(name: str) -> str:
        source = RENAMED.replace("NAME", name)
        kernel = tmp_path / "kernel.py"
        if not kernel.exists() or kernel.read_text() != source:
            kernel.write_text(source)
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout

    assert run("State") == "7 0\n"
    assert run("State") == "7 1\n"
    assert run("WarehouseState") == "7 0\n"
    assert run("WarehouseState") == "7 1\n"
