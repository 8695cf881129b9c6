"""What happens to observations between an environment and an agent."""

import sys

import numpy as np

from bestiary.envs.streams import Streams


class Flicker:
    """Blanks a whole frame now and then (Hausknecht & Stone 2015): what was there must be remembered.

    Each environment has a random stream of its own. `mode` says what goes: the newest frame before it is stacked, or the whole
    stack of that moment, a copy of it, so that the next one is whole again."""

    def __init__(self, probability: float, mode: str, seeds: list[int]):
        self.probability, self.mode, self.streams = probability, mode, Streams(seeds)

    def draw(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Which of the environments go blank, bool [N]; of some `rows` [N] only, where the others keep their streams."""
        rows = np.ones(len(self.streams.state), bool) if rows is None else rows
        if self.probability == 0:
            return np.zeros(len(rows), bool)
        return rows & (self.streams.uniform(rows) < self.probability)

    def frame(self, frame: np.ndarray, blank: np.ndarray) -> np.ndarray:
        """Frames [M,C,H,W] before they are stacked, those of `blank` [M] dark in frame mode."""
        if self.mode == "frame" and blank.any():
            frame[blank] = 0
        return frame

    def stack(self, stack: np.ndarray, blank: np.ndarray) -> np.ndarray:
        """Stacks [M,C,H,W], those of `blank` [M] dark in stack mode."""
        return (
            np.where(blank[:, None, None, None], np.uint8(0), stack) if self.mode == "stack" and blank.any() else stack
        )


class Noise:
    """Adds noise to every pixel, normal with some deviation in steps of its 256: a worse camera.

    Each environment has random numbers of its own: its seed and the count of its frames make a new generator every time."""

    def __init__(self, deviation: float, seeds: list[int]):
        self.deviation, self.seeds = deviation, seeds
        self.count = np.zeros(len(seeds), np.int64)  # frames that each environment has had

    def frame(self, frame: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Frames [M,C,H,W] of some rows [M]."""
        if self.deviation == 0:
            return frame
        noisy = frame.astype(np.float32)
        for place, row in enumerate(rows):
            generator = np.random.Generator(np.random.Philox(key=self.seeds[row], counter=[0, 0, 0, self.count[row]]))
            noisy[place] += self.deviation * generator.standard_normal(frame.shape[1:], np.float32)
        self.count[rows] += 1
        return noisy.round().clip(0, 255).astype(np.uint8)


class FrameStack:
    """The last `depth` frames of each environment along the channel axis, oldest first.

    A new episode's first frame fills the whole stack. Every result is an array of its own, so that a rollout may keep it; its
    shape is [N, depth*C, H, W], its memory has the channels last, as convolutions like it.
    """

    def __init__(self, depth: int):
        self.depth = depth
        self.frames: np.ndarray | None = None  # [N, H, W, depth*C]

    def push(self, frame: np.ndarray, first: np.ndarray) -> np.ndarray:
        """Add frame [N,C,H,W]; rows of `first` [N] begin anew."""
        newest = frame.transpose(0, 2, 3, 1)  # [N,H,W,C]
        if self.frames is None or self.depth == 1:
            self.frames = np.tile(newest, self.depth)
        else:
            self.frames = self._shifted(self.frames, newest)
            if first.any():
                self.frames[first] = np.tile(newest[first], self.depth)
        return self.frames.transpose(0, 3, 1, 2)

    def peek(self, rows: np.ndarray, frame: np.ndarray) -> np.ndarray:
        """The stacks of some rows as they would be with one more frame [M,C,H,W], leaving all as it is."""
        if self.frames is None or self.depth == 1:
            return frame
        return self._shifted(self.frames[rows], frame.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)

    def _shifted(self, frames: np.ndarray, newest: np.ndarray) -> np.ndarray:
        channels = newest.shape[-1]
        if frames.shape[-1] == 4 and channels == 1 and sys.byteorder == "little":
            # Four gray bytes are one word of 32 bits: shift the oldest out, the newest in, a whole pixel at a time.
            words = frames.view(np.uint32) >> np.uint32(8) | newest.astype(np.uint32) << np.uint32(24)
            return words.view(np.uint8)
        return np.concatenate([frames[..., channels:], newest], axis=-1)


class VectorStack:
    """The last `depth` vectors of each environment in one, newest first; zeros where an episode is younger than that.

    Every result is an array of its own, [N, depth*D], so that a rollout may keep it.
    """

    def __init__(self, depth: int):
        self.depth = depth
        self.frames: np.ndarray | None = None  # [N, depth*D]; None at depth 1, where nothing need be kept

    def push(self, vector: np.ndarray, first: np.ndarray) -> np.ndarray:
        """Add vector [N,D]; rows of `first` [N] begin anew."""
        if self.depth == 1:
            return vector
        if self.frames is None:
            self.frames = np.zeros((len(vector), self.depth * vector.shape[1]), vector.dtype)
        self.frames = self._shifted(self.frames, vector)
        self.frames[first, vector.shape[1] :] = 0
        return self.frames

    def peek(self, rows: np.ndarray, vector: np.ndarray) -> np.ndarray:
        """The stacks of some rows as they would be with one more vector [M,D], leaving all as it is."""
        return vector if self.frames is None else self._shifted(self.frames[rows], vector)

    def _shifted(self, frames: np.ndarray, newest: np.ndarray) -> np.ndarray:
        return np.concatenate([newest, frames[:, : -newest.shape[1]]], axis=1)
