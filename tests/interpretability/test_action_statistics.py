"""Action statistics: shares of each game sum to 1, and actions are grouped by their names."""

import csv
from pathlib import Path

import numpy as np
import pytest

from bestiary.envs import make_env
from bestiary.envs.atari_games import action_names
from bestiary.evaluation.figure_helpers import import_pyplot
from bestiary.interpretability.action_statistics import (
    ActionCountWrapper,
    ActionShares,
    _draw_figure,
    _print_tables,
    group_actions,
    measure_actions,
)
from bestiary.runs.run import Run


def test_actions_are_grouped_by_name():
    pong = "NOOP FIRE RIGHT LEFT RIGHTFIRE LEFTFIRE".split()
    assert group_actions(pong, "atari/Pong") == {"movement": {"NOOP": [0, 1], "UP": [2, 4], "DOWN": [3, 5]}}
    found = group_actions(pong, "atari/Carnival")
    assert found["fire merged"] == {"NOOP": [0], "FIRE": [1, 4, 5], "RIGHT": [2], "LEFT": [3]}
    assert found["movement"] == {"NOOP": [0, 1], "RIGHT": [2, 4], "LEFT": [3, 5]}
    assert group_actions(["left", "right"], "toy/chain") == {}


def test_pong_right_moves_up_left_moves_down_and_no_other_action_moves():
    names = action_names("Pong", full=True)
    movement = group_actions(names, "atari/Pong")["movement"]
    assert {move: " ".join(names[k] for k in members) for move, members in movement.items()} == {
        "NOOP": "NOOP FIRE UP DOWN UPFIRE DOWNFIRE",
        "UP": "RIGHT UPRIGHT DOWNRIGHT RIGHTFIRE UPRIGHTFIRE DOWNRIGHTFIRE",
        "DOWN": "LEFT UPLEFT DOWNLEFT LEFTFIRE UPLEFTFIRE DOWNLEFTFIRE",
    }


def test_wrapper_adds_the_last_action_as_one_hot_measures():
    pool = ActionCountWrapper(make_env("toy/catch", num_envs=3))
    pool.reset()
    pool.send(np.array([0, 2, 1]))
    step = pool.recv()
    counts = np.stack(list(step.measures.values()))
    assert (counts == np.array([[1, 0, 0], [0, 0, 1], [0, 1, 0]])).all()


def test_table_of_runs_with_different_actions_has_empty_cells(capsys: pytest.CaptureFixture[str]) -> None:
    few = ActionShares("few", "t", 1, ("NOOP", "LEFT"), np.array([[0.25, 0.75]]))
    many = ActionShares("many", "t", 1, ("NOOP", "UP", "LEFT"), np.array([[0.1, 0.3, 0.6]]))
    _print_tables([few, many])
    lines = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if "±" in line}
    assert "75.0" in lines["LEFT"]
    assert "60.0" in lines["LEFT"]
    assert "30.0" in lines["UP"]
    assert lines["UP"].count("±") == 1


def test_run_has_the_same_colour_in_all_panels_and_an_entry_in_the_legend():
    one, other = np.array([[0.25, 0.75]]), np.array([[0.5, 0.5]])
    results = [ActionShares("a", "t1", 1, ("NOOP", "LEFT"), one), ActionShares("b", "t2", 1, ("NOOP", "LEFT"), other)]
    results += [ActionShares("c", "t2", 1, ("NOOP", "LEFTFIRE"), one)]
    plt = import_pyplot()
    figure = _draw_figure(plt, results)
    found: dict[str, set] = {}
    for axes in figure.axes:
        for bars, name in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(name, set()).update(bar.get_facecolor() for bar in bars)
    (legend,) = figure.legends
    assert list(found) == [text.get_text() for text in legend.get_texts()] == [f"{run} (1 games)" for run in "abc"]
    assert len({color for (color,) in found.values()}) == 3
    assert [bar.get_facecolor() for bar in legend.get_patches()] == [color for (color,) in found.values()]
    plt.close(figure)


def test_shares_of_real_games_and_the_written_files(catch_runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    results = measure_actions(catch_runs[:2], out="a.png", episodes=6)
    assert [result.run for result in results] == ["a1", "a2"]
    for result in results:
        assert result.shares.shape == (6, 3)
        np.testing.assert_allclose(result.shares.sum(axis=1), 1)
    with Path("a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 3
    assert sum(float(row["mean"]) for row in rows if row["run"] == "a1") == pytest.approx(1)
    assert all(
        float(row["mean"]) == pytest.approx(c, abs=1e-5)
        for row, c in zip(rows, results[0].shares.mean(0), strict=False)
    )
    assert Path("a.png").stat().st_size > 5_000
    assert "toy/catch" in capsys.readouterr().out
    again = measure_actions(catch_runs[:1], episodes=6)
    assert (again[0].shares == results[0].shares).all()
    assert len(list((catch_runs[0].path / "interpretability").glob("actions-*.png"))) == 1
