"""Movies decode, have the asked frames, and show the environment's own picture."""

from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import PIL.Image
import pytest

import bestiary
from bestiary.analysis import movie
from bestiary.analysis.movie import film, film_together, write_movie
from bestiary.analysis.stage import Show, open_stage
from bestiary.errors import UserError
from bestiary.runs.folder import Run


def gif_steps(path: Path, milliseconds: int) -> int:
    """How many steps a GIF lasts: equal pictures in a row are stored as one that stays longer."""
    with PIL.Image.open(path) as gif:
        total = 0
        for index in range(getattr(gif, "n_frames", 1)):
            gif.seek(index)
            total += gif.info["duration"]
    return round(total / milliseconds)


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_a_movie_has_the_asked_frames_and_decodes(catch_runs: list[Run], suffix: str) -> None:
    path = film(catch_runs[0], out=f"play{suffix}", length=12)
    pictures = np.stack(list(imageio.imiter(path)))
    assert pictures.shape == (12, 210, 105 + (suffix == ".mp4"), 3)  # 10x5 cells, enlarged 21 times; MP4 has even sizes


def test_an_atari_movie_is_the_colour_screen() -> None:
    run = bestiary.train("atari/Pong", run_dir="r", steps=80, num_envs=4, batch_size=4)
    path = film(run, length=30, fps=20)
    pictures = imageio.imread(path, index=None)
    assert pictures.shape[1:] == (210, 160, 3)
    assert gif_steps(path, milliseconds=50) == 30
    colours = np.unique(pictures[-1].reshape(-1, 3), axis=0)
    assert (np.ptp(colours.astype(int), axis=1) > 20).any(), "gray pictures would be the agent's input"


def test_a_movie_of_a_gymnasium_environment() -> None:
    run = bestiary.train("gymnasium/CartPole-v1", run_dir="r", steps=80, num_envs=4, batch_size=4)
    path = film(run, length=8, fps=20)
    assert imageio.imread(path, index=None).shape[1:] == (400, 600, 3)
    assert gif_steps(path, milliseconds=50) == 8


def test_agents_with_other_actions_watch_one_game() -> None:
    """An agent of several games has all 18 actions; those that are played are found by their names."""
    options: dict[str, Any] = {"steps": 40, "num_envs": 4, "batch_size": 4, "unroll_length": 5, "runtime": "serial"}
    everything = bestiary.train("atari/Pong", run_dir="all", full_actions=True, frame_size="42x42", **options)
    few = bestiary.load("zoo/pong")
    path = film_together([few, everything], out="both.mp4", same_actions=True, saliency=True, density=42, length=6)
    assert np.stack(list(imageio.imiter(path))).shape == (6, 226, 3 * 160 + 2 * 4, 3)
    stages = [open_stage(everything), open_stage(few, like=everything)]
    assert len(list(Show(stages, length=9, script=["LEFT", "RIGHTFIRE"]))) == 2  # of the 18, only what both have
    with pytest.raises(UserError, match=r"pong: cannot follow where .* is played; it has only NOOP, FIRE, RIGHT, LEFT"):
        film_together([everything, few], out="other.mp4", same_actions=True, saliency=True, density=42)


def test_filming_shows_how_far_it_is(catch_runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    said = []

    def tracked(items: Any, doing: str, total: int) -> Any:
        said.append((doing, total))
        return items

    monkeypatch.setattr(movie, "tracked", tracked)
    film(catch_runs[0], out="play.gif", length=5)
    assert said == [("filming", 5)]


def test_bad_outputs_are_refused_before_any_work(catch_runs: list[Run]) -> None:
    Path("mine.gif").write_text("precious")
    for out, words in (("a.avi", ".gif or .mp4"), ("mine.gif", "exists"), ("no/such/a.gif", "no folder")):
        with pytest.raises(UserError, match=words):
            film(catch_runs[0], out=out)
    assert Path("mine.gif").read_text() == "precious"
    for fast in (None, "fast.gif"):
        with pytest.raises(UserError, match=r"--fps 60: a GIF plays at most 50 pictures a second; .*\.mp4"):
            film(catch_runs[0], out=fast, fps=60)
    assert film(catch_runs[0], out="fast.mp4", fps=60, length=3).exists()


def test_odd_sizes_can_be_written(tmp_path: Path) -> None:
    write_movie(tmp_path / "odd.mp4", [np.zeros((101, 77, 3), np.uint8)] * 4, fps=10)
    assert np.stack(list(imageio.imiter(tmp_path / "odd.mp4"))).shape == (4, 102, 78, 3)
