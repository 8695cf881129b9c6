"""Configuration files of other packages in the working directory.

Numba, Matplotlib and W&B read such a file from the working directory. The file may come from another person. With
`.numba_config.yaml`, this person can choose the folder in which Numba searches for compiled functions, and Numba
unpickles the files in this folder. With `wandb/settings`, this person can choose the server to which W&B sends the API
key.

Therefore Bestiary imports these packages in such a way that they do not read these files. The user's configuration in
environment variables and in the home folder is used as usual.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

NUMBA_FILE = ".numba_config.yaml"
MATPLOTLIB_FILE = "matplotlibrc"
WANDB_FILE = "wandb/settings"


@contextmanager
def hidden(file: str) -> Iterator[None]:
    """Context in which imported packages do not find `file` in the working directory.

    If the file exists, the working directory is / during this context.
    """
    if not os.path.lexists(file):
        yield
        return
    working_directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chdir("/")
        yield
    finally:
        os.fchdir(working_directory)
        os.close(working_directory)


def ignore_numba_file() -> None:
    """Prevent Numba from reading NUMBA_FILE when it is imported, and whenever it compiles a function."""
    if os.path.lexists(NUMBA_FILE):
        with hidden(NUMBA_FILE):
            import numba.core.config
        # Numba would read the file again at each compilation, and no public option prevents this. Therefore replace
        # the path: Numba reads only regular files, so it ignores os.devnull.
        numba.core.config._config_fname = os.devnull
