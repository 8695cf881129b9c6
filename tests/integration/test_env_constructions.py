"""How often an environment is created before training starts."""

from pathlib import Path
from typing import Any

import pytest

from bestiary.cli.main import run_command
from bestiary.config.toml import read_toml
from bestiary.envs.atari import AtariVectorEnv
from bestiary.envs.gymnasium_env import GymnasiumVectorEnv
from bestiary.envs.procgen import ProcgenVectorEnv
from bestiary.envs.toy import ToyVectorEnv
from bestiary.envs.warehouse.env import WarehouseVectorEnv

CLASSES: dict[str, Any] = {
    "atari/Pong": AtariVectorEnv,
    "procgen/starpilot:easy": ProcgenVectorEnv,
    "toy/catch": ToyVectorEnv,
    "warehouse": WarehouseVectorEnv,
    "gymnasium/CartPole-v1": GymnasiumVectorEnv,
}


def record_events(env: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which each construction ("build") and each step ("step") of the environment is added."""
    events: list[str] = []

    def recording(name: str, method: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            events.append(name)
            return method(*args, **keywords)

        return call

    for name, method in (("build", "__init__"), ("step", "send")):
        monkeypatch.setattr(CLASSES[env], method, recording(name, getattr(CLASSES[env], method)))
    return events


@pytest.mark.parametrize("env", CLASSES)
def test_a_dry_run_builds_no_environment_of_the_package(env: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events = record_events(env, monkeypatch)
    assert run_command(["train", env, "--dry-run"]) == 0
    # The interface of a Gymnasium environment is known only after one was built (it may be cached by another test).
    assert events in ([[], ["build"]] if env.startswith("gymnasium") else [[]])


@pytest.mark.parametrize("env", CLASSES)
def test_at_most_two_environments_are_built_before_the_first_step(env: str, monkeypatch: pytest.MonkeyPatch) -> None:
    events = record_events(env, monkeypatch)
    words = "--runtime serial --num-envs 4 --steps 200 --rollout-length 5 --batch-size 4 --name few".split()
    assert run_command(["train", env, *words]) == 0
    assert read_toml(Path("runs/few/config.toml"))["num_envs"] == 4
    assert 1 <= events.index("step") <= 2
