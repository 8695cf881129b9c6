"""The benchmark of saliency: it measures what it says, and both ways find the same. How fast they are, no test says."""

import numpy as np
import pytest

from bestiary import bench_saliency
from bestiary.analysis.saliency import Method, Saliency
from bestiary.resolve import resolve
from bestiary.rollout import Inputs


def test_both_ways_find_the_same():
    config = resolve({"env": "atari/Pong", "torso.center": False, "agent.init": "torch"})
    pool = config.make_pool(1, 0)
    agent, step = config.make_agent(pool), pool.reset()
    pool.close()
    inputs, state = Inputs.of(step, np.zeros(1, np.int64)), agent.initial_state(1)
    lens = Saliency(agent, pool.observation_spec, Method(12))
    maps = lens(inputs, state)
    rival = bench_saliency.published(agent)
    one_by_one = bench_saliency.sequential(rival, lens, inputs, state, len(lens.centres)).reshape(maps.policy.shape)
    assert np.corrcoef(maps.policy.ravel(), one_by_one.ravel())[0, 1] > 0.9  # bytes cut off what floats keep
    assert maps.policy.argmax() == one_by_one.argmax()


def test_a_row_for_each_net(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_saliency, "NETS", {"shallow": {"torso": "shallow"}})
    monkeypatch.setattr(bench_saliency, "SAMPLE", 2)
    result = bench_saliency.bench_saliency(1, Method(28))
    (row,) = result["nets"]
    assert row["asks"] == 2 * 9
    assert row["batches_speedup"] == pytest.approx(row["sequential_ms"] / row["batches_ms"])
    bench_saliency.show(result)
    assert "shallow" in capsys.readouterr().out
