"""`python -m bestiary` is the same as the command `bestiary`."""

import os
import sys

# Python puts the working directory first on the path. Files in it, for example a downloaded numpy.py, must not replace
# modules.
if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

from bestiary.cli.main import main

main()
