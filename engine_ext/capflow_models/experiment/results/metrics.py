"""What is measured of a cell, and the tables of all arms: by label, beside the baseline, and at equal effect.

A metric has one number for each cell. Its seeds are averaged for each prompt; the tables are over prompts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from capflow_models.experiment.arms import Setting
from capflow_models.experiment.file import GATED, Experiment
from capflow_models.experiment.prompts import LabelledPrompt
from capflow_models.experiment.records import Cell
from capflow_models.experiment.results import statistics
from capflow_models.experiment.results.statistics import Drawn, Floats

LABELS = ("target", "benign", "all")

MEANINGS: Mapping[str, tuple[str, str]] = {
    "gate_rate": ("gate fired", "share of answers whose gate fired"),
    "first_firing": ("first firing", "position of the first firing, from the first generated position"),
    "duty": ("duty", "share of generated positions at which the vector acted"),
    "score_max": ("highest score", "highest score of the gate's probe in the request"),
    "held_out": ("held-out score", "the second probe's mean score on the answer, read by the model without steering"),
    "judge": ("judge", "the judge's score of the answer"),
    "kl": ("KL", "mean KL(baseline || arm) on the baseline's tokens, nats a token"),
    "perplexity": ("perplexity", "of the answer, under the model without steering"),
    "distinct_1": ("distinct-1", "share of different tokens"),
    "distinct_2": ("distinct-2", "share of different pairs of tokens"),
    "length": ("length", "tokens of the answer"),
    "tokens_per_s": ("tokens/s", "generated tokens a second, of the arm's batch"),
    "ttft_ms": ("TTFT, ms", "time to the first token"),
    "tpot_ms": ("TPOT, ms", "time for each further token"),
    "cached_tokens": ("cached", "tokens of the prompt that were read from the prefix cache"),
}
"""Each metric's title and its meaning."""


SPEEDS = {"tokens_per_s", "ttft_ms", "tpot_ms"}
"""Metrics of a batch. Its prompts share them, so an interval over prompts would be far too narrow: they have none."""


class MetricRow(msgspec.Struct, frozen=True):
    """One metric of one setting for one label.

    prompts: how many have a value.
    low, high: the interval of the mean; NaN for `SPEEDS` and for fewer than `statistics.PROMPTS_MIN` prompts.
    difference, difference_low, difference_high: of the setting minus the baseline, paired by prompt.
    """

    setting: str
    arm: str
    kind: str
    threshold: float | None
    sharpness: float | None
    scale: float | None
    layer: int | None
    label: str
    metric: str
    prompts: int
    mean: float
    low: float
    high: float
    difference: float
    difference_low: float
    difference_high: float


class Separation(msgspec.Struct, frozen=True):
    """How well the gate's score separates the labels, by the highest score of each request, prompt and seed.

    thresholds, false, true: the ROC curve.
    """

    setting: str
    auc: float
    low: float
    high: float
    thresholds: list[float]
    false: list[float]
    true: list[float]


class Match(msgspec.Struct, frozen=True):
    """The harm of a setting on benign prompts, beside that of another arm at the same effect on target prompts.

    All intervals are NaN with fewer than `statistics.PROMPTS_MIN` prompts of a label.

    effect: of the setting, the difference to the baseline, with its interval.
    harm: of the setting; of the other arm at this effect; and the difference, each with its interval.
    reached: the share of resamples in which the other arm reaches the effect at all; the others are left out.
    """

    setting: str
    other: str
    effect: tuple[float, float, float]
    harm: tuple[float, float, float]
    other_harm: tuple[float, float, float]
    difference: tuple[float, float, float]
    reached: float


class ResultTables(msgspec.Struct, frozen=True):
    """All results."""

    rows: list[MetricRow]
    separations: list[Separation]
    matches: list[Match]


def value_of(cell: Cell, metric: str, judged: Mapping[str, float]) -> float:
    """Return a metric of one cell; NaN if it has none, or if one of its values is no number.

    judged: the judge's scores, by `judge_id`.
    """
    if metric in ("gate_rate", "first_firing"):
        if cell.kind not in GATED:
            return math.nan
        if metric == "gate_rate":
            return float(cell.first_firing is not None)
        return math.nan if cell.first_firing is None else float(cell.first_firing)
    if metric == "duty":
        return _mean(cell.steered)
    if metric == "score_max":
        return math.nan if not np.isfinite(cell.scores).all() else max(cell.scores, default=math.nan)
    if metric == "judge":
        return judged.get(judge_id(cell), math.nan)
    if metric == "kl":
        return _mean(cell.kl)
    if metric == "perplexity":
        return math.exp(min(_mean(cell.nll), 700.0))
    if metric in ("distinct_1", "distinct_2"):
        return distinct(cell.tokens, int(metric[-1]))
    if metric == "length":
        return float(len(cell.tokens))
    value = getattr(cell, metric)
    return math.nan if value is None else float(value)


