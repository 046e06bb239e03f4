"""The unembedding: a model's final norm and output matrix, applied to rows with bounded memory.

The matrix is read from its file in tiles of `limits.LENS_TILE_BYTES`, each of which is converted to float32 and
multiplied with all rows. The best tokens and the sum of all exponentials are carried from tile to tile, so that
neither the matrix nor all logits are ever in memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from capflow.errors import UsageError, explain
from capflow_dashboard import limits
from capflow_dashboard.lens.files import ModelFiles
from capflow_dashboard.lens.forms import FORMS, HEAD_PREFIXES, NESTED, PREFIXES, Form


class TopTokens(NamedTuple):
    """The most likely tokens of rows, most likely first; of two equal ones that with the lower id.

    ids: `[rows, k]` int64; -1 for rows that hold NaN or infinity.
    probabilities: `[rows, k]` float64, of the softmax over the whole vocabulary.
    """

    ids: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]


class Unembedding:
    """The final norm and the unembedding of a model's files.

    Raises UsageError that says why if the model cannot have a lens: its architecture is not in `FORMS`, or a tensor is
    missing, damaged or of another shape.
    """

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self._config = files.config
        self.form = self._read_form()
        prefix = self._prefix()
        self._matrix = files.tensor(self._matrix_name(prefix))
        shape = self._matrix.get_shape()
        self.vocabulary_size, self.hidden_size = int(shape[0]), int(shape[-1])
        size = self._config.get("vocab_size", self.vocabulary_size)
        if len(shape) != 2 or size != self.vocabulary_size:
            raise self._unfit("the unembedding", f"shape {list(shape)}", f"[{size}, hidden_size]")
        self._weight = self._vector(f"{prefix}{self.form.norm}.weight", self.hidden_size)
        bias = f"{prefix}{self.form.norm}.bias"
        has_bias = self.form.kind == "layer" and files.has(bias)
        self._bias = self._vector(bias, self.hidden_size) if has_bias else None
        head_bias = self._first_of(f"{self.form.head}.bias", HEAD_PREFIXES)
        self._head_bias = None if head_bias is None else self._vector(head_bias, self.vocabulary_size)
        self._eps = self._number(self.form.eps, self.form.eps_default)
        self._factor = 1.0
        if self.form.multiplied is not None:
            self._factor *= self._number(*self.form.multiplied)
        if self.form.divided is not None:
            self._factor /= self._number(*self.form.divided)
        self._cap = None
        if self.form.capped is not None and self._config.get(*self.form.capped) is not None:
            self._cap = self._number(self.form.capped[0], self.form.capped[1] or 0.0)

    @property
    def num_layers(self) -> int:
        """The number of layers that the configuration gives. Raises UsageError if it gives none."""
        return int(self._number(self.form.layers, None))

    def top(self, rows: npt.NDArray[np.float32], k: int) -> TopTokens:
        """Return the most likely tokens after the final norm and the unembedding.

        rows: `[rows, hidden_size]` float32, the stream after a block.

        Raises UsageError if the weights hold NaN.
        """
        stream = self.normed(rows)
        whole: npt.NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(stream), axis=1)
        stream = np.where(whole[:, None], stream, 0).astype(np.float32)
        count = min(k, self.vocabulary_size)
        best = _Best(len(rows), count)
        step = max(1, limits.LENS_TILE_BYTES // (4 * self.hidden_size))
        for first in range(0, self.vocabulary_size, step):
            # A slice of the file, then its float32 copy.
            tile = self._matrix[first : min(first + step, self.vocabulary_size)].astype(np.float32)
            best.add(first, self._scaled(stream @ tile.T, first))
        ids, probabilities = best.result()
        if np.isnan(probabilities).any():
            raise self._unfit("the weights", "NaN", "numbers")
        ids[~whole] = -1
        return TopTokens(ids, probabilities)

    def normed(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
        """Return the final norm of rows, `[rows, hidden_size]` float64."""
        stream: npt.NDArray[np.float64] = rows.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            if self.form.kind == "layer":
                stream = stream - stream.mean(axis=1, keepdims=True)
            stream = stream / np.sqrt(np.square(stream).mean(axis=1, keepdims=True) + self._eps)
            stream = stream * (1 + self._weight if self.form.kind == "rms_plus_one" else self._weight)
        return stream if self._bias is None else stream + self._bias

    def _scaled(self, logits: npt.NDArray[np.float32], first: int) -> npt.NDArray[np.float32]:
        """Return the logits of a tile that begins at token `first`, with bias, factor and cap."""
        if self._head_bias is not None:
            logits = logits + self._head_bias[first : first + logits.shape[1]].astype(np.float32)
        if self._factor != 1.0:
            logits = logits * np.float32(self._factor)
        if self._cap is not None:
            logits = np.tanh(logits / np.float32(self._cap)) * np.float32(self._cap)
        return logits

    def _read_form(self) -> Form:
        """Return the form of the architecture, and make `_config` the configuration of its text model."""
        name = self._config.get("model_type")
        form = FORMS.get(name) if isinstance(name, str) else None
        if form is None:
            got = f"the architecture {name}"
            raise self._unfit("logit lens", got, f"one of {', '.join(FORMS)}")
        if name in NESTED:
            nested = self._config.get("text_config")
            if not isinstance(nested, dict):
                raise self._unfit("config.json", "no text_config", "the configuration of the text model")
            ties = {
                config["tie_word_embeddings"] for config in (self._config, nested) if "tie_word_embeddings" in config
            }
            if len(ties) > 1:
                raise self._unfit("config.json: tie_word_embeddings", "both values", "one")
            self._config = nested | dict.fromkeys(("tie_word_embeddings",) if ties else (), *ties)
        return form

    def _prefix(self) -> str:
        """Return what stands before the names of the norm and the embedding."""
        for prefix in PREFIXES:
            if self._files.has(f"{prefix}{self.form.norm}.weight"):
                return prefix
        raise self._unfit("the weights", "no final norm", f"a tensor …{self.form.norm}.weight")

    def _matrix_name(self, prefix: str) -> str:
        """Return the name of the unembedding."""
        if self._config.get("tie_word_embeddings", self.form.tied):
            name: str | None = f"{prefix}{self.form.embedding}.weight"
        else:
            name = self._first_of(f"{self.form.head}.weight", HEAD_PREFIXES)
        if name is None or not self._files.has(name):
            raise self._unfit("the weights", "no unembedding", f"a tensor {name or self.form.head + '.weight'}")
        return name

    def _first_of(self, name: str, prefixes: tuple[str, ...]) -> str | None:
        return next((prefix + name for prefix in prefixes if self._files.has(prefix + name)), None)

    def _vector(self, name: str, length: int) -> npt.NDArray[np.float64]:
        tensor = self._files.tensor(name)
        if tensor.get_shape() != [length]:
            raise self._unfit(name, f"shape {tensor.get_shape()}", f"[{length}]")
        vector: npt.NDArray[np.float64] = tensor[:].astype(np.float64)
        return vector

    def _number(self, field: str, default: float | None) -> float:
        value: Any = self._config.get(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value) or value <= 0:
            raise self._unfit(f"config.json: {field}", value, "a number above 0")
        return float(value)

    def _unfit(self, part: str, got: Any, expected: str) -> UsageError:
        return UsageError(explain(f"{self._files.directory}: {part}", got=got, expected=expected))


class _Best:
    """The best tokens and the sum of exponentials of rows, over the tiles that were added."""

    def __init__(self, rows: int, k: int) -> None:
        self._logits = np.full((rows, k), -np.inf, np.float32)
        self._ids = np.full((rows, k), -1, np.int64)
        # The log of the sum of exponentials is `_peak` + log(`_total`).
        self._peak = np.full((rows, 1), -np.inf)
        self._total = np.zeros((rows, 1))

    def add(self, first: int, logits: npt.NDArray[np.float32]) -> None:
        """Add a tile: the logits of the tokens from `first` on, `[rows, tokens]`."""
        k = self._ids.shape[1]
        peak = np.maximum(self._peak, logits.max(axis=1, keepdims=True))
        exponentials = np.exp(logits - peak.astype(np.float32))
        self._total = self._total * np.exp(self._peak - peak) + exponentials.sum(
            axis=1, keepdims=True, dtype=np.float64
        )
        self._peak = peak
        if logits.shape[1] > k:
            # All that are not below the k-th: equal ones at the edge are decided by id.
            edge = np.partition(logits, -k, axis=1)[:, -k]
        for row, line in enumerate(logits):
            columns = np.flatnonzero(line >= edge[row]) if logits.shape[1] > k else np.arange(line.size)
            merged = np.concatenate([self._logits[row], line[columns]])
            ids = np.concatenate([self._ids[row], columns + first])
            order = np.lexsort((ids, -merged))[:k]
            self._logits[row], self._ids[row] = merged[order], ids[order]

    def result(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return the ids and the probabilities, `[rows, k]`."""
        return self._ids, np.exp(self._logits - self._peak) / self._total
