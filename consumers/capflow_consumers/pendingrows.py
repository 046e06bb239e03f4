"""Tokens and scores that the duckdb consumer has not yet written, in the few pieces that they came in.

Nothing is spread out into columns before it is written: a step of fifty requests is one matrix of scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from capflow.frame import RequestRows
from capflow.probe import Probe
from capflow_consumers.framelog import FrameLog


class ScoredRequest:
    """One request from its first row to its result.

    known: positions below it have their tokens recorded. frames: those with rows of it. stored: those of them whose rows were in the file when it
    was opened; status: what the file says came of the request, None when it was not over.
    """

    __slots__ = (
        "capture",
        "engine",
        "error",
        "frames",
        "id",
        "known",
        "rows",
        "scores",
        "started_ns",
        "status",
        "stored",
        "tokens",
    )

    def __init__(self, capture: int, engine: str, request_id: str, started_ns: int) -> None:
        self.capture = capture
        self.engine = engine
        self.frames = FrameLog()
        self.stored = FrameLog()
        self.status: str | None = None
        self.id = request_id
        self.started_ns = started_ns
        self.known = 0
        self.rows = 0
        self.tokens = 0
        self.scores = 0
        self.error: str | None = None


ScoredPart = tuple[ScoredRequest, int, npt.NDArray[Any]]
"""Rows `[n, hidden_size]` of a request at positions `start, start+1, …`, as `(request, start, rows)`."""


class _Scores:
    """Scores `[n, k]` with the probes of one site: request i has rows `ends[i] .. ends[i+1]`, at `positions`."""

    __slots__ = ("ends", "positions", "probe", "requests", "scores")

    def __init__(self, probe: Probe, parts: list[ScoredPart]) -> None:
        lengths = [len(rows) for _, _, rows in parts]
        self.probe = probe
        self.requests = [request for request, _, _ in parts]
        self.ends = np.cumsum([0, *lengths])
        starts = zip(parts, lengths, strict=True)
        self.positions = np.concatenate([np.arange(start, start + length) for (_, start, _), length in starts])
        self.scores = probe.scores(np.concatenate([rows for _, _, rows in parts]))


class PendingRows:
    """What waits to be written. count: how many rows of tables that makes."""

    def __init__(self) -> None:
        self.count = 0
        self._tokens: list[tuple[ScoredRequest, RequestRows, int]] = []  # the last: tokens known already
        self._scores: list[_Scores] = []

    def add_tokens(self, request: ScoredRequest, rows: RequestRows, *, stored: bool) -> None:
        """Keep the tokens not seen: every pipeline stage tells of them, and again after a preemption. stored: the file has them."""
        stop = rows.start + len(rows.token_ids)
        first = max(rows.start, request.known)
        if first < stop:
            request.known = stop
            request.tokens += stop - first
            if not stored:
                self._tokens.append((request, rows, first - rows.start))
                self.count += stop - first

    def add_scores(self, probe: Probe, parts: list[ScoredPart]) -> None:
        """Score rows of one site, all in one product, and keep the scores."""
        batch = _Scores(probe, parts)
        for request, _, rows in parts:
            request.scores += len(rows) * len(probe.names)
        self._scores.append(batch)
        self.count += batch.scores.size

    def take(self) -> tuple[dict[str, pa.Table], list[ScoredRequest]]:
        """Return the tables to append and the requests that have rows in them, and forget them."""
        tables = {}
        requests = list({id(request): request for request in self._requests()}.values())
        if requests:
            tables["marks"] = _mark_table(requests)
        if self._tokens:
            tables["tokens"] = _token_table(self._tokens)
        if self._scores:
            tables["scores"] = _score_table(self._scores)
        self._tokens, self._scores, self.count = [], [], 0
        return tables, requests

    def _requests(self) -> Iterator[ScoredRequest]:
        for request, _, _ in self._tokens:
            yield request
        for batch in self._scores:
            yield from batch.requests


def _mark_table(requests: list[ScoredRequest]) -> pa.Table:
    rows = [
        (r.capture, r.engine, r.id, boot, ".".join(map(str, rank)), *frames)
        for r in requests
        for (boot, rank), frames in r.frames.frames.items()
    ]
    names = ("capture", "engine", "request_id", "boot", "rank", "first_frame", "last_frame")
    return pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))


def _token_table(tokens: list[tuple[ScoredRequest, RequestRows, int]]) -> pa.Table:
    counts = [len(rows.token_ids) - skip for _, rows, skip in tokens]
    positions = np.concatenate([np.arange(r.start + skip, r.start + len(r.token_ids)) for _, r, skip in tokens])
    prompt_lengths = np.repeat([rows.prompt_length for _, rows, _ in tokens], counts)
    texts: list[str | None] = []
    for (_, rows, skip), count in zip(tokens, counts, strict=True):
        texts.extend(rows.texts[skip:] if rows.texts else [None] * count)
    return pa.table(
        {
            **_key_columns([request for request, _, _ in tokens], counts),
            "position": positions,
            "token_id": pa.array([t for _, rows, skip in tokens for t in rows.token_ids[skip:]], pa.int64()),
            "text": pa.array(texts, pa.string()),
            "phase": _named(np.where(positions < prompt_lengths, 0, 1), ["prompt", "generated"]),
        }
    )


def _score_table(batches: list[_Scores]) -> pa.Table:
    tables = []
    for batch in batches:
        count, probes = batch.scores.shape
        lengths = np.diff(batch.ends) * probes
        site = batch.probe.site
        tables.append(
            {
                **_key_columns(batch.requests, lengths),
                "position": np.repeat(batch.positions, probes),
                "probe": _named(np.tile(np.arange(probes), count), list(batch.probe.names)),
                "layer": np.full(count * probes, site.layer),
                "hook": _named(np.zeros(count * probes, int), [site.hook]),
                "score": batch.scores.ravel(),
            }
        )
    return pa.concat_tables([pa.table(table) for table in tables]).unify_dictionaries()


def _key_columns(owners: list[ScoredRequest], lengths: Any) -> dict[str, Any]:
    """Return the columns that say whose rows they are, `lengths[i]` rows being of `owners[i]`."""
    index = np.repeat(np.arange(len(owners)), lengths)
    return {
        "capture": np.repeat([request.capture for request in owners], lengths),
        "engine": _named(index, [request.engine for request in owners]),
        "request_id": _named(index, [request.id for request in owners]),
    }


def _named(index: npt.NDArray[Any], names: list[str]) -> pa.Array:
    """Return a text column of `names[index]`, each name stored once."""
    return pa.DictionaryArray.from_arrays(pa.array(index, pa.int32()), pa.array(names, pa.string()))
