"""Benchmark of saliency maps: agreement of both procedures, content of the results. No test checks a speed."""

import numpy as np
import pytest

from bestiary.bench import saliency as bench_saliency
from bestiary.config.resolve import resolve
from bestiary.interpretability.saliency import Saliency, SaliencyOptions
from bestiary.rollout import Inputs


def test_batched_and_sequential_scores_agree():
    config = resolve({"env": "atari/Pong", "torso.subtract_mean": False, "agent.init": "torch"})
    pool = config.make_vector_env(1, 0)
    agent = config.make_agent(pool)
    step = pool.reset()
    pool.close()
    inputs = Inputs.from_step(step, np.zeros(1, np.int64))
    state = agent.initial_state(1)
    saliency = Saliency(agent, pool.observation_spec, SaliencyOptions(12))
    maps = saliency(inputs, state)
    agent = bench_saliency.channels_first(agent)
    scores = bench_saliency.score_sequentially(agent, saliency, inputs, state, len(saliency.centres))
    scores = scores.reshape(maps.policy.shape)
    assert np.corrcoef(maps.policy.ravel(), scores.ravel())[0, 1] > 0.9  # uint8 images round the perturbed frames
    assert maps.policy.argmax() == scores.argmax()


def test_result_has_a_row_for_each_network(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_saliency, "NETWORKS", {"shallow": {"torso": "shallow"}})
    monkeypatch.setattr(bench_saliency, "SAMPLE_SIZE", 2)
    result = bench_saliency.bench_saliency(1, SaliencyOptions(28))
    (row,) = result["networks"]
    assert row["forward_passes"] == 2 * 9
    assert row["batched_speedup"] == pytest.approx(row["sequential_ms"] / row["batched_ms"])
    bench_saliency.print_saliency(result)
    assert "shallow" in capsys.readouterr().out
