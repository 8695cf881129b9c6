"""The wheel and the source distribution: they are built, and the wheel works in an empty environment (slow)."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("bestiary", "pyproject.toml", "README.md", "LICENSE")
PROCGEN_STEP = """
import bestiary, numpy as np
env = bestiary.make_env("procgen/starpilot", num_envs=2, seed=1)
env.reset()
env.send(np.zeros(2, np.int64))
step = env.recv()
print(bestiary.__file__, step.observation["image"].shape)
"""
# A command of each kind, and a part of its output.
COMMANDS = {
    "doctor": "atari      ok",
    "list envs": "procgen/starpilot",
    "list studies": "six-games",
    "train --preset hello --steps 3k --name hello --video-at-end off": "runs/hello",
    "eval zoo/pong --episodes 2 --num-envs 2 --max-steps 27000": "zoo-pong",
    "study published/six-games --scale small --dry-run": "popart",
    "export zoo/warehouse-iam --format torch --out agent.pt2": "agent.pt2",
}


def run(*command: str | Path, folder: Path) -> str:
    """Run a command outside of the repository and return its output, with messages. Fail if the command fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert result.returncode == 0, f"{command}: {result.stdout[-2000:]}{result.stderr[-2000:]}"
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source distribution and the wheel from a copy of the repository. Return their folder."""
    folder = tmp_path_factory.mktemp("build")
    (folder / "source").mkdir()
    for name in SOURCES:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copyfile
        copy(source, folder / "source" / name)
    run(sys.executable, "-m", "build", "--outdir", folder / "dist", folder / "source", folder=folder)
    return folder / "dist"


def check_installation(bin_folder: Path, folder: Path) -> None:
    """Run commands of an installed package, and check that no module of the repository is imported."""
    imported = run(bin_folder / "python", "-c", PROCGEN_STEP, folder=folder)
    assert f"{ROOT}{os.sep}" not in imported
    assert str(bin_folder.parent) in imported
    assert "(2, 3, 64, 64)" in imported
    for command, expected in COMMANDS.items():
        assert expected in run(bin_folder / "bestiary", *command.split(), folder=folder), command


@pytest.mark.slow
def test_the_distributions_pass_the_checks_of_the_package_index(distributions: Path) -> None:
    files = sorted(distributions.iterdir())
    assert [path.suffix for path in files] == [".whl", ".gz"]
    run(sys.executable, "-m", "twine", "check", "--strict", *files, folder=distributions)


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(distributions: Path, tmp_path: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv", folder=tmp_path)
    bin_folder = tmp_path / "venv" / "bin"
    pip = (bin_folder / "python", "-m", "pip", "install", "--quiet")
    run(*pip, "--constraint", ROOT / "constraints.txt", wheel, folder=tmp_path)
    check_installation(bin_folder, tmp_path)


@pytest.mark.slow
def test_uv_installs_the_wheel(distributions: Path, tmp_path: Path) -> None:
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        pytest.skip("uv is not installed")
    (wheel,) = distributions.glob("*.whl")
    run(uv, "venv", "--python", sys.executable, tmp_path / "venv", folder=tmp_path)
    links = [word for folder in os.environ.get("PIP_FIND_LINKS", "").split() for word in ("--find-links", folder)]
    python = tmp_path / "venv" / "bin" / "python"
    options: list[str | Path] = ["--python", python, "--constraint", ROOT / "constraints.txt", *links]
    run(uv, "pip", "install", *options, wheel, folder=tmp_path)
    check_installation(tmp_path / "venv" / "bin", tmp_path)
