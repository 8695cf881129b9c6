"""The bench: what it measures, what it makes of it, and what it writes."""

import json
import os
import statistics
from pathlib import Path

import pytest

from bestiary import bench

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
    with bench.ExitStack() as stack:
        assert chosen(stack)[0] == "fast"


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
