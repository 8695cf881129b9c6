"""Auto-tuning of the micro-batch size: measurement, selection, cache, and runs that are not tuned."""

import dataclasses
import json
from typing import Any

import pytest

import bestiary
from bestiary.api import resume
from bestiary.config.config import Config
from bestiary.config.resolve import resolve
from bestiary.training import micro_batch_tuning
from bestiary.training.micro_batch_tuning import cache_file, choose_micro_batch_size


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(micro_batch_tuning, "MEASURE_SECONDS", 0.01)


def make_config(**options) -> Config:
    return resolve({"env": "toy/catch", "steps": 100, "num_envs": 8, "batch_size": 4, "rollout_length": 5, **options})


def choose(**options) -> int:
    return choose_micro_batch_size(make_config(**options))


def forbidden(*_):
    pytest.fail("measured")


def test_measures_sizes_up_to_the_batch_size_or_until_they_are_slower():
    rates = micro_batch_tuning.measure_rates(make_config())
    assert list(rates) in ([1, 2, 4], [1, 2])
    assert all(rate > 0 for rate in rates.values())


@pytest.mark.parametrize(
    ("rates", "default", "size"),
    [
        ({1: 10.0, 2: 30.0, 4: 20.0}, 4, 2),  # clearly faster
        ({1: 85.0, 2: 105.0, 4: 100.0, 8: 110.0}, 4, 4),  # differences are within the measurement error
        ({1: 50.0, 2: 80.0, 4: 100.0, 8: 130.0}, 4, 8),
        ({1: 10.0, 2: 11.0}, 4, 2),  # the batch is smaller than the default
        ({1: 10.0, 2: 20.0, 4: 40.0, 8: 80.0, 16: 160.0}, 32, 16),
        ({1: 90.0, 2: 100.0, 4: 97.0, 8: 88.0}, 32, 2),  # the search ended at a slower size
        ({1: 10.0}, 4, 1),
    ],
)
def test_default_size_is_kept_unless_another_is_clearly_faster(rates, default, size):
    assert micro_batch_tuning._select_size(rates, default) == size


def test_fastest_size_is_selected_and_cached(monkeypatch, capsys):
    monkeypatch.setattr(micro_batch_tuning, "measure_rates", lambda *_: {1: 10.0, 2: 30.0, 4: 20.0})
    assert choose() == 2
    message = capsys.readouterr().err
    assert "size 1: 10 steps/s; size 2: 30 steps/s; size 4: 20 steps/s" in message
    assert "selected size 2" in message
    assert "--micro-batch-size" in message
    monkeypatch.setattr(micro_batch_tuning, "measure_rates", forbidden)
    assert choose() == 2
    assert list(json.loads(cache_file().read_text()).values()) == [2]


def test_cache_key_depends_on_network_and_shapes(monkeypatch):
    measured = []

    def measure(config):
        measured.append(config)
        return {1: 1.0}

    monkeypatch.setattr(micro_batch_tuning, "measure_rates", measure)
    for options in ({}, {"memory": "lstm"}, {"rollout_length": 6}, {"learner_threads": 1}, {"seed": 2}, {"lr": 0.1}):
        choose(**options)
    assert len(measured) == 4  # not for another seed or learning rate


@pytest.mark.parametrize(
    ("options", "size"),
    [({"micro_batch_size": 3}, 3), ({"runtime": "serial"}, 32), ({"lag": 1}, 32), ({"env": "atari/Pong", "lag": 1}, 4)],
)
def test_explicit_size_and_reproducible_runs_are_not_measured(monkeypatch, options, size):
    monkeypatch.setattr(micro_batch_tuning, "measure_rates", forbidden)
    assert choose(**options) == size


@pytest.mark.parametrize("text", ["", "[1,2]", "{", '{"a": "x"}', '{"a": null}'])
def test_invalid_cache_is_ignored(monkeypatch, text):
    monkeypatch.setattr(micro_batch_tuning, "measure_rates", lambda *_: {2: 1.0})
    cache_file().parent.mkdir(parents=True)
    cache_file().write_text(text)
    assert choose() == 2
    assert 2 in json.loads(cache_file().read_text()).values()


def test_unwritable_cache_only_prints_a_note(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(micro_batch_tuning, "measure_rates", lambda *_: {2: 1.0})
    assert choose() == 2
    assert "cannot write" in capsys.readouterr().err


def test_selected_size_is_in_the_config_but_not_in_the_group_key(monkeypatch):
    sizes = iter((2, 4))
    monkeypatch.setattr(micro_batch_tuning, "measure_rates", lambda *_: {next(sizes): 1.0})
    options: dict[str, Any] = {"steps": 100, "num_envs": 8, "batch_size": 4, "rollout_length": 5}
    first = bestiary.train("toy/catch", run_dir="a", seed=1, **options)
    cache_file().unlink()
    second = bestiary.train("toy/catch", run_dir="b", seed=2, **options)
    assert (first.config.training.micro_batch_size, second.config.training.micro_batch_size) == (2, 4)
    assert first.config.group_key() == second.config.group_key()


def test_resumed_run_keeps_its_size(monkeypatch):
    options: dict[str, Any] = {"steps": 100, "num_envs": 8, "batch_size": 4, "rollout_length": 5}
    monkeypatch.setattr(micro_batch_tuning, "measure_rates", lambda *_: {2: 1.0})
    run = bestiary.train("toy/catch", run_dir="a", **options)
    monkeypatch.setattr(micro_batch_tuning, "measure_rates", forbidden)
    cache_file().unlink()
    resumed = resume(bestiary.load("a"), steps=200)
    assert resumed.config.training.micro_batch_size == run.config.training.micro_batch_size == 2
    assert dataclasses.replace(resumed.config.training, steps=100) == run.config.training
