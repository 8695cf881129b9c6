"""`python -m bestiary` is the same as the command `bestiary`."""

import os
import sys

# Python searches modules in the working directory first. Without the following lines, a file there (for example a
# downloaded numpy.py) would be imported instead of the installed module.
if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
    del sys.path[0]

from bestiary.cli.main import main

main()
