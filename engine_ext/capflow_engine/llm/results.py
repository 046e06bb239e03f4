"""The results of requests, from the hubs that have them: for an engine that may wait, or a server's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType

from capflow.errors import CapflowError
from capflow.protocol.routing import hub_among
from capflow.transport.client import Client
from capflow_engine.hubs import HubAt
from capflow_engine.llm.asker import Asker, Results
from capflow_engine.request.options import RequestOptions
from capflow_engine.settings import Settings

logger = logging.getLogger("vllm.capflow")

_STILL_S_MAX = 120.0  # consumers without progress are waited for so long
_NO_HUB_S = 60.0
# Between two looks for the hub of a request.
_LOCATE_S = 0.2


class HubResults:
    """Asks one hub and waits for its answers. For one thread. Connects when first used, or when the hub is back."""

    def __init__(self, hub: HubAt, engine: str) -> None:
        self._hub = hub
        self._engine = engine
        # Set from the first use on, while the hub is there.
        self._client: Client | None = None
        # The time until which no connection is tried, because the hub was not there; on the clock of `monotonic`.
        self._no_hub_until = 0.0

    def ask(self, requests: Sequence[tuple[str, bool]]) -> Results:
        """Return the results of the requests whose rows were wanted, by id; nothing if no hub is there, or it refuses.

        requests: the id of each, and whether it brought a spec of its own. If none did, a missing hub is not waited
            for.
        """
        asked = any(captures for _, captures in requests)
        paused = self._client is None and time.monotonic() < self._no_hub_until
        if not asked and (paused or not self._hub.is_listening()):
            self.close()
            return {}
        try:
            if self._client is None:
                self._client = self._hub.client()
                self._client.__enter__()
            everything = bool(self._client.captures)
            names = [name for name, captures in requests if everything or captures]
            return self._client.final_results(names, _STILL_S_MAX, engine=self._engine) if names else {}
        except CapflowError as e:
            if asked or not self._no_hub_until:
                logger.warning("%s; the results of captures are unknown", e)
            self._no_hub_until = time.monotonic() + _NO_HUB_S
            self.close()
            return {}

    def close(self) -> None:
        """Leave the hub."""
        if self._client is not None:
            self._client.close()
            self._client = None


class AllResults:
    """Asks each hub of an engine for the results of its requests."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._hubs = [HubResults(hub, settings.engine) for hub in settings.hubs]

    def ask(self, options: Sequence[RequestOptions], placed: Mapping[str, int]) -> Results:
        """Return the results of the requests whose rows were wanted, by id.

        placed: the hubs of requests that spare hubs have.
        """
        by_hub: list[list[tuple[str, bool]]] = [[] for _ in self._hubs]
        for one in options:
            for name in one.names:
                number = placed.get(name, self._settings.hub_of(name))
                by_hub[number].append((name, one.capture is not None))
        results: Results = {}
        for hub, requests in zip(self._hubs, by_hub, strict=True):
            if requests:
                results |= hub.ask(requests)
        return results

    def close(self) -> None:
        """Leave the hubs."""
        for hub in self._hubs:
            hub.close()


class Askers:
    """As `AllResults`, for an event loop, by an `Asker` for each hub. A missing hub delays no other hub's answer."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._hubs = [Asker(hub.client, hub.is_listening, settings.engine) for hub in settings.hubs]
        # The numbers of spare hubs that were ever there, as far as this object has seen.
        self._spares: set[int] = set()

    async def ask(
        self,
        names: Sequence[str],
        placed: Mapping[str, int] = MappingProxyType({}),
        *,
        captures: bool,
        wait_s: float,
        patient: bool = True,
    ) -> Results:
        """Return the results of requests, in the order of their names; see `Asker.ask`.

        placed: the hubs of requests that spare hubs have.
        """

        def ask(hub: Asker, its: list[str]) -> Coroutine[None, None, Results]:
            return hub.ask(its, captures=captures, wait_s=wait_s, patient=patient)

        self._spares.update(placed.values())
        return await self._gathered(names, placed, ask)

    async def find(self, names: Sequence[str], *, wait_s: float, known_s: float, engine: str = "") -> Results:
        """Return the results of requests that may be over or unknown, in the order of their names; see `Asker.find`."""

        def find(hub: Asker, its: list[str]) -> Coroutine[None, None, Results]:
            return hub.find(its, wait_s=wait_s, known_s=known_s, engine=engine)

        placed: dict[str, int] = {}
        if self._settings.spares:
            began = time.monotonic()
            placed = await self._located(names, known_s, engine)
            known_s = max(0.0, known_s - (time.monotonic() - began))
        return await self._gathered(names, placed, find)

    async def _located(self, names: Sequence[str], known_s: float, engine: str) -> dict[str, int]:
        """Return the hub of each request; asks all hubs until one of them knows it or the time is over.

        A request that no hub knows is placed by its name, among the hubs that were ever there.
        """
        placed: dict[str, int] = {}
        regular = self._settings.regular
        deadline = time.monotonic() + known_s
        while True:
            for number, (hub, asker) in enumerate(zip(self._settings.hubs, self._hubs, strict=True)):
                left = [name for name in names if name not in placed]
                if left and hub.is_listening():
                    self._spares.update([number] if number >= regular else [])
                    with contextlib.suppress(CapflowError):  # the hub that has the request says why
                        results = await asker.find(left, wait_s=0.0, known_s=0.0, engine=engine)
                        placed.update(dict.fromkeys((name for name in left if results[name]), number))
            if len(placed) == len(set(names)) or time.monotonic() >= deadline:
                in_service = [*range(regular), *sorted(self._spares)]
                return {name: hub_among(name, in_service) for name in names} | placed
            await asyncio.sleep(_LOCATE_S)

    async def _gathered(
        self,
        names: Sequence[str],
        placed: Mapping[str, int],
        ask: Callable[[Asker, list[str]], Coroutine[None, None, Results]],
    ) -> Results:
        by_hub: dict[int, list[str]] = {}
        for name in names:
            by_hub.setdefault(placed.get(name, self._settings.hub_of(name)), []).append(name)
        results: Results = {}
        for each in await asyncio.gather(*(ask(self._hubs[hub], its) for hub, its in by_hub.items())):
            results |= each
        return {name: results[name] for name in names}

    def hurry(self, within_s: float) -> None:
        """Answer every question within `within_s`, with the results that are known by then."""
        for asker in self._hubs:
            asker.hurry(within_s)
