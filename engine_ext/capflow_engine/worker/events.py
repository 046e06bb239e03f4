"""The events of the steering of one worker's requests: each leaves with the step that it belongs to."""

from __future__ import annotations

import time
from collections.abc import Mapping

from capflow.capture.frame import Acted
from capflow.capture.site import Site
from capflow.steering.compose import gate_owner
from capflow_engine.taps.requests import Tracked
from capflow_engine.worker.gates.firing import Firing
from capflow_engine.worker.pending import Pending, bare
from capflow_engine.worker.sender import Computed, Noted


class Events:
    """The events of the step that begins or runs, until it is pending.

    number: the number of that step.
    step: what it has for consumers so far; None if it has no events.
    """

    def __init__(self, pending: Pending) -> None:
        self.number = 0
        self._pending = pending
        self.step: Computed | None = None

    def note(
        self,
        tracked: Tracked,
        by: str,
        kind: str,
        sites: tuple[Site, ...],
        *,
        position: int,
        score: float | None = None,
        threshold: float | None = None,
        label: str = "",
        target: str = "",
        scale: float | None = None,
        step: int | None = None,
    ) -> None:
        """Record an event of a request's steering, if its events are recorded.

        position: the first position at which it holds.
        step: the step whose event it is; None: the step that begins or runs.
        """
        if tracked.noted:
            number = self.number if step is None else step
            event = Acted(by, kind, sites, number, time.time_ns(), position, score, threshold, label, target, scale)
            # A gate is decided by the row of its position, everything else by the rows before it.
            noted = Noted(tracked, event, position + (kind == "gate"))
            of = self._pending.step(number) if step is not None else None
            if of is None:
                of = self.step = self.step or bare(self.number)
            of.note(noted)

    def note_gates(self, firing: Firing, settled: int, requests: Mapping[str, Tracked]) -> None:
        """Record where gates of running requests opened and closed in the steps up to number `settled`."""
        for number, (tracked, gate, _, position, score) in firing.settle(settled):
            if tracked.key in requests:
                self.note(
                    requests[tracked.key],
                    gate_owner(gate),
                    "gate",
                    (Site(gate.layer, gate.hook),),
                    position=position,
                    score=score,
                    threshold=gate.threshold,
                    label=gate.label,
                    step=number,
                )

    def keep(self) -> None:
        """Keep the events of a step without a forward pass until it is settled."""
        step, self.step = self.step, None
        if step is not None and step.events:
            self._pending.add(step)

    @property
    def any(self) -> bool:
        """Whether the step has events."""
        return self.step is not None and bool(self.step.events)

    def move(self, step: Computed) -> None:
        """Give the events so far to a step, and begin anew."""
        if self.step is not None:
            step.events, step.events_lost = self.step.events, self.step.events_lost
            self.step = None
