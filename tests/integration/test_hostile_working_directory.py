"""Commands in a working directory that another person has prepared, for example a downloaded run folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EVIL = "import os\nopen(os.path.join(os.path.dirname(__file__), 'executed'), 'w')\nraise ImportError('executed')\n"
STUDY = """
seeds = [1]
[base]
env = "toy/catch"
steps = 320
runtime = "serial"
num_envs = 4
batch_size = 4
"""


def run_python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300)


def check_that_nothing_is_executed(command: str) -> None:
    """Run a command like the script `bestiary`, which does not search the working directory for modules."""
    repository = Path(__file__).parents[2]
    script = f"import sys; sys.path[0] = {str(repository)!r}; sys.argv[1:] = {command.split()};"
    result = run_python("-c", f"{script} from bestiary.cli.main import main; main()")
    assert not Path("executed").exists()
    assert result.returncode == 0, result.stderr


def test_numba_config_file_is_ignored() -> None:
    """Numba unpickles the files in its cache folder."""
    Path(".numba_config.yaml").write_text("cache_dir: cache\n")
    script = "import bestiary, numba.core.config as config; config.reload_config(); print([config.CACHE_DIR])"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert result.stdout == "['']\n"


@pytest.mark.parametrize("kind", ["pipe", "binary", "LaTeX"])
def test_matplotlib_config_file_is_ignored(kind: str) -> None:
    if kind == "pipe":
        os.mkfifo("matplotlibrc")
    else:
        Path("matplotlibrc").write_bytes(b"\xff\xfe" if kind == "binary" else b"text.usetex: True\n")
    script = (
        "from bestiary.evaluation.figure_helpers import import_pyplot; import os; before = os.getcwd();"
        "print(import_pyplot().rcParams['text.usetex'], os.getcwd() == before)"
    )
    result = run_python("-c", script)
    assert result.stdout == "False True\n", result.stderr


def test_wandb_settings_file_is_ignored() -> None:
    """The file names the server to which W&B sends the API key."""
    Path("wandb").mkdir()
    Path("wandb/settings").write_text("[default]\nbase_url = http://127.0.0.1:9\n")
    script = (
        "import os; os.environ['WANDB_MODE'] = 'offline'; from pathlib import Path; import wandb\n"
        "from bestiary.loggers import LogContext; from bestiary.loggers.wandb_logger import WandbLogger\n"
        "logger = WandbLogger(LogContext(Path('r'), 'n', 'g', {}, 0), WandbLogger.Options())\n"
        "print(logger.run.settings.base_url); logger.close()"
    )
    Path("r").mkdir()
    result = run_python("-c", script)
    assert "127.0.0.1" not in result.stdout, result.stdout
    assert result.stdout.startswith("https://"), result.stderr


def test_loggers_do_not_run_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration of a repository can make git execute commands."""
    Path("bin").mkdir()
    Path("bin/git").write_text(f"#!/bin/sh\ntouch '{Path('executed').absolute()}'\n")
    Path("bin/git").chmod(0o755)
    monkeypatch.setenv("PATH", str(Path("bin").absolute()), prepend=os.pathsep)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", Path("mlruns").absolute().as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    sizes = "--num-envs 4 --batch-size 4 --micro-batch-size 4 --steps 320"
    check_that_nothing_is_executed(f"train toy/catch --logger wandb,mlflow --runtime serial {sizes} --run-dir r")
    assert Path("r/wandb").is_dir()
    assert Path("r/mlflow_id.txt").is_file()


@pytest.mark.parametrize("module", ["threading", "bestiary"])
def test_trials_do_not_import_modules_of_the_working_directory(module: str) -> None:
    Path("s.toml").write_text(STUDY)
    Path(f"{module}.py").write_text(EVIL)
    check_that_nothing_is_executed("study s.toml --jobs 1")


@pytest.mark.xdist_group("ray")
def test_workers_of_a_cluster_do_not_import_modules_of_the_working_directory() -> None:
    for module in ("safetensors", "gymnasium", "numba"):
        Path(f"{module}.py").write_text(EVIL)
    command = "train toy/catch --cluster local --num-envs 4 --rollout-length 5 --steps 320 --run-dir r"
    check_that_nothing_is_executed(command)
