"""`bestiary doctor`: is everything here that a training needs?"""

import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import numpy as np

from bestiary.cores import cores


def examine() -> bool:
    """Print one line a check; True where all that is needed is there."""
    checks: list[tuple[str, Callable[[], str], bool]] = [
        ("python", _python, True),
        ("machine", _machine, True),
        ("packages", lambda: _versions("torch", "numpy", "envpool", "gymnasium", "safetensors"), True),
        ("optional", lambda: _optional("tensorboard", "wandb", "ray"), False),
        ("device", _device, True),
        ("probe", _probe, False),
        ("disk", _disk, True),
        ("toy", lambda: _steps("toy/catch"), True),
        ("gymnasium", lambda: _steps("gymnasium/CartPole-v1"), True),
        ("atari", lambda: _steps("atari/Pong"), True),
        ("movies", _movies, True),
    ]
    healthy = True
    for name, check, needed in checks:
        try:
            mark, text = "ok", check()
        except Exception as error:
            mark, text = ("FAILED" if needed else "absent"), f"{type(error).__name__}: {error}"
            healthy = healthy and not needed
        print(f"{name:<10} {mark:<7} {text}")
    return healthy


def _python() -> str:
    return platform.python_version()


def _machine() -> str:
    return f"{platform.system()} {platform.machine()}, {cores()} cores"


def _versions(*names: str) -> str:
    return ", ".join(f"{name} {metadata.version(name)}" for name in names)


def _optional(*names: str) -> str:
    return ", ".join(f"{name} {_version_or_how(name)}" for name in names)


def _version_or_how(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return f"not installed (pip install 'bestiary[{'cluster' if name == 'ray' else name}]')"


def _device() -> str:
    import torch

    if not torch.cuda.is_available():
        return "CPU only"
    return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _probe() -> str:
    from bestiary.runtime.probe import cache_file, read_cache

    path = cache_file()
    if not path.exists():
        return f"no group size measured yet (they go to {path})"
    return f"{len(read_cache(path))} group sizes measured, in {path} (remove it to measure them again)"


def _disk() -> str:
    folder = Path("runs") if Path("runs").is_dir() else Path(".")
    free = shutil.disk_usage(folder).free / 2**30
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(b"x")
    if free < 1:
        raise RuntimeError(f"only {free:.2f} GiB free in {folder.resolve()}")
    return f"{free:.0f} GiB free in {folder.resolve()}"


def _steps(env: str) -> str:
    from bestiary import envs

    pool = envs.make(env, num_envs=4)
    pool.reset()
    start, count = time.perf_counter(), 50
    for _ in range(count):
        pool.send(np.zeros(4, np.int64))
        pool.recv()
    rate = 4 * count / (time.perf_counter() - start)
    pool.close()
    return f"{env}: {rate:,.0f} steps/s with 4 environments"


def _movies() -> str:
    from bestiary.analysis.movie import write_movie

    with tempfile.TemporaryDirectory() as folder:
        for suffix in (".gif", ".mp4"):
            write_movie(Path(folder) / f"test{suffix}", [np.zeros((64, 64, 3), np.uint8)] * 3, fps=10)
    return "GIF and MP4 can be written"
