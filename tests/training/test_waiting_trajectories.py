"""Batches that are assembled from the trajectories of several rollouts."""

import random
from typing import Any

import pytest
import torch

import bestiary
from bestiary.config.resolve import resolve
from bestiary.rollout import Rollout, concatenate
from bestiary.training.factory import make_actors_and_learner
from bestiary.training.waiting_trajectories import WaitingTrajectories
from bestiary.utils.errors import UserError

CPU = torch.device("cpu")


def numbered(first: int, count: int) -> Rollout:
    """Return a rollout of 2 steps whose trajectories have consecutive numbers as rewards."""
    rollout = Rollout.empty(2, count, {}, {}, (torch.arange(first, first + count),))
    rollout.reward[:] = torch.arange(first, first + count)
    return rollout


@pytest.mark.parametrize("batch_size", [1, 4, 7, 32])
def test_all_trajectories_are_used_once_and_in_order(batch_size: int) -> None:
    generator, waiting, used, first = random.Random(1), WaitingTrajectories(batch_size), [], 0
    for _ in range(30):
        rollouts = []
        for count in generator.choices(range(1, 12), k=2):
            rollouts.append(numbered(first, count))
            first += count
        complete = waiting.complete(rollouts)
        numbers = [int(number) for rollout in complete for number in rollout.reward[0]]
        assert numbers == [int(number) for rollout in complete for number in rollout.state[0]]
        assert len(numbers) % batch_size == 0
        used += numbers
        # Save and load after each call: nothing is lost.
        loaded = WaitingTrajectories(batch_size)
        loaded.load({name: tensor.clone() for name, tensor in waiting.save().items()}, CPU)
        waiting = loaded
    assert used == list(range(len(used)))
    assert first - len(used) < batch_size


def test_rollouts_that_fit_exactly_are_not_copied() -> None:
    rollouts = [numbered(0, 4), numbered(4, 4)]
    for batch_size in (4, 8, None):
        complete = WaitingTrajectories(batch_size).complete(rollouts)
        assert all(found is rollout for found, rollout in zip(complete, rollouts, strict=True))


def test_waiting_trajectories_do_not_keep_the_memory_of_the_rollout() -> None:
    waiting = WaitingTrajectories(100)
    waiting.complete([numbered(0, 1001)])
    assert waiting.rollout is not None
    assert waiting.rollout.reward.untyped_storage().nbytes() == 3 * 1 * 4


@pytest.mark.parametrize("damage", ["more than a batch", "short", "not finite", "missing"])
def test_damaged_trajectories_in_a_checkpoint_are_refused(damage: str) -> None:
    config = resolve({"env": "toy/catch", "runtime": "serial", "num_envs": 3, "batch_size": 5})
    (actor,), learner = make_actors_and_learner(config)
    actor.start()
    learner.learn([actor.collect()])
    saved = learner.save()
    learner.load(saved, learner.counters())
    algorithm = saved["algorithm"]
    if damage == "more than a batch":
        rollout = learner.waiting.rollout
        assert rollout is not None
        learner.waiting.rollout = concatenate([rollout, rollout])
        saved = learner.save()
    elif damage == "short":
        algorithm["waiting.reward"] = algorithm["waiting.reward"][1:]
    elif damage == "not finite":
        algorithm["waiting.value"] = algorithm["waiting.value"] * torch.nan
    else:
        del algorithm["waiting.log_prob"]
    with pytest.raises(UserError, match=r"algorithm.safetensors does not fit Impala"):
        learner.load(saved, learner.counters())
    actor.pool.close()


LOCAL: dict[str, Any] = {"runtime": "local", "rollout_length": 5, "log_every": 100}


@pytest.mark.parametrize(
    "options",
    [
        {"num_envs": 9, "batch_size": 4},
        {"num_envs": 9, "batch_size": 4, "pools": 4, "actor_threads": 2},
        {"num_envs": 13, "batch_size": 2, "max_lag": 7},
        {"num_envs": 5, "batch_size": 8, "max_lag": 2},
        {"num_envs": 9, "batch_size": 4, "algo.reuse": 2},
        {"num_envs": 1, "batch_size": 3},
    ],
    ids=str,
)
def test_policy_lag_is_at_most_max_lag_and_no_trajectory_is_lost(options: dict[str, Any]) -> None:
    run = bestiary.train("toy/catch", run_dir="r", steps=2_000, **{**LOCAL, **options})
    assert run.metrics["max_policy_lag"].max() <= run.config.training.max_lag
    updates = run.metrics["updates"][-1] / options.get("algo.reuse", 1)
    trajectories = run.steps // LOCAL["rollout_length"]
    assert 0 <= trajectories - updates * options["batch_size"] < options["batch_size"]


@pytest.mark.parametrize("options", [{}, {"algo": "clear"}, {"algo.reward_clipping": "return_std"}], ids=str)
def test_serial_and_local_runtimes_agree(options: dict[str, Any]) -> None:
    """With one pool and no policy lag, both runtimes use the same weights for each rollout."""
    options = {"memory": "gru", "num_envs": 7, "batch_size": 4, "rollout_length": 5, "steps": 1_000, **options}
    serial = bestiary.train("toy/recall", run_dir="serial", runtime="serial", **options)
    local = bestiary.train("toy/recall", run_dir="local", runtime="local", pools=1, lag=0, **options)
    for name in ("model", "optimizer", "algorithm"):
        files = [run.checkpoints[-1].path / f"{name}.safetensors" for run in (serial, local)]
        assert files[0].read_bytes() == files[1].read_bytes(), name


def test_tasks_with_unequal_numbers_of_environments(capsys: pytest.CaptureFixture[str]) -> None:
    games = ["leaper", "starpilot", "maze"]
    options: dict[str, Any] = {"num_envs": 8, "batch_size": 3, "rollout_length": 4, "steps": 64, "log_every": 32}
    run = bestiary.train("procgen/{leaper,starpilot,maze}:easy", run_dir="r", record=True, torso="mlp", **options)
    text = " ".join(capsys.readouterr().err.split())
    assert "the tasks have unequal numbers of environments (leaper-easy 3, starpilot-easy 3, maze-easy 2)" in text
    assert "each rollout has 4 trajectories and each batch 3, so up to 2 trajectories wait" in text
    steps = [run.metrics[f"procgen/{game}:easy/steps"][-1] for game in games]
    assert steps == [run.steps * count // 8 for count in (3, 3, 2)]
