"""The probes and vectors of an experiment: read from files, or fitted in the run and judged on what was held out.

Fitted directions are files in the output directory. A continued run reads them there, and fits nothing again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from capflow.capture.site import Site
from capflow.extras import require
from capflow.files import make_directory, write_whole
from capflow.probes import linear
from capflow.probes.probe import Probe, save_vector
from capflow_models.experiment.arms import Directions
from capflow_models.experiment.file import Experiment, ProbeSource, VectorSource
from capflow_models.experiment.prompts import read_texts
from capflow_models.experiment.results import statistics
from capflow_models.fit import Pair, fit_vectors
from capflow_models.lines import read_lines
from capflow_models.model import SteerableModel
from capflow_models.spec import Vector
from capflow_models.vectors import load_sites

FITS = "fits.json"

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


def resolve(
    experiment: Experiment, layers: Sequence[int], out: Path, start: Callable[[], AbstractContextManager[Fitter]]
) -> tuple[Directions, dict[int, Path], list[DirectionFit]]:
    """Return the directions, the vectors' files by layer, and how they were made.

    layers: those of the sweep, for vectors.
    out: the directory of what is fitted.
    start: starts a model; called only if something must be fitted.
    """
    probes = {"probe": experiment.probe, "held_out": experiment.held_out}
    needs_fit = [name for name, source in {**probes, "vector": experiment.vector}.items() if source and source.fit]
    make_directory(out)
    if needs_fit and not (out / FITS).is_file():
        if any(s is not None and s.fit and s.method == "logistic" for s in probes.values()):
            require("probe", "[probe] fit", "scikit-learn")
        with start() as fitter:
            made = [fit_probe(experiment, n, s, fitter, out) for n, s in probes.items() if s is not None and s.fit]
            if experiment.vector is not None and experiment.vector.fit:
                made += fit_layers(experiment, experiment.vector, layers, fitter, out)
        write_whole(out / FITS, msgspec.json.encode(made))
    fits = msgspec.json.decode((out / FITS).read_bytes(), type=list[DirectionFit]) if needs_fit else []
    loaded = {name: _probe(experiment, name, source, out) for name, source in probes.items() if source is not None}
    vectors, hook, files = _vectors(experiment, layers, out)
    probe_file = out / "gate-probe.safetensors"
    if (probe := loaded.get("probe")) is not None:
        probe.save(probe_file)
    fits += [
        DirectionFit(
            name, source.file, str(loaded[name].site), threshold=loaded[name].thresholds[0], norm=_norm(loaded[name])
        )
        for name, source in probes.items()
        if source is not None and source.file
    ]
    return Directions(probe, probe_file, vectors, hook, loaded.get("held_out")), files, fits


def fit_probe(experiment: Experiment, name: str, source: ProbeSource, fitter: Fitter, out: Path) -> DirectionFit:
    """DirectionFit a probe on a part of the texts, judge it and choose its threshold on the rest, and write it."""
    assert source.fit is not None
    path = experiment.relative(source.fit)
    texts = read_texts(path, source.prompt, source.label, source.positive)
    labels = np.array([is_positive for _, is_positive in texts])
    held = held_out(labels, source.held_out, source.seed)
    site = Site.parse(f"{source.hook}:{source.layer}")
    rows = [text[-1:] if source.tokens == "last" else text[1:] for text in fitter.rows([t for t, _ in texts], site)]
    train = [number for number in range(len(texts)) if not held[number]]
    examples = np.concatenate([rows[number] for number in train])
    weight, bias = linear.fitted(
        examples, np.concatenate([np.full(len(rows[number]), labels[number]) for number in train]), source.method
    )
    scores = np.array([float((text.astype(np.float64) @ weight + bias).max()) for text in rows])
    threshold = statistics.best_threshold(scores[held], labels[held]) if source.threshold is None else source.threshold
    probe = Probe.make(site, weight, bias, names=[name], threshold=threshold)
    probe.save(out / f"{name}.safetensors")
    auc = statistics.auc(scores[held], labels[held])
    return DirectionFit(
        name, source.fit, str(site), len(train), int(held.sum()), auc, probe.thresholds[0], _norm(probe)
    )


def fit_layers(
    experiment: Experiment, source: VectorSource, layers: Sequence[int], fitter: Fitter, out: Path
) -> list[DirectionFit]:
    """DirectionFit a vector for each layer on a part of the pairs, judge it on the rest, and write it."""
    assert source.fit is not None
    pairs = [(p.positive, p.negative) for p in read_lines(experiment.relative(source.fit), "[vector] fit", Pair)]
    held = held_out(np.zeros(len(pairs), bool), source.held_out, source.seed)
    train = [pair for pair, is_held in zip(pairs, held, strict=True) if not is_held]
    judges = [text for pair, is_held in zip(pairs, held, strict=True) if is_held for text in pair]
    if not train or not judges:
        raise experiment.wrong(("vector", "fit"), got=f"{len(pairs)} pairs", expected="enough to hold some out")
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


def held_out(labels: npt.NDArray[np.bool_], share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Return which texts are held out: a share of each label, at least one."""
    rng = np.random.default_rng(seed)
    held = np.zeros(len(labels), bool)
    for label in (False, True):
        places = np.flatnonzero(labels == label)
        if len(places) > 1:
            held[rng.permutation(places)[: max(1, round(share * len(places)))]] = True
    return held


