"""The hubs of an engine, by number: the address and the key of each, and the scheduler's sessions with them.

A hub's number is its place in the list that the engine was started with. It decides which requests are the hub's
(`capflow.protocol.routing`). What a hub wants holds for its own requests; it may ask for actions on any request.

The last hubs of the list may be spare ones, which start while the engine runs. The scheduler shares new requests out
among the hubs that have ever answered and the others that are not spare. One that hands over gets none until it is
back, unless every hub does. A request stays with its hub.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from capflow import limits
from capflow.errors import UsageError, explain
from capflow.protocol.message import Act, Hello, Welcome
from capflow.steering.action import Outcome
from capflow.transport.address import check_address, default_address, hub_key, is_listening, without_key
from capflow.transport.client import Client
from capflow.transport.keys import peer_key_path, read_key
from capflow.transport.links.scheduler import SchedulerLink


class HubAt(NamedTuple):
    """Where a hub is.

    address: the hub's.
    key: the file of the key for its sessions, never the key itself.
    """

    address: str
    key: str | None = None

    def client(self, timeout_s: float = limits.HUB_WAIT_S_DEFAULT) -> Client:
        """Return a client of the hub."""
        return Client(self.address, timeout_s, key=self.key, insecure=True)  # checked by `hubs_at`

    def is_listening(self) -> bool:
        """Return at once whether anything listens there."""
        return is_listening(self.address)


def hubs_at(
    addresses: Sequence[str],
    key: str | None = None,
    *,
    spares: Sequence[str] = (),
    insecure: bool = False,
    where: str = "hub",
) -> tuple[HubAt, ...]:
    """Return the hubs at some addresses; without any, the hub at the default address.

    key: this side's key, by name or path, for hubs that have keys.
    spares: the addresses of spare hubs; they follow the others.
    where: the name of the option, for errors.
    Raises UsageError for a wrong address or key, and for an address that is given twice.
    """
    addresses = (*(tuple(addresses) or (default_address(),)), *spares)
    if len(addresses) > limits.HUBS_MAX:
        raise UsageError(explain(where, got=f"{len(addresses)} hubs", expected=f"at most {limits.HUBS_MAX}"))
    plain = [without_key(check_address(address, insecure=insecure, where=where)) for address in addresses]
    for address in plain:
        if plain.count(address) > 1:
            raise UsageError(explain(where, got=f"{address} twice", expected="each hub once"))
    any_keyed = any(hub_key(address) is not None for address in addresses)
    hubs = []
    for address in addresses:
        named = key if hub_key(address) is not None or not any_keyed else None
        path = peer_key_path(address, named)
        if path is not None:
            read_key(path)  # a wrong key is refused here, not in a worker
        hubs.append(HubAt(address, None if path is None else str(path)))
    return tuple(hubs)


class HubLinks:
    """A scheduler's sessions, one with each hub.

    running, at_once: as in `SchedulerLink`.
    holds: returns whether a request of a hub, by number, runs or waits.
    """

    def __init__(
        self,
        hubs: Sequence[HubAt],
        hello: Hello,
        running: Callable[[str], str | None],
        at_once: Callable[[Act], Outcome | None] = lambda _: None,
        holds: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self._links = [
            SchedulerLink(
                *(hub.address, hello),
                key=hub.key,
                running=running,
                at_once=at_once,
                holds=functools.partial(holds, number),
            )
            for number, hub in enumerate(hubs)
        ]

    @property
    def welcomes(self) -> tuple[Welcome | None, ...]:
        """Each hub's latest Welcome; None if the hub was never there."""
        return tuple(link.welcome for link in self._links)

    def in_service(self, regular: int) -> list[int]:
        """Return the numbers of the hubs that get new requests; the first `regular` hubs are not spare."""
        links = enumerate(self._links)
        there = [number for number, link in links if number < regular or link.welcome is not None]
        return [number for number in there if not self._links[number].hands_over] or there

    def wait_welcomes(self, timeout_s: float, spares: int = 0) -> None:
        """Wait until every hub has answered but the last `spares`, for at most `timeout_s` seconds in all."""
        deadline = time.monotonic() + timeout_s
        for link in self._links[: len(self._links) - spares]:
            link.wait_welcome(max(0.0, deadline - time.monotonic()))

    def actions(self, ready: Callable[[Act], bool]) -> list[Act]:
        """Return the waiting actions that are ready, the hub's number before their ids. Never waits."""
        acts: list[Act] = []
        for number, link in enumerate(self._links):
            if link.waiting:
                acts += (msgspec.structs.replace(act, id=f"{number}/{act.id}") for act in link.actions(ready))
        return acts

    def outcome(self, outcome: Outcome) -> None:
        """Send the outcome of an action to the hub that asked for it. Never waits."""
        number, _, own_id = outcome.id.partition("/")
        self._links[int(number)].outcome(msgspec.structs.replace(outcome, id=own_id))

    def reject(self, which: Callable[[Act], bool], reason: str) -> None:
        """Reject the actions that wait and for which `which` is true. Never waits."""
        for link in self._links:
            link.reject(which, reason)

    def report(self, hub: int, troubles: Sequence[str]) -> None:
        """Report to a hub why its controllers do not work. Never waits."""
        self._links[hub].report(troubles)

    def close(self) -> None:
        """Leave the hubs."""
        for link in self._links:
            link.close()
