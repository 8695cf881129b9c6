"""Actions: shares of whole games add up, and groups are what their names say."""

import csv
from pathlib import Path

import numpy as np
import pytest

from bestiary.analysis.actions import Counted, CountingPool, _figure, _show, groups, look_actions
from bestiary.analysis.figures import pyplot
from bestiary.envs import make
from bestiary.envs.atari import action_names
from bestiary.runs.folder import Run


def test_groups_by_name():
    pong = "NOOP FIRE RIGHT LEFT RIGHTFIRE LEFTFIRE".split()
    assert groups(pong, "atari/Pong") == {"moves": {"NOOP": [0, 1], "UP": [2, 4], "DOWN": [3, 5]}}
    found = groups(pong, "atari/Carnival")
    assert found["fire as one"] == {"NOOP": [0], "FIRE": [1, 4, 5], "RIGHT": [2], "LEFT": [3]}
    assert found["moves"] == {"NOOP": [0, 1], "RIGHT": [2, 4], "LEFT": [3, 5]}
    assert groups(["left", "right"], "toy/chain") == {}


def test_in_pong_right_is_up_left_is_down_and_nothing_else_moves():
    names = action_names("Pong", full=True)
    moves = groups(names, "atari/Pong")["moves"]
    assert {move: " ".join(names[k] for k in of) for move, of in moves.items()} == {
        "NOOP": "NOOP FIRE UP DOWN UPFIRE DOWNFIRE",
        "UP": "RIGHT UPRIGHT DOWNRIGHT RIGHTFIRE UPRIGHTFIRE DOWNRIGHTFIRE",
        "DOWN": "LEFT UPLEFT DOWNLEFT LEFTFIRE UPLEFTFIRE DOWNLEFTFIRE",
    }


def test_a_counting_pool_says_what_was_done():
    pool = CountingPool(make("toy/catch", num_envs=3))
    pool.reset()
    pool.send(np.array([0, 2, 1]))
    step = pool.recv()
    done = np.stack(list(step.measures.values()))
    assert (done == np.array([[1, 0, 0], [0, 0, 1], [0, 1, 0]])).all()


def test_runs_with_other_actions_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    few = Counted("few", "t", 1, ("NOOP", "LEFT"), np.array([[0.25, 0.75]]))
    many = Counted("many", "t", 1, ("NOOP", "UP", "LEFT"), np.array([[0.1, 0.3, 0.6]]))
    _show([few, many])
    lines = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if "±" in line}
    assert "75.0" in lines["LEFT"]
    assert "60.0" in lines["LEFT"]
    assert "30.0" in lines["UP"]
    assert lines["UP"].count("±") == 1


def test_a_run_has_one_colour_in_all_panels_and_all_runs_are_in_the_legend():
    one, other = np.array([[0.25, 0.75]]), np.array([[0.5, 0.5]])
    counted = [Counted("a", "t1", 1, ("NOOP", "LEFT"), one), Counted("b", "t2", 1, ("NOOP", "LEFT"), other)]
    counted += [Counted("c", "t2", 1, ("NOOP", "LEFTFIRE"), one)]
    plt = pyplot()
    figure = _figure(plt, counted)
    found: dict[str, set] = {}
    for axes in figure.axes:
        for bars, name in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(name, set()).update(bar.get_facecolor() for bar in bars)
    (legend,) = figure.legends
    assert list(found) == [text.get_text() for text in legend.get_texts()] == [f"{run} (1 games)" for run in "abc"]
    assert len({color for (color,) in found.values()}) == 3
    assert [bar.get_facecolor() for bar in legend.get_patches()] == [color for (color,) in found.values()]
    plt.close(figure)


def test_shares_of_games_and_their_files(catch_runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    counted = look_actions(catch_runs[:2], out="a.png", episodes=6)
    assert [each.run for each in counted] == ["a1", "a2"]
    for each in counted:
        assert each.shares.shape == (6, 3)
        np.testing.assert_allclose(each.shares.sum(axis=1), 1)
    with Path("a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 3
    assert sum(float(row["mean"]) for row in rows if row["run"] == "a1") == pytest.approx(1)
    assert all(
        float(row["mean"]) == pytest.approx(c, abs=1e-5)
        for row, c in zip(rows, counted[0].shares.mean(0), strict=False)
    )
    assert Path("a.png").stat().st_size > 5_000
    assert "toy/catch" in capsys.readouterr().out
    again = look_actions(catch_runs[:1], episodes=6)
    assert (again[0].shares == counted[0].shares).all()
    assert len(list((catch_runs[0].path / "looks").glob("actions-*.png"))) == 1
