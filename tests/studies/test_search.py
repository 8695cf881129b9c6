"""Searches: reading of [search], sampling, pruning, the final runs, the report, and `kill -9`."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bestiary.cli.main import run_command
from bestiary.studies.search import Parameter, make_sampler
from bestiary.studies.search_runner import (
    best_variant,
    intermediate_values,
    make_search_trial,
    open_journal,
    remaining_trials,
    report_interval,
)
from bestiary.studies.study import Study, read_study
from bestiary.studies.study_report import write_study_report
from bestiary.utils.errors import UserError

pytest.importorskip("optuna")

STUDY = """
name = "s"
seeds = [11]

[base]
env = "toy/bandit"
steps = "1600"
runtime = "serial"
num_envs = 8
batch_size = 8
micro_batch_size = 8
log_every = 10000

[search]
trials = 3
interval = 400
sampler = "random"

[search.space]
lr = { low = 1e-4, high = 1e-2, log = true }
"torso.width" = { low = 8, high = 32, step = 8 }
memory = ["none", "gru"]
"""


def read(text: str = STUDY) -> Study:
    Path("s.toml").write_text(text)
    return read_study(Path("s.toml"))


def rows(path: str) -> list[dict[str, str]]:
    with open(path) as file:
        return list(csv.DictReader(file))


def test_space_is_converted_to_options() -> None:
    search = read().search
    assert search is not None
    drawn = {"lr": 0.00123456, "torso.width": 16, "memory": "gru"}
    assert search.point_options(drawn) == {"lr": 0.001235, "torso.width": 16, "memory": "gru"}
    sizes = Parameter(choices=([64, 64], [32]))
    assert sizes.option_value("[32]") == [32]
    assert Parameter(low=1e-4, high=1.23456e-3).option_value(1.23456e-3) <= 1.23456e-3


WRONG = [
    ('sampler = "random"', 'sampler = "tpf"', "line 17: search: sampler = 'tpf'", "did you mean tpe"),
    ("trials = 3", "trials = 0", "line 15: search: trials = 0", "at least 1"),
    ("trials = 3", "trails = 3", "line 15: search: unknown key trails", "did you mean trials"),
    ("low = 1e-4, high = 1e-2", "low = 1e-2, high = 1e-4", "line 20: lr", "try low = 0.0001, high = 0.01"),
    ("low = 1e-4", "low = 0", "line 20: lr", "must be positive"),
    ("low = 1e-4", "lo = 1e-4", "line 20: lr", "unknown key lo; did you mean low"),
    ('memory = ["none", "gru"]', 'memory = ["none", "gro"]', "line 22: --memory gro", "did you mean gru"),
    ('memory = ["none", "gru"]', 'momery = ["none", "gru"]', "line 22: unknown option --momery", "--memory"),
    ('memory = ["none", "gru"]', "seed = [1, 2]", "line 22: seed cannot be searched", "not be comparable"),
    ("high = 32", "high = -3", "line 21: torso.width", "try low = -3, high = 8"),
    ("seeds = [11]", "seeds = [0]", "line 3: seeds: 0 is the seed of the search", "other seeds"),
    ("interval = 400", 'value = "validation"', "line 16: value", "valid_every = 160"),
    ("[search]", 'valid_every = 200\n[search]\nvalue = "validation"', "line 18: interval", "every 200 steps"),
    ('env = "toy/bandit"', 'env = ["toy/{bandit,chain}"]', "cannot", "observations differ"),
    ("[search.space]", "[grid]\nlr = [0.1]\n[search.space]", "grid cannot be combined with [search]", "[search.space]"),
]


@pytest.mark.parametrize(("old", "new", "place", "hint"), WRONG, ids=[new for _, new, _, _ in WRONG])
def test_wrong_searches_are_refused_with_the_line(old: str, new: str, place: str, hint: str) -> None:
    with pytest.raises(UserError) as error:
        read(STUDY.replace(old, new))
    assert place in str(error.value) or place == "cannot"
    assert hint in str(error.value)


def draw(study: Study, folder: Path, count: int) -> list[dict[str, Any]]:
    """Ask for trials, open the journal again before each of them, and tell each value: the learning rate."""
    folder.mkdir(parents=True, exist_ok=True)
    for _ in range(count):
        journal = open_journal(study, folder, create=True)
        assert journal is not None
        assert study.search is not None
        number = len(journal.trials)
        journal.sampler = make_sampler(study.search, number)
        trial = journal.ask({name: p.distribution() for name, p in study.search.space.items()})
        trial.report(trial.params["lr"] / 2, 400)
        journal.tell(trial, trial.params["lr"])
    journal = open_journal(study, folder)
    assert journal is not None
    return [trial.params for trial in journal.trials]


@pytest.mark.parametrize("sampler", ["tpe", "random", "qmc"])
def test_a_search_that_is_opened_again_draws_the_same_values(sampler: str) -> None:
    """`draw` opens the journal before each trial, as after `kill -9`; the other journal is opened once."""
    study = read(STUDY.replace('"random"', f'"{sampler}"').replace("trials = 3", "trials = 12"))
    interrupted = draw(study, Path("a"), 12)
    assert study.search is not None
    Path("b").mkdir()
    journal = open_journal(study, Path("b"), create=True)
    assert journal is not None
    for number in range(12):
        journal.sampler = make_sampler(study.search, number)
        trial = journal.ask({name: p.distribution() for name, p in study.search.space.items()})
        trial.report(trial.params["lr"] / 2, 400)
        journal.tell(trial, trial.params["lr"])
    assert interrupted == [trial.params for trial in journal.trials]
    assert len({tuple(params.values()) for params in interrupted}) == 12


def test_report_has_all_trials_figures_and_the_bias_of_the_best() -> None:
    study = read(STUDY.replace("trials = 3", "trials = 12"))
    folder = Path("runs/s")
    params = draw(study, folder, 12)
    best = best_variant(study, folder)
    assert best is not None
    highest = max(range(12), key=lambda number: params[number]["lr"])
    assert (best.name, best.own_name) == (f"t{highest:04d}", "best")
    assert best.config.tables()["algo"]["lr"] == pytest.approx(params[highest]["lr"], rel=1e-3)
    write_study_report(study, [], folder)
    found = rows("runs/s/search.csv")
    assert [row["trial"] for row in found] == [f"t{number:04d}" for number in range(12)]
    assert [float(row["value"]) for row in found] == pytest.approx([p["lr"] for p in params], rel=1e-4)
    for name in ("history", "importance", "parallel"):
        assert (folder / f"search-{name}.png").stat().st_size > 5_000
    page = (folder / "index.html").read_text()
    assert page.count("data:image/png") >= 3
    assert "biased upwards" in page


def test_search_with_other_settings_is_refused_and_more_trials_are_not() -> None:
    draw(read(), Path("runs/s"), 3)
    more = read(STUDY.replace("trials = 3", "trials = 5"))
    journal = open_journal(more, Path("runs/s"))
    assert journal is not None
    assert remaining_trials(more, journal) == 2
    with pytest.raises(UserError, match="--if-changed new"):
        open_journal(read(STUDY.replace("high = 1e-2", "high = 1e-1")), Path("runs/s"))


def test_incomplete_last_line_of_the_journal_is_removed() -> None:
    study = read()
    before = draw(study, Path("runs/s"), 2)
    journal = Path("runs/s/search/journal.log")
    journal.write_bytes(journal.read_bytes() + b'{"op_code": 4, "work')
    Path("runs/s/search/journal.log.lock").touch()
    assert draw(study, Path("runs/s"), 1)[:2] == before


def test_intermediate_values_are_at_multiples_of_the_interval() -> None:
    study = read()
    trial = make_search_trial(study, Path("runs/s"), 0, {"lr": 1e-3, "torso.width": 8, "memory": "none"})
    assert trial.config.training.log_every == report_interval(study) == 400
    trial.path.mkdir(parents=True)
    table = trial.path / "metrics.csv"
    table.write_text("step,return\n320,nan\n400,nan\n480,0.25\n720,0.5\n1280,1.0\n")
    assert intermediate_values(study, trial, 400) == {400: 0.25, 800: 1.0, 1200: 1.0}


def test_search_trains_trials_prunes_and_trains_the_best_with_fresh_seeds() -> None:
    text = STUDY.replace('sampler = "random"', 'sampler = "random"\npruner = "median"\nstartup = 1')
    Path("s.toml").write_text(text)
    assert run_command(["study", "s.toml", "--jobs", "2"]) == 0
    found = rows("runs/s/search.csv")
    assert len(found) == 3
    assert {row["state"] for row in found} <= {"complete", "stopped early"}
    complete = [row for row in found if row["state"] == "complete"]
    best = max(complete, key=lambda row: float(row["value"]))
    (final,) = rows("runs/s/runs.csv")
    assert (final["run"], final["seed"]) == (f"{best['trial']}-s11", "11")
    assert run_command(["study", "s.toml", "--dry-run"]) == 0
    assert rows("runs/s/search.csv") == found


def test_dry_run_of_a_new_search_has_no_table_of_runs(capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.toml").write_text(STUDY)
    assert run_command(["study", "s.toml", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "3 not started" in output
    assert "trained with these seeds: 11" in output
    assert "runs" not in output
    assert not Path("runs").exists()


@pytest.mark.slow
def test_killed_search_continues_its_trials_and_repeats_none() -> None:
    text = STUDY.replace('"1600"', '"60k"').replace("interval = 400", "interval = 4000")
    Path("s.toml").write_text(text.replace("log_every = 10000", "log_every = 2000\nsave_minutes = 0.02"))
    command = [sys.executable, "-m", "bestiary", "study", "s.toml"]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    study = read_study(Path("s.toml"))
    second = Path("runs/s/search/t0001-s0/checkpoints")
    deadline = time.monotonic() + 300
    while not list(second.glob("0*")) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    journal = open_journal(study, Path("runs/s"))
    assert journal is not None
    assert [trial.state.name for trial in journal.trials] == ["COMPLETE", "RUNNING"]
    before = [trial.params for trial in journal.trials]
    first = Path("runs/s/search/t0000-s0/metrics.csv").stat().st_mtime
    assert run_command(["study", "s.toml"]) == 0
    journal = open_journal(study, Path("runs/s"))
    assert journal is not None
    assert [trial.state.name for trial in journal.trials] == ["COMPLETE"] * 3
    assert [trial.params for trial in journal.trials][:2] == before
    assert Path("runs/s/search/t0000-s0/metrics.csv").stat().st_mtime == first
    assert "bestiary resume" in Path("runs/s/search/logs/t0001-s0.log").read_text()
    assert len(rows("runs/s/runs.csv")) == 1
