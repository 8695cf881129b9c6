"""Fixtures of all tests: working folder, cache folder, small trained runs, and a Ray cluster."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import bestiary
from bestiary.distributed.ray_connection import private_ray_settings
from bestiary.runs.run import Run
from bestiary.utils import trust
from tests.distributed.ray_cluster import RayCluster

# The speed of the machine must not decide whether a test passes.
settings.register_profile("no time limits", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no time limits")


@pytest.fixture(autouse=True)
def run_in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in its own empty folder, so that relative paths such as runs/ are not created in the repository."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True, scope="session")
def use_temporary_home_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the results of auto-tuning and the trusted plug-ins in temporary folders for the test session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture
def another_user(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], None]:
    """Return a function after which the commands of the test are those of a user who has trusted nothing yet."""

    def change_user() -> None:
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        monkeypatch.setattr(trust, "_registered", {})

    return change_user


@pytest.fixture(scope="session")
def catch_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Return three short runs of toy/catch: two that differ in the seed, and one with another learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    options: dict[str, Any] = {
        "runtime": "serial",
        "steps": 6_400,
        "log_every": 1_000,
        "save_every": 2_000,
        "num_envs": 16,
        "batch_size": 16,
    }
    return [
        bestiary.train("toy/catch", run_dir=str(folder / "a1"), seed=1, lr=2e-3, **options),
        bestiary.train("toy/catch", run_dir=str(folder / "a2"), seed=2, lr=2e-3, **options),
        bestiary.train("toy/catch", run_dir=str(folder / "b1"), seed=1, lr=1e-4, **options),
    ]


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """Start one Ray cluster for all tests of the xdist group "ray", with the access control of a private instance."""
    with pytest.MonkeyPatch.context() as patch:
        # Ray detects a lost node after a few seconds instead of half a minute.
        patch.setenv("RAY_health_check_period_ms", "500")
        patch.setenv("RAY_health_check_initial_delay_ms", "500")
        patch.setenv("RAY_health_check_timeout_ms", "1000")
        patch.setenv("RAY_health_check_failure_threshold", "4")
        with private_ray_settings():
            cluster = RayCluster()
            yield cluster
            cluster.close()
