"""What a study came to: numbers against slow statements, and the files for people."""

import base64
import csv
import re
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest

from bestiary.cli import run_command
from bestiary.runs.folder import Place
from bestiary.runtime.train import start
from bestiary.studies.results import Outcome, rows
from bestiary.studies.study import Study, read_study
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
unroll_length = 5

[grid]
lr = [0.01, 0.0001]
"""


@pytest.fixture
def partial() -> list[Trial]:
    """A study of which three runs of four have been made, in its folder runs/s."""
    Path("s.toml").write_text(f"{TEXT}# <script>& such\n")
    trials = make_trials(read_study(Path("s.toml")), Path("runs/s"))
    for trial in trials[:3]:
        start(trial.config, Place(run_dir=str(trial.path)))
    Path("runs/s/study.toml").write_text("as run before")
    return trials


def records(name: str) -> list[dict[str, str]]:
    with Path(name).open() as file:
        return list(csv.DictReader(file))


def test_a_partial_study_shows_what_is_there(partial: list[Trial], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["study", "s.toml", "--report"]) == 0
    finals = []
    for trial in partial[:3]:
        played = records(f"{trial.path}/episodes.csv")
        last = 0.9 * max(int(row["step"]) for row in played)
        finals.append(np.mean([float(row["game_return"]) for row in played if int(row["step"]) >= last]))
    fast, slow = records("runs/s/results.csv")
    assert [row["variant"] for row in (fast, slow)] == ["lr=0.01", "lr=0.0001"]
    assert (fast["runs"], fast["planned"], slow["runs"]) == ("2", "2", "1")
    assert float(fast["mean"]) == pytest.approx(np.mean(finals[:2]), rel=1e-4)
    assert float(fast["iqm"]) == pytest.approx(np.mean(finals[:2]), rel=1e-4)  # of two runs
    assert [float(fast["ci_low"]), float(fast["ci_high"])] == pytest.approx(sorted(finals[:2]), rel=1e-4)
    assert float(slow["mean"]) == pytest.approx(finals[2], rel=1e-4)
    assert slow["ci_low"] == ""
    evaluations = [trial.evaluation() for trial in partial[:2]]
    assert float(fast["evaluated"]) == pytest.approx(np.mean([e["mean"] for e in evaluations if e]), rel=1e-4)
    seconds = [trial.run.checkpoints[-1].state()["seconds"] for trial in partial[:2]]
    assert float(fast["minutes"]) == pytest.approx(np.mean(seconds) / 60, rel=1e-4)
    assert float(fast["steps_per_second"]) == pytest.approx(1600 / sum(seconds), rel=1e-4)
    assert int(fast["parameters"]) == sum(weights.numel() for weights in partial[0].run.agent().parameters())
    states = [(row["run"], row["steps"]) for row in records("runs/s/runs.csv")]
    assert states == [("lr=0.01-s1", "800"), ("lr=0.01-s2", "800"), ("lr=0.0001-s1", "800"), ("lr=0.0001-s2", "0")]
    table = capsys.readouterr().out
    assert "1 of 2" in table
    assert "last tenth" in table


def test_true_returns_stand_beside_what_was_trained_on(capsys: pytest.CaptureFixture[str]) -> None:
    text = TEXT.replace('env = "toy/bandit"', 'env = "toy/bandit"\ntrue_reward = "scaled:-3"').replace("[1, 2]", "[1]")
    Path("s.toml").write_text(text.replace("lr = [0.01, 0.0001]", 'reward = ["scaled:1", "scaled:2"]'))
    trials = make_trials(read_study(Path("s.toml")), Path("runs/s"))
    for trial in trials:
        start(trial.config, Place(run_dir=str(trial.path)))
    Path("runs/s/study.toml").write_text("as run before")
    capsys.readouterr()
    assert run_command(["study", "s.toml", "--report"]) == 0
    for factor, row, run in zip((1, 2), records("runs/s/results.csv"), records("runs/s/runs.csv"), strict=True):
        assert float(row["true_return"]) == pytest.approx(-3 * float(row["mean"]) / factor, rel=1e-4)
        assert float(row["true_evaluated"]) == pytest.approx(-3 * float(row["evaluated"]) / factor, rel=1e-4)
        assert float(run["true_return"]) == float(row["true_return"])
    said = " ".join(capsys.readouterr().out.split())
    assert "true return" in said
    assert "trained on different rewards (scaled:1 / scaled:2)" in said
    assert "true return" in Path("runs/s/index.html").read_text()

    runs = [str(trial.path) for trial in trials]
    assert run_command(["compare", *runs, "--out", "both.png"]) == 0
    shown = capsys.readouterr()
    assert "trained on different rewards (scaled:1 / scaled:2): their returns are not of one kind" in shown.err
    assert "true return" in shown.out
    finite = [row for row in records("both.csv") if row["true_mean"] != "nan"]
    assert len(finite) > 100
    factors = {"reward scaled:1": 1, "reward scaled:2": 2}
    for row in finite:
        assert float(row["true_mean"]) == pytest.approx(-3 * float(row["mean"]) / factors[row["group"]], rel=1e-4)


def test_the_page_stands_alone(partial: list[Trial]) -> None:
    assert run_command(["study", "s.toml", "--report"]) == 0
    page = Path("runs/s/index.html").read_text()
    picture = Path("runs/s/curves.png").read_bytes()
    assert min(imageio.imread(picture).shape[:2]) > 500
    assert f"data:image/png;base64,{base64.b64encode(picture).decode()}" in page
    targets = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"'>)]{5})""", page)
    assert set(targets) == {"data:"}
    assert "http:" not in page
    assert "https:" not in page
    assert "&lt;script&gt;&amp; such" in page  # the file itself, harmless
    assert 'name="viewport"' in page
    assert "3 of 4 runs done" in page
    assert ">missing<" in page


def test_rows_across_environments_are_of_normalised_scores() -> None:
    text = TEXT.replace('env = "toy/bandit"\n', "").replace("lr = [0.01, 0.0001]", 'env = ["toy/bandit", "toy/chain"]')
    Path("s.toml").write_text(f'{text}\n[normalise]\n"toy/bandit" = [0.5, 1]\n"toy/chain" = [-1, 1]\n')
    study: Study = read_study(Path("s.toml"))
    finals = [0.5, 0.75, 0.0, 1.0]  # normalised: 0, 0.5, 0.5, 1
    trials = make_trials(study, Path("runs/s"))
    outcomes = [Outcome(trial, True, final) for trial, final in zip(trials, finals, strict=True)]
    bandit, chain, both = rows(study, outcomes)
    assert (bandit.numbers()["mean"], chain.numbers()["mean"]) == (0.625, 0.5)
    assert both.label == "all (normalised, 2 environments)"
    assert both.numbers()["mean"] == 0.5
    assert both.numbers()["iqm"] == 0.5
    assert both.numbers()["lowest"] == 0
    assert both.numbers()["ci_high"] == 0.75  # at best: 0.5, 0.5 and 1, 1
    assert len(rows(study, [*outcomes[:2], *(Outcome(trial, False) for trial in trials[2:])])) == 2  # not yet
