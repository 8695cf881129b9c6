"""What happens to observations between an environment and an agent."""

import sys

import numpy as np


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
        newest = np.moveaxis(frame, 1, -1)  # [N,H,W,C]
        if self.frames is None or self.depth == 1:
            self.frames = np.tile(newest, self.depth)
        else:
            self.frames = self._shifted(self.frames, newest)
            if first.any():
                self.frames[first] = np.tile(newest[first], self.depth)
        return np.moveaxis(self.frames, -1, 1)

    def peek(self, rows: np.ndarray, frame: np.ndarray) -> np.ndarray:
        """The stacks of some rows as they would be with one more frame [M,C,H,W], leaving all as it is."""
        if self.frames is None or self.depth == 1:
            return frame
        return np.moveaxis(self._shifted(self.frames[rows], np.moveaxis(frame, 1, -1)), -1, 1)

    def _shifted(self, frames: np.ndarray, newest: np.ndarray) -> np.ndarray:
        channels = newest.shape[-1]
        if frames.shape[-1] == 4 and channels == 1 and sys.byteorder == "little":
            # Four gray bytes are one word of 32 bits: shift the oldest out, the newest in, a whole pixel at a time.
            words = frames.view(np.uint32) >> np.uint32(8) | newest.astype(np.uint32) << np.uint32(24)
            return words.view(np.uint8)
        return np.concatenate([frames[..., channels:], newest], axis=-1)
