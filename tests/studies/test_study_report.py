"""Report of a study: CSV values against independent calculations, the table, and the HTML page."""

import base64
import csv
import json
import re
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest

from bestiary.api import start
from bestiary.cli.main import run_command
from bestiary.runs.run import RunLocation
from bestiary.studies.study import read_study
from bestiary.studies.trial import Trial, make_trials

TEXT = """
seeds = [1, 2]
evaluate = 4

[base]
env = "toy/bandit"
steps = 800
runtime = "serial"
num_envs = 4
batch_size = 4
rollout_length = 5

[grid]
lr = [0.01, 0.0001]
"""


@pytest.fixture
def partial() -> list[Trial]:
    """Return the four trials of a study in runs/s. The first three have been run."""
    Path("s.toml").write_text(f"{TEXT}# <script>& more\n")
    trials = make_trials(read_study(Path("s.toml")), Path("runs/s"))
    for trial in trials[:3]:
        start(trial.config, RunLocation(run_dir=str(trial.path)))
    Path("runs/s/study.toml").write_text("as run before")
    return trials


def records(name: str) -> list[dict[str, str]]:
    with Path(name).open() as file:
        return list(csv.DictReader(file))


def test_results_of_a_partial_study(partial: list[Trial], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["study", "s.toml", "--report"]) == 0
    finals = []
    for trial in partial[:3]:
        played = records(f"{trial.path}/episodes.csv")
        last = 0.9 * max(int(row["step"]) for row in played)
        finals.append(np.mean([float(row["game_return"]) for row in played if int(row["step"]) >= last]))
    fast, slow = records("runs/s/results.csv")
    assert [row["variant"] for row in (fast, slow)] == ["lr=0.01", "lr=0.0001"]
    assert (fast["runs"], fast["planned_runs"], slow["runs"]) == ("2", "2", "1")
    assert float(fast["mean"]) == pytest.approx(np.mean(finals[:2]), rel=1e-4)
    assert float(fast["iqm"]) == pytest.approx(np.mean(finals[:2]), rel=1e-4)  # the mean, since there are two runs
    half_width = 12.7062 * abs(finals[0] - finals[1]) / 2  # Student's t of two values
    limits = [np.mean(finals[:2]) - half_width, np.mean(finals[:2]) + half_width]
    assert [float(fast["ci_low"]), float(fast["ci_high"])] == pytest.approx(limits, rel=1e-3)
    assert fast["interval"] == "Student's t, over seeds"
    assert slow["interval"] == "none, because n = 1"
    assert float(slow["mean"]) == pytest.approx(finals[2], rel=1e-4)
    assert slow["ci_low"] == ""
    evaluations = [json.loads(next((t.path / "evaluations").glob("*.json")).read_text()) for t in partial[:2]]
    means = [evaluation["statistics"]["game_return"]["mean"] for evaluation in evaluations]
    assert float(fast["eval_return"]) == pytest.approx(np.mean(means), rel=1e-4)
    seconds = [trial.run.checkpoints[-1].load_state()["seconds"] for trial in partial[:2]]
    assert float(fast["minutes_per_run"]) == pytest.approx(np.mean(seconds) / 60, rel=1e-4)
    assert float(fast["steps_per_second"]) == pytest.approx(1600 / sum(seconds), rel=1e-4)
    assert int(fast["parameters"]) == sum(weights.numel() for weights in partial[0].run.agent().parameters())
    states = [(row["run"], row["steps"]) for row in records("runs/s/runs.csv")]
    assert states == [("lr=0.01-s1", "800"), ("lr=0.01-s2", "800"), ("lr=0.0001-s1", "800"), ("lr=0.0001-s2", "0")]
    table = capsys.readouterr().out
    assert "1 of 2" in table
    assert "last tenth" in table
    assert "Student's t" in table
    (improvement,) = records("runs/s/scores.csv")
    assert (improvement["group"], improvement["other_group"]) == ("lr=0.01", "lr=0.0001")
    wins = [1.0 if final > finals[2] else 0.5 * (final == finals[2]) for final in finals[:2]]
    assert float(improvement["value"]) == pytest.approx(np.mean(wins))
    assert (improvement["ci_low"], improvement["seeds"]) == ("", "2 / 1")
    assert "probability of improvement" in table


