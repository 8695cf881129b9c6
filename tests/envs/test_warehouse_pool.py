"""The warehouse as a pool: what an agent sees of it, episodes, options, pictures."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bestiary
from bestiary.envs import make
from bestiary.envs.warehouse import VARIANTS
from bestiary.errors import UserError
from bestiary.rollout import ArraySpec
from tests.envs.warehouses import (
    CROWDED,
    DOWN,
    MINI_ITEMS,
    PAPER_ITEMS,
    UP,
    advance,
    arrange,
    quiet,
    warehouse,
)

# --- what an agent sees ---


@pytest.mark.parametrize(
    ("name", "size", "cells"),
    [("warehouse", 7, PAPER_ITEMS), ("warehouse:mini", 5, MINI_ITEMS), ("warehouse:memory", 5, MINI_ITEMS)],
)
def test_the_observation_index_by_index(name: str, size: int, cells: list[tuple[int, int]]) -> None:
    pool = quiet(name)
    items = tuple(range(size**2, size**2 + len(cells)))  # what the memory of an influence-aware agent sees
    spec = ArraySpec((size**2 + len(cells),), "float32", (("items", items), ("legacy", (0, *items))))
    assert pool.observation_spec == {"vector": spec}
    assert pool.shelves.tolist() == [list(cell) for cell in cells]
    for robot in np.ndindex(size, size):  # wherever it is put; a move against a wall shows it there
        arrange(pool, robot, {})
        seen = pool.frame.take(pool.state)
        assert np.flatnonzero(seen[0]).tolist() == [size * robot[0] + robot[1]]
        assert seen.max() == 1
    for index, cell in enumerate(cells, start=size**2):
        arrange(pool, (size // 2, size // 2), {cell: 0})
        seen = advance(pool, UP).observation["vector"]
        assert np.flatnonzero(seen[0]).tolist() == [size * (size // 2 - 1) + size // 2, index]


def test_the_observation_of_the_paper_has_73_numbers_and_the_small_ones_37() -> None:
    assert [quiet(name).observation_spec["vector"].shape for name in VARIANTS] == [(73,), (37,), (37,)]
    opening = quiet().reset().observation["vector"]
    assert np.flatnonzero(opening[0]).tolist() == [24]


def test_an_image_is_a_plane_of_the_robot_and_one_of_the_items() -> None:
    pool = quiet(observation="image")
    assert pool.observation_spec == {"image": ArraySpec((2, 7, 7), "uint8")}
    arrange(pool, (1, 3), {(4, 0): 3, (6, 5): 2, (0, 3): 1})
    seen = advance(pool, DOWN).observation["image"][0]
    assert np.argwhere(seen[0]).tolist() == [[2, 3]]
    assert np.argwhere(seen[1]).tolist() == [[0, 3], [4, 0], [6, 5]]
    assert set(np.unique(seen)) == {0, 255}


def test_image_and_vector_show_the_same_world() -> None:
    vector, image = (warehouse(num_envs=5, seed=4, observation=kind) for kind in ("vector", "image"))
    vector.reset()
    image.reset()
    for move in np.random.default_rng(0).integers(4, size=(150, 5)):
        flat, planes = advance(vector, move).observation["vector"], advance(image, move).observation["image"]
        np.testing.assert_array_equal(flat[:, :49] * 255, planes[:, 0].reshape(5, 49))
        np.testing.assert_array_equal(flat[:, 49:] * 255, planes[:, 1][:, *vector.shelves.T])


@pytest.mark.parametrize("depth", [2, 8])
def test_a_stack_is_newest_first_and_empty_before_the_episode(depth: int) -> None:
    plain, stacked = (warehouse(num_envs=3, seed=6, time_limit=12, frame_stack=k) for k in (1, depth))
    assert stacked.observation_spec["vector"].shape == (73 * depth,)
    past = [plain.reset().observation["vector"]]  # of the running episode, newest first

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


def test_stacked_images_are_oldest_first_as_everywhere() -> None:
    plain, stacked = (warehouse(seed=6, observation="image", frame_stack=k) for k in (1, 3))
    first = plain.reset().observation["image"]
    np.testing.assert_array_equal(stacked.reset().observation["image"], np.concatenate([first] * 3, axis=1))
    second, after = advance(plain, UP).observation["image"], advance(stacked, UP).observation["image"]
    np.testing.assert_array_equal(after, np.concatenate([first, first, second], axis=1))


# --- episodes ---


@pytest.mark.parametrize(("name", "length"), [("warehouse", 100), ("warehouse:mini", 100), ("warehouse:memory", 96)])
def test_an_episode_is_cut_off_and_shows_what_it_ended_on(name: str, length: int) -> None:
    """A world that is not cut off goes the same way, and shows at that step what the other ended on."""
    cut, endless = warehouse(name, num_envs=4, seed=9), warehouse(name, num_envs=4, seed=9, time_limit=10_000)
    cut.reset()
    endless.reset()
    for t, move in enumerate(np.random.default_rng(0).integers(4, size=(length, 4)), start=1):
        ours, theirs = advance(cut, move), advance(endless, move)
        np.testing.assert_array_equal(ours.reward, theirs.reward)
        assert (ours.truncated == (t == length)).all()
    assert (ours.done == ours.truncated).all()
    assert (ours.game_over == ours.truncated).all()
    np.testing.assert_array_equal(ours.final["vector"], theirs.observation["vector"])
    size = cut.world.size[0]
    assert (ours.observation["vector"][:, size * (size // 2) + size // 2] == 1).all()
    assert cut.ages.max() == 0
    assert not advance(cut, UP).done.any()


OPTIONS: list[dict[str, Any]] = [{}, {"legacy": True, **CROWDED}, {"frame_stack": 8}, {"observation": "image"}]


@pytest.mark.parametrize("options", [*OPTIONS, {"observation": "image", "frame_stack": 2}])
def test_a_loaded_pool_goes_on_to_the_byte(options: dict[str, Any]) -> None:
    original, copy = (warehouse(num_envs=5, seed=8, **options) for _ in range(2))
    original.reset()
    moves = np.random.default_rng(0).integers(4, size=(300, 5))
    advance(original, *moves[:130])
    copy.load(original.save())
    kind = original.options.observation
    for move in moves[130:]:
        ours, theirs = advance(original, move), advance(copy, move)
        assert ours.observation[kind].tobytes() == theirs.observation[kind].tobytes()
        assert ours.reward.tobytes() == theirs.reward.tobytes()
        assert [v.tobytes() for v in ours.final.values()] == [v.tobytes() for v in theirs.final.values()]
    for name, array in original.save().items():
        assert array.tobytes() == copy.save()[name].tobytes(), name


def test_the_same_seed_brings_the_same_and_every_row_something_else() -> None:
    first, again, other = (warehouse(num_envs=6, seed=seed) for seed in (1, 1, 2))
    seen = [[pool.reset().observation["vector"]] for pool in (first, again, other)]
    for t in range(60):
        for pool, past in zip((first, again, other), seen, strict=True):
            past.append(advance(pool, t % 4).observation["vector"])
    ours, same, different = (np.stack(past, axis=1) for past in seen)  # [N,T,73]
    assert ours.tobytes() == same.tobytes()
    assert len({row.tobytes() for row in [*ours, *different]}) == 12


# --- options and names ---


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("warehouse:maxi", {}, "warehouse:maxi: the warehouses are warehouse, warehouse:mini, warehouse:memory$"),
        ("warehouse:", {}, "warehouse:: the warehouses are warehouse, warehouse:mini, warehouse:memory$"),
        ("warehouse/mini", {}, "unknown environment warehouse/mini.*did you mean warehouse:mini?"),
        ("werehouse", {}, "names are .*warehouse.*did you mean warehouse?"),
        ("warehouse", {"frame_stack": 0}, "--frame-stack 0: must be at least 1"),
        ("warehouse", {"spawn": 1.5}, "--spawn 1.5: must be at most 1"),
        ("warehouse", {"expiry": 0}, "--expiry 0: must be at least 1"),
        ("warehouse", {"time_limit": 0}, "--time-limit 0: must be at least 1"),
        ("warehouse", {"size": "2x7"}, "--size 2x7: must be at least 3"),
        ("warehouse", {"size": 7}, "--size 7: expected 2 values"),
        ("warehouse", {"reward_mode": "gold"}, "--reward-mode gold: expected one of one, age"),
        ("warehouse", {"observation": "sound"}, "--observation sound: expected one of vector, image"),
        ("warehouse", {"corner": True}, "no option corner; did you mean corners"),
        ("warehouse", {"spacing": 1, "corners": False}, "no shelf is left"),
        ("warehouse", {"along_shelves": False}, "--corners on: no robot could reach"),
        ("warehouse:mini", {"spacing": 2}, "--spacing 2: the robot could never leave"),
        ("warehouse:memory", {"legacy": True}, "--legacy: the published warehouse:memory does not have the bug"),
    ],
)
def test_mistakes_get_a_line(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        make(name, **options)
    assert len(raised.value.problems) == 1


def test_options_go_over_what_the_variant_has() -> None:
    pool = warehouse("warehouse:memory", expiry=3, size="6x9", corners="off")
    assert (pool.world.expiry, pool.world.size, pool.world.corners) == (3, (6, 9), False)
    assert (pool.world.max_items, pool.world.reward_scale, pool.world.time_limit) == (4, 0.25, 96)


# --- pictures ---


def test_text_shows_floor_shelves_items_and_robot() -> None:
    pool = quiet("warehouse:mini")
    arrange(pool, (1, 2), {(0, 3): 6, (2, 0): 2})
    assert pool.ansi().splitlines() == [". _ _ o .", "_ . R . _", "o . . . _", "_ . . . _", ". _ _ _ ."]
    pool = quiet("warehouse:memory", render_ages=True)
    arrange(pool, (0, 2), {(0, 3): 12, (0, 2): 6, (2, 0): 2})
    assert pool.ansi().splitlines()[::2] == [". _ @ + .", "2 . . . _", ". _ _ _ ."]


def test_a_picture_shows_cells_items_and_robot() -> None:
    def middle(picture: np.ndarray, row: int, column: int) -> tuple[int, ...]:
        return tuple(picture[30 * row + 20, 30 * column + 15].tolist())  # a little below the eye

    pool = quiet(render=True)
    arrange(pool, (2, 2), {(0, 3): 6, (6, 6): 1})
    (picture,) = pool.render()
    assert picture.shape == (210, 210, 3)
    floor, shelf, robot, item = (middle(picture, *cell) for cell in ((3, 3), (0, 0), (2, 2), (0, 3)))
    assert len({floor, shelf, robot, item}) == 4
    assert middle(picture, 6, 6) == item
    aged = quiet(render=True, render_ages=True)
    arrange(aged, (2, 2), {(0, 3): 6, (6, 6): 1})
    (picture,) = aged.render()
    old, young = middle(picture, 0, 3), middle(picture, 6, 6)
    assert old[0] > young[0]  # redder
    assert old[1] < young[1]  # less green


# --- compiled code ---


def test_it_runs_where_no_compiled_code_can_be_kept(tmp_path: Path) -> None:
    """Neither beside the package, which may be read-only, nor in the user's cache."""
    shutil.copytree(Path(bestiary.__file__).parent, tmp_path / "bestiary", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "bestiary" / "envs" / "__pycache__").write_text("in the way of a folder")
    script = (
        "import bestiary.envs as envs, numpy as np; pool = envs.make('warehouse', num_envs=2); pool.reset()\n"
        "pool.send(np.array([0, 1])); print(envs.__file__, pool.recv().reward)"
    )
    nowhere = {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null", "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {**os.environ, **nowhere, "PYTHONPATH": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
