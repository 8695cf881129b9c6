"""The command `bestiary runs`, with and without --live."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bestiary.cli.main import run_command
from bestiary.runs import listing
from bestiary.runs.listing import describe_run
from bestiary.runs.run import Run
from bestiary.utils.errors import UserError
from tests.integration.test_faults import BESTIARY, wait_until


def test_live_table_shows_only_running_trainings(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["train", "toy/bandit", "--steps", "1k", "--name", "finished"]) == 0
    words = ["train", "toy/catch", "--num-envs", "8", "--steps", "100M", "--log-every", "100", "--name", "going"]
    process = subprocess.Popen([*BESTIARY, *words], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: Path("runs/going/metrics.csv").exists())
        capsys.readouterr()
        assert run_command(["runs", "--live"]) == 0
        output = capsys.readouterr().out
        assert "runs/going" in output
        assert "toy/catch" in output
        assert "runs/finished" not in output
        for column in ("steps/s", "policy lag", "restarts", "bottleneck"):
            assert column in output
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    assert run_command(["runs", "--live"]) == 0
    assert "runs/going" not in capsys.readouterr().out


def test_live_table_on_a_terminal_is_updated_until_interrupted() -> None:
    main, terminal = os.openpty()
    words = [sys.executable, "-m", "bestiary", "runs", "--live", "."]
    process = subprocess.Popen(
        words,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # the test process may ignore Ctrl-C
    )
    os.close(terminal)
    try:
        shown = b""
        while b"restarts" not in shown:
            shown += os.read(main, 10_000)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        os.close(main)


def make_run(name: str, metrics: str = "", owner: bool = False) -> Path:
    """Create a run folder with a config.toml, and without the files that `bestiary runs` does not read."""
    path = Path("runs") / name
    path.mkdir(parents=True)
    (path / "config.toml").write_text('steps = 1000\nseed = 1\n[env]\nname = ["toy/catch"]\n')
    (path / "metrics.csv").write_text(metrics)
    if owner:
        (path / "lock_owner.json").write_text('{"pid": 1, "host": "h"}')
    return path


def test_crashed_and_interrupted_runs_are_told_apart() -> None:
    assert describe_run(make_run("a", owner=True))[-1] == "crashed"
    assert describe_run(make_run("b"))[-1] == "interrupted"


def test_run_that_an_error_ended_is_crashed_and_a_stopped_run_is_interrupted() -> None:
    path = make_run("error")
    with pytest.raises(RuntimeError), Run(path).lock():
        raise RuntimeError("the environment failed")
    assert describe_run(path)[-1] == "crashed"
    with pytest.raises(KeyboardInterrupt), Run(path).lock():
        raise KeyboardInterrupt
    assert describe_run(path)[-1] == "interrupted"


def test_refused_resume_does_not_change_the_state() -> None:
    for name, expected in (("killed", "crashed"), ("stopped", "interrupted")):
        path = make_run(name, owner=expected == "crashed")
        with pytest.raises(UserError), Run(path).lock():
            raise UserError("--steps 1: too small")
        assert describe_run(path)[-1] == expected


def test_returns_of_unfinished_first_games_are_marked() -> None:
    columns = "step,seconds,envs_in_first_game,return\n500,1.0,{},10\n"
    assert "10 (26 environments in their first game)" in describe_run(make_run("early", columns.format(26)))
    assert "10" in describe_run(make_run("late", columns.format(0)))


def test_returns_are_shown_with_the_names_of_tasks_and_rewards() -> None:
    columns = "step,seconds,atari/Pong/return,atari/Breakout/return\n500,1.0,-20.5,nan\n"
    assert "Pong -20.5, Breakout -" in describe_run(make_run("tasks", columns))
    columns = "step,seconds,training_return,true_return,return\n500,1.0,7.5,2.25,7.5\n"
    assert "training 7.5 true 2.25" in describe_run(make_run("rewards", columns))


def test_run_that_is_removed_during_the_search_does_not_end_the_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("runs/a").mkdir(parents=True)
    monkeypatch.setattr(listing, "list_run_folders", lambda folder: [folder / "a", folder / "removed"])
    assert set(listing.find_runs(Path("runs"))) == {Path("runs/a"), Path("runs/removed")}