def test_true_returns_are_reported_next_to_training_returns(capsys: pytest.CaptureFixture[str]) -> None:
    text = TEXT.replace('env = "toy/bandit"', 'env = "toy/bandit"\ntrue_reward = "scaled:-3"').replace("[1, 2]", "[1]")
    Path("s.toml").write_text(text.replace("lr = [0.01, 0.0001]", 'reward = ["scaled:1", "scaled:2"]'))
    trials = make_trials(read_study(Path("s.toml")), Path("runs/s"))
    for trial in trials:
        start(trial.config, RunLocation(run_dir=str(trial.path)))
    Path("runs/s/study.toml").write_text("as run before")
    capsys.readouterr()
    assert run_command(["study", "s.toml", "--report"]) == 0
    for factor, row, run in zip((1, 2), records("runs/s/results.csv"), records("runs/s/runs.csv"), strict=True):
        assert float(row["true_final_return"]) == pytest.approx(-3 * float(row["mean"]) / factor, rel=1e-4)
        assert float(row["true_eval_return"]) == pytest.approx(-3 * float(row["eval_return"]) / factor, rel=1e-4)
        assert float(run["true_final_return"]) == float(row["true_final_return"])
    output = " ".join(capsys.readouterr().out.split())
    assert "true return" in output
    assert "different rewards (scaled:1 / scaled:2)" in output
    assert "true return" in Path("runs/s/index.html").read_text()

    runs = [str(trial.path) for trial in trials]
    assert run_command(["compare", *runs, "--out", "both.png"]) == 0
    shown = capsys.readouterr()
    assert "different rewards (scaled:1 / scaled:2)" in shown.err
    assert "true return" in shown.out
    finite = [row for row in records("both.csv") if row["true_mean"] != "nan"]
    assert len(finite) > 100
    factors = {"reward scaled:1": 1, "reward scaled:2": 2}
    for row in finite:
        assert float(row["true_mean"]) == pytest.approx(-3 * float(row["mean"]) / factors[row["group"]], rel=1e-4)


def test_environments_in_their_first_game_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """160 steps of CartPole in 8 environments: some of them have not finished a game, so returns are biased."""
    options = 'env = "gymnasium/CartPole-v1"\nsteps = 160\nruntime = "serial"\nnum_envs = 8\nbatch_size = 8\n'
    Path("s.toml").write_text(f"seeds = [1, 2]\n[base]\n{options}rollout_length = 20\n")
    trials = make_trials(read_study(Path("s.toml")), Path("runs/s"))
    for trial in trials:
        start(trial.config, RunLocation(run_dir=str(trial.path)))
    Path("runs/s/study.toml").write_text("as run before")
    waiting = [8 - len(set(trial.run.episodes["env"])) for trial in trials]
    assert 0 < min(waiting) <= max(waiting) < 8
    capsys.readouterr()
    assert run_command(["study", "s.toml", "--report"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "biased towards short games" in output
    assert f"{trials[0].name} ({waiting[0]}), {trials[1].name} ({waiting[1]})" in output
    assert "biased towards short games" in Path("runs/s/index.html").read_text()
    assert [int(row["envs_in_first_game"]) for row in records("runs/s/runs.csv")] == waiting


def test_finished_first_games_are_not_reported(partial: list[Trial], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["study", "s.toml", "--report"]) == 0
    assert "short games" not in capsys.readouterr().out
    assert [row["envs_in_first_game"] for row in records("runs/s/runs.csv")] == ["0", "0", "0", ""]


def test_page_is_self_contained(partial: list[Trial]) -> None:
    assert run_command(["study", "s.toml", "--report"]) == 0
    page = Path("runs/s/index.html").read_text()
    png = Path("runs/s/curves.png").read_bytes()
    assert min(imageio.imread(png).shape[:2]) > 500
    assert f"data:image/png;base64,{base64.b64encode(png).decode()}" in page
    targets = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"'>)]{5})""", page)
    assert set(targets) == {"data:"}
    assert "http:" not in page
    assert "https:" not in page
    assert "&lt;script&gt;&amp; more" in page  # the study file is escaped
    assert 'name="viewport"' in page
    assert "3 of 4 runs done" in page
    assert ">missing<" in page
