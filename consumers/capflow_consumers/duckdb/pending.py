"""The rows of the duckdb consumer that wait for the next transaction, and the Arrow tables made of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from capflow.capture.frame import Block, Chunk, RequestRows, mask_of
from capflow.capture.site import Site
from capflow.probes.probe import Scorer
from capflow_consumers.duckdb.request import ScoredRequest
from capflow_consumers.duckdb.scoring import Part, Rows, RowStage, TopFeatures
from capflow_consumers.duckdb.span import BatchRequests, SiteSpan, named, running

if TYPE_CHECKING:
    from capflow_consumers.duckdb.lens import LensRows

# A request, its part of a frame, and which tokens of that part: `token_ids[first:stop]`.
_Tokens = tuple[ScoredRequest, RequestRows, int, int]


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
            self._tokens.append((request, rows, first, stop))
            self.count += stop - first

    def add_rows(self, request: ScoredRequest, chunk: Chunk, *, stored: bool) -> None:
        """Keep the rows of a chunk, to be scored.

        stored: whether the file already has their scores.
        """
        count = chunk.rows.shape[1]
        request.rows += len(chunk.sites) * count
        request.scores += count * self._scores_of(chunk.sites)
        if not stored:
            self._add(chunk.sites, [(request, chunk.start, count)], chunk.rows)

    def add_block(self, owners: Sequence[ScoredRequest], block: Block, rows: Rows) -> None:
        """Keep the rows `[sites, n, width]` of a block, to be scored.

        Its spans must cover the rows in order and without gaps.

        owners: the frame's requests, in the frame's order.
        """
        columns = self._scores_of(block.sites)
        parts: list[Part] = []
        for number, start, length, _ in block.spans:
            owner = owners[number]
            owner.rows += len(block.sites) * length
            owner.scores += columns * length
            parts.append((owner, start, length))
        self._add(block.sites, parts, rows)

    def _scores_of(self, sites: Sequence[Site]) -> int:
        """Return how many scores one position has at these sites."""
        return sum(self._columns.get(site, 0) for site in sites)

    def _add(self, sites: Sequence[Site], parts: list[Part], rows: Rows) -> None:
        _, count, width = rows.shape
        self._add_to_lens(sites, parts, rows)
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
            stage.add(parts, rows[index])
            self.count += count * (self._columns[site] + self._kept[site])
            if self._vectors:
                self.nbytes += count * width * 4

    def _add_to_lens(self, sites: Sequence[Site], parts: list[Part], rows: Rows) -> None:
        if self._lens is None:
            return
        for index, site in enumerate(sites):
            if self._lens.lens.takes(site):
                self._lens.add(site, parts, rows[index])
                self.count += rows.shape[1] * self._lens.lens.k
        self._lens.read_full()

    def tables(self) -> tuple[dict[str, pa.Table], list[ScoredRequest]]:
        """Return the tables to append, and the requests with rows in them. The rows stay pending until `clear`."""
        stages = [stage for stage in self._stages.values() if stage.parts]
        read = [] if self._lens is None else list(self._lens.tokens())
        parts = itertools.chain(*(stage.parts for stage in stages), *(parts for _, parts, _ in read))
        owners = itertools.chain((entry[0] for entry in self._tokens), (part[0] for part in parts))
        requests = BatchRequests({id(request): request for request in owners})
        tables: dict[str, list[pa.Table]] = {}
        if requests.all:
            tables["marks"] = [_mark_table(requests.all)]
        if self._tokens:
            tables["tokens"] = [_token_table(requests, self._tokens)]
        for stage in stages:
            scores, vectors = stage.scored()
            span = SiteSpan(requests, stage.parts, stage.site)
            for scorer, block in zip(stage.scorers, scores, strict=True):
                name, table = ("scores", span.scores) if scorer.pool == "token" else ("pools", span.pools)
                tables.setdefault(name, []).append(table(scorer, block))
            for features, active in zip(stage.features, stage.active(), strict=True):
                tables.setdefault("features", []).append(span.features(features.name, *active))
            if vectors is not None:
                tables.setdefault("vectors", []).append(span.vectors(vectors))
        for site, its_parts, readings in read:
            span = SiteSpan(requests, its_parts, site)
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
            if stage.parts:
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


def _token_table(requests: BatchRequests, tokens: list[_Tokens]) -> pa.Table:
    lengths = np.array([stop - first for _, _, first, stop in tokens], np.int64)
    positions = running([rows.start + first for _, rows, first, _ in tokens], lengths)
    prompt_lengths = np.repeat([rows.prompt_length for _, rows, *_ in tokens], lengths)
    ids = itertools.chain.from_iterable(rows.token_ids[first:stop] for _, rows, first, stop in tokens)
    texts = itertools.chain.from_iterable(
        rows.texts[first:stop] if rows.texts else itertools.repeat(None, stop - first)
        for _, rows, first, stop in tokens
    )
    return pa.table(
        {
            **requests.columns(np.repeat(requests.numbers([entry[0] for entry in tokens]), lengths)),
            "position": positions,
            "token_id": np.fromiter(ids, np.int64, len(positions)),
            "text": pa.array(list(texts), pa.string()),
            "phase": named(np.where(positions < prompt_lengths, 0, 1), ["prompt", "generated"]),
            "steered": pa.concat_arrays([_steered(rows, first, stop) for _, rows, first, stop in tokens]),
        }
    )


def _steered(rows: RequestRows, first: int, stop: int) -> pa.Array:
    """Return whether the tokens `first .. stop` of a request's part were steered; nulls if the frame did not say it."""
    if rows.steered is None:
        return pa.nulls(stop - first, pa.bool_())
    return pa.array(mask_of(rows.steered, rows.start + first, rows.start + stop))


def _joined(tables: list[pa.Table]) -> pa.Table:
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables).unify_dictionaries()
