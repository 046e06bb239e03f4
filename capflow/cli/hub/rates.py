"""Rates, from what a hub told at two moments of its own clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

Told = Mapping[str, Any]


class Rate(NamedTuple):
    """What goes through in a second."""

    rows: float = 0.0
    bytes: float = 0.0
    tokens: float = 0.0


class Rates:
    """What went through between two statuses of one hub, `before` and `now`, in each second."""

    def __init__(self, before: Told, now: Told) -> None:
        self._seconds = max(now["uptime_s"] - before["uptime_s"], 1e-3)
        self._consumers = {name: self._rate(before["consumers"].get(name), c) for name, c in now["consumers"].items()}
        old = {_worker(session): session for session in before["sessions"] if session["role"] == "worker"}
        self._workers = {
            _worker(session): self._rate(old.get(_worker(session)), session)
            for session in now["sessions"]
            if session["role"] == "worker"
        }
        self.hub = self._rate(before, now)

    def consumer(self, name: str) -> Rate:
        """Return a consumer's."""
        return self._consumers.get(name, Rate())

    def worker(self, session: Told) -> Rate:
        """Return that of a worker's session."""
        return self._workers.get(_worker(session), Rate())

    def as_json(self) -> dict[str, Any]:
        """Return all of them, as plain JSON values; those of workers under `ENGINE PP/DP/TP`."""
        return {
            "hub": self.hub._asdict(),
            "consumers": {name: rate._asdict() for name, rate in self._consumers.items()},
            "workers": {key: rate._asdict() for key, rate in self._workers.items()},
        }

    def _rate(self, before: Told | None, now: Told) -> Rate:
        if before is None:
            return Rate()
        more = {key: max(0, now[key] - before[key]) for key in Rate._fields if key in now}
        return Rate(**{key: round(count / self._seconds, 3) for key, count in more.items()})


class History:
    """The statuses of the last seconds, of one life of one hub."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._told: deque[Told] = deque()

    def add(self, told: Told) -> None:
        """Take a status; those of a hub that was there before it are forgotten."""
        if self._told and told["uptime_s"] <= self._told[-1]["uptime_s"]:
            self._told.clear()
        self._told.append(told)
        while len(self._told) > 2 and self._told[1]["uptime_s"] <= told["uptime_s"] - self.window_s:
            self._told.popleft()

    @property
    def now(self) -> Told | None:
        """The latest status."""
        return self._told[-1] if self._told else None

    @property
    def rates(self) -> Rates | None:
        """The rates over the window; None before there are two statuses."""
        return Rates(self._told[0], self._told[-1]) if len(self._told) > 1 else None


def _worker(session: Told) -> str:
    return f"{session['engine']} {'/'.join(map(str, session['rank']))}"
