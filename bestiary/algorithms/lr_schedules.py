"""Learning-rate schedules.

A schedule maps the progress of a run, from 0 to 1, to a factor. The learner multiplies the option `lr` by this factor.
With the option `lr_schedule_steps`, the progress is relative to this number of steps instead of the steps of the run.
"""

import math


def constant(progress: float) -> float:
    """Return the factor 1: the learning rate does not change."""
    return 1.0


def linear(progress: float) -> float:
    """Return a factor that decreases linearly from 1 to 0."""
    return 1 - progress


def warmup(progress: float) -> float:
    """Return a factor that rises linearly from 0 to 1 in the first 10 % of the run, then falls linearly to 0."""
    return min(10 * progress, (1 - progress) / 0.9)


def halving(progress: float) -> float:
    """Return a factor that starts at 1 and is halved after the first update and after each fifth of the run.

    Pan et al. (2022) used this schedule.
    """
    return 2.0 ** (math.floor(5 * (1 - progress)) - 5)


def staggered(progress: float) -> float:
    """Return a factor that decreases in stages during the run.

    The factor is 1/2 until 10 % of the run, 1/4 until 30 %, 1/8 until 50 % and 1/16 until 70 %. In the rest of the run,
    it decreases linearly from 1/32 to 0. Pan et al. (2022) published this schedule for River Raid. In their code, the
    schedule always ends after 100M steps, even if the run is longer or shorter; set `lr_schedule_steps` to 100M to
    reproduce this.
    """
    left = 1 - progress
    for above, factor in ((0.9, 1 / 2), (0.7, 1 / 4), (0.5, 1 / 8), (0.3, 1 / 16)):
        if left > above:
            return factor
    return left / 0.3 / 32


SCHEDULES = {"linear": linear, "constant": constant, "warmup": warmup, "halving": halving, "staggered": staggered}
