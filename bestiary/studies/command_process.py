"""Run one command of a study. If the `bestiary study` process ends first, the command saves its run and ends.

The standard input of this process is a pipe that the `bestiary study` process holds open. If `bestiary study` ends for
any reason, including kill -9, the operating system closes the pipe. This process then sends SIGTERM to itself, which
makes the command save its run.
"""

import os
import runpy
import signal
import threading

from bestiary.utils import trust


def _terminate_with_study() -> None:
    """Wait until the standard input is closed, then send SIGTERM to this process."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    # The names of plug-ins in the arguments come from the study file and not from the user. Check these plug-ins again:
    # their content may have changed since the study checked them.
    trust.read_arguments_from("the study file")
    threading.Thread(target=_terminate_with_study, daemon=True).start()
    runpy.run_module("bestiary", run_name="__main__", alter_sys=True)
