"""The benchmark of memories: that it measures and shows what it says. How fast anything is, no test says."""

import json
from pathlib import Path
from typing import Any

import pytest

from bestiary import bench_memories, kernels
from bestiary.bench import KERNELS, bench


def test_a_row_for_each_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small: dict[str, Any] = {"STEPS": 3, "BATCH": 2, "ACTING": 2}
    for module in (kernels.bench, bench_memories):
        for name, value in small.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(bench_memories, "MEASURED", ["lstm", "srwm"])
    sizes = {"unroll_length": 3, "batch_size": 2, "num_envs": 4, "torso.channels": (4,), "torso.width": 8}
    monkeypatch.setattr(bench_memories, "PROCGEN", {**bench_memories.PROCGEN, **sizes})
    bench([KERNELS], repeats=1, seconds=0, json_path=Path("kernels.json"))
    (result,) = json.loads(Path("kernels.json").read_text())
    assert result["config"] == "kernels"
    assert [row["name"] for row in result["operations"]] == ["delta", "srwm", "srwm, 3E+1 columns"]
    lstm, srwm = result["memories"]
    assert (lstm["state"], srwm["state"]) == (512, 13_312)
    for phase in ("forward", "learn", "act"):
        assert srwm[f"{phase}_speedup"] == pytest.approx(srwm[f"{phase}_torch_ms"] / srwm[f"{phase}_ms"])
        assert f"{phase}_speedup" not in lstm
    assert srwm["act_of_resnet"] == pytest.approx(srwm["act_ms"] / result["resnet_ms"])
    assert [row["name"] for row in result["learning"]] == ["lstm", "srwm"]
    assert result["learning"][0]["of_lstm"] == 1
    printed = capsys.readouterr().out
    assert "operations" in printed
    assert "srwm" in printed