def distinct(tokens: Sequence[int], n: int) -> float:
    """Return the share of different n-grams among those of an answer; NaN if it has none."""
    grams = list(zip(*(tokens[start:] for start in range(n)), strict=False))
    return len(set(grams)) / len(grams) if grams else math.nan


def judge_id(cell: Cell) -> str:
    """Return the name of a cell for the judge."""
    axes = [repr(value) for value in (cell.threshold, cell.sharpness, cell.scale, cell.layer) if value is not None]
    return "/".join([cell.arm, *axes, cell.prompt_id, str(cell.seed)])


def tables_of(
    experiment: Experiment,
    settings: Sequence[Setting],
    prompts: Sequence[LabelledPrompt],
    cells: Sequence[Cell],
    judged: Mapping[str, float],
) -> ResultTables:
    """Return all results. A setting or prompt without cells has no values."""
    general = experiment.general
    labels = [prompt.label for prompt in prompts]
    drawn = statistics.draw(labels, general.resamples)
    values = by_prompt(experiment, settings, prompts, cells, judged)
    masks = {name: np.array([name in ("all", label) for label in labels]) for name in LABELS}
    baseline = next(setting.name for setting in settings if setting.kind == "baseline")
    rows = []
    for metric in experiment.metrics:
        for setting in settings:
            for label, mask in masks.items():
                mine = np.where(mask, values[setting.name, metric], np.nan)
                if np.isfinite(mine).any():
                    theirs = np.where(mask, values[baseline, metric], np.nan)
                    rows.append(_row(setting, label, metric, mine, mine - theirs, drawn, general.confidence))
    separations = _separations(experiment, settings, prompts, cells, drawn)
    return ResultTables(rows, separations, _matches(experiment, settings, baseline, masks, values, drawn))


def by_prompt(
    experiment: Experiment,
    settings: Sequence[Setting],
    prompts: Sequence[LabelledPrompt],
    cells: Sequence[Cell],
    judged: Mapping[str, float],
) -> dict[tuple[str, str], Floats]:
    """Return the values `[prompts]` by setting and metric, each the mean over the seeds; NaN for none."""
    names = {point_of(setting): setting.name for setting in settings}
    places = {prompt.id: place for place, prompt in enumerate(prompts)}
    metrics = experiment.metrics
    taken: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for cell in cells:
        name = names.get(point_of(cell))
        if name is not None and cell.prompt_id in places:
            for metric in metrics:
                taken[name, metric, places[cell.prompt_id]].append(value_of(cell, metric, judged))
    values = {(s.name, metric): np.full(len(prompts), np.nan) for s in settings for metric in metrics}
    for (name, metric, place), each in taken.items():
        values[name, metric][place] = statistics.mean(np.array(each))
    return values


def point_of(one: Setting | Cell) -> tuple[object, ...]:
    """Return what a setting and its cells have in common."""
    return one.arm, one.threshold, one.sharpness, one.scale, one.layer


def _row(
    setting: Setting, label: str, metric: str, mine: Floats, difference: Floats, drawn: Drawn, confidence: float
) -> MetricRow:
    resamples = None if metric in SPEEDS else drawn
    count = int(np.isfinite(mine).sum())
    own = _estimate(mine, resamples, confidence)
    if metric == "gate_rate" and own[0] in (0.0, 1.0):
        own = own[0], *statistics.wilson(own[0], count, confidence)
    return MetricRow(
        setting.name, setting.arm, setting.kind, setting.threshold, setting.sharpness, setting.scale, setting.layer,
        label, metric, count, *own, *_estimate(difference, resamples, confidence),
    )  # fmt: skip


def _estimate(values: Floats, drawn: Drawn | None, confidence: float) -> tuple[float, float, float]:
    if drawn is None or np.isfinite(values).sum() < statistics.PROMPTS_MIN:
        return statistics.mean(values), math.nan, math.nan
    resampled = statistics.means(values, drawn)
    return statistics.mean(values), *statistics.interval(resampled, confidence)


