"""Command `doctor`: check this machine and the installed packages.

Packages are imported inside the checks, so that a broken package causes a failed check and not a crash.
"""

import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import numpy as np

from bestiary.cli.arguments import Parser
from bestiary.utils.cpu import num_cores
from bestiary.utils.errors import RunError


def doctor(argv: list[str]) -> None:
    """Print the results of all checks. Raise RunError if a required check fails."""
    parser = Parser(
        "doctor",
        "Check this machine: package versions, devices, disk space, speed of the environments, and writing of videos. "
        "The exit status is 1 if a required check fails.",
    )
    parser.parse_strictly(argv)
    if not run_checks():
        raise RunError("a required check failed; see the lines marked FAILED")


def run_checks() -> bool:
    """Print one line per check and return whether all required checks passed."""
    # Each check: name, function that returns a description or raises an exception, whether the check is required.
    checks: list[tuple[str, Callable[[], str], bool]] = [
        ("python", _python, True),
        ("machine", _machine, True),
        ("packages", lambda: _package_versions("torch", "numpy", "envpool", "gymnasium", "safetensors"), True),
        ("optional", lambda: _optional_versions("tensorboard", "wandb", "mlflow", "optuna", "ray"), False),
        ("device", _device, True),
        ("envpool", _envpool_calls, True),
        ("autotune", _micro_batch_cache, False),
        ("disk", _disk, True),
        ("toy", lambda: _measure_env("toy/catch"), True),
        ("gymnasium", lambda: _measure_env("gymnasium/CartPole-v1"), True),
        ("atari", lambda: _measure_env("atari/Pong"), True),
        ("procgen", lambda: _measure_env("procgen/coinrun"), True),
        ("warehouse", lambda: _measure_env("warehouse"), True),
        ("video", _write_videos, True),
    ]
    passed = True
    for name, check, required in checks:
        try:
            text = check()
            status = "ok"
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            status = "FAILED" if required else "absent"
            passed = passed and not required
        print(f"{name:<10} {status:<7} {text}")
    return passed


def _python() -> str:
    return platform.python_version()


def _machine() -> str:
    return f"{platform.system()} {platform.machine()}, {num_cores()} cores"


def _package_versions(*names: str) -> str:
    return ", ".join(f"{name} {metadata.version(name)}" for name in names)


# Package -> the extra of Bestiary that installs the package, for packages whose extra has another name.
EXTRAS = {"ray": "cluster", "optuna": "search"}


def _optional_versions(*names: str) -> str:
    return ", ".join(f"{name} {_version_or_hint(name)}" for name in names)


def _version_or_hint(name: str) -> str:
    """Return the version of a package. If it is not installed, return how to install it."""
    try:
        return metadata.version("mlflow-skinny" if name == "mlflow" else name)
    except metadata.PackageNotFoundError:
        return f"not installed (pip install 'bestiary[{EXTRAS.get(name, name)}]')"


def _device() -> str:
    import torch

    if not torch.cuda.is_available():
        return "CPU only"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _envpool_calls() -> str:
    from bestiary.envs.envpool_backend import inner_calls_work

    methods = "internal methods of EnvPool (fast)" if inner_calls_work() else "public methods of EnvPool (slower)"
    return f"environments are stepped with the {methods}"


def _micro_batch_cache() -> str:
    from bestiary.training.micro_batch_tuning import cache_file, read_cache

    path = cache_file()
    if not path.exists():
        return f"no micro-batch size has been measured yet; the sizes will be stored in {path}"
    return f"{len(read_cache(path))} measured micro-batch sizes are stored in {path} (delete the file to measure again)"


def _disk() -> str:
    folder = Path("runs") if Path("runs").is_dir() else Path(".")
    free = shutil.disk_usage(folder).free / 2**30
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(b"x")
    if free < 1:
        raise RuntimeError(f"only {free:.2f} GiB are free in {folder.resolve()}; free at least 1 GiB")
    return f"{free:.0f} GiB free in {folder.resolve()}"


def _measure_env(env: str) -> str:
    """Step 4 environments with action 0 and return a description of their speed."""
    from bestiary import envs

    pool = envs.make_env(env, num_envs=4)
    pool.reset()
    num_steps = 50
    start = time.perf_counter()
    for _ in range(num_steps):
        pool.send(np.zeros(4, np.int64))
        pool.recv()
    rate = 4 * num_steps / (time.perf_counter() - start)
    pool.close()
    return f"{env}: {rate:,.0f} steps/s with 4 environments"


def _write_videos() -> str:
    from bestiary.evaluation.video import write_video

    with tempfile.TemporaryDirectory() as folder:
        for suffix in (".gif", ".mp4"):
            write_video(Path(folder) / f"test{suffix}", [np.zeros((64, 64, 3), np.uint8)] * 3, fps=10)
    return "GIF and MP4 can be written"
