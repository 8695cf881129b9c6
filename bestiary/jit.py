"""Loops compiled to machine code by Numba, which a later process finds again on disk.

A compiled function is stored together with a hash of its own source file. What it calls or reads must therefore live in
the same file: a change elsewhere would go unnoticed. And it must not call itself: some such functions, read back from
disk, crash the process (Numba 0.68.1).
"""

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as machine code: compiled at its first call, and free of Python's lock while it runs."""
    try:
        return numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # neither __pycache__ nor the user's cache folder can be written: compiled in each process
        return numba.njit(nogil=True)(function)
