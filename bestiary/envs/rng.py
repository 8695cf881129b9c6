"""Independent random number streams for many environments."""

import numpy as np


class RandomStreams:
    """N independent random streams (splitmix64), one per environment."""

    def __init__(self, seeds: list[int]):
        self.state = np.array(seeds, np.uint64)

    def uniform(self, rows: np.ndarray) -> np.ndarray:
        """Return one random number in [0,1) per stream, float64 [N].

        Only the streams with True in `rows`, bool [N], advance. The result also has entries for the other streams.
        Ignore these entries: they repeat the previous number of the stream.
        """
        self.state[rows] += np.uint64(0x9E3779B97F4A7C15)
        z = self.state.copy()
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) / 2.0**53

    def integers(self, rows: np.ndarray, high: int) -> np.ndarray:
        """Return one random integer from 0 to high-1 per stream, int64 [N]. For `rows`, bool [N], see `uniform`."""
        return (self.uniform(rows) * high).astype(np.int64)
