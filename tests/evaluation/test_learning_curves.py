"""Learning curves: groups of runs, trailing means against a slow implementation, figures and files."""

import csv
import itertools
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pytest

import bestiary
from bestiary.cli.main import run_command
from bestiary.evaluation.compare import compare_runs
from bestiary.evaluation.curve_plots import curve_caption, plot_curves
from bestiary.evaluation.learning_curves import group_runs, load_game_returns, trailing_means
from bestiary.runs.run import Run
from bestiary.utils.errors import UserError
from bestiary.utils.options import parse_range


def test_runs_that_differ_only_in_their_seed_form_one_group(catch_runs: list[Run]) -> None:
    a, b = group_runs(catch_runs)
    assert [run.path.name for run in a.runs] == ["a1", "a2"]
    assert [run.path.name for run in b.runs] == ["b1"]
    assert (a.label, b.label) == ("algo.lr 0.002", "algo.lr 0.0001")
    has_value = ~np.isnan(a.mean)
    assert has_value.sum() > 150
    assert (a.lowest <= a.mean + 1e-9)[has_value].all()
    assert (a.mean <= a.highest + 1e-9)[has_value].all()
    steps, returns = load_game_returns(catch_runs[0])
    last_tenth = [r for s, r in zip(steps, returns, strict=True) if s >= 0.9 * max(steps)]
    assert a.final_returns()[0] == pytest.approx(np.mean(last_tenth))


def slow_trailing_mean(positions: np.ndarray, values: np.ndarray, previous: float, x: float, smooth: int) -> float:
    """Return the mean of the games since the previous point, and of at least the last `smooth` games."""
    ended = [value for position, value in zip(positions, values, strict=True) if position <= x]
    recent = sum(previous < position <= x for position in positions)
    return float(np.mean(ended[-max(recent, smooth) :])) if ended else np.nan


@pytest.mark.parametrize("games", [5, 60, 3_000])
def test_trailing_means_equal_a_slow_implementation(games: int) -> None:
    rng = np.random.default_rng(games)
    positions = np.sort(rng.uniform(0, 100, games))
    values = rng.normal(size=games)
    grid = np.linspace(0, positions[-1], 21)
    for smooth in (1, 20):
        slow = [slow_trailing_mean(positions, values, *pair, smooth) for pair in itertools.pairwise(grid)]
        np.testing.assert_allclose(trailing_means(positions, values, grid, smooth), slow, atol=1e-12)


def test_curve_has_no_value_before_the_first_and_after_the_last_game() -> None:
    """A run whose first game ends at step 24,000 has no curve before that step."""
    positions = np.array([24_000.0, 50_000.0, 61_000.0])
    curve = trailing_means(positions, np.array([1.0, 2.0, 6.0]), np.linspace(0, 100_000, 101), 20)
    steps = np.linspace(1_000, 100_000, 100)
    np.testing.assert_array_equal(np.isfinite(curve), (steps >= 24_000) & (steps <= 61_000))
    assert curve[steps == 24_000] == 1
    assert curve[steps == 60_000] == 1.5
    assert curve[steps == 61_000] == 3


def test_later_games_do_not_change_a_curve() -> None:
    rng = np.random.default_rng(0)
    positions = np.sort(rng.uniform(0, 100, 300))
    grid = np.linspace(0, 100, 51)
    values = rng.normal(size=300)
    changed = np.where(positions > 60, values + 1_000, values)
    before, after = (trailing_means(positions, v, grid, 20) for v in (values, changed))
    np.testing.assert_array_equal(before[grid[1:] <= 60], after[grid[1:] <= 60])
    assert after[-1] > 900


