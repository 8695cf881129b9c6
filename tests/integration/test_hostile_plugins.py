"""Run folders that another person has prepared so that commands execute code or read files outside the folder."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import this
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bestiary
from bestiary.cli.main import run_command
from bestiary.config.toml import dump_toml, read_tables
from bestiary.runs.run import open_run
from bestiary.studies.executors import start_command
from bestiary.utils import trust

SMALL: dict[str, Any] = {"runtime": "serial", "num_envs": 4, "batch_size": 4, "micro_batch_size": 4, "steps": 320}

EVIL = """
from pathlib import Path
Path("executed").write_text("executed")
from bestiary.envs.toy import ToyVectorEnv as Evil
from bestiary.training.callbacks.base import Callback
from bestiary.agents.torsos import MLP
class EvilCallback(Callback): ...
def evil(measures): return measures["reward"]
"""

COMMANDS = {
    "eval": "eval r --episodes 2",
    "video": "video r --length 5 --out a.gif",
    "look": "look actions r --episodes 2 --out actions.png",
    "export": "export r --length 5 --rollouts 1 --out exported.npz",
    "audit": "audit r --episodes 2 --out audited",
    "report": "report . --out report.html",
    "report --no-draw": "report . --no-draw --out report.html",
    "resume": "resume r --steps 640",
    "train --init-from": "train toy/catch --init-from r --steps 320 --run-dir new",
    "train --config": "train --config r/config.toml --steps 320 --run-dir new",
    "runs": "runs .",
    "compare": "compare r other --out compared.png",
    "study": "study s.toml --jobs 1",
    "study --config": "study c.toml --jobs 1",
}


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "r"
    bestiary.train("toy/catch", run_dir=str(folder), **SMALL)
    return folder


@pytest.fixture(autouse=True)
def trust_nothing(another_user: Callable[[], None]) -> None:
    """In each test, the user has not trusted anything yet."""
    another_user()


def prepare(toy_run: Path, plugin: dict[str, Any], hashes: dict[str, str]) -> None:
    """Make the run `r`, whose config has been changed, an honest run `other`, and two study files that use `r`."""
    for name in ("r", "other"):
        shutil.copytree(toy_run, name, symlinks=True)
    tables = read_tables(Path("r/config.toml"))
    for key, value in plugin.items():
        table, dot, name = key.rpartition(".")
        (tables[table] if dot else tables)[name] = value
    Path("r/config.toml").write_text(dump_toml({**tables, "plugins": hashes}))
    Path("s.toml").write_text('seeds = [1]\n[base]\nenv = "toy/catch"\ninit_from = "r"\nsteps = 320\n')
    Path("c.toml").write_text('seeds = [1]\n[base]\nconfig = "r/config.toml"\nsteps = 320\n')


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_evil(path: str) -> Path:
    file = Path(path)
    file.parent.mkdir(exist_ok=True)
    file.write_text(EVIL)
    return file


HIDDEN = {
    "braces": {"env.name": ["{}:{Evil}"]},
    "braces around the path": {"env.name": ["{{}}:Evil"]},
    "one name": {"env.name": "{}:Evil"},
    "space": {"true_reward": "{}:evil "},
    "several": {"true_reward": "alive=1;{}:evil\t"},
    "line break": {"reward": "\n{}:evil"},
    "component": {"torso.name": " {}:MLP"},
    "callback": {"callback": ["{}:EvilCallback "]},
    "callbacks as text": {"callback": "{}:EvilCallback,{}:EvilCallback"},
}


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("command", ["eval", "resume", "train --init-from", "report"])
def test_hidden_plugin_is_not_executed(toy_run: Path, hidden: str, command: str) -> None:
    """The config has the right hash of the file under several spellings of its path."""
    evil = write_evil("outside/evil.py")
    text = json.dumps(HIDDEN[hidden]).replace("{}", str(evil.absolute()))
    names = [str(evil), str(evil.absolute()), f" {evil.absolute()}", f"{{{evil.absolute()}}}"]
    prepare(toy_run, json.loads(text), dict.fromkeys(names, sha256(evil)))
    status = run_command(COMMANDS[command].split())
    assert not Path("executed").exists()
    assert status == (2 if command != "report" else 0)


@pytest.mark.parametrize("place", ["absolute", "relative", "working directory of the process", "run folder", "library"])
@pytest.mark.parametrize("command", COMMANDS)
def test_hash_in_the_run_folder_is_not_trusted(toy_run: Path, place: str, command: str) -> None:
    evil = write_evil("outside/evil.py")
    path = {
        "absolute": str(evil.absolute()),
        "relative": str(evil),
        "working directory of the process": "/proc/self/cwd/outside/evil.py",
        "run folder": str(Path("r/plugins/evil.py").absolute()),
        "library": str(this.__file__),
    }[place]
    content = Path(path) if place == "library" else evil
    prepare(toy_run, {"torso.name": f"{path}:MLP"}, {path: sha256(content)})
    copy = Path("r/plugins") / sha256(content)[:8] / content.name
    copy.parent.mkdir(parents=True)
    shutil.copyfile(content, copy)
    shutil.copyfile(content, "r/plugins/evil.py")
    status = run_command(COMMANDS[command].split())
    assert not Path("executed").exists()
    assert status == (0 if command in ("report", "report --no-draw", "runs", "compare") else 2)


TOOLS = """
from pathlib import Path
from bestiary.agents.torsos import MLP as Net
def wipe(num_envs, *, folder="."):
    Path("executed").write_text(folder)
