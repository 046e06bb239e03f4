"""The statistics of experiments, against known values and against SciPy and scikit-learn."""

import numpy as np
import pytest
from scipy.stats import binomtest, bootstrap, norm
from sklearn.metrics import roc_auc_score

from capflow_models.experiment.results import statistics
from capflow_models.experiment.results.metrics import distinct


def test_intervals_are_those_of_scipy_for_one_sample():
    values = np.random.default_rng(3).exponential(size=60)
    ours = statistics.interval(statistics.means(values, statistics.draw(["target"] * 60, 20_000)), 0.95)
    theirs = bootstrap((values,), np.mean, method="percentile", n_resamples=20_000, rng=1).confidence_interval
    assert ours == pytest.approx(tuple(theirs), abs=0.01)


def test_a_paired_difference_has_a_narrower_interval_than_its_parts():
    rng = np.random.default_rng(0)
    before = rng.normal(size=50) * 10
    after = before + 1 + 0.1 * rng.normal(size=50)
    drawn = statistics.draw(["benign"] * 50, 2000)
    low, high = statistics.interval(statistics.means(after - before, drawn), 0.95)
    assert 0.9 < low < 1 < high < 1.1
    wide = statistics.interval(statistics.means(after, drawn), 0.95)
    assert wide[1] - wide[0] > 20 * (high - low)


def test_resamples_keep_the_number_of_each_label():
    labels = ["target", "benign", "benign", "target", "benign"]
    drawn = statistics.draw(labels, 200)
    named = np.asarray(labels)[drawn]
    assert (named == np.asarray(labels)).all()
    assert len({tuple(row) for row in drawn}) > 10


def test_intervals_cover_the_mean_about_as_often_as_they_say():
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(300):
        values = rng.normal(2.0, 1.0, 40)
        low, high = statistics.interval(statistics.means(values, statistics.draw(["target"] * 40, 400)), 0.9)
        hits += low <= 2.0 <= high
    assert 0.82 < hits / 300 < 0.95


def test_a_rate_has_the_interval_of_scipy_also_if_all_values_are_alike():
    """24 of 24: the score test rejects rates below 24 / (24 + z²)."""
    z = norm.ppf(0.975)
    assert statistics.wilson(1.0, 24, 0.95) == pytest.approx((24 / (24 + z * z), 1.0))
    assert statistics.wilson(0.0, 24, 0.95) == pytest.approx((0.0, z * z / (24 + z * z)))
    theirs = binomtest(7, 20).proportion_ci(method="wilson")
    assert statistics.wilson(7 / 20, 20, 0.95) == pytest.approx((theirs.low, theirs.high))


def test_prompts_without_a_value_are_left_out():
    values = np.array([1.0, np.nan, 3.0])
    assert statistics.mean(values) == 2.0
    assert statistics.means(values, np.array([[0, 1, 1], [1, 1, 1]]))[0] == 1.0
    assert np.isnan(statistics.means(values, np.array([[1, 1, 1]]))[0])
    assert np.isnan(statistics.interval(np.array([np.nan, np.nan, 1.0]), 0.95)[0])


def test_the_area_under_the_curve_is_that_of_scikit_learn_also_with_ties():
    rng = np.random.default_rng(1)
    scores, positive = rng.integers(0, 9, 200).astype(float), rng.random(200) < 0.4
    assert statistics.auc(scores, positive) == pytest.approx(roc_auc_score(positive, scores))
    thresholds, false, true = statistics.roc(scores, positive)
    assert np.trapezoid(true, false) == pytest.approx(roc_auc_score(positive, scores))
    assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
    for threshold, rate in zip(thresholds, true, strict=True):
        assert rate == pytest.approx((scores[positive] >= threshold).mean())


def test_the_best_threshold_lies_between_the_labels():
    scores, positive = np.array([-2.0, -1.0, 3.0, 4.0]), np.array([False, False, True, True])
    assert statistics.best_threshold(scores, positive) == 1.0


def test_harm_at_an_effect_lies_on_the_line_between_scales():
    effects, harms = np.array([0.0, 1.0, 3.0]), np.array([0.0, 0.5, 4.5])
    assert statistics.at_effect(effects, harms, 0.5) == 0.25
    assert statistics.at_effect(effects, harms, 2.0) == 2.5
    assert np.isnan(statistics.at_effect(effects, harms, 3.5))
    assert statistics.at_effect(-effects, harms, -1.0) == 0.5


def test_distinct_counts_n_grams_of_one_answer():
    assert distinct([1, 2, 1, 2], 1) == 0.5
    assert distinct([1, 2, 1, 2], 2) == pytest.approx(2 / 3)
    assert np.isnan(distinct([1], 2))
