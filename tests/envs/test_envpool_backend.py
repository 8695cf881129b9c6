"""EnvPoolBackend against the public methods of EnvPool, for all environments and for some."""

import envpool
import numpy as np
import pytest

import bestiary
from bestiary.envs import envpool_backend
from bestiary.envs.envpool_backend import (
    Batch,
    EnvPoolBackend,
    InnerCalls,
    PublicCalls,
    calls_agree,
    inner_calls_work,
)
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


def test_the_inner_calls_of_this_version_are_used() -> None:
    assert inner_calls_work()
    backend = EnvPoolBackend("Pong-v5", SEEDS, render=False)
    assert isinstance(backend.calls, InnerCalls)
    backend.close()


class OtherOrder(InnerCalls):
    """Calls of an imaginary version of EnvPool that returns its arrays in another order."""

    def recv(self) -> Batch:
        observation, reward, done, info = super().recv()
        return observation[::-1], reward, done, info


def test_the_check_notices_inner_calls_that_return_something_else() -> None:
    envs = [envpool.make("CartPole-v1", env_type="gymnasium", num_envs=3, seed=SEEDS) for _ in range(4)]
    assert calls_agree(PublicCalls(envs[0]), InnerCalls(envs[1]), 3, 2)
    assert not calls_agree(PublicCalls(envs[2]), OtherOrder(envs[3]), 3, 2)


@pytest.mark.parametrize("name", ["atari/Pong", "procgen/starpilot"])
def test_environments_are_the_same_with_the_public_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a version of EnvPool whose inner methods differ, environments behave as before."""
    results = []
    for works in (True, False):
        monkeypatch.setattr(envpool_backend, "inner_calls_work", lambda works=works: works)
        pool = bestiary.make_env(name, num_envs=3, seed=4)
        assert isinstance(pool.unwrapped.env.calls, InnerCalls if works else PublicCalls)
        rng, steps = np.random.default_rng(0), [pool.reset()]
        for _ in range(60):
            pool.send(rng.integers(0, pool.action_spec.n, 3))
            steps.append(pool.recv())
        pool.close()
        results.append(steps)
    for one, other in zip(*results, strict=True):
        np.testing.assert_equal(vars(one), vars(other))