"""


@pytest.mark.parametrize("command", ["eval r --episodes 2", "resume r --steps 640", "train --config r/config.toml"])
def test_other_function_of_a_known_plugin_is_not_executed(command: str) -> None:
    """The user has used the file, but only its class Net. The run chooses a function and its arguments."""
    Path("tools.py").write_text(TOOLS)
    bestiary.train("toy/catch", run_dir="r", torso="tools.py:Net", **SMALL)
    tables = read_tables(Path("r/config.toml"))
    tables["env"] = {"name": [tables["torso"]["name"].replace(":Net", ":wipe")], "folder": "chosen by the run"}
    Path("r/config.toml").write_text(dump_toml(tables))
    trust._registered.clear()  # a new process
    assert run_command(command.split()) == 2
    assert not Path("executed").exists()


def test_trust_code_executes_exactly_the_copy_that_it_names(toy_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = write_evil("outside/evil.py")
    prepare(toy_run, {"torso.name": f"{evil.absolute()}:MLP"}, {str(evil.absolute()): sha256(evil)})
    assert run_command(["eval", "r", "--episodes", "2", "--trust-code"]) == 2  # there is no copy
    assert not Path("executed").exists()
    copy = Path("r/plugins") / sha256(evil)[:8] / "evil.py"
    copy.parent.mkdir(parents=True)
    shutil.copyfile(evil, copy)
    capsys.readouterr()
    assert run_command(["eval", "r", "--episodes", "2", "--trust-code"]) == 0
    assert f"executes {copy}; to read it: less {copy}" in capsys.readouterr().err
    assert Path("executed").exists()


def test_plugin_of_a_config_file_is_executed_only_if_it_is_known(
    capsys: pytest.CaptureFixture[str], another_user: Callable[[], None]
) -> None:
    write_evil("./evil.py")
    options = 'steps = 320\nruntime = "serial"\nmicro_batch_size = 4\n'
    Path("c.toml").write_text(f'{options}env = "toy/catch"\ntorso = "evil.py:MLP"\n')
    Path("s.toml").write_text(f'seeds = [1]\n[base]\n{options}env = "toy/catch"\ntorso = "evil.py:MLP"\n')
    for words in (
        ["train", "--config", "c.toml", "--run-dir", "a"],
        ["study", "s.toml"],
        ["study", "s.toml", "--dry-run"],
    ):
        assert run_command(words) == 2
        assert "read evil.py, then add --trust-code" in capsys.readouterr().err
    assert not Path("executed").exists()
    assert run_command(["train", "--config", "c.toml", "--run-dir", "a", "--trust-code"]) == 0
    assert "executes evil.py" in capsys.readouterr().err
    assert run_command(["study", "s.toml"]) == 0  # its content is known now
    assert run_command(["eval", "a", "--episodes", "2"]) == 0
    another_user()
    assert run_command(["study", "s.toml", "--dry-run"]) == 2
    assert run_command(["study", "s.toml", "--dry-run", "--trust-code"]) == 0


# --- files outside the folder ---

AUDITED = """
import json, os, sys
opened, executed = [], []
def hook(event, args):
    if event == "open" and isinstance(args[0], (str, bytes)):
        path = os.fsdecode(args[0])
        opened.append(path if args[2] & os.O_NOFOLLOW else os.path.realpath(path))
    if event == "exec":
        executed.append(args[0].co_filename)
from bestiary.cli.main import run_command
sys.addaudithook(hook)
for words in json.loads(sys.argv[1]):
    status = run_command(words.split())
    print("status", words, status, file=sys.stderr)
