"""GymnasiumVectorEnv with small scripted environments of each supported kind, and with a user's file."""

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from bestiary.envs import make_env
from bestiary.envs.gymnasium_env import GymnasiumVectorEnv
from bestiary.rollout import ArraySpec, Step
from bestiary.utils.errors import RunError, UserError


class Scripted(gymnasium.Env):
    """Returns observation `observations[k]` after k steps; `ends[k]` is (terminated, truncated) after k steps."""

    def __init__(
        self,
        space: spaces.Space,
        observations: list[Any],
        ends: dict[int, tuple[bool, bool]] | None = None,
        actions: spaces.Space | None = None,
    ):
        self.observation_space = space
        self.observations = observations
        self.ends = ends or {}
        self.action_space = actions or spaces.Discrete(3)
        self.steps = 0
        self.actions_taken: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.steps = 0
        return self.observations[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions_taken.append(action)
        self.steps += 1
        terminated, truncated = self.ends.get(self.steps, (False, False))
        observation = self.observations[self.steps % len(self.observations)]
        return observation, float(self.steps), terminated, truncated, {}


def make_pool(constructor: Callable[..., Any], num_envs: int = 1, render: bool = False) -> GymnasiumVectorEnv:
    return GymnasiumVectorEnv("tests/tiny.py:Tiny", num_envs, 0, GymnasiumVectorEnv.Options(), render, constructor)


def play(pool: GymnasiumVectorEnv, length: int) -> list[Step]:
    steps = [pool.reset()]
    for _ in range(length):
        pool.send(np.zeros(pool.num_envs, np.int64))
        steps.append(pool.recv())
    return steps


def random_images(*shape: int) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(0, 256, (3, *shape), dtype=np.uint8))


def box(shape: tuple[int, ...], kind: Any, low: Any = 0, high: Any = 255) -> spaces.Box:
    return spaces.Box(low, high, shape, kind)


CHANNELS_LAST = random_images(5, 6, 3)
CHANNELS_FIRST = random_images(2, 5, 6)
NO_CHANNELS = random_images(5, 6)
FLOATS = [np.array([0.5, -1.0], np.float32), np.array([2.0, 3.0], np.float32)]
BITS = [np.array([1, 0, 1], np.int8), np.array([0, 0, 1], np.int8)]
PAIRS = [np.array([3, 0]), np.array([4, 2])]

# Space, observations in it, and the kind and arrays that they are converted to.
CONVERSIONS: dict[str, tuple[spaces.Space, list[Any], str, list[Any]]] = {
    "image, channels last": (
        box((5, 6, 3), np.uint8),
        CHANNELS_LAST,
        "image",
        [x.transpose(2, 0, 1) for x in CHANNELS_LAST],
    ),
    "image, channels first": (box((2, 5, 6), np.uint8), CHANNELS_FIRST, "image", CHANNELS_FIRST),
    "image without channels": (box((5, 6), np.uint8), NO_CHANNELS, "image", [x[None] for x in NO_CHANNELS]),
    "float vector": (box((2,), np.float32, -5, 5), FLOATS, "vector", FLOATS),
    "double vector": (box((2,), np.float64, -5, 5), [x.astype(np.float64) for x in FLOATS], "vector", FLOATS),
    "byte vector": (box((2,), np.uint8), [np.array([0, 255], np.uint8)], "vector", [[0, 255]]),
    "scalar": (box((), np.float32, -5, 5), [np.float32(1.5)], "vector", [[1.5]]),
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


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_observations_become_images_and_vectors(conversion: str) -> None:
    space, observations, kind, expected = CONVERSIONS[conversion]
    pool = make_pool(lambda: Scripted(space, observations), num_envs=2)
    dtype = {"image": "uint8", "vector": "float32"}[kind]
    assert pool.observation_spec == {kind: ArraySpec(np.shape(expected[0]), dtype)}
    for t, step in enumerate(play(pool, 4)):
        observation = step.observation[kind]
        assert observation.dtype == dtype
        assert observation.flags.c_contiguous
        np.testing.assert_array_equal(observation, [expected[t % len(expected)]] * 2)


def test_a_dict_of_an_image_and_a_vector() -> None:
    space = spaces.Dict({"camera": box((5, 6, 3), np.uint8), "speed": box((2,), np.float32, -5, 5)})
    observations = [{"camera": CHANNELS_LAST[t], "speed": FLOATS[t]} for t in range(2)]
    pool = make_pool(lambda: Scripted(space, observations), num_envs=2)
    assert pool.observation_spec == {"image": ArraySpec((3, 5, 6), "uint8"), "vector": ArraySpec((2,), "float32")}
    for t, step in enumerate(play(pool, 3)):
        np.testing.assert_array_equal(step.observation["image"], [CHANNELS_LAST[t % 2].transpose(2, 0, 1)] * 2)
        np.testing.assert_array_equal(step.observation["vector"], [FLOATS[t % 2]] * 2)


def test_in_a_dict_kinds_that_occur_twice_keep_their_keys() -> None:
    space = spaces.Dict(
        {"speed": box((2,), np.float32, -5, 5), "gear": spaces.Discrete(3), "camera": box((5, 6), np.uint8)}
    )
    observations = [{"speed": FLOATS[t], "gear": t, "camera": NO_CHANNELS[t]} for t in range(2)]
    pool = make_pool(lambda: Scripted(space, observations))
    assert pool.observation_spec.keys() == {"speed", "gear", "image"}
    last = play(pool, 1)[-1].observation
    np.testing.assert_array_equal(last["speed"][0], FLOATS[1])
    np.testing.assert_array_equal(last["gear"][0], [0, 1, 0])
    np.testing.assert_array_equal(last["image"][0, 0], NO_CHANNELS[1])


def test_no_entry_of_a_dict_replaces_another() -> None:
    """Two images keep their keys; one of the keys is the kind of the third entry."""
    space = spaces.Dict(
        {"vector": box((5, 6), np.uint8), "map": box((5, 6), np.uint8), "speed": box((2,), np.float32, -5, 5)}
    )
    observations = [{"vector": NO_CHANNELS[0], "map": NO_CHANNELS[1], "speed": FLOATS[0]}]
    first = make_pool(lambda: Scripted(space, observations)).reset()
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
    ids=[
        "text",
        "tuple",
        "sequence",
        "matrix",
        "float image",
        "4d image",
        "uneven bounds",
        "nested dict",
        "dict entry",
    ],
)
def test_an_unsupported_observation_space_is_refused_in_one_line(space: spaces.Space) -> None:
    with pytest.raises(UserError, match=r"tiny\.py:Tiny.*observation space.*not supported") as caught:
        make_pool(lambda: Scripted(space, [None]))
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
def test_an_unsupported_action_space_is_refused_in_one_line(actions: spaces.Space) -> None:
    with pytest.raises(UserError, match=r"tiny\.py:Tiny.*action space.*not supported.*Discrete") as caught:
        make_pool(lambda: Scripted(spaces.Discrete(2), [0], actions=actions))
    assert "\n" not in str(caught.value)


