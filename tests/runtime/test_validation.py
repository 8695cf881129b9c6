"""Validation while training: by steps, on levels of its own, touching nothing; the best checkpoint; transfer."""

import csv
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import bestiary
from bestiary.agents.critics import FIRST
from bestiary.analysis.evaluation import Part
from bestiary.errors import UserError
from bestiary.resolve import resolve
from bestiary.rollout import Episode
from bestiary.runs import checkpoints
from bestiary.runs.folder import Run
from bestiary.runtime.interrupts import Interrupted
from bestiary.runtime.transfer import take_over
from bestiary.runtime.validation import Validator, _score, check_validation, make_validator

SMALL: dict[str, Any] = {
    "runtime": "serial",
    "num_envs": 8,
    "batch_size": 8,
    "torso": "mlp",
    "torso.width": 16,
    "save_every": 0,
}


def rows_of(run):
    with (run.path / "validation.csv").open() as file:
        return list(csv.DictReader(file))


def test_it_changes_nothing_of_the_training():
    plain = bestiary.train("toy/catch", run_dir="plain", steps=3_200, **SMALL)
    watched = bestiary.train("toy/catch", run_dir="watched", steps=3_200, valid_every=1_000, valid_episodes=8, **SMALL)
    one, two = (checkpoints.choose(run.path).model() for run in (plain, watched))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert [int(row["step"]) for row in rows_of(watched)] == [1_120, 2_080, 3_040, 3_200]
    assert not (plain.path / "validation.csv").exists()


def test_the_best_checkpoint_is_kept_even_where_returns_are_negative():
    run = bestiary.train(
        "toy/catch", run_dir="r", steps=6_400, valid_every=800, valid_episodes=40, save_minutes=1e-9, lr=3e-3, **SMALL
    )
    rows = rows_of(run)
    best = max(rows, key=lambda row: float(row["return"]))
    assert float(rows[0]["return"]) < 0  # and yet the first was the best for a while
    assert checkpoints.best(run.path / "checkpoints") == int(best["step"])
    assert (run.path / "checkpoints" / "best" / "model.safetensors").exists()


def test_resumed_it_remembers_the_best():
    options: dict[str, Any] = {"valid_every": 800, "valid_episodes": 10, **SMALL}
    run = bestiary.train("toy/catch", run_dir="r", steps=1_600, **options)
    before = run.checkpoints[-1].state()["best"]
    run = bestiary.runtime.train.resume(run, steps=3_200)
    after = run.checkpoints[-1].state()["best"]
    assert after >= before
    assert [int(row["step"]) for row in rows_of(run)] == [800, 1_600, 2_400, 3_200]


def test_the_checkpoint_at_a_step_is_kept():
    run = bestiary.train("toy/catch", run_dir="r", steps=3_200, keep=(1_000, 1_900), save_minutes=1e-9, **SMALL)
    assert [c.steps for c in run.checkpoints][:2] == [1_120, 1_920]
    assert len(run.checkpoints) == 4  # and the two newest


@pytest.mark.parametrize("runtime", ["serial", "local"])
def test_what_a_run_began_with_can_be_kept(runtime):
    """The weights are those of the agent that was given, and a run goes on from there as it did the first time."""
    options: dict[str, Any] = {**SMALL, "runtime": runtime}
    first = bestiary.train("toy/catch", run_dir="first", steps=1_600, **options)
    run = bestiary.train("toy/catch", run_dir="r", steps=1_600, init_from="first", keep=(0,), **options)
    assert [c.steps for c in run.checkpoints] == [0, 1_600]
    for name, weights in first.agent().state_dict().items():
        assert torch.equal(run.agent(0).state_dict()[name], weights), name
    again = Path(shutil.copytree("r", "again", symlinks=True))
    shutil.rmtree(again / "checkpoints" / f"{1_600:012d}")
    shutil.rmtree("first")  # nobody needs it any more
    went_on = bestiary.runtime.train.resume(Run(again))
    assert [c.steps for c in went_on.checkpoints] == [0, 1_600]
    if runtime == "serial":
        for name, weights in run.agent(1_600).state_dict().items():
            assert torch.equal(went_on.agent(1_600).state_dict()[name], weights), name