import __main__
json.dump({"opened": opened, "executed": executed}, __import__("builtins").open("audit.json", "w"))
"""


@pytest.mark.parametrize(
    ("plugin", "linked_checkpoints"),
    [
        ({"env.name": ["outside/evil.py:{Evil}"]}, False),
        ({"true_reward": "outside/evil.py:evil "}, False),
        ({}, False),
        ({}, True),
    ],
)
def test_no_command_opens_or_executes_a_file_outside_the_folder(
    toy_run: Path, plugin: dict[str, Any], linked_checkpoints: bool
) -> None:
    """An audit hook records every file that is opened, after links are followed, and all code that is executed."""
    evil = write_evil("outside/evil.py")
    os.mkfifo("outside/pipe")
    for name in ("private.txt", "private.json", "private.csv", "private.gif"):
        Path("outside", name).write_text("private")
    prepare(toy_run, plugin, dict.fromkeys(["outside/evil.py", str(evil.absolute())], sha256(evil)))
    run = Path("r")
    outside = evil.absolute().parent
    links = {
        "metrics.csv": "private.csv",
        "episodes.csv": "pipe",
        "run_id.txt": "private.txt",
        "lock_owner.json": "private.json",
        "evaluations/e.json": "private.json",
        "videos/x.gif": "private.gif",
        "recordings/train.json": "private.json",
        "wandb_id.txt": "private.txt",
        f"plugins/{sha256(evil)[:8]}/evil.py": "evil.py",
        "checkpoints/latest": "",
    }
    shutil.copytree("other/checkpoints", "outside/checkpoints", symlinks=True)
    if linked_checkpoints:
        del links["checkpoints/latest"]
        shutil.rmtree(run / "checkpoints")
        links["checkpoints"] = "checkpoints"
    for name, target in links.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside / target)
    # `--config` reads the files that the given file names, to compute their hashes. It does not execute them.
    commands = [words for name, words in COMMANDS.items() if "--config" not in name]
    process = subprocess.run(
        [sys.executable, "-c", AUDITED, json.dumps(commands)], stderr=subprocess.PIPE, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    assert len([line for line in process.stderr.splitlines() if line.startswith("status ")]) == len(commands)
    assert "Traceback" not in process.stderr
    assert "unknown option" not in process.stderr
    events = json.loads(Path("audit.json").read_text())
    assert any(path.endswith("model.safetensors") for path in events["opened"])  # the hook works: the run `other`
    assert [path for path in events["opened"] if "outside" in path or Path(path).name.startswith("private")] == []
    own_files = [path for path in events["executed"] if path.startswith((str(Path().absolute()), "r/", "outside"))]
    assert own_files == []
    assert not Path("executed").exists()


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("name", ["study.toml", "configs", "configs/base-s1.toml", "logs/base-s1.log", ".results.csv"])
def test_study_does_not_write_through_links(name: str, hard: bool, capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.toml").write_text('seeds = [1]\n[base]\nenv = "toy/catch"\nsteps = 320\n')
    for folder in ("configs", "logs"):
        Path("runs/s", folder).mkdir(parents=True)
    Path("runs/s/study.toml").touch()
    target = Path("private")
    target.write_text("private")
    path = Path("runs/s", name)
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.hardlink_to(target) if hard else path.symlink_to(target.absolute())
    assert run_command(["study", "s.toml"]) == 2
    assert target.read_text() == "private"
    assert "runs/s" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["link", "hard link", "linked folder", "pipe"])
def test_analyses_of_a_study_stay_in_its_folder(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.toml").write_text(AUDIT_STUDY)
    folder = Path("runs/s/analysis/audit")
    folder.parent.mkdir(parents=True)
    Path("runs/s/study.toml").touch()
    Path("private").mkdir()
    Path("private/file").write_text("private")
    if kind == "linked folder":
        folder.symlink_to(Path("private").absolute())
    else:
        folder.mkdir()
    if kind == "link":
        (folder / "done.json").symlink_to(Path("private/file").absolute())
    elif kind == "hard link":
        (folder / "audit.csv").hardlink_to("private/file")
    elif kind == "pipe":
        os.mkfifo(folder / "done.json")
    assert run_command(["study", "s.toml"]) == 2
    assert "runs/s/analysis/audit" in capsys.readouterr().err
    assert [path.name for path in Path("private").iterdir()] == ["file"]
    assert Path("private/file").read_text() == "private"


def test_pipe_in_a_run_of_a_study_does_not_block(toy_run: Path) -> None:
    Path("runs/s").mkdir(parents=True)
    Path("s.toml").write_text('seeds = [1]\n[base]\nenv = "toy/catch"\nsteps = 320\n')
    Path("runs/s/study.toml").touch()
    shutil.copytree(toy_run, "runs/s/base-s1", symlinks=True)
    Path("runs/s/base-s1/metrics.csv").unlink()
    os.mkfifo("runs/s/base-s1/metrics.csv")
    command = [sys.executable, "-m", "bestiary", "study", "s.toml", "--dry-run"]
    assert subprocess.run(command, timeout=300, stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize("words", ["runs .", "eval r --episodes 2", "report . --no-draw --out report.html"])
def test_files_of_the_working_directory_do_not_replace_modules(toy_run: Path, words: str) -> None:
    shutil.copytree(toy_run, "r", symlinks=True)
    for name in ("numpy", "torch", "rich", "colorsys", "tomllib", "filelock"):
        Path(f"{name}.py").write_text("open('executed', 'w')\n")
    command = [sys.executable, "-m", "bestiary", *words.split()]
    assert subprocess.run(command, timeout=300, stdout=subprocess.DEVNULL).returncode == 0
    assert not Path("executed").exists()


# --- choices about this machine ---


def change_config(path: str, **options: Any) -> None:
    tables = read_tables(Path(path, "config.toml"))
    Path(path, "config.toml").write_text(dump_toml({**tables, **options}))


@pytest.mark.parametrize("address", ["10.9.8.7:6379", "auto", "local"])
def test_cluster_of_a_foreign_config_is_not_used(
    toy_run: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(toy_run, "r", symlinks=True)
    change_config("r", runtime="cluster", cluster=address, trust_open_cluster=True)
    assert run_command(["resume", "r", "--steps", "640"]) == 2
    error = capsys.readouterr().err
    assert address in error
    assert "add --cluster" in error


@pytest.mark.parametrize("command", ["train --config c.toml --run-dir new", "study s.toml"])
@pytest.mark.parametrize("options", [{"cluster": "10.9.8.7:6379"}, {"cluster": {"name": "auto"}}])
def test_cluster_of_a_config_or_study_file_is_used_only_with_trust_code(
    command: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes of a cluster can run code on the machine of the user."""
    config = {"env": "toy/catch", "runtime": "cluster", "trust_open_cluster": True, **options}
    Path("c.toml").write_text(dump_toml(config))
    Path("s.toml").write_text(dump_toml({"seeds": [1], "base": config}))
    monkeypatch.setattr("socket.create_connection", lambda *_, **__: pytest.fail("connected"))
    assert run_command(command.split()) == 2
    error = capsys.readouterr().err
    assert "--cluster 10.9.8.7:6379" in error or "--cluster auto" in error
    assert "add --trust-code" in error
    assert run_command([*command.split(), "--trust-code", "--dry-run"]) == 0
    assert "sets --trust-open-cluster True; this is accepted because of --trust-code" in capsys.readouterr().err
    if command.startswith("train"):
        assert run_command([*command.split(), "--cluster", "10.9.8.7:6379"]) == 2
        assert "--trust-open-cluster True" in capsys.readouterr().err
        assert run_command([*command.split(), "--cluster", "local", "--dry-run"]) == 0


