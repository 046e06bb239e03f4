"""Probes and vectors in files: directions of the residual stream that were computed elsewhere.

A probe may be at a site with rows of another shape, too: its weights are then as many as a row has numbers.

Both are safetensors files. A linear probe's file holds `weight`, `[hidden_size]` or `[k, hidden_size]`, and optionally
`bias`, `[k]`. The metadata of every probe file has `site` (`post_block:12`), and may have

* `names`: comma separated, one for each of the k probes (default: the file's name);
* `threshold`: one number, or one for each probe (default: 0);
* `pool`: which scores are recorded of a request. `token` (default): every token's score; `mean`, `max` or `last`: one
  score, over the scores of its tokens. The mean of a linear probe's scores is its score of the mean row;
* `kind`: `linear` (default), or one of `capflow.probes.kinds`.

A vector file holds `vector`, `[hidden_size]`, and its metadata has `site`; or it holds one tensor `HOOK.LAYER`, such as
`post_block.9`, as `capflow vectors fit` writes it. A linear score is `row · weight + bias`. A probe fires where its
score is at or above its threshold.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from capflow import limits
from capflow.capture.site import SHAPED_HOOKS, Site
from capflow.errors import UsageError, explain
from capflow.probes.file import Float32s, ProbeFile, write_file
from capflow.steering.vector import SteeringVector

Pool = Literal["token", "mean", "max", "last"]
POOLS: tuple[Pool, ...] = get_args(Pool)


@dataclass(frozen=True, eq=False)
class Scorer(ABC):
    """One or more probes at one site; they give every row a score.

    site: the site of the rows.
    names: the names of the k probes; all differ.
    thresholds: the thresholds of the k probes.
    pool: which scores are recorded of a request.
    where: the file, for messages.

    Raises UsageError, with the file and the field, if the numbers of names, thresholds and probes differ.
    """

    kind: ClassVar[str]

    site: Site
    names: tuple[str, ...]
    _: KW_ONLY
    thresholds: tuple[float, ...]
    pool: Pool = "token"
    where: str = "probe"

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """The width of the rows that the probes read."""

    @abstractmethod
    def scores(self, rows: npt.NDArray[Any]) -> Float32s:
        """Return the scores `[n, k]` float32 of rows `[n, hidden_size]` of any dtype."""

    @abstractmethod
    def parts(self, index: int) -> tuple[bytes, ...]:
        """Return the parameters of one probe, which distinguish it from another of the same name."""

    def check(self, sites: Sequence[Site], hidden_size: int) -> None:
        """Raise UsageError unless the probes fit a model with these tapped sites and this width at their own site.

        hidden_size: `ModelInfo.width_of(probe.site)`.
        """
        shaped = self.site.hook in SHAPED_HOOKS
        if shaped:  # the width of a site that is not tapped is not known
            self.site.check_tapped(sites, f"{self.where}: site")
        if self.hidden_size != hidden_size:
            width = f"{hidden_size}, the width of {self.site}" if shaped else f"{hidden_size}, the model's width"
            raise self._wrong("weight", f"{self.hidden_size} numbers", width)
        self.site.check_tapped(sites, f"{self.where}: site")

    def _check_names(self, count: int) -> None:
        if not 0 < count <= limits.PROBES_PER_FILE_MAX:
            raise self._wrong("weight", f"{count} probes", f"1..{limits.PROBES_PER_FILE_MAX} in one file")
        if len(self.names) != count or len(set(self.names)) != count or not all(self.names):
            raise self._wrong("names", ",".join(self.names), f"{count} different names")
        if len(self.thresholds) != count:
            raise self._wrong("threshold", f"{len(self.thresholds)} numbers", f"1 or {count}")
        if not np.isfinite(self.thresholds).all():
            raise self._wrong("threshold", "NaN or infinity", "finite numbers")

    def _header(self) -> dict[str, str]:
        """Return the metadata that every kind has."""
        header = {"site": str(self.site), "names": ",".join(self.names), "pool": self.pool, "kind": self.kind}
        return header | {"threshold": ",".join(repr(float(number)) for number in self.thresholds)}

    def _wrong(self, field: str, got: str, expected: str) -> UsageError:
        return UsageError(explain(f"{self.where}: {field}", got=got, expected=expected))


@dataclass(frozen=True, eq=False)
class Probe(Scorer):
    """One or more linear probes at one site.

    weight: `[k, hidden_size]` float32, finite.
    bias: `[k]` float32, finite.
    """

    kind: ClassVar[str] = "linear"

    _: KW_ONLY
    weight: Float32s
    bias: Float32s

    def __post_init__(self) -> None:
        shape = self.weight.shape
        if len(shape) != 2 or not shape[0] or not 0 < shape[1] <= limits.HIDDEN_SIZE_MAX:
            raise self._wrong("weight", f"shape {list(shape)}", "[hidden_size] or [k, hidden_size]")
        if self.bias.shape != shape[:1]:
            raise self._wrong("bias", f"shape {list(self.bias.shape)}", f"[{shape[0]}]")
        for field, values in (("weight", self.weight), ("bias", self.bias)):
            if not np.isfinite(values).all():
                raise self._wrong(field, "NaN or infinity", "finite numbers")
        self._check_names(shape[0])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Probe:
        """Return the linear probes in a file; raises UsageError if it holds none."""
        return cls.read(ProbeFile(path))

    @classmethod
    def read(cls, file: ProbeFile) -> Probe:
        """Return the linear probes in an open file; raises UsageError if it holds none."""
        file.choice("kind", (cls.kind,), cls.kind)
        tensors = file.expect(("weight",), ("bias",))
        file.expect_fields("names", "threshold", "pool", "kind")
        weight = np.atleast_2d(tensors["weight"])
        count = weight.shape[0]
        return cls(
            site=file.site(),
            names=file.names((file.stem,) if count == 1 else tuple(f"{file.stem}.{i}" for i in range(count))),
            weight=weight,
            bias=np.atleast_1d(tensors["bias"]) if "bias" in tensors else np.zeros(count, np.float32),
            thresholds=file.thresholds(count),
            pool=cast("Pool", file.choice("pool", POOLS, "token")),
            where=file.where,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that `load` reads, whole or not at all; raises CapflowError if it cannot be written."""
        write_file(path, {"weight": self.weight, "bias": self.bias}, self._header())

    @classmethod
    def make(
        cls,
        site: Site,
        weight: Any,
        bias: Any = None,
        *,
        names: Sequence[str] = ("probe",),
        threshold: float = 0.0,
        pool: Pool = "token",
    ) -> Probe:
        """Return the probes in plain arrays or lists, all with one threshold.

        weight: `[hidden_size]` or `[k, hidden_size]`.
        bias: a number or `[k]`; zeros by default.
        """
        weights = np.atleast_2d(np.asarray(weight, np.float32))
        count = weights.shape[0]
        biases = np.zeros(count, np.float32) if bias is None else np.atleast_1d(np.asarray(bias, np.float32))
        return cls(site, tuple(names), weight=weights, bias=biases, thresholds=(float(threshold),) * count, pool=pool)

    @property
    def hidden_size(self) -> int:
        """The width of the rows that the probes read."""
        return int(self.weight.shape[1])

    def scores(self, rows: npt.NDArray[Any]) -> Float32s:
        """Return the scores `[n, k]` float32 of rows `[n, hidden_size]` of any dtype."""
        return np.asarray(as_float32(rows) @ self.weight.T + self.bias, dtype=np.float32)

    def parts(self, index: int) -> tuple[bytes, ...]:
        """Return the probe's weight and bias."""
        return self.weight[index].tobytes(), self.bias[index].tobytes()


