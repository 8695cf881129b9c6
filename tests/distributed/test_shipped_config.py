"""The configuration that is sent to other nodes."""

from pathlib import Path

import numpy as np

from bestiary.distributed.shipped_config import ShippedConfig, package_versions, version_mismatches
from tests.distributed.helpers import FAULTY_ENV, SMALL
from tests.trusted import resolve_own


def test_plugin_files_are_sent_to_nodes_that_do_not_have_them(tmp_path: Path) -> None:
    """The environment's file imports another file of its folder, which is sent, too."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "helper.py").write_text("SCALE = 2.0\n")
    imported = "from helper import SCALE as reward_scale"
    (folder / "own.py").write_text(FAULTY_ENV.replace("reward_scale = 1.0", imported))
    config = resolve_own({"env": "plugins/own.py:FaultyEnv", **SMALL})
    shipped_config = ShippedConfig.from_config(config)
    folder.rename(tmp_path / "moved")  # as if this were another node
    config = shipped_config.load()
    assert config.envs == (f"{folder}/own.py:FaultyEnv",)
    pool = config.make_vector_env(2, 0)
    pool.reset()
    pool.send(np.ones(2, np.int64))
    assert pool.recv().reward.tolist() == [2.0, 2.0]
    pool.close()


def test_other_package_versions_are_named() -> None:
    assert version_mismatches(package_versions()) == []
    (problem,) = version_mismatches({**package_versions(), "torch": "1.0"})
    assert f"torch {package_versions()['torch']}" in problem
    assert "1.0" in problem
