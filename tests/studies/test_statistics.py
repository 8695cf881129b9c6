"""IQM and its interval against numbers worked out by hand."""

import numpy as np
import pytest

from bestiary.studies.statistics import interval, iqm


def test_iqm_is_the_mean_of_the_middle_half() -> None:
    assert iqm([np.array([8.0, 1, 2, 3, 4, 5, 6, 700])]) == pytest.approx((3 + 4 + 5 + 6) / 4)
    assert iqm([np.array([1.0, 2, 9])]) == pytest.approx(4)  # nothing to cut of three
    assert iqm([np.array([1.0, 2, 3, 100, 5])]) == pytest.approx((2 + 3 + 5) / 3)  # one of five on either side
    assert iqm([np.array([0.0, 4]), np.array([2.0, 3])]) == pytest.approx(2.5)  # over environments: 0 and 4 are cut


def test_the_interval_draws_the_runs_of_each_environment_anew() -> None:
    assert interval([np.array([0.0, 1.0])]) == (0, 1)  # both extremes have a chance of a quarter each
    assert interval([np.array([3.0, 3.0, 3.0])]) == (3, 3)
    # Were all four drawn from one bag, a sample of ones alone would be possible.
    assert interval([np.array([0.0, 0.0]), np.array([1.0, 1.0])]) == (0.5, 0.5)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    found = [interval([rng.normal(size=20)], resamples=500) for _ in range(200)]
    assert 0.85 < np.mean([low <= 0 <= high for low, high in found]) < 0.99
