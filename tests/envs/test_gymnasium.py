"""Gymnasium environments of every supported kind, tiny and scripted, through the pool."""

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from bestiary.envs import make
from bestiary.envs.gymnasium import GymnasiumPool
from bestiary.errors import RunError, UserError
from bestiary.rollout import ArraySpec, Step


class Scripted(gymnasium.Env):
    """Shows `shown[k]` after k steps, and ends as `ends` says after how many: (terminated, truncated)."""

    def __init__(
        self,
        space: spaces.Space,
        shown: list[Any],
        ends: dict[int, tuple[bool, bool]] | None = None,
        actions: spaces.Space | None = None,
    ):
        self.observation_space, self.shown, self.ends = space, shown, ends or {}
        self.action_space = actions or spaces.Discrete(3)
        self.age = 0
        self.taken: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.age = 0
        return self.shown[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.taken.append(action)
        self.age += 1
        terminated, truncated = self.ends.get(self.age, (False, False))
        return self.shown[self.age % len(self.shown)], float(self.age), terminated, truncated, {}


def pool_of(constructor: Callable[..., Any], num_envs: int = 1, render: bool = False) -> GymnasiumPool:
    return GymnasiumPool("tests/tiny.py:Tiny", num_envs, 0, GymnasiumPool.Options(), render, constructor)


def play(pool: GymnasiumPool, length: int) -> list[Step]:
    steps = [pool.reset()]
    for _ in range(length):
        pool.send(np.zeros(pool.num_envs, np.int64))
        steps.append(pool.recv())
    return steps


def pictures(*shape: int) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(0, 256, (3, *shape), dtype=np.uint8))


def box(shape: tuple[int, ...], kind: Any, low: Any = 0, high: Any = 255) -> spaces.Box:
    return spaces.Box(low, high, shape, kind)


LAST, FIRST, FLAT = pictures(5, 6, 3), pictures(2, 5, 6), pictures(5, 6)
FLOATS = [np.array([0.5, -1.0], np.float32), np.array([2.0, 3.0], np.float32)]
BITS = [np.array([1, 0, 1], np.int8), np.array([0, 0, 1], np.int8)]
PAIRS = [np.array([3, 0]), np.array([4, 2])]

# Space, what the environment shows in it, the kind and array that the agent sees of it.
READINGS: dict[str, tuple[spaces.Space, list[Any], str, list[Any]]] = {
    "picture, channels last": (box((5, 6, 3), np.uint8), LAST, "image", [x.transpose(2, 0, 1) for x in LAST]),
    "picture, channels first": (box((2, 5, 6), np.uint8), FIRST, "image", FIRST),
    "picture without channels": (box((5, 6), np.uint8), FLAT, "image", [x[None] for x in FLAT]),
    "float vector": (box((2,), np.float32, -5, 5), FLOATS, "vector", FLOATS),
    "double vector": (box((2,), np.float64, -5, 5), [x.astype(np.float64) for x in FLOATS], "vector", FLOATS),
    "byte vector": (box((2,), np.uint8), [np.array([0, 255], np.uint8)], "vector", [[0, 255]]),
    "one number": (box((), np.float32, -5, 5), [np.float32(1.5)], "vector", [[1.5]]),
    "Discrete": (spaces.Discrete(3), [0, 2], "vector", [[1, 0, 0], [0, 0, 1]]),
    "Discrete from 5": (spaces.Discrete(3, start=5), [6, 7], "vector", [[0, 1, 0], [0, 0, 1]]),
    "MultiBinary": (spaces.MultiBinary(3), BITS, "vector", BITS),
    "MultiDiscrete": (
        spaces.MultiDiscrete([2, 3], start=[3, 0]),
        PAIRS,
        "vector",
        [[1, 0, 1, 0, 0], [0, 1, 0, 0, 1]],
    ),
}


@pytest.mark.parametrize("reading", READINGS)
def test_observations_become_images_and_vectors(reading: str) -> None:
    space, shown, kind, expected = READINGS[reading]
    pool = pool_of(lambda: Scripted(space, shown), num_envs=2)
    dtype = {"image": "uint8", "vector": "float32"}[kind]
    assert pool.observation_spec == {kind: ArraySpec(np.shape(expected[0]), dtype)}
    for t, step in enumerate(play(pool, 4)):
        seen = step.observation[kind]
        assert seen.dtype == dtype
        assert seen.flags.c_contiguous
        np.testing.assert_array_equal(seen, [expected[t % len(expected)]] * 2)


