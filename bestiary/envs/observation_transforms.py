"""Preprocessing of observations: flicker, pixel noise, and stacking of the last frames or observation vectors."""

import sys

import numpy as np

from bestiary.envs.rng import RandomStreams


class Flicker:
    """Replaces images by zeros at random (Hausknecht & Stone 2015), which makes a game partially observable.

    Each environment has its own random stream. Mode `frame` blanks the newest frame before it is stacked, so the frame
    stays blank in the next stacks. Mode `stack` blanks a copy of the whole stack, so the next stack is complete again.
    """

    def __init__(self, probability: float, mode: str, seeds: list[int]):
        self.probability = probability
        self.mode = mode
        self.streams = RandomStreams(seeds)

    def draw(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Choose at random which environments get a blank image. Return a bool [N]: True if the image is blank.

        If `rows`, bool [N], is given, only environments with True in `rows` can get a blank image, and only their
        random streams advance.
        """
        rows = np.ones(len(self.streams.state), bool) if rows is None else rows
        if self.probability == 0:
            return np.zeros(len(rows), bool)
        return rows & (self.streams.uniform(rows) < self.probability)

    def blank_frames(self, frame: np.ndarray, blank: np.ndarray) -> np.ndarray:
        """In mode `frame`, set the blank frames to zero, in place. Return `frame`.

        `frame` [M,C,H,W] contains the new frames of M environments, before they are stacked. `blank`, bool [M], is True
        in the environments whose frame is set to zero.
        """
        if self.mode == "frame" and blank.any():
            frame[blank] = 0
        return frame

    def blank_stacks(self, stack: np.ndarray, blank: np.ndarray) -> np.ndarray:
        """In mode `stack`, return a copy of `stack` in which the blank stacks are zero.

        In mode `frame`, return `stack` itself.

        `stack` [M,C,H,W] contains the stacked frames of M environments. `blank`, bool [M], is True in the environments
        whose stack is zero in the copy.
        """
        if self.mode == "stack" and blank.any():
            return np.where(blank[:, None, None, None], np.uint8(0), stack)
        return stack


class Noise:
    """Adds normally distributed noise to each pixel.

    The noise in an environment depends only on the environment's seed and on the number of its previous frames. It does
    not depend on other environments.
    """

    def __init__(self, deviation: float, seeds: list[int]):
        self.deviation = deviation  # in grey levels, 0 to 255
        self.seeds = seeds
        self.count = np.zeros(len(seeds), np.int64)  # number of frames of each environment that received noise so far

    def add_to(self, frame: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Add noise to new frames [M,C,H,W] and return them. `rows` [M] are the indices of their environments."""
        if self.deviation == 0:
            return frame
        noisy = frame.astype(np.float32)
        for k, row in enumerate(rows):
            generator = np.random.Generator(np.random.Philox(key=self.seeds[row], counter=[0, 0, 0, self.count[row]]))
            noisy[k] += self.deviation * generator.standard_normal(frame.shape[1:], np.float32)
        self.count[rows] += 1
        return noisy.round().clip(0, 255).astype(np.uint8)


class FrameStack:
    """Stacks the last `depth` frames of each environment along the channel axis, oldest frame first.

    At the start of an episode, the first frame is repeated `depth` times. Each returned stack is a new array of shape
    [N, depth*C, H, W], so a rollout may keep it. Its memory format is channels-last, because convolutions are then
    fastest.
    """

    def __init__(self, depth: int):
        self.depth = depth
        self.frames: np.ndarray | None = None  # the stacks, [N, H, W, depth*C]; None before the first `push`

    def push(self, frame: np.ndarray, first: np.ndarray) -> np.ndarray:
        """Add one frame per environment, [N,C,H,W], and return the stacks. `first` [N]: True if an episode starts."""
        newest = frame.transpose(0, 2, 3, 1)  # [N,H,W,C]
        if self.frames is None or self.depth == 1:
            self.frames = np.tile(newest, self.depth)
        else:
            self.frames = self._shift(self.frames, newest)
            if first.any():
                self.frames[first] = np.tile(newest[first], self.depth)
        return self.frames.transpose(0, 3, 1, 2)

    def peek(self, rows: np.ndarray, frame: np.ndarray) -> np.ndarray:
        """Return the stacks that `push` would return for M environments, given their new frames [M,C,H,W].

        `rows` are the indices of these environments. The stored stacks do not change.
        """
        if self.frames is None or self.depth == 1:
            return frame
        return self._shift(self.frames[rows], frame.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)

    def _shift(self, frames: np.ndarray, newest: np.ndarray) -> np.ndarray:
        channels = newest.shape[-1]
        if frames.shape[-1] == 4 and channels == 1 and sys.byteorder == "little":
            # The four frames of a pixel are one 32-bit word: shift the oldest byte out and the newest byte in.
            words = frames.view(np.uint32) >> np.uint32(8) | newest.astype(np.uint32) << np.uint32(24)
            return words.view(np.uint8)
        return np.concatenate([frames[..., channels:], newest], axis=-1)


class VectorStack:
    """Concatenates the last `depth` vectors of each environment, newest vector first.

    Vectors before the start of the episode are zero. For vectors of size D, each returned stack is a new array of shape
    [N, depth*D], so a rollout may keep it. If `depth` is 1, the vectors themselves are returned.
    """

    def __init__(self, depth: int):
        self.depth = depth
        # The stacks, [N, depth*D]. None before the first `push`, and always None if `depth` is 1.
        self.frames: np.ndarray | None = None

    def push(self, vector: np.ndarray, first: np.ndarray) -> np.ndarray:
        """Add one vector per environment, [N,D], and return the stacks. `first` [N]: True if an episode starts."""
        if self.depth == 1:
            return vector
        if self.frames is None:
            self.frames = np.zeros((len(vector), self.depth * vector.shape[1]), vector.dtype)
        self.frames = self._shift(self.frames, vector)
        self.frames[first, vector.shape[1] :] = 0
        return self.frames

    def peek(self, rows: np.ndarray, vector: np.ndarray) -> np.ndarray:
        """Return the stacks that `push` would return for M environments, given their new vectors [M,D].

        `rows` are the indices of these environments. The stored stacks do not change.
        """
        return vector if self.frames is None else self._shift(self.frames[rows], vector)

    def _shift(self, frames: np.ndarray, newest: np.ndarray) -> np.ndarray:
        return np.concatenate([newest, frames[:, : -newest.shape[1]]], axis=1)
