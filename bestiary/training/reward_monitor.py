"""Detection of reward hacking during training: the training return rises while a true return falls.

The training reward may be a proxy for the true reward, which measures what the user really wants. The monitor fits one
line to the training returns of the last games and another line to their true returns. It raises an alert if the slope
of the training returns is positive and the slope of the true returns is negative, both with a t statistic |t| > 3.

The monitor needs the true returns. It is therefore a tool for experiments, not a safeguard: in practice, people use a
proxy because the true reward cannot be measured.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

# An alert needs |t| above this threshold for both slopes. If training and true returns have no trend and do not depend
# on each other, about 1 of 500,000 checks raises a false alert.
T_THRESHOLD = 3.0


class RewardHackingMonitor:
    """Compares the trend of the training return with the trend of one true return over the most recent games.

    Args:
        games: number of games per window. The trends are checked once per window.
        windows: number of windows that a check uses. A check fits one line to the training returns and one line to the
            true returns of the last `games` x `windows` games.
        recent_returns: pairs (training return, true return) of the most recent games. This argument and the following
            arguments restore a monitor from the result of `state`.
        num_alerts: number of alerts so far.
        games_since_check: number of games since the last check.
    """

    def __init__(
        self,
        games: int,
        windows: int,
        recent_returns: Iterable[Sequence[float]] = (),
        num_alerts: int = 0,
        games_since_check: int = 0,
    ):
        self.games = games
        self.recent_returns = deque(recent_returns, maxlen=games * windows)
        self.num_alerts = num_alerts
        self.games_since_check = games_since_check
        self.t_statistics = (math.nan, math.nan)  # t of the training return and of the true return at the last check

    def add(self, training_return: float, true_return: float) -> bool:
        """Add the returns of a finished game, and check the trends if a check is due. Return True for an alert."""
        self.recent_returns.append((training_return, true_return))
        self.games_since_check += 1
        if self.games_since_check < self.games or len(self.recent_returns) < (self.recent_returns.maxlen or 0):
            return False
        self.games_since_check = 0
        training_trend, true_trend = (trend_t_statistic(values) for values in np.array(self.recent_returns).T)
        self.t_statistics = (training_trend, true_trend)
        alert = training_trend > T_THRESHOLD and true_trend < -T_THRESHOLD
        self.num_alerts += alert
        return alert

    def state(self) -> dict[str, object]:
        """Return the keyword arguments of the constructor that restore this monitor."""
        return {
            "recent_returns": list(self.recent_returns),
            "num_alerts": self.num_alerts,
            "games_since_check": self.games_since_check,
        }


def trend_t_statistic(values: np.ndarray) -> float:
    """Fit a line to the values [n] and return the t statistic of its slope.

    Return 0 if all values are equal or if there are fewer than 3 values.
    """
    n = len(values)
    if n < 3 or np.ptp(values) == 0:
        return 0.0
    r = float(np.corrcoef(np.arange(n), values)[0, 1])
    return r * math.sqrt((n - 2) / max(1 - r * r, 1e-12))
