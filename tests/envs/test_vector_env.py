"""The contract of vector environments, checked for environments of each family."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from bestiary.envs import VectorEnv, make_env
from bestiary.envs.vector_env import EnvInterface, VectorEnvWrapper
from bestiary.rollout import Arrays, Step

# Short time limits, so that random play is truncated.
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "toy/bandit": {},
    "toy/chain": {},
    "toy/recall": {"time_limit": 7, "delay": 8},
    "toy/catch": {},
    "warehouse": {"frame_stack": 3},
    "warehouse:memory": {"observation": "image"},
    "gymnasium/CartPole-v1": {},
    "atari/Breakout": {"time_limit": 150},
    "atari/Pong": {"time_limit": 140},
}
WAREHOUSES = ["warehouse", "warehouse:memory"]
TRUNCATING = ["toy/chain", "toy/recall", "atari/Breakout", "atari/Pong", *WAREHOUSES]
RANDOM = ["toy/recall", "toy/catch", "gymnasium/CartPole-v1", "atari/Breakout", "atari/Pong", *WAREHOUSES]
SAVEABLE = ["toy/bandit", "toy/chain", "toy/recall", "toy/catch", "atari/Breakout", "atari/Pong", *WAREHOUSES]

OpenEnv = Callable[..., VectorEnv]


@pytest.fixture
def open_env() -> Iterator[OpenEnv]:
    """Return `make_env` with the options of ENVIRONMENTS; the environments are closed after the test."""
    pools: list[VectorEnv] = []

    def open_one(name: str, **options: Any) -> VectorEnv:
        pools.append(make_env(name, **{**ENVIRONMENTS[name], **options}))
        return pools[-1]

    yield open_one
    for pool in pools:
        pool.close()


def random_actions(pool: VectorEnv, length: int, seed: int = 0) -> np.ndarray:
    """Return actions [length,N]; the actions of an environment do not depend on N."""
    rows = [np.random.default_rng([seed, i]).integers(pool.action_spec.n, size=length) for i in range(pool.num_envs)]
    return np.stack(rows, axis=1)


def advance(pool: VectorEnv, actions: np.ndarray) -> list[Step]:
    steps = []
    for action in actions:
        pool.send(action)
        steps.append(pool.recv())
    return steps


def play(pool: VectorEnv, length: int) -> list[Step]:
    first = pool.reset()
    return [first, *advance(pool, random_actions(pool, length))]


def arrays_of(step: Step) -> Arrays:
    """Return all arrays of a step by name."""
    nested = {"observation": step.observation, "measures": step.measures, "final": step.final}
    flat = {name: getattr(step, name) for name in ("reward", "done", "truncated", "game_over", "task")}
    return flat | {f"{group}.{name}": array for group, arrays in nested.items() for name, array in arrays.items()}


def assert_same(ours: Step, theirs: Step, rows: slice = slice(None)) -> None:
    """Compare the rows of two steps. `final` has only truncated rows, so it is compared only if all rows are."""
    actual, expected = arrays_of(ours), arrays_of(theirs)
    if rows != slice(None):
        actual = {k: v for k, v in actual.items() if not k.startswith("final.")}
        expected = {k: v for k, v in expected.items() if not k.startswith("final.")}
    assert actual.keys() == expected.keys()
    for name in actual:
        np.testing.assert_array_equal(actual[name][rows], expected[name][rows], err_msg=name)


def copied(arrays: Arrays) -> Arrays:
    return {name: array.copy() for name, array in arrays.items()}


def assert_equal(arrays: Arrays, expected: Arrays) -> None:
    assert arrays.keys() == expected.keys()
    for name in arrays:
        np.testing.assert_array_equal(arrays[name], expected[name], err_msg=name)


def differ(ours: list[Step], theirs: list[Step]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return any(not np.array_equal(a.observation[kind], b.observation[kind]) for a, b in pairs for kind in a.observation)


@dataclass
class Record:
    """300 random steps of three environments, and copies of all arrays at the time they were returned."""

    name: str
    pool: VectorEnv
    steps: list[Step]
    copies: list[Arrays]


@pytest.fixture(scope="module", params=ENVIRONMENTS)
def record(request: pytest.FixtureRequest) -> Iterator[Record]:
    pool = make_env(request.param, num_envs=3, seed=1, **ENVIRONMENTS[request.param])
    steps = [pool.reset()]
    copies = [copied(arrays_of(steps[0]))]
    for action in random_actions(pool, 300):
        steps += advance(pool, action[None])
        copies.append(copied(arrays_of(steps[-1])))
    yield Record(request.param, pool, steps, copies)
    pool.close()


def test_steps_match_the_specs(record: Record) -> None:
    pool = record.pool
    assert pool.tasks == (record.name,)
    for step in record.steps:
        for array in (step.reward, step.done, step.truncated, step.game_over, step.task):
            assert array.shape == (3,)
        assert (step.reward.dtype, step.task.dtype) == (np.float32, np.int64)
        assert step.done.dtype == step.truncated.dtype == step.game_over.dtype == bool
        for arrays, specs in ((step.observation, pool.observation_spec), (step.measures, pool.measures_spec)):
            assert arrays.keys() == specs.keys()
            for name, spec in specs.items():
                assert arrays[name].shape == (3, *spec.shape)
                assert arrays[name].dtype == spec.dtype
        assert (step.task == 0).all()


def test_the_initial_step_has_done_set_and_no_reward(record: Record) -> None:
    first = record.steps[0]
    assert first.done.all()
    assert not first.reward.any()
    assert not first.truncated.any()
    assert not first.game_over.any()
    assert first.final == {}


def test_truncated_rows_are_done_and_have_a_final_observation(record: Record) -> None:
    for step in record.steps[1:]:
        assert not (step.truncated & ~step.done).any()
        assert not (step.game_over & ~step.done).any()
        if not step.truncated.any():
            assert step.final == {}
            continue
        assert step.final.keys() == record.pool.observation_spec.keys()
        for kind, spec in record.pool.observation_spec.items():
            assert step.final[kind].shape == (step.truncated.sum(), *spec.shape)
            assert step.final[kind].dtype == spec.dtype
    assert any(step.truncated.any() for step in record.steps) == (record.name in TRUNCATING)


def test_returned_arrays_are_never_overwritten(record: Record) -> None:
    for step, copy in zip(record.steps, record.copies, strict=True):
        assert_equal(arrays_of(step), copy)


def test_the_same_seed_gives_the_same_trajectory(record: Record, open_env: OpenEnv) -> None:
    for ours, theirs in zip(play(open_env(record.name, num_envs=3, seed=1), 300), record.steps, strict=True):
        assert_same(ours, theirs)


def test_row_i_is_environment_i_for_any_number_of_environments(record: Record, open_env: OpenEnv) -> None:
    for ours, theirs in zip(play(open_env(record.name, num_envs=4, seed=1), 160), record.steps[:161], strict=True):
        assert_same(ours, theirs, rows=slice(0, 3))


@pytest.mark.parametrize("name", RANDOM)
def test_another_seed_gives_another_trajectory(name: str, open_env: OpenEnv) -> None:
    first, second = (play(open_env(name, num_envs=3, seed=seed), 40) for seed in (5, 6))
    assert differ(first, second)


@pytest.mark.parametrize("name", RANDOM)
def test_environments_of_one_pool_differ_from_each_other(name: str, open_env: OpenEnv) -> None:
    """All rows get the same actions, so only their random streams can make them differ."""
    pool = open_env(name, num_envs=4, seed=5)
    steps = [pool.reset(), *advance(pool, random_actions(pool, 40)[:, :1].repeat(4, axis=1))]
    (kind,) = pool.observation_spec
    trajectories = {b"".join(step.observation[kind][row].tobytes() for step in steps) for row in range(4)}
    assert len(trajectories) >= 3  # two Atari games may draw the same number of no-ops


def test_rows_keep_their_order_when_other_rows_end(open_env: OpenEnv) -> None:
    """In the chain, one row always walks right, the other always left; each is in the cell its own actions lead to."""
    pool = open_env("toy/chain", num_envs=2)
    pool.reset()
    for t, step in enumerate(advance(pool, np.tile([1, 0], (70, 1))), start=1):
        assert step.observation["vector"].argmax(axis=1).tolist() == [t % 7, 0]
        assert step.done.tolist() == [t % 7 == 0, t % 32 == 0]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_refused_actions_do_not_change_the_state(name: str, open_env: OpenEnv) -> None:
    disturbed, calm = open_env(name, num_envs=2, seed=3), open_env(name, num_envs=2, seed=3)
    disturbed.reset()
    calm.reset()
    for wrong in ([0, -1], [calm.action_spec.n, 0], [0], [0, 0, 0], [[0, 0]], [[0], [0]]):
        with pytest.raises(ValueError, match=f"2 integers in 0..{calm.action_spec.n - 1}"):
            disturbed.send(np.array(wrong))
    actions = random_actions(calm, 20)
    for ours, theirs in zip(advance(disturbed, actions), advance(calm, actions), strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("wrong", [0.5, np.nan])
def test_actions_that_are_not_integers_are_refused(wrong: float, open_env: OpenEnv) -> None:
    pool = open_env("toy/bandit", num_envs=2)
    pool.reset()
    with pytest.raises(ValueError, match="integers"):
        pool.send(np.array([0.0, wrong]))


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_rendered_images(name: str, open_env: OpenEnv) -> None:
    pool = open_env(name, num_envs=2, seed=1, render=True)
    pool.reset()
    renders = [pool.render()]
    for action in random_actions(pool, 30):
        pool.send(action)
        pool.recv()
        renders.append(pool.render())
    for images in renders:
        assert len(images) == 2
        for image in images:
            assert image.dtype == np.uint8
            assert image.ndim == 3
            assert image.shape[2] == 3
    if name != "toy/bandit":  # the image of a bandit changes only with the last arm
        assert any(not np.array_equal(renders[0][0], images[0]) for images in renders)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_saveable_tells_whether_save_returns_a_state(name: str, open_env: OpenEnv) -> None:
    pool = open_env(name, num_envs=2)
    pool.reset()
    assert pool.saveable == (name in SAVEABLE)
    assert bool(pool.save()) == pool.saveable


@pytest.mark.parametrize("name", SAVEABLE)
def test_a_loaded_pool_continues_identically(name: str, open_env: OpenEnv) -> None:
    """Breakout has no short time limit here, so the environments differ in the number and length of their games."""
    options: dict[str, Any] = {"time_limit": 27_000} if name == "atari/Breakout" else {}
    original, copy = (open_env(name, num_envs=3, seed=2, **options) for _ in range(2))
    original.reset()
    actions = random_actions(original, 450)
    advance(original, actions[:250])
    state = copied(original.save())
    before = copied(state)
    copy.load(state)
    for ours, theirs in zip(advance(original, actions[250:]), advance(copy, actions[250:]), strict=True):
        assert_same(ours, theirs)
    assert_equal(state, before)


@pytest.mark.parametrize("name", SAVEABLE)
def test_a_pool_can_be_saved_before_its_first_step(name: str, open_env: OpenEnv) -> None:
    original, copy = (open_env(name, num_envs=2, seed=2) for _ in range(2))
    original.reset()
    copy.load(original.save())
    actions = random_actions(original, 50)
    for ours, theirs in zip(advance(original, actions), advance(copy, actions), strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("name", SAVEABLE)
def test_later_steps_do_not_change_a_saved_state(name: str, open_env: OpenEnv) -> None:
    pool = open_env(name, num_envs=3, seed=2)
    pool.reset()
    actions = random_actions(pool, 100)
    advance(pool, actions[:50])
    saved = pool.save()
    before = copied(saved)
    advance(pool, actions[50:])
    assert_equal(saved, before)


def test_wrapper_forwards_each_declared_attribute() -> None:
    """A new attribute of VectorEnv must not fall back to its default in a wrapped environment."""
    pool = make_env("toy/catch")
    different: dict[str, object] = {field.name: object() for field in dataclasses.fields(EnvInterface)}
    for name, value in different.items():
        setattr(pool, name, value)
    wrapper = VectorEnvWrapper(VectorEnvWrapper(pool))
    assert {name: getattr(wrapper, name) for name in different} == different
    assert wrapper.unwrapped is pool


def test_vector_environments_declare_the_attributes_of_their_interface() -> None:
    own = {"num_envs", "default_steps", "defaults", "vector_defaults", "components_enabled", "has_levels"}
    declared = set(inspect.get_annotations(VectorEnv)) - own
    assert declared == {field.name for field in dataclasses.fields(EnvInterface)}
