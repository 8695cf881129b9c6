"""How many cores this process may use."""

import os

VARIABLE = "BESTIARY_CORES"  # set by whoever gives a process less than the machine, such as a study on a cluster


def cores() -> int:
    """As many as BESTIARY_CORES says, or else as the operating system lets this process run on."""
    if (given := os.environ.get(VARIABLE, "")).isdecimal() and int(given) > 0:
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
