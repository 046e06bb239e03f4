"""When gates open and close: read from the margins of steps, on the host, in one rank of an engine.

A step's margins are copied from the device as its rows are. Whoever ends a request by a gate reads `GatedStep.fires` as
soon as the step is done. Events are recorded when a step is settled, without the positions that were cut, so a position
that a preempted request computes again has no second event.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from capflow.steering.action import Abort
from capflow.steering.program import ProgramGate
from capflow_engine.scheduler.orders import Decided, Marked, Rejection
from capflow_engine.steering.timeline import FOREVER
from capflow_engine.taps.acting import Mask, Opened, steered_runs
from capflow_engine.taps.plan import Plan, Scheduled
from capflow_engine.taps.requests import Tracked


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


class _GatesPart(NamedTuple):
    """The gates of a request at its tokens `first .. end` of a step."""

    first: int
    end: int
    gates: tuple[ProgramGate, ...]


@dataclass
class GatedStep:
    """A step that had gates.

    margins: float32 `[gates, tokens]`, in the host's memory; valid after `ready` returned.
    carried: what latched gates carried into the step, in the order of `plan.latched`, as `margins`; None if there are
        none.
    layer_last: the last layer of this pipeline stage; scores of later layers are unknown. The last stage knows all.
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
        # The gates of each request, as the step was launched; later actions may change them.
        self._gates = {number: _gates_of(self.plan.batch[number]) for number in self.plan.gated}

    @property
    def guards(self) -> bool:
        """Whether a gate of the step may end a request."""
        return any(gate.abort for parts in self._gates.values() for part in parts for gate in part.gates)

    def aborts(self, ends: Mapping[str, int]) -> Iterator[Decided]:
        """Yield which requests end by a gate; waits for the device. Positions of rejected drafts are among them.

        ends: by vLLM's id, the end of the positions that belong to the request; without an entry, all do.
        """
        self.ready()
        if not (self.margins >= 0).any():
            return
        for number, parts in self._gates.items():
            request, row, start, _ = self.plan.batch[number]
            limit = ends.get(request.key, FOREVER)
            for first, end, gates in parts:
                for gate, margins in zip(gates, self.margins[:, row + first : row + end], strict=False):
                    opened = np.flatnonzero(margins >= 0).tolist() if gate.abort else []
                    if opened and start + first + opened[0] < limit:
                        yield _end(request, gate, start + first + opened[0], float(margins[opened[0]]) + gate.threshold)

    def gate_at(self, number: int, token: int, bit: int) -> ProgramGate:
        """Return a gate as it is at a token of a request, counted from the request's first token in the step."""
        gates = next(part.gates for part in self._gates[number] if token < part.end)
        return gates[bit] if bit < len(gates) else self.plan.batch[number].request.gates[bit]

    def opened(self, request: Tracked) -> Opened:
        """Return a function that returns where a request's gates are open, as far as this pipeline stage knows.

        Gates of later stages count as closed; `marked` of the last stage adds what they open.
        The function waits for the device.
        """

        def opened(gates: int, first: int, end: int) -> Mask:
            number = next(n for n in self.plan.gated if self.plan.batch[n].request.key == request.key)
            return self._opened(number, self.shifts.get(request.key, 0), gates, first, end)

        return opened

    def marked(self) -> Iterator[Marked]:
        """Yield where requests are steered whose rows consumers want; waits for the device.

        Only the last pipeline stage knows all scores. The positions of rejected drafts are among these.
        """
        for number, history in self.plan.histories.items():
            if number in self._gates:
                request, _, start, length = self.plan.batch[number]
                runs = steered_runs(history, start, start + length, partial(self._opened, number, 0))
                if runs:
                    yield Marked(self.number, request.key, tuple(edge - start for edge in runs))

    def _opened(self, number: int, shift: int, gates: int, first: int, end: int) -> Mask:
        """Return at which of the positions `first .. end` one of a request's gates is open, as `Opened`.

        number: the place of the request in the batch.
        shift: by how much the positions are lower than planned.
        """
        self.ready()
        _, row, start, length = self.plan.batch[number]
        mask = np.zeros(length, np.bool_)
        for part in self._gates[number]:
            tokens = slice(part.first, part.end)
            for bit in range(len(self.margins)):
                gate = self.gate_at(number, part.first, bit) if gates >> bit & 1 else None
                if gate is not None and gate.layer <= self.layer_last:
                    margins = self.margins[bit, row : row + length]
                    if gate.latched and self.carried is not None:
                        margins = np.maximum.accumulate(margins)
                        margins = np.maximum(margins, self.carried[bit, self.plan.latched.index(number)])
                    mine = margins[tokens]
                    mask[tokens] |= mine >= 0 if math.isinf(gate.sharpness) else mine > -np.inf
        return mask[first - start + shift : end - start + shift]


