"""Emulators give what EnvPool's own methods give, of all environments or of some."""

import envpool
import numpy as np
import pytest

from bestiary.envs.emulators import Emulators
from bestiary.envs.procgen import load_qt

SEEDS = [5, 6, 7]


@pytest.mark.parametrize("task", ["Breakout-v5", "StarpilotEasy-v0"])
def test_arrays_are_those_of_envpool(task: str) -> None:
    load_qt()
    ours = Emulators(task, SEEDS, render=False)
    theirs = envpool.make(task, env_type="gymnasium", num_envs=3, num_threads=2, seed=SEEDS)
    everyone, some = np.arange(3), np.array([2, 0])
    for rows in (everyone, some):
        observation, info = ours.reset(rows)
        expected, known = theirs.reset(rows.astype(np.int32))
        np.testing.assert_array_equal(observation, expected)
        np.testing.assert_array_equal(info["env_id"], known["env_id"])
    rng, ends = np.random.default_rng(0), 0
    for t in range(150):
        rows = some if t % 7 == 3 else everyone
        actions = rng.integers(0, 4, len(rows))
        ours.send(actions, rows)
        theirs.send(actions.astype(np.int32), rows.astype(np.int32))
        observation, reward, done, info = ours.recv()
        expected, earned, terminated, truncated, known = theirs.recv()
        np.testing.assert_array_equal(info["env_id"], rows)
        np.testing.assert_array_equal(observation, expected)
        np.testing.assert_array_equal(reward, earned)
        np.testing.assert_array_equal(done, terminated | truncated)
        for name in info.keys() & known.keys():
            np.testing.assert_array_equal(info[name], known[name])
        ends += int(done.sum())
    assert ends
    ours.close()
    theirs.close()


def test_what_is_received_is_not_overwritten_later() -> None:
    """Pools write into what they received, and rollouts keep it."""
    emulators, rows = Emulators("Pong-v5", SEEDS, render=False, stack_num=1), np.arange(3)
    emulators.reset(rows)
    kept = []
    for _ in range(5):
        emulators.send(np.full(3, 1), rows)
        observation, _, _, info = emulators.recv()
        kept.append((observation, observation.copy(), info["ram"], info["ram"].copy()))
    for observation, as_it_was, ram, ram_then in kept:
        np.testing.assert_array_equal(observation, as_it_was)
        np.testing.assert_array_equal(ram, ram_then)
        observation[:] = ram[:] = 0
    emulators.close()


def test_pictures_of_every_environment() -> None:
    emulators = Emulators("Pong-v5", SEEDS, render=True)
    emulators.reset(np.arange(3))
    assert [picture.shape for picture in emulators.render()] == [(210, 160, 3)] * 3
    emulators.close()
