"""Which --group-size trains fastest here: a training of one of the bench's configurations, in turn with each size.

    python examples/group_sizes.py [CONFIG [SIZE ...]]        such as atari-shallow 4 1 2 8

The learner of one training is given another group size in every turn. A size's speed is compared with that of the first one in
the same round, because machines are faster at some times than at others.
"""

import statistics
import sys
from contextlib import ExitStack

from bestiary.bench import CONFIGS, configured
from bestiary.bench_whole import Whole

ROUNDS, SECONDS = 6, 5.0


def main(name: str = "atari-shallow", *given: str) -> None:
    if name not in CONFIGS:
        sys.exit(f"{name}: there is {', '.join(CONFIGS)}")
    sizes = [int(size) for size in given] or [4, 1, 2, 8]
    speeds = {size: list[float]() for size in sizes}
    with ExitStack() as stack:
        training = Whole(configured(name, group_size=sizes[0]), stack)
        training.measure(SECONDS)  # its warm-up
        for count in range(ROUNDS):
            for size in sizes[:: -1 if count % 2 else 1]:
                training.learner.group_size = size
                speeds[size].append(training.measure(SECONDS)["whole"])
    for size in sizes:
        of_first = statistics.median(one / first for one, first in zip(speeds[size], speeds[sizes[0]], strict=True))
        print(
            f"{name}, groups of {size}: {statistics.median(speeds[size]):,.0f} steps/s, {of_first:.2f} of groups of {sizes[0]}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
