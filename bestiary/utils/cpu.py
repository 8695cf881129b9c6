"""The number of CPU cores that this process may use."""

import os

# Environment variable: number of cores that a process may use. A study on a cluster sets it for each of its runs.
CORES_VARIABLE = "BESTIARY_CORES"


def num_cores() -> int:
    """Return BESTIARY_CORES if it is a positive integer, else the number of cores on which this process may run."""
    limit = os.environ.get(CORES_VARIABLE, "")
    if limit.isdecimal() and int(limit) > 0:
        return int(limit)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
