"""What a study starts for each command: `python -m bestiary ...`, which also ends, saved, when the study does.

The study holds the other end of our standard input. However it ends, kill -9 included, the operating system closes that
end; then this process treats itself as it would be treated by a job queue, with SIGTERM.
"""

import os
import runpy
import signal
import threading


def _end_with_the_study() -> None:
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_study, daemon=True).start()
    runpy.run_module("bestiary", run_name="__main__", alter_sys=True)
