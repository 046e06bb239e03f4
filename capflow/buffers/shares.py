"""Shares: a bound that owners share, so that each owner always has its part.

An owner is a key; on a hub without keys it is an engine, or the connection of a client. One half of the bound is
reserved: each of `owners_max` owners has an even part of it that no other owner can take. The other half is common:
with n owners, each may take up to 1/(n+1) of it.

Invariants: all owners together have at most `total`. An owner can always take up to `least`. At most `owners_max`
owners have a share.
"""

from __future__ import annotations

import threading

from capflow import limits
from capflow.errors import RoomError, explain


class Shares:
    """A bound and the share of each owner, for any thread.

    label: the name of the bound in errors.
    total: the bound.
    unit: the unit of the amounts in errors.
    do: the advice in errors.
    """

    def __init__(
        self, label: str, total: int, *, owners_max: int = limits.OWNERS_MAX, unit: str = "bytes", do: str = ""
    ) -> None:
        self.label = label
        self.total = total
        self.least = total // 2 // owners_max
        self.used = 0
        # How often there was no room.
        self.refused = 0
        self._do = do
        self._unit = unit
        self._owners_max = owners_max
        self._common = total - self.least * owners_max
        self._common_used = 0
        # The share of each owner that has one.
        self._held: dict[str, int] = {}
        # Guards every field.
        self._lock = threading.Lock()

    def held(self, owner: str) -> int:
        """Return the share of an owner."""
        return self._held.get(owner, 0)

    def room(self, owner: str) -> int:
        """Return how much more an owner may take now."""
        with self._lock:
            return self._room(owner)

    def _room(self, owner: str, back: int = 0) -> int:
        """Return how much an owner may take after it has given `back` back."""
        before, least = self._held.get(owner, 0), self.least
        owners = len(self._held) + (not before)
        if owners > self._owners_max:
            return 0
        held = before - back
        over = max(0, held - least)  # its share of the common half
        free = self._common - self._common_used + max(0, before - least)
        own = max(0, least - max(0, held))
        return own + max(0, min(self._common // (owners + 1), free) - over)

    def offer(self, owner: str, amount: int) -> bool:
        """Take an amount if there is room; return whether it was taken."""
        with self._lock:
            if amount > self._room(owner):
                self.refused += 1
                return False
            self._change(owner, amount)
            return True

    def take(self, owner: str, amount: int, *, label: str = "") -> None:
        """Take an amount. Raises RoomError if there is no room.

        label: the beginning of the error message; by default the name of the bound.
        """
        if not self.offer(owner, amount):
            got = f"{amount:,} more {self._unit} beside {self.held(owner):,}"
            expected = f"at most {self.held(owner) + self.room(owner):,} now"
            raise RoomError(explain(label or self.label, got=got, expected=expected, do=self._do or "try again later"))

    def force(self, owner: str, amount: int) -> None:
        """Change an owner's share by an amount, even beyond the bound or below zero."""
        with self._lock:
            self._change(owner, amount)

    def trade(self, owner: str, back: int, wanted: int) -> int:
        """Give `back` back, then take as much of `wanted` as there is room for; return the amount taken."""
        with self._lock:
            taken = max(0, min(wanted, self._room(owner, back)))
            self._change(owner, taken - back)
            return taken

    def give(self, owner: str, amount: int) -> None:
        """Give an amount back."""
        with self._lock:
            assert amount <= self._held.get(owner, 0) or not amount
            self._change(owner, -amount)

    def clear(self) -> None:
        """Give all shares back."""
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
        """How many owners have a share."""
        return len(self._held)
