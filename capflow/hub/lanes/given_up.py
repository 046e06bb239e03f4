"""The requests that a durable lane ended because their engine was gone, and whose own ends may come late.

The late end of such a request says what was lost of it. The request may then be one that the hub learns of only now,
since an earlier hub had it. So the lane gives it a result again: that of the consumer, with these losses. Where the
consumer still works on it, its only result names them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import msgspec

from capflow import limits
from capflow.buffers.newest import keep_newest
from capflow.capture.losses import Losses, described
from capflow.capture.result import CaptureResult, Status
from capflow.hub.lanes.tally import NOT_ENDED, Tally
from capflow.hub.requests.index import Late


@dataclass
class _GivenUp:
    """One request: its tally until the consumer has a result of it, then that result.

    late: what its own end said before that.
    """

    tally: Tally | None
    result: CaptureResult | None = None
    late: Late | None = None


class GivenUp:
    """The latest of these requests of one lane, at most `limits.RESULTS_KEPT_MAX`. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By engine and id, oldest first; guarded by `_lock`.
        self._requests: dict[tuple[str, str], _GivenUp] = {}

    def begin(self, tally: Tally) -> None:
        """Note a request that the lane ends because its engine is gone, before the consumer is told."""
        key = tally.request.engine, tally.request.id
        with self._lock:
            self._requests.pop(key, None)
            self._requests[key] = _GivenUp(tally)
            keep_newest(self._requests, limits.RESULTS_KEPT_MAX)

    def settle(self, tally: Tally, result: CaptureResult) -> CaptureResult:
        """Return the result of a request with what its own end has said by now, if it is one of these."""
        with self._lock:
            one = self._requests.get((tally.request.engine, tally.request.id))
            if one is None or one.tally is not tally:
                return result
            one.tally = None
            one.result = result if one.late is None else _with(result, one.late)
            return one.result

    def late(self, key: tuple[str, str], late: Late) -> CaptureResult | None:
        """Return the result of a request whose own end came; None where `settle` will return it.

        key: its engine and its id.
        """
        with self._lock:
            one = self._requests.get(key)
            if one is None:  # an earlier hub gave it up, or it is forgotten
                status: Status = "partial_error" if late.came else "error"
                error = "; ".join([*map(described, late.dropped), NOT_ENDED])
                return CaptureResult(status, error, dropped=late.dropped)
            if one.result is None:
                one.late = late
                return None
            one.result = _with(one.result, late)
            return one.result


def _with(result: CaptureResult, late: Late) -> CaptureResult:
    """Return a result with the losses that no result has named."""
    losses = Losses()
    losses.update((*result.dropped, *late.untold))
    error = "; ".join(filter(None, [*map(described, late.untold), result.error]))
    return msgspec.structs.replace(result, error=error or None, dropped=losses.dropped)
