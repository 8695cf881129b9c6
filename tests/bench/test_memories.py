"""Benchmark of the memories: content of its results. No test checks a speed."""

import json
from pathlib import Path
from typing import Any

import pytest

from bestiary.bench import kernels as bench_kernels
from bestiary.bench import memories as bench_memories
from bestiary.bench.throughput import KERNELS, run_benchmarks


def test_result_has_a_row_for_each_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small: dict[str, Any] = {"STEPS": 3, "BATCH": 2, "NUM_ENVS": 2}
    for module in (bench_kernels, bench_memories):
        for name, value in small.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(bench_memories, "MEASURED_MEMORIES", ["lstm", "srwm"])
    sizes = {"rollout_length": 3, "batch_size": 2, "num_envs": 4, "torso.channels": (4,), "torso.width": 8}
    monkeypatch.setattr(bench_memories, "PROCGEN", {**bench_memories.PROCGEN, **sizes})
    run_benchmarks([KERNELS], repeats=1, seconds=0, json_path=Path("kernels.json"))
    (result,) = json.loads(Path("kernels.json").read_text())
    assert result["config"] == "kernels"
    assert [row["name"] for row in result["operations"]] == ["delta", "srwm", "srwm, 3E+1 columns"]
    lstm, srwm = result["memories"]
    assert (lstm["state_size"], srwm["state_size"]) == (512, 13_312)
    for phase in ("forward", "forward_backward", "act"):
        assert srwm[f"{phase}_speedup"] == pytest.approx(srwm[f"{phase}_reference_ms"] / srwm[f"{phase}_ms"])
        assert f"{phase}_speedup" not in lstm
    assert srwm["act_relative_to_resnet"] == pytest.approx(srwm["act_ms"] / result["resnet_ms"])
    assert [row["name"] for row in result["learning"]] == ["lstm", "srwm"]
    assert result["learning"][0]["relative_to_lstm"] == 1
    printed = capsys.readouterr().out
    assert "operations" in printed
    assert "srwm" in printed