def test_machine_options_of_a_foreign_config_are_not_used(
    toy_run: Path, capsys: pytest.CaptureFixture[str], another_user: Callable[[], None]
) -> None:
    shutil.copytree(toy_run, "r", symlinks=True)
    loggers = {"name": ["tensorboard", "wandb"], "project": "x; touch executed #"}
    change_config("r", logger=loggers, device="cuda:7")
    assert run_command(["resume", "r", "--steps", "640"]) == 0  # wandb would not be reachable, cuda:7 does not exist
    note = " ".join(capsys.readouterr().err.split())
    assert "add --device=cuda:7 --logger=tensorboard,wandb '--logger.project=x; touch executed #'" in note
    assert not Path("r/tensorboard").exists()
    tables = read_tables(Path("r/config.toml"))
    assert (tables["device"], "logger" in tables) == ("auto", False)

    assert run_command(["resume", "r", "--steps", "960", "--logger", "tensorboard"]) == 0
    assert list(Path("r/tensorboard").iterdir())
    shutil.rmtree("r/tensorboard")
    Path("r").rename("moved")
    assert run_command(["resume", "moved", "--steps", "1280"]) == 0  # the user has chosen the option on this machine
    assert list(Path("moved/tensorboard").iterdir())

    another_user()
    shutil.rmtree("moved/tensorboard")
    assert run_command(["resume", "moved", "--steps", "1600"]) == 0
    assert not Path("moved/tensorboard").exists()


