"""The probe: what it measures, what it remembers, and where it keeps out."""

import dataclasses
import json
from typing import Any

import pytest

import bestiary
from bestiary.config import Config
from bestiary.resolve import resolve
from bestiary.runtime import probe
from bestiary.runtime.probe import cache_file, choose_group_size


@pytest.fixture(autouse=True)
def an_empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(probe, "SECONDS", 0.01)


def config(**options) -> Config:
    return resolve({"env": "toy/catch", "steps": 100, "num_envs": 8, "batch_size": 4, "unroll_length": 5, **options})


def choose(**options) -> int:
    asked = config(**options)
    return choose_group_size(asked, asked.make_pool(1, 0))


def forbidden(*_):
    pytest.fail("probed")


def test_measures_every_size_up_to_the_batch_or_until_it_gets_worse():
    asked = config()
    rates = probe.probe(asked, asked.make_pool(1, 0))
    assert list(rates) in ([1, 2, 4], [1, 2])
    assert all(rate > 0 for rate in rates.values())


@pytest.mark.parametrize(
    ("rates", "usual", "size"),
    [
        ({1: 10.0, 2: 30.0, 4: 20.0}, 4, 2),  # clearly better
        ({1: 85.0, 2: 105.0, 4: 100.0, 8: 110.0}, 4, 4),  # as good as the others, as far as such a short look can tell
        ({1: 50.0, 2: 80.0, 4: 100.0, 8: 130.0}, 4, 8),
        ({1: 10.0, 2: 11.0}, 4, 2),  # the batch has no more
        ({1: 10.0, 2: 20.0, 4: 40.0, 8: 80.0, 16: 160.0}, 32, 16),
        ({1: 90.0, 2: 100.0, 4: 97.0, 8: 88.0}, 32, 2),  # where the search ended because it got worse
        ({1: 10.0}, 4, 1),
    ],
)
def test_the_usual_size_stands_unless_another_is_clearly_better(rates, usual, size):
    assert probe._choose(rates, usual) == size


def test_the_best_is_chosen_and_remembered(monkeypatch, capsys):
    monkeypatch.setattr(probe, "probe", lambda *_: {1: 10.0, 2: 30.0, 4: 20.0})
    assert choose() == 2
    assert (
        "probe: groups of 1: 10, 2: 30, 4: 20 steps/s learnt; 2 it is (--group-size sets it)" in capsys.readouterr().err
    )
    monkeypatch.setattr(probe, "probe", forbidden)
    assert choose() == 2
    assert list(json.loads(cache_file().read_text()).values()) == [2]


def test_another_net_or_shape_is_another_question(monkeypatch):
    asked = []

    def answer(config, _):
        asked.append(config)
        return {1: 1.0}

    monkeypatch.setattr(probe, "probe", answer)
    for options in ({}, {"memory": "lstm"}, {"unroll_length": 6}, {"workers": 1}, {"seed": 2}, {"lr": 0.1}):
        choose(**options)
    assert len(asked) == 4  # seed and learning rate do not matter


@pytest.mark.parametrize(
    ("options", "size"),
    [({"group_size": 3}, 3), ({"runtime": "serial"}, 32), ({"lag": 1}, 32), ({"env": "atari/Pong", "lag": 1}, 4)],
)
def test_keeps_out_where_it_was_told_or_bytes_are_promised(monkeypatch, options, size):
    monkeypatch.setattr(probe, "probe", forbidden)
    assert choose(**options) == size


@pytest.mark.parametrize("text", ["", "[1,2]", "{", '{"a": "x"}', '{"a": null}'])
def test_a_spoilt_cache_is_no_cache(monkeypatch, text):
    monkeypatch.setattr(probe, "probe", lambda *_: {2: 1.0})
    cache_file().parent.mkdir(parents=True)
    cache_file().write_text(text)
    assert choose() == 2
    assert 2 in json.loads(cache_file().read_text()).values()


def test_a_cache_that_cannot_be_written_costs_only_a_note(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(probe, "probe", lambda *_: {2: 1.0})
    assert choose() == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_run_says_what_was_chosen_and_seeds_still_compare(monkeypatch):
    sizes = iter((2, 4))
    monkeypatch.setattr(probe, "probe", lambda *_: {next(sizes): 1.0})
    options: dict[str, Any] = {"steps": 100, "num_envs": 8, "batch_size": 4, "unroll_length": 5}
    first = bestiary.train("toy/catch", run_dir="a", seed=1, **options)
    cache_file().unlink()
    second = bestiary.train("toy/catch", run_dir="b", seed=2, **options)
    assert (first.config.training.group_size, second.config.training.group_size) == (2, 4)
    assert first.config.group() == second.config.group()


def test_the_runs_own_size_is_kept_when_it_goes_on(monkeypatch):
    from bestiary.runtime.train import resume

    options: dict[str, Any] = {"steps": 100, "num_envs": 8, "batch_size": 4, "unroll_length": 5}
    monkeypatch.setattr(probe, "probe", lambda *_: {2: 1.0})
    run = bestiary.train("toy/catch", run_dir="a", **options)
    monkeypatch.setattr(probe, "probe", forbidden)
    cache_file().unlink()
    again = resume(bestiary.load("a"), steps=200)
    assert again.config.training.group_size == run.config.training.group_size == 2
    assert dataclasses.replace(again.config.training, steps=100) == run.config.training
