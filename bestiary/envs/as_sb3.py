"""Use vector environments in Stable-Baselines3 (SB3), which has a vector interface of its own."""

from typing import TYPE_CHECKING, Any

import numpy as np

from bestiary.utils.errors import UserError

if TYPE_CHECKING:
    import gymnasium.vector


def to_sb3(env: "gymnasium.vector.VectorEnv") -> Any:
    """Return a Stable-Baselines3 `VecEnv` that steps the Gymnasium vector environment `env`.

    Example: `stable_baselines3.PPO("MlpPolicy", bestiary.to_sb3(bestiary.make_vec("warehouse", num_envs=8)))`.

    Raises:
        UserError: Stable-Baselines3 is not installed, or `env` does not reset finished episodes in the same step.
    """
    from gymnasium.vector import AutoresetMode  # here, because importing Gymnasium is slow

    try:
        from stable_baselines3.common.vec_env import VecEnv
    except ImportError as error:
        raise UserError("to_sb3: Stable-Baselines3 is not installed; run: pip install stable-baselines3") from error
    mode = env.metadata.get("autoreset_mode")
    if mode != AutoresetMode.SAME_STEP:
        raise UserError(f"to_sb3: env.metadata['autoreset_mode'] is {mode}; it must be AutoresetMode.SAME_STEP")

    class SB3VecEnv(VecEnv):
        """The Gymnasium vector environment with the interface of Stable-Baselines3."""

        def __init__(self) -> None:
            self.render_mode = env.render_mode
            super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)

        def reset(self) -> Any:
            # `VecEnv.seed` stores one seed per environment. The first of these seeds determines the seeds of all
            # environments.
            observation, info = env.reset(seed=self._seeds[0])
            self.reset_infos = _split_info(info, self.num_envs)
            self._reset_seeds()
            return observation

        def step_async(self, actions: np.ndarray) -> None:
            self.actions = actions

        def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, list[dict[str, Any]]]:
            observation, reward, terminated, truncated, info = env.step(self.actions)
            infos = _split_info(info, self.num_envs)
            for row, entries in enumerate(infos):
                entries["TimeLimit.truncated"] = bool(truncated[row] and not terminated[row])
                if "final_obs" in entries:
                    entries["terminal_observation"] = entries.pop("final_obs")
            return observation, reward, terminated | truncated, infos

        def close(self) -> None:
            env.close()

        def get_images(self) -> list[np.ndarray | None]:
            images = env.render()
            return [None] * self.num_envs if images is None else list(images)

        def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
            return [getattr(env, attr_name)] * len(self._get_indices(indices))

        def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
            raise NotImplementedError("the environments are stepped together, so they have no attributes of their own")

        def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
            raise NotImplementedError("the environments are stepped together, so they have no methods of their own")

        def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
            return [False] * len(self._get_indices(indices))

    return SB3VecEnv()


def _split_info(info: dict[str, Any], num_envs: int) -> list[dict[str, Any]]:
    """Return one dict per environment with the values of `info` that are valid for it."""
    infos: list[dict[str, Any]] = [{} for _ in range(num_envs)]
    for name, values in info.items():
        if f"_{name}" in info:
            for row in np.flatnonzero(info[f"_{name}"]):
                infos[row][name] = values[row]
    return infos
