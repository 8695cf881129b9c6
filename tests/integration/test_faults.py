"""Real faults: signals, kill -9 at each point of a save, a full disk, NaN, broken environments, damaged files."""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import bestiary
from bestiary.cli.main import run_command
from bestiary.config.resolve import resolve
from bestiary.runs import run as run_module
from bestiary.runs.run import RunLocation, create_run, open_run
from bestiary.utils.errors import UserError

BESTIARY = [sys.executable, "-m", "bestiary"]
TOY = ["toy/recall", "--memory", "lstm", "--memory.hidden", "32", "--num-envs", "4", "--batch-size", "4"]


def bestiary_command(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output and exit status.

    It runs in this process, which is faster, unless environment variables are given.
    """
    if env is not None:
        environment = {**os.environ, **env}
        return subprocess.run([*BESTIARY, *args], capture_output=True, text=True, env=environment, timeout=120)
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        status = run_command(list(args))
    return subprocess.CompletedProcess(args, status, printed.getvalue(), errors.getvalue())


def wait_until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.05)


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_saves_a_checkpoint_and_prints_the_resume_command(signum: int, status: int) -> None:
    process = subprocess.Popen(
        [*BESTIARY, "train", *TOY, "--steps", "100M", "--run-dir", "r"],
        stderr=subprocess.PIPE,
        text=True,
        # A test suite that was started with nohup ignores SIGHUP, and so would its child processes.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    wait_until(lambda: Path("r/metrics.csv").exists())
    second = bestiary_command("resume", "r")  # a running run is locked
    assert second.returncode == 2
    assert f"another process (pid {process.pid} on" in second.stderr
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert "bestiary resume r" in errors
    assert "Traceback" not in errors
    newest = open_run("r").checkpoints[-1]
    assert newest.steps > 0
    assert newest.find_damage() is None
    assert not Path("r/lock.json").exists()
    resumed = bestiary_command("resume", "r", "--steps", str(newest.steps + 2_000))
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming r at step {newest.steps}" in resumed.stderr


STUCK_ENV = """
import time, gymnasium, numpy as np
from gymnasium.spaces import Box, Discrete
class Stuck(gymnasium.Env):
    observation_space, action_space, steps = Box(-1, 1, (2,)), Discrete(2), 0
    def reset(self, seed=None, options=None):
        return np.zeros(2, np.float32), {}
    def step(self, action):
        self.steps += 1
        if self.steps == 200:
            open("stuck", "w").close()
            time.sleep(1e5)
        return np.zeros(2, np.float32), 0.0, self.steps % 10 == 0, False, {}
"""


def test_signal_stops_a_run_whose_environment_hangs() -> None:
    Path("stuck.py").write_text(STUCK_ENV)
    command = ["train", "stuck.py:Stuck", "--num-envs", "4", "--batch-size", "2", "--steps", "1M", "--run-dir", "r"]
    process = subprocess.Popen([*BESTIARY, *command], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: Path("stuck").exists())
    time.sleep(6)  # longer than the time after which an actor counts as stuck
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "bestiary resume r" in errors
    assert open_run("r").checkpoints[-1].find_damage() is None


SHORT_STALL = """
import sys
from bestiary.cli.main import main
from bestiary.training import stall_monitor
stall_monitor.STALL_WARNING_SECONDS = 1.0
main(sys.argv[1:])
"""


@pytest.mark.parametrize("runtime", ["serial", "local"])
def test_hanging_environment_is_named_and_ctrl_c_stops_the_run(runtime: str) -> None:
    Path("stuck.py").write_text(STUCK_ENV)
    options = ["--num-envs", "4", "--batch-size", "2", "--save-every", "100", "--steps", "1M", "--run-dir", "r"]
    command = [sys.executable, "-c", SHORT_STALL, "train", "stuck.py:Stuck", "--runtime", runtime, *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    warning = next(line for line in process.stderr if "did not return" in line)
    assert "stuck.py:Stuck (environments " in warning
    assert "stuck.py, line 12, in step" in warning
    process.send_signal(signal.SIGINT)
    if runtime == "serial":  # the update, after which a checkpoint would be saved, never ends
        assert any("send the signal again" in line for line in process.stderr)
        time.sleep(1.5)  # signals within 1 s count as one
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert open_run("r").checkpoints[-1].find_damage() is None


KILL_IN_SAVE = """
import os, signal, sys
import bestiary
from bestiary.runs.run import open_run
from bestiary.api import resume

SMALL = dict(runtime="serial", num_envs=4, batch_size=4, rollout_length=10, steps=2000, save_every=400)
OPTIONS = {**SMALL, "env": "toy/recall", "memory": "lstm", "memory.hidden": 32}


def run_in_child(function):
    child = os.fork()
    if child == 0:
        function()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def kill_at(name, count):
    # Replace a function of os: the count-th call kills this process with SIGKILL.
    original, calls = getattr(os, name), [0]

    def call(*args, **kwargs):
        calls[0] += 1
        if calls[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(os, name, call)


def run_until_killed(path, name, count):
    kill_at(name, count)
    bestiary.train(run_dir=path, **OPTIONS)


bestiary.train(run_dir="uninterrupted", **OPTIONS)
# A save calls fsync 7 times: for 5 files, their folder and, after the rename, the parent folder.
points = [("fsync", 8 + k) for k in range(7)] + [("rename", 2), ("fsync", 1), ("symlink", 4), ("unlink", 3)]
for index, (name, count) in enumerate(points):
    path = f"killed{index}"
    status = run_in_child(lambda: run_until_killed(path, name, count))
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == 9, (name, count, status)
    assert run_in_child(lambda: resume(open_run(path))) == 0, (name, count)
    for file in ("model", "optimizer", "actor"):
        contents = [open(f"{p}/checkpoints/latest/{file}.safetensors", "rb").read() for p in ("uninterrupted", path)]
        assert contents[0] == contents[1], (name, count, file)
    assert open(f"{path}/episodes.csv").read() == open("uninterrupted/episodes.csv").read(), (name, count)
    assert not [f for f in os.listdir(f"{path}/checkpoints") if f.startswith(".saving")], (name, count)
print("points", len(points))
"""


def test_kill_at_each_point_of_a_save_loses_nothing() -> None:
    result = subprocess.run([sys.executable, "-c", KILL_IN_SAVE], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "points 11" in result.stdout


def test_killed_run_can_be_resumed() -> None:
    process = subprocess.Popen([*BESTIARY, "train", *TOY, "--steps", "100M", "--run-dir", "r", "--save-every", "400"])
    wait_until(lambda: Path("r/checkpoints/latest").exists())
    process.kill()
    process.wait()
    before = open_run("r").steps
    result = bestiary_command("resume", "r", "--steps", str(before + 1_000))
    assert result.returncode == 0, result.stderr
    assert "did not end cleanly" in result.stderr
    assert open_run("r").steps >= before + 1_000


KILL_WHILE_REPLACING = """
import os, signal, sys
from pathlib import Path
from bestiary.cli.main import main

replace = os.replace


def replace_or_die(source, target, **options):
    if Path(target).name == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target, **options)


os.replace = replace_or_die
main(sys.argv[2:])
"""


@pytest.mark.parametrize("name", ["lock_owner.json", "run_id.txt", "config.toml", "episodes.csv", "latest"])
def test_same_command_continues_after_a_kill_while_a_file_is_replaced(name: str) -> None:
    command = ["train", *TOY, "--runtime", "serial", "--steps", "400", "--run-dir", "r", "--if-exists", "resume"]
    killed = subprocess.run([sys.executable, "-c", KILL_WHILE_REPLACING, name, *command], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    result = bestiary_command(*command)
    assert result.returncode == 0, result.stderr
    assert open_run("r").steps >= 400
    entries = [entry.name for entry in (*Path("r").iterdir(), *Path("r/checkpoints").iterdir())]
    assert not any(entry.startswith(".") for entry in entries)


@pytest.mark.parametrize("if_exists", ["error", "resume"])
def test_folder_with_other_files_is_not_used_for_a_new_run(if_exists: str) -> None:
    Path("r").mkdir()
    for name in ("lock", "notes.txt"):
        Path("r", name).touch()
    result = bestiary_command("train", *TOY, "--steps", "400", "--run-dir", "r", "--if-exists", if_exists)
    assert result.returncode == 2
    assert "is not a run folder" in result.stderr


def test_refused_resume_does_not_rename_checkpoints() -> None:
    run = bestiary.train(run_dir="r", env="toy/recall", num_envs=4, batch_size=4, steps=2_000, save_every=500)
    before = sorted(os.listdir("r/checkpoints"))
    config = run.path / "config.toml"
    config.write_text(config.read_text().replace("seed = 1\n", "seed = 2\n"))
    command = ("resume", "r", "--checkpoint", "500", "--steps", "3000")
    result = bestiary_command(*command)
    assert result.returncode == 2
    assert "seed" in result.stderr
    assert sorted(os.listdir("r/checkpoints")) == before
    assert bestiary_command(*command, "--accept-changes").returncode == 0
    assert any(name.startswith("abandoned-") for name in os.listdir("r/checkpoints"))


def test_checkpoints_that_cannot_be_listed_do_not_restart_the_run() -> None:
    run = bestiary.train(run_dir="r", env="toy/recall", num_envs=4, batch_size=4, steps=400)
    rows = (run.path / "episodes.csv").read_bytes()
    shutil.rmtree("r/checkpoints")
    Path("r/checkpoints").touch()
    result = bestiary_command("resume", "r", "--steps", "800")
    assert result.returncode == 2
    assert "r/checkpoints cannot be read" in result.stderr
    assert (run.path / "episodes.csv").read_bytes() == rows


FULL_DISK = """
import resource, sys
from bestiary.cli.main import main
from bestiary.training.callbacks import checkpoints
checkpoints.FIRST_RETRY_SECONDS = checkpoints.FINAL_SAVE_SECONDS = 0.0
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))  # maximum file size: a real EFBIG
main(sys.argv[1:])
"""


def run_on_full_disk(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", FULL_DISK, *command], capture_output=True, text=True, timeout=120)


def test_full_disk_stops_the_run_only_after_the_number_of_failed_saves_that_the_user_set() -> None:
    command = ["train", *TOY, "--steps", "40k", "--save-every", "4k", "--run-dir", "r"]
    result = run_on_full_disk(*command, "--max-failed-saves", "3")
    assert result.returncode == 1
    assert result.stderr.count("was not saved") == 3
    assert "saves failed (File too large)" in result.stderr
    assert "--max-failed-saves 3" in result.stderr
    assert "Traceback" not in result.stderr
    assert open_run("r").checkpoints == []
    assert list(Path("r/checkpoints").iterdir()) == []  # no partial files remain


def test_training_on_a_full_disk_continues_to_its_end() -> None:
    result = run_on_full_disk("train", *TOY, "--steps", "8k", "--save-every", "400", "--run-dir", "r")
    assert result.returncode == 1
    assert "training continues" in result.stderr
    assert "the final state of r could not be saved (File too large)" in result.stderr
    assert len(open_run("r").metrics["step"]) > 0


def test_previous_checkpoint_remains_if_the_disk_is_full() -> None:
    first = bestiary.train(run_dir="r", env="toy/recall", num_envs=4, batch_size=4, steps=2_000)
    steps, model = first.steps, (first.path / "checkpoints/latest/model.safetensors").read_bytes()
    result = run_on_full_disk("resume", "r", "--steps", "4k")
    assert result.returncode == 1
    assert "could not be saved" in result.stderr
    run = open_run("r")
    assert run.steps == steps
    assert (run.path / "checkpoints/latest/model.safetensors").read_bytes() == model
    assert bestiary_command("resume", "r", "--steps", "3k").returncode == 0


UNWRITABLE_OUTPUT = """
import sys
from bestiary.cli.main import main
from bestiary.training.callbacks import progress
progress.SECONDS_BETWEEN_LINES = 0.0
main(sys.argv[1:])
"""


@pytest.mark.parametrize("target", ["full", "closed pipe"])
def test_output_that_cannot_be_written_does_not_stop_the_run(target: str) -> None:
    command = ["train", *TOY, "--steps", "8k", "--run-dir", "r"]
    script = [sys.executable, "-c", UNWRITABLE_OUTPUT]
    if target == "full":
        with open("/dev/full", "w") as full:
            process = subprocess.Popen([*script, *command], stderr=full)
    else:
        process = subprocess.Popen([*script, *command], stderr=subprocess.PIPE)
        assert process.stderr is not None
        process.stderr.readline()
        process.stderr.close()
    assert process.wait(timeout=120) == 0
    run = open_run("r")
    assert run.steps >= 8_000
    assert run.checkpoints[-1].find_damage() is None


def test_run_whose_output_streams_are_closed_is_trained_and_saved() -> None:
    command = " ".join([*BESTIARY, "train", *TOY, "--steps", "2k", "--run-dir", "r"])
    assert subprocess.run(["sh", "-c", f"exec {command} <&- >&- 2>&-"], timeout=120).returncode == 0
    run = open_run("r")
    assert run.steps >= 2_000
    assert run.metrics["step"][-1] == run.steps


def test_table_that_cannot_be_written_does_not_prevent_checkpoints() -> None:
    process = subprocess.Popen(
        [*BESTIARY, "train", *TOY, "--steps", "100M", "--save-every", "400", "--log-every", "80", "--run-dir", "r"],
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: Path("r/checkpoints/latest").exists())
    Path("r/metrics.csv").unlink()
    Path("r/metrics.csv").mkdir()
    before = open_run("r").steps
    wait_until(lambda: open_run("r").steps > before + 800)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "of metrics.csv could not be written" in errors
    assert open_run("r").checkpoints[-1].find_damage() is None


def test_recording_continues_in_memory_while_the_disk_is_full() -> None:
    result = run_on_full_disk("train", *TOY, "--steps", "10k", "--run-dir", "r", "--record", "--runtime", "serial")
    assert "the recording cannot be written now" in result.stderr
    assert "the final state of r could not be saved" in result.stderr  # training reached its end
    assert "Traceback" not in result.stderr


BROKEN_ENV = """
import gymnasium, numpy as np
from gymnasium.spaces import Box, Discrete


