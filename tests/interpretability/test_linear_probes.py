"""Linear probes against the normal equations, sums over games, and data whose R2 is known."""

import numpy as np
import pytest

from bestiary.interpretability.linear_probes import (
    PENALTIES,
    Ridge,
    game_folds,
    held_out_errors,
    measure_probe,
)


def data(n: int, d: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) * rng.uniform(0.5, 2, d) + rng.normal(size=d)
    return x, rng.normal(size=(n, 2)) + x[:, :1]


def reference_prediction(x: np.ndarray, y: np.ndarray, new_x: np.ndarray, penalty: float) -> np.ndarray:
    """Solve the normal equations of one target y [n], written down from the definition of the loss."""
    n, d = x.shape
    scale = np.sqrt(((x - x.mean(0)) ** 2).mean(0).sum())
    z, new_z = (x - x.mean(0)) / scale, (new_x - x.mean(0)) / scale
    weights = np.linalg.solve(z.T @ z / n + penalty * np.eye(d), z.T @ (y - y.mean()) / n)
    return y.mean() + new_z @ weights


@pytest.mark.parametrize("shape", [(40, 6), (12, 30)], ids=["primal", "dual"])
def test_ridge_solves_the_normal_equations(shape: tuple[int, int]) -> None:
    x, y = data(*shape)
    new_x, _ = data(7, shape[1], seed=1)
    ridge = Ridge(x, y)
    for penalties in ([1e-3, 1.0], [0.1, 0.01]):
        found = ridge.predict(new_x, np.array(penalties))
        for k, penalty in enumerate(penalties):
            np.testing.assert_allclose(found[:, k], reference_prediction(x, y[:, k], new_x, penalty), rtol=1e-6)


def test_errors_are_those_of_games_that_were_not_used_to_fit() -> None:
    x, y = data(200, 5)
    games = np.repeat(np.arange(10), 20)
    found, errors, deviations = held_out_errors(x, y, games)
    assert sorted(found.tolist()) == list(range(10))
    for held_out in game_folds(games):
        fitted = ~np.isin(games, held_out)
        # The penalty is chosen on a quarter of the fitted games, separately for each target.
        inner = np.isin(games[fitted], game_folds(games[fitted], 4, seed=1)[0])
        for k in range(2):
            fit_x, fit_y = x[fitted], y[fitted, k]
            losses = [
                np.mean((reference_prediction(fit_x[~inner], fit_y[~inner], fit_x[inner], p) - fit_y[inner]) ** 2)
                for p in PENALTIES
            ]
            best = PENALTIES[int(np.argmin(losses))]
            for game in held_out:
                rows = games == game
                prediction = reference_prediction(fit_x, fit_y, x[rows], best)
                index = found.tolist().index(game)
                assert errors[index, k] == pytest.approx(((y[rows, k] - prediction) ** 2).sum(), rel=1e-5)
                assert deviations[index, k] == pytest.approx(((y[rows, k] - fit_y.mean()) ** 2).sum())


def test_r2_of_a_linear_quantity_is_one_and_of_noise_is_zero() -> None:
    rng = np.random.default_rng(0)
    x, games = rng.normal(size=(600, 8)), np.repeat(np.arange(20), 30)
    linear, noise = x @ rng.normal(size=8), rng.normal(size=600)
    result = measure_probe(x, [linear], games)
    assert result is not None
    assert result.r2 > 0.999
    assert (result.games, result.samples) == (20, 600)
    result = measure_probe(x, [noise], games)
    assert result is not None
    assert result.low is not None
    assert result.high is not None
    assert -0.1 < result.r2 < 0.05
    assert result.low <= result.r2 <= result.high <= 1
    # Half of the variance is noise.
    result = measure_probe(x, [linear / linear.std() + noise / noise.std()], games)
    assert result is not None
    assert result.r2 == pytest.approx(0.5, abs=0.1)


def test_samples_without_the_quantity_are_left_out() -> None:
    rng = np.random.default_rng(0)
    x, games = rng.normal(size=(200, 3)), np.repeat(np.arange(10), 20)
    y = np.where(x[:, 1] > 0, x[:, 0], np.nan)
    result = measure_probe(x, [y, np.full(200, np.nan), np.ones(200)], games)
    assert result is not None
    assert result.samples == int((x[:, 1] > 0).sum())
    assert result.r2 > 0.999
    assert measure_probe(x, [np.full(200, np.nan)], games) is None
