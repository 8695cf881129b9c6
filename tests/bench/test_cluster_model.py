"""Throughput model of a cluster: its arithmetic, its inputs, and the command that prints predictions."""

import json
from pathlib import Path

import pytest

from bestiary.bench.cluster_model import Machine, measure_message_sizes, predict_throughput
from bestiary.bench.configs import make_bench_config
from bestiary.cli.main import run_command

MACHINE = Machine(cores=2, env_stepping=3_000, inference=6_000, learning=1_700)


def test_actor_uses_one_of_the_measured_cores() -> None:
    assert MACHINE.actor_rate == pytest.approx(1 / (1 / 1_500 + 1 / 3_000))  # on one of two cores: half the rates


@pytest.mark.parametrize(
    ("actors", "learners", "gbit_per_second", "expected", "bottleneck"),
    [
        (1, 1, 10, 1_000, "actors"),
        (16, 1, 10, 1_700, "learners"),
        (16, 8, 10, 8 * 1_700, "learners"),
        (16, 16, 10, 16_000, "actors"),
        (64, 32, 0.1, 32 * 0.1e9 / 8 / 8_000, "network"),
    ],
)
def test_smallest_limit_is_the_bottleneck(
    actors: int, learners: int, gbit_per_second: float, expected: float, bottleneck: str
) -> None:
    prediction = predict_throughput(MACHINE, actors, learners, 8_000, gbit_per_second)
    assert prediction.steps_per_second == pytest.approx(expected)
    assert prediction.bottleneck == bottleneck


def test_atari_step_is_sent_as_little_more_than_one_frame() -> None:
    bytes_per_step, weight_bytes = measure_message_sizes(make_bench_config("atari-shallow"))
    frame = 84 * 84
    assert frame < bytes_per_step < 1.35 * frame  # a rollout of 20 steps starts with a full stack of 4 frames
    assert weight_bytes == 4 * (1_687_768 + 4 * frame)  # parameters, and the mean image that the torso subtracts


def test_command_predicts_from_a_result_file_and_rejects_invalid_input(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bench.json").write_text(
        json.dumps([{"config": "toy", "cores": 2, "env_stepping": 3e3, "inference": 6e3, "learning": 1.7e3}])
    )
    arguments = ["bench", "--config", "toy", "--results", "bench.json", "--predict", "1", "16"]
    assert run_command(arguments) == 0
    output = capsys.readouterr()
    assert "1,000" in output.out
    assert "1,700" in output.out
    assert "one actor: 1,000 steps/s" in output.err
    for more, expected in (
        (["--config", "pong"], "has no result for pong; it has toy"),
        (["--json", "x.json"], "nothing is measured"),
        (["--gbit", "0"], "--gbit 0: must be above 0"),
    ):
        assert run_command([*arguments, *more]) == 2
        assert expected in capsys.readouterr().err
    assert run_command(["bench", "--learners", "2"]) == 2
    assert "--learners: has an effect only with --predict" in capsys.readouterr().err
    Path("bench.json").write_text("{")
    assert run_command(arguments) == 2
    assert "not a result file of bestiary bench --json" in capsys.readouterr().err
