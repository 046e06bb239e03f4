"""The unembedding: a model's final norm and output matrix, applied to rows with bounded memory.

The matrix is read from its file in tiles of `limits.LENS_TILE_BYTES`, each of which is converted to float32 and
multiplied with all rows. Readouts carry sums from tile to tile, so that neither the matrix nor all logits are ever in
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from capflow import limits
from capflow.errors import UsageError, explain
from capflow.lenses.forms import FORMS, HEAD_PREFIXES, NESTED, PREFIXES, Form
from capflow.lenses.model_files import ModelFiles
from capflow.lenses.readout import (
    ChosenTokens,
    DivergenceReadout,
    Doubles,
    Floats,
    Ids,
    RankReadout,
    TopReadout,
    TopTokens,
)

# Rows of the matrix that the fingerprint reads.
_FINGERPRINT_ROWS = 64


class Unembedded(NamedTuple):
    """Rows after the final norm and the unembedding.

    top: the most likely tokens.
    chosen: the chosen tokens; None if none was asked for.
    divergences: `[rows]` float64, in nats; None if none was asked for.
    """

    top: TopTokens
    chosen: ChosenTokens | None = None
    divergences: Doubles | None = None


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

    @property
    def fingerprint(self) -> str:
        """A hash of the final norm and of some rows of the matrix, as float32: other weights have another one.

        Weights that were converted between dtypes without loss keep it.
        """
        digest = xxhash.xxh3_64(self._weight.astype(np.float32).tobytes())
        for index in np.unique(np.linspace(0, self.vocabulary_size - 1, _FINGERPRINT_ROWS).astype(np.int64)).tolist():
            digest.update(self._matrix[index : index + 1].astype(np.float32).tobytes())
        return digest.hexdigest()

    def matrix_rows(self, first: int, end: int) -> Floats:
        """Return rows of the output matrix, `[end - first, hidden_size]` float32: those of the tokens `first..end`."""
        rows: Floats = self._matrix[first:end].astype(np.float32)
        return rows

    def top(self, rows: npt.NDArray[np.float32], k: int) -> TopTokens:
        """Return the most likely tokens after the final norm and the unembedding, as `read` does."""
        return self.read(rows, k).top

    def read(
        self, rows: npt.NDArray[Any], k: int, *, tokens: Ids | None = None, references: Ids | None = None
    ) -> Unembedded:
        """Return the tokens of rows after the final norm and the unembedding.

        rows: `[rows, hidden_size]`, the stream after the last block. Memory grows with their number.
        k: how many of the most likely tokens.
        tokens: the chosen token of each row, `[rows]`.
        references: for each row the index of another one, from whose distribution the divergence is computed.

        Values of rows that hold NaN or infinity mean nothing, except their ids. Raises UsageError if the weights hold
        NaN.
        """
        normed = self.normed(rows)
        whole: npt.NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(normed), axis=1)
        stream: Floats = np.where(whole[:, None], normed, 0).astype(np.float32)
        top = TopReadout(len(rows), min(k, self.vocabulary_size))
        ranks = None if tokens is None else RankReadout(tokens, self._logits_of(stream, tokens))
        divergence = None if references is None else DivergenceReadout(references)
        for first, end in self._tiles(len(rows)):
            logits = self._logits(stream, first, end)
            top.add(first, logits)
            if ranks is not None:
                ranks.add(first, logits)
            if divergence is not None:
                divergence.add(logits)
        best = top.result()
        if np.isnan(best.probabilities).any():
            raise self._unfit("the weights", "NaN", "numbers")
        best.ids[~whole] = -1
        return Unembedded(
            best,
            None if ranks is None else ranks.result(top.log_total),
            None if divergence is None else divergence.result(top.log_total),
        )

    def _tiles(self, rows: int) -> Iterator[tuple[int, int]]:
        """Yield the first and the end of each tile of the matrix."""
        step = max(1, min(limits.LENS_TILE_BYTES // self.hidden_size, limits.LENS_LOGITS_BYTES // max(1, rows)) // 4)
        for first in range(0, self.vocabulary_size, step):
            yield first, min(first + step, self.vocabulary_size)

    def _logits(self, stream: Floats, first: int, end: int) -> Floats:
        """Return the logits of a tile, `[rows, end - first]`, of rows after the final norm."""
        # A slice of the file, then its float32 copy.
        return self._scaled(stream @ self.matrix_rows(first, end).T, first)

    def _logits_of(self, stream: Floats, tokens: Ids) -> Floats:
        """Return the logit of one token of each row, `[rows]`, to the bit as the whole tile has it."""
        chosen = np.zeros(len(tokens), np.float32)
        for first, end in self._tiles(len(tokens)):
            rows = np.flatnonzero((tokens >= first) & (tokens < end))
            if len(rows):
                chosen[rows] = self._logits(stream, first, end)[rows, tokens[rows] - first]
        return chosen

    def normed(self, rows: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
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
            raise self._unfit("lens", got, f"one of {', '.join(FORMS)}")
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
