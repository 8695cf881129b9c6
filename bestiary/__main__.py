"""`python -m bestiary` is the same as the command `bestiary`."""

from bestiary.cli.main import main

main()
