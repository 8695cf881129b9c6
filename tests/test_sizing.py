"""How fast a cluster would be: the model's arithmetic, and what it is computed from."""

import json
from pathlib import Path

import pytest

from bestiary import bench
from bestiary.cli import run_command
from bestiary.sizing import Machine, bytes_per_step, predict

MACHINE = Machine(cores=2, env=3_000, inference=6_000, learn=1_700)


def test_an_actor_has_one_of_the_cores_that_were_measured() -> None:
    assert MACHINE.actor == pytest.approx(1 / (1 / 1_500 + 1 / 3_000))  # on one core each takes twice as long


@pytest.mark.parametrize(
    ("actors", "learners", "gigabits", "expected", "bound"),
    [
        (1, 1, 10, 1_000, "actors"),
        (16, 1, 10, 1_700, "learners"),
        (16, 8, 10, 8 * 1_700, "learners"),
        (16, 16, 10, 16_000, "actors"),
        (64, 32, 0.1, 32 * 0.1e9 / 8 / 8_000, "network"),
    ],
)
def test_the_slowest_of_three_decides(actors: int, learners: int, gigabits: float, expected: float, bound: str) -> None:
    found = predict(MACHINE, actors, learners, 8_000, gigabits)
    assert (found.steps, found.bound) == (pytest.approx(expected), bound)


def test_a_step_of_atari_is_one_frame_and_little_else() -> None:
    each, weights = bytes_per_step(bench.configured("atari-shallow"))
    frame = 84 * 84
    assert frame < each < 1.35 * frame  # the first stack of a rollout has all four, of twenty
    assert weights == 4 * (
        1_687_768 + 4 * frame
    )  # the parameters, and the picture that the torso takes for the usual one


def test_a_prediction_from_a_file_and_what_is_wrong_with_others(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bench.json").write_text(
        json.dumps([{"config": "toy", "cores": 2, "env": 3e3, "inference": 6e3, "learn": 1.7e3}])
    )
    words = ["bench", "--config", "toy", "--results", "bench.json", "--predict", "1", "16"]
    assert run_command(words) == 0
    output = capsys.readouterr()
    assert "1,000" in output.out
    assert "1,700" in output.out
    assert "one actor plays 1,000 steps/s" in output.err
    for more, expected in (
        (["--config", "pong"], "pong was not measured there; it has toy"),
        (["--json", "x.json"], "then nothing is measured"),
        (["--gbit", "0"], "--gbit 0: must be above 0"),
    ):
        assert run_command([*words, *more]) == 2
        assert expected in capsys.readouterr().err
    assert run_command(["bench", "--learners", "2"]) == 2
    assert "--learners: has an effect only with --predict" in capsys.readouterr().err
    Path("bench.json").write_text("{")
    assert run_command(words) == 2
    assert "not a file that bestiary bench --json wrote" in capsys.readouterr().err
