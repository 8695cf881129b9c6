"""Callbacks from users' files: --callback in all runtimes, resume, copies in run folders, and errors."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bestiary
from bestiary.api import resume
from bestiary.cli.main import run_command
from bestiary.runs.run import open_run
from tests.trusted import load_own, resolve_own

EXAMPLE = Path(__file__).parents[3] / "examples" / "early_stop.py"
SMALL: dict[str, Any] = {
    "num_envs": 8,
    "batch_size": 8,
    "micro_batch_size": 8,
    "torso": "mlp",
    "torso.width": 16,
    "save_every": 0,
}
WORDS = (
    "train toy/catch --runtime serial --steps 1600 --num-envs 8 --batch-size 8 --micro-batch-size 8 --torso mlp "
    "--torso.width 16 --run-dir r --callback"
).split()

CALLBACK = """
from bestiary.training.callbacks.base import Callback

class Recorder(Callback):
    calls = []

    def __init__(self):
        self.updates = 0

    def on_start(self, session):
        self.calls.append(("start", session.learner.steps, self.updates))

    def on_update(self, session, metrics, episodes):
        self.updates += len(metrics)
        assert session.learner.version == self.updates
        assert "loss" in metrics[0]
        assert all(0 < episode.step <= session.learner.steps for episode in episodes)

    def is_due(self, session):
        return self.updates == 3

    def on_due(self, session):
        self.calls.append(("due", session.learner.steps))

    def on_end(self, session):
        self.calls.append(("end", session.learner.steps))

    def close(self):
        self.calls.append(("close",))

    def save(self):
        return {"updates": self.updates}

    def load(self, state):
        self.updates = state["updates"]
