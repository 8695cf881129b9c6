"""What runs there are, and what those that are being trained are doing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bestiary.cli import run_command
from tests.test_faults import BESTIARY, wait_until


def test_runs_that_are_being_trained_are_shown_live(capsys: pytest.CaptureFixture[str]) -> None:
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
        for column in ("steps/s", "lag", "restarts", "bound by"):
            assert column in output
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    assert run_command(["runs", "--live"]) == 0
    assert "runs/going" not in capsys.readouterr().out


def test_on_a_terminal_it_goes_on_until_it_is_stopped() -> None:
    main, terminal = os.openpty()
    words = [sys.executable, "-m", "bestiary", "runs", "--live", "."]
    process = subprocess.Popen(
        words,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # where the tests themselves ignore Ctrl-C
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
