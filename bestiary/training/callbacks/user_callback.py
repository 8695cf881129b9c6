"""Callbacks that a user has written in a Python file (`--callback file.py:Name`)."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bestiary.config.config import Config
from bestiary.rollout import Episode
from bestiary.training.callbacks.base import Callback
from bestiary.training.session import Session
from bestiary.utils import plugins
from bestiary.utils.errors import RunError, UserError
from bestiary.utils.options import suggest
from bestiary.utils.plugin_names import PluginRef


class UserCallback(Callback):
    """Wrapper that calls a user's callback. If a method of this callback fails, the wrapper raises a one-line RunError.

    Args:
        plugin: reference to the user's class, `path/to/file.py:Name`. The callback's state has the key `user:Name` in
            state.json.
        callback: the user's callback.
    """

    def __init__(self, plugin: PluginRef, callback: Callback):
        self.plugin = plugin
        self.callback = callback
        self.name = f"user:{plugin.attribute}"

    def on_start(self, session: Session) -> None:
        with self._describe_errors("on_start"):
            self.callback.on_start(session)
        self.save()  # if it fails, stop now and not at the first checkpoint, which would be lost

    def on_update(self, session: Session, metrics: list[dict[str, float]], episodes: list[Episode]) -> None:
        with self._describe_errors("on_update"):
            self.callback.on_update(session, metrics, episodes)

    def is_due(self, session: Session) -> bool:
        with self._describe_errors("is_due"):
            return self.callback.is_due(session)

    def on_due(self, session: Session) -> None:
        with self._describe_errors("on_due"):
            self.callback.on_due(session)

    def on_end(self, session: Session) -> None:
        with self._describe_errors("on_end"):
            self.callback.on_end(session)

    def close(self) -> None:
        with self._describe_errors("close"):
            self.callback.close()

    def save(self) -> dict[str, Any]:
        with self._describe_errors("save"):
            state = self.callback.save()
            json.dumps(state)  # fail now, with a clear message, and not later when the checkpoint is written
            return state

    def load(self, state: dict[str, Any]) -> None:
        with self._describe_errors("load"):
            self.callback.load(state)

    @contextmanager
    def _describe_errors(self, method: str) -> Iterator[None]:
        """Turn an exception of the user's code into RunError. Errors of the session itself are raised unchanged."""
        try:
            yield
        except (RunError, UserError):
            raise
        except (Exception, SystemExit) as error:
            cause = plugins.describe_error(error) or f"{self.plugin.path}: {type(error).__name__}: {error}"
            raise RunError(f"callback {self.plugin.attribute}: {method} failed: {cause}") from error


def make_user_callbacks(config: Config) -> list[Callback]:
    """Import and construct the callbacks of --callback.

    Raises:
        UserError: a file or class is missing, a class is not a subclass of Callback, its constructor fails, or two
            callbacks have the same name.
    """
    callbacks: dict[str, Callback] = {}
    for plugin in config.callbacks:
        kind = plugins.load(plugin, "callback")
        if not (isinstance(kind, type) and issubclass(kind, Callback)):
            raise UserError(
                f"--callback {plugin}: must be a subclass of bestiary.training.callbacks.base.Callback "
                "(see the example in docs/extending.md)"
            )
        unknown = [name for name in dir(kind) if name.startswith("on_") and not hasattr(Callback, name)]
        if unknown:
            hint = suggest(unknown[0], [name for name in dir(Callback) if name.startswith("on_")])
            raise UserError(
                f"--callback {plugin}: {unknown[0]} is not a method of Callback, so it is never called{hint}"
            )
        try:
            callback = UserCallback(plugin, kind())
        except (Exception, SystemExit) as error:
            raise UserError(
                f"--callback {plugin}: the constructor failed: {type(error).__name__}: {error}; "
                "it is called without arguments"
            ) from error
        if callback.name in callbacks:
            raise UserError(f"--callback {plugin}: two callbacks have this class name; rename one of them")
        callbacks[callback.name] = callback
    return list(callbacks.values())
