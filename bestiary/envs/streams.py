"""Random numbers for many environments at once, each from a stream of its own."""

import numpy as np


class Streams:
    """N independent random streams, advanced together: the splitmix64 generator."""

    def __init__(self, seeds: list[int]):
        self.state = np.array(seeds, np.uint64)

    def uniform(self, rows: np.ndarray) -> np.ndarray:
        """The next number in [0,1) of each row where `rows`; the others' streams stay where they are."""
        self.state[rows] += np.uint64(0x9E3779B97F4A7C15)
        z = self.state.copy()
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) / 2.0**53

    def integers(self, rows: np.ndarray, high: int) -> np.ndarray:
        return (self.uniform(rows) * high).astype(np.int64)
