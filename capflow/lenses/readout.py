"""Readouts: sums over the vocabulary, carried from tile to tile of the logits.

Of each row a readout keeps the most likely tokens, the log of the sum of exponentials (the softmax's denominator), how
many tokens are above a chosen one, and the divergence from another row's distribution. So all logits are never in
memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


class TopTokens(NamedTuple):
    """The most likely tokens of rows, most likely first; of two equal ones that with the lower id.

    ids: `[rows, k]` int64; -1 for rows that hold NaN or infinity.
    logits: `[rows, k]` float32.
    probabilities: `[rows, k]` float64, of the softmax over the whole vocabulary.
    """

    ids: Ids
    logits: Floats
    probabilities: Doubles


class ChosenTokens(NamedTuple):
    """One chosen token of each row.

    logits: `[rows]` float32.
    probabilities: `[rows]` float64.
    ranks: `[rows]` int64; 1 for the most likely token.
    """

    logits: Floats
    probabilities: Doubles
    ranks: Ids


class TopReadout:
    """The most likely tokens and the sum of exponentials of rows, over the tiles that were added."""

    def __init__(self, rows: int, k: int) -> None:
        self._logits = np.full((rows, k), -np.inf, np.float32)
        self._ids = np.full((rows, k), -1, np.int64)
        # The log of the sum of exponentials is `_peak` + log(`_total`).
        self._peak = np.full((rows, 1), -np.inf)
        self._total = np.zeros((rows, 1))

    def add(self, first: int, logits: Floats) -> None:
        """Add a tile: the logits of the tokens from `first` on, `[rows, tokens]`."""
        k = self._ids.shape[1]
        peak = np.maximum(self._peak, logits.max(axis=1, keepdims=True))
        exponentials = np.exp(logits - peak.astype(np.float32))
        self._total = self._total * np.exp(self._peak - peak) + exponentials.sum(
            axis=1, keepdims=True, dtype=np.float64
        )
        self._peak = peak
        # An equal one that comes later has a higher id.
        better = logits > self._logits[:, -1:]
        for row in np.flatnonzero(better.any(axis=1)):
            columns = np.flatnonzero(better[row])
            if len(columns) > 2 * k:
                edge = np.partition(logits[row, columns], -k)[-k]
                columns = columns[logits[row, columns] >= edge]
            merged = np.concatenate([self._logits[row], logits[row, columns]])
            ids = np.concatenate([self._ids[row], columns + first])
            order = np.lexsort((ids, -merged))[:k]
            self._logits[row], self._ids[row] = merged[order], ids[order]

    @property
    def log_total(self) -> Doubles:
        """The log of the sum of exponentials, `[rows, 1]` float64."""
        log_total: Doubles = self._peak + np.log(self._total)
        return log_total

    def result(self) -> TopTokens:
        """Return the tokens."""
        probabilities = np.exp(self._logits - self._peak) / self._total
        return TopTokens(self._ids, self._logits, probabilities)


class RankReadout:
    """How many tokens are above the chosen one of each row.

    tokens: `[rows]` int64.
    logits: the logits of these, `[rows]` float32, computed in the same tiles.
    """

    def __init__(self, tokens: Ids, logits: Floats) -> None:
        self.tokens, self.logits = tokens, logits
        self._above = np.zeros(len(tokens), np.int64)

    def add(self, first: int, logits: Floats) -> None:
        """Add a tile, as `TopReadout.add`."""
        own = self.logits[:, None]
        self._above += np.count_nonzero(logits > own, axis=1)
        # Of equal ones, those with lower ids are above.
        last = np.minimum(self.tokens - first, logits.shape[1])
        for row in np.flatnonzero(np.any(logits == own, axis=1)):
            self._above[row] += np.count_nonzero(logits[row, : max(0, last[row])] == own[row])

    def result(self, log_total: Doubles) -> ChosenTokens:
        """Return the ranks and probabilities.

        log_total: `TopReadout.log_total`.
        """
        probabilities = np.exp(self.logits.astype(np.float64) - log_total[:, 0])
        return ChosenTokens(self.logits, probabilities, self._above + 1)


class DivergenceReadout:
    """The Kullback-Leibler divergence of each row from the distribution of another row, its reference.

    It is the sum of p · (log p - log q) in nats, where p is the reference's distribution and q the row's.

    references: the index of each row's reference, `[rows]` int64.
    """

    def __init__(self, references: Ids) -> None:
        self._references = references
        # The sum of exp(a - `_peak`) · (a - b), where a are the logits of the reference and b those of the row.
        self._sum = np.zeros((len(references), 1))
        self._peak = np.full((len(references), 1), -np.inf)

    def add(self, logits: Floats) -> None:
        """Add a tile, as `TopReadout.add`."""
        reference = logits[self._references]
        peak = np.maximum(self._peak, reference.max(axis=1, keepdims=True))
        weights = np.exp(reference - peak.astype(np.float32))
        part = np.einsum("ij,ij->i", weights, reference - logits, dtype=np.float64)[:, None]
        self._sum = self._sum * np.exp(self._peak - peak) + part
        self._peak = peak

    def result(self, log_total: Doubles) -> Doubles:
        """Return the divergences, `[rows]`; never below 0.

        log_total: `TopReadout.log_total`.
        """
        of_reference = log_total[self._references]
        mean = self._sum * np.exp(self._peak - of_reference)
        divergence: Doubles = np.maximum(mean - of_reference + log_total, 0.0)[:, 0]
        return divergence
