"""Compare the training throughput of several micro-batch sizes on this machine.

    python examples/micro_batch_sizes.py [CONFIG [SIZE ...]]        for example: atari-shallow 4 1 2 8

CONFIG is a configuration of `bestiary bench`. In each round, the same training run is measured with all sizes in turn.
The speed of a machine varies over time. Therefore each rate is divided by the rate of the first size in the same round.
"""

import statistics
import sys
from contextlib import ExitStack

from bestiary.bench.configs import CONFIGS, make_bench_config
from bestiary.bench.end_to_end import EndToEndRun

ROUNDS = 6
SECONDS = 5.0  # duration of each measurement


def main(name: str = "atari-shallow", *arguments: str) -> None:
    if name not in CONFIGS:
        sys.exit(f"{name}: unknown configuration; choose one of {', '.join(CONFIGS)}")
    sizes = [int(size) for size in arguments] or [4, 1, 2, 8]
    rates = {size: list[float]() for size in sizes}
    with ExitStack() as stack:
        run = EndToEndRun(make_bench_config(name, micro_batch_size=sizes[0]), stack)
        run.measure(SECONDS)  # warm-up
        for round_index in range(ROUNDS):
            for size in sizes[:: -1 if round_index % 2 else 1]:
                run.learner.micro_batch_size = size
                rates[size].append(run.measure(SECONDS)["end_to_end"])
    for size in sizes:
        rate = statistics.median(rates[size])
        ratio = statistics.median(a / b for a, b in zip(rates[size], rates[sizes[0]], strict=True))
        print(f"{name}, micro-batch size {size}: {rate:,.0f} steps/s, {ratio:.2f} times the rate of size {sizes[0]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
