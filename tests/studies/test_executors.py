"""Studies on a real Ray cluster: failing, killed, interrupted and resumed runs, and lost nodes."""

import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from bestiary.cli.main import run_command
from bestiary.distributed.shipped_config import package_versions
from bestiary.studies.executors import check_machine
from tests.distributed.ray_cluster import RayCluster
from tests.studies.test_runner import BASE, interrupt_once, wait_until, write

pytestmark = pytest.mark.xdist_group("ray")


def test_killed_study_on_a_cluster_continues_after_the_loss_of_a_node(
    ray_cluster: RayCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = '[[variant]]\nname = "broken"\nbroken = true\n[[variant]]\nname = "good"\n'
    broken, good = write(f'seeds = [1]\n{BASE}env = "env.py:TestEnv"\nslow = true\n{variants}')
    words = ["study", "s.toml", "--cluster", ray_cluster.address, "--cpus-per-run", "1"]

    killed = subprocess.Popen([sys.executable, "-m", "bestiary", *words], stderr=subprocess.DEVNULL)
    wait_until(lambda: good.run.steps > 0, 120)
    killed.kill()
    killed.wait()
    wait_until(lambda: not good.run.is_locked)
    assert not (good.path / "lock_owner.json").exists()  # the run saved a checkpoint and ended
    saved = good.run.steps

    ray_cluster.add_node()

    def lose_node() -> None:
        wait_until(lambda: good.run.steps > saved and good.run.is_locked, 120)
        ray_cluster.kill_node()
        Path("fast").touch()

    thread = threading.Thread(target=lose_node)
    thread.start()
    assert run_command(words) == 1
    thread.join()
    output = capsys.readouterr().err
    assert "1 of 2 runs failed" in output
    (listed,) = [line for line in output.splitlines() if line.startswith("warning: broken-s1 failed: ")]
    assert "ZeroDivisionError: broken environment" in listed
    assert "  study: exit status 1" in output  # the last line of its log
    assert [trial.state().kind for trial in (broken, good)] == ["failed", "done"]
    rows = good.run.metrics["step"].tolist()
    assert rows == sorted(set(rows))  # no row twice
    assert rows[-1] == 400
    assert "bestiary resume" in good.log.read_text()


@pytest.mark.slow
def test_interrupted_study_prints_how_to_continue_and_its_runs_use_the_requested_cores(
    ray_cluster: RayCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    (trial,) = write(f'seeds = [1]\n{BASE}env = "env.py:TestEnv"\nslow = true\n')
    cores: list[str] = []

    def ready() -> bool:
        if trial.run.steps > 0:
            for process in psutil.Process().children(recursive=True):
                if str(trial.config_path) in process.cmdline():
                    cores.append(process.environ()["BESTIARY_CORES"])
        return bool(cores)

    threading.Thread(target=interrupt_once, args=(ready,)).start()
    assert run_command(["study", "s.toml", "--cluster", ray_cluster.address, "--cpus-per-run", "2"]) == 130
    assert cores[0] == "2"
    assert f"bestiary study s.toml --cluster {ray_cluster.address} --cpus-per-run 2" in capsys.readouterr().err
    assert trial.state().text.startswith("partial, ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--cpus-per-run 2", "--cpus-per-run: has an effect only on a cluster"),
        ("--cluster {} --jobs 3", "--jobs 3"),
        ("--cluster {} --cpus-per-run 0", "--cpus-per-run 0"),
        ("--cluster {} --cpus-per-run 64", "--cpus-per-run 64: the largest machine of the cluster has 2 CPUs"),
        ("--cluster {} --gpus-per-run 0.5", "--gpus-per-run 0.5: the largest machine of the cluster has 0 GPUs"),
    ],
)
def test_wrong_arguments_are_refused(
    ray_cluster: RayCluster, words: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(f'seeds = [1]\n{BASE}env = "env.py:TestEnv"\n')
    assert run_command(["study", "s.toml", *words.format(ray_cluster.address).split()]) == 2
    assert expected in capsys.readouterr().err


def test_machine_without_the_folders_or_with_other_versions_is_reported(tmp_path: Path) -> None:
    Path("seen").touch()
    assert check_machine(str(tmp_path / "seen"), str(tmp_path), package_versions()) == []
    version, study_folder, working_dir = check_machine(
        str(tmp_path / "study" / "seen"), str(tmp_path / "here"), {**package_versions(), "torch": "1.0"}
    )
    assert "but the driver has 1.0" in version
    assert str(tmp_path / "study") in study_folder
    assert "--dir" in study_folder
    assert f"has no folder {tmp_path / 'here'}" in working_dir
