"""Thin interface to EnvPool, which runs emulators in C++ threads.

EnvPool has public methods `send`, `recv` and `reset`, and inner methods `_send`, `_recv` and `_reset`, which exchange
flat lists of arrays. The public methods also convert each batch to Gymnasium's nested format. With one EnvPool of many
environments, the conversion takes little time. Multi-task training has one EnvPool per game, so each step needs one
conversion per game: with six games, this took about 25 % of the time spent in Python code.

The inner methods may change with each version of EnvPool. They are used only if they return the same arrays as the
public methods in a small environment (`inner_calls_work`), which is checked once per process.
"""

import warnings
from functools import cache
from typing import Any, Protocol

import numpy as np

from bestiary.utils.console import note
from bestiary.utils.cpu import num_cores

Batch = tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]  # observation, reward, done, info

ACTION_KEYS = ["env_id", "players.env_id", "action"]  # arguments of `_send` that `InnerCalls` supports
CHECK_TASK = "CartPole-v1"  # an environment that is created in a few milliseconds
CHECK_STEPS = 60  # number of random steps of the check; several episodes end in 60 steps


class Calls(Protocol):
    """The three calls with which an EnvPool is stepped."""

    def send(self, actions: np.ndarray, ids: np.ndarray) -> None: ...

    def reset(self, ids: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]: ...

    def recv(self) -> Batch: ...


class PublicCalls:
    """Steps an EnvPool with its public methods."""

    def __init__(self, env: Any):
        self.env = env

    def send(self, actions: np.ndarray, ids: np.ndarray) -> None:
        self.env.send(actions.astype(np.int32), ids.astype(np.int32, copy=False))

    def reset(self, ids: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        observation, info = self.env.reset(ids.astype(np.int32, copy=False))
        return observation, info

    def recv(self) -> Batch:
        observation, reward, terminated, truncated, info = self.env.recv()
        return observation, reward, terminated | truncated, info


class InnerCalls:
    """Steps an EnvPool with its inner methods, without conversion to Gymnasium's format."""

    def __init__(self, env: Any):
        """Read the order of the arrays. Raise an exception if this version of EnvPool has another interface."""
        self.env = env
        keys = env._state_keys
        self.observation_key = keys.index("obs")
        self.reward_key = keys.index("reward")
        self.done_key = keys.index("done")
        self.truncated_key = keys.index("trunc")
        self.info_keys = {key.removeprefix("info:"): k for k, key in enumerate(keys) if key.startswith("info:")}
        if list(env._action_keys) != ACTION_KEYS:
            raise ValueError(f"the arguments of a step are {env._action_keys}; expected {ACTION_KEYS}")

    def send(self, actions: np.ndarray, ids: np.ndarray) -> None:
        ids = ids.astype(np.int32, copy=False)
        self.env._send([ids, ids, actions.astype(np.int32)])

    def reset(self, ids: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        self.env._reset(ids.astype(np.int32, copy=False))
        observation, _, _, info = self.recv()
        return observation, info

    def recv(self) -> Batch:
        values = self.env._recv()
        info = {name: values[key] for name, key in self.info_keys.items()}
        done = values[self.done_key] | values[self.truncated_key]
        return values[self.observation_key], values[self.reward_key], done, info


class EnvPoolBackend:
    """A pool of environments that EnvPool steps together.

    `send` sends actions to some or all environments. After each `send`, call `recv` once to get the results.
    """

    def __init__(self, task: str, seeds: list[int], render: bool, **options: Any):
        self.env = _make(task, seeds, **({"render_mode": "rgb_array"} if render else {}), **options)
        self.calls = _choose_calls(self.env)

    def send(self, actions: np.ndarray, ids: np.ndarray) -> None:
        """Start a step of the environments with the indices `ids`, with one action for each of them."""
        self.calls.send(actions, ids)

    def reset(self, ids: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Start new episodes in the environments with the indices `ids`. Return their first observations and infos."""
        return self.calls.reset(ids)

    def recv(self) -> Batch:
        """Wait for the environments of the last `send` or `reset`; return their (observation, reward, done, info).

        `done` is also set if EnvPool reports a truncated episode. The caller may keep the arrays: EnvPool does not
        overwrite them later.
        """
        return self.calls.recv()

    def render(self) -> list[np.ndarray]:
        """Return one RGB image [H,W,3] per environment. Do not call this method between `send` and `recv`."""
        return [self.env.render(env_ids=np.array([row]))[0] for row in range(len(self.env))]

    def close(self) -> None:
        self.env.close()


def _make(task: str, seeds: list[int], **options: Any) -> Any:
    import envpool  # here, because the import takes 1 to 2 s

    threads = min(len(seeds), num_cores())
    return envpool.make(task, env_type="gymnasium", num_envs=len(seeds), num_threads=threads, seed=seeds, **options)


def _choose_calls(env: Any) -> Calls:
    """Return the inner calls if they work with the installed version of EnvPool, otherwise the public calls."""
    if inner_calls_work():
        try:
            return InnerCalls(env)
        except (AttributeError, ValueError):  # this environment has other arrays than the environment of the check
            pass
    return PublicCalls(env)


@cache
def inner_calls_work() -> bool:
    """Return whether the inner methods of the installed EnvPool do the same as its public methods.

    Two equal pools of a small environment are stepped with the same actions, all rows or some rows at a time. The
    result is stored for the rest of the process.
    """
    envs = [_make(CHECK_TASK, [1, 2, 3]) for _ in range(2)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Gymnasium's messages about the bounds of this environment's observations
            same = calls_agree(PublicCalls(envs[0]), InnerCalls(envs[1]), num_envs=3, num_actions=2)
    except Exception:  # a missing method, or another format of its arguments or results
        same = False
    finally:
        for env in envs:
            env.close()
    if not same:
        note(
            "Bestiary cannot use the inner methods of the installed version of EnvPool; it uses the public methods, "
            "which are slower and give the same results"
        )
    return same


def calls_agree(public: Calls, inner: Calls, num_envs: int, num_actions: int) -> bool:
    """Reset and step two equal pools, and return whether `public` and `inner` return the same arrays.

    Return False, too, if no episode ended: the check would then say nothing about ends of episodes.
    """
    rng = np.random.default_rng(0)
    all_rows = np.arange(num_envs)
    rows_of_resets = (all_rows, all_rows[::-2])
    if not all(_equal(public.reset(rows), inner.reset(rows)) for rows in rows_of_resets):
        return False
    ends = 0
    for step in range(CHECK_STEPS):
        rows = all_rows[::-2] if step % 5 == 3 else all_rows
        actions = rng.integers(0, num_actions, len(rows))
        public.send(actions, rows)
        inner.send(actions, rows)
        expected, found = public.recv(), inner.recv()
        if not _equal(expected, found):
            return False
        ends += int(expected[2].sum())
    return ends > 0


def _equal(expected: Any, found: Any) -> bool:
    """Return whether the arrays of two results are equal. Of the infos, compare the arrays that both contain."""
    *arrays, info = expected
    *other_arrays, other_info = found
    names = [name for name, value in info.items() if isinstance(value, np.ndarray) and name in other_info]
    pairs = [*zip(arrays, other_arrays, strict=True), *((info[name], other_info[name]) for name in names)]
    return "env_id" in names and all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)
