"""Tables about vectors: their lengths, the angles between them, and the projections of rows on them.

Everything is computed in float64. With the vector `v` and its unit vector `d = v / |v|`, a row `x` has the projection
`x · d`, in the stream's units as in a clamp, and the cosine `x · d / |x|`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.probes.probe import as_float32
from capflow_models.spec import Vector

Files = Mapping[str, Mapping[Site, Vector]]
"""Vectors `[width]` by the file's name and the site."""


class VectorNorm(msgspec.Struct, frozen=True):
    """The length of a vector.

    largest: the largest magnitude of its numbers.
    """

    file: str
    site: str
    width: int
    norm: float
    largest: float


class VectorCosine(msgspec.Struct, frozen=True):
    """The cosine of the angle between two vectors; None if one of them is zero."""

    file: str
    site: str
    other_file: str
    other_site: str
    cosine: float | None


class GroupProjection(msgspec.Struct, frozen=True):
    """The projections of a group's rows on one vector.

    rows: how many there are.
    mean, std: of the projections; `std` divides by the number of rows.
    cosine: the mean cosine between a row and the vector; None if a row is zero.
    """

    file: str
    site: str
    group: str
    rows: int
    mean: float
    std: float
    cosine: float | None


def norms(files: Files) -> list[VectorNorm]:
    """Return the length of each vector, in the order of files and layers."""
    return [
        VectorNorm(name, str(site), vector.size, _norm(vector), float(np.abs(vector).max()))
        for name, vectors in files.items()
        for site, vector in vectors.items()
    ]


def cosines(files: Files, *, everything: bool = False) -> list[VectorCosine]:
    """Return the cosine of each two vectors of one file; of several files, of each two at the same site.

    everything: compare each vector with every other one, whatever its file and site.

    Raises UsageError if nothing can be compared, and for two vectors of different widths.
    """
    every = [(name, site, vector) for name, vectors in files.items() for site, vector in vectors.items()]
    chosen = [
        (one, other)
        for one, other in itertools.combinations(every, 2)
        if everything or len(files) == 1 or one[1] == other[1]
    ]
    if not chosen:
        got = "one vector" if len(every) == 1 else "no site that two files have"
        do = "" if len(every) == 1 else "--all compares vectors of different sites"
        raise UsageError(explain("cosine", got=got, expected="vectors to compare", do=do))
    return [
        VectorCosine(name, str(site), other, str(other_site), _cosine(vector, other_vector, f"{other}: {other_site}"))
        for (name, site, vector), (other, other_site, other_vector) in chosen
    ]


def _norm(vector: npt.NDArray[Any]) -> float:
    return float(np.linalg.norm(vector.astype(np.float64)))


def _cosine(one: Vector, other: Vector, where: str) -> float | None:
    if one.size != other.size:
        raise UsageError(explain(where, got=f"{other.size} numbers", expected=f"{one.size}, as the other vector has"))
    lengths = _norm(one) * _norm(other)
    return float(one.astype(np.float64) @ other.astype(np.float64)) / lengths if lengths else None


class Projections:
    """Collects the projections of rows on vectors, by group.

    Raises UsageError for a vector of zeros.
    """

    def __init__(self, files: Files) -> None:
        self._units: list[tuple[str, Site, npt.NDArray[np.float64]]] = []
        # For each vector and group: the projections `[n]` and the norms `[n]` of the rows, in parts.
        self._parts: dict[tuple[str, Site, str], list[npt.NDArray[np.float64]]] = {}
        for name, vectors in files.items():
            for site, vector in vectors.items():
                if not (norm := _norm(vector)):
                    raise UsageError(explain(f"{name}: {site}", got="a vector of zeros", expected="a direction"))
                self._units.append((name, site, vector.astype(np.float64) / norm))

    @property
    def sites(self) -> list[Site]:
        """The sites whose rows are projected."""
        return sorted({site for _, site, _ in self._units})

    @property
    def directions(self) -> list[tuple[str, Site, int]]:
        """The file, the site and the width of each vector."""
        return [(name, site, unit.size) for name, site, unit in self._units]

    def check(self, model: ModelInfo, where: str) -> None:
        """Raise UsageError for a vector of a site that is not there, or of another width than the rows.

        where: the rows' source, for messages.
        """
        for name, site, unit in self._units:
            if site not in model.sites:
                raise UsageError(explain(f"{name}: {site}", expected=f"a site of {where}"))
            if unit.size != (width := model.width_of(site)):
                expected = f"{width}, as {where}"
                raise UsageError(explain(f"{name}: {site}", got=f"{unit.size} numbers", expected=expected))

    def add(self, site: Site, rows: npt.NDArray[Any], group: str, where: str) -> None:
        """Add the rows of a group at a site, `[n, width]` of any dtype.

        where: the rows' source, for messages.

        Raises UsageError for a row with NaN or infinity, and for rows of another width than the vector.
        """
        wide = as_float32(rows).astype(np.float64)
        if not np.isfinite(wide).all():
            raise UsageError(explain(f"{where}: {site}", got="NaN or infinity", expected="finite rows"))
        lengths = np.linalg.norm(wide, axis=1)
        for name, its_site, unit in self._units:
            if its_site == site:
                if wide.shape[1] != unit.size:
                    expected = f"{wide.shape[1]}, as {where}"
                    raise UsageError(explain(f"{name}: {site}", got=f"{unit.size} numbers", expected=expected))
                self._parts.setdefault((name, site, group), []).append(np.stack([wide @ unit, lengths]))

    def table(self) -> Iterator[GroupProjection]:
        """Yield a line for each vector and group, in the order of the vectors, the groups by name."""
        groups = sorted({group for _, _, group in self._parts})
        for name, site, _ in self._units:
            for group in groups:
                parts = self._parts.get((name, site, group))
                if not parts:
                    continue
                along, lengths = np.concatenate(parts, axis=1)
                cosine = float((along / lengths).mean()) if lengths.all() else None
                yield GroupProjection(
                    name, str(site), group, along.size, float(along.mean()), float(along.std()), cosine
                )
