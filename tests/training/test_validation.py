"""Validation during training: schedule, validation levels, score, and the best checkpoint."""

import csv
import os
import signal
from typing import Any

import pytest
import torch

import bestiary
from bestiary.api import resume
from bestiary.config.resolve import resolve
from bestiary.evaluation.results import TaskResult
from bestiary.rollout import Episode
from bestiary.runs import checkpoints
from bestiary.training.interrupts import Interrupted
from bestiary.training.validation import Validator, _compute_score, check_validation, make_validator
from bestiary.utils.errors import UserError

SMALL: dict[str, Any] = {
    "runtime": "serial",
    "num_envs": 8,
    "batch_size": 8,
    "torso": "mlp",
    "torso.width": 16,
    "save_every": 0,
}


def read_validation(run):
    with (run.path / "validation.csv").open() as file:
        return list(csv.DictReader(file))


def test_validation_does_not_change_the_training():
    plain = bestiary.train("toy/catch", run_dir="plain", steps=3_200, **SMALL)
    validated = bestiary.train(
        "toy/catch", run_dir="validated", steps=3_200, valid_every=1_000, valid_episodes=8, **SMALL
    )
    one, two = (checkpoints.choose(run.path).load_model() for run in (plain, validated))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert [int(row["step"]) for row in read_validation(validated)] == [1_120, 2_080, 3_040, 3_200]
    assert not (plain.path / "validation.csv").exists()


def test_best_checkpoint_is_kept_if_returns_are_negative():
    run = bestiary.train(
        "toy/catch", run_dir="r", steps=6_400, valid_every=800, valid_episodes=40, save_minutes=1e-9, lr=3e-3, **SMALL
    )
    rows = read_validation(run)
    best = max(rows, key=lambda row: float(row["return"]))
    assert float(rows[0]["return"]) < 0  # although the first validation was the best for a while
    assert checkpoints.best_steps(run.path / "checkpoints") == int(best["step"])
    assert (run.path / "checkpoints" / "best" / "model.safetensors").exists()


def test_resumed_run_remembers_the_best_compute_score():
    options: dict[str, Any] = {"valid_every": 800, "valid_episodes": 10, **SMALL}
    run = bestiary.train("toy/catch", run_dir="r", steps=1_600, **options)
    before = run.checkpoints[-1].load_state()["callbacks"]["validation"]["best_score"]
    run = resume(run, steps=3_200)
    after = run.checkpoints[-1].load_state()["callbacks"]["validation"]["best_score"]
    assert after >= before
    assert [int(row["step"]) for row in read_validation(run)] == [800, 1_600, 2_400, 3_200]


def test_validation_has_its_own_levels_and_mode(capsys):
    run = bestiary.train(
        "procgen/maze:easy",
        run_dir="r",
        steps=320,
        levels="0:5",
        valid_levels="3:9",
        valid_mode="memory",
        valid_every=320,
        valid_episodes=2,
        **SMALL,
    )
    (row,) = read_validation(run)
    assert (row["task"], row["levels"], row["games"]) == ("procgen/maze:memory", "3:9", "2")
    assert row["interval"] == "Student's t, over games"
    assert "overlaps" not in capsys.readouterr().err  # levels with the same number differ between modes


@pytest.mark.parametrize(
    ("options", "warning"),
    [
        ({"valid_levels": "3:9"}, "--valid-levels 3:9 overlaps the training levels 0:5"),
        ({"valid_every": 100}, "without --valid-levels, validation uses the training levels 0:5"),
        ({"valid_levels": "5:9"}, ""),
        ({"levels": "all", "valid_levels": "5:9"}, "--valid-levels 5:9 overlaps the training levels all"),
    ],
)
def test_warns_of_levels_that_are_also_training_levels(options, warning, capsys):
    check_validation(resolve({"env": "procgen/maze:easy", "levels": "0:5", **options}))
    errors = capsys.readouterr().err
    assert warning in errors if warning else not errors


