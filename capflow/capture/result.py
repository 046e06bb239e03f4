"""What became of a request's capture, per consumer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from capflow.capture.frame import Dropped, Finished
from capflow.capture.losses import Losses, described
from capflow.text.brief import brief

Status = Literal["ok", "pending", "partial_error", "error", "not_requested"]


class CaptureResult(msgspec.Struct, frozen=True):
    """One consumer's word on one request.

    status: `ok`, everything promised was consumed; `partial_error`, some rows were lost, as `error` says; `error`,
        nothing usable came of it; `pending`, the consumer is not done; `not_requested`, the consumer wanted nothing of
        this request.
    payload: what the consumer has to say, plain JSON values, e.g. where the files lie.
    budget_reached: the request had more positions of those asked for than `max_rows` let through; no row was lost by
        it.
    dropped: the rows that did not reach the consumer, by reason, and where they were.
    tag: of the request's spec for this consumer. The hub puts both there.
    """

    status: Status
    error: str | None = None
    payload: dict[str, Any] = msgspec.field(default_factory=dict)
    budget_reached: bool = False
    dropped: tuple[Dropped, ...] = ()
    tag: str = ""

    __repr__ = brief


class RequestDone(msgspec.Struct, frozen=True):
    """A request is over on every worker that served it; what consumers are told then.

    rows_promised: rows that its workers sent.
    rows: rows of it that this consumer was given.
    dropped: what was lost on the way to this consumer and why.
    budget_reached: `max_rows` left out positions that the request had.
    tag: of the request's spec for this consumer.
    """

    engine: str
    request: str
    status: str
    prompt_length: int
    computed_length: int
    rows_promised: int
    rows: int
    dropped: tuple[Dropped, ...]
    finished: tuple[Finished, ...] = ()
    budget_reached: bool = False
    tag: str = ""

    __repr__ = brief

    @property
    def problems(self) -> list[str]:
        """Why not every row came, one message each."""
        lost = [described(dropped) for dropped in self.dropped]
        return [*lost, "the request did not end"] if self.status == "error" else lost


_WORST_FIRST: tuple[Status, ...] = ("error", "partial_error", "pending", "ok", "not_requested")


def joined(results: Mapping[str, Mapping[str, CaptureResult]]) -> dict[str, CaptureResult]:
    """Return one result by consumer for the samples of a request: the worst status, every error, payloads by name; of what was lost, how many rows."""
    if len(results) == 1:
        return dict(next(iter(results.values())))
    joined = {}
    for consumer in dict.fromkeys(consumer for found in results.values() for consumer in found):
        said = {name: found[consumer] for name, found in results.items() if consumer in found}
        joined[consumer] = CaptureResult(
            min((result.status for result in said.values()), key=_WORST_FIRST.index),
            "; ".join(f"{name}: {result.error}" for name, result in said.items() if result.error) or None,
            {name: result.payload for name, result in said.items() if result.payload},
            any(result.budget_reached for result in said.values()),
            _added_up(said.values()),
            next(iter(said.values())).tag,  # samples of one request share its spec
        )
    return joined


def _added_up(results: Iterable[CaptureResult]) -> tuple[Dropped, ...]:
    """Return how many rows were lost of several requests, whose positions are not each other's."""
    lost = Losses()
    for result in results:
        for dropped in result.dropped:
            lost.count(dropped.reason, dropped.rows)
    return lost.dropped
