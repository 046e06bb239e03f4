"""The rows of one transaction of the duckdb consumer as Arrow tables: who they belong to, and where they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from capflow.capture.site import Site
from capflow.probes.probe import Scorer
from capflow.saes.sae import INACTIVE
from capflow_consumers.duckdb.request import ScoredRequest, Stretches
from capflow_consumers.duckdb.scoring import Rows

if TYPE_CHECKING:
    from capflow.lenses.lens import LensReading

Ints = npt.NDArray[np.int64]


class RowPlaces(NamedTuple):
    """Of each row, its request and its position: int64 `[n]`.

    requests: the number of each row's request in its batch.
    positions: each row's position.
    """

    requests: Ints
    positions: Ints


class BatchRequests:
    """The requests of one batch, numbered.

    stretches: all of the batch.
    """

    def __init__(self, stretches: Iterable[Stretches]) -> None:
        self._numbers: dict[int, int] = {}
        self.all: list[ScoredRequest] = []
        before: list[ScoredRequest] = []
        for each in stretches:
            # Frame after frame a batch has the same requests.
            if each.owners != before:
                before = each.owners
                for owner in before:
                    if self._numbers.setdefault(id(owner), len(self.all)) == len(self.all):
                        self.all.append(owner)
        self._captures = np.array([request.capture for request in self.all], np.int64)
        # The result of the last call of `places`: most sites have the same stretches.
        self._placed: tuple[list[Stretches], RowPlaces] | None = None

    def places(self, stretches: list[Stretches]) -> RowPlaces:
        """Return the places of the rows of stretches, one after another."""
        if self._placed is None or self._placed[0] != stretches:
            lengths = np.array(list(itertools.chain.from_iterable(each.lengths for each in stretches)), np.int64)
            starts = np.array(list(itertools.chain.from_iterable(each.starts for each in stretches)), np.int64)
            numbers = self._numbers_of(stretches)
            self._placed = stretches, RowPlaces(np.repeat(numbers, lengths), running(starts, lengths))
        return self._placed[1]

    def _numbers_of(self, stretches: Sequence[Stretches]) -> Ints:
        numbers: list[Ints] = []
        before: list[ScoredRequest] = []
        for each in stretches:
            if numbers and each.owners == before:
                numbers.append(numbers[-1])
            else:
                before = each.owners
                numbers.append(np.array([self._numbers[id(owner)] for owner in before], np.int64))
        return np.concatenate(numbers)

    def columns(self, numbers: Ints) -> dict[str, Any]:
        """Return the columns capture, engine and request_id, with a value for each number."""
        return {
            "capture": self._captures[numbers],
            "engine": named(numbers, [request.engine for request in self.all]),
            "request_id": named(numbers, [request.id for request in self.all]),
        }


class SiteSpan:
    """The rows of a batch at one site.

    numbers: each row's request, int64.
    positions: each row's position, int64.
    """

    def __init__(self, requests: BatchRequests, stretches: list[Stretches], site: Site) -> None:
        self.requests = requests
        self.site = site
        self.numbers, self.positions = requests.places(stretches)

    def scores(self, scorer: Scorer, scores: Rows) -> pa.Table:
        """Return the table `scores`: a row for each score of `[n, k]`."""
        count, probes = scores.shape
        return pa.table(
            {
                **self.requests.columns(np.repeat(self.numbers, probes)),
                "position": np.repeat(self.positions, probes),
                **self._probes(scorer, count),
                "score": scores.ravel(),
            }
        )

    def pools(self, scorer: Scorer, scores: Rows) -> pa.Table:
        """Return the table `pools`: for each request and probe, what these rows add to the request's pooled score.

        scores: `[n, k]` of the rows of all requests.
        """
        order = np.lexsort((self.positions, self.numbers))
        numbers, ordered = self.numbers[order], scores[order]
        firsts = np.flatnonzero(np.diff(numbers, prepend=-1))
        lasts = np.append(firsts[1:], len(numbers)) - 1
        count, probes = len(firsts), scores.shape[1]
        return pa.table(
            {
                **self.requests.columns(np.repeat(numbers[firsts], probes)),
                **self._probes(scorer, count),
                "rows": np.repeat(lasts - firsts + 1, probes),
                "total": np.add.reduceat(ordered, firsts, axis=0, dtype=np.float64).ravel(),
                "highest": np.maximum.reduceat(ordered, firsts, axis=0).ravel(),
                "position": np.repeat(self.positions[order][lasts], probes),
                "last": ordered[lasts].ravel(),
            }
        )

    def features(self, sae: str, ids: Rows, activations: Rows) -> pa.Table:
        """Return the table `features`: a row for each active one of the features `[n, k]` of an autoencoder."""
        rows, columns = np.nonzero(ids != INACTIVE)
        count = len(rows)
        return pa.table(
            {
                **self.requests.columns(self.numbers[rows]),
                "position": self.positions[rows],
                "sae": named(np.zeros(count, np.int32), [sae]),
                **self._place(count),
                "feature": ids[rows, columns],
                "activation": activations[rows, columns],
            }
        )

    def lens_tokens(self, lens: str, readings: Sequence[LensReading]) -> pa.Table:
        """Return the table `lens_tokens`: a row for each token of the readings, which have all rows in order.

        A row that holds NaN or infinity has none.
        """
        ids = np.concatenate([reading.ids for reading in readings])
        rows, ranks = np.nonzero(ids >= 0)
        texts = itertools.chain.from_iterable(reading.texts for reading in readings)
        listed = [text for row, several in zip(ids, texts, strict=True) if row[0] >= 0 for text in several]
        count = len(rows)
        return pa.table(
            {
                **self.requests.columns(self.numbers[rows]),
                "position": self.positions[rows],
                "lens": named(np.zeros(count, np.int32), [lens]),
                **self._place(count),
                "rank": (ranks + 1).astype(np.int32),
                "token_id": ids[rows, ranks].astype(np.int32),
                "text": pa.array(listed, pa.string()),
                "logit": np.concatenate([reading.logits for reading in readings])[rows, ranks],
                "probability": np.concatenate([reading.probabilities for reading in readings])[rows, ranks],
            }
        )

    def vectors(self, rows: Rows) -> pa.Table:
        """Return the table `vectors` of rows `[n, width]`."""
        count, width = rows.shape
        return pa.table(
            {
                **self.requests.columns(self.numbers),
                "position": self.positions,
                **self._place(count),
                "vector": pa.ListArray.from_arrays(np.arange(0, (count + 1) * width, width, np.int32), rows.ravel()),
            }
        )

    def _probes(self, scorer: Scorer, count: int) -> dict[str, Any]:
        """Return the columns probe, layer and hook: the probes of a scorer, repeated `count` times."""
        probes = len(scorer.names)
        return {"probe": named(np.tile(np.arange(probes), count), scorer.names), **self._place(count * probes)}

    def _place(self, count: int) -> dict[str, Any]:
        return {
            "layer": np.full(count, self.site.layer, np.int32),
            "hook": named(np.zeros(count, np.int32), [self.site.hook]),
        }


def running(starts: Ints, lengths: Ints) -> Ints:
    """Return `start, start + 1, …`, as many as the length, for each start in turn."""
    ends = np.cumsum(lengths)
    offsets = starts - (ends - lengths)
    return np.repeat(offsets, lengths) + np.arange(ends[-1])


def named(index: npt.NDArray[Any], names: Sequence[str]) -> pa.Array:
    """Return a text column of `names[index]` that stores each name once."""
    return pa.DictionaryArray.from_arrays(pa.array(index, pa.int32()), pa.array(names, pa.string()))
