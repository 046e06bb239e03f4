"""The events of steering in a worker's frame, as consumers get them.

Invariant: an event of a frame has the same id each time, so a consumer knows an event that comes again.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from capflow import limits
from capflow.capture.frame import Acted, ActedOn, FrameHeader
from capflow.errors import explain
from capflow.steering.action import Answered


def events_of(header: FrameHeader) -> list[Answered]:
    """Return the events in a frame, in order."""
    if not header.acted:
        return []
    engine, stage = header.engine, header.rank.pp
    events = []
    for on in header.acted:
        events += answered_by(engine, on.id, on.incarnation, stage, on.acted)
        if on.lost:
            events.append(_overflow(header, on, events[-1] if on.acted else None))
    return events


def _overflow(header: FrameHeader, on: ActedOn, last: Answered | None) -> Answered:
    """Return the record that stands for the events of a request that had no room in a step."""
    reason = explain(
        f"events of step {header.step}", got=f"{on.lost} more", expected=f"at most {limits.EVENTS_PER_STEP_MAX}"
    )
    name = (header.engine, header.boot, header.rank, header.step, on.id, on.incarnation)
    return Answered(
        xxhash.xxh3_128_hexdigest(repr(name).encode()),
        header.engine,
        on.id,
        "overflow",
        (),
        "worker",
        header.time_ns,
        header.step,
        reason,
        None if last is None else last.position,
        incarnation=on.incarnation,
    )


def answered_by(engine: str, request: str, incarnation: str, stage: int, acts: Sequence[Acted]) -> list[Answered]:
    """Return the events of a request's steering in the worker of a stage. Each always has the same id."""
    return [
        Answered(
            xxhash.xxh3_128_hexdigest(repr((engine, request, stage, number, acted.time_ns)).encode()),
            engine,
            request,
            acted.kind,
            acted.sites,
            acted.by,
            acted.time_ns,
            acted.step,
            "",
            acted.position,
            acted.score,
            acted.threshold,
            acted.label,
            incarnation,
            acted.target,
            acted.scale,
        )
        for number, acted in enumerate(acts)
    ]
