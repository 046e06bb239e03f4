"""Probes and vectors in files: directions of the residual stream that were found elsewhere and are used here.

Both are plain safetensors files. A probe file holds `weight`, `[hidden_size]` or `[k, hidden_size]`, and may hold
`bias`, `[k]`; its metadata says `site` (`post_block:12`), and may say `names` (comma separated, one for each of the k; the file's name unless
given) and `threshold` (one number, or one for each; 0 unless given). A vector file holds `vector`, `[hidden_size]`, and its
metadata says `site`. A score is `row · weight + bias`; a probe fires where its score is at or above its threshold.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from capflow import limits
from capflow.errors import UsageError, explain
from capflow.site import Site
from capflow.vector import SteeringVector

Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Probe:
    """One or more linear probes at one site.

    weight: `[k, hidden_size]` float32; bias: `[k]` float32; names and thresholds: k of each. Raises UsageError, naming the
    file (`where`) and the field, when they do not agree or hold NaN or infinity.
    """

    site: Site
    names: tuple[str, ...]
    weight: Float32s
    bias: Float32s
    thresholds: tuple[float, ...]
    where: str = "probe"

    def __post_init__(self) -> None:
        shape = self.weight.shape
        if len(shape) != 2 or not shape[0] or not 0 < shape[1] <= limits.HIDDEN_SIZE_MAX:
            raise self._wrong("weight", f"shape {list(shape)}", "[hidden_size] or [k, hidden_size]")
        if self.bias.shape != shape[:1]:
            raise self._wrong("bias", f"shape {list(self.bias.shape)}", f"[{shape[0]}]")
        for field, values in (("weight", self.weight), ("bias", self.bias), ("threshold", np.array(self.thresholds))):
            if not np.isfinite(values).all():
                raise self._wrong(field, "NaN or infinity", "finite numbers")
        if len(self.names) != shape[0] or len(set(self.names)) != shape[0] or not all(self.names):
            raise self._wrong("names", ",".join(self.names), f"{shape[0]} different names")
        if len(self.thresholds) != shape[0]:
            raise self._wrong("threshold", f"{len(self.thresholds)} numbers", f"1 or {shape[0]}")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Probe:
        """Return the probes in a file; raises UsageError when it is not a probe file."""
        tensors, metadata = _read(path, {"weight"}, {"bias"})
        where = os.fspath(path)
        weight = np.atleast_2d(tensors["weight"])
        count = weight.shape[0]
        stem = Path(path).stem
        default = stem if count == 1 else ",".join(f"{stem}.{i}" for i in range(count))
        names = tuple(name.strip() for name in metadata.get("names", default).split(","))
        thresholds = _numbers(metadata.get("threshold", "0"), where)
        return cls(
            site=_site(metadata, where),
            names=names,
            weight=weight,
            bias=np.atleast_1d(tensors["bias"]) if "bias" in tensors else np.zeros(count, np.float32),
            thresholds=thresholds * count if len(thresholds) == 1 else thresholds,
            where=where,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that `load` reads."""
        metadata = {
            "site": str(self.site),
            "names": ",".join(self.names),
            "threshold": ",".join(map(repr, self.thresholds)),
        }
        save_file({"weight": self.weight, "bias": self.bias}, path, metadata)

    @classmethod
    def make(
        cls, site: Site, weight: Any, bias: Any = None, *, names: Sequence[str] = ("probe",), threshold: float = 0.0
    ) -> Probe:
        """Return the probes that plain arrays or lists hold, with one threshold."""
        weights = np.atleast_2d(np.asarray(weight, np.float32))
        count = weights.shape[0]
        biases = np.zeros(count, np.float32) if bias is None else np.atleast_1d(np.asarray(bias, np.float32))
        return cls(site, tuple(names), weights, biases, (float(threshold),) * count)

    @property
    def hidden_size(self) -> int:
        """The width of the rows that the probes read."""
        return int(self.weight.shape[1])

    def check(self, sites: Sequence[Site], hidden_size: int) -> None:
        """Raise UsageError unless the probes fit a model with these tapped sites and this width."""
        if self.hidden_size != hidden_size:
            raise self._wrong("weight", f"{self.hidden_size} numbers", f"{hidden_size}, the model's width")
        if self.site not in sites:
            do = f"start the engine with --sites {self.site} to tap it"
            raise UsageError(explain(f"{self.where}: site", got=str(self.site), expected="a tapped site", do=do))

    def scores(self, rows: npt.NDArray[Any]) -> Float32s:
        """Return the scores `[n, k]` float32 of rows `[n, hidden_size]` of any dtype."""
        return np.asarray(rows.astype(np.float32) @ self.weight.T + self.bias, dtype=np.float32)

    def _wrong(self, field: str, got: str, expected: str) -> UsageError:
        return UsageError(explain(f"{self.where}: {field}", got=got, expected=expected))


def load_vector(path: str | os.PathLike[str], scale: float = 1.0) -> SteeringVector:
    """Return the steering vector in a file, to be added `scale` times; raises UsageError when it is not a vector file."""
    tensors, metadata = _read(path, {"vector"}, set())
    where = os.fspath(path)
    return SteeringVector.make(_site(metadata, where), tensors["vector"], scale, where=where)


def save_vector(path: str | os.PathLike[str], site: Site, vector: Any) -> None:
    """Write a file that `load_vector` reads."""
    save_file({"vector": np.asarray(vector, np.float32)}, path, {"site": str(site)})


def _read(
    path: str | os.PathLike[str], required: set[str], optional: set[str]
) -> tuple[dict[str, Float32s], dict[str, str]]:
    """Return a file's tensors as float32, and its metadata."""
    where = os.fspath(path)
    if not Path(path).is_file():
        raise UsageError(explain(where, got="no such file", expected="a safetensors file"))
    try:
        with safe_open(path, "numpy") as file:
            names = set(file.keys())
            if not required <= names or names - required - optional:
                expected = " and maybe ".join(filter(None, [", ".join(required), ", ".join(optional)]))
                raise UsageError(
                    explain(f"{where}: tensors", got=", ".join(sorted(names)) or "none", expected=expected)
                )
            tensors = {name: np.asarray(file.get_tensor(name)).astype(np.float32) for name in names}
            return tensors, file.metadata() or {}
    except (SafetensorError, OSError) as e:
        raise UsageError(explain(where, got=str(e), expected="a safetensors file")) from e


def _site(metadata: dict[str, str], where: str) -> Site:
    try:
        return Site.parse(metadata.get("site", "nothing"))
    except UsageError as e:
        do = 'give save_file metadata like {"site": "post_block:12"}'
        raise UsageError(f"{where}: metadata {explain(str(e), do=do)}") from e


def _numbers(text: str, where: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = (math.nan,)
    if not all(math.isfinite(number) for number in numbers):
        raise UsageError(explain(f"{where}: metadata threshold", got=text, expected="finite numbers, comma separated"))
    return numbers
