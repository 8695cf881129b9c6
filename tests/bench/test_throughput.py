"""Throughput benchmark: measurements, derived quantities and the JSON file."""

import json
import os
import statistics
from contextlib import ExitStack
from pathlib import Path

import pytest

from bestiary.bench import phases, throughput
from bestiary.bench.configs import CONFIGS, make_bench_config
from bestiary.bench.phases import Phase
from bestiary.config.config import Config

PHASES = ("env_stepping", "inference", "learning")


def test_bound_and_ratio_follow_from_the_measured_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    (result,) = throughput.run_benchmarks(["toy"], repeats=3, seconds=0.1, json_path=path)
    (written,) = json.loads(path.read_text())
    assert written["config"] == "toy"
    assert len(written["repeats"]) == 3
    for row in written["repeats"]:
        assert all(row[key] > 0 for key in (*PHASES, "end_to_end"))
        assert row["bound"] == pytest.approx(1 / sum(1 / row[key] for key in PHASES))
        assert row["ratio"] == pytest.approx(row["end_to_end"] / row["bound"])
        assert row["max_policy_lag"] <= 16
    for key in (*PHASES, "bound", "end_to_end", "ratio", "max_policy_lag", "memory_mib"):
        assert written[key] == getattr(result, key) == statistics.median(row[key] for row in written["repeats"])
    assert set(written["layout"]) == set(PHASES)
    assert "toy" in capsys.readouterr().out


def test_fastest_layout_of_a_phase_is_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "measure_rate", lambda phase, seconds: phase.run())
    rates = {"slow": 10, "fast": 1_000, "medium": 100}

    def candidate(name: str):
        return lambda _: Phase(name, lambda: rates[name])

    make_phase = phases.select_fastest([candidate(name) for name in rates], 0.03)
    with ExitStack() as stack:
        assert make_phase(stack).layout == "fast"


def test_configurations_are_measured_in_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order = []

    class FakeRun:
        def __init__(self, config: Config, stack: ExitStack):
            self.env = config.envs[0]

        def measure(self, seconds: float) -> dict[str, float]:
            if seconds > 0.01:  # not the warm-up
                order.append(self.env)
            rate = {"toy/catch": 200.0, "warehouse": 100.0}[self.env] * len(order)  # the machine becomes faster
            return {"end_to_end": rate, "max_policy_lag": 0.0, "memory_mib": 1.0}

    monkeypatch.setattr(throughput, "EndToEndRun", FakeRun)
    monkeypatch.setitem(CONFIGS, "other", {**CONFIGS["toy"], "env": "warehouse"})
    first, second = throughput.run_benchmarks(["toy", "other"], repeats=2, seconds=0.01)
    assert order == ["toy/catch", "warehouse"] * 2
    assert first.relative_end_to_end == first.relative_env_stepping == 1
    ratios = [row["relative_end_to_end"] for row in second.repeats]
    assert ratios == [pytest.approx(0.5 * 2 / 1), pytest.approx(0.5 * 4 / 3)]
    assert second.relative_end_to_end == pytest.approx((1 + 2 / 3) / 2)
    assert "other: speed divided by the speed of toy" in capsys.readouterr().err


@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration_can_be_resolved(name: str) -> None:
    config = make_bench_config(name, steps=1)
    sizes = phases.micro_batch_sizes(config)
    training = config.training
    batch = config.make_algorithm().batch_size(training.num_envs // training.pools, training.pools)
    assert sizes[-1] * (os.cpu_count() or 1) <= batch or sizes == [1]


@pytest.mark.slow
def test_local_cluster_is_measured_beside_the_local_runtime() -> None:
    (result,) = throughput.run_benchmarks(["toy"], repeats=1, seconds=0.5, cluster=True)
    (row,) = result.repeats
    assert row["cluster_ratio"] == pytest.approx(row["cluster"] / row["end_to_end"])
    assert row["cluster"] > 0
    assert row["cluster_startup_seconds"] > 0
    assert row["driver_ms_per_rollout"] > 0
