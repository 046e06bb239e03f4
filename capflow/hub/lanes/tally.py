"""The tally: what one consumer was given of each request, what it lost, and what it failed on.

A lane has one `Tallies`, and a `Tally` for each request from the first rows of it that the consumer wants until the
request's result.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from capflow.capture.frame import Dropped, Frame, FrameHeader, RequestRows
from capflow.capture.losses import Losses, described, narrowed
from capflow.capture.positions import Positions
from capflow.capture.result import CaptureResult, RequestDone, joined_weights
from capflow.capture.spec import Wanted
from capflow.hub.requests.index import Arrival
from capflow.hub.requests.request import Request
from capflow.hub.requests.share import Share

NOT_ENDED = "the request did not end: its engine is gone or the hub stopped"


class Tally:
    """What one consumer has had of one request.

    consumer: its number in the request's shares.
    """

    __slots__ = ("consumer", "error", "lost", "opening", "request", "rows", "rows_failed")

    def __init__(self, request: Request, consumer: int) -> None:
        self.request = request
        self.consumer = consumer
        # Rows given to its queue; written by the thread that calls `Tallies.of`.
        self.rows = 0
        # By that thread, and at shutdown by the consumer's.
        self.lost = Losses()
        # Rows in frames that the consumer raised on; written by the consumer's thread, as are the next.
        self.rows_failed = 0
        # The first such error.
        self.error: str | None = None
        # Which opening of the consumer got its first rows.
        self.opening: int | None = None

    def done(self) -> RequestDone:
        """Return the end of the request, as the consumer gets it."""
        request = self.request
        finished = tuple(request.finished[stage] for stage in sorted(request.finished))
        promised = sum(max(f.rows, request.received.get(stage, 0)) for stage, f in request.finished.items())
        promised += sum(rows for stage, rows in request.received.items() if stage not in request.finished)
        return RequestDone(
            engine=request.engine,
            request=request.id,
            status=request.status or "error",
            prompt_length=request.prompt_length,
            computed_length=request.computed_length,
            rows_promised=promised,
            rows=self.rows,
            dropped=self._lost(),
            finished=finished,
            budget_reached=self._budget_reached(),
            tag=request.tags[self.consumer],
        )

    def judge(self, own: CaptureResult | None) -> CaptureResult:
        """Return a consumer's own result, worsened by what it did not get and what it failed on."""
        result = own or CaptureResult("ok")
        if tag := self.request.tags[self.consumer]:
            result = msgspec.structs.replace(result, tag=tag)
        ends = self.request.finished.values()
        if adapter := next((finished.adapter for finished in ends if finished.adapter), ""):
            result = msgspec.structs.replace(result, adapter=adapter)
        if weights := joined_weights(finished.weights for finished in ends):
            result = msgspec.structs.replace(result, weights=weights)
        if self._budget_reached():
            result = msgspec.structs.replace(result, budget_reached=True)
        if dropped := self._lost():
            result = msgspec.structs.replace(result, dropped=dropped)
        troubles = [self.error] if self.error else []
        troubles += map(described, dropped)
        if self.request.status == "error":
            troubles.append(NOT_ENDED)
        if not troubles or result.status in ("error", "not_requested"):
            return result
        status = "partial_error" if self.rows > self.rows_failed else "error"
        return msgspec.structs.replace(result, status=status, error="; ".join(filter(None, [result.error, *troubles])))

    def unkept(self, own: CaptureResult | None, judged: CaptureResult) -> bool:
        """Return whether the consumer did not store its rows, by its own result or by an exception."""
        if not self.rows:
            return False
        status = "ok" if own is None else own.status
        lost = judged.dropped or self.request.status == "error"
        return self.error is not None or status == "error" or (status == "partial_error" and not lost)

    def _budget_reached(self) -> bool:
        share = self.request.shares[self.consumer]
        return share is not None and share.cut(self.request.prompt_length, self.request.computed_length)

    def _lost(self) -> tuple[Dropped, ...]:
        """Return which rows the consumer did not get of those that it wants, by reason."""
        share, dropped = self.request.shares[self.consumer], self.request.lost.dropped
        if share is not None and dropped:
            dropped = narrowed(dropped, functools.partial(share.places, self.request.prompt_length))
        if not self.lost:
            return dropped
        lost = Losses()
        lost.update((*dropped, *self.lost.dropped))
        return lost.dropped


class Delivery(NamedTuple):
    """A frame as one consumer gets it.

    parts: the requests whose rows these are, and how many are of each.
    """

    frame: Frame
    rows: int
    parts: Sequence[tuple[Tally, int]]


class Tallies:
    """A consumer's tallies of the requests that run.

    consumer: its number in the requests' shares. It belongs to one thread.
    """

    def __init__(self, consumer: int) -> None:
        self._consumer = consumer
        # Until `pop`.
        self._tallies: dict[Request, Tally] = {}

    def __len__(self) -> int:
        return len(self._tallies)

    def of(self, arrival: Arrival) -> Delivery | None:
        """Return a frame with the rows that the consumer wants; None when it wants none of them."""
        frame, requests, consumer = arrival.frame, arrival.requests, self._consumer
        counts = whole = frame.counts
        if arrival.shares is None:
            counts = _count(frame.header, requests, consumer)
        else:
            share, blocks = arrival.shares[consumer], frame.header.blocks
            if share is None:
                return None
            for block in blocks:
                if not share.wants_all(block.sites):
                    if not any(share.groups(block.sites) for block in blocks):
                        return None
                    counts = _count(frame.header, requests, consumer)
                    break
        rows = sum(counts)
        if not rows:
            return None
        mine = frame if counts is whole or counts == whole else frame.narrowed(_Wants(requests, consumer))
        tally_of = self._tallies.get
        parts = [
            (tally_of(request) or self._begin(request), count)
            for request, count in zip(requests, counts, strict=True)
            if count
        ]
        return Delivery(mine, rows, parts)

    def pop(self, request: Request) -> Tally:
        """Return the tally of a request that is over, and forget it here."""
        return self._tallies.pop(request, None) or Tally(request, self._consumer)

    def _begin(self, request: Request) -> Tally:
        tally = self._tallies[request] = Tally(request, self._consumer)
        return tally


class _Wants:
    """What a consumer wants of the requests in one frame; called on the consumer's thread."""

    def __init__(self, requests: Sequence[Request], consumer: int) -> None:
        self._wanted = {r.id: share.wanted for r in requests if (share := r.shares[consumer]) is not None}

    def __call__(self, part: RequestRows) -> Wanted:
        return self._wanted.get(part.id, {})


def _count(header: FrameHeader, requests: Sequence[Request], consumer: int) -> list[int]:
    """Return how many rows of each request a consumer wants of a frame."""
    counts = [0] * len(requests)
    for block in header.blocks:
        share: Share | None = None
        groups: tuple[tuple[Positions, int], ...] = ()
        for index, start, length, _ in block.spans:
            mine = requests[index].shares[consumer]
            if mine is None:
                continue
            if mine is not share:
                share, groups = mine, mine.groups(block.sites)
            for positions, sites in groups:
                if positions == Positions.ALL:
                    counts[index] += sites * length
                else:
                    places = positions.at(header.requests[index].prompt_length)
                    counts[index] += sites * places.count(start, start + length)
    return counts
