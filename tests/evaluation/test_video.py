"""Videos can be decoded, have the requested number of frames, and show the rendered screen."""

from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import PIL.Image
import pytest

import bestiary
from bestiary.evaluation import video as video_module
from bestiary.evaluation.media import write_video
from bestiary.evaluation.playback import Playback, PlaybackOptions, open_viewer
from bestiary.evaluation.video import record_video
from bestiary.interpretability.attention import attention_overlay
from bestiary.interpretability.side_by_side import record_side_by_side
from bestiary.runs.run import Run
from bestiary.utils.errors import UserError


def gif_steps(path: Path, milliseconds: int) -> int:
    """Return the number of steps in a GIF, in which equal consecutive images are stored as one longer image."""
    with PIL.Image.open(path) as gif:
        total = 0
        for index in range(getattr(gif, "n_frames", 1)):
            gif.seek(index)
            total += gif.info["duration"]
    return round(total / milliseconds)


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_video_has_the_requested_frames(catch_runs: list[Run], suffix: str) -> None:
    path = record_video(catch_runs[0], PlaybackOptions(length=12), out=f"play{suffix}")
    images = np.stack(list(imageio.imiter(path)))
    # 10x5 cells, enlarged 21 times; MP4 has even sizes.
    assert images.shape == (12, 210, 105 + (suffix == ".mp4"), 3)


def test_atari_video_shows_the_colour_screen() -> None:
    run = bestiary.train("atari/Pong", run_dir="r", steps=80, num_envs=4, batch_size=4)
    path = record_video(run, PlaybackOptions(length=30, fps=20))
    images = imageio.imread(path, index=None)
    assert images.shape[1:] == (210, 160, 3)
    assert gif_steps(path, milliseconds=50) == 30
    colours = np.unique(images[-1].reshape(-1, 3), axis=0)
    assert (np.ptp(colours.astype(int), axis=1) > 20).any(), "the agent's grey input was recorded instead of the screen"


def test_video_of_a_gymnasium_environment() -> None:
    run = bestiary.train("gymnasium/CartPole-v1", run_dir="r", steps=80, num_envs=4, batch_size=4)
    path = record_video(run, PlaybackOptions(length=8, fps=20))
    assert imageio.imread(path, index=None).shape[1:] == (400, 600, 3)
    assert gif_steps(path, milliseconds=50) == 8


def test_agents_with_different_action_sets_follow_one_game() -> None:
    """Actions are mapped by name: one agent has all 18 actions, the other the minimal set of 6."""
    options: dict[str, Any] = {"steps": 40, "num_envs": 4, "batch_size": 4, "rollout_length": 5, "runtime": "serial"}
    everything = bestiary.train("atari/Pong", run_dir="all", full_actions=True, frame_size="42x42", **options)
    few = bestiary.load("zoo/pong")
    path = record_side_by_side(
        [few, everything], PlaybackOptions(length=6), out="both.mp4", same_actions=True, saliency=True, density=42
    )
    assert np.stack(list(imageio.imiter(path))).shape == (6, 226, 3 * 160 + 2 * 4, 3)
    viewers = [open_viewer(everything), open_viewer(few, like=everything)]
    assert len(list(Playback(viewers, length=9, actions=["LEFT", "RIGHTFIRE"]))) == 2  # actions that both have
    with pytest.raises(UserError, match=r"pong: .*NOOP, FIRE, RIGHT, LEFT"):
        record_side_by_side([everything, few], out="other.mp4", same_actions=True, saliency=True, density=42)


def test_recording_shows_progress(catch_runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    bars = []

    def progress_bar(items: Any, description: str, total: int) -> Any:
        bars.append((description, total))
        return items

    monkeypatch.setattr(video_module, "progress_bar", progress_bar)
    record_video(catch_runs[0], PlaybackOptions(length=5), out="play.gif")
    assert bars == [("recording", 5)]


def test_invalid_outputs_are_refused_and_files_are_not_overwritten(catch_runs: list[Run]) -> None:
    Path("mine.gif").write_text("precious")
    for out, words in (("a.avi", ".gif or .mp4"), ("mine.gif", "exists"), ("no/such/a.gif", "no folder")):
        with pytest.raises(UserError, match=words):
            record_video(catch_runs[0], out=out)
    assert Path("mine.gif").read_text() == "precious"
    for fast in (None, "fast.gif"):
        with pytest.raises(UserError, match=r"--fps 60: .*at most 50 .*\.mp4"):
            record_video(catch_runs[0], PlaybackOptions(fps=60), out=fast)
    assert record_video(catch_runs[0], PlaybackOptions(length=3, fps=60), out="fast.mp4").exists()


def test_odd_image_sizes_are_padded_for_mp4(tmp_path: Path) -> None:
    write_video(tmp_path / "odd.mp4", [np.zeros((101, 77, 3), np.uint8)] * 4, fps=10)
    assert np.stack(list(imageio.imiter(tmp_path / "odd.mp4"))).shape == (4, 102, 78, 3)


def test_steps_hidden_by_flicker_are_drawn_dark() -> None:
    options: dict[str, Any] = {"steps": 100, "num_envs": 2, "batch_size": 2, "rollout_length": 5, "runtime": "serial"}
    run = bestiary.train("atari/Breakout", run_dir="r", flicker=0.5, **options)
    frames = imageio.imread(record_video(run, PlaybackOptions(length=40), out="f.gif"))
    brightness = frames.reshape(len(frames), -1).mean(1)
    assert 8 < (brightness < brightness.max() / 2).sum() < 32
    without = imageio.imread(
        record_video(run.with_env_options({"flicker": 0.0}), PlaybackOptions(length=40), out="w.gif")
    )
    assert without.reshape(len(without), -1).mean(1).min() > brightness.max() / 2


def test_video_with_attention_differs_from_one_without() -> None:
    options: dict[str, Any] = {"algo": "ppo", "runtime": "serial", "num_envs": 4, "rollout_length": 16, "steps": 128}
    options |= {"agent": "iam", "agent.dset": "attention", "memory.hidden": 8, "torso.sizes": (16,)}
    run = bestiary.train("warehouse", run_dir="r", **options)
    plain = record_video(run, PlaybackOptions(length=5), out="a.gif")
    with_attention = record_video(run, PlaybackOptions(length=5), out="b.gif", make_overlay=attention_overlay)
    assert plain.read_bytes() != with_attention.read_bytes()


def test_attention_of_an_agent_without_attention_is_refused(catch_runs: list[Run]) -> None:
    with pytest.raises(UserError, match="has no attention"):
        record_video(catch_runs[0], make_overlay=attention_overlay)
