"""Probes with more than a direction: small networks, and features of sparse autoencoders.

`kind` in the metadata of a probe file selects one (see `capflow.probes.probe` for the other fields):

`linear`, a direction for each of k probes:

* tensors: `weight` `[k, hidden_size]`; optional `bias` `[k]`

`mlp`, a small network with k outputs:

* tensors: `weight.0` `[n0, hidden_size]`, `weight.1` `[n1, n0]`, … the last `[k, …]`; optional `bias.0` `[n0]`, …
* metadata: `activation`, applied after every layer except the last: `relu` (default), `gelu`, `silu` or `tanh`

`sae`, features of an autoencoder, with the names and shapes of SAELens:

* tensors: `W_enc` `[hidden_size, d_sae]`, `b_enc` `[d_sae]`; optional `b_dec` `[hidden_size]`, subtracted from the row
  first; with `jumprelu`, `threshold` `[d_sae]`; `W_dec` is not read
* metadata: `activation`: `relu` (default), `jumprelu`, or `topk` with `k`; `features`: the recorded features, comma
  separated (default: all d_sae)

A feature's score is its activation, computed in float32: `a = f((row - b_dec) @ W_enc + b_enc)`. `jumprelu` is `a`
where it is above the feature's threshold, else 0 (Rajamanoharan et al., arXiv:2407.14435). `topk` is the ReLU of the k
highest of all d_sae, else 0 (Gao et al., arXiv:2406.04093). The metadata's `threshold` is another one: a feature fires
from this score on.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, cast

import numpy as np
import numpy.typing as npt

from capflow import limits
from capflow.errors import UsageError, explain
from capflow.probes.file import Float32s, ProbeFile
from capflow.probes.probe import POOLS, Pool, Probe, Scorer, as_float32

KINDS = ("linear", "mlp", "sae")
MLP_ACTIVATIONS = ("relu", "gelu", "silu", "tanh")
SAE_ACTIVATIONS = ("relu", "jumprelu", "topk")

# The number of rows whose activations of all features are in memory at once.
_TOPK_ROWS = 256


def load_probe(path: str | os.PathLike[str]) -> Scorer:
    """Return the probes in a file, of any kind; raises UsageError if it is not a probe file."""
    file = ProbeFile(path)
    kind = file.choice("kind", KINDS, "linear")
    if kind == "mlp":
        return MlpProbe.read(file)
    return SaeProbe.read(file) if kind == "sae" else Probe.read(file)


def load_probes(paths: Iterable[str], where: str) -> list[Scorer]:
    """Return the probes of several files.

    where: the option that names the files, for errors.

    Raises UsageError for a file that is no probe file, and for a name that two probes have.
    """
    probes = [load_probe(path) for path in paths]
    counts = Counter(name for probe in probes for name in probe.names)
    for name, count in counts.items():
        if count > 1:
            raise UsageError(explain(where, got=f"{name} twice", expected="different names"))
    return probes


@dataclass(frozen=True, eq=False)
class MlpProbe(Scorer):
    """A small network with k outputs, at one site.

    weights: `[out, in]` float32 of each layer; the first `in` is hidden_size, the last `out` is k.
    biases: `[out]` float32 of each layer.
    activation: applied after every layer except the last.
    """

    kind: ClassVar[str] = "mlp"

    _: KW_ONLY
    weights: tuple[Float32s, ...]
    biases: tuple[Float32s, ...]
    activation: str = "relu"

    def __post_init__(self) -> None:
        width = None
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            if weight.ndim != 2 or not weight.size or (width is not None and weight.shape[1] != width):
                expected = f"[n, {width or 'hidden_size'}]"
                raise self._wrong(f"weight.{index}", f"shape {list(weight.shape)}", expected)
            width = weight.shape[0]
            if bias.shape != (width,):
                raise self._wrong(f"bias.{index}", f"shape {list(bias.shape)}", f"[{width}]")
        self._check_names(len(self.weights[-1]))

    @classmethod
    def read(cls, file: ProbeFile) -> MlpProbe:
        """Return the network in an open file; raises UsageError if it is not one."""
        count = max(1, sum(name.startswith("weight.") for name in file.tensors))
        names = [f"weight.{i}" for i in range(count)]
        tensors = file.expect(names, [f"bias.{i}" for i in range(count)])
        file.expect_fields("names", "threshold", "pool", "kind", "activation")
        weights = tuple(tensors[name] for name in names)
        zeros = (np.zeros(weight.shape[:1], np.float32) for weight in weights)
        biases = tuple(tensors.get(f"bias.{i}", zero) for i, zero in enumerate(zeros))
        outputs = weights[-1].shape[0] if weights[-1].ndim else 0
        return cls(
            site=file.site(),
            names=file.names((file.stem,) if outputs == 1 else tuple(f"{file.stem}.{i}" for i in range(outputs))),
            weights=weights,
            biases=biases,
            activation=file.choice("activation", MLP_ACTIVATIONS, "relu"),
            thresholds=file.thresholds(outputs),
            pool=cast("Pool", file.choice("pool", POOLS, "token")),
            where=file.where,
        )

    @property
    def hidden_size(self) -> int:
        """The width of the rows that the network reads."""
        return int(self.weights[0].shape[1])

    def scores(self, rows: npt.NDArray[Any]) -> Float32s:
        """Return the outputs `[n, k]` float32 for rows `[n, hidden_size]` of any dtype."""
        values = as_float32(rows)
        for index, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            values = (_activate(self.activation, values) if index else values) @ weight.T + bias
        return np.asarray(values, np.float32)

    def parts(self, index: int) -> tuple[bytes, ...]:
        """Return the parameters of the layers before the last, and the last layer's for this output."""
        layers = itertools.chain.from_iterable(zip(self.weights[:-1], self.biases[:-1], strict=True))
        last = (self.weights[-1][index], self.biases[-1][index])
        return (self.activation.encode(), *(part.tobytes() for part in (*layers, *last)))