class Firing:
    """The gates of one worker's requests, as events see them.

    steps: those that are not settled, oldest first.
    """

    def __init__(self) -> None:
        self.steps: deque[GatedStep] = deque()
        # By vLLM's id: which gates are open, as bits, and the first position without events.
        self._open: dict[str, tuple[int, int]] = {}

    def add(self, step: GatedStep) -> None:
        """Add a step that was just launched."""
        self.steps.append(step)

    def cut(self, key: str, limit: int) -> None:
        """Drop a request's positions from `limit` on from every step."""
        for step in self.steps:
            step.limits[key] = min(limit, step.limits.get(key, limit))

    def reject(self, rejection: Rejection) -> None:
        """Drop the positions of rejected drafts from their step, and lower those of the request's later steps."""
        key = rejection.key
        for step in self.steps:
            if step.number <= rejection.step:
                step.limits[key] = min(rejection.limit, step.limits.get(key, rejection.limit))
            else:
                step.shifts[key] = step.shifts.get(key, 0) + rejection.drafts

    def settle(self, settled: int) -> Iterator[tuple[int, Crossing]]:
        """Yield the crossings of the steps up to number `settled`, in order, each with the number of its step.

        A latched gate crosses its threshold once.
        """
        while self.steps and self.steps[0].number <= settled:
            step = self.steps.popleft()
            step.ready()
            for crossing in self._crossings(step):
                yield step.number, crossing

    def forget(self, key: str) -> None:
        """Forget a request that ended."""
        self.cut(key, 0)
        self._open.pop(key, None)

    def _crossings(self, step: GatedStep) -> Iterator[Crossing]:
        # Which gates are scored and which are open at each token, as bits.
        scored, opened = _bits(step.margins > -np.inf), _bits(step.margins >= 0)
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
                    before = yield from _crossed(step, number, begin - start, before, step.margins[:, mine : mine + 1])
            elif any(scored[mine : mine + end - begin]):
                margins = step.margins[:, mine : mine + end - begin]
                before = yield from _crossed(step, number, begin - start, before, margins)
            self._open[request.key] = before, end


def _bits(flags: npt.NDArray[np.bool_]) -> list[int]:
    """Return which gates have their flag set at each token, as bits.

    flags: `[gates, tokens]`.
    """
    bits: list[int] = (flags[0] if len(flags) == 1 else (1 << np.arange(len(flags))) @ flags).tolist()
    return bits


def _crossed(
    step: GatedStep, number: int, token: int, before: int, margins: npt.NDArray[Any]
) -> Generator[Crossing, None, int]:
    """Yield the crossings of a request in order of position; return which gates are open then, as bits.

    number: the place of the request in the batch.
    token: the first of its tokens in the step.
    before: which gates were open, as bits.
    margins: `[gates, tokens]`, from that token on.
    """
    request, _, start, _ = step.plan.batch[number]
    first = start - step.shifts.get(request.key, 0) + token
    crossings = []
    for gate_number, (gate, mine) in enumerate(zip(request.gates, margins, strict=False)):
        bit = 1 << gate_number
        scored = np.flatnonzero(mine > -np.inf)
        if not len(scored) or (gate.latched and before & bit):
            continue
        states = mine[scored] >= 0
        if gate.latched:
            states = np.maximum.accumulate(states)
        changes = scored[np.diff(states, prepend=bool(before & bit))].tolist()
        crossings += [(place, gate_number, mine[place] >= 0, float(mine[place])) for place in changes]
        before = before | bit if states[-1] else before & ~bit
    for place, gate_number, opened, margin in sorted(crossings):
        gate = step.gate_at(number, token + place, gate_number)
        yield Crossing(request, gate, bool(opened), first + place, margin + gate.threshold)
    return before


def _end(request: Tracked, gate: ProgramGate, position: int, score: float) -> Decided:
    """Return the decision that ends a request by a gate."""
    reason = f"capflow:{gate.name}:{score:.6g}"
    abort = Abort(request.id, as_="stop" if gate.abort == "stop" else "abort", reason=reason)
    key, hub = request.key, request.hub
    return Decided(key, hub, -1, abort, position, position, score, gate.threshold, gate.label, gate.name)


def _gates_of(scheduled: Scheduled) -> list[_GatesPart]:
    """Return the gates that a request has at its tokens of a step."""
    request, _, start, length = scheduled
    parts: list[_GatesPart] = []
    end = length
    for held in reversed(request.steered or ()):
        if held.first < start + end:
            first = max(held.first - start, 0)
            parts.append(_GatesPart(first, end, held.gates))
            end = first
        if not end:
            break
    return parts[::-1] or [_GatesPart(0, length, request.gates)]
