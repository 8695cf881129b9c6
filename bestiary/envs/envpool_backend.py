"""Thin interface to EnvPool, which runs emulators in C++ threads.

This module calls EnvPool's private methods `_send`, `_recv` and `_reset`, which exchange flat lists of arrays. The
public methods `send`, `recv` and `reset` also convert each batch to Gymnasium's nested format. With one EnvPool of many
environments, the conversion takes little time. Multi-task training has one EnvPool per game, so each step needs one
conversion per game. With six games, the conversions took about 25 % of the time spent in Python code.
"""

from typing import Any

import numpy as np

from bestiary.utils.cpu import num_cores

Batch = tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]  # observation, reward, done, info


class EnvPoolBackend:
    """A pool of environments that EnvPool steps together.

    `send` sends actions to some or all environments. After each `send`, call `recv` once to get the results.
    """

    def __init__(self, task: str, seeds: list[int], render: bool, **options: Any):
        import envpool  # here, because the import takes 1 to 2 s

        self.env = envpool.make(
            task,
            env_type="gymnasium",
            num_envs=len(seeds),
            num_threads=min(len(seeds), num_cores()),
            seed=seeds,
            **({"render_mode": "rgb_array"} if render else {}),
            **options,
        )
        keys = self.env._state_keys
        self.observation_key = keys.index("obs")
        self.reward_key = keys.index("reward")
        self.done_key = keys.index("done")
        self.truncated_key = keys.index("trunc")
        self.info_keys = {key.removeprefix("info:"): k for k, key in enumerate(keys) if key.startswith("info:")}
        action_keys = ["env_id", "players.env_id", "action"]
        assert self.env._action_keys == action_keys, "the action format of this version of EnvPool is not supported"

    def send(self, actions: np.ndarray, ids: np.ndarray) -> None:
        """Start a step of the environments with the indices `ids`, with one action for each of them."""
        ids = ids.astype(np.int32, copy=False)
        self.env._send([ids, ids, actions.astype(np.int32)])

    def reset(self, ids: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Start new episodes in the environments with the indices `ids`. Return their first observations and infos."""
        self.env._reset(ids.astype(np.int32, copy=False))
        observation, _, _, info = self.recv()
        return observation, info

    def recv(self) -> Batch:
        """Wait for the environments of the last `send` or `reset`; return their (observation, reward, done, info).

        `done` is also set if EnvPool reports a truncated episode. The caller may keep the arrays: EnvPool does not
        overwrite them later.
        """
        values = self.env._recv()
        info = {name: values[key] for name, key in self.info_keys.items()}
        done = values[self.done_key] | values[self.truncated_key]
        return values[self.observation_key], values[self.reward_key], done, info

    def render(self) -> list[np.ndarray]:
        """Return one RGB image [H,W,3] per environment. Do not call this method between `send` and `recv`."""
        return [self.env.render(env_ids=np.array([row]))[0] for row in range(len(self.env))]

    def close(self) -> None:
        self.env.close()
