"""MultiTaskVectorEnv against the vector environments of its tasks, and configurations with several tasks."""

import numpy as np
import pytest

import bestiary
from bestiary.config.config import make_vector_env
from bestiary.config.resolve import resolve
from bestiary.envs import make_env
from bestiary.envs.atari import AtariVectorEnv
from bestiary.envs.multitask import MultiTaskVectorEnv
from bestiary.utils.errors import UserError

GAMES = ("atari/Pong", "atari/Carnival", "atari/SpaceInvaders")
OPTIONS = AtariVectorEnv.Options(time_limit=60, noop_max=1)


def test_rows_equal_those_of_single_task_environments():
    """Row i plays task i mod K and equals a row of a vector environment of this task alone."""
    mixed = make_vector_env(GAMES, OPTIONS, 6, seed=3)
    seeds = np.random.SeedSequence(3).spawn(3)
    single = [make_env(name, 2, seed, time_limit=60, noop_max=1) for name, seed in zip(GAMES, seeds, strict=True)]
    rng = np.random.default_rng(0)
    step, single_steps = mixed.reset(), [pool.reset() for pool in single]
    truncations = 0
    for _ in range(130):
        np.testing.assert_array_equal(step.task, [0, 1, 2, 0, 1, 2])
        for k, own in enumerate(single_steps):
            for name in ("reward", "done", "truncated", "game_over"):
                np.testing.assert_array_equal(getattr(step, name)[k::3], getattr(own, name))
            np.testing.assert_array_equal(step.observation["image"][k::3], own.observation["image"])
            np.testing.assert_array_equal(step.measures["ram"][k::3], own.measures["ram"])
        if step.truncated.any():
            truncations += 1
            rows = np.flatnonzero(step.truncated)
            finals = {row: image for row, image in zip(rows, step.final["image"], strict=True)}
            for k, own in enumerate(single_steps):
                for row, image in zip(np.flatnonzero(own.truncated), own.final.get("image", ()), strict=True):
                    np.testing.assert_array_equal(finals[row * 3 + k], image)
        actions = rng.integers(0, 6, 6)
        mixed.send(actions)
        for k, pool in enumerate(single):
            pool.send(actions[k::3])
        step, single_steps = mixed.recv(), [pool.recv() for pool in single]
    assert truncations
    assert step.observation["image"].strides[1] == 1  # channels-last memory
    for pool in (mixed, *single):
        pool.close()


def test_the_first_row_may_belong_to_another_task():
    pool = make_vector_env(GAMES, OPTIONS, 5, seed=3, first_env=4)
    np.testing.assert_array_equal(pool.reset().task, [1, 2, 0, 1, 2])
    single = make_env(GAMES[1], 2, np.random.SeedSequence(3).spawn(3)[1], time_limit=60, noop_max=1)
    np.testing.assert_array_equal(pool.reset().observation["image"][1 - 1 :: 3], single.reset().observation["image"])
    pool.close()
    single.close()


def test_a_loaded_environment_continues_identically():
    original, copy = (make_vector_env(GAMES[:2], OPTIONS, 4, seed=1) for _ in range(2))
    original.reset()
    rng = np.random.default_rng(0)
    for actions in rng.integers(0, 6, (50, 4)):
        original.send(actions)
        original.recv()
    copy.load(original.save())
    for actions in rng.integers(0, 6, (30, 4)):
        steps = []
        for pool in (original, copy):
            pool.send(actions)
            steps.append(pool.recv())
        np.testing.assert_array_equal(steps[0].observation["image"], steps[1].observation["image"])
        np.testing.assert_array_equal(steps[0].reward, steps[1].reward)
    original.close()
    copy.close()


def test_with_fewer_rows_than_tasks_all_tasks_are_listed():
    pool = make_vector_env(GAMES, OPTIONS, 1, seed=1)
    assert pool.tasks == GAMES
    assert isinstance(pool, MultiTaskVectorEnv)
    assert len(pool.pools) == 1
    pool.close()


def test_games_with_different_actions_use_the_full_action_set():
    config = resolve({"env": ["atari/Pong", "atari/Breakout"]})
    assert config.env_options.full_actions
    pool = config.make_vector_env(2, 0)
    assert pool.action_spec.n == 18
    pool.close()
    assert not resolve({"env": list(GAMES)}).env_options.full_actions  # these three have the same six


def problems_of(**options) -> str:
    with pytest.raises(UserError) as caught:
        resolve(options)
    return "\n".join(caught.value.problems)


def test_incompatible_tasks_are_refused():
    assert "atari/Pong is given 2 times" in problems_of(env=["atari/Pong", "atari/Pong"])
    assert "is given 2 times" in problems_of(env=["procgen/starpilot", "procgen/starpilot:hard"])
    assert "one environment family" in problems_of(env=["atari/Pong", "warehouse"])
    text = problems_of(env=["toy/catch", "toy/chain"])
    assert "one agent cannot play both toy/catch and toy/chain: their observations differ, image" in text
    assert "one agent cannot play both warehouse and warehouse:mini" in problems_of(env=["warehouse", "warehouse:mini"])


def test_the_default_number_of_environments_suits_the_number_of_tasks():
    for count, algo in ((6, "impala"), (3, "ppo")):
        names = [f"atari/{game}" for game in "AirRaid Carnival DemonAttack NameThisGame Pong SpaceInvaders".split()]
        training = resolve({"env": names[:count], "algo": algo}).training
        assert training.num_envs % (2 * count) == 0
        assert training.num_envs >= 32


def test_braces_expand_to_several_names():
    assert resolve({"env": "atari/{Pong,Carnival}"}).envs == ("atari/Pong", "atari/Carnival")


def test_metrics_have_columns_per_task_and_no_overall_return():
    run = bestiary.train(
        "procgen/{leaper,starpilot}:easy",
        run_dir="r",
        steps=2_400,
        num_envs=8,
        batch_size=4,
        critic="popart",
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
    further = bestiary.resume(run, steps=3_200)  # per-task statistics continue
    assert further.metrics["procgen/leaper:easy/games"][-1] > metrics["procgen/leaper:easy/games"][-1]
