"""Compilation of Python functions to machine code by Numba. The machine code is cached on disk.

By default, Numba compiles a cached function again only if the source file of the function has changed. If the function
uses code or constants of another file, `depends_on` must contain the path of that file. A compiled function must not
call itself: some recursive functions crash the process when they are loaded from the cache (Numba 0.68.1).
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numba


def cached_njit(function: Callable[..., Any], depends_on: Sequence[str] = ()) -> Callable[..., Any]:
    """Return a version of the function that Numba compiles at the first call. The compiled code releases the GIL.

    Args:
        function: the Python function.
        depends_on: paths of other source files. If one of them changes, the function is compiled again.
    """
    try:
        compiled: Any = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:
        # Neither __pycache__ nor the user's cache directory is writable. Compile without a cache: each process then
        # compiles the function again.
        return numba.njit(nogil=True)(function)
    cache_file = compiled._cache._cache_file
    if depends_on:
        # Numba stores a stamp (modification time and size) of the source file with the cached code, and uses the code
        # only if the stamp has not changed. Add the stamps of the files in `depends_on` to the private attribute that
        # contains the stamp, because Numba has no public option for several source files.
        cache_file._source_stamp = (cache_file._source_stamp, *(_file_stamp(path) for path in depends_on))
    cache_file._load_index = partial(_load_index, cache_file._load_index)
    return compiled


def _load_index(load: Callable[[], dict[Any, Any]]) -> dict[Any, Any]:
    """Call `load` and return its result, the index of the cache. Return an empty index if reading it fails.

    The index lists the compiled versions of a function by argument types. Numba reads the index before it checks
    whether the index is outdated. Reading fails if the index names a class (the type of an argument) that was renamed
    later. With an empty index, Numba compiles the function again and replaces the index on disk.
    """
    try:
        return load()
    except Exception:
        return {}


def _file_stamp(path: str) -> tuple[float, int]:
    status = Path(path).stat()
    return status.st_mtime, status.st_size