class Broken(gymnasium.Env):
    observation_space, action_space = Box(-1, 1, (2,)), Discrete(2)

    def __init__(self, *, how: str = "", after: int = 30):
        self.how = how
        self.after = after
        self.clock = 0

    def reset(self, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.clock += 1
        broken = self.clock > self.after
        if broken and self.how == "raise":
            raise ZeroDivisionError("simulation failed")
        if broken and self.how == "exit":
            raise SystemExit(0)
        if broken and self.how == "base":
            raise type("Odd", (BaseException,), {})("simulation failed")
        terminated = self.clock % 10 == 0
        if broken and self.how == "flag":
            terminated = "no"
        observation = np.full(2, np.nan if broken and self.how == "nan" else 0.5, np.float32)
        if broken and self.how == "shape":
            observation = np.zeros(3, np.float32)
        reward = 1.0
        if broken and self.how == "nan-reward":
            reward = float("nan")
        if broken and self.how == "huge":
            reward = 1e30
        return observation, reward, terminated, False, {}
"""


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", ("env.py, line", "ZeroDivisionError: simulation failed")),
        ("exit", ("env.py, line", "SystemExit")),
        ("base", ("env.py, line", "Odd: simulation failed")),
        ("flag", ("env.py:Broken: step returned terminated, which is str", "True or False")),
        ("nan", ("environment 0", "observation vector that is not finite", "at step")),
        ("nan-reward", ("environment 0", "reward that is not finite", "at step")),
        ("shape", ("env.py:Broken: observation after step", "should be float32[2], got float32[3]")),
    ],
)
def test_error_of_an_environment_stops_the_run_and_names_the_environment(how: str, words: tuple[str, ...]) -> None:
    Path("env.py").write_text(BROKEN_ENV)
    options = ["--num-envs", "4", "--batch-size", "4", "--rollout-length", "5", "--save-every", "40"]
    result = bestiary_command("train", "env.py:Broken", "--how", how, "--steps", "10k", "--run-dir", "r", *options)
    assert result.returncode == 1, result.stderr
    for word in words:
        assert word in result.stderr
    assert "Traceback" not in result.stderr
    run = open_run("r")
    assert run.checkpoints[-1].find_damage() is None  # the last good checkpoint remains
    assert run.steps <= 4 * 30


def test_non_finite_updates_are_skipped_counted_not_saved_and_stop_the_run() -> None:
    Path("env.py").write_text(BROKEN_ENV)
    options = [
        "--num-envs",
        "4",
        "--batch-size",
        "4",
        "--rollout-length",
        "5",
        "--save-every",
        "20",
        "--log-every",
        "20",
    ]
    extra = ["--algo.reward-clipping", "none", "--max-skipped-updates", "3", "--steps", "10k", "--run-dir", "r"]
    result = bestiary_command("train", "env.py:Broken", "--how", "huge", *extra, *options)
    assert result.returncode == 1, result.stderr
    assert "3 consecutive updates were not finite" in result.stderr
    run = open_run("r")
    assert all(weights.isfinite().all() for weights in run.agent().parameters())
    assert run.steps <= 4 * 30
    assert run.metrics["skipped_updates"][-1] == 2


def test_run_folder_contains_no_secrets_of_the_environment_variables() -> None:
    secret = "canary-4f1c9a"
    env = {"AWS_SECRET_ACCESS_KEY": secret, "HF_TOKEN": secret, "WANDB_API_KEY": secret * 4, "WANDB_MODE": "offline"}
    command = ["train", *TOY, "--steps", "2k", "--run-dir", "r", "--logger", "tensorboard,wandb"]
    result = bestiary_command(*command, env=env)
    assert result.returncode == 0, result.stderr
    written = [path for path in Path("r").rglob("*") if path.is_file()]
    assert any("tfevents" in path.name for path in written)
    run_id = Path("r/wandb_id.txt").read_text()
    assert [path.name for path in written if path.suffix == ".wandb"] == [f"run-{run_id}.wandb"]
    for path in written:
        assert secret.encode() not in path.read_bytes(), path


WITHOUT_WANDB = "import sys; sys.modules['wandb'] = None; from bestiary.cli.main import main; main(sys.argv[1:])"


def test_missing_logger_package_is_reported_before_training() -> None:
    command = ["train", *TOY, "--steps", "2k", "--run-dir", "r", "--logger", "wandb"]
    result = subprocess.run([sys.executable, "-c", WITHOUT_WANDB, *command], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert "pip install 'bestiary[wandb]'" in result.stderr
    assert not Path("r").exists()


def test_failing_logger_does_not_stop_the_training() -> None:
    env = {"WANDB_API_KEY": "not a key", "WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9"}
    env |= {"WANDB_INIT_TIMEOUT": "3", "WANDB_HTTP_TIMEOUT": "1"}
    result = bestiary_command("train", *TOY, "--steps", "2k", "--run-dir", "r", "--logger", "wandb", env=env)
    assert result.returncode == 0, result.stderr
    assert "logger wandb is not available" in result.stderr
    assert open_run("r").steps >= 2_000
    assert len(open_run("r").metrics["step"]) > 0


def test_resume_with_an_empty_checkpoint_is_rejected() -> None:
    run = bestiary.train(run_dir="r", env="toy/recall", num_envs=4, batch_size=4, steps=2_000)
    for file in run.checkpoints[-1].path.iterdir():
        file.unlink()
    rows = (run.path / "metrics.csv").read_bytes()
    result = bestiary_command("resume", "r")
    assert result.returncode == 2
    assert "is damaged" in result.stderr
    assert "bestiary train --config r/config.toml" in result.stderr
    assert (run.path / "metrics.csv").read_bytes() == rows


def test_runs_started_at_the_same_time_get_different_folders() -> None:
    command = [*BESTIARY, "train", "toy/bandit", "--steps", "1k"]
    started = [subprocess.Popen([*command, "--seed", str(seed)], stderr=subprocess.DEVNULL) for seed in (1, 2)]
    assert [process.wait(timeout=120) for process in started] == [0, 0]
    runs = [path for path in Path("runs").iterdir() if not path.is_symlink()]
    assert sorted(open_run(path).raw_config["seed"] for path in runs) == [1, 2]


def test_damaged_newest_checkpoint_is_rejected_and_the_last_good_one_suggested() -> None:
    run = bestiary.train(run_dir="r", env="toy/recall", num_envs=4, batch_size=4, steps=2_000, save_every=500)
    newest = run.checkpoints[-1].path / "optimizer.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    good = run.checkpoints[-2].steps
    result = bestiary_command("resume", "r", "--steps", "3k")
    assert result.returncode == 2
    assert f"--checkpoint {good}" in result.stderr
    resumed = bestiary_command("resume", "r", "--steps", "3k", "--checkpoint", str(good))
    assert resumed.returncode == 0, resumed.stderr
    assert open_run("r").steps >= 3_000


CHDIR_ENV = """
import os, gymnasium, numpy as np
from gymnasium.spaces import Box, Discrete
class Moving(gymnasium.Env):
    observation_space, action_space = Box(-1, 1, (2,)), Discrete(2)
    def __init__(self):
        self.steps = 0
        os.chdir("/")
    def reset(self, seed=None, options=None):
        return np.zeros(2, np.float32), {}
    def step(self, action):
        os.chdir("/")
        self.steps += 1
        return np.zeros(2, np.float32), 0.0, self.steps % 10 == 0, False, {}
"""


def test_environment_may_change_the_working_directory() -> None:
    Path("moving.py").write_text(CHDIR_ENV)
    folder = Path.cwd()
    options = ["--num-envs", "4", "--batch-size", "4", "--rollout-length", "5", "--save-every", "100"]
    result = bestiary_command("train", "moving.py:Moving", *options, "--steps", "400", "--run-dir", "r")
    os.chdir(folder)
    assert result.returncode == 0, result.stderr
    run = open_run("r")
    assert run.steps == 400
    assert len(run.episodes["step"]) > 0
    assert not (run.path / "lock_owner.json").exists()


STREAM_ENV = """
import os, shutil, sys, tempfile, gymnasium, numpy as np
from gymnasium.spaces import Box, Discrete
class Closing(gymnasium.Env):
    observation_space, action_space = Box(-1, 1, (2,)), Discrete(2)
    def __init__(self, *, how: str = ""):
        self.how = how
        self.steps = 0
    def reset(self, seed=None, options=None):
        return np.zeros(2, np.float32), {}
    def step(self, action):
        self.steps += 1
        if self.steps == 30 and self.how == "close":
            sys.stdout.close()
            sys.stderr.close()
        if self.steps == 30 and self.how == "none":
            sys.stdout = sys.stderr = None
        if self.steps == 30 and self.how == "folder":
            os.chdir(tempfile.mkdtemp(dir=os.path.dirname(os.path.abspath(__file__))))
            os.rmdir(os.getcwd())
        return np.zeros(2, np.float32), 0.0, self.steps % 10 == 0, False, {}
"""


@pytest.mark.parametrize("how", ["close", "none", "folder"])
def test_environment_may_close_the_output_and_remove_the_working_directory(how: str) -> None:
    Path("closing.py").write_text(STREAM_ENV)
    options = ["--num-envs", "4", "--batch-size", "4", "--rollout-length", "5", "--runtime", "serial"]
    command = ["train", "closing.py:Closing", "--how", how, *options, "--steps", "400", "--run-dir", "r"]
    result = bestiary_command(*command, env={})
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert open_run("r").checkpoints[-1].find_damage() is None


def test_only_one_of_two_processes_creates_a_run() -> None:
    """A process that finds no run, but is overtaken by another one, must not write config.toml."""
    configs = [resolve({"env": "toy/catch", "steps": 1_600, "seed": seed}) for seed in (1, 2)]
    make_folder = run_module._make_folder

    def overtake(path: Path, rename_if_exists: bool) -> Path:
        run_module._make_folder = make_folder
        create_run(configs[0], RunLocation(run_dir="r"))
        return make_folder(path, rename_if_exists)

    run_module._make_folder = overtake
    with pytest.raises(UserError, match="another process has created this run"):
        create_run(configs[1], RunLocation(run_dir="r"))
    assert open_run("r").raw_config["seed"] == 1


def test_process_whose_new_name_is_taken_in_the_meantime_chooses_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve({"env": "toy/catch", "steps": 1_600})
    create_run(config, RunLocation(run_dir="r"))
    unused_path = run_module.unused_path
    chosen = unused_path(Path("r"))
    other, _ = create_run(config, RunLocation(run_dir=str(chosen)))
    answers = iter([chosen])  # the name was free when this process searched for it
    monkeypatch.setattr(run_module, "unused_path", lambda path: next(answers, None) or unused_path(path))
    with other.lock():
        assert create_run(config, RunLocation(run_dir="r", if_exists="new"))[0].path != chosen