def test_continuous_actions_of_a_registered_environment_are_refused() -> None:
    with pytest.raises(UserError, match=r"Pendulum-v1.*Discrete"):
        make_env("gymnasium/Pendulum-v1")


def test_actions_are_offset_by_the_start_of_the_space() -> None:
    pool = make_pool(lambda: Scripted(spaces.Discrete(2), [0], actions=spaces.Discrete(3, start=-1)), num_envs=2)
    assert pool.action_spec.n == 3
    pool.reset()
    for actions in ([0, 2], [1, 0]):
        pool.send(np.array(actions))
        pool.recv()
    assert [list(map(int, env.unwrapped.actions_taken)) for env in pool.env.envs] == [[-1, 0], [1, -1]]


def test_a_tuple_becomes_one_array_per_item() -> None:
    space = spaces.Tuple([spaces.Discrete(2), spaces.Discrete(3)])
    steps = play(make_pool(lambda: Scripted(space, [(0, 2), (1, 0)], {1: (False, True)})), 1)
    np.testing.assert_array_equal(steps[0].observation["0"], [[1, 0]])
    np.testing.assert_array_equal(steps[0].observation["1"], [[0, 0, 1]])
    np.testing.assert_array_equal(steps[1].final["1"], [[1, 0, 0]])


COUNTER = box((1,), np.float32, 0, 100)
COUNTS = [np.array([t], np.float32) for t in range(20)]


def test_termination_and_truncation_in_the_same_step_is_a_termination() -> None:
    steps = play(make_pool(lambda: Scripted(COUNTER, COUNTS, {3: (True, True)})), 3)
    assert steps[3].done[0]
    assert not steps[3].truncated[0]
    assert steps[3].final == {}
    assert steps[3].reward[0] == 3
    assert steps[3].observation["vector"][0, 0] == 0


def test_final_has_the_last_observations_of_the_truncated_rows_in_order() -> None:
    # The first environment serves only to find the measures.
    ends: Iterator[dict[int, tuple[bool, bool]]] = iter(
        [{}, {4: (False, True)}, {4: (True, False)}, {2: (False, True)}, {}]
    )
    steps = play(make_pool(lambda: Scripted(COUNTER, COUNTS, next(ends)), num_envs=4), 5)
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


def test_final_observations_of_a_dict() -> None:
    space = spaces.Dict({"camera": box((5, 6, 3), np.uint8), "gear": spaces.Discrete(3, start=4)})
    observations = [{"camera": CHANNELS_LAST[t], "gear": 4 + t} for t in range(3)]
    last = play(make_pool(lambda: Scripted(space, observations, {2: (False, True)}), num_envs=2), 2)[-1]
    np.testing.assert_array_equal(last.final["image"], [CHANNELS_LAST[2].transpose(2, 0, 1)] * 2)
    np.testing.assert_array_equal(last.final["vector"], [[0, 0, 1]] * 2)
    np.testing.assert_array_equal(last.observation["vector"], [[1, 0, 0]] * 2)


