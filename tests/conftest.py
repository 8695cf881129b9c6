"""What all tests share: small real runs, trained once a session."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bestiary
from bestiary.runs.folder import Run
from bestiary.runtime.ray import _private_settings
from tests.nodes import Nodes


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs in a folder of its own, so that relative paths such as runs/ never touch the project."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True, scope="session")
def a_cache_of_their_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What runs remember about the machine is remembered for this session only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def catch_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Two short real runs of toy/catch that differ in their seed, and one that differs in its learning rate."""
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
def nodes() -> Iterator[Nodes]:
    """One Ray for all tests that need one (they are in the group "ray"), as private as one that a run starts for itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_health_check_period_ms", "500")  # a lost node is noticed after seconds, not half a minute
        patch.setenv("RAY_health_check_initial_delay_ms", "500")
        patch.setenv("RAY_health_check_timeout_ms", "1000")
        patch.setenv("RAY_health_check_failure_threshold", "4")
        with _private_settings():
            nodes = Nodes()
            yield nodes
            nodes.close()
