"""When gates open and close: read from the margins of steps, on the host, in one rank of an engine.

A step's margins are copied from the device as its rows are. Whoever ends a request by a gate reads `GatedStep.fires` as
soon as the step is done. Events are recorded when a step is settled, without the positions that were cut, so a position
that a preempted request computes again has no second event.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from capflow.steering.action import Abort
from capflow.steering.program import ProgramGate
from capflow_engine.scheduler.orders import Decided, Rejection
from capflow_engine.taps.acting import Mask, Opened
from capflow_engine.taps.plan import Plan, Tracked


class Crossing(NamedTuple):
    """A gate's score crossed its threshold.

    opened: whether it reached the threshold; else it fell below.
    position: the first position at which it did.
    """

    request: Tracked
    gate: ProgramGate
    opened: bool
    position: int
    score: float


@dataclass
class GatedStep:
    """A step that had gates.

    margins: float32 `[gates, tokens]`, in the host's memory; valid after `ready` returned.
    carried: what latched gates carried into the step, in the order of `plan.latched`, as `margins`; None if there are
        none.
    layer_last: the last layer of this pipeline stage. The scores of later layers are unknown here.
    limits: by vLLM's id, the end of the positions that belong to the request; without an entry, all do.
    shifts: by vLLM's id, by how much the request's positions are lower than planned.
    """

    number: int
    plan: Plan
    margins: npt.NDArray[Any]
    ready: Callable[[], None]
    carried: npt.NDArray[Any] | None
    layer_last: int
    limits: dict[str, int] = field(default_factory=dict)
    shifts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The gates of each request as the step was launched; later ones may differ.
        self._gates = {number: self.plan.batch[number].request.gates for number in self.plan.gated}

    @property
    def guards(self) -> bool:
        """Whether a gate of the step may end a request."""
        return any(gate.abort for gates in self._gates.values() for gate in gates)

    def aborts(self, ends: Mapping[str, int]) -> Iterator[Decided]:
        """Yield which requests end by a gate; waits for the device.

        ends: by vLLM's id, the end of the positions that belong to the request; without an entry, all do.
        """
        for request, gate, _, position, score in self.fires:
            if gate.abort and position < ends.get(request.key, position + 1):
                reason = f"capflow:{gate.name}:{score:.6g}"
                end = Abort(request.id, as_="stop" if gate.abort == "stop" else "abort", reason=reason)
                decided = Decided(request.key, request.hub, -1, end, position, position, score, gate.threshold)
                yield decided._replace(label=gate.label, gate=gate.name)

    @functools.cached_property
    def fires(self) -> tuple[Crossing, ...]:
        """The first position in the step at which each gate of each request is open; waits for the device.

        Positions of rejected drafts are among them.
        """
        self.ready()
        if not (self.margins >= 0).any():
            return ()
        fires = []
        for number in self.plan.gated:
            request, row, start, length = self.plan.batch[number]
            for gate, margins in zip(self._gates[number], self.margins[:, row : row + length], strict=False):
                opened = np.flatnonzero(margins >= 0)
                if len(opened):
                    first = int(opened[0])
                    fires.append(Crossing(request, gate, True, start + first, float(margins[first]) + gate.threshold))
        return tuple(fires)

    def opened(self, request: Tracked) -> Opened:
        """Return a function that returns where a request's gates are open; a gate without known scores counts as open.

        The function waits for the device.
        """

        def opened(gates: int, first: int, end: int) -> Mask:
            self.ready()
            number = next(n for n in self.plan.gated if self.plan.batch[n].request.key == request.key)
            _, row, start, length = self.plan.batch[number]
            start -= self.shifts.get(request.key, 0)
            mask = np.zeros(end - first, np.bool_)
            for bit, gate in enumerate(request.gates):
                if not gates >> bit & 1:
                    continue
                margins = self.margins[bit, row : row + length]
                if gate.latched and self.carried is not None:
                    margins = np.maximum.accumulate(margins)
                    margins = np.maximum(margins, self.carried[bit, self.plan.latched.index(number)])
                mask |= (margins[first - start : end - start] >= 0) | (gate.layer > self.layer_last)
            return mask

        return opened


class Firing:
    """The gates of one worker's requests, as events see them."""

    def __init__(self) -> None:
        # Steps that are not settled, oldest first.
        self._steps: deque[GatedStep] = deque()
        # By vLLM's id: which gates are open, as bits, and the first position without events.
        self._open: dict[str, tuple[int, int]] = {}

    def add(self, step: GatedStep) -> None:
        """Add a step that was just launched."""
        self._steps.append(step)

    def cut(self, key: str, limit: int) -> None:
        """Drop a request's positions from `limit` on from every step."""
        for step in self._steps:
            step.limits[key] = min(limit, step.limits.get(key, limit))

    def reject(self, rejection: Rejection) -> None:
        """Drop the positions of rejected drafts from their step, and lower those of the request's later steps."""
        key = rejection.key
        for step in self._steps:
            if step.number <= rejection.step:
                step.limits[key] = min(rejection.limit, step.limits.get(key, rejection.limit))
            else:
                step.shifts[key] = step.shifts.get(key, 0) + rejection.drafts

    def settle(self, settled: int) -> Iterator[tuple[int, Crossing]]:
        """Yield the crossings of the steps up to number `settled`, in order, each with the number of its step.

        A latched gate crosses its threshold once.
        """
        while self._steps and self._steps[0].number <= settled:
            step = self._steps.popleft()
            step.ready()
            for crossing in self._crossings(step):
                yield step.number, crossing

    def forget(self, key: str) -> None:
        """Forget a request that ended."""
        self.cut(key, 0)
        self._open.pop(key, None)

    def _crossings(self, step: GatedStep) -> Iterator[Crossing]:
        weights = 1 << np.arange(len(step.margins))
        # Which gates are scored and which are open at each token, as bits.
        scored, opened = (weights @ (step.margins > -np.inf)).tolist(), (weights @ (step.margins >= 0)).tolist()
        for number in step.plan.gated:
            request, row, start, length = step.plan.batch[number]
            start -= step.shifts.get(request.key, 0)
            before, first = self._open.get(request.key, (0, 0))
            end = min(start + length, step.limits.get(request.key, start + length))
            begin = max(start, first)
            if begin >= end:
                continue
            mine = row + begin - start
            if end - begin == 1:  # nearly always true
                if (before ^ opened[mine]) & scored[mine]:
                    before = yield from _crossed(request, begin, before, step.margins[:, mine : mine + 1])
            elif any(scored[mine : mine + end - begin]):
                before = yield from _crossed(request, begin, before, step.margins[:, mine : mine + end - begin])
            self._open[request.key] = before, end


def _crossed(request: Tracked, first: int, before: int, margins: npt.NDArray[Any]) -> Generator[Crossing, None, int]:
    """Yield the crossings of a request in order of position; return which gates are open then, as bits.

    before: which gates were open, as bits.
    margins: `[gates, positions]`, from position `first` on.
    """
    crossings = []
    for number, (gate, mine) in enumerate(zip(request.gates, margins, strict=False)):
        bit = 1 << number
        scored = np.flatnonzero(mine > -np.inf)
        if not len(scored) or (gate.latched and before & bit):
            continue
        states = mine[scored] >= 0
        if gate.latched:
            states = np.maximum.accumulate(states)
        changes = scored[np.diff(states, prepend=bool(before & bit))].tolist()
        crossings += [(place, number, mine[place] >= 0, float(mine[place])) for place in changes]
        before = before | bit if states[-1] else before & ~bit
    for place, number, opened, margin in sorted(crossings):
        gate = request.gates[number]
        yield Crossing(request, gate, bool(opened), first + place, margin + gate.threshold)
    return before