def test_levels_and_modes_of_its_own(capsys):
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
    (row,) = rows_of(run)
    assert (row["task"], row["levels"], row["games"]) == ("procgen/maze:memory", "3:9", "2")
    assert "overlaps" not in capsys.readouterr().err  # another mode has other levels of the same numbers


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"valid_levels": "3:9"}, "--valid-levels 3:9 overlaps the levels of the training, 0:5"),
        ({"valid_every": 100}, "without --valid-levels, validation plays the levels of the training, 0:5"),
        ({"valid_levels": "5:9"}, ""),
        ({"levels": "all", "valid_levels": "5:9"}, "--valid-levels 5:9 overlaps the levels of the training, all"),
    ],
)
def test_levels_that_are_trained_on_are_warned_about(options, said, capsys):
    check_validation(resolve({"env": "procgen/maze:easy", "levels": "0:5", **options}))
    errors = capsys.readouterr().err
    assert said in errors if said else not errors


def test_the_score_is_the_mean_of_normalised_returns(capsys):
    """Of two games whose returns differ in scale, so that a mean of raw returns would choose otherwise."""

    def part(task, *returns):
        return Part(task, [Episode(0, task, r, 1, r, 1, True, 0, {}) for r in returns])

    easy = [part("procgen/leaper:easy", 10, 3), part("procgen/starpilot:easy", 2.5, 64)]
    assert _score(easy) == pytest.approx(0.5)
    assert _score([part("procgen/leaper:easy", 10), part("procgen/starpilot:easy", 2.5)]) == pytest.approx(0.5)
    assert _score([part("toy/catch", -1, 0)]) == -0.5
    memory = [part("procgen/maze:memory", 1), part("procgen/heist:memory", 2)]
    assert _score(memory) is None
    check_validation(resolve({"env": "procgen/{maze,heist}:memory", "levels": "0:5", "valid_levels": "9:12"}))
    assert "no common scale, so validation keeps no checkpoint as `best`" in capsys.readouterr().err


def test_the_same_agent_is_worth_the_same_whenever_it_is_asked():
    """The same levels and the same chances every time, so that only the agent differs."""
    config = resolve({"env": "procgen/maze:easy", "levels": "0:5", "valid_levels": "5:60", "valid_episodes": 6})
    validator, pool = make_validator(config), config.make_pool(1, 0)
    pool.close()
    assert validator is not None
    agent = config.make_agent(pool)
    rows = [validator.validate(agent, steps, lambda: False)[0] for steps in (1_000, 2_000)]
    assert [row | {"step": 0} for row in rows[0]] == [row | {"step": 0} for row in rows[1]]


def test_a_best_that_could_not_be_saved_is_not_the_best_so_far(monkeypatch):
    """The next score is compared with what is on the disk."""
    scores = iter([5.0, 3.0])
    monkeypatch.setattr(Validator, "validate", lambda *_: ([], next(scores)))
    write, refusals = checkpoints.write_checkpoint, [OSError(28, "No space left on device")]

    def full_at_first(*arguments):
        if refusals:
            raise refusals.pop()
        return write(*arguments)

    monkeypatch.setattr(checkpoints, "write_checkpoint", full_at_first)
    run = bestiary.train("toy/catch", run_dir="r", steps=1_600, valid_every=800, **SMALL)
    assert run.checkpoints[-1].state()["best"] == 3.0
    assert checkpoints.best(run.path / "checkpoints") == 1_600


