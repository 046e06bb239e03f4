"""The probes and vectors of an experiment: read from files, or fitted and kept in the output directory.

A fitted direction is kept with all that its fit depends on. A continued run reads it there, and fits what is missing.
Invariant: a direction that was fitted with other settings, or on other texts, is never used.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.extras import require
from capflow.files import make_directory, write_whole
from capflow.probes.probe import Probe, save_vector
from capflow.saes.load import load_sae
from capflow.saes.resolve import resolved
from capflow.saes.sae import Sae
from capflow.steering.feature import parse_features
from capflow.steering.request import Steering
from capflow_models.experiment.arms import Directions
from capflow_models.experiment.file import Experiment, ProbeSource, VectorSource
from capflow_models.experiment.fits import (
    DirectionFit,
    Fitter,
    fit_layers,
    fit_probe,
    norm_of,
    pairs_of,
    texts_of,
)
from capflow_models.experiment.results.manifest import hash_of
from capflow_models.spec import Vector
from capflow_models.vectors.file import load_sites

FITS = "fits.json"

_KEYS = {
    "probe": ("prompt", "label", "positive", "split", "hook", "layer", "method", "tokens", "held_out", "seed"),
    "vector": ("method", "hook", "held_out", "seed"),
}
"""The keys on which a fit depends, beside its file."""

_OTHER = "choose another directory with --out, or remove this one"


class KeptFit(msgspec.Struct, frozen=True):
    """A fitted direction in `fits.json`.

    basis: all that the fit depends on, as text, by the keys of the experiment's file. The fit's file is its SHA-256.
    """

    basis: dict[str, str]
    fit: DirectionFit


def resolve(
    experiment: Experiment, layers: Sequence[int], out: Path, start: Callable[[], AbstractContextManager[Fitter]]
) -> tuple[Directions, dict[int, Path], list[DirectionFit]]:
    """Return the directions, the vectors' files by layer, and how they were made.

    layers: those of the arms, for vectors.
    out: the directory of what is fitted.
    start: starts a model; called only if something must be fitted.
    """
    probes = _probes(experiment)
    make_directory(out)
    bases = _bases(experiment, layers)
    kept = checked_fits(experiment, layers, out)
    missing = [name for name in bases if name not in kept or not (out / f"{name}.safetensors").is_file()]
    if missing:
        if any(source.method == "logistic" for name, source in probes.items() if name in missing):
            require("probe", "[probe] fit", "scikit-learn")
        with start() as fitter:
            for made in _fitted(experiment, missing, fitter, out):
                kept |= {name: KeptFit(bases[name], fit) for name, fit in made.items()}
                write_whole(out / FITS, msgspec.json.encode(kept))
    loaded = {name: _probe(experiment, name, source, out) for name, source in probes.items()}
    vectors, hook, files = _vectors(experiment, layers, out)
    probe_file = out / "gate-probe.safetensors"
    if (probe := loaded.get("probe")) is not None:
        probe.save(probe_file)
    fits = []
    for name, one in loaded.items():
        if name in bases:
            fits.append(msgspec.structs.replace(kept[name].fit, threshold=one.thresholds[0]))
        else:
            source = probes[name].file or ""
            fits.append(DirectionFit(name, source, str(one.site), threshold=one.thresholds[0], norm=norm_of(one)))
    fits += [kept[name].fit for name in bases if name not in loaded]
    return Directions(probe, probe_file, vectors, hook, loaded.get("held_out")), files, fits


def checked_fits(experiment: Experiment, layers: Sequence[int], out: Path) -> dict[str, KeptFit]:
    """Return the directions that a directory keeps, by the names of their files.

    Raises UsageError for one that this experiment would fit otherwise.
    """
    try:
        kept = msgspec.json.decode((out / FITS).read_bytes(), type=dict[str, KeptFit])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as e:
        raise UsageError(explain(str(out / FITS), got=str(e), expected="fits of this version", do=_OTHER)) from e
    for name, basis in _bases(experiment, layers).items():
        for key, value in basis.items() if name in kept else ():
            before = kept[name].basis.get(key)
            if before == value:
                continue
            got, expected = value, f"{before}, with which {name} was fitted"
            if key.endswith(".fit"):
                got, expected = "a file with another content", f"the content that {name} was fitted on"
            raise experiment.wrong(tuple(key.split(".")), got=got, expected=f"{expected} in {out}", do=_OTHER)
    return kept


def known_threshold(experiment: Experiment, out: Path) -> float | None:
    """Return the threshold of the gates' probe; None if the probe is not fitted yet."""
    source = experiment.probe
    if source is None:
        return 0.0
    if source.file is None and not (out / "probe.safetensors").is_file():
        return source.threshold
    return _probe(experiment, "probe", source, out).thresholds[0]


