"""Commands that do not need heavy packages do not import them (see the docstring of cli/main.py)."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "envpool", "numba", "scipy", "matplotlib", "imageio", "ray")
SCRIPT = f"""
import sys
from bestiary.cli.main import run_command
try:
    status = run_command(sys.argv[1:])
except SystemExit as exit:
    status = exit.code
print("imported:", *(name for name in {HEAVY} if name in sys.modules))
sys.exit(status)
"""


def imported_by(command: str, status: int = 0) -> set[str]:
    """Return which of the packages HEAVY a command imports."""
    result = subprocess.run([sys.executable, "-c", SCRIPT, *command.split()], capture_output=True, text=True)
    assert result.returncode == status, result.stderr
    return set(result.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "--version",
        *(f"{name} --help" for name in ("resume", "study", "eval", "video", "compare", "audit", "export", "report")),
        *(f"{name} --help" for name in ("runs", "list", "doctor", "bench", "completion", "look")),
        "eval --env warehouse --help",
        "list envs",
        "list presets",
        "list zoo",
        *(f"list rewards {env}" for env in ("atari/Riverraid", "procgen/maze", "warehouse", "gymnasium/CartPole-v1")),
    ],
)
def test_help_and_lists_import_no_heavy_package(command: str) -> None:
    assert imported_by(command) == set()


def test_errors_in_arguments_import_no_heavy_package() -> None:
    assert imported_by("compare runs/a --smoth 3", status=2) == set()
    assert imported_by("completion tcsh", status=2) == set()


def test_runs_and_compare_read_runs_without_torch(tmp_path: Path) -> None:
    zoo = Path(__file__).parents[2] / "bestiary" / "zoo"
    assert imported_by(f"runs {zoo}") == set()
    assert imported_by(f"compare zoo/pong --out {tmp_path}/curves.png") <= {"matplotlib"}


@pytest.mark.parametrize("env", ["atari/Pong", "warehouse"])
def test_a_dry_run_imports_only_what_the_network_needs(env: str) -> None:
    assert imported_by(f"train {env} --dry-run") == {"torch"}
