"""Shares: how many owners share a bound so that each always has its part.

An owner is a key, and on a hub without keys an engine, or the connection of a client. Half of the bound is set apart: each of
`owners_max` owners has an even part of it, which nobody else can take. The other half is for whoever comes first, but with n owners
none has more than 1/(n+1) of it.

Invariants: all owners together have at most `total`; an owner that has less than `least` can always take that much. There are at most
`owners_max` owners that have something.
"""

from __future__ import annotations

import threading

from capflow import limits
from capflow.errors import RoomError, explain


class Shares:
    """A bound and what each owner has of it; for any thread.

    what: its name in messages.
    unit: of the amounts.
    """

    def __init__(
        self, what: str, total: int, *, owners_max: int = limits.OWNERS_MAX, unit: str = "bytes", do: str = ""
    ) -> None:
        self.what = what
        self.total = total
        self.least = total // 2 // owners_max
        self.used = 0
        # Times that there was no room.
        self.refused = 0
        self._do = do
        self._unit = unit
        self._owners_max = owners_max
        self._common = total - self.least * owners_max
        self._common_used = 0
        # By owner, of those that have something.
        self._held: dict[str, int] = {}
        # Guards all of these.
        self._lock = threading.Lock()

    def held(self, owner: str) -> int:
        """Return what an owner has."""
        return self._held.get(owner, 0)

    def room(self, owner: str) -> int:
        """Return how much an owner may take now."""
        with self._lock:
            return self._room(owner)

    def _room(self, owner: str, back: int = 0) -> int:
        """Return how much an owner may take once it has given something back."""
        before, least = self._held.get(owner, 0), self.least
        owners = len(self._held) + (not before)
        if owners > self._owners_max:
            return 0
        held = before - back
        over = max(0, held - least)  # what it has of the common half
        free = self._common - self._common_used + max(0, before - least)
        own = max(0, least - max(0, held))
        return own + max(0, min(self._common // (owners + 1), free) - over)

    def offer(self, owner: str, amount: int) -> bool:
        """Take an amount if there is room for it; return whether there is."""
        with self._lock:
            if amount > self._room(owner):
                self.refused += 1
                return False
            self._change(owner, amount)
            return True

    def take(self, owner: str, amount: int, *, what: str = "") -> None:
        """Take an amount. Raises RoomError when there is no room for it."""
        if not self.offer(owner, amount):
            got = f"{amount:,} more {self._unit} beside {self.held(owner):,}"
            expected = f"at most {self.held(owner) + self.room(owner):,} now"
            raise RoomError(explain(what or self.what, got=got, expected=expected, do=self._do or "try again later"))

    def force(self, owner: str, amount: int) -> None:
        """Note that an owner has more, or less, also where there is no room for it or less than nothing is left."""
        with self._lock:
            self._change(owner, amount)

    def trade(self, owner: str, back: int, wanted: int) -> int:
        """Give back what an owner had, then take as much as there is room for of what it wants; return that."""
        with self._lock:
            taken = max(0, min(wanted, self._room(owner, back)))
            self._change(owner, taken - back)
            return taken

    def give(self, owner: str, amount: int) -> None:
        """Give back what was taken."""
        with self._lock:
            assert amount <= self._held.get(owner, 0) or not amount
            self._change(owner, -amount)

    def clear(self) -> None:
        """Have everything given back."""
        with self._lock:
            self._held.clear()
            self.used = self._common_used = 0

    def _change(self, owner: str, amount: int) -> None:
        if not amount:
            return
        before = self._held.get(owner, 0)
        after = before + amount
        self.used += amount
        self._common_used += max(0, after - self.least) - max(0, before - self.least)
        if after:
            self._held[owner] = after
        else:
            self._held.pop(owner, None)

    @property
    def owners(self) -> int:
        """How many owners have something."""
        return len(self._held)
