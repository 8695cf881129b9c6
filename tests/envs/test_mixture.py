"""Several tasks as one pool: the rows are those of the tasks' own pools, in their places."""

import numpy as np
import pytest

import bestiary
from bestiary.config import make_pool
from bestiary.envs import make
from bestiary.envs.atari import AtariPool
from bestiary.envs.mixture import MixturePool
from bestiary.errors import UserError
from bestiary.resolve import resolve

GAMES = ("atari/Pong", "atari/Carnival", "atari/SpaceInvaders")
OPTIONS = AtariPool.Options(time_limit=60, noops=1)


def test_rows_are_those_of_the_tasks_own_pools():
    """Row i plays task i mod K and sees exactly what a pool of that task alone would show it."""
    mixed = make_pool(GAMES, OPTIONS, 6, seed=3)
    seeds = np.random.SeedSequence(3).spawn(3)
    alone = [make(name, 2, seed, time_limit=60, noops=1) for name, seed in zip(GAMES, seeds, strict=True)]
    rng = np.random.default_rng(0)
    step, apart = mixed.reset(), [pool.reset() for pool in alone]
    truncations = 0
    for _ in range(130):
        np.testing.assert_array_equal(step.task, [0, 1, 2, 0, 1, 2])
        for k, own in enumerate(apart):
            for name in ("reward", "done", "truncated", "game_over"):
                np.testing.assert_array_equal(getattr(step, name)[k::3], getattr(own, name))
            np.testing.assert_array_equal(step.observation["image"][k::3], own.observation["image"])
            np.testing.assert_array_equal(step.measures["ram"][k::3], own.measures["ram"])
        if step.truncated.any():
            truncations += 1
            rows = np.flatnonzero(step.truncated)
            finals = {row: image for row, image in zip(rows, step.final["image"], strict=True)}
            for k, own in enumerate(apart):
                for place, image in zip(np.flatnonzero(own.truncated), own.final.get("image", ()), strict=True):
                    np.testing.assert_array_equal(finals[place * 3 + k], image)
        actions = rng.integers(0, 6, 6)
        mixed.send(actions)
        for k, pool in enumerate(alone):
            pool.send(actions[k::3])
        step, apart = mixed.recv(), [pool.recv() for pool in alone]
    assert truncations
    assert step.observation["image"].strides[1] == 1  # channels last, as convolutions like it
    for pool in (mixed, *alone):
        pool.close()


def test_saved_and_loaded_goes_on_the_same():
    one, two = (make_pool(GAMES[:2], OPTIONS, 4, seed=1) for _ in range(2))
    one.reset()
    rng = np.random.default_rng(0)
    for actions in rng.integers(0, 6, (50, 4)):
        one.send(actions)
        one.recv()
    two.load(one.save())
    for actions in rng.integers(0, 6, (30, 4)):
        steps = []
        for pool in (one, two):
            pool.send(actions)
            steps.append(pool.recv())
        np.testing.assert_array_equal(steps[0].observation["image"], steps[1].observation["image"])
        np.testing.assert_array_equal(steps[0].reward, steps[1].reward)
    one.close()
    two.close()


def test_fewer_rows_than_tasks():
    """A pool of one, as an agent is built with, still knows all tasks."""
    pool = make_pool(GAMES, OPTIONS, 1, seed=1)
    assert pool.tasks == GAMES
    assert isinstance(pool, MixturePool)
    assert len(pool.pools) == 1
    pool.close()


def test_differing_actions_become_the_full_set():
    config = resolve({"env": ["atari/Pong", "atari/Breakout"]})
    assert config.env_options.full_actions
    pool = config.make_pool(2, 0)
    assert pool.action_spec.n == 18
    pool.close()
    assert not resolve({"env": list(GAMES)}).env_options.full_actions  # these three have the same six


def problems_of(**options) -> str:
    with pytest.raises(UserError) as caught:
        resolve(options)
    return "\n".join(caught.value.problems)


def test_what_cannot_be_one_run():
    assert "atari/Pong is there 2 times" in problems_of(env=["atari/Pong", "atari/Pong"])
    assert "is there 2 times" in problems_of(env=["procgen/starpilot", "procgen/starpilot:hard"])
    assert "of one family" in problems_of(env=["atari/Pong", "warehouse"])
    text = problems_of(env=["toy/catch", "toy/chain"])
    assert "toy/catch and toy/chain cannot be played by one agent: it would see image" in text
    assert "warehouse and warehouse:mini cannot be played" in problems_of(env=["warehouse", "warehouse:mini"])
    assert "--num-envs 32: 3 tasks in 2 pools need a multiple of 6; try 30" in problems_of(env=list(GAMES), num_envs=32)


def test_enough_environments_by_default():
    for count, algo in ((6, "impala"), (3, "ppo")):
        names = [f"atari/{game}" for game in "AirRaid Carnival DemonAttack NameThisGame Pong SpaceInvaders".split()]
        training = resolve({"env": names[:count], "algo": algo}).training
        assert training.num_envs % (2 * count) == 0
        assert training.num_envs >= 32


def test_braces_are_several_names():
    assert resolve({"env": "atari/{Pong,Carnival}"}).envs == ("atari/Pong", "atari/Carnival")


def test_metrics_have_columns_for_each_task_and_no_common_mean():
    run = bestiary.train(
        "procgen/{leaper,starpilot}:easy",
        run_dir="r",
        steps=2_400,
        num_envs=8,
        batch_size=4,
        popart=True,
        log_every=800,
    )
    metrics = run.metrics
    assert "return" not in metrics
    for task in ("procgen/leaper:easy", "procgen/starpilot:easy"):
        assert metrics[f"{task}/steps"][-1] == 1_200
        assert metrics[f"{task}/games"][-1] > 0
        assert np.isfinite(metrics[f"{task}/return"][-1])
        assert metrics[f"{task}/sigma"][-1] != 1
    assert set(run.episodes["task"]) == {"procgen/leaper:easy", "procgen/starpilot:easy"}
    further = bestiary.runtime.train.resume(run, steps=3_200)  # statistics and per-task counts go on
    assert further.metrics["procgen/leaper:easy/games"][-1] > metrics["procgen/leaper:easy/games"][-1]
