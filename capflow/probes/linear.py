"""Fits of a linear probe to rows with labels. `logistic` needs scikit-learn, which the extra `probe` installs."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from capflow.errors import UsageError, explain

Method = Literal["logistic", "mean"]

_ITERATIONS_MAX = 5_000


def fitted(rows: Any, labels: Any, method: Method) -> tuple[Any, Any]:
    """Return the weight `[hidden_size]` and the bias of a probe whose score is above 0 for the positive label.

    rows: `[n, hidden_size]`.
    labels: `[n]`, true for the positive label.
    method: `logistic` gives the log-odds of a logistic regression on standardised rows, with balanced labels. `mean`
        projects on the difference of the labels' means: 1 at the positive mean and -1 at the other.

    Raises UsageError if the labels' means are the same.
    """
    return _logistic(rows, labels) if method == "logistic" else _difference(rows, labels)


def _logistic(rows: Any, labels: Any) -> tuple[Any, Any]:
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(rows.astype(np.float64))
    model = LogisticRegression(class_weight="balanced", max_iter=_ITERATIONS_MAX)
    model.fit(scaler.transform(rows.astype(np.float64)), labels)
    weight = model.coef_[0] / scaler.scale_
    return weight, model.intercept_[0] - weight @ scaler.mean_


def _difference(rows: Any, labels: Any) -> tuple[Any, Any]:
    positive, negative = (rows[labels == label].mean(axis=0, dtype=np.float64) for label in (True, False))
    difference = positive - negative
    square = difference @ difference
    if not square > 0:
        raise UsageError(explain("captured rows", got="the same mean for both labels", expected="different ones"))
    weight = 2 * difference / square
    return weight, -(weight @ (positive + negative)) / 2