def test_a_dict_of_a_picture_and_numbers() -> None:
    space = spaces.Dict({"camera": box((5, 6, 3), np.uint8), "speed": box((2,), np.float32, -5, 5)})
    shown = [{"camera": LAST[t], "speed": FLOATS[t]} for t in range(2)]
    pool = pool_of(lambda: Scripted(space, shown), num_envs=2)
    assert pool.observation_spec == {"image": ArraySpec((3, 5, 6), "uint8"), "vector": ArraySpec((2,), "float32")}
    for t, step in enumerate(play(pool, 3)):
        np.testing.assert_array_equal(step.observation["image"], [LAST[t % 2].transpose(2, 0, 1)] * 2)
        np.testing.assert_array_equal(step.observation["vector"], [FLOATS[t % 2]] * 2)


def test_in_a_dict_kinds_that_occur_twice_keep_their_keys() -> None:
    space = spaces.Dict(
        {"speed": box((2,), np.float32, -5, 5), "gear": spaces.Discrete(3), "camera": box((5, 6), np.uint8)}
    )
    shown = [{"speed": FLOATS[t], "gear": t, "camera": FLAT[t]} for t in range(2)]
    pool = pool_of(lambda: Scripted(space, shown))
    assert pool.observation_spec.keys() == {"speed", "gear", "image"}
    last = play(pool, 1)[-1].observation
    np.testing.assert_array_equal(last["speed"][0], FLOATS[1])
    np.testing.assert_array_equal(last["gear"][0], [0, 1, 0])
    np.testing.assert_array_equal(last["image"][0, 0], FLAT[1])


def test_no_entry_of_a_dict_hides_another() -> None:
    """Two pictures keep their keys, one of which is called as the kind of the third entry is."""
    space = spaces.Dict(
        {"vector": box((5, 6), np.uint8), "map": box((5, 6), np.uint8), "speed": box((2,), np.float32, -5, 5)}
    )
    shown = [{"vector": FLAT[0], "map": FLAT[1], "speed": FLOATS[0]}]
    first = pool_of(lambda: Scripted(space, shown)).reset()
    sizes = sorted(array.size for array in first.observation.values())
    assert sizes == [2, 30, 30]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Tuple([spaces.Discrete(2), spaces.Tuple([spaces.Discrete(3)])]),
        spaces.Sequence(spaces.Discrete(2)),
        box((2, 3), np.float32),
        box((4, 5, 3), np.float32),
        box((2, 4, 5, 3), np.uint8),
        spaces.Box(np.arange(6, dtype=np.float32).reshape(2, 3), np.full((2, 3), 9, np.float32)),
        spaces.Dict({"inner": spaces.Dict({"deep": spaces.Discrete(2)})}),
        spaces.Dict({"fine": spaces.Discrete(2), "inner": box((2, 3), np.float32)}),
    ],
    ids=["text", "tuple", "sequence", "matrix", "float picture", "film", "uneven bounds", "nested dict", "dict entry"],
)
def test_an_unsupported_observation_is_one_clear_line(space: spaces.Space) -> None:
    with pytest.raises(UserError, match=r"tiny\.py:Tiny.*observations.*not supported") as caught:
        pool_of(lambda: Scripted(space, [None]))
    assert "\n" not in str(caught.value)
    if isinstance(space, spaces.Dict):
        assert "[inner]" in str(caught.value)


@pytest.mark.parametrize(
    "actions",
    [
        box((2,), np.float32, -1, 1),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary(4),
        spaces.Box(np.arange(6, dtype=np.float32).reshape(2, 3), np.full((2, 3), 9, np.float32)),
    ],
    ids=["continuous", "multidiscrete", "multibinary", "uneven bounds"],
)
def test_an_unsupported_action_space_is_one_clear_line(actions: spaces.Space) -> None:
    with pytest.raises(UserError, match=r"tiny\.py:Tiny.*actions.*not supported.*Discrete") as caught:
        pool_of(lambda: Scripted(spaces.Discrete(2), [0], actions=actions))
    assert "\n" not in str(caught.value)


def test_continuous_actions_of_a_registered_environment_are_refused() -> None:
    with pytest.raises(UserError, match=r"Pendulum-v1.*Discrete"):
        make("gymnasium/Pendulum-v1")


def test_actions_start_where_the_space_does() -> None:
    pool = pool_of(lambda: Scripted(spaces.Discrete(2), [0], actions=spaces.Discrete(3, start=-1)), num_envs=2)
    assert pool.action_spec.n == 3
    pool.reset()
    for actions in ([0, 2], [1, 0]):
        pool.send(np.array(actions))
        pool.recv()
    assert [list(map(int, env.unwrapped.taken)) for env in pool.env.envs] == [[-1, 0], [1, -1]]


