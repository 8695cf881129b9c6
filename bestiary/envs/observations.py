"""What happens to observations between an environment and an agent."""

import numpy as np


class FrameStack:
    """The last `depth` frames of each environment along the channel axis, oldest first.

    A new episode's first frame fills the whole stack. Every result is an array of its own, so that a rollout may keep it.
    """

    def __init__(self, depth: int):
        self.depth = depth
        self.frames: np.ndarray | None = None  # [N, depth*C, H, W]

    def push(self, frame: np.ndarray, first: np.ndarray) -> np.ndarray:
        """Add frame [N,C,H,W]; rows of `first` [N] begin anew."""
        if self.frames is None or self.depth == 1:
            self.frames = np.tile(frame, (1, self.depth, 1, 1))
            return self.frames
        channels = frame.shape[1]
        self.frames = np.concatenate([self.frames[:, channels:], frame], axis=1)
        if first.any():
            self.frames[first] = np.tile(frame[first], (1, self.depth, 1, 1))
        return self.frames

    def peek(self, rows: np.ndarray, frame: np.ndarray) -> np.ndarray:
        """The stacks of some rows as they would be with one more frame [M,C,H,W], leaving all as it is."""
        if self.frames is None or self.depth == 1:
            return frame
        return np.concatenate([self.frames[rows][:, frame.shape[1] :], frame], axis=1)