def test_comparison_writes_figure_csv_and_table(catch_runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    compare_runs(catch_runs, Path("curves.png"))
    assert min(imageio.imread("curves.png").shape[:2]) > 500
    with Path("curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["group"] for row in rows} == {"algo.lr 0.002", "algo.lr 0.0001"}
    first_games = [load_game_returns(run)[0].min() for run in catch_runs]
    for group, first in (("algo.lr 0.002", min(first_games[:2])), ("algo.lr 0.0001", first_games[2])):
        own = [row for row in rows if row["group"] == group]
        assert min(float(row["steps"]) for row in own if row["mean"] != "nan") >= first
        assert {row["seeds"] for row in own} <= {"0", "1", "2"}
        assert {row["smooth"] for row in own} == {"20"}
    printed = " ".join(capsys.readouterr().out.split())
    for text in ("last tenth", "Student's t", "number of seeds", "a1, a2", "probability of improvement"):
        assert text in printed
    with pytest.raises(UserError, match="exist; choose another"):
        compare_runs(catch_runs, Path("curves.png"))
    compare_runs(catch_runs, Path("curves.png"), axis="minutes", overwrite=True)


def test_single_games_are_offered_instead_of_curves(catch_runs: list[Run]) -> None:
    assert run_command(["compare", *(str(run.path) for run in catch_runs), "--smooth", "0", "--out", "raw.png"]) == 0
    with Path("raw.csv").open() as file:
        rows = list(csv.DictReader(file))
    for run in catch_runs:
        own = [row for row in rows if row["run"] == run.name]
        steps, returns = load_game_returns(run)
        assert [float(row["steps"]) for row in own] == steps.tolist()
        assert [float(row["return"]) for row in own] == returns.tolist()
        assert {row["seed"] for row in own} == {str(run.raw_config["seed"])}
    assert min(imageio.imread("raw.png").shape[:2]) > 500


def test_users_components_are_compared_by_content_without_importing_them(tmp_path: Path) -> None:
    net = "import torch.nn as nn\nclass Net(nn.Identity):\n    def __init__(self, spec):\n        super().__init__()\n"
    net += "        self.output_size = 8\n    def forward(self, observation):\n        return observation['vector']\n"
    runs = []
    for seed, source in ((1, net), (2, net), (3, net + "# another\n")):
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / "net.py").write_text(source)
        options: dict[str, Any] = {
            "torso": f"{folder}/net.py:Net",
            "seed": seed,
            "run_dir": str(folder / "run"),
            "steps": 1_280,
        }
        runs.append(bestiary.train("toy/chain", runtime="serial", **options))
        (folder / "net.py").unlink()
    same, other = group_runs([bestiary.load(str(run.path)) for run in runs])
    assert (len(same.runs), len(other.runs)) == (2, 1)


def test_zoom_adds_a_panel(catch_runs: list[Run]) -> None:
    groups = group_runs(catch_runs)
    plot_curves({"": groups}, Path("plain.png"))
    plot_curves({"": groups}, Path("zoom.png"), flat=[groups[0].label], zoom=(1_000, 2_000))
    plain, zoomed = (imageio.imread(f"{name}.png") for name in ("plain", "zoom"))
    assert zoomed.shape[1] > 1.1 * plain.shape[1]  # two panels
    assert parse_range("2M:4M") == (2e6, 4e6)
    for invalid in ("4M:2M", "2M", "a:b", ":", "-1:2"):
        with pytest.raises(ValueError, match="such as 2M:4M"):
            parse_range(invalid)


def test_a_curve_with_one_point_is_visible() -> None:
    # In the warehouse, all games have 100 steps, so the first 16 games end at the same step.
    options: dict[str, Any] = {"num_envs": 16, "steps": 2_000, "runtime": "serial", "run_dir": "one"}
    run = bestiary.train("warehouse", torso="mlp", rollout_length=25, **options)
    plot_curves({"": group_runs([run])}, Path("one.png"))
    blue = (imageio.imread("one.png")[..., :3] == (0x1F, 0x77, 0xB4)).all(-1)
    squares = np.lib.stride_tricks.sliding_window_view(blue, (5, 5))
    assert squares.all((-1, -2)).any()  # a disc; the line in the legend is thinner


def test_unknown_figure_format_is_refused(catch_runs: list[Run]) -> None:
    with pytest.raises(UserError, match="figures are"):
        compare_runs(catch_runs, Path("curves.xls"))


def test_panel_for_each_task_against_the_steps_of_the_task(capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"num_envs": 8, "batch_size": 4, "torso": "mlp", "log_every": 400}
    both = bestiary.train("procgen/{starpilot,leaper}:easy", run_dir="both", steps=2_400, critic="popart", **options)
    alone = bestiary.train("procgen/starpilot:easy", run_dir="alone", steps=1_200, **options)
    panels = compare_runs(
        [both, alone], Path("tasks.png")
    )  # by task, because the returns of different tasks cannot be averaged
    assert list(panels) == ["procgen/starpilot:easy", "procgen/leaper:easy"]
    assert [group.label.split(",")[0] for group in panels["procgen/starpilot:easy"]] == ["2 tasks", "one task"]
    assert [len(groups) for groups in panels.values()] == [2, 1]
    for group in panels["procgen/starpilot:easy"]:
        assert group.x[-1] <= 1_200  # of this task
    steps, returns = load_game_returns(both, "procgen/leaper:easy")
    rows = [i for i, task in enumerate(both.episodes["task"]) if task == "procgen/leaper:easy"]
    assert len(steps) == len([i for i in rows if both.episodes["game_over"][i]])
    assert panels["procgen/leaper:easy"][0].final_returns()[0] == pytest.approx(
        returns[steps >= 0.9 * steps.max()].mean()
    )
    scores = {"tasks-scores.csv", "tasks-profiles.png"}  # of the group that has both tasks
    assert {p.name for p in Path().glob("tasks*")} == {"tasks.png", "tasks.csv", "tasks-popart.png"} | scores
    with Path("tasks.csv").open() as file:
        assert {row["task"] for row in csv.DictReader(file)} == {"procgen/starpilot:easy", "procgen/leaper:easy"}
    assert "procgen/leaper:easy" in capsys.readouterr().out
    with pytest.raises(UserError, match="cannot be averaged"):
        load_game_returns(both)


def test_task_without_finished_games_has_no_panel(capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"num_envs": 8, "batch_size": 4, "torso": "mlp", "steps": 800}
    run = bestiary.train("procgen/{maze,leaper}:easy", run_dir="two", **options)
    path = run.path / "episodes.csv"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join(row for row in rows if "maze" not in row))
    run = bestiary.load("two")
    panels = compare_runs([run], Path("one.png"))
    assert list(panels) == ["procgen/leaper:easy"]
    assert panels["procgen/leaper:easy"][0].x[-1] <= 400
    assert "two: no game of procgen/maze:easy" in capsys.readouterr().err
    with pytest.raises(UserError, match="cannot be averaged"):
        load_game_returns(run)


