"""The book: the rules, their state for each engine, and the latest changes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from capflow.capture.frame import Block, FrameHeader
from capflow.capture.result import RequestDone
from capflow_dashboard import limits
from capflow_dashboard.board.series import Series, Values
from capflow_dashboard.views.alerts.rules import OF_HUB, AlertRule, written
from capflow_dashboard.views.alerts.state import AlertState
from capflow_dashboard.views.alerts.tally import EngineTally, Reading
from capflow_dashboard.views.alerts.windows import CountedRequest, LatestParts


class AlertChange(NamedTuple):
    """A rule began or ceased to fire.

    number: counts the changes from 1.
    engine: empty for a rule of the hub that names none.
    request: the id of the request that the rule names; empty for none.
    value: in the rule's unit; None if it is over because there is no value.
    at_s: seconds since 1970.
    fired_s: for how long it fired; 0 when it begins to.
    """

    number: int
    rule: AlertRule
    engine: str
    request: str
    state: Literal["firing", "resolved"]
    value: float | None
    at_s: float
    fired_s: float

    @property
    def text(self) -> str:
        """The change in words."""
        rule = self.rule
        place = f" on engine {self.engine}" if self.engine else ""
        value = "it has no value" if self.value is None else f"the value is {written(self.value, rule)}"
        if self.state == "resolved":
            return f"alert {rule.name} is over{place} after {self.fired_s:.0f} s: {value}"
        named = f", request {self.request}" if self.request else ""
        return f"alert {rule.name} fires{place}: {value}{named}; the rule is {rule.text}"

    def event(self) -> dict[str, Any]:
        """Return the fields of the change in a JSON log."""
        fields: dict[str, Any] = {"rule": self.rule.name, "engine": self.engine, "value": self.value}
        fields |= {"request": self.request} if self.request else {}
        if self.state == "firing":
            return {"event": "alert_firing", **fields}
        return {"event": "alert_resolved", **fields, "fired_s": round(self.fired_s, 1)}

    def fields(self) -> dict[str, Any]:
        """Return the change as a page receives it."""
        fields = {"rule": self.rule.name, "engine": self.engine, "request": self.request, "state": self.state}
        return fields | {"value": _rounded(self.value), "at_s": round(self.at_s, 3), "fired_s": round(self.fired_s, 1)}


@dataclass
class AlertsSeen:
    """What one page has received.

    watching: whether it shows all rules, with their values.
    version: the version of the states that it has.
    change: the number of the last change that it has.
    """

    watching: bool = False
    version: int = -1
    change: int = 0


@dataclass
class _Entry:
    """A rule of an engine, or of the hub."""

    rule: AlertRule
    engine: str
    state: AlertState
    reading: Reading = field(default_factory=Reading)


@dataclass
class _WatchedEngine:
    """The tally of an engine, and the entries of its rules in the same order. gone: whether it has disconnected."""

    tally: EngineTally
    entries: list[_Entry]
    gone: bool = False


class AlertBook:
    """The rules and what has become of them.

    clock: returns monotonic seconds.
    wall: returns seconds since 1970.
    """

    def __init__(
        self,
        rules: Sequence[AlertRule],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.rules = tuple(rules)
        self._clock = clock
        self._wall = wall
        # Guards the fields below. Nothing else is called while it is held.
        self._lock = threading.Lock()
        self._engines: dict[str, _WatchedEngine] = {}
        now = clock()
        self._of_hub = [_Entry(rule, "", AlertState(rule, now)) for rule in rules if rule.quantity in OF_HUB]
        # Engines that left, with the name of the last one.
        self._left = {
            rule: LatestParts[tuple[int, str]](rule.over_s, lambda a, b: (a[0] + b[0], b[1]))
            for rule in rules
            if rule.quantity == "left"
        }
        self._changes: deque[AlertChange] = deque(maxlen=limits.ALERT_CHANGES_MAX)
        self._number = 0
        # Changes since the last evaluation: those of an engine that has come back with another model.
        self._fresh: list[AlertChange] = []
        # Grows when a rule changes its state, and with each evaluation.
        self._states_version = 0
        self._version = 0

    # Called on the thread of the channel.

    def greet(self, engine: str, probes: Sequence[Series], first: int, *, same: bool) -> None:
        """Watch an engine. same: whether it has come back with the same model and probes, and its counts go on."""
        with self._lock:
            before = self._engines.get(engine)
            if before is not None and same:
                before.gone = False
            elif self.rules:
                if before is not None:
                    self._end(before.entries)
                now = self._clock()
                tally = EngineTally(self.rules, probes, first)
                entries = [_Entry(rule, engine, AlertState(rule, now)) for rule in tally.rules]
                self._engines[engine] = _WatchedEngine(tally, entries)

    def leave(self, engine: str) -> None:
        """Note that an engine has disconnected. Its windows go on until they are empty."""
        with self._lock:
            if engine in self._engines:
                self._engines[engine].gone = True
            for parts in self._left.values():
                parts.add(self._clock(), (1, engine))

    def take(self, header: FrameHeader, block: Block, indices: Sequence[int], values: Values) -> None:
        """Take the values `[len(indices), rows]` of some of the engine's series in a block."""
        if not self.rules:
            return
        with self._lock:
            if (watched := self._engines.get(header.engine)) is None:
                return
            watched.tally.take(header.requests, block, indices, values)
            if header.time_ns:
                watched.tally.late(max(0.0, self._wall() - header.time_ns / 1e9))
            if watched.tally.full:
                watched.tally.count(self._clock())

    def finish(self, done: RequestDone, incarnation: str = "", scores: Sequence[float | None] = ()) -> None:
        """Take the end of a request. scores: of each probe, if the request is kept."""
        with self._lock:
            if (watched := self._engines.get(done.engine)) is not None:
                watched.tally.finish(done, CountedRequest(done.request, incarnation), scores, self._clock())

    # Called on the server's thread.

    def evaluate(self, silent_s: float) -> list[AlertChange]:
        """Evaluate the rules; return those that began or ceased to fire.

        silent_s: for how long the hub has said nothing.
        """
        with self._lock:
            now = self._clock()
            for entry in self._of_hub:
                if entry.rule.quantity == "silent":
                    self._step(entry, Reading(silent_s), now)
                else:
                    count, entry.engine = self._left[entry.rule].total(now) or (0, entry.engine)
                    self._step(entry, Reading(float(count)), now)
            for watched in self._engines.values():
                watched.tally.count(now)
                for entry, reading in zip(watched.entries, watched.tally.readings(now), strict=True):
                    self._step(entry, reading, now)
            self._forget()
            self._version += 1
            changes, self._fresh = self._fresh, []
            return changes

    @property
    def firing(self) -> set[str]:
        """The names of the rules that fire."""
        with self._lock:
            return {entry.rule.name for entry in self._entries() if entry.state.name == "firing"}

    def news(self, seen: AlertsSeen) -> dict[str, Any]:
        """Return what a page has not received yet, as `alerts` of `capflow_dashboard.wire`; empty if there is nothing.

        A page that shows all rules gets all of them at each evaluation. Another one gets those that fire or are
        pending, when the state of one has changed.
        """
        with self._lock:
            version = self._version if seen.watching else self._states_version
            if not self.rules or seen.version == version:
                return {}
            seen.version = version
            changes = [change.fields() for change in self._changes if change.number > seen.change]
            seen.change = self._number
            wall, now = self._wall(), self._clock()
            states = [
                {
                    "rule": entry.rule.name,
                    "engine": entry.engine,
                    "request": entry.reading.request,
                    "state": entry.state.name,
                    "since_s": round(wall - (now - entry.state.since), 3),
                    "value": _rounded(entry.reading.value),
                }
                for entry in self._entries()
                if seen.watching or entry.state.name != "inactive"
            ]
            return {"alerts": {"states": states, "changes": changes}}

    # Called with the lock held.

    def _entries(self) -> list[_Entry]:
        return [*self._of_hub, *(entry for watched in self._engines.values() for entry in watched.entries)]

    def _step(self, entry: _Entry, reading: Reading, now: float) -> None:
        state, entry.reading = entry.state, reading
        name, since = state.name, state.since
        change = state.step(reading.value, now)
        if state.name != name:
            self._states_version += 1
        if change is not None:
            self._note(entry, change, now - since if change == "resolved" else 0.0)

    def _note(self, entry: _Entry, state: Literal["firing", "resolved"], fired_s: float) -> None:
        self._number += 1
        value, request = entry.reading
        change = AlertChange(self._number, entry.rule, entry.engine, request, state, value, self._wall(), fired_s)
        self._changes.append(change)
        self._fresh.append(change)

    def _end(self, entries: Sequence[_Entry]) -> None:
        """Note that what fires is over, for there will be no more values."""
        for entry in entries:
            if entry.state.name == "firing":
                entry.reading = Reading()
                self._note(entry, "resolved", self._clock() - entry.state.since)
        self._states_version += 1

    def _forget(self) -> None:
        """Forget engines that are gone and of which nothing is in a window, and the first of too many."""
        gone = [name for name, watched in self._engines.items() if watched.gone]
        extra = len(gone) - limits.ALERT_GONE_MAX
        for number, name in enumerate(gone):
            entries = self._engines[name].entries
            idle = all(entry.state.name == "inactive" and not entry.reading.value for entry in entries)
            if idle or number < extra:
                self._end(entries)
                del self._engines[name]


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
