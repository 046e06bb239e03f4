"""Host memory that a step's rows are written to and sent from, without a copy in between.

A `Ring` lends buffers, up to a number of bytes. A buffer comes back when its last view is gone: when the step, the
sender, and the transport, which keeps a frame until it is acknowledged, have all dropped it. Buffers are reused,
because new memory costs a page fault for every 4 KiB written.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
import torch

_SIZE_MIN = 64 * 1024


class _Lent(weakref.ref[Any]):
    """A reference to a lent array, with the buffer that it is in."""

    __slots__ = ("memory", "size")
    memory: memoryview
    size: int


class Ring:
    """Buffers of page-locked (on a GPU) or plain host memory.

    bytes_max: the maximum number of bytes lent, not counting buffers of unsettled steps (`held` in `acquire`). A single
        buffer may be larger if nothing else is lent.
    pinned: whether the memory is page-locked.
    """

    def __init__(self, bytes_max: int, *, pinned: bool) -> None:
        self.bytes_max = bytes_max
        self.pinned = pinned
        self.bytes_lent = 0
        # The bytes of all buffers, lent or free.
        self._bytes_held = 0
        # Free buffers, by size.
        self._free: dict[int, list[memoryview]] = {}
        # References to the lent arrays, by `id`.
        self._lent: dict[int, _Lent] = {}
        # Guards the fields above; notified when a buffer comes back.
        self._changed = threading.Condition()

    @staticmethod
    def size_of(nbytes: int) -> int:
        """Return the size of the buffer that is lent for `nbytes` bytes."""
        return max(_SIZE_MIN, 1 << (nbytes - 1).bit_length())

    def acquire(self, nbytes: int, timeout_s: float, held: int = 0) -> Any:
        """Return a writable uint8 array of `nbytes` bytes, or None if there was no room for `timeout_s` seconds.

        held: lent bytes that do not count against `bytes_max`: they come back only after this call, so it
            cannot wait for them.
        """
        size = self.size_of(nbytes)
        with self._changed:
            fits = self.bytes_lent + size <= self.bytes_max  # nearly always
            if not fits and not self._changed.wait_for(lambda: self._fits(size, held), timeout_s):
                return None
            memory = self._take(size)
            self.bytes_lent += size
        # A view of a part of this array keeps the array, as the memory below it is no array.
        view = np.frombuffer(memory, np.uint8, nbytes)
        lent = _Lent(view, self._give_back)
        lent.size, lent.memory = size, memory
        self._lent[id(lent)] = lent
        return view

    def _fits(self, size: int, held: int) -> bool:
        lent = self.bytes_lent - held
        return lent == 0 or lent + size <= self.bytes_max

    def _take(self, size: int) -> memoryview:
        if self._free.get(size):
            return self._free[size].pop()
        while self._bytes_held + size > self.bytes_max and any(self._free.values()):
            other = next(s for s, buffers in self._free.items() if buffers)
            self._free[other].pop()
            self._bytes_held -= other
        self._bytes_held += size
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned).numpy().data

    def _give_back(self, lent: _Lent) -> None:
        with self._changed:
            del self._lent[id(lent)]
            self.bytes_lent -= lent.size
            self._free.setdefault(lent.size, []).append(lent.memory)
            self._changed.notify_all()
