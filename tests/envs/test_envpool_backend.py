"""EnvPoolBackend against the public methods of EnvPool, for all environments and for some."""

import envpool
import numpy as np
import pytest

from bestiary.envs.envpool_backend import EnvPoolBackend
from bestiary.envs.procgen import load_qt

SEEDS = [5, 6, 7]


@pytest.mark.parametrize("task", ["Breakout-v5", "StarpilotEasy-v0"])
def test_arrays_equal_those_of_envpool(task: str) -> None:
    load_qt()
    ours = EnvPoolBackend(task, SEEDS, render=False)
    theirs = envpool.make(task, env_type="gymnasium", num_envs=3, num_threads=2, seed=SEEDS)
    all_rows, some_rows = np.arange(3), np.array([2, 0])
    for rows in (all_rows, some_rows):
        observation, info = ours.reset(rows)
        expected, expected_info = theirs.reset(rows.astype(np.int32))
        np.testing.assert_array_equal(observation, expected)
        np.testing.assert_array_equal(info["env_id"], expected_info["env_id"])
    rng, ends = np.random.default_rng(0), 0
    for t in range(150):
        rows = some_rows if t % 7 == 3 else all_rows
        actions = rng.integers(0, 4, len(rows))
        ours.send(actions, rows)
        theirs.send(actions.astype(np.int32), rows.astype(np.int32))
        observation, reward, done, info = ours.recv()
        expected, expected_reward, terminated, truncated, expected_info = theirs.recv()
        np.testing.assert_array_equal(info["env_id"], rows)
        np.testing.assert_array_equal(observation, expected)
        np.testing.assert_array_equal(reward, expected_reward)
        np.testing.assert_array_equal(done, terminated | truncated)
        for name in info.keys() & expected_info.keys():
            np.testing.assert_array_equal(info[name], expected_info[name])
        ends += int(done.sum())
    assert ends
    ours.close()
    theirs.close()


def test_received_arrays_are_not_overwritten_later() -> None:
    """Vector environments write into received arrays, and rollouts keep them."""
    backend, rows = EnvPoolBackend("Pong-v5", SEEDS, render=False, stack_num=1), np.arange(3)
    backend.reset(rows)
    kept = []
    for _ in range(5):
        backend.send(np.full(3, 1), rows)
        observation, _, _, info = backend.recv()
        kept.append((observation, observation.copy(), info["ram"], info["ram"].copy()))
    for observation, observation_copy, ram, ram_copy in kept:
        np.testing.assert_array_equal(observation, observation_copy)
        np.testing.assert_array_equal(ram, ram_copy)
        observation[:] = ram[:] = 0
    backend.close()


def test_render_returns_one_image_per_environment() -> None:
    backend = EnvPoolBackend("Pong-v5", SEEDS, render=True)
    backend.reset(np.arange(3))
    assert [image.shape for image in backend.render()] == [(210, 160, 3)] * 3
    backend.close()
