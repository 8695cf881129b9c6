"""Progress lines of a training."""

from types import SimpleNamespace
from typing import Any

import pytest

import bestiary
from bestiary.envs.episode_stats import TaskStats
from bestiary.rollout import Episode
from bestiary.training.callbacks.progress import format_returns


def make_session(tasks: dict[str, TaskStats], channels: tuple[str, ...] = ()) -> Any:
    """Return an object with the attributes of a session that `format_returns` reads."""
    return SimpleNamespace(tasks=tasks, channels=channels, config=SimpleNamespace(total_envs=4))


def test_returns_of_one_task() -> None:
    assert format_returns(make_session({"toy/catch": TaskStats()})) == "no game finished yet"
    assert format_returns(make_session({"toy/catch": TaskStats(7, [(1.0, 9), (0.5, 9)])})) == "return 0.75 (7 games)"
    rewarded = TaskStats(2, [(4.0, 9, 1.0), (2.0, 9, 0.0)], channels=("true",))
    assert format_returns(make_session({"w": rewarded}, ("true",))) == "training return 3.00 true 0.50 (2 games)"


def test_environments_in_their_first_game_are_counted() -> None:
    """The first games to finish are short ones, so their mean return is biased."""
    stats = TaskStats(waiting=range(4))
    for env in (2, 3, 3):
        stats.add(Episode(1, "toy/catch", 1.0, 9, 1.0, 9, True, env, {}))
    text = format_returns(make_session({"toy/catch": stats}))
    assert text == "return 1.00 (3 games; 2 of 4 environments in their first game)"
    assert TaskStats(**stats.save()).num_waiting == 2
    assert format_returns(make_session({"toy/catch": TaskStats(1, [(1.0, 9)])})) == "return 1.00 (1 game)"


def test_returns_of_several_tasks_are_listed_separately() -> None:
    tasks = {"atari/Pong": TaskStats(2, [(-20.0, 9)]), "atari/Breakout": TaskStats(1, [(3.0, 9)]), "a/b": TaskStats()}
    text = format_returns(make_session(tasks))
    assert text.startswith("3 games: Pong -20")
    assert "Breakout 3" in text
    assert "b " not in text.split("Breakout")[1]


def test_first_and_last_state_are_printed_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"runtime": "serial", "num_envs": 8, "batch_size": 8, "micro_batch_size": 8}
    bestiary.train("toy/catch", run_dir="r", steps=1_600, **options)
    lines = [line for line in capsys.readouterr().err.splitlines() if " steps · " in line]
    assert "160 of 1.6k steps" in lines[0]
    assert "1.6k of 1.6k steps" in lines[-1]
    assert len(lines) == 2  # further lines follow at intervals of 10 s