def check_files(experiment: Experiment, layers: Sequence[int]) -> Site | None:
    """Read the files of probes, vectors and fits, and find the judge; return the site of the gate's probe, if any.

    Raises UsageError with the line for a file that is none of its kind, and for layers without a vector.
    """
    sites = {}
    for name, source in _probes(experiment).items():
        if source.file:
            sites[name] = _probe(experiment, name, source, experiment.path.parent).site
        else:
            texts_of(experiment, name, source)
            sites[name] = Site.parse(f"{source.hook}:{source.layer}")
    if experiment.vector is not None:
        if experiment.vector.fit:
            pairs_of(experiment, experiment.vector)
        else:
            _given_vectors(experiment, experiment.vector, layers)
    if experiment.judge is not None:
        program = experiment.judge.command[0]
        # A path is relative to the file's directory, in which the program runs.
        if shutil.which(experiment.relative(program).absolute() if "/" in program else program) is None:
            raise experiment.wrong(("judge", "command"), got=program, expected="a program that can be run")
    return sites.get("probe")


def _probes(experiment: Experiment) -> dict[str, ProbeSource]:
    sources = {"probe": experiment.probe, "held_out": experiment.held_out}
    return {name: source for name, source in sources.items() if source is not None}


def _bases(experiment: Experiment, layers: Sequence[int]) -> dict[str, dict[str, str]]:
    """Return what each fit depends on, by the name of its file."""
    arguments = sorted((name, repr(value)) for name, value in experiment.engine.items())
    shared = {"model": experiment.general.model, "engine": ", ".join(f"{name} = {value}" for name, value in arguments)}
    bases = {}
    for name, source in _probes(experiment).items():
        if source.fit:
            bases[name] = _basis(experiment, name, source, _KEYS["probe"]) | shared
            if name == "probe":
                bases[name]["gate.positions"] = experiment.gate.positions
    vector = experiment.vector
    if vector is not None and vector.fit and layers:
        basis = _basis(experiment, "vector", vector, _KEYS["vector"]) | shared
        bases |= {f"vector-{layer}": basis for layer in layers}
    return bases


def _basis(
    experiment: Experiment, table: str, source: ProbeSource | VectorSource, keys: Sequence[str]
) -> dict[str, str]:
    assert source.fit is not None
    basis = {f"{table}.fit": hash_of(experiment.relative(source.fit))}
    for key in keys:
        value = getattr(source, key)
        basis[f"{table}.{key}"] = ", ".join(value) if isinstance(value, tuple) else str(value)
    return basis


def _fitted(
    experiment: Experiment, missing: Sequence[str], fitter: Fitter, out: Path
) -> Iterator[dict[str, DirectionFit]]:
    """Fit what is missing, and yield how it was made, by the name of its file."""
    for name, source in _probes(experiment).items():
        if name in missing:
            yield {name: fit_probe(experiment, name, source, fitter, out)}
    layers = [int(name.removeprefix("vector-")) for name in missing if name.startswith("vector-")]
    if layers:
        assert experiment.vector is not None
        fits = fit_layers(experiment, experiment.vector, layers, fitter, out)
        yield {f"vector-{layer}": fit for layer, fit in zip(layers, fits, strict=True)}


