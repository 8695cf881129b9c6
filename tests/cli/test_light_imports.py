"""Commands that do not need heavy packages do not import them (see the docstring of cli/main.py)."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "envpool", "numba", "scipy", "matplotlib", "imageio", "ray", "nicegui")
SCRIPT = """
import sys
from bestiary.cli.main import run_command
try:
    status = run_command(sys.argv[1:])
except SystemExit as exit:
    status = exit.code
print("imported:", *sys.modules)
sys.exit(status)
"""


def imported_by(command: str, status: int = 0, packages: tuple[str, ...] = HEAVY) -> set[str]:
    """Return which of the packages a command imports."""
    result = subprocess.run([sys.executable, "-c", SCRIPT, *command.split()], capture_output=True, text=True)
    assert result.returncode == status, result.stderr
    return set(result.stdout.splitlines()[-1].split()[1:]) & set(packages)


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "--version",
        *(
            f"{name} --help"
            for name in ("resume", "study", "eval", "video", "compare", "audit", "export", "card", "report")
        ),
        *(f"{name} --help" for name in ("view", "runs", "list", "doctor", "bench", "completion", "look")),
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
    packages = (*HEAVY, "gymnasium", "torch._dynamo", "bestiary.training.session")
    assert imported_by(f"train {env} --dry-run", packages=packages) == {"torch"}


CALLBACK = """
import gc
from pathlib import Path
from bestiary.training.callbacks.base import Callback
class Recorder(Callback):
    def on_start(self, session):
        Path("collects.txt").write_text(str(gc.isenabled()))
"""


def test_garbage_is_collected_while_training_but_not_before() -> None:
    """Without garbage collection, a dry run is faster. A training needs it."""
    Path("recorder.py").write_text(CALLBACK)
    script = "import atexit, gc; atexit.register(lambda: print(gc.isenabled())); import bestiary.__main__"
    command = [
        sys.executable,
        "-c",
        script,
        "train",
        "toy/chain",
        "--steps",
        "100",
        "--callback",
        "recorder.py:Recorder",
    ]
    for words, is_enabled in (["--dry-run"], "False"), ([], "True"):
        result = subprocess.run([*command, *words], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-1] == is_enabled
    assert Path("collects.txt").read_text() == "True"
