"""The training session: order of the calls of callbacks, requests of callbacks, and the state in checkpoints."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bestiary.config.resolve import resolve
from bestiary.rollout import Episode
from bestiary.runs.run import RunLocation, create_run, open_run
from bestiary.training.callbacks.base import Callback
from bestiary.training.factory import make_actors_and_learner
from bestiary.training.session import Session

SMALL: dict[str, Any] = {
    "runtime": "serial",
    "num_envs": 8,
    "batch_size": 8,
    "micro_batch_size": 8,
    "torso": "mlp",
    "torso.width": 16,
    "save_every": 0,
}


class Recorder(Callback):
    """Callback that appends its calls to a list."""

    def __init__(self, name: str, calls: list[str], due: bool = False):
        self.name = name
        self.calls = calls
        self.due = due
        self.state: dict[str, Any] = {}

    def on_start(self, session: Session) -> None:
        self.calls.append(f"{self.name} start")

    def on_update(self, session: Session, metrics: list[dict[str, float]], episodes: list[Episode]) -> None:
        self.calls.append(f"{self.name} update {metrics} {[episode.step for episode in episodes]}")

    def is_due(self, session: Session) -> bool:
        return self.due

    def on_due(self, session: Session) -> None:
        self.calls.append(f"{self.name} due")

    def on_end(self, session: Session) -> None:
        self.calls.append(f"{self.name} end")

    def close(self) -> None:
        self.calls.append(f"{self.name} close")

    def save(self) -> dict[str, Any]:
        return {"calls": len(self.calls)}

    def load(self, state: dict[str, Any]) -> None:
        self.state = state


def make_session(callbacks: Sequence[Callback], saved_state: dict[str, Any] | None = None) -> Session:
    config = resolve({"env": "toy/catch", "steps": 1_600, **SMALL})
    run, _ = create_run(config, RunLocation(run_dir="r", if_exists="resume"))
    (actor,), learner = make_actors_and_learner(config)
    actor.pool.close()
    return Session(run, config, learner, dict, callbacks, saved_state)


def make_episode(step: int) -> Episode:
    return Episode(step, "toy/catch", 1.0, 9, 1.0, 9, True, 0, {})


def test_callbacks_are_called_in_the_order_of_the_list() -> None:
    calls: list[str] = []
    session = make_session([Recorder("a", calls), Recorder("b", calls, due=True)])
    with session:
        session.log([{"loss": 0.5}], [make_episode(3)], {"actor_wait": 0.1})
        assert session.has_due_tasks
        session.run_due_tasks()
    update = "update [{'loss': 0.5, 'actor_wait': 0.1}] [3]"
    expected = ["a start", "b start", f"a {update}", f"b {update}", "b due", "a end", "b end", "b close", "a close"]
    assert calls == expected
    assert session.tasks["toy/catch"].games == 1
    assert [checkpoint.steps for checkpoint in session.run.checkpoints] == [0]


def test_steps_of_episodes_count_from_the_start_of_the_run() -> None:
    calls: list[str] = []
    with make_session([Recorder("a", calls)]) as session:
        session.learner.steps = 160
        session.log([], [make_episode(100)])
        session.learner.steps = 320
        session.log([], [make_episode(100), make_episode(120)])
    assert calls[1:3] == ["a update [] [100]", "a update [] [260, 280]"]


def test_callbacks_are_closed_but_not_ended_after_an_exception() -> None:
    calls: list[str] = []
    with pytest.raises(ZeroDivisionError), make_session([Recorder("a", calls)]):
        raise ZeroDivisionError
    assert calls == ["a start", "a close"]
    assert open_run("r").checkpoints == []


def test_callbacks_are_closed_if_one_of_them_cannot_start() -> None:
    class Broken(Recorder):
        def on_start(self, session: Session) -> None:
            raise ZeroDivisionError

    calls: list[str] = []
    with pytest.raises(ZeroDivisionError), make_session([Recorder("a", calls), Broken("b", calls)]):
        pass
    assert calls == ["a start", "b close", "a close"]


def test_requested_stop_ends_the_training_and_prints_the_reason_once(capsys: pytest.CaptureFixture[str]) -> None:
    with make_session([]) as session:
        assert not session.done
        session.request_stop("the return is high enough")
        session.request_stop("another reason")
        assert session.done
    assert "stops at step 0: the return is high enough" in capsys.readouterr().err


def test_each_callback_restores_its_own_state() -> None:
    callbacks = [Recorder("a", ["x"]), Recorder("b", ["x", "y"]), Recorder("new", [])]
    with make_session(callbacks[:2]) as session:
        session.save_checkpoint("best")
    state = open_run("r").checkpoints[-1].load_state()
    assert state["callbacks"]["a"] == {"calls": 2}
    assert state["callbacks"]["b"] == {"calls": 3}
    assert Path("r/checkpoints/best").resolve().name == f"{0:012d}"
    make_session(callbacks, state)
    assert [callback.state for callback in callbacks] == [{"calls": 2}, {"calls": 3}, {}]
