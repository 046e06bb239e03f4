"""Rates of a hub over the last seconds: of a hub elsewhere from its statuses, of one in this process from snapshots."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from capflow.hub.counts import Snapshot

Status = Mapping[str, Any]


class Rate(NamedTuple):
    """Rows, bytes and tokens per second."""

    rows: float = 0.0
    bytes: float = 0.0
    tokens: float = 0.0


class Rates:
    """The rates of a hub, its consumers, workers and requests between two of its statuses, `before` and `now`."""

    def __init__(self, before: Status, now: Status) -> None:
        self._seconds = max(now["uptime_s"] - before["uptime_s"], 1e-3)
        self._consumers = {name: self._rate(before["consumers"].get(name), c) for name, c in now["consumers"].items()}
        old = {_worker(session): session for session in before["sessions"] if session["role"] == "worker"}
        self._workers = {
            _worker(session): self._rate(old.get(_worker(session)), session)
            for session in now["sessions"]
            if session["role"] == "worker"
        }
        past = {_request(one): one for one in before.get("running_requests", ())}
        self._requests = {
            _request(one): self._rate(past.get(_request(one)), one) for one in now.get("running_requests", ())
        }
        self.hub = self._rate(before, now)

    def consumer(self, name: str) -> Rate:
        """Return the rate of a consumer."""
        return self._consumers.get(name, Rate())

    def worker(self, session: Status) -> Rate:
        """Return the rate of a worker's session."""
        return self._workers.get(_worker(session), Rate())

    def request(self, request: Status) -> Rate:
        """Return the rate of a running request."""
        return self._requests.get(_request(request), Rate())

    def as_json(self) -> dict[str, Any]:
        """Return all rates as plain JSON values; a worker's key is `ENGINE PP/DP/TP`."""
        return {
            "hub": self.hub._asdict(),
            "consumers": {name: rate._asdict() for name, rate in self._consumers.items()},
            "workers": {key: rate._asdict() for key, rate in self._workers.items()},
        }

    def _rate(self, before: Status | None, now: Status) -> Rate:
        if before is None:
            return Rate()
        more = {key: max(0, now[key] - before[key]) for key in Rate._fields if key in now}
        return Rate(**{key: round(count / self._seconds, 3) for key, count in more.items()})


class History:
    """The statuses of the last `window_s` seconds of one run of a hub."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._statuses: deque[Status] = deque()

    def add(self, status: Status) -> None:
        """Add a status. If the hub has restarted, the earlier statuses are discarded."""
        if self._statuses and status["uptime_s"] <= self._statuses[-1]["uptime_s"]:
            self._statuses.clear()
        self._statuses.append(status)
        while len(self._statuses) > 2 and self._statuses[1]["uptime_s"] <= status["uptime_s"] - self.window_s:
            self._statuses.popleft()

    @property
    def now(self) -> Status | None:
        """The latest status."""
        return self._statuses[-1] if self._statuses else None

    @property
    def rates(self) -> Rates | None:
        """The rates over the window; None if there are fewer than two statuses."""
        return Rates(self._statuses[0], self._statuses[-1]) if len(self._statuses) > 1 else None


class RecentRate:
    """The rate of a hub in this process over the last `window_s` seconds.

    It is the rate since the last call of `update`, if that is longer ago.
    """

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        # When each snapshot was taken: those of the window, and the last one before it.
        self._snapshots: deque[tuple[float, Snapshot]] = deque()

    def update(self, now: float, snapshot: Snapshot) -> Rate:
        """Add a snapshot; return the rate.

        now: the time of the snapshot on a clock that never goes back, seconds.
        """
        self._snapshots.append((now, snapshot))
        while len(self._snapshots) > 2 and self._snapshots[1][0] <= now - self.window_s:
            self._snapshots.popleft()
        since, before = self._snapshots[0]
        seconds = max(now - since, 1e-3)
        return Rate(*((getattr(snapshot, name) - getattr(before, name)) / seconds for name in Rate._fields))


def _request(request: Status) -> tuple[str, str]:
    return request["engine"], request["id"]


def _worker(session: Status) -> str:
    return f"{session['engine']} {'/'.join(map(str, session['rank']))}"