def test_asked_to_stop_it_stops_and_is_made_up_for(monkeypatch):
    options: dict[str, Any] = {"valid_every": 800, "valid_episodes": 10, **SMALL}
    validate = Validator.validate

    def interrupted(self, agent, steps, stop):
        os.kill(os.getpid(), signal.SIGINT)
        return validate(self, agent, steps, stop)

    monkeypatch.setattr(Validator, "validate", interrupted)
    with pytest.raises(Interrupted):
        bestiary.train("toy/catch", run_dir="r", steps=1_600, **options)
    run = bestiary.load("r")
    assert run.steps == 800
    assert not (run.path / "validation.csv").exists()
    monkeypatch.setattr(Validator, "validate", validate)
    run = bestiary.runtime.train.resume(run)
    assert [int(row["step"]) for row in rows_of(run)] == [960, 1_600]  # the first at the first update


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"env": "toy/catch", "valid_levels": "0:5"}, "toy/catch has no levels"),
        ({"env": "toy/catch", "valid_mode": "hard"}, "toy/catch has no modes"),
        ({"env": "procgen/maze:easy", "valid_levels": "9:3"}, "--valid-levels 9:3: upside down"),
        ({"env": "procgen/bigfish:easy", "valid_mode": "memory"}, "bigfish has the modes easy, hard"),
    ],
)
def test_what_cannot_be_validated_is_refused_before_any_work(options, said):
    with pytest.raises(UserError) as caught:
        bestiary.train(options.pop("env"), run_dir="r", **options)
    assert said in str(caught.value)


def test_transfer_takes_over_what_fits():
    options: dict[str, Any] = {"runtime": "serial", "num_envs": 4, "batch_size": 4, "torso.width": 16, "steps": 80}
    options["critic.debias"] = False  # so that what was taken over hardly moves
    first = bestiary.train("atari/{Pong,Carnival}", run_dir="first", popart=True, **options)
    second = bestiary.train(
        "atari/{Carnival,SpaceInvaders}", run_dir="second", popart=True, init_from="first", **{**options, "lr": 1e-30}
    )
    old, new = (checkpoints.choose(run.path).model() for run in (first, second))
    for name in old:
        if name.startswith(("torso", "policy")):
            torch.testing.assert_close(new[name], old[name])
    torch.testing.assert_close(new["critic.nu"][0], old["critic.nu"][1], rtol=0.1, atol=0.1)  # Carnival's, gone on from


def test_transfer_takes_the_parts_of_the_agent_too():
    """`train atari/Pong --init-from RUN`, with nothing else said: all 18 actions, no centring, the same net and critic."""
    small: dict[str, Any] = {"runtime": "serial", "num_envs": 4, "batch_size": 4, "steps": 80}
    parts: dict[str, Any] = {
        "torso": "shallow",
        "torso.width": 16,
        "torso.center": False,
        "memory": "gru",
        "memory.hidden": 8,
    }
    first = bestiary.train("atari/{Pong,Breakout}", run_dir="first", popart=True, **small, **parts)
    second = bestiary.train("atari/Pong", run_dir="second", init_from="first", **{**small, "lr": 1e-30})
    assert second.config.parts["torso"] == first.config.parts["torso"]
    assert second.config.parts["critic"].name == "popart"
    assert second.config.env_options.full_actions
    old, new = (checkpoints.choose(run.path).model() for run in (first, second))
    for name in old:
        if not name.startswith("critic"):
            torch.testing.assert_close(new[name], old[name])


def test_a_critic_of_another_kind_begins_afresh(capsys):
    """A normalised value is no value: its weights would say something else to a critic that does not know the scale."""
    small: dict[str, Any] = {
        "runtime": "serial",
        "num_envs": 4,
        "batch_size": 4,
        "steps": 80,
        "torso": "mlp",
        "torso.width": 16,
    }
    bestiary.train("toy/catch", run_dir="first", popart=True, **small)
    for seed, critic, source in ((2, "shared", "first"), (3, "popart", "second")):
        capsys.readouterr()
        options = {**small, "lr": 1e-30, "seed": seed, "critic": critic, "init_from": source}
        run = bestiary.train("toy/catch", run_dir="second" if source == "first" else "third", **options)
        assert "critic begins afresh for toy/catch" in capsys.readouterr().err
        old, new = (checkpoints.choose(each.path).model() for each in (bestiary.load(source), run))
        assert torch.equal(old["policy.weight"], new["policy.weight"])
        assert not torch.allclose(old["critic.weight"], new["critic.weight"], rtol=0.01)


