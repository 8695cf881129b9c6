"""Warnings about environments whose step or reset does not return."""

import sys
import threading
import time
import traceback
from collections.abc import Sequence
from types import TracebackType

from bestiary.training.actor import Actor
from bestiary.utils import plugins
from bestiary.utils.console import warn

STALL_WARNING_SECONDS = 30.0  # time without a result after which the user is warned
CHECK_INTERVAL = 0.5  # time between two checks, in seconds


class StallMonitor:
    """Context in which a thread warns the user about each actor that waits for its environments for too long.

    In the serial runtime, the main thread itself waits for the environments. Another thread must therefore warn.
    """

    def __init__(self, actors: Sequence[Actor]):
        self.actors = actors
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="stall-monitor", daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended.set()
        self.thread.join()

    def _run(self) -> None:
        last_warning = time.monotonic()
        while not self.ended.wait(CHECK_INTERVAL):
            if time.monotonic() - last_warning < STALL_WARNING_SECONDS:
                continue
            for text in describe_waiting_actors(self.actors, STALL_WARNING_SECONDS):
                warn(text)
                last_warning = time.monotonic()


def describe_waiting_actors(actors: Sequence[Actor], min_seconds: float) -> list[str]:
    """Return a text for each actor that has waited for its environments for at least `min_seconds` seconds."""
    calls = [(actor, actor.env_call) for actor in actors]
    now = time.monotonic()
    return [
        f"{actor.env_names} did not return for {now - call.start:.0f} s{_plugin_location(call.thread)}"
        for actor, call in calls
        if call is not None and now - call.start >= min_seconds
    ]


def _plugin_location(thread: int) -> str:
    """Return the line of a plug-in file that a thread executes, for example " (file.py, line 3, in step)", or ""."""
    frame = sys._current_frames().get(thread)
    files = plugins.plugin_files()
    lines = [line for line in traceback.extract_stack(frame) if line.filename in files] if frame is not None else []
    return f" ({lines[-1].filename}, line {lines[-1].lineno}, in {lines[-1].name})" if lines else ""