def test_init_from_of_a_foreign_config_is_not_opened(toy_run: Path) -> None:
    shutil.copytree(toy_run, "r", symlinks=True)
    shutil.rmtree("r/checkpoints")
    Path("r/checkpoints").mkdir()
    change_config("r", init_from=str(Path("missing").absolute()))
    assert run_command(["resume", "r"]) == 0  # it would fail if it opened this run
    assert open_run("r").steps == 320


def test_own_choices_are_used_without_flags() -> None:
    bestiary.train("toy/catch", run_dir="r", logger="tensorboard", **SMALL)
    shutil.rmtree("r/tensorboard")
    assert run_command(["resume", "r", "--steps", "640"]) == 0
    assert list(Path("r/tensorboard").iterdir())


# --- analyses of studies ---

AUDIT_STUDY = """
seeds = [1]
[base]
env = "toy/catch"
steps = 320
runtime = "serial"
num_envs = 4
batch_size = 4
[[analysis]]
tool = "audit"
episodes = 1
"""


@pytest.mark.parametrize("place", ["analysis", "scale"])
def test_plugin_of_an_analysis_is_executed_only_if_it_is_known(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("evil.py").write_text(EVIL)
    setting = 'true_reward = "reward; evil.py:evil"\n'
    text = AUDIT_STUDY + (setting if place == "analysis" else f"[scale.small.analysis]\n{setting}")
    Path("s.toml").write_text(text)
    scale = [] if place == "analysis" else ["--scale", "small"]
    assert run_command(["study", "s.toml", *scale]) == 2
    error = capsys.readouterr().err
    assert "evil.py" in error
    assert "--trust-code" in error
    assert not Path("executed").exists()
    assert not Path("runs").exists()


def test_plugin_of_an_analysis_that_changes_during_the_study_is_not_executed() -> None:
    bestiary.train("toy/catch", run_dir="r", **SMALL)
    Path("reward.py").write_text('def good(measures): return measures["reward"]\n')
    Path("s.toml").write_text(AUDIT_STUDY + 'true_reward = "reward.py:good"\n')
    assert run_command(["study", "s.toml", "--trust-code", "--dry-run"]) == 0
    Path("reward.py").write_text(f"{EVIL}\ngood = evil\n")
    # The study starts this command after the training.
    command = ["audit", "r", "--episodes", "1", "--true-reward", "reward.py:good"]
    process = start_command(Path("log"), command)
    assert process.wait() == 2
    assert process.stdin is not None
    process.stdin.close()
    assert "you have not used this version" in Path("log").read_text()
    assert not Path("executed").exists()


# --- mode of run folders ---


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o755), (0o077, 0o700), (0o002, 0o775), (0o000, 0o700)])
def test_run_folder_is_private_if_the_umask_lets_everybody_write(umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        bestiary.train("toy/catch", name="r", **SMALL)
    finally:
        os.umask(before)
    assert Path("runs/r").stat().st_mode & 0o777 == mode
    assert Path("runs").stat().st_mode & 0o002 == 0


NUMBA_TORSO = """
import numba
from bestiary.agents.torsos import MLP

@numba.njit(cache=True)
def increase(x):
    return x + 1

class Net(MLP):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        increase(1)
"""

EVIL_CACHE = """
import os, pathlib, pickle, sys

class Evil:
    def __reduce__(self):
        return os.mkdir, (sys.argv[2],)

for file in pathlib.Path(sys.argv[1]).rglob("*.nbi"):
    file.write_bytes(pickle.dumps(Evil()))
"""


def test_cache_of_numba_in_the_copy_of_a_trusted_plugin_is_not_executed(another_user: Callable[[], None]) -> None:
    """Numba unpickles the files in its cache. The link hides the cache from the list of modules of the copy."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    Path("own").mkdir()
    Path("own/net.py").write_text(NUMBA_TORSO)
    bestiary.train("toy/catch", torso="own/net.py:Net", run_dir="r", **SMALL)
    (copy,) = Path("r/plugins").glob("*/net.py")
    code = f"exec(compile(open({str(copy.absolute())!r}).read(), {str(copy.absolute())!r}, 'exec')); increase(1)"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)  # writes a cache beside the copy
    (copy.parent / "__pycache__").rename("r/cache")
    (copy.parent / "__pycache__").symlink_to("../../cache")
    subprocess.run([sys.executable, "-c", EVIL_CACHE, "r/cache", str(Path("executed").absolute())], check=True)
    Path("own/net.py").unlink()
    command = [sys.executable, "-P", "-m", "bestiary", "eval", "r", "--episodes", "1"]
    for _ in range(2):  # the first command must not change the copy
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert not Path("executed").exists()
        assert result.returncode == 0, result.stderr
    assert list(Path("r/plugins").rglob("*.nb*")) == []
