"""The bench: what it measures, what it makes of it, and what it writes."""

import json
import os
import statistics
from contextlib import ExitStack
from pathlib import Path

import pytest

from bestiary import bench
from bestiary.config import Config

PIECES = ("env", "inference", "learn")


def test_bound_and_ratio_follow_from_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    (result,) = bench.bench(["toy"], repeats=3, seconds=0.1, json_path=path)
    (written,) = json.loads(path.read_text())
    assert written["config"] == "toy"
    assert len(written["repeats"]) == 3
    for row in written["repeats"]:
        assert all(row[piece] > 0 for piece in (*PIECES, "whole"))
        assert row["bound"] == pytest.approx(1 / sum(1 / row[piece] for piece in PIECES))
        assert row["ratio"] == pytest.approx(row["whole"] / row["bound"])
        assert row["max_lag"] <= 16
    for key in (*PIECES, "bound", "whole", "ratio", "max_lag", "memory_mib"):
        assert written[key] == getattr(result, key) == statistics.median(row[key] for row in written["repeats"])
    assert set(written["layout"]) == set(PIECES)
    assert "toy" in capsys.readouterr().out


def test_a_piece_is_measured_at_its_fastest_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_rate", lambda function, seconds: function())
    rates = {"slow": 10, "fast": 1_000, "middling": 100}

    def candidate(name: str):
        return lambda _: (name, lambda: rates[name])

    chosen = bench._best([candidate(name) for name in rates], 0.03)
    with ExitStack() as stack:
        assert chosen(stack)[0] == "fast"


def test_several_configurations_are_measured_in_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order = []

    class Whole:
        def __init__(self, config: Config, stack: ExitStack):
            self.env = config.envs[0]

        def measure(self, seconds: float) -> dict[str, float]:
            if seconds > 0.01:  # not its warm-up
                order.append(self.env)
            rate = {"toy/catch": 200.0, "warehouse": 100.0}[self.env] * len(order)  # a machine that gets faster
            return {"whole": rate, "max_lag": 0.0, "memory_mib": 1.0}

    monkeypatch.setattr(bench, "Whole", Whole)
    monkeypatch.setitem(bench.CONFIGS, "other", {**bench.CONFIGS["toy"], "env": "warehouse"})
    first, second = bench.bench(["toy", "other"], repeats=2, seconds=0.01)
    assert order == ["toy/catch", "warehouse"] * 2
    assert first.of_first == first.env_of_first == 1
    assert [row["of_first"] for row in second.repeats] == [pytest.approx(0.5 * 2 / 1), pytest.approx(0.5 * 4 / 3)]
    assert second.of_first == pytest.approx((1 + 2 / 3) / 2)
    assert "other, of toy in the same turn" in capsys.readouterr().err


@pytest.mark.parametrize("name", bench.CONFIGS)
def test_every_configuration_can_be_resolved(name: str) -> None:
    given, _ = bench.layers({**bench.CONFIGS[name], "steps": 1})
    config = bench.resolve(given)
    sizes = bench._group_sizes(config)
    training = config.training
    batch = config.make_algorithm().batch_size(training.num_envs // training.pools, training.pools)
    assert sizes[-1] * (os.cpu_count() or 1) <= batch or sizes == [1]


@pytest.mark.slow
def test_the_whole_on_a_ray_is_measured_beside_the_local_one() -> None:
    (result,) = bench.bench(["toy"], repeats=1, seconds=0.5, cluster=True)
    (row,) = result.repeats
    assert row["cluster_ratio"] == pytest.approx(row["cluster"] / row["whole"])
    assert row["cluster"] > 0
    assert row["cluster_start"] > 0
    assert row["driver_ms"] > 0