def test_a_tuple_is_read_part_by_part() -> None:
    space = spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)])
    steps = play(pool_of(lambda: Scripted(space, [(0, 2), (1, 0)], {1: (False, True)})), 1)
    np.testing.assert_array_equal(steps[0].observation["0"], [[1, 0]])
    np.testing.assert_array_equal(steps[0].observation["1"], [[0, 0, 1]])
    np.testing.assert_array_equal(steps[1].final["1"], [[1, 0, 0]])


COUNTER = box((1,), np.float32, 0, 100)
COUNTS = [np.array([t], np.float32) for t in range(20)]


def test_a_termination_wins_over_a_truncation_in_the_same_step() -> None:
    steps = play(pool_of(lambda: Scripted(COUNTER, COUNTS, {3: (True, True)})), 3)
    assert steps[3].done[0]
    assert not steps[3].truncated[0]
    assert steps[3].final == {}
    assert steps[3].reward[0] == 3
    assert steps[3].observation["vector"][0, 0] == 0


def test_final_holds_the_true_last_observations_of_the_truncated_rows_in_order() -> None:
    ages: Iterator[dict[int, tuple[bool, bool]]] = iter(
        [{4: (False, True)}, {4: (True, False)}, {2: (False, True)}, {}]
    )
    steps = play(pool_of(lambda: Scripted(COUNTER, COUNTS, next(ages)), num_envs=4), 5)
    assert [step.truncated.tolist() for step in steps[1:]] == [
        [False, False, False, False],
        [False, False, True, False],
        [False, False, False, False],
        [True, False, True, False],
        [False, False, False, False],
    ]
    assert steps[2].final["vector"].tolist() == [[2]]
    assert steps[4].final["vector"].tolist() == [[4], [2]]
    assert steps[4].done.tolist() == steps[4].game_over.tolist() == [True, True, True, False]
    assert steps[4].observation["vector"].tolist() == [[0], [0], [0], [4]]
    assert [step.final for step in (steps[0], steps[1], steps[3], steps[5])] == [{}] * 4


def test_final_of_a_dict_and_of_a_picture() -> None:
    space = spaces.Dict({"camera": box((5, 6, 3), np.uint8), "gear": spaces.Discrete(3, start=4)})
    shown = [{"camera": LAST[t], "gear": 4 + t} for t in range(3)]
    cut = play(pool_of(lambda: Scripted(space, shown, {2: (False, True)}), num_envs=2), 2)[-1]
    np.testing.assert_array_equal(cut.final["image"], [LAST[2].transpose(2, 0, 1)] * 2)
    np.testing.assert_array_equal(cut.final["vector"], [[0, 0, 1]] * 2)
    np.testing.assert_array_equal(cut.observation["vector"], [[1, 0, 0]] * 2)


