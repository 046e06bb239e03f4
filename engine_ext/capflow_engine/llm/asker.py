"""The asker: asks a hub for the results of requests, on behalf of a server's event loop.

One thread has one connection for all waiting requests, and asks for all that are due in one message.

Invariants: an answer comes in time, whatever the hub does. The event loop never waits for a socket. The hub is asked
about at most `_NAMES_PER_S` requests in a second, shared evenly by the questions; each question is asked at most every
`_EVERY_S` seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from capflow import limits
from capflow.capture.result import CaptureResult
from capflow.errors import CapflowError, HubUnreachableError
from capflow.transport.client import Client

logger = logging.getLogger("vllm.capflow")

Results = dict[str, dict[str, CaptureResult]]
"""The results of requests, by id and consumer."""

HUB = "hub"
"""The name of a result while no hub answers and the consumers are unknown."""

# How long the hub has to answer.
_CONNECT_S = 1.0
_EVERY_S = 0.02
# How long a question that comes meanwhile may wait.
_LOOK_S = 0.2
_NAMES_PER_S = 20_000
_UNKNOWN = "no hub answers; the result of the capture is unknown"
_AWAY = "no hub is there; the result of the capture is unknown"


@dataclass(eq=False)
class _Ask:
    """A question about some requests.

    names: of the requests.
    captures: whether they brought specs of their own.
    patient: as in `Asker.ask`.
    deadline: when it is answered at the latest.
    engine: whose requests they are, by id or name. Empty if only one engine has requests of these ids.
    known_by: of `Asker.find`: how long to wait for a request that the hub does not know; None in `Asker.ask`.
    due: when the hub is asked next.
    asked: when the hub was last asked. Only the thread uses it.
    final: results that no longer change; their requests are not asked about again. Only the thread uses it.
    """

    names: tuple[str, ...]
    captures: bool
    patient: bool
    deadline: float
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Results]
    engine: str
    known_by: float | None = None
    due: float = 0.0
    asked: float = 0.0
    final: Results = field(default_factory=dict)

    def due_at(self, over_at: float) -> float:
        """Return when the hub is asked next.

        over_at: as in `waits`.
        """
        until = self.deadline if self.known_by is None else min(self.deadline, self.known_by)
        return min(self.due, over_at, until) if until > self.asked else min(self.due, over_at, self.deadline)

    def waits(self, results: Results, now: float, over_at: float) -> bool:
        """Return whether the question still waits for results of the hub.

        over_at: when every question is answered at the latest.
        """
        if self.known_by is not None and not all(results.values()):
            return now < min(self.known_by, over_at)
        return now < min(self.deadline, over_at) and not all(map(_final, results.values()))


class Asker:
    """Asks a hub. Connects when first used, and again after the hub was away.

    client: makes a client with a timeout in seconds.
    is_listening: returns at once whether a hub listens.
    engine: whose requests are asked about.
    """

    def __init__(
        self, client: Callable[[float], Client], is_listening: Callable[[], bool] = lambda: True, engine: str = ""
    ) -> None:
        self._client = client
        self._is_listening = is_listening
        self._engine = engine
        # When the hub was last asked. Only the thread uses it.
        self._turned_at = 0.0
        # Since when the hub is away or refuses; None while it answers. Only the thread uses it.
        self._away_at: float | None = None
        # When every question is answered at the latest; `hurry` sets it.
        self._over_at = math.inf
        self._asks: queue.SimpleQueue[_Ask] = queue.SimpleQueue()
        # It runs from the first question to the end of the process.
        self._thread: threading.Thread | None = None

    async def ask(self, names: Sequence[str], *, captures: bool, wait_s: float, patient: bool = True) -> Results:
        """Return the results of requests, once their consumers are done with them or `wait_s` seconds have passed.

        A consumer that is not done by then is `pending`. Without a hub the result is an error named `HUB`: at once, or,
        if `patient`, once the hub has been away for `limits.HUB_AWAY_S`.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Results] = loop.create_future()
        deadline = time.monotonic() + wait_s
        return await self._answer(_Ask(tuple(names), captures, patient, deadline, loop, answer, self._engine))

    async def find(self, names: Sequence[str], *, wait_s: float, known_s: float, engine: str = "") -> Results:
        """Return the results of requests, once their consumers are done with them or `wait_s` seconds have passed.

        known_s: after this time, in seconds, a request that the hub still does not know has no results.
        engine: whose requests they are, if not the asker's.
        Raises CapflowError if no hub answers, or if it refuses.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Results] = loop.create_future()
        now = time.monotonic()
        ask = _Ask(
            tuple(names),
            captures=True,
            patient=True,
            deadline=now + wait_s,
            loop=loop,
            answer=answer,
            engine=engine or self._engine,
            known_by=now + known_s,
        )
        return await self._answer(ask)

    async def _answer(self, ask: _Ask) -> Results:
        self._asks.put(ask)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="capflow-asker", daemon=True)
            self._thread.start()
        return await ask.answer

    def hurry(self, within_s: float) -> None:
        """From now on, answer every question within `within_s`."""
        self._over_at = time.monotonic() + within_s

    def _run(self) -> None:
        client = self._client(_CONNECT_S)
        waiting: list[_Ask] = []
        while True:
            if not waiting:
                waiting.append(self._asks.get())
            while not self._asks.empty():
                waiting.append(self._asks.get())
            waiting = [
                ask for ask in waiting if not ask.answer.done()
            ]  # the client of a question that is already done went away
            try:
                waiting = self._turn(client, waiting)
                self._away_at = None
            except CapflowError as e:
                waiting = self._failed(waiting, e)
            except Exception:
                logger.exception("asking the hub failed")
                for ask in waiting:
                    _tell_failure(ask, _UNKNOWN)
                waiting = []
                with contextlib.suppress(Exception):
                    client.close()
                client = self._client(_CONNECT_S)
            if waiting:
                due_s = min(ask.due_at(self._over_at) for ask in waiting) - time.monotonic()
                time.sleep(max(_EVERY_S, min(_LOOK_S, due_s)))

    def _turn(self, client: Client, waiting: list[_Ask]) -> list[_Ask]:
        """Ask once for all that are due. Answers those that are done or out of time, and returns the others."""
        now = time.monotonic()
        due = [ask for ask in waiting if now >= ask.due_at(self._over_at)]
        left = [ask for ask in waiting if now < ask.due_at(self._over_at)]
        if not due:
            return left
        connects = not client.connected or now - self._turned_at > limits.HEARTBEAT_S
        if connects and not self._is_listening():
            raise HubUnreachableError(_AWAY)
        self._turned_at = now
        names: dict[str, dict[str, None]] = {}
        for ask in due:
            unknown = (name for name in ask.names if name not in ask.final)
            names.setdefault(ask.engine, {}).update(dict.fromkeys(unknown))
        answers = {engine: client.results(its, wait=False, engine=engine) for engine, its in names.items()}
        consumers: list[str] | None = None
        for ask in due:
            mine = {name: ask.final.get(name) or answers[ask.engine].get(name, {}) for name in ask.names}
            ask.final |= {name: results for name, results in mine.items() if _final(results)}
            ask.asked = now
            ask.due = now + (len(ask.names) - len(ask.final)) * len(waiting) / _NAMES_PER_S
            wanted = ask.captures or bool(client.captures)
            if wanted and ask.waits(mine, time.monotonic(), self._over_at):
                left.append(ask)
                continue
            if ask.known_by is None and not all(mine.values()):  # the hub does not know some of them, or not yet
                consumers = list(client.status()["consumers"]) if consumers is None else consumers
                unknown_yet = {name: CaptureResult("pending" if wanted else "not_requested") for name in consumers}
                mine = {name: results or unknown_yet for name, results in mine.items()}
            _tell(ask, mine)
        return left

    def _failed(self, waiting: list[_Ask], error: CapflowError) -> list[_Ask]:
        """Answer the questions that no longer wait for the hub, and return the others.

        Questions wait for a slow hub that listens until their deadline, for one that is away or refuses for
        `limits.HUB_AWAY_S`.
        """
        now = time.monotonic()
        slow = isinstance(error, HubUnreachableError) and self._is_listening()
        if slow:
            self._away_at = None
        elif self._away_at is None:
            self._away_at = now
        away = self._away_at is not None and now - self._away_at >= limits.HUB_AWAY_S
        if isinstance(error, HubUnreachableError):
            why = _UNKNOWN if slow else _AWAY
        else:
            why = f"the result of the capture is unknown: {error}"
        left = []
        for ask in waiting:
            if away or now >= min(ask.deadline, self._over_at) or not ask.patient:
                _tell_failure(ask, why)
            else:
                left.append(ask)
        return left


def _final(results: dict[str, CaptureResult]) -> bool:
    return bool(results) and all(result.status != "pending" for result in results.values())


def _tell(ask: _Ask, results: Results) -> None:
    _post(ask, lambda: ask.answer.set_result(results))


def _tell_failure(ask: _Ask, why: str) -> None:
    """Answer that the hub does not answer: by an error result named `HUB`, or an exception for `Asker.find`."""
    if ask.known_by is None:
        _tell(ask, {name: {HUB: CaptureResult("error", why)} for name in ask.names})
    else:
        _post(ask, lambda: ask.answer.set_exception(CapflowError(why)))


def _post(ask: _Ask, answer: Callable[[], None]) -> None:
    def tell() -> None:
        if not ask.answer.done():
            answer()

    with contextlib.suppress(RuntimeError):  # the event loop is closed: the server ended
        ask.loop.call_soon_threadsafe(tell)
