"""Vectors that need no model: of an autoencoder's features, of a linear probe's weight, and of any file of these."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.probes.file import ProbeFile
from capflow.probes.kinds import SaeProbe, load_probe
from capflow.probes.probe import Probe, Scorer
from capflow.saes.sae import Sae
from capflow.steering.plain import NUMBER_MAX
from capflow_models.spec import Vector
from capflow_models.vectors.file import load_sites


def sae_vector(sae: Sae, features: Mapping[int, float]) -> Vector:
    """Return the sum of features' decoder rows, `[width of the target]` float32, to be added at `sae.target`.

    It is the vector that `steering_features` adds with the same coefficients. It is summed in float64.

    features: coefficients by the features' numbers.

    Raises UsageError for no features, and for one that the autoencoder does not have.
    """
    if not features:
        raise UsageError(explain("feature", got="none", expected=f"a feature of {sae.where}, 0..{sae.features - 1}"))
    total = np.zeros(sae.decoder.shape[1])
    for number, coefficient in features.items():
        sae.check_feature(number)
        total += coefficient * sae.decoder[number].astype(np.float64)
    return _float32(total, sae.where)


def probe_vector(probe: Scorer, name: str | None = None) -> Vector:
    """Return the weight of a linear probe, `[hidden_size]` float32, to be added at `probe.site`.

    Added with scale s, it raises the score of every row by s times the square of its length.

    name: of the probe; the only one in the file by default.

    Raises UsageError for probes that are not linear, and for a name that none or several have.
    """
    if not isinstance(probe, Probe):
        do = "`capflow vectors sae` makes a vector of a feature" if isinstance(probe, SaeProbe) else ""
        got = f"a probe of kind {probe.kind}, whose score has no single direction"
        raise UsageError(explain(f"{probe.where}: kind", got=got, expected="a linear probe", do=do))
    if name is None and len(probe.names) > 1:
        do = f"name one of {', '.join(probe.names)}"
        raise UsageError(explain(f"{probe.where}: name", got=f"{len(probe.names)} probes", expected="one", do=do))
    if name is not None and name not in probe.names:
        raise UsageError(explain(f"{probe.where}: name", got=name, expected=f"one of {', '.join(probe.names)}"))
    weight: Vector = probe.weight[0 if name is None else probe.names.index(name)]
    return weight


def load_directions(path: str | os.PathLike[str]) -> dict[Site, Vector]:
    """Return the vectors of a file by site: those of a file of vectors, or the weight of a probe's file.

    Raises UsageError as `load_sites` and `probe_vector` do.
    """
    if Path(path).suffix == ".safetensors" and Path(path).is_file():
        tensors = ProbeFile(path).tensors
        if tensors & {"weight", "weight.0", "W_enc"}:
            probe = load_probe(path)
            return {probe.site: probe_vector(probe)}
    return load_sites(path)


def of_length(vector: Vector, length: float, where: str) -> Vector:
    """Return a vector scaled to a length. Raises UsageError for a vector of zeros, with `where` first."""
    wide = vector.astype(np.float64)
    norm = float(np.linalg.norm(wide))
    if not norm:
        raise UsageError(explain(where, got="a vector of zeros", expected="one with a direction"))
    return _float32(wide * (length / norm), where)


def _float32(vector: npt.NDArray[np.float64], where: str) -> Vector:
    if not np.abs(vector).max() <= NUMBER_MAX:
        raise UsageError(explain(where, got=f"{np.abs(vector).max():g}", expected="numbers of float32's range"))
    return vector.astype(np.float32)
