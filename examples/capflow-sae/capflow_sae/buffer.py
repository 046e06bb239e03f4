"""The buffer between the hub and the training: bounded and shuffled. The hub never waits for it."""

from __future__ import annotations

import threading

import torch


class ShuffleBuffer:
    """Up to `capacity` rows `[hidden_size]`, float32, taken in random order. One thread puts, another one takes."""

    def __init__(self, capacity: int, hidden_size: int, seed: int = 0) -> None:
        self._rows = torch.empty(capacity, hidden_size)
        self._random = torch.Generator().manual_seed(seed)
        # The first `_count` of `_rows` are in the buffer.
        self._count = 0
        self._closed = False
        # Guards the buffer.
        self._changed = threading.Condition()

    def put(self, rows: torch.Tensor) -> int:
        """Add rows `[n, hidden_size]`; return how many had no room."""
        with self._changed:
            taken = min(len(rows), len(self._rows) - self._count)
            self._rows[self._count : self._count + taken] = rows[:taken]
            self._count += taken
            self._changed.notify()
        return len(rows) - taken

    def take(self, batch: int) -> torch.Tensor | None:
        """Return `batch` random rows `[batch, hidden_size]`.

        Waits until the buffer is half full or closed. Returns None when it is closed and has fewer rows.
        """
        enough = max(batch, len(self._rows) // 2)
        with self._changed:
            self._changed.wait_for(lambda: self._count >= enough or self._closed)
            if self._count < batch:
                return None
            chosen = torch.randperm(self._count, generator=self._random)[:batch]
            rows = self._rows[chosen]
            kept = self._count - batch
            hole = chosen[chosen < kept]
            tail = torch.ones(batch, dtype=torch.bool)
            tail[chosen[chosen >= kept] - kept] = False
            self._rows[hole] = self._rows[kept : self._count][tail]
            self._count = kept
            return rows

    def close(self) -> None:
        """Make `take` return the remaining rows without waiting, then None."""
        with self._changed:
            self._closed = True
            self._changed.notify()