def test_tasks_of_plugins_with_finished_games_are_not_reported_as_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(__file__).parents[2] / "examples" / "lock_tasks.py"
    envs = [f"{file}:Rare", f"{file}:Frequent"]
    run = bestiary.train(*envs, run_dir="two", steps=800, num_envs=8, batch_size=4, runtime="serial")
    capsys.readouterr()
    assert list(compare_runs([run], Path("two.png"))) == ["lock_tasks.py:Rare", "lock_tasks.py:Frequent"]
    assert "has ended yet" not in capsys.readouterr().err


def test_environments_in_their_first_game_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """The games of the warehouse end after 100 steps, so all environments finish their first game at once."""
    options: dict[str, Any] = {"num_envs": 8, "batch_size": 8, "runtime": "serial"}
    run = bestiary.train("warehouse", run_dir="w", steps=1_600, **options)
    capsys.readouterr()
    compare_runs([run], Path("all.png"))
    assert "biased towards short games" not in capsys.readouterr().err
    path = run.path / "metrics.csv"
    header, *_, last = path.read_text().splitlines()
    cells = dict(zip(header.split(","), last.split(","), strict=True)) | {"envs_in_first_game": "3"}
    path.write_text(f"{header}\n{','.join(cells.values())}\n")
    compare_runs([run], Path("some.png"))
    assert "w: 3 environments had not finished a game yet" in capsys.readouterr().err


def test_multi_task_run_without_a_finished_game_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    run = bestiary.train("atari/{Pong,Boxing}", run_dir="two", steps=80, num_envs=4, batch_size=4, runtime="serial")
    capsys.readouterr()
    assert run_command(["compare", "two", "--out", "no.png"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert "no game has ended yet in two" in errors[0]
    assert not Path("no.png").exists()
    assert run.path.exists()


def test_caption_states_the_number_of_games_of_a_point() -> None:
    assert "last 20 games" in curve_caption(20)
    assert "last game," in curve_caption(1)