def _activate(name: str, values: Float32s) -> Float32s:
    if name == "relu":
        return np.maximum(values, 0)
    if name == "tanh":
        return cast("Float32s", np.tanh(values))
    if name == "silu":
        return cast("Float32s", values * _sigmoid(values))
    return cast("Float32s", values * _normal_cdf(values))


def _sigmoid(values: Float32s) -> Float32s:
    return cast("Float32s", 0.5 * (1 + np.tanh(0.5 * values)))


def _normal_cdf(values: Float32s) -> Float32s:
    """Return the factor of GELU. erf is by Abramowitz and Stegun 7.1.26, with an error of at most 1.5e-7."""
    at = np.abs(values) * np.float32(np.sqrt(0.5))
    t = 1 / (1 + 0.3275911 * at)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return cast("Float32s", 0.5 * (1 + np.copysign(1 - series * np.exp(-at * at), values)))


@dataclass(frozen=True, eq=False)
class SaeProbe(Scorer):
    """Features of a sparse autoencoder's encoder, at one site.

    The computed features are the recorded ones; with `topk` they are all features, as all decide which are the k
    highest.

    weight: `[n, hidden_size]` float32, of the computed features.
    bias: `[n]` float32.
    jumps: `[n]` float32: a feature's activation is 0 at and below this.
    centre: `[hidden_size]` float32, subtracted from every row.
    features: the indices of the recorded features among the computed ones, in the order of `names`.
    activation: the activation function.
    k: the number of features active at once with `topk`; 0 otherwise.
    """

    kind: ClassVar[str] = "sae"

    _: KW_ONLY
    weight: Float32s
    bias: Float32s
    jumps: Float32s
    centre: Float32s
    features: npt.NDArray[np.int64]
    activation: Literal["relu", "jumprelu", "topk"] = "relu"
    k: int = 0

    def __post_init__(self) -> None:
        self._check_names(len(self.features))

    @classmethod
    def read(cls, file: ProbeFile) -> SaeProbe:
        """Return the features in an open file; raises UsageError if it has none."""
        activation = file.choice("activation", SAE_ACTIVATIONS, "relu")
        jumping, by_rank = activation == "jumprelu", activation == "topk"
        tensors = file.expect(("W_enc", "b_enc", *(["threshold"] * jumping)), ("b_dec",), unread=("W_dec",))
        file.expect_fields("names", "threshold", "pool", "kind", "activation", "features", *(["k"] * by_rank))
        encoder, bias = tensors["W_enc"], tensors["b_enc"]
        if encoder.ndim != 2 or not encoder.size:
            raise file.wrong("W_enc", f"shape {list(encoder.shape)}", "[hidden_size, d_sae]")
        width, count = encoder.shape
        jumps = tensors.get("threshold", np.zeros(count, np.float32))
        centre = tensors.get("b_dec", np.zeros(width, np.float32))
        file.expect_shapes(tensors, {"b_enc": (count,), "threshold": (count,), "b_dec": (width,)})
        features = _features(file, count)
        computed = np.arange(count) if by_rank else features
        return cls(
            site=file.site(),
            names=file.names(tuple(f"{file.stem}.{feature}" for feature in features)),
            weight=np.ascontiguousarray(encoder.T[computed]),
            bias=bias[computed],
            jumps=jumps[computed],
            centre=centre,
            features=features if by_rank else np.arange(len(features)),
            activation=cast("Literal['relu', 'jumprelu', 'topk']", activation),
            k=_k(file, count) if by_rank else 0,
            thresholds=file.thresholds(len(features)),
            pool=cast("Pool", file.choice("pool", POOLS, "token")),
            where=file.where,
        )

    @property
    def hidden_size(self) -> int:
        """The width of the rows that the encoder reads."""
        return int(self.weight.shape[1])

    def scores(self, rows: npt.NDArray[Any]) -> Float32s:
        """Return the activations `[n, k]` float32 of the recorded features for rows `[n, hidden_size]` of any dtype."""
        size = _TOPK_ROWS if self.k else max(1, len(rows))
        parts = [self._activations(as_float32(rows[at : at + size])) for at in range(0, len(rows), size)]
        return np.concatenate(parts) if parts else np.zeros((0, len(self.names)), np.float32)

    def _activations(self, rows: Float32s) -> Float32s:
        values = (rows - self.centre) @ self.weight.T + self.bias
        if self.k:
            lowest = np.partition(values, -self.k, axis=1)[:, -self.k, None]
            values = np.where(values >= lowest, values, 0)[:, self.features]
            return np.maximum(values, 0)
        return np.where(values > self.jumps, values, np.float32(0))

    def parts(self, index: int) -> tuple[bytes, ...]:
        """Return the parameters of the feature; with `topk`, those of all features."""
        if self.k:
            own = (self.weight, self.bias, self.centre, self.features[index])
        else:
            own = (self.weight[index], self.bias[index], self.jumps[index], self.centre)
        return (self.activation.encode(), b"%d" % self.k, *(part.tobytes() for part in own))


def _features(file: ProbeFile, count: int) -> npt.NDArray[np.int64]:
    text = file.metadata.get("features")
    if text is None:
        if count > limits.PROBES_PER_FILE_MAX:
            got, expected = f"none, which means all {count}", f"which to record, at most {limits.PROBES_PER_FILE_MAX}"
            raise file.wrong("metadata features", got, expected)
        return np.arange(count)
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 10 and int(part) < count for part in parts):
        raise file.wrong("metadata features", text, f"numbers of features, 0..{count - 1}, comma separated")
    return np.array([int(part) for part in parts], np.int64)


def _k(file: ProbeFile, count: int) -> int:
    text = file.metadata.get("k", "nothing")
    if not (text.isdecimal() and len(text) < 10 and 0 < int(text) <= count):
        raise file.wrong("metadata k", text, f"how many features are active at once, 1..{count}")
    return int(text)
