"""Fits of probes and vectors in the run, each judged on the texts that were held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.probes import linear
from capflow.probes.probe import Probe, save_vector
from capflow_models.experiment.file import Experiment, ProbeSource, VectorSource
from capflow_models.experiment.prompts import read_texts
from capflow_models.experiment.results import statistics
from capflow_models.model import SteerableModel
from capflow_models.runs.lines import read_lines
from capflow_models.vectors.fit import Pair, fit_vectors

PromptRows = Callable[[Sequence[str], Site], list[npt.NDArray[np.float32]]]
"""Returns the rows `[tokens, hidden_size]` of each text at a site."""


class DirectionFit(msgspec.Struct, frozen=True):
    """How one direction was made.

    texts, held_out: how many texts or pairs it was fitted on, and how many judged it.
    auc: of the held-out texts' scores, for a probe. For a vector, the share of held-out pairs whose difference points
        along it.
    threshold: of a probe.
    norm: of the direction.
    """

    name: str
    source: str
    site: str
    texts: int = 0
    held_out: int = 0
    auc: float | None = None
    threshold: float | None = None
    norm: float = 0.0


class Fitter(msgspec.Struct, frozen=True):
    """What a fit needs of a running model."""

    model: SteerableModel
    rows: PromptRows


def fit_probe(experiment: Experiment, name: str, source: ProbeSource, fitter: Fitter, out: Path) -> DirectionFit:
    """Fit a probe on a part of the texts, judge it and choose its threshold on the rest, and write it.

    name: `probe` for the gates' probe, or `held_out`.
    """
    assert source.fit is not None
    texts = texts_of(experiment, name, source)
    labels = np.array([is_positive for _, is_positive in texts])
    held = held_out(labels, source.held_out, source.seed)
    site = Site.parse(f"{source.hook}:{source.layer}")
    everything = fitter.rows([text for text, _ in texts], site)
    positions = experiment.gate.positions if name == "probe" else None
    if (source.tokens == "all" or positions == "generated") and min(map(len, everything)) < 2:
        number = min(range(len(everything)), key=lambda each: len(everything[each]))
        got, expected = f'one token in "{texts[number][0]}"', "2 or more, as the first is left out"
        raise experiment.wrong((name, "fit"), got=got, expected=expected)
    rows = [text[-1:] if source.tokens == "last" else text[1:] for text in everything]
    # A gate's threshold is for the positions that the gate scores.
    judged = rows if positions is None else [scored_rows(text, positions) for text in everything]
    train = [number for number in range(len(texts)) if not held[number]]
    examples = np.concatenate([rows[number] for number in train])
    weight, bias = linear.fitted(
        examples, np.concatenate([np.full(len(rows[number]), labels[number]) for number in train]), source.method
    )
    scores = np.array([float((text.astype(np.float64) @ weight + bias).max()) for text in judged])
    threshold = statistics.best_threshold(scores[held], labels[held])
    probe = Probe.make(site, weight, bias, names=[name], threshold=threshold)
    probe.save(out / f"{name}.safetensors")
    auc = statistics.auc(scores[held], labels[held])
    return DirectionFit(
        name, source.fit, str(site), len(train), int(held.sum()), auc, probe.thresholds[0], norm_of(probe)
    )


def fit_layers(
    experiment: Experiment, source: VectorSource, layers: Sequence[int], fitter: Fitter, out: Path
) -> list[DirectionFit]:
    """Fit a vector for each layer on a part of the pairs, judge it on the rest, and write it."""
    assert source.fit is not None
    pairs = pairs_of(experiment, source)
    held = held_out(np.zeros(len(pairs), bool), source.held_out, source.seed)
    train = [pair for pair, is_held in zip(pairs, held, strict=True) if not is_held]
    judges = [text for pair, is_held in zip(pairs, held, strict=True) if is_held for text in pair]
    vectors = fit_vectors(fitter.model, train, source.method, layers, hook=source.hook)
    rows = fitter.model.last_rows(judges, [Site(layer, source.hook) for layer in layers])
    fits = []
    for layer, vector in vectors.items():
        site = Site(layer, source.hook)
        save_vector(out / f"vector-{layer}.safetensors", site, vector)
        along = (rows[site][::2] - rows[site][1::2]).astype(np.float64) @ vector
        share, norm = float((along > 0).mean()), float(np.linalg.norm(vector))
        fits.append(DirectionFit("vector", source.fit, str(site), len(train), len(judges) // 2, share, norm=norm))
    return fits


def scored_rows(rows: npt.NDArray[np.float32], positions: str) -> npt.NDArray[np.float32]:
    """Return the rows of a text at the positions that a gate scores.

    positions: as in `[gate]`. A text has no generated positions: `generated` takes all but the first, which is always
        a prompt's.
    """
    if positions == "last_prompt":
        return rows[-1:]
    return rows[1:] if positions == "generated" else rows


def texts_of(experiment: Experiment, name: str, source: ProbeSource) -> list[tuple[str, bool]]:
    """Return the texts of a fit, each with whether its label is positive. Raises UsageError with the line."""
    assert source.fit is not None
    path = experiment.relative(source.fit)
    try:
        return read_texts(path, source.prompt, source.label, source.positive, source.split)
    except UsageError as e:
        raise experiment.wrong((name, "fit"), expected="texts with labels", do=str(e)) from e


def pairs_of(experiment: Experiment, source: VectorSource) -> list[tuple[str, str]]:
    """Return the pairs of a fit, positive and negative. Raises UsageError with the line."""
    assert source.fit is not None
    try:
        pairs = [(p.positive, p.negative) for p in read_lines(experiment.relative(source.fit), "[vector] fit", Pair)]
    except UsageError as e:
        raise experiment.wrong(("vector", "fit"), expected="pairs of texts", do=str(e)) from e
    if len(pairs) < 2:
        raise experiment.wrong(("vector", "fit"), got=f"{len(pairs)} pair", expected="2 or more, as one is held out")
    return pairs


def held_out(labels: npt.NDArray[np.bool_], share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Return which texts are held out: a share of each label, at least one. One of each label is left to fit on."""
    rng = np.random.default_rng(seed)
    held = np.zeros(len(labels), bool)
    for label in (False, True):
        places = np.flatnonzero(labels == label)
        if len(places) > 1:
            count = min(max(1, round(share * len(places))), len(places) - 1)
            held[rng.permutation(places)[:count]] = True
    return held


def norm_of(probe: Probe) -> float:
    """Return the norm of a probe's direction."""
    return float(np.linalg.norm(probe.weight[0]))


def describe(fit: DirectionFit) -> str:
    """Return one line about a fit."""
    if fit.auc is None:
        return f"{fit.name} at {fit.site} from {fit.source}"
    measure = "pairs along it" if fit.name == "vector" else "AUC"
    text = f"{fit.name} at {fit.site}: fitted on {fit.texts}, held out {fit.held_out}, {measure} {fit.auc:.3f}"
    return text if fit.threshold is None else f"{text}, threshold {fit.threshold:.3g}"