def _probe(experiment: Experiment, name: str, source: ProbeSource, out: Path) -> Probe:
    if source.file:
        try:
            probe = Probe.load(experiment.relative(source.file))
        except UsageError as e:
            raise experiment.wrong((name, "file"), expected="a file of one linear probe", do=str(e)) from e
        if len(probe.names) != 1:
            raise experiment.wrong((name, "file"), got=f"{len(probe.names)} probes", expected="one")
    else:
        probe = Probe.load(out / f"{name}.safetensors")
    if source.threshold is None:
        return probe
    return Probe.make(probe.site, probe.weight[0], probe.bias[0], names=probe.names, threshold=source.threshold)


def _given_vectors(experiment: Experiment, source: VectorSource, layers: Sequence[int]) -> dict[int, Vector]:
    """Return the vectors of a file by layer, or that of an autoencoder's features."""
    sites = _of_file(experiment, source.file) if source.file is not None else _of_features(experiment, source)
    vectors = {site.layer: vector for site, vector in sites.items() if site.hook == source.hook}
    if any(layer not in vectors for layer in layers):
        expected = f"vectors of {source.hook} at layers {', '.join(map(str, layers))}"
        got = f"vectors at {', '.join(map(str, sites))}"
        raise experiment.wrong(("vector", "file" if source.file else "sae"), got=got, expected=expected)
    return vectors


def _of_file(experiment: Experiment, file: str) -> dict[Site, Vector]:
    try:
        return load_sites(experiment.relative(file))
    except UsageError as e:
        raise experiment.wrong(("vector", "file"), expected="a file of vectors", do=str(e)) from e


def _of_features(experiment: Experiment, source: VectorSource) -> dict[Site, Vector]:
    """Return the vector that a request with these features adds, by its site."""
    assert source.sae is not None
    try:
        sae = load_sae(experiment.relative(source.sae))
    except UsageError as e:
        raise experiment.wrong(("vector", "sae"), expected="an autoencoder", do=str(e)) from e
    try:
        return _added(sae, source.features)
    except UsageError as e:
        raise experiment.wrong(("vector", "features"), expected="features to add", do=str(e)) from e


def _added(sae: Sae, features: Mapping[str, Any]) -> dict[Site, Vector]:
    """Return the sum of features by its site. Raises UsageError for one that is set or gated, and as for a request."""
    uses = parse_features({"sae": "sae", "features": features}, where="features")
    for use in uses:
        if use.sets or use.gate:
            got = "set" if use.sets else f"the gate {use.gate}"
            raise UsageError(explain(use.where, got=got, expected="a coefficient, as an arm adds one vector"))
    (vector,) = resolved(Steering(features=uses), {"sae": sae}).base.vectors
    return {vector.site: vector.array(np.float64).astype(np.float32)}


def _vectors(
    experiment: Experiment, layers: Sequence[int], out: Path
) -> tuple[Mapping[int, Vector], str, dict[int, Path]]:
    """Return the vectors of these layers, their hook, and a file for each, which a gate reads."""
    source = experiment.vector
    if source is None:
        return {}, "post_block", {}
    if source.fit:
        vectors = {layer: _one(out / f"vector-{layer}.safetensors") for layer in layers}
    else:
        given = _given_vectors(experiment, source, layers)
        vectors = {layer: given[layer] for layer in layers}
    files = {}
    for layer, vector in vectors.items():
        files[layer] = out / f"gate-vector-{layer}.safetensors"
        save_vector(files[layer], Site(layer, source.hook), vector)
    return vectors, source.hook, files


def _one(path: Path) -> Vector:
    from safetensors.numpy import load_file

    vector: Vector = load_file(path)["vector"]
    return vector
