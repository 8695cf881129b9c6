"""Linear probes: how well can a quantity be predicted linearly from the activations of a layer (Alain & Bengio 2016).

A probe is a ridge regression with a closed-form solution. Its R2 is measured on games that were not used to fit it:

    R2 = 1 - sum of squared errors / sum of squared deviations from the mean of the fitted games

Games are split into folds, so that each game is held out once. The strength of the penalty is chosen with the fitted
games only, a quarter of which is set aside for this choice.

Letters of shapes: n samples, d features.
"""

from dataclasses import dataclass

import numpy as np

from bestiary.evaluation.statistics import summarise_reward_per_step

PENALTIES = 10.0 ** np.arange(-6, 2)  # strengths of the penalty from which one is chosen for each target
MIN_SAMPLES = 20  # minimum number of samples of a target
FOLDS = 5  # number of folds; fewer if there are fewer games


@dataclass(frozen=True)
class ProbeResult:
    """The accuracy of a probe on held-out games, with a 95 % interval over games."""

    r2: float
    low: float | None  # lower limit of the interval; None: unknown
    high: float | None
    interval: str  # method of the interval
    games: int
    samples: int  # number of samples, summed over the targets


class Ridge:
    """Ridge regression for many targets and penalties, from one eigendecomposition.

    The weights minimise mean((y - X w)^2) + penalty |w|^2. X [n,d] are the centred features, divided by one number so
    that their variances sum to 1. An unpenalised constant is added. If d > n, the equivalent dual problem is solved.

    Features are not standardised one by one, because saturated units of a recurrent network are almost constant in the
    fitted games. They would be multiplied by large numbers, and predictions for other games would be far too large.
    """

    def __init__(self, x: np.ndarray, y: np.ndarray):
        """Prepare the fit of k targets y [n,k] from features x [n,d]. `predict` applies the penalties."""
        x = x.astype(np.float64)
        self.mean = x.mean(axis=0)
        self.scale = 1 / max(1e-12, float(np.sqrt(x.var(axis=0).sum())))
        self.y_mean = y.mean(axis=0)
        self.n = len(y)
        scaled = self._scaled(x)
        is_dual = scaled.shape[1] > self.n
        matrix = scaled @ scaled.T if is_dual else scaled.T @ scaled
        eigenvalues, vectors = np.linalg.eigh(matrix)
        self.eigenvalues = np.maximum(eigenvalues, 0)  # [m], m = min(n, d)
        right = y - self.y_mean if is_dual else scaled.T @ (y - self.y_mean)
        self.projected = vectors.T @ right  # [m,k]
        self.basis = scaled.T @ vectors if is_dual else vectors  # [d,m]

    def _scaled(self, x: np.ndarray) -> np.ndarray:
        return (x - self.mean) * self.scale

    def predict(self, x: np.ndarray, penalties: np.ndarray) -> np.ndarray:
        """Return predictions [n,k] for features x [n,d], with one penalty for each of the k targets."""
        shrunk = self.projected / (self.eigenvalues[:, None] + self.n * penalties)  # [m,k]
        return self.y_mean + self._scaled(x.astype(np.float64)) @ (self.basis @ shrunk)


def game_folds(games: np.ndarray, folds: int = FOLDS, seed: int = 0) -> list[np.ndarray]:
    """Split the games at random into folds of almost equal size. Return the games of each fold."""
    distinct = np.unique(games)
    shuffled = np.random.default_rng(seed).permutation(distinct)
    return np.array_split(shuffled, min(folds, len(distinct)))


def held_out_errors(x: np.ndarray, y: np.ndarray, games: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the errors of linear probes on games that were not used to fit them (cross-validation over games).

    `x` are features [n,d], `y` are k targets [n,k], and `games` is the game of each sample [n].

    Returns:
        Three arrays with one row for each of the G games that were held out: the games [G], the sum of squared errors
        [G,k], and the sum of squared deviations [G,k] from the mean of the targets in the fitted games.
    """
    result = []
    for held_out in game_folds(games):
        fitted = ~np.isin(games, held_out)
        if fitted.sum() < 2:
            continue
        prediction = _fit_and_predict(x[fitted], y[fitted], games[fitted], x[~fitted])
        squared_error = (y[~fitted] - prediction) ** 2
        squared_deviation = (y[~fitted] - y[fitted].mean(axis=0)) ** 2
        for game in held_out:
            rows = games[~fitted] == game
            result.append((game, squared_error[rows].sum(axis=0), squared_deviation[rows].sum(axis=0)))
    found, errors, deviations = zip(*result, strict=True)
    return np.array(found), np.array(errors), np.array(deviations)


def _fit_and_predict(x: np.ndarray, y: np.ndarray, games: np.ndarray, new_x: np.ndarray) -> np.ndarray:
    """Choose the penalty of each target with a quarter of the games, fit all games, and predict targets for `new_x`."""
    penalties = np.full(y.shape[1], PENALTIES[-1])
    set_aside = np.isin(games, game_folds(games, 4, seed=1)[0])
    if set_aside.any() and (~set_aside).sum() >= 2:
        ridge = Ridge(x[~set_aside], y[~set_aside])
        errors = [
            ((y[set_aside] - ridge.predict(x[set_aside], np.full(y.shape[1], penalty))) ** 2).mean(axis=0)
            for penalty in PENALTIES
        ]
        penalties = PENALTIES[np.argmin(errors, axis=0)]
    return Ridge(x, y).predict(new_x, penalties)


def measure_probe(x: np.ndarray, targets: list[np.ndarray], games: np.ndarray) -> ProbeResult | None:
    """Return one R2, on held-out games, of linear probes that predict all targets from features x [n,d].

    Each target [n] has its own probe. NaN means that the target does not exist at this sample. The errors of all
    targets are added. A target is left out if it is constant, or has fewer than MIN_SAMPLES samples or only one game.
    Return None if no target is left.
    """
    # Targets that exist at the same samples are fitted together. Key: these samples, as the bytes of a bool array.
    usable: dict[bytes, list[np.ndarray]] = {}
    for y in targets:
        exists = np.isfinite(y)
        if exists.sum() >= MIN_SAMPLES and np.ptp(y[exists]) > 0 and len(np.unique(games[exists])) >= 2:
            usable.setdefault(exists.tobytes(), []).append(y)
    errors: dict[int, float] = {}
    deviations: dict[int, float] = {}
    samples = 0
    for group in usable.values():
        exists = np.isfinite(group[0])
        samples += int(exists.sum()) * len(group)
        y = np.stack([one[exists] for one in group], axis=1)
        for game, error, deviation in zip(*held_out_errors(x[exists], y, games[exists]), strict=True):
            errors[int(game)] = errors.get(int(game), 0.0) + float(error.sum())
            deviations[int(game)] = deviations.get(int(game), 0.0) + float(deviation.sum())
    if not errors or sum(deviations.values()) == 0:
        return None
    # 1 - R2 is a ratio of two sums over games, like the reward per step. So the same function computes its interval.
    ratio = summarise_reward_per_step(np.array(list(errors.values())), np.array(list(deviations.values())))
    low = None if ratio["ci_high"] is None else 1 - ratio["ci_high"]
    high = None if ratio["ci_low"] is None else 1 - max(0.0, ratio["ci_low"])
    return ProbeResult(1 - ratio["mean"], low, high, ratio["interval"], len(errors), samples)
