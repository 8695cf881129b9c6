"""The Pool contract, held by one environment of each family."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from bestiary.envs import Pool, make
from bestiary.rollout import Arrays, Step

# A short time limit where random play would otherwise never be cut off.
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
BY_CHANCE = ["toy/recall", "toy/catch", "gymnasium/CartPole-v1", "atari/Breakout", "atari/Pong", *WAREHOUSES]
SAVEABLE = ["toy/bandit", "toy/chain", "toy/recall", "toy/catch", "atari/Breakout", "atari/Pong", *WAREHOUSES]

Opener = Callable[..., Pool]


@pytest.fixture
def opened() -> Iterator[Opener]:
    """`make` with the options of ENVIRONMENTS, closing its pools after the test."""
    pools: list[Pool] = []

    def opener(name: str, **options: Any) -> Pool:
        pools.append(make(name, **{**ENVIRONMENTS[name], **options}))
        return pools[-1]

    yield opener
    for pool in pools:
        pool.close()


def random_actions(pool: Pool, length: int, seed: int = 0) -> np.ndarray:
    """[length, N], one stream of actions an environment, the same whatever N."""
    rows = [np.random.default_rng([seed, i]).integers(pool.action_spec.n, size=length) for i in range(pool.num_envs)]
    return np.stack(rows, axis=1)


def advance(pool: Pool, actions: np.ndarray) -> list[Step]:
    steps = []
    for action in actions:
        pool.send(action)
        steps.append(pool.recv())
    return steps


def play(pool: Pool, length: int) -> list[Step]:
    first = pool.reset()
    return [first, *advance(pool, random_actions(pool, length))]


def arrays_of(step: Step) -> Arrays:
    """All arrays of a step by name."""
    nested = {"observation": step.observation, "measures": step.measures, "final": step.final}
    flat = {name: getattr(step, name) for name in ("reward", "done", "truncated", "game_over", "task")}
    return flat | {f"{group}.{name}": array for group, arrays in nested.items() for name, array in arrays.items()}


def assert_same(ours: Step, theirs: Step, rows: slice = slice(None)) -> None:
    """The same rows in both; final holds truncated rows only and is compared where all rows are."""
    mine, other = arrays_of(ours), arrays_of(theirs)
    if rows != slice(None):
        mine, other = ({k: v for k, v in arrays.items() if not k.startswith("final.")} for arrays in (mine, other))
    assert mine.keys() == other.keys()
    for name in mine:
        np.testing.assert_array_equal(mine[name][rows], other[name][rows], err_msg=name)


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
    """Some hundred random steps of three environments, and what each array was when it was handed out."""

    name: str
    pool: Pool
    steps: list[Step]
    copies: list[Arrays]


@pytest.fixture(scope="module", params=ENVIRONMENTS)
def record(request: pytest.FixtureRequest) -> Iterator[Record]:
    pool = make(request.param, num_envs=3, seed=1, **ENVIRONMENTS[request.param])
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


def test_the_first_step_opens_every_row(record: Record) -> None:
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


def test_arrays_handed_out_are_never_overwritten(record: Record) -> None:
    for step, copy in zip(record.steps, record.copies, strict=True):
        assert_equal(arrays_of(step), copy)


def test_the_same_seed_gives_the_same_trajectory(record: Record, opened: Opener) -> None:
    for ours, theirs in zip(play(opened(record.name, num_envs=3, seed=1), 300), record.steps, strict=True):
        assert_same(ours, theirs)


def test_row_i_is_environment_i_whatever_the_number_of_environments(record: Record, opened: Opener) -> None:
    for ours, theirs in zip(play(opened(record.name, num_envs=4, seed=1), 160), record.steps[:161], strict=True):
        assert_same(ours, theirs, rows=slice(0, 3))


@pytest.mark.parametrize("name", BY_CHANCE)
def test_another_seed_gives_another_trajectory(name: str, opened: Opener) -> None:
    first, second = (play(opened(name, num_envs=3, seed=seed), 40) for seed in (5, 6))
    assert differ(first, second)


@pytest.mark.parametrize("name", BY_CHANCE)
def test_environments_of_a_pool_differ_from_each_other(name: str, opened: Opener) -> None:
    """The same actions in all rows, so that only the rows' own chance can part them."""
    pool = opened(name, num_envs=4, seed=5)
    steps = [pool.reset(), *advance(pool, random_actions(pool, 40)[:, :1].repeat(4, axis=1))]
    (kind,) = pool.observation_spec
    lives = {b"".join(step.observation[kind][row].tobytes() for step in steps) for row in range(4)}
    assert len(lives) >= 3  # two Atari games may draw the same number of no-ops