def as_float32(rows: npt.NDArray[Any]) -> Float32s:
    """Return rows of any captured dtype as float32, which holds each of their numbers exactly."""
    # A bfloat16 is the upper half of a float32.
    if rows.dtype.name == "bfloat16":
        wide = rows.view(np.uint16).astype(np.uint32)
        np.left_shift(wide, 16, out=wide)
        return wide.view(np.float32)
    return rows.astype(np.float32, copy=False)


def load_vector(path: str | os.PathLike[str], scale: float = 1.0) -> SteeringVector:
    """Return the steering vector in a file, to be added `scale` times; raises UsageError if it is not a vector file.

    `save_vector` writes such files, and so does `capflow vectors fit` for one layer.
    """
    file = ProbeFile(path)
    names = sorted(file.tensors)
    site = _site_in(names[0]) if len(names) == 1 else None
    if site is None and "vector" not in names:
        raise file.wrong_tensors("only `vector`, or only one such as `post_block.9`")
    (vector,) = file.expect(names if site else ("vector",)).values()
    return SteeringVector.make(site or file.site(), vector, scale, where=file.where)


def _site_in(name: str) -> Site | None:
    """Return the site that a tensor's name has, `HOOK.LAYER`; None if it has none."""
    hook, _, layer = name.rpartition(".")
    try:
        return Site.parse(f"{hook}:{layer}")
    except UsageError:
        return None


def save_vector(path: str | os.PathLike[str], site: Site, vector: Any) -> None:
    """Write a file that `load_vector` reads, whole or not at all; raises CapflowError if it cannot be written.

    site: the site of the vector.
    vector: `[hidden_size]`, stored as float32.
    """
    write_file(path, {"vector": np.asarray(vector, np.float32)}, {"site": str(site)})