"""


def read_calls(path: str = "recorder.py") -> list[tuple[Any, ...]]:
    """Return the calls that the class Recorder has recorded in this process, and forget them."""
    calls = load_own(path, "Recorder", "callback").calls
    recorded = list(calls)
    calls.clear()
    return recorded


@pytest.mark.parametrize("runtime", ["serial", "local"])
def test_callback_is_called_in_order_and_its_state_is_restored_by_resume(runtime: str) -> None:
    Path("recorder.py").write_text(f"# {runtime}\n{CALLBACK}")
    run = bestiary.train(
        "toy/catch", run_dir="r", runtime=runtime, steps=1_600, callback="recorder.py:Recorder", **SMALL
    )
    updates = run.checkpoints[-1].load_state()["version"]
    assert updates > 3
    state = run.checkpoints[-1].load_state()["callbacks"]["user:Recorder"]
    assert state == {"updates": updates}
    calls = read_calls()
    assert [call[0] for call in calls] == ["start", "due", "end", "close"]
    assert calls[0] == ("start", 0, 0)
    assert calls[2] == ("end", 1_600)

    longer = resume(open_run("r"), steps=3_200)  # `on_update` asserts that the count of updates continues
    assert read_calls() == [("start", 1_600, updates), ("end", 3_200), ("close",)]
    assert longer.steps == 3_200


@pytest.mark.parametrize("runtime", ["serial", "local"])
def test_example_stops_the_training_early(runtime: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = EXAMPLE.read_text().replace("threshold = 0.8", "threshold = -1.0")
    Path("stop.py").write_text(source)
    run = bestiary.train(
        "toy/catch", run_dir="r", runtime=runtime, steps=10**6, callback=["stop.py:EarlyStop"], **SMALL
    )
    assert 0 < run.steps < 10**6
    assert "the mean return -" in capsys.readouterr().err
    assert run.checkpoints[-1].load_state()["callbacks"]["user:EarlyStop"] == {"count": 5}


def test_interrupted_patience_of_the_example_continues_after_resume() -> None:
    Path("stop.py").write_text(EXAMPLE.read_text().replace("threshold = 0.8", "threshold = -1.0"))
    options = {**SMALL, "runtime": "serial", "callback": "stop.py:EarlyStop", "algo.lr_schedule": "constant"}
    uninterrupted = bestiary.train("toy/catch", run_dir="uninterrupted", steps=10**6, **options)
    stopped = uninterrupted.steps
    bestiary.train("toy/catch", run_dir="r", steps=stopped - 320, **options)
    state = open_run("r").checkpoints[-1].load_state()["callbacks"]["user:EarlyStop"]
    assert 0 < state["count"] < 5
    assert resume(open_run("r"), steps=10**6).steps == stopped


def test_callback_does_not_change_the_training() -> None:
    plain = bestiary.train("toy/catch", run_dir="plain", runtime="serial", steps=1_600, **SMALL)
    observed = bestiary.train(
        "toy/catch", run_dir="observed", runtime="serial", steps=1_600, callback=f"{EXAMPLE}:EarlyStop", **SMALL
    )
    for name in ("model", "optimizer", "actor"):
        one, two = (run.path / f"checkpoints/latest/{name}.safetensors" for run in (plain, observed))
        assert one.read_bytes() == two.read_bytes()
    assert "callback" not in (plain.path / "config.toml").read_text()


def test_file_is_copied_and_the_copy_replaces_a_changed_file(
    capsys: pytest.CaptureFixture[str], another_user: Callable[[], None]
) -> None:
    shutil.copyfile(EXAMPLE, "stop.py")
    assert run_command([*WORDS, "stop.py:EarlyStop"]) == 0
    (copy,) = Path("r/plugins").glob("*/*")
    assert copy.read_text() == EXAMPLE.read_text()
    Path("stop.py").write_text(EXAMPLE.read_text() + "# changed\n")
    assert run_command(["resume", "r", "--steps", "2k"]) == 0
    assert "has changed since the run was created" in capsys.readouterr().err
    another_user()
    assert run_command(["resume", "r", "--steps", "3k"]) == 2
    assert f"read {copy}, then add --trust-code" in capsys.readouterr().err
    assert run_command(["resume", "r", "--steps", "3k", "--trust-code"]) == 0
    assert f"executes {copy}" in capsys.readouterr().err


def test_flag_may_be_repeated_or_have_several_names_and_stand_before_the_environment() -> None:
    Path("recorder.py").write_text(CALLBACK)
    shutil.copyfile(EXAMPLE, "extra.py")
    names = ["recorder.py:Recorder", "extra.py:EarlyStop"]
    absolute = tuple(str(Path(name).resolve()) for name in names)
    assert resolve_own({"env": "toy/catch", "callback": ", ".join(names)}).training.callback == absolute
    words = [*("--callback", names[0], "--callback", names[1]), *WORDS[1:-1]]
    assert run_command(["train", *words, "--time-limit", "30"]) == 0  # an option of the environment
    assert open_run("r").config.training.callback == absolute


FAILURES = {
    "on_start": "def on_start(self, session): 1 / 0",
    "on_update": "def on_update(self, session, metrics, episodes): 1 / 0",
    "is_due": "def is_due(self, session): 1 / 0",
    "on_end": "def on_end(self, session): open('missing/file')",
    "save": "def save(self): return {'path': self}",
}


@pytest.mark.parametrize("method", FAILURES)
def test_exception_stops_the_run_with_one_line_that_names_the_file(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    imports = "from bestiary.training.callbacks.base import Callback\n"
    Path("broken.py").write_text(f"{imports}class Broken(Callback):\n    {FAILURES[method]}\n")
    assert run_command([*WORDS, "broken.py:Broken"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bestiary:")]
    assert f"callback Broken: {method} failed" in line
    assert str(Path("broken.py").resolve()) in line
    assert "Error" in line


def test_state_that_cannot_be_saved_stops_the_run_before_the_first_update() -> None:
    Path("broken.py").write_text(
        "from pathlib import Path\n"
        "from bestiary.training.callbacks.base import Callback\n"
        "class Broken(Callback):\n"
        "    def on_update(self, session, metrics, episodes): Path('updated').touch()\n"
        f"    {FAILURES['save']}\n"
    )
    assert run_command([*WORDS, "broken.py:Broken"]) == 1
    assert not Path("updated").exists()


MISTAKES = {
    "not a subclass": ("class Wrong:\n    pass\n", "wrong.py:Wrong", "must be a subclass of"),
    "a function": ("def Wrong():\n    pass\n", "wrong.py:Wrong", "must be a subclass of"),
    "no such class": ("class Wronk:\n    pass\n", "wrong.py:Wrong", "did you mean Wronk"),
    "no such file": ("", "other.py:Wrong", "other.py does not exist"),
    "no class": ("", "wrong.py", "expected a class in a Python file"),
    "constructor": (
        "from bestiary.training.callbacks.base import Callback\nclass Wrong(Callback):\n"
        "    def __init__(self, threshold): pass\n",
        "wrong.py:Wrong",
        "called without arguments",
    ),
    "twice": (
        "from bestiary.training.callbacks.base import Callback\nclass Wrong(Callback):\n    pass\n",
        "wrong.py:Wrong,wrong.py:Wrong",
        "rename one of them",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("dry_run", [False, True])
def test_unusable_callbacks_are_refused_before_training(
    mistake: str, dry_run: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    source, name, message = MISTAKES[mistake]
    Path("wrong.py").write_text(source)
    assert run_command([*WORDS, name, *(["--dry-run"] if dry_run else [])]) == 2
    errors = capsys.readouterr().err
    assert "--callback" in errors or "wrong.py:Wrong" in errors
    assert message in errors
    assert not Path("r").exists()