class OneBuffer(gymnasium.Env):
    """Counts in one array that it hands out again and again, as many fast environments do; cut off after three steps."""

    observation_space, action_space = COUNTER, spaces.Discrete(2)

    def __init__(self) -> None:
        self.buffer = np.zeros(1, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.buffer[:] = 0
        return self.buffer, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.buffer += 1
        return self.buffer, 0.0, False, bool(self.buffer[0] == 3), {}


def test_final_is_right_for_an_environment_that_uses_its_buffer_again() -> None:
    steps = play(pool_of(OneBuffer), 3)
    assert [int(step.observation["vector"][0, 0]) for step in steps] == [0, 1, 2, 0]
    assert steps[3].final["vector"].tolist() == [[3]]


@pytest.mark.parametrize(
    ("space", "shown"),
    [
        (COUNTER, [COUNTS[0], COUNTS[1], np.zeros(3, np.float32)]),
        (COUNTER, [COUNTS[0], COUNTS[1], np.array(["high"])]),
        (box((5, 6, 3), np.uint8), [LAST[0], LAST[1], LAST[0].transpose(2, 0, 1)]),
        (box((5, 6, 3), np.uint8), [LAST[0], LAST[1], LAST[0].astype(np.float32)]),
        (spaces.Discrete(3), [0, 1, 3]),
        (spaces.Discrete(3), [0, 1, -1]),
    ],
    ids=["longer", "text", "transposed", "float picture", "beyond Discrete", "below Discrete"],
)
def test_a_wrong_observation_in_a_later_step_names_the_environment(space: spaces.Space, shown: list[Any]) -> None:
    pool = pool_of(lambda: Scripted(space, shown), num_envs=2)
    play(pool, 1)
    pool.send(np.zeros(2, np.int64))
    with pytest.raises((ValueError, RunError), match=r"tiny\.py:Tiny"):
        pool.recv()


MAZE = """
    import gymnasium
    import numpy as np

    class Maze(gymnasium.Env):
        def __init__(self, *, size: int = 5, bonus: float = 1.0):
            self.observation_space = gymnasium.spaces.Discrete(size)
            self.action_space = gymnasium.spaces.Discrete(2)
            self.size, self.bonus, self.place = size, bonus, 0

        def reset(self, *, seed=None, options=None):
            self.place = 0
            return 0, {}

        def step(self, action):
            self.place = max(0, self.place + (1 if action else -1))
            end = self.place == self.size - 1
            return self.place, self.bonus * end, end, False, {}

    class Filmed(Maze):
        metadata = {"render_modes": ["rgb_array"], "render_fps": 5}

        def __init__(self, render_mode=None, *, size: int = 5):
            super().__init__(size=size)
            self.render_mode = render_mode

        def render(self):
            return np.full((2, self.size, 3), self.place, np.uint8)

    class Half:
        def reset(self):
            return 0
"""


@pytest.fixture
def maze(tmp_path: Path) -> Path:
    file = tmp_path / "my_maze.py"
    file.write_text(textwrap.dedent(MAZE))
    return file


def test_a_users_own_file_with_its_own_options(maze: Path) -> None:
    pool = make(f"{maze}:Maze", num_envs=2, size="4", bonus=2.5)
    assert pool.tasks == ("my_maze.py:Maze",)
    assert pool.observation_spec == {"vector": ArraySpec((4,), "float32")}
    pool.reset()
    rewards = []
    for _ in range(3):
        pool.send(np.array([1, 0]))
        step = pool.recv()
        rewards.append(step.reward.tolist())
    assert rewards == [[0, 0], [0, 0], [2.5, 0]]
    assert step.done.tolist() == [True, False]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Maze", {"sise": 3}, "no option sise; did you mean size"),
        ("Maze", {"size": "large"}, "expected a number"),
        ("Mase", {}, "has no Mase; did you mean Maze"),
        ("Half", {}, "Half lacks step"),
    ],
)
def test_mistakes_with_a_users_own_file(maze: Path, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make(f"{maze}:{name}", **options)
    assert "\n" not in str(caught.value)


def test_pictures_of_a_users_own_environment(maze: Path) -> None:
    pool = make(f"{maze}:Filmed", num_envs=2, render=True, size=6)
    pool.reset()
    pool.send(np.array([1, 0]))
    pool.recv()
    first, second = pool.render()
    assert first.shape == (2, 6, 3)
    assert (first == 1).all()
    assert (second == 0).all()


def test_an_environment_without_pictures_says_so(maze: Path) -> None:
    with pytest.raises(UserError, match=r"my_maze\.py:Maze.*no picture") as caught:
        make(f"{maze}:Maze", render=True)
    assert "\n" not in str(caught.value)
    pool = make(f"{maze}:Filmed")
    pool.reset()
    with pytest.raises(UserError, match="no picture"):
        pool.render()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gymnasium/CartPol-v1", "CartPole-v1"),
        ("gymnasium/cartpole-v1", "CartPole-v1"),
        ("gymnasium/CartPole-v99", "CartPole-v1"),
        ("CartPole-v1", "gymnasium/CartPole-v1"),
        ("gymnasum/CartPole-v1", "gymnasium"),
    ],
)
def test_an_unknown_name_is_one_line_with_the_nearest_right_one(name: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        make(name)
    message = str(caught.value)
    assert name in message
    assert hint in message.replace(name, "", 1)
    assert "\n" not in message


def test_processes_play_the_same_game() -> None:
    here = make("gymnasium/CartPole-v1", num_envs=2, seed=4)
    there = make("gymnasium/CartPole-v1", num_envs=2, seed=4, processes=True)
    rng = np.random.default_rng(0)
    try:
        np.testing.assert_array_equal(here.reset().observation["vector"], there.reset().observation["vector"])
        for _ in range(60):
            actions = rng.integers(2, size=2)
            here.send(actions)
            there.send(actions)
            ours, theirs = here.recv(), there.recv()
            for name in ("reward", "done", "truncated"):
                np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
            np.testing.assert_array_equal(ours.observation["vector"], theirs.observation["vector"])
    finally:
        there.close()
