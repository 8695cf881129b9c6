"""Emulators in C++ threads: EnvPool, with no more Python around it than it takes.

EnvPool's own `send`, `recv` and `reset` dress every batch up as Gymnasium has it, nested and with copies of ids. A pool of a
hundred environments does not feel that; six games of four environments each pay for it six times a step, about a quarter of
what Python does for them. So what is called here is what those call, which takes and gives plain lists of arrays.
"""

from typing import Any

import numpy as np

from bestiary.cores import cores

Batch = tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]  # observation, reward, done, info; a row each


class Emulators:
    """Environments of one EnvPool. Every `send` or `reset` is of some of them, and is followed by one `recv` of just those."""

    def __init__(self, task: str, seeds: list[int], render: bool, **options: Any):
        import envpool  # here, because it takes a second or two

        self.env = envpool.make(
            task,
            env_type="gymnasium",
            num_envs=len(seeds),
            num_threads=min(len(seeds), cores()),
            seed=seeds,
            **({"render_mode": "rgb_array"} if render else {}),
            **options,
        )
        keys = self.env._state_keys
        self.observation, self.reward, self.done, self.cut = map(keys.index, ("obs", "reward", "done", "trunc"))
        self.info = {key.removeprefix("info:"): place for place, key in enumerate(keys) if key.startswith("info:")}
        assert self.env._action_keys == ["env_id", "players.env_id", "action"], (
            "another EnvPool than the one known here"
        )

    def send(self, actions: np.ndarray, ids: np.ndarray) -> None:
        ids = ids.astype(np.int32, copy=False)
        self.env._send([ids, ids, actions.astype(np.int32)])

    def reset(self, ids: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """New episodes for these: their first observations, and what is known of them."""
        self.env._reset(ids.astype(np.int32, copy=False))
        observation, _, _, info = self.recv()
        return observation, info

    def recv(self) -> Batch:
        """What was sent last led to; arrays that nobody else holds. Done is any end, also one that EnvPool calls truncated."""
        values = self.env._recv()
        info = {name: values[place] for name, place in self.info.items()}
        return values[self.observation], values[self.reward], values[self.done] | values[self.cut], info

    def render(self) -> list[np.ndarray]:
        """RGB [H,W,3] of each; never while any steps."""
        return [self.env.render(env_ids=np.array([row]))[0] for row in range(len(self.env))]

    def close(self) -> None:
        self.env.close()
