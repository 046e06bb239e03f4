"""What became of a request's capture, per consumer."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from capflow.frame import Dropped, Finished

Status = Literal["ok", "pending", "partial_error", "error", "not_requested"]


class CaptureResult(msgspec.Struct, frozen=True):
    """One consumer's word on one request.

    status: `ok`, everything promised was consumed; `partial_error`, some rows were lost, as `error` says;
    `error`, nothing usable came of it; `pending`, the consumer is not done; `not_requested`, the consumer wanted
    nothing of this request. payload: what the consumer has to say, plain JSON values, e.g. where the files lie.
    budget_reached: the request had more positions of those asked for than `max_rows` let through; no row was lost by it.
    """

    status: Status
    error: str | None = None
    payload: dict[str, Any] = msgspec.field(default_factory=dict)
    budget_reached: bool = False


class RequestDone(msgspec.Struct, frozen=True):
    """A request is over on every worker that served it; what consumers are told then.

    rows_promised: rows that its workers sent; rows: rows of it that this consumer was given;
    dropped: what was lost on the way to this consumer and why; budget_reached: `max_rows` left out positions that the
    request had.
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