def _probe(experiment: Experiment, name: str, source: ProbeSource, out: Path) -> Probe:
    probe = Probe.load(experiment.relative(source.file) if source.file else out / f"{name}.safetensors")
    if len(probe.names) != 1:
        raise experiment.wrong((name, "file"), got=f"{len(probe.names)} probes", expected="one")
    if source.threshold is None:
        return probe
    return Probe.make(probe.site, probe.weight[0], probe.bias[0], names=probe.names, threshold=source.threshold)


def check_files(experiment: Experiment, layers: Sequence[int]) -> Site | None:
    """Read the probes and vectors that are files; return the site of the gate's probe, if there is one.

    Raises UsageError for a file that is none of its kind, and for layers without a vector.
    """
    sites = {}
    for name, source in (("probe", experiment.probe), ("held_out", experiment.held_out)):
        if source is not None:
            if source.file:
                sites[name] = _probe(experiment, name, source, experiment.path.parent).site
            else:
                sites[name] = Site.parse(f"{source.hook}:{source.layer}")
    if experiment.vector is not None and experiment.vector.file:
        _given_vectors(experiment, experiment.vector, layers)
    return sites.get("probe")


def _given_vectors(experiment: Experiment, source: VectorSource, layers: Sequence[int]) -> dict[int, Vector]:
    """Return the vectors of a file by layer."""
    assert source.file is not None
    sites = load_sites(experiment.relative(source.file))
    vectors = {site.layer: vector for site, vector in sites.items() if site.hook == source.hook}
    if any(layer not in vectors for layer in layers):
        expected = f"vectors of {source.hook} at layers {', '.join(map(str, layers))}"
        got = f"vectors at {', '.join(map(str, sites))}"
        raise experiment.wrong(("vector", "file"), got=got, expected=expected)
    return vectors


def _vectors(
    experiment: Experiment, layers: Sequence[int], out: Path
) -> tuple[Mapping[int, Vector], str, dict[int, Path]]:
    """Return the vectors by layer, their hook, and a file for each, which a gate reads."""
    source = experiment.vector
    if source is None:
        vectors, hook = _zero(experiment, out), "post_block"
    elif source.fit:
        paths = [out / f"vector-{layer}.safetensors" for layer in layers]
        vectors, hook = {layer: _one(path) for layer, path in zip(layers, paths, strict=True)}, source.hook
    else:
        vectors, hook = _given_vectors(experiment, source, layers), source.hook
    files = {}
    for layer, vector in vectors.items():
        files[layer] = out / f"gate-vector-{layer}.safetensors"
        save_vector(files[layer], Site(layer, hook), vector)
    return vectors, hook, files


def _zero(experiment: Experiment, out: Path) -> dict[int, Vector]:
    """Return a vector without effect, for a shadow gate of an experiment without one."""
    source = experiment.probe
    if source is None:
        return {}
    probe = _probe(experiment, "probe", source, out)
    return {probe.site.layer: np.zeros(probe.hidden_size, np.float32)}


def _one(path: Path) -> Vector:
    from safetensors.numpy import load_file

    vector: Vector = load_file(path)["vector"]
    return vector


def _norm(probe: Probe) -> float:
    return float(np.linalg.norm(probe.weight[0]))


def describe(fit: DirectionFit) -> str:
    """Return one line about a fit."""
    if fit.auc is None:
        return f"{fit.name} at {fit.site} from {fit.source}"
    measure = "pairs along it" if fit.name == "vector" else "AUC"
    text = f"{fit.name} at {fit.site}: fitted on {fit.texts}, held out {fit.held_out}, {measure} {fit.auc:.3f}"
    return text if fit.threshold is None else f"{text}, threshold {fit.threshold:.3g}"
