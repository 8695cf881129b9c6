"""A study on a real Ray: failing, killed, interrupted and run again, on nodes that go."""

import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from bestiary.cli import run_command
from bestiary.runtime.bundle import versions
from bestiary.studies.places import look_around
from tests.nodes import Nodes
from tests.studies.test_run import BASE, interrupt_once, wait_until, write

pytestmark = pytest.mark.xdist_group("ray")


def test_a_study_on_a_cluster_fails_in_part_is_killed_loses_a_node_and_is_finished(
    nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = '[[variant]]\nname = "broken"\nbroken = true\n[[variant]]\nname = "good"\n'
    broken, good = write(f'seeds = [1]\n{BASE}env = "env.py:World"\ngate = true\n{variants}')
    words = ["study", "s.toml", "--cluster", nodes.address, "--cpus-per-run", "1"]

    killed = subprocess.Popen([sys.executable, "-m", "bestiary", *words], stderr=subprocess.DEVNULL)
    wait_until(lambda: good.run.steps > 0, 120)
    killed.kill()
    killed.wait()
    wait_until(lambda: not good.run.being_written)
    assert not (good.path / "lock.json").exists()  # the run noticed, saved and ended by itself
    saved = good.run.steps

    nodes.add()

    def lose() -> None:
        wait_until(lambda: good.run.steps > saved and good.run.being_written, 120)
        nodes.lose()
        Path("open").touch()

    thread = threading.Thread(target=lose)
    thread.start()
    assert run_command(words) == 1
    thread.join()
    output = capsys.readouterr().err
    assert "1 of 2 runs failed" in output
    (listed,) = [line for line in output.splitlines() if line.startswith("warning: broken-s1 failed: ")]
    assert "ZeroDivisionError: the world ends here" in listed
    assert "  study: exit status 1" in output  # the end of its log
    assert [trial.state().kind for trial in (broken, good)] == ["failed", "done"]
    rows = good.run.metrics["step"].tolist()
    assert rows == sorted(set(rows))  # none doubled
    assert rows[-1] == 400
    assert "bestiary resume" in good.log.read_text()


@pytest.mark.slow
def test_an_interrupted_study_says_how_it_goes_on_and_its_runs_have_the_cores_they_asked_for(
    nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    (trial,) = write(f'seeds = [1]\n{BASE}env = "env.py:World"\ngate = true\n')
    seen: list[str] = []

    def ready() -> bool:
        if trial.run.steps > 0:
            for process in psutil.Process().children(recursive=True):
                if str(trial.config_path) in process.cmdline():
                    seen.append(process.environ()["BESTIARY_CORES"])
        return bool(seen)

    threading.Thread(target=interrupt_once, args=(ready,)).start()
    assert run_command(["study", "s.toml", "--cluster", nodes.address, "--cpus-per-run", "2"]) == 130
    assert seen[0] == "2"
    assert f"to go on: bestiary study s.toml --cluster {nodes.address} --cpus-per-run 2" in capsys.readouterr().err
    assert trial.state().text.startswith("part, ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--cpus-per-run 2", "--cpus-per-run: has an effect only on a cluster (--cluster)"),
        ("--cluster {} --jobs 3", "--jobs 3: on a cluster, --cpus-per-run decides"),
        ("--cluster {} --cpus-per-run 0", "--cpus-per-run 0: must be above 0"),
        (
            "--cluster {} --cpus-per-run 64",
            "--cpus-per-run 64: no machine of the cluster has so many; the largest has 2",
        ),
        (
            "--cluster {} --gpus-per-run 0.5",
            "--gpus-per-run 0.5: no machine of the cluster has so many; the largest has 0",
        ),
    ],
)
def test_mistakes(nodes: Nodes, words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(f'seeds = [1]\n{BASE}env = "env.py:World"\n')
    assert run_command(["study", "s.toml", *words.format(nodes.address).split()]) == 2
    assert expected in capsys.readouterr().err


def test_a_machine_without_the_folder_or_with_other_versions_is_named(tmp_path: Path) -> None:
    Path("seen").touch()
    assert look_around(str(tmp_path / "seen"), str(tmp_path), versions()) == []
    unlike, hidden, elsewhere = look_around(
        str(tmp_path / "study" / "seen"), str(tmp_path / "here"), {**versions(), "torch": "1.0"}
    )
    assert "and 1.0 is what this is started with" in unlike
    assert f"does not see, or may not write, {tmp_path / 'study'}" in hidden
    assert f"has no folder {tmp_path / 'here'}" in elsewhere
