"""The result of a request's capture, for each consumer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from capflow.capture.frame import Dropped, Finished, Weights
from capflow.capture.losses import Losses, described
from capflow.text.brief import brief
from capflow.text.notebook import html_fields

Status = Literal["ok", "pending", "partial_error", "error", "not_requested"]


class CaptureResult(msgspec.Struct, frozen=True):
    """One consumer's result for one request.

    status: `ok`: the consumer took all promised rows. `partial_error`: some rows were lost; `error` says which.
        `error`: nothing usable was kept. `pending`: the consumer is not done. `not_requested`: the consumer wanted no
        rows of this request.
    error: what went wrong, one line; None if nothing did.
    payload: the consumer's own data as plain JSON values, e.g. the paths of its files.
    budget_reached: the request had more of the wanted positions than `max_rows` allows; this loses no row.
    dropped: the rows that did not reach the consumer, by reason, with their sites and positions. The hub fills it in.
    tag: the tag of the request's spec for this consumer. The hub fills it in.
    adapter: the name of the LoRA adapter that the request ran with; empty for none. The hub fills it in.
    weights: the weights that computed the rows, in order, each with its first position. The hub fills it in.
    """

    status: Status
    error: str | None = None
    payload: dict[str, Any] = msgspec.field(default_factory=dict)
    budget_reached: bool = False
    dropped: tuple[Dropped, ...] = ()
    tag: str = ""
    adapter: str = ""
    weights: tuple[Weights, ...] = ()

    __repr__ = brief
    _repr_html_ = html_fields


class RequestDone(msgspec.Struct, frozen=True):
    """A request has ended on every worker that served it. Consumers get this when it is over.

    status: `stop`, `length`, `abort` or `error`.
    computed_length: the number of tokens that were computed.
    rows_promised: the number of rows that its workers sent.
    rows: the number of its rows that this consumer was given.
    dropped: the rows lost on the way to this consumer, by reason.
    finished: the ends of the request that its workers sent.
    budget_reached: `max_rows` left out positions that the request had.
    tag: the tag of the request's spec for this consumer.
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
    _repr_html_ = html_fields

    @property
    def problems(self) -> list[str]:
        """The reasons why rows are missing, one message each."""
        lost = [described(dropped) for dropped in self.dropped]
        return [*lost, "the request did not end"] if self.status == "error" else lost

    @property
    def adapter(self) -> str:
        """The name of the LoRA adapter that the request ran with; empty for none."""
        return next((finished.adapter for finished in self.finished if finished.adapter), "")

    @property
    def weights(self) -> tuple[Weights, ...]:
        """The weights that computed its rows, in order, each with its first position."""
        return joined_weights(finished.weights for finished in self.finished)


def joined_weights(parts: Iterable[Sequence[Weights]]) -> tuple[Weights, ...]:
    """Return the weights of a request, in order, from those of its pipeline stages or samples."""
    joined: dict[int, Weights] = {}
    for weights in itertools.chain.from_iterable(parts):
        if weights.start < joined.setdefault(weights.version, weights).start:
            joined[weights.version] = weights
    return tuple(joined[version] for version in sorted(joined))


_WORST_FIRST: tuple[Status, ...] = ("error", "partial_error", "pending", "ok", "not_requested")


def joined(results: Mapping[str, Mapping[str, CaptureResult]]) -> dict[str, CaptureResult]:
    """Return one result for each consumer from the results of a request's samples.

    It has the worst status, all errors, the payloads by sample, and of lost rows only their number.

    results: the results of each sample, by sample name and consumer.
    """
    if len(results) == 1:
        return dict(next(iter(results.values())))
    joined = {}
    for consumer in dict.fromkeys(consumer for by_consumer in results.values() for consumer in by_consumer):
        samples = {name: by_consumer[consumer] for name, by_consumer in results.items() if consumer in by_consumer}
        joined[consumer] = CaptureResult(
            min((result.status for result in samples.values()), key=_WORST_FIRST.index),
            "; ".join(f"{name}: {result.error}" for name, result in samples.items() if result.error) or None,
            {name: result.payload for name, result in samples.items() if result.payload},
            any(result.budget_reached for result in samples.values()),
            _added_up(samples.values()),
            # The samples of one request share its spec and its adapter.
            next(iter(samples.values())).tag,
            next(iter(samples.values())).adapter,
            joined_weights(result.weights for result in samples.values()),
        )
    return joined


def _added_up(results: Iterable[CaptureResult]) -> tuple[Dropped, ...]:
    """Return the rows that several requests lost, by reason, without positions."""
    lost = Losses()
    for result in results:
        for dropped in result.dropped:
            lost.count(dropped.reason, dropped.rows)
    return lost.dropped