def test_the_score_is_the_mean_of_normalised_returns(capsys):
    """The returns of the two games differ in scale, so a mean of raw returns would rank agents differently."""

    def result(task, *returns):
        return TaskResult(task, [Episode(0, task, r, 1, r, 1, True, 0, {}) for r in returns])

    easy = [result("procgen/leaper:easy", 10, 3), result("procgen/starpilot:easy", 2.5, 64)]
    assert _compute_score(easy) == pytest.approx(0.5)
    assert _compute_score([result("procgen/leaper:easy", 10), result("procgen/starpilot:easy", 2.5)]) == pytest.approx(
        0.5
    )
    assert _compute_score([result("toy/catch", -1, 0)]) == -0.5
    atari = [result("atari/Pong", 14.6), result("atari/Breakout", 1.7)]  # a human in Pong, a random policy in Breakout
    assert _compute_score(atari) == pytest.approx(0.5)
    assert _compute_score([*atari, result("atari/AirRaid", 100)]) is None  # AirRaid has no published scores
    memory = [result("procgen/maze:memory", 1), result("procgen/heist:memory", 2)]
    assert _compute_score(memory) is None
    check_validation(resolve({"env": "procgen/{maze,heist}:memory", "levels": "0:5", "valid_levels": "9:12"}))
    assert "does not keep a `best` checkpoint" in capsys.readouterr().err


def test_validation_of_the_same_agent_is_reproducible():
    """All validations use the same levels and random numbers, so that differences are due to the agent."""
    config = resolve({"env": "procgen/maze:easy", "levels": "0:5", "valid_levels": "5:60", "valid_episodes": 6})
    validator, pool = make_validator(config), config.make_vector_env(1, 0)
    pool.close()
    assert validator is not None
    agent = config.make_agent(pool)
    rows = [validator.validate(agent, steps, lambda: False)[0] for steps in (1_000, 2_000)]
    assert [row | {"step": 0} for row in rows[0]] == [row | {"step": 0} for row in rows[1]]


def test_best_score_is_not_remembered_if_its_checkpoint_was_not_saved(monkeypatch):
    """The next score is compared with the best checkpoint on the disk."""
    scores = iter([5.0, 3.0])
    monkeypatch.setattr(Validator, "validate", lambda *_, **__: ([], next(scores)))
    write, errors = checkpoints.write_checkpoint, [OSError(28, "No space left on device")]

    def fail_once(*arguments):
        if errors:
            raise errors.pop()
        return write(*arguments)

    monkeypatch.setattr(checkpoints, "write_checkpoint", fail_once)
    run = bestiary.train("toy/catch", run_dir="r", steps=1_600, valid_every=800, **SMALL)
    assert run.checkpoints[-1].load_state()["callbacks"]["validation"]["best_score"] == 3.0
    assert checkpoints.best_steps(run.path / "checkpoints") == 1_600


def test_interrupted_validation_is_repeated_after_resume(monkeypatch):
    options: dict[str, Any] = {"valid_every": 800, "valid_episodes": 10, **SMALL}
    validate = Validator.validate

    def interrupted(self, agent, steps, should_stop):
        os.kill(os.getpid(), signal.SIGINT)
        return validate(self, agent, steps, should_stop)

    monkeypatch.setattr(Validator, "validate", interrupted)
    with pytest.raises(Interrupted):
        bestiary.train("toy/catch", run_dir="r", steps=1_600, **options)
    run = bestiary.load("r")
    assert run.steps == 800
    assert not (run.path / "validation.csv").exists()
    monkeypatch.setattr(Validator, "validate", validate)
    run = resume(run)
    assert [int(row["step"]) for row in read_validation(run)] == [960, 1_600]  # the first one after the first update


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": "toy/catch", "valid_levels": "0:5"}, "toy/catch has no levels"),
        ({"env": "toy/catch", "valid_mode": "hard"}, "toy/catch has no modes"),
        ({"env": "procgen/maze:easy", "valid_levels": "9:3"}, "--valid-levels 9:3: the start is above the end"),
        ({"env": "procgen/bigfish:easy", "valid_mode": "memory"}, "bigfish has the modes easy, hard"),
    ],
)
def test_invalid_validation_options_are_rejected_before_training(options, message):
    with pytest.raises(UserError) as caught:
        bestiary.train(options.pop("env"), run_dir="r", **options)
    assert message in str(caught.value)
