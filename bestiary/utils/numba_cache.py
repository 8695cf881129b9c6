"""The folder in which Numba caches the compiled functions of plug-ins: $XDG_CACHE_HOME/bestiary/numba.

Numba unpickles the files of its cache, and unpickling can execute code. By default, these files are in the folder of
the plug-in. This folder may be in a run folder that comes from another person, who could have added such files.
"""

import os
import sys
from pathlib import Path

from bestiary.utils.temp_dirs import make_temp_dir
from bestiary.utils.user_store import UnsafeFile, check_private_folder

VARIABLE = "NUMBA_CACHE_DIR"


def use_private_folder() -> None:
    """Make Numba cache compiled functions in a folder of this user, unless the user has chosen a folder."""
    if os.environ.get(VARIABLE):
        return
    os.environ[VARIABLE] = str(_private_folder())
    if "numba" in sys.modules:
        import numba.core.config

        numba.core.config.reload_config()


def _private_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "bestiary" / "numba"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private_folder(folder.parent)
        check_private_folder(folder)
    except (UnsafeFile, OSError):
        return make_temp_dir("bestiary-numba-")
    return folder