class BufferReusingEnv(gymnasium.Env):
    """Counts steps in one array that it returns each time, as many fast environments do; truncated after 3 steps."""

    observation_space, action_space = COUNTER, spaces.Discrete(2)

    def __init__(self) -> None:
        self.buffer = np.zeros(1, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.buffer[:] = 0
        return self.buffer, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.buffer += 1
        return self.buffer, 0.0, False, bool(self.buffer[0] == 3), {}


def test_final_is_correct_for_an_environment_that_reuses_its_buffer() -> None:
    steps = play(make_pool(BufferReusingEnv), 3)
    assert [int(step.observation["vector"][0, 0]) for step in steps] == [0, 1, 2, 0]
    assert steps[3].final["vector"].tolist() == [[3]]


@pytest.mark.parametrize(
    ("space", "observations"),
    [
        (COUNTER, [COUNTS[0], COUNTS[1], np.zeros(3, np.float32)]),
        (COUNTER, [COUNTS[0], COUNTS[1], np.array(["high"])]),
        (box((5, 6, 3), np.uint8), [CHANNELS_LAST[0], CHANNELS_LAST[1], CHANNELS_LAST[0].transpose(2, 0, 1)]),
        (box((5, 6, 3), np.uint8), [CHANNELS_LAST[0], CHANNELS_LAST[1], CHANNELS_LAST[0].astype(np.float32)]),
        (spaces.Discrete(3), [0, 1, 3]),
        (spaces.Discrete(3), [0, 1, -1]),
    ],
    ids=["longer", "text", "transposed", "float image", "beyond Discrete", "below Discrete"],
)
def test_an_invalid_observation_in_a_later_step_names_the_environment(
    space: spaces.Space, observations: list[Any]
) -> None:
    pool = make_pool(lambda: Scripted(space, observations), num_envs=2)
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
            self.size, self.bonus, self.cell = size, bonus, 0

        def reset(self, *, seed=None, options=None):
            self.cell = 0
            return 0, {}

        def step(self, action):
            self.cell = max(0, self.cell + (1 if action else -1))
            end = self.cell == self.size - 1
            return self.cell, self.bonus * end, end, False, {}

    class RenderedMaze(Maze):
        metadata = {"render_modes": ["rgb_array"], "render_fps": 5}

        def __init__(self, render_mode=None, *, size: int = 5):
            super().__init__(size=size)
            self.render_mode = render_mode

        def render(self):
            return np.full((2, self.size, 3), self.cell, np.uint8)

    class Incomplete:
        def reset(self):
            return 0
"""


@pytest.fixture
def maze(tmp_path: Path) -> Path:
    file = tmp_path / "my_maze.py"
    file.write_text(textwrap.dedent(MAZE))
    return file


def test_an_environment_in_a_users_file_has_its_own_options(maze: Path) -> None:
    pool = make_env(f"{maze}:Maze", num_envs=2, size="4", bonus=2.5)
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
        ("Maze", {"sise": 3}, "unknown option sise; did you mean size"),
        ("Maze", {"size": "large"}, "expected a number"),
        ("Mase", {}, "has no Mase; did you mean Maze"),
        ("Incomplete", {}, "Incomplete.*step"),
    ],
)
def test_invalid_names_and_options_of_a_users_file(
    maze: Path, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        make_env(f"{maze}:{name}", **options)
    assert "\n" not in str(caught.value)


def test_rendered_images_of_an_environment_in_a_users_file(maze: Path) -> None:
    pool = make_env(f"{maze}:RenderedMaze", num_envs=2, render=True, size=6)
    pool.reset()
    pool.send(np.array([1, 0]))
    pool.recv()
    first, second = pool.render()
    assert first.shape == (2, 6, 3)
    assert (first == 1).all()
    assert (second == 0).all()


def test_an_environment_without_rgb_images_cannot_be_rendered(maze: Path) -> None:
    with pytest.raises(UserError, match=r"my_maze\.py:Maze.*cannot be rendered") as caught:
        make_env(f"{maze}:Maze", render=True)
    assert "\n" not in str(caught.value)
    pool = make_env(f"{maze}:RenderedMaze")
    pool.reset()
    with pytest.raises(UserError, match="cannot be rendered"):
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
def test_an_unknown_name_is_refused_with_a_suggestion(name: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        make_env(name)
    message = str(caught.value)
    assert name in message
    assert hint in message.replace(name, "", 1)
    assert "\n" not in message


def test_processes_give_the_same_steps() -> None:
    serial = make_env("gymnasium/CartPole-v1", num_envs=2, seed=4)
    parallel = make_env("gymnasium/CartPole-v1", num_envs=2, seed=4, processes=True)
    rng = np.random.default_rng(0)
    try:
        np.testing.assert_array_equal(serial.reset().observation["vector"], parallel.reset().observation["vector"])
        for _ in range(60):
            actions = rng.integers(2, size=2)
            serial.send(actions)
            parallel.send(actions)
            expected, actual = serial.recv(), parallel.recv()
            for name in ("reward", "done", "truncated"):
                np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))
            np.testing.assert_array_equal(actual.observation["vector"], expected.observation["vector"])
    finally:
        parallel.close()
