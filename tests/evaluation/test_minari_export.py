"""`bestiary export --format minari` writes datasets that Minari opens."""

import json
from pathlib import Path

import numpy as np
import pytest

import bestiary
from bestiary.cli.main import run_command
from bestiary.runs.run import Run


@pytest.fixture(autouse=True)
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    return tmp_path / "datasets"


def test_a_dataset_has_whole_episodes_with_training_and_true_rewards(capsys: pytest.CaptureFixture[str]) -> None:
    import minari

    run = bestiary.train(
        "warehouse",
        run_dir="w",
        runtime="serial",
        steps=400,
        reward="collected=1,alive=-0.5",
        true_reward="collected=1",
    )
    capsys.readouterr()
    assert run_command(["export", "w", "--format", "minari", "--episodes", "3", "--dataset", "ww/random-v2"]) == 0
    assert capsys.readouterr().out.strip() == "dataset: ww/random-v2"
    dataset = minari.load_dataset("ww/random-v2")
    assert dataset.total_episodes == 3
    assert json.loads(dataset.storage.metadata["bestiary"])["action_names"] == ["up", "down", "left", "right"]
    for episode in dataset:
        length = len(episode.actions)
        assert episode.observations.shape == (length + 1, *run.config.interface.observation_spec["vector"].shape)
        np.testing.assert_allclose(episode.rewards, episode.infos["true"] - 0.5, atol=1e-6)
        np.testing.assert_allclose(episode.rewards, episode.infos["training"], atol=1e-6)
        # The warehouse ends each episode with a time limit, so the last observation is the real one.
        assert episode.truncations.tolist() == [False] * (length - 1) + [True]
        assert not episode.terminations.any()
        assert (episode.observations[-1] != episode.observations[-2]).any()
        assert (episode.infos["log_prob"] < 0).all()


def test_rewards_follow_the_actions_that_earned_them(catch_runs: list[Run]) -> None:
    """In toy/catch, the ball is caught if the paddle is below it. The last observation before the end shows both."""
    import minari

    from bestiary.evaluation.minari_export import export_minari

    dataset = minari.load_dataset(export_minari(catch_runs[0], episodes=20, seed=4))
    assert dataset.id.startswith("bestiary/a1/catch-")
    returns = [episode.rewards.sum() for episode in dataset]
    assert len(returns) == 20
    assert set(returns) == {-1.0, 1.0}
    for episode in dataset:
        assert (episode.rewards[:-1] == 0).all()
        assert episode.terminations[-1]
        np.testing.assert_array_equal(episode.observations[-1], episode.observations[-2])


def test_an_existing_dataset_is_kept_unless_overwritten(
    catch_runs: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    import minari

    command = ["export", str(catch_runs[0].path), "--format", "minari", "--dataset", "catch-v0", "--episodes"]
    assert run_command([*command, "2"]) == 0
    assert run_command([*command, "3"]) == 2
    assert "catch-v0 exists" in capsys.readouterr().err
    assert minari.load_dataset("catch-v0").total_episodes == 2
    assert run_command([*command, "3", "--overwrite"]) == 0
    assert minari.load_dataset("catch-v0").total_episodes == 3
    assert run_command([*command[:-2], "catch", "--episodes", "2"]) == 2
    assert "--dataset catch" in capsys.readouterr().err
    assert run_command([*command[:-2], "../../catch-v0", "--episodes", "2"]) == 2