def test_rows_do_not_move_when_others_end(opened: Opener) -> None:
    """Along the chain one row only walks right, one only left: each is always where its own actions brought it."""
    pool = opened("toy/chain", num_envs=2)
    pool.reset()
    for t, step in enumerate(advance(pool, np.tile([1, 0], (70, 1))), start=1):
        assert step.observation["vector"].argmax(axis=1).tolist() == [t % 7, 0]
        assert step.done.tolist() == [t % 7 == 0, t % 32 == 0]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_refused_actions_leave_the_pool_as_it_was(name: str, opened: Opener) -> None:
    disturbed, calm = opened(name, num_envs=2, seed=3), opened(name, num_envs=2, seed=3)
    disturbed.reset()
    calm.reset()
    for wrong in ([0, -1], [calm.action_spec.n, 0], [0], [0, 0, 0], [[0, 0]], [[0], [0]]):
        with pytest.raises(ValueError, match=f"2 whole numbers in 0..{calm.action_spec.n - 1}"):
            disturbed.send(np.array(wrong))
    actions = random_actions(calm, 20)
    for ours, theirs in zip(advance(disturbed, actions), advance(calm, actions), strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("wrong", [0.5, np.nan])
def test_actions_are_whole_numbers(wrong: float, opened: Opener) -> None:
    pool = opened("toy/bandit", num_envs=2)
    pool.reset()
    with pytest.raises(ValueError, match="whole numbers"):
        pool.send(np.array([0.0, wrong]))


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_pictures(name: str, opened: Opener) -> None:
    pool = opened(name, num_envs=2, seed=1, render=True)
    pool.reset()
    shots = [pool.render()]
    for action in random_actions(pool, 30):
        pool.send(action)
        pool.recv()
        shots.append(pool.render())
    for pictures in shots:
        assert len(pictures) == 2
        for picture in pictures:
            assert picture.dtype == np.uint8
            assert picture.ndim == 3
            assert picture.shape[2] == 3
    if name != "toy/bandit":  # between two pulls a bandit always looks the same
        assert any(not np.array_equal(shots[0][0], pictures[0]) for pictures in shots)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_what_can_be_saved_says_so(name: str, opened: Opener) -> None:
    pool = opened(name, num_envs=2)
    pool.reset()
    assert pool.saveable == (name in SAVEABLE)
    assert bool(pool.save()) == pool.saveable


@pytest.mark.parametrize("name", SAVEABLE)
def test_a_loaded_pool_continues_identically(name: str, opened: Opener) -> None:
    """Breakout without a short time limit, so that games of a different length and number run side by side."""
    options: dict[str, Any] = {"time_limit": 27_000} if name == "atari/Breakout" else {}
    original, copy = (opened(name, num_envs=3, seed=2, **options) for _ in range(2))
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
def test_a_pool_can_be_saved_before_its_first_step(name: str, opened: Opener) -> None:
    original, copy = (opened(name, num_envs=2, seed=2) for _ in range(2))
    original.reset()
    copy.load(original.save())
    actions = random_actions(original, 50)
    for ours, theirs in zip(advance(original, actions), advance(copy, actions), strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("name", SAVEABLE)
def test_playing_on_leaves_a_saved_state_alone(name: str, opened: Opener) -> None:
    pool = opened(name, num_envs=3, seed=2)
    pool.reset()
    actions = random_actions(pool, 100)
    advance(pool, actions[:50])
    saved = pool.save()
    before = copied(saved)
    advance(pool, actions[50:])
    assert_equal(saved, before)
