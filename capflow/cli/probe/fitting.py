"""Fits linear probes with scikit-learn, and evaluates probes of any kind."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from capflow.capture.site import Site
from capflow.cli.probe.labelled import LabelledRows
from capflow.errors import UsageError, explain
from capflow.probes import linear
from capflow.probes.linear import Method
from capflow.probes.probe import Pool, Probe, Scorer


class Judgement(NamedTuple):
    """How well one probe separates the labels.

    judged: the number of rows (pool `token`) or requests that were scored.
    positive: how many of them have the positive label.
    accuracy: the share for which the probe fires exactly if the label is positive.
    auroc: the area under the ROC curve of the score.
    """

    probe: str
    pool: Pool
    requests: int
    judged: int
    positive: int
    accuracy: float
    auroc: float


def split(data: LabelledRows, held_out: float, seed: int) -> tuple[LabelledRows, LabelledRows]:
    """Return the requests to fit on and the held-out requests, disjoint, with labels in the same proportion."""
    from sklearn.model_selection import train_test_split

    data.check_both("labelled requests", 2)
    try:
        parts = train_test_split(
            np.arange(len(data.requests)), test_size=held_out, random_state=seed, stratify=data.labels
        )
    except ValueError as e:
        do = "label more requests, or choose another --held-out"
        raise UsageError(explain("--held-out", got=f"{held_out} of {len(data.requests)} requests: {e}", do=do)) from e
    return data.part(parts[0]), data.part(parts[1])


def fit(data: LabelledRows, site: Site, *, name: str, method: Method, pool: Pool) -> Probe:
    """Return a probe whose score is above 0 for the positive label.

    method: `logistic` gives the log-odds of a logistic regression on standardised rows, with balanced labels. `mean`
        projects on the difference of the labels' means: 1 at the positive mean and -1 at the other.

    Raises UsageError if a row is not finite.
    """
    data.check_finite("captured rows", data.rows)
    rows, labels = data.examples(pool)
    weight, bias = linear.fitted(rows, labels, method)
    return Probe.make(site, weight, bias, names=[name], pool=pool)


def judge(data: LabelledRows, scorer: Scorer) -> list[Judgement]:
    """Return how well each probe of a file separates the labels.

    Raises UsageError if a row or a score is not finite.
    """
    from sklearn.metrics import accuracy_score, roc_auc_score

    scores, labels = data.judged(scorer)
    return [
        Judgement(
            name,
            scorer.pool,
            len(data.requests),
            len(labels),
            int(labels.sum()),
            float(accuracy_score(labels, scores[:, index] >= scorer.thresholds[index])),
            float(roc_auc_score(labels, scores[:, index])),
        )
        for index, name in enumerate(scorer.names)
    ]
