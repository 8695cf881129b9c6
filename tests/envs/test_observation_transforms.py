"""FrameStack and VectorStack against a deque per environment, and Noise."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bestiary.envs.observation_transforms import FrameStack, Noise, VectorStack


class SlowStack:
    """Reference implementation of the frame stack of one environment."""

    def __init__(self, depth: int):
        self.frames: deque[np.ndarray] = deque(maxlen=depth)

    def push(self, frame: np.ndarray, first: bool) -> np.ndarray:
        if first:
            self.frames.extend([frame] * (self.frames.maxlen or 0))
        self.frames.append(frame)
        return np.concatenate(list(self.frames))


@settings(deadline=None, max_examples=60)
@given(
    depth=st.integers(1, 5),
    channels=st.integers(1, 3),
    num_envs=st.integers(1, 4),
    length=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_frame_stack_equals_a_deque_per_environment(
    depth: int, channels: int, num_envs: int, length: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    stack, slow = FrameStack(depth), [SlowStack(depth) for _ in range(num_envs)]
    returned: list[tuple[np.ndarray, np.ndarray]] = []
    for t in range(length):
        frame = rng.integers(0, 256, (num_envs, channels, 2, 3), dtype=np.uint8)
        first = np.ones(num_envs, bool) if t == 0 else rng.random(num_envs) < 0.3
        expected = np.stack([one.push(frame[i].copy(), bool(first[i])) for i, one in enumerate(slow)])
        returned.append((stack.push(frame, first), expected))
        frame[:] = 0  # the environment may reuse its buffer
        for images, expected_images in returned:
            np.testing.assert_array_equal(images, expected_images)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("channels", [1, 3])
def test_peek_adds_a_frame_without_changing_the_stack(depth: int, channels: int) -> None:
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (5, 4, channels, 2, 2), dtype=np.uint8)  # [t,N,C,H,W]
    stack, undisturbed = FrameStack(depth), FrameStack(depth)
    none = np.zeros(4, bool)
    for frame in frames[:-1]:
        stack.push(frame, none)
        undisturbed.push(frame, none)
    rows = np.array([1, 3])
    ahead = stack.peek(rows, frames[-1][rows])
    assert ahead.shape == (2, depth * channels, 2, 2)
    np.testing.assert_array_equal(ahead, np.concatenate(frames[-depth:], axis=1)[rows])
    np.testing.assert_array_equal(stack.push(frames[-1], none), undisturbed.push(frames[-1], none))
    np.testing.assert_array_equal(ahead, np.concatenate(frames[-depth:], axis=1)[rows])


class SlowVectorStack:
    """Reference implementation of the vector stack of one environment: newest first, zeros before the episode."""

    def __init__(self, depth: int, size: int):
        self.zeros = [np.zeros(size, np.float32)] * depth
        self.vectors = deque(self.zeros, maxlen=depth)

    def push(self, vector: np.ndarray, first: bool) -> np.ndarray:
        if first:
            self.vectors.extend(self.zeros)
        self.vectors.appendleft(vector)
        return np.concatenate(list(self.vectors))


@settings(deadline=None, max_examples=60)
@given(
    depth=st.integers(1, 5),
    size=st.integers(1, 3),
    num_envs=st.integers(1, 4),
    length=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
)
def test_stacked_vectors_are_newest_first_and_zero_before_an_episode(
    depth: int, size: int, num_envs: int, length: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    stack, slow = VectorStack(depth), [SlowVectorStack(depth, size) for _ in range(num_envs)]
    returned: list[tuple[np.ndarray, np.ndarray]] = []
    for t in range(length):
        vector = rng.random((num_envs, size), np.float32)
        first = np.ones(num_envs, bool) if t == 0 else rng.random(num_envs) < 0.3
        rows = np.flatnonzero(rng.random(num_envs) < 0.5)
        if t > 0:
            ahead = [[vector[i], *list(slow[i].vectors)[: depth - 1]] for i in rows]
            expected = np.array(ahead, np.float32).reshape(len(rows), depth * size)
            np.testing.assert_array_equal(stack.peek(rows, vector[rows]), expected)
        expected = np.stack([one.push(vector[i], bool(first[i])) for i, one in enumerate(slow)])
        returned.append((stack.push(vector, first), expected))
        for vectors, expected_vectors in returned:
            np.testing.assert_array_equal(vectors, expected_vectors)


def test_noise_depends_only_on_the_seed_and_frame_count_of_an_environment() -> None:
    frames = np.full((3, 1, 40, 40), 128, np.uint8)
    one, other = Noise(10, [5, 6, 7]), Noise(10, [5, 6, 7])
    first = one.add_to(frames, np.arange(3))
    assert abs(float(first.std()) - 10) < 0.5
    assert abs(float(first.mean()) - 128) < 0.5
    assert len({row.tobytes() for row in first}) == 3
    alone = other.add_to(frames[1:2], np.array([1]))
    assert (alone[0] == first[1]).all()  # independent of the other environments
    second = one.add_to(frames, np.arange(3))
    assert not (second == first).all()
    other.count = np.array([1, 1, 1])
    assert (other.add_to(frames, np.arange(3)) == second).all()
    assert Noise(0, [1]).add_to(frames, np.arange(3)) is frames
    extremes = Noise(60, [1]).add_to(
        np.array([0, 255], np.uint8).reshape(1, 1, 1, 2).repeat(500, 2), np.zeros(1, np.int64)
    )
    assert extremes[..., 0].min() == 0  # clipped, not wrapped around
    assert extremes[..., 0].mean() < 40
    assert extremes[..., 1].mean() > 215
