"""WarehouseVectorEnv: observations, episodes, saving, options, rendering."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bestiary
from bestiary.envs import make_env
from bestiary.envs.warehouse.variants import VARIANTS
from bestiary.rollout import ArraySpec
from bestiary.utils.errors import UserError
from tests.envs.warehouse.helpers import (
    CROWDED,
    DOWN,
    MINI_ITEMS,
    PAPER_ITEMS,
    UP,
    advance,
    arrange,
    make_static,
    make_warehouse,
)

# --- observations ---


@pytest.mark.parametrize(
    ("name", "size", "cells"),
    [("warehouse", 7, PAPER_ITEMS), ("warehouse:mini", 5, MINI_ITEMS), ("warehouse:memory", 5, MINI_ITEMS)],
)
def test_the_meaning_of_each_entry_of_the_observation(name: str, size: int, cells: list[tuple[int, int]]) -> None:
    pool = make_static(name)
    items = tuple(range(size**2, size**2 + len(cells)))  # the d-set of an influence-aware agent
    spec = ArraySpec((size**2 + len(cells),), "float32", (("items", items), ("legacy", (0, *items))))
    assert pool.observation_spec == {"vector": spec}
    assert pool.shelves.tolist() == [list(cell) for cell in cells]
    for robot in np.ndindex(size, size):
        arrange(pool, robot, {})
        observation = pool.encoder.encode(pool.state)
        assert np.flatnonzero(observation[0]).tolist() == [size * robot[0] + robot[1]]
        assert observation.max() == 1
    for index, cell in enumerate(cells, start=size**2):
        arrange(pool, (size // 2, size // 2), {cell: 0})
        observation = advance(pool, UP).observation["vector"]
        assert np.flatnonzero(observation[0]).tolist() == [size * (size // 2 - 1) + size // 2, index]


def test_the_observation_has_73_entries_in_the_paper_and_37_in_the_small_variants() -> None:
    assert [make_static(name).observation_spec["vector"].shape for name in VARIANTS] == [(73,), (37,), (37,)]
    initial = make_static().reset().observation["vector"]
    assert np.flatnonzero(initial[0]).tolist() == [24]


def test_an_image_has_one_plane_with_the_robot_and_one_with_the_items() -> None:
    pool = make_static(observation="image")
    assert pool.observation_spec == {"image": ArraySpec((2, 7, 7), "uint8")}
    arrange(pool, (1, 3), {(4, 0): 3, (6, 5): 2, (0, 3): 1})
    image = advance(pool, DOWN).observation["image"][0]
    assert np.argwhere(image[0]).tolist() == [[2, 3]]
    assert np.argwhere(image[1]).tolist() == [[0, 3], [4, 0], [6, 5]]
    assert set(np.unique(image)) == {0, 255}


def test_image_and_vector_show_the_same_state() -> None:
    vector, image = (make_warehouse(num_envs=5, seed=4, observation=kind) for kind in ("vector", "image"))
    vector.reset()
    image.reset()
    for move in np.random.default_rng(0).integers(4, size=(150, 5)):
        flat, planes = advance(vector, move).observation["vector"], advance(image, move).observation["image"]
        np.testing.assert_array_equal(flat[:, :49] * 255, planes[:, 0].reshape(5, 49))
        np.testing.assert_array_equal(flat[:, 49:] * 255, planes[:, 1][:, *vector.shelves.T])


@pytest.mark.parametrize("depth", [2, 8])
def test_stacked_vectors_are_newest_first_and_zero_before_the_episode(depth: int) -> None:
    plain, stacked = (make_warehouse(num_envs=3, seed=6, time_limit=12, frame_stack=k) for k in (1, depth))
    assert stacked.observation_spec["vector"].shape == (73 * depth,)
    past = [plain.reset().observation["vector"]]  # observations of the current episode, newest first

    def expected(past: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([*past[:depth], *[np.zeros((3, 73))] * (depth - len(past))], axis=1)

    np.testing.assert_array_equal(stacked.reset().observation["vector"], expected(past))
    for t, move in enumerate(np.random.default_rng(0).integers(4, size=(40, 3)), start=1):
        one, many = advance(plain, move), advance(stacked, move)
        if t % 12 == 0:
            np.testing.assert_array_equal(many.final["vector"], expected([one.final["vector"], *past]))
            past = []
        past.insert(0, one.observation["vector"])
        np.testing.assert_array_equal(many.observation["vector"], expected(past))


def test_stacked_images_are_oldest_first() -> None:
    plain, stacked = (make_warehouse(seed=6, observation="image", frame_stack=k) for k in (1, 3))
    first = plain.reset().observation["image"]
    np.testing.assert_array_equal(stacked.reset().observation["image"], np.concatenate([first] * 3, axis=1))
    second, after = advance(plain, UP).observation["image"], advance(stacked, UP).observation["image"]
    np.testing.assert_array_equal(after, np.concatenate([first, first, second], axis=1))


# --- episodes ---


@pytest.mark.parametrize(("name", "length"), [("warehouse", 100), ("warehouse:mini", 100), ("warehouse:memory", 96)])
def test_an_episode_is_truncated_with_its_final_observation(name: str, length: int) -> None:
    """A warehouse with a larger limit shows which final observation the truncated one must have."""
    limited, unlimited = (
        make_warehouse(name, num_envs=4, seed=9),
        make_warehouse(name, num_envs=4, seed=9, time_limit=10_000),
    )
    limited.reset()
    unlimited.reset()
    for t, move in enumerate(np.random.default_rng(0).integers(4, size=(length, 4)), start=1):
        step, expected = advance(limited, move), advance(unlimited, move)
        np.testing.assert_array_equal(step.reward, expected.reward)
        assert (step.truncated == (t == length)).all()
    assert (step.done == step.truncated).all()
    assert (step.game_over == step.truncated).all()
    np.testing.assert_array_equal(step.final["vector"], expected.observation["vector"])
    size = limited.spec.size[0]
    assert (step.observation["vector"][:, size * (size // 2) + size // 2] == 1).all()
    assert limited.ages.max() == 0
    assert not advance(limited, UP).done.any()


OPTIONS: list[dict[str, Any]] = [{}, {"legacy": True, **CROWDED}, {"frame_stack": 8}, {"observation": "image"}]


@pytest.mark.parametrize("options", [*OPTIONS, {"observation": "image", "frame_stack": 2}])
def test_a_loaded_environment_continues_identically(options: dict[str, Any]) -> None:
    original, copy = (make_warehouse(num_envs=5, seed=8, **options) for _ in range(2))
    original.reset()
    moves = np.random.default_rng(0).integers(4, size=(300, 5))
    advance(original, *moves[:130])
    copy.load(original.save())
    kind = original.options.observation
    for move in moves[130:]:
        expected, actual = advance(original, move), advance(copy, move)
        assert actual.observation[kind].tobytes() == expected.observation[kind].tobytes()
        assert actual.reward.tobytes() == expected.reward.tobytes()
        assert [v.tobytes() for v in actual.final.values()] == [v.tobytes() for v in expected.final.values()]
    for name, array in original.save().items():
        assert array.tobytes() == copy.save()[name].tobytes(), name


def test_the_seed_determines_all_rows_and_rows_differ() -> None:
    pools = [make_warehouse(num_envs=6, seed=seed) for seed in (1, 1, 2)]
    observations = [[pool.reset().observation["vector"]] for pool in pools]
    for t in range(60):
        for pool, past in zip(pools, observations, strict=True):
            past.append(advance(pool, t % 4).observation["vector"])
    first, same_seed, other_seed = (np.stack(past, axis=1) for past in observations)  # [N,T,73]
    assert first.tobytes() == same_seed.tobytes()
    assert len({row.tobytes() for row in [*first, *other_seed]}) == 12


# --- options and names ---


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("warehouse:maxi", {}, "warehouse:maxi: .*warehouse, warehouse:mini, warehouse:memory$"),
        ("warehouse:", {}, "warehouse:: .*warehouse, warehouse:mini, warehouse:memory$"),
        ("warehouse/mini", {}, "unknown environment warehouse/mini.*did you mean warehouse:mini?"),
        ("werehouse", {}, "available: .*warehouse.*did you mean warehouse?"),
        ("warehouse", {"frame_stack": 0}, "--frame-stack 0: must be at least 1"),
        ("warehouse", {"spawn": 1.5}, "--spawn 1.5: must be at most 1"),
        ("warehouse", {"expiry": 0}, "--expiry 0: must be at least 1"),
        ("warehouse", {"time_limit": 0}, "--time-limit 0: must be at least 1"),
        ("warehouse", {"size": "2x7"}, "--size 2x7: must be at least 3"),
        ("warehouse", {"size": 7}, "--size 7: expected 2 values"),
        ("warehouse", {"reward_mode": "gold"}, "--reward-mode gold: expected one of one, age"),
        ("warehouse", {"observation": "sound"}, "--observation sound: expected one of vector, image"),
        ("warehouse", {"corner": True}, "unknown option corner; did you mean corners"),
        ("warehouse", {"spacing": 1, "corners": False}, "no shelf cell is left"),
        ("warehouse", {"along_shelves": False}, "--corners on: the robot would be unable to reach"),
        ("warehouse:mini", {"spacing": 2}, "--spacing 2: the robot .* would be unable to move"),
        ("warehouse:memory", {"legacy": True}, "--legacy: .*warehouse:memory"),
    ],
)
def test_invalid_names_and_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        make_env(name, **options)
    assert len(raised.value.problems) == 1


def test_options_replace_the_values_of_the_variant() -> None:
    pool = make_warehouse("warehouse:memory", expiry=3, size="6x9", corners="off")
    assert (pool.spec.expiry, pool.spec.size, pool.spec.corners) == (3, (6, 9), False)
    assert (pool.spec.max_items, pool.spec.reward_scale, pool.spec.time_limit) == (4, 0.25, 96)


# --- rendering ---


def test_text_shows_floor_shelves_items_and_robot() -> None:
    pool = make_static("warehouse:mini")
    arrange(pool, (1, 2), {(0, 3): 6, (2, 0): 2})
    assert pool.render_text().splitlines() == [". _ _ o .", "_ . R . _", "o . . . _", "_ . . . _", ". _ _ _ ."]
    pool = make_static("warehouse:memory", render_ages=True)
    arrange(pool, (0, 2), {(0, 3): 12, (0, 2): 6, (2, 0): 2})
    assert pool.render_text().splitlines()[::2] == [". _ @ + .", "2 . . . _", ". _ _ _ ."]


def test_an_image_shows_cells_items_and_robot() -> None:
    def colour(image: np.ndarray, row: int, column: int) -> tuple[int, ...]:
        return tuple(image[30 * row + 20, 30 * column + 15].tolist())  # below the centre, which differs in robots

    pool = make_static(render=True)
    arrange(pool, (2, 2), {(0, 3): 6, (6, 6): 1})
    (image,) = pool.render()
    assert image.shape == (210, 210, 3)
    floor, shelf, robot, item = (colour(image, *cell) for cell in ((3, 3), (0, 0), (2, 2), (0, 3)))
    assert len({floor, shelf, robot, item}) == 4
    assert colour(image, 6, 6) == item
    aged = make_static(render=True, render_ages=True)
    arrange(aged, (2, 2), {(0, 3): 6, (6, 6): 1})
    (image,) = aged.render()
    old, young = colour(image, 0, 3), colour(image, 6, 6)
    assert old[0] > young[0]  # redder
    assert old[1] < young[1]  # less green


# --- compiled code ---


def test_it_runs_if_compiled_code_cannot_be_cached(tmp_path: Path) -> None:
    """Neither the package folder, which may be read-only, nor the user's cache folder is writable."""
    shutil.copytree(Path(bestiary.__file__).parent, tmp_path / "bestiary", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "bestiary" / "envs" / "__pycache__").write_text("prevents the creation of the folder")
    script = (
        "import bestiary.envs as envs, numpy as np; pool = envs.make_env('warehouse', num_envs=2); pool.reset()\n"
        "pool.send(np.array([0, 1])); print(envs.__file__, pool.recv().reward)"
    )
    no_cache = {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null", "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {**os.environ, **no_cache, "PYTHONPATH": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
