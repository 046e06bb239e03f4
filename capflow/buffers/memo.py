"""The memo: a bounded cache of computed values."""

from __future__ import annotations

from typing import Generic, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Memo(Generic[_Key, _Value]):
    """Values by key, of at most `bytes_max` together. A full memo is emptied."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.nbytes = 0
        self._values: dict[_Key, _Value] = {}

    def get(self, key: _Key) -> _Value | None:
        """Return the value of a key; None if the memo does not have it."""
        return self._values.get(key)

    def put(self, key: _Key, value: _Value, nbytes: int) -> None:
        """Store a value that takes `nbytes` together with its key."""
        if self.nbytes + nbytes > self.bytes_max:
            self._values.clear()
            self.nbytes = 0
        if nbytes <= self.bytes_max:
            self._values[key] = value
            self.nbytes += nbytes
