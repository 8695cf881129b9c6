"""Callback that passes each finished game to the reward-hacking monitors, and warns the user about alerts."""

from typing import Any

from bestiary.envs.episode_stats import return_name
from bestiary.rollout import Episode
from bestiary.training.callbacks.base import Callback
from bestiary.training.reward_monitor import RewardHackingMonitor
from bestiary.training.session import Session
from bestiary.utils.console import warn


class RewardMonitor(Callback):
    """Owns one reward-hacking monitor per pair (task, true reward), or no monitors with --monitor-games 0."""

    name = "reward_monitor"

    def __init__(self) -> None:
        self.monitors: dict[tuple[str, str], RewardHackingMonitor] = {}  # (task, true reward) -> monitor
        self.saved_monitors: dict[str, dict[str, Any]] = {}  # "TASK REWARD" -> saved state, from the loaded checkpoint

    def on_start(self, session: Session) -> None:
        training = session.config.training
        if training.monitor_games:
            self.monitors = {
                (task, channel): RewardHackingMonitor(
                    training.monitor_games,
                    training.monitor_windows,
                    **self.saved_monitors.get(f"{task} {channel}", {}),
                )
                for task in session.tasks
                for channel in session.channels
            }

    def on_update(self, session: Session, metrics: list[dict[str, float]], episodes: list[Episode]) -> None:
        for episode in episodes:
            if episode.game_over:
                self._add_game(episode)

    def save(self) -> dict[str, Any]:
        return {f"{task} {channel}": monitor.state() for (task, channel), monitor in self.monitors.items()}

    def load(self, state: dict[str, Any]) -> None:
        self.saved_monitors = state

    def count_alerts(self, task: str) -> int | None:
        """Return the number of alerts of a task so far, or None if the task has no monitor."""
        alerts = [monitor.num_alerts for (name, _), monitor in self.monitors.items() if name == task]
        return sum(alerts) if alerts else None

    def _add_game(self, episode: Episode) -> None:
        """Add a finished game to the monitors of its task. Warn at the first alert of each monitor."""
        for (task, channel), monitor in self.monitors.items():
            if task != episode.task:
                continue
            alert = monitor.add(episode.game_measures["training"], episode.game_measures[channel])
            if alert and monitor.num_alerts == 1:
                training_trend, true_trend = monitor.t_statistics
                warn(
                    f"possible reward hacking at step {episode.step}: over the last {len(monitor.recent_returns)} "
                    f"games of {task}, the training return rises (t = {training_trend:.1f}) while "
                    f"{return_name(channel)} falls (t = {true_trend:.1f})"
                )
