"""The learning rate over a run, as a factor of what was asked for; `progress` of the run goes from 0 to 1."""

import math


def constant(progress: float) -> float:
    return 1.0


def linear(progress: float) -> float:
    """To zero at the end."""
    return 1 - progress


def warm(progress: float) -> float:
    """From zero over the first tenth of the run, then back to zero at the end."""
    return min(10 * progress, (1 - progress) / 0.9)


def halving(progress: float) -> float:
    """Half of it after each fifth of the run; the first half at once, as published (Pan et al. 2022)."""
    return 2.0 ** (math.floor(5 * (1 - progress)) - 5)


def staggered(progress: float) -> float:
    """1/2, 1/4, 1/8 and 1/16 until 10, 30, 50 and 70 % of the run, then from 1/32 to zero: what River Raid was published with,
    where the run was taken to be 100M steps whatever its length."""
    left = 1 - progress
    for above, factor in ((0.9, 1 / 2), (0.7, 1 / 4), (0.5, 1 / 8), (0.3, 1 / 16)):
        if left > above:
            return factor
    return left / 0.3 / 32


SCHEDULES = {"linear": linear, "constant": constant, "warm": warm, "halving": halving, "staggered": staggered}