def test_a_critic_that_is_blind_to_tasks_is_taken_over_whatever_they_are_called(capsys):
    small: dict[str, Any] = {**SMALL, "steps": 80}
    first = bestiary.train("toy/catch", run_dir="first", **{**small, "batch_size": 4, "num_envs": 4})
    second = bestiary.train("toy/catch", run_dir="second", init_from="first", **{**small, "lr": 1e-30})
    old, new = (checkpoints.choose(run.path).model() for run in (first, second))
    torch.testing.assert_close(new["critic.weight"], old["critic.weight"])
    options: dict[str, Any] = {"runtime": "serial", "num_envs": 4, "batch_size": 4, "torso.width": 16, "steps": 80}
    first = bestiary.train("atari/Pong", run_dir="pong", **options)
    capsys.readouterr()
    second = bestiary.train("atari/Carnival", run_dir="carnival", init_from="pong", **{**options, "lr": 1e-30})
    old, new = (checkpoints.choose(run.path).model() for run in (first, second))
    torch.testing.assert_close(new["critic.weight"], old["critic.weight"])
    assert "afresh" not in capsys.readouterr().err


def test_returns_of_another_size_after_a_transfer_are_a_beginning():
    """Measured by the statistics of the other run, they were hundreds of deviations away, and all of them learnt from."""
    options: dict[str, Any] = {"num_envs": 4, "batch_size": 4, "unroll_length": 5, "log_every": 20, "popart": True}
    options |= {"runtime": "serial", "torso": "mlp", "torso.width": 16}
    small = bestiary.train("toy/catch", run_dir="small", **{**options, "steps": 2_400, "algo.reward_scale": 0.01})
    assert checkpoints.choose(small.path).model()["critic.updates"] > FIRST
    options |= {"steps": 400, "init_from": "small", "algo.reward_scale": 100.0}
    large = bestiary.train("toy/catch", run_dir="large", **options)
    assert large.metrics["unfit"][:8].max() == 1  # once a game has ended
    assert max(large.metrics["value_loss"][large.metrics["unfit"] == 0]) < 100


def test_other_actions_of_the_same_number_are_said_to_be_others():
    """Qbert has six actions, as Pong has, but UP and DOWN among them."""
    small: dict[str, Any] = {"runtime": "serial", "num_envs": 4, "batch_size": 4, "steps": 80, "torso.width": 16}
    pong = bestiary.train("atari/Pong", run_dir="pong", **small)
    pool = resolve({"env": "atari/Qbert"}).make_pool(1, 0)
    pool.close()
    for inputs, said in (("auto", "what was RIGHT there is UP here"), ("none", "")):
        config = resolve({"env": "atari/Qbert", "torso.width": 16, "agent.inputs": inputs})
        if not said:
            pong = bestiary.train("atari/Pong", run_dir="blind", **{**small, "agent.inputs": "none"})
        words = take_over(config.make_agent(pool), pool, pong)
        assert "policy begins afresh for UP, DOWN" in words
        assert said in words
        assert ("goes by its number" in words) == bool(said)


def test_other_actions_are_named():
    small: dict[str, Any] = {"runtime": "serial", "num_envs": 4, "batch_size": 4, "steps": 80, "torso.width": 16}
    bestiary.train("atari/Breakout", run_dir="four", **small)
    with pytest.raises(UserError, match=r"4 actions there, 6 here \(agents trained with --full-actions"):
        bestiary.train("atari/Pong", run_dir="six", init_from="four", **small)


def test_another_agent_is_refused():
    bestiary.train("toy/catch", run_dir="small", steps=80, **SMALL)
    with pytest.raises(UserError) as caught:
        bestiary.train("toy/catch", run_dir="large", init_from="small", **{**SMALL, "torso.width": 32})
    (problem,) = caught.value.problems
    assert "its agent is another one than this: torso.layers.0.weight: [16, 50] there, [32, 50] here" in problem
    with pytest.raises(UserError, match="there is no such run"):
        bestiary.train("toy/catch", run_dir="large", init_from="smal", **SMALL)
