"""Which finished requests a hub keeps, by owner and size."""

from __future__ import annotations

from collections.abc import Iterator

from capflow import limits

Key = tuple[str, str]
"""The name of an engine, and the id of a request."""


class Kept:
    """The finished requests that are kept: at most `count_max`, and at most `bytes_max` together.

    Beyond that the oldest request of the owner with the most bytes is removed, so no owner loses requests to another.
    """

    def __init__(self, count_max: int, bytes_max: int) -> None:
        self.count_max = count_max
        self.bytes_max = bytes_max
        self.nbytes = 0
        # The owner and size of each request.
        self._places: dict[Key, tuple[str, int]] = {}
        # The requests of each owner, oldest first.
        self._of: dict[str, dict[Key, None]] = {}
        # The bytes of each owner.
        self._held: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    def add(self, owner: str, key: Key, nbytes: int) -> None:
        """Keep a request; call `excess` afterwards."""
        self.remove(key)
        self._places[key] = owner, nbytes
        self._of.setdefault(owner, {})[key] = None
        self._held[owner] = self._held.get(owner, 0) + nbytes
        self.nbytes += nbytes

    def remove(self, key: Key) -> None:
        """Remove a request, if it is kept."""
        owner, nbytes = self._places.pop(key, ("", 0))
        if not nbytes:
            return
        self.nbytes -= nbytes
        self._held[owner] -= nbytes
        del self._of[owner][key]
        if not self._of[owner]:
            del self._of[owner], self._held[owner]

    def excess(self) -> Iterator[Key]:
        """Remove and yield the requests beyond the bounds."""
        while len(self._places) > self.count_max or self.nbytes > self.bytes_max:
            most = max(self._held, key=self._held.__getitem__)
            yield from self._pop(most)
        while len(self._of) > limits.OWNERS_MAX:
            yield from self._pop(next(iter(self._of)))

    def _pop(self, owner: str) -> Iterator[Key]:
        key = next(iter(self._of[owner]))
        self.remove(key)
        yield key
