"""Statistics over prompts: paired bootstrap intervals, the ROC of scores, and harm at equal effect.

Prompts are resampled with replacement, target and benign ones apart, as their numbers are the experiment's choice.
Every arm is computed on the same resamples, so differences between arms are paired. A prompt's seeds are averaged
first: they are not independent of each other. Intervals are percentiles. SciPy's `bootstrap` has no strata and draws
anew for each statistic, so it is not used.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Drawn = npt.NDArray[np.int64]

PROMPTS_MIN = 2
"""With fewer prompts, a mean has no interval: all resamples are alike."""


def draw(labels: Sequence[str], count: int, seed: int = 0) -> Drawn:
    """Return resamples `[count, prompts]` of prompts' numbers; each label has as many as there are."""
    rng = np.random.default_rng(seed)
    named = np.asarray(labels)
    drawn = np.empty((count, len(named)), np.int64)
    for label in sorted(set(labels)):
        places = np.flatnonzero(named == label)
        drawn[:, places] = rng.choice(places, size=(count, len(places)))
    return drawn


def interval(values: Floats, confidence: float) -> tuple[float, float]:
    """Return the middle part of resampled values; NaN for those that are not defined in most resamples."""
    usable = values[np.isfinite(values)]
    if len(usable) < len(values) / 2:
        return float("nan"), float("nan")
    tail = (1 - confidence) / 2
    low, high = np.quantile(usable, (tail, 1 - tail))
    return float(low), float(high)


def wilson(rate: float, count: int, confidence: float) -> tuple[float, float]:
    """Return Wilson's interval of a rate. Unlike a bootstrap, it has a width if all values are alike.

    Wilson 1927, Journal of the American Statistical Association 22.
    """
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    middle = (rate + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def means(values: Floats, drawn: Drawn) -> Floats:
    """Return the mean of each resample `[count]` of values `[prompts]`; prompts without a value (NaN) are left out."""
    taken = values[drawn]
    present = np.isfinite(taken)
    counts = present.sum(axis=1)
    totals = np.where(present, taken, 0.0).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        averages: Floats = np.where(counts > 0, totals / counts, np.nan)
    return averages


def mean(values: Floats) -> float:
    """Return the mean of the values that are there; NaN for none."""
    present = values[np.isfinite(values)]
    return float(present.mean()) if len(present) else float("nan")


def auc(scores: Floats, positive: npt.NDArray[np.bool_]) -> float:
    """Return the area under the ROC curve: the share of pairs whose positive scores higher, a tie counting half."""
    high, low = scores[positive], scores[~positive]
    if not len(high) or not len(low):
        return float("nan")
    order = np.sort(low)
    below, up_to = np.searchsorted(order, high, "left"), np.searchsorted(order, high, "right")
    return float((below + up_to).sum() / (2 * len(high) * len(low)))


def roc(scores: Floats, positive: npt.NDArray[np.bool_]) -> tuple[Floats, Floats, Floats]:
    """Return thresholds from high to low, with the shares of negatives and of positives that score at or above."""
    thresholds = np.concatenate([[np.inf], np.unique(scores)[::-1]])
    high, low = np.sort(scores[positive]), np.sort(scores[~positive])
    false = 1 - np.searchsorted(low, thresholds, "left") / max(1, len(low))
    true = 1 - np.searchsorted(high, thresholds, "left") / max(1, len(high))
    return thresholds, false, true


def best_threshold(scores: Floats, positive: npt.NDArray[np.bool_]) -> float:
    """Return the threshold with the largest true minus false rate, in the middle of its gap between two scores."""
    thresholds, false, true = roc(scores, positive)
    best = int(np.argmax(true - false))
    if best in (0, len(thresholds) - 1):
        return float(thresholds[max(1, best)])
    return float((thresholds[best] + thresholds[best + 1]) / 2)


def at_effect(effects: Floats, harms: Floats, effect: float) -> float:
    """Return the harm of a curve at an effect, between its points in a straight line.

    effects, harms: `[points]`, in the order of the scale, beginning with no steering. The first crossing counts; NaN if
        the curve does not reach the effect.
    """
    for index in range(len(effects) - 1):
        first, second = effects[index], effects[index + 1]
        if min(first, second) <= effect <= max(first, second):
            share = 0.0 if first == second else (effect - first) / (second - first)
            return float(harms[index] + share * (harms[index + 1] - harms[index]))
    return float("nan")