def _separations(
    experiment: Experiment,
    settings: Sequence[Setting],
    prompts: Sequence[LabelledPrompt],
    cells: Sequence[Cell],
    drawn: Drawn,
) -> list[Separation]:
    """Return the ROC of the first shadow arm, or of the baseline: nothing steers there.

    Each seed of a prompt counts, as its gate fires by itself. Resamples are of prompts, with all their seeds.
    """
    if experiment.probe is None:
        return []
    chosen = min(settings, key=lambda s: {"shadow": 0, "baseline": 1}.get(s.kind, 2))
    places = {prompt.id: place for place, prompt in enumerate(prompts)}
    columns = {seed: column for column, seed in enumerate(experiment.general.seeds)}
    scores = np.full((len(prompts), len(columns)), np.nan)
    for cell in cells:
        if point_of(cell) == point_of(chosen) and cell.prompt_id in places and cell.seed in columns:
            scores[places[cell.prompt_id], columns[cell.seed]] = value_of(cell, "score_max", {})
    positive = np.repeat(np.array([[prompt.label == "target"] for prompt in prompts]), len(columns), axis=1)
    present = np.isfinite(scores)
    if not present[positive].any() or not present[~positive].any():
        return []
    thresholds, false, true = statistics.roc(scores[present], positive[present])
    low, high = math.nan, math.nan
    if min(present[:, 0][positive[:, 0]].sum(), present[:, 0][~positive[:, 0]].sum()) >= statistics.PROMPTS_MIN:
        resampled = np.array([statistics.auc(scores[row][present[row]], positive[row][present[row]]) for row in drawn])
        low, high = statistics.interval(resampled, experiment.general.confidence)
    area = statistics.auc(scores[present], positive[present])
    return [Separation(chosen.name, area, low, high, thresholds.tolist(), false.tolist(), true.tolist())]


def _matches(
    experiment: Experiment,
    settings: Sequence[Setting],
    baseline: str,
    masks: Mapping[str, Floats],
    values: Mapping[tuple[str, str], Floats],
    drawn: Drawn,
) -> list[Match]:
    """Compare each gated setting with the always-on settings of its layer, in the order of their scales.

    Only scales of the setting's sign are on a curve. An arm that acts at other positions is another curve: the arm
    with the setting's own positions is taken, or else each.
    """
    effect, harm = experiment.effect, experiment.harm
    if effect is None or harm is None:
        return []

    def resampled(name: str, metric: str, label: str) -> Floats:
        change = values[name, metric] - values[baseline, metric]
        mine = np.where(masks[label], change, np.nan)
        return np.concatenate([[statistics.mean(mine)], statistics.means(mine, drawn)])

    def is_enough(name: str, metric: str, label: str) -> bool:
        change = (values[name, metric] - values[baseline, metric])[masks[label]]
        return bool(np.isfinite(change).sum() >= statistics.PROMPTS_MIN)

    matches = []
    for setting in settings:
        if setting.kind not in ("gated_sync", "gated_async", "in_graph"):
            continue
        own_effect, own_harm = resampled(setting.name, effect, "target"), resampled(setting.name, harm, "benign")
        nothing = np.zeros_like(own_effect)
        enough = is_enough(setting.name, effect, "target") and is_enough(setting.name, harm, "benign")
        for arm, curve in _curves(experiment, settings, setting).items():
            effects = np.array([nothing, *(resampled(s.name, effect, "target") for s in curve)])
            harms = np.array([nothing, *(resampled(s.name, harm, "benign") for s in curve)])
            theirs = np.array([
                statistics.at_effect(effects[:, n], harms[:, n], own_effect[n]) for n in range(len(own_effect))
            ])  # fmt: skip
            confidence = experiment.general.confidence
            own, mine, other, difference = (
                (float(each[0]), *(statistics.interval(each[1:], confidence) if enough else (math.nan, math.nan)))
                for each in (own_effect, own_harm, theirs, own_harm - theirs)
            )
            reached = float(np.isfinite(theirs[1:]).mean())
            matches.append(Match(setting.name, arm, own, mine, other, difference, reached))
    return matches


def _curves(experiment: Experiment, settings: Sequence[Setting], setting: Setting) -> dict[str, list[Setting]]:
    """Return the settings of each always-on arm that a gated setting is compared with, by arm."""
    curves: dict[str, list[Setting]] = defaultdict(list)
    for other in settings:
        same_sign = (other.scale or 0.0) * (setting.scale or 0.0) > 0
        if other.kind == "always_on" and other.layer == setting.layer and same_sign:
            curves[other.arm].append(other)
    at = experiment.arms[setting.arm].at
    alike = {arm: curve for arm, curve in curves.items() if experiment.arms[arm].at == at}
    return {arm: sorted(curve, key=lambda s: abs(s.scale or 0.0)) for arm, curve in (alike or curves).items()}


def broken(cells: Sequence[Cell]) -> dict[tuple[object, ...], int]:
    """Return how many answers of a setting have a NaN or infinite value, by `point_of`; none for settings without."""
    counts: dict[tuple[object, ...], int] = defaultdict(int)
    for cell in cells:
        held = [] if cell.held_out is None else [cell.held_out]
        if not np.isfinite([*cell.scores, *cell.kl, *cell.nll, *held]).all():
            counts[point_of(cell)] += 1
    return counts


def _mean(values: Sequence[float]) -> float:
    """Return the mean of all values; NaN for none, and if one is no number."""
    return float(np.mean(values)) if values and np.isfinite(values).all() else math.nan
