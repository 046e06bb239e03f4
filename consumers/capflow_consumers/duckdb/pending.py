"""The rows of the duckdb consumer that wait for the next transaction, and the Arrow tables made of them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from capflow.capture.frame import Block, Chunk, Frame, RequestRows, mask_of
from capflow.capture.site import Site
from capflow.probes.probe import Scorer
from capflow_consumers.duckdb.request import ScoredRequest, Stretches
from capflow_consumers.duckdb.scoring import Rows, RowStage, TopFeatures
from capflow_consumers.duckdb.span import BatchRequests, SiteSpan, named

if TYPE_CHECKING:
    from capflow_consumers.duckdb.lens import LensRows

T = TypeVar("T")

_ids_of, _texts_of, _steered_of = map(operator.attrgetter, ("token_ids", "texts", "steered"))


class _Tokens(NamedTuple):
    """Tokens of requests.

    stretches: whose tokens they are, and where.
    requests: the parts of a frame that hold them, parallel to the stretches.
    first: of one request alone, the first of its tokens in the part.
    """

    stretches: Stretches
    requests: Sequence[RequestRows]
    first: int = 0

    def add_ids(self, ids: list[int]) -> None:
        """Append the ids of the tokens."""
        several = map(_ids_of, self.requests) if len(self.requests) > 1 else [self._part(self.requests[0].token_ids)]
        ids.extend(itertools.chain.from_iterable(several))

    def add_texts(self, texts: list[str | None]) -> None:
        """Append the texts of the tokens; None where the frame has none."""
        if len(self.requests) == 1:
            several = self.requests[0].texts
            texts += self._part(several) if several else itertools.repeat(None, self.stretches.lengths[0])
            return
        before = len(texts)
        texts.extend(itertools.chain.from_iterable(map(_texts_of, self.requests)))
        if len(texts) - before != sum(self.stretches.lengths):
            del texts[before:]
            for rows in self.requests:
                texts += rows.texts or itertools.repeat(None, len(rows.token_ids))

    def _part(self, values: tuple[T, ...]) -> tuple[T, ...]:
        return values[self.first : self.first + self.stretches.lengths[0]]


class PendingRows:
    """Tokens, scores and vectors that wait to be written.

    scorers: the probes of each site whose rows are kept.
    features: the autoencoders of these sites.
    vectors: whether the rows themselves are written, as float32.
    lens: the rows that a lens reads.
    count: table rows that wait.
    nbytes: bytes of vectors that wait.
    """

    def __init__(
        self,
        scorers: Mapping[Site, Sequence[Scorer]],
        features: Mapping[Site, Sequence[TopFeatures]] = MappingProxyType({}),
        *,
        vectors: bool,
        lens: LensRows | None = None,
    ) -> None:
        self.count = 0
        self.nbytes = 0
        self._lens = lens
        self._vectors = vectors
        self._tokens: list[_Tokens] = []
        self._scorers = scorers
        self._features = features
        self._kept = {site: sum(each.k for each in features.get(site, ())) + vectors for site in scorers}
        self._columns = {site: sum(len(scorer.names) for scorer in probes) for site, probes in scorers.items()}
        # The staged rows, by site, width and dtype.
        self._stages: dict[tuple[Site, int, np.dtype[Any]], RowStage] = {}

    def add_tokens(self, request: ScoredRequest, rows: RequestRows, *, stored: bool) -> None:
        """Keep the tokens that are new: each pipeline stage sends the tokens, and again after a preemption.

        stored: whether the file already has them.
        """
        start, positions = rows.start, request.positions
        stop = start + len(rows.token_ids)
        # The common case.
        if positions.append(start, stop - 1):
            self._add_tokens(request, rows, 0, stop - start, stored=stored)
            return
        for first, last in list(positions.missing(start, stop - 1)):
            positions.add(first, last)
            self._add_tokens(request, rows, first - start, last + 1 - start, stored=stored)

    def _add_tokens(self, request: ScoredRequest, rows: RequestRows, first: int, stop: int, *, stored: bool) -> None:
        request.tokens += stop - first
        if not stored:
            stretches = Stretches([request], [rows.start + first], [stop - first])
            self._tokens.append(_Tokens(stretches, (rows,), first))
            self.count += stop - first

    def add_rows(self, request: ScoredRequest, chunk: Chunk, *, stored: bool) -> None:
        """Keep the rows of a chunk, to be scored.

        stored: whether the file already has their scores.
        """
        count = chunk.rows.shape[1]
        request.rows += len(chunk.sites) * count
        request.scores += count * self.scores_of(chunk.sites)
        if not stored:
            self._add(chunk.sites, Stretches([request], [chunk.start], [count]), chunk.rows)

    def add_block(self, owners: Sequence[ScoredRequest], block: Block, rows: Rows) -> None:
        """Keep the rows `[sites, n, width]` of a block, to be scored.

        Its spans must cover the rows in order and without gaps.

        owners: the frame's requests, in the frame's order.
        """
        columns = self.scores_of(block.sites)
        stretches = Stretches([], [], [])
        for number, start, length, _ in block.spans:
            owner = owners[number]
            owner.rows += len(block.sites) * length
            owner.scores += columns * length
            stretches.owners.append(owner)
            stretches.starts.append(start)
            stretches.lengths.append(length)
        self._add(block.sites, stretches, rows)

    def add_frame(self, stretches: Stretches, frame: Frame) -> None:
        """Keep the tokens and rows of a frame whose blocks have all tokens of its requests, one request after another.

        The requests' own numbers are those of their runs.
        """
        self._tokens.append(_Tokens(stretches, frame.header.requests))
        self.count += sum(stretches.lengths)
        for block, rows in frame.blocks():
            self._add(block.sites, stretches, rows)

    def scores_of(self, sites: Sequence[Site]) -> int:
        """Return how many scores one position has at these sites."""
        return sum(self._columns.get(site, 0) for site in sites)

    def _add(self, sites: Sequence[Site], stretches: Stretches, rows: Rows) -> None:
        _, count, width = rows.shape
        self._add_to_lens(sites, stretches, rows)
        for index, site in enumerate(sites):
            scorers = self._scorers.get(site)
            if scorers is None:
                continue
            key = site, width, rows.dtype
            stage = self._stages.get(key)
            if stage is None:
                stage = self._stages[key] = RowStage(
                    site, rows[index], scorers, vectors=self._vectors, features=self._features.get(site, ())
                )
            stage.add(stretches, rows[index])
            self.count += count * (self._columns[site] + self._kept[site])
            if self._vectors:
                self.nbytes += count * width * 4

    def _add_to_lens(self, sites: Sequence[Site], stretches: Stretches, rows: Rows) -> None:
        if self._lens is None:
            return
        for index, site in enumerate(sites):
            if self._lens.lens.takes(site):
                self._lens.add(site, stretches, rows[index])
                self.count += rows.shape[1] * self._lens.lens.k
        self._lens.read_full()

    def tables(self) -> tuple[dict[str, pa.Table], list[ScoredRequest]]:
        """Return the tables to append, and the requests with rows in them. The rows stay pending until `clear`."""
        stages = [stage for stage in self._stages.values() if stage.stretches]
        read = [] if self._lens is None else list(self._lens.tokens())
        of_tokens = (entry.stretches for entry in self._tokens)
        of_rows = (*(stage.stretches for stage in stages), *(stretches for _, stretches, _ in read))
        requests = BatchRequests(itertools.chain(of_tokens, *of_rows))
        for request in requests.all:
            request.settle()
        tables: dict[str, list[pa.Table]] = {}
        if requests.all:
            tables["marks"] = [_mark_table(requests.all)]
        if self._tokens:
            tables["tokens"] = [_token_table(requests, self._tokens)]
        for stage in stages:
            scores, vectors = stage.scored()
            span = SiteSpan(requests, stage.stretches, stage.site)
            for scorer, block in zip(stage.scorers, scores, strict=True):
                name, table = ("scores", span.scores) if scorer.pool == "token" else ("pools", span.pools)
                tables.setdefault(name, []).append(table(scorer, block))
            for features, active in zip(stage.features, stage.active(), strict=True):
                tables.setdefault("features", []).append(span.features(features.name, *active))
            if vectors is not None:
                tables.setdefault("vectors", []).append(span.vectors(vectors))
        for site, stretches, readings in read:
            span = SiteSpan(requests, stretches, site)
            tables.setdefault("lens_tokens", []).append(span.lens_tokens(self._lens_name, readings))
        return {name: _joined(several) for name, several in tables.items()}, requests.all

    @property
    def _lens_name(self) -> str:
        assert self._lens is not None
        return self._lens.lens.name

    def clear(self) -> None:
        """Drop the pending rows."""
        self._tokens, self.count, self.nbytes = [], 0, 0
        if self._lens is not None:
            self._lens.clear()
        for key, stage in list(self._stages.items()):
            if stage.stretches:
                stage.clear()
            else:
                # Unused since the last `clear`: its engine may be gone.
                del self._stages[key]


def _mark_table(requests: list[ScoredRequest]) -> pa.Table:
    rows = [
        (r.capture, r.engine, r.id, boot, ".".join(map(str, rank)), *frames)
        for r in requests
        for (boot, rank), *frames in r.pending.runs()
    ]
    names = ("capture", "engine", "request_id", "boot", "rank", "first_frame", "last_frame")
    return pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))


def _token_table(requests: BatchRequests, entries: list[_Tokens]) -> pa.Table:
    places = requests.places([entry.stretches for entry in entries])
    lengths = list(itertools.chain.from_iterable(entry.stretches.lengths for entry in entries))
    prompts = [rows.prompt_length for entry in entries for rows in entry.requests]
    ids: list[int] = []
    texts: list[str | None] = []
    for entry in entries:
        entry.add_ids(ids)
        entry.add_texts(texts)
    return pa.table(
        {
            **requests.columns(places.requests),
            "position": places.positions,
            "token_id": np.array(ids, np.int64),
            "text": pa.array(texts, pa.string()),
            "phase": named(np.where(places.positions < np.repeat(prompts, lengths), 0, 1), ["prompt", "generated"]),
            "steered": _steered(entries, len(ids)),
        }
    )


def _steered(entries: list[_Tokens], count: int) -> pa.Array:
    """Return whether each of `count` tokens was steered; null if the frame did not say it."""
    steered, unknown = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    at = 0
    for entry in entries:
        runs = list(map(_steered_of, entry.requests))
        count = sum(entry.stretches.lengths)
        if runs.count(None) == len(runs):
            unknown[at : at + count] = True
        elif any(runs) or None in runs:
            begin = at
            for its, start, length in zip(runs, entry.stretches.starts, entry.stretches.lengths, strict=True):
                if its is None:
                    unknown[begin : begin + length] = True
                else:
                    steered[begin : begin + length] = mask_of(its, start, start + length)
                begin += length
        at += count
    return pa.array(steered, mask=unknown)


def _joined(tables: list[pa.Table]) -> pa.Table:
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables).unify_dictionaries()
