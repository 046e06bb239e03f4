"""One sparse autoencoder or transcoder, computed with NumPy in float32.

With the encoder's row `e`, its bias `b` and the threshold `t` of a feature, the activation at a row `x` is

| activation | value |
|---|---|
| ReLU, JumpReLU | `a = (x - centre) · e + b` where `a > t`, else 0 (`t` is 0 for ReLU; arXiv:2407.14435) |
| TopK | the ReLU of the k highest `a` of the row, else 0 (arXiv:2406.04093) |

An autoencoder reconstructs the row that it reads. A transcoder reads one site and reconstructs another
(arXiv:2406.11944); one with a skip connection adds `x @ skip.T`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from capflow import limits
from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.probes.file import Float32s
from capflow.probes.probe import as_float32

Ids = npt.NDArray[np.int32]

INACTIVE = -1
"""The id in the place of a feature at a row that has fewer active features than are asked for."""

# The activations that are in memory at once.
_CHUNK_BYTES = 32 * limits.MIB


class Feature(NamedTuple):
    """One feature: its activation is `a = x · encoder + bias` where that is above the threshold, else 0.

    encoder: `[width]` float32.
    bias: the encoder's bias; the centre is part of it.
    direction: the decoder's row, `[width of the target]` float32.
    """

    encoder: Float32s
    bias: float
    threshold: float
    direction: Float32s


@dataclass(frozen=True, eq=False)
class Sae:
    """One sparse autoencoder or transcoder.

    site: the site of the rows that it reads.
    target: the site that it reconstructs: the same for an autoencoder.
    encoder: `[features, width]` float32.
    bias: `[features]` float32.
    thresholds: `[features]` float32, at least 0: a feature's activation is 0 at and below this.
    centre: `[width]` float32, subtracted from every row.
    decoder: `[features, width of the target]` float32.
    decoder_bias: `[width of the target]` float32.
    k: how many features are active at once with TopK; 0 otherwise.
    skip: `[width of the target, width]` float32; None without a skip connection.
    where: the file or directory, for messages.
    """

    site: Site
    target: Site
    encoder: Float32s
    bias: Float32s
    thresholds: Float32s
    centre: Float32s
    decoder: Float32s
    decoder_bias: Float32s
    k: int = 0
    skip: Float32s | None = None
    where: str = "sae"

    @property
    def features(self) -> int:
        """The number of features."""
        return len(self.bias)

    @property
    def width(self) -> int:
        """The width of the rows that it reads."""
        return int(self.encoder.shape[1])

    @property
    def transcodes(self) -> bool:
        """Whether it reconstructs another site than it reads."""
        return self.site != self.target

    def encode(self, rows: npt.NDArray[Any]) -> Float32s:
        """Return the activations `[n, features]` float32 of rows `[n, width]` of any dtype."""
        self._check_rows(rows)
        parts = [values for _, values in self._encoded(rows)]
        return np.concatenate(parts) if parts else np.zeros((0, self.features), np.float32)

    def decode(self, activations: npt.NDArray[Any]) -> Float32s:
        """Return the rows `[n, width of the target]` float32 of activations `[n, features]`, without the skip."""
        return np.asarray(activations.astype(np.float32, copy=False) @ self.decoder + self.decoder_bias, np.float32)

    def reconstruct(self, rows: npt.NDArray[Any]) -> Float32s:
        """Return what it makes of rows `[n, width]`: `[n, width of the target]` float32, with the skip."""
        decoded = self.decode(self.encode(rows))
        return decoded if self.skip is None else decoded + as_float32(rows) @ self.skip.T

    def top(self, rows: npt.NDArray[Any], k: int = 32) -> tuple[Ids, Float32s]:
        """Return the k most active features of each row: their ids and activations, the highest first.

        rows: `[n, width]` of any dtype.

        ids: `[n, k]` int32; `INACTIVE` where a row has fewer active features.
        activations: `[n, k]` float32; 0 there.
        """
        check_k(k)
        self._check_rows(rows)
        ids = np.full((len(rows), k), INACTIVE, np.int32)
        activations = np.zeros((len(rows), k), np.float32)
        kept = min(k, self.features)
        for first, values in self._encoded(rows):
            best = np.argpartition(values, -kept, axis=1)[:, -kept:]
            highest = np.take_along_axis(values, best, 1)
            order = np.lexsort((best, -highest), axis=1)
            best, highest = np.take_along_axis(best, order, 1), np.take_along_axis(highest, order, 1)
            here = slice(first, first + len(values))
            ids[here, :kept] = np.where(highest > 0, best, INACTIVE)
            activations[here, :kept] = highest
        return ids, activations

    def feature(self, number: int, where: str = "feature") -> Feature:
        """Return a feature. Raises UsageError if there is none of this number; `where` names the field."""
        self.check_feature(number, where)
        encoder = self.encoder[number]
        bias = float(self.bias[number]) - float(encoder.astype(np.float64) @ self.centre.astype(np.float64))
        return Feature(encoder, bias, float(self.thresholds[number]), self.decoder[number])

    def check_feature(self, number: int, where: str = "feature") -> None:
        """Raise UsageError if there is no feature of this number; `where` names the field."""
        if not 0 <= number < self.features:
            raise UsageError(explain(where, got=number, expected=f"a feature of {self.where}, 0..{self.features - 1}"))

    def check_reads(self, info: ModelInfo) -> None:
        """Raise UsageError unless the site that it reads is a tapped one of this model."""
        self._check(self.site, self.width, info, "encoder")

    def check_writes(self, info: ModelInfo) -> None:
        """Raise UsageError unless the site that it reconstructs is a tapped one of this model."""
        self._check(self.target, int(self.decoder.shape[1]), info, "decoder")

    def _check(self, site: Site, width: int, info: ModelInfo, name: str) -> None:
        site.check_stream(f"{self.where}: site")
        if not 0 <= site.layer < info.num_layers:
            expected = f"a layer of the model, 0..{info.num_layers - 1}"
            raise UsageError(explain(f"{self.where}: site", got=str(site), expected=expected))
        if width != info.hidden_size:
            expected = f"{info.hidden_size}, the model's width"
            raise UsageError(explain(f"{self.where}: {name}", got=f"{width} numbers a row", expected=expected))
        site.check_tapped(info.sites, f"{self.where}: site")

    def _encoded(self, rows: npt.NDArray[Any]) -> Iterator[tuple[int, Float32s]]:
        """Yield the activations of a few rows at a time, with the number of the first row."""
        size = max(1, _CHUNK_BYTES // (4 * self.features))
        for first in range(0, len(rows), size):
            centred = as_float32(rows[first : first + size]) - self.centre
            values = np.asarray(centred @ self.encoder.T, np.float32)
            values += self.bias
            values[~(values > self.thresholds)] = 0.0
            if 0 < self.k < self.features:
                lesser = np.argpartition(values, -self.k, axis=1)[:, : -self.k]
                np.put_along_axis(values, lesser, np.float32(0), 1)
            yield first, values

    @cached_property
    def digest(self) -> str:
        """A number of what its activations are computed from, in hexadecimal; it differs between autoencoders."""
        parts = (self.encoder, self.bias, self.thresholds, self.centre)
        digest = xxhash.xxh3_64(b"%d" % self.k)
        for part in parts:
            digest.update(np.ascontiguousarray(part).data)
        return digest.hexdigest()

    def _check_rows(self, rows: npt.NDArray[Any]) -> None:
        if rows.ndim != 2 or rows.shape[1] != self.width:
            expected = f"[n, {self.width}], the width of {self.where}"
            raise UsageError(explain("rows", got=f"shape {list(rows.shape)}", expected=expected))


def check_k(k: Any, where: str = "k") -> None:
    """Raise UsageError unless `k` may be the number of features of each token; `where` names the field."""
    if not isinstance(k, int) or isinstance(k, bool) or not 0 < k <= limits.TOP_FEATURES_MAX:
        raise UsageError(explain(where, got=k, expected=f"1..{limits.TOP_FEATURES_MAX} features of each token"))
