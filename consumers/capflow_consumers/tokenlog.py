"""The tokens of one request, by position, as the steps that computed them tell of them.

Several pipeline stages tell of the same tokens, and a preempted request's are computed again: what is known is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class TokenLog:
    """Runs of positions without a gap; nearly always one."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[tuple[int, list[int], list[str]]] = []

    def add(self, start: int, token_ids: Sequence[int], texts: Sequence[str]) -> None:
        """Take the tokens at positions `start, start+1, …`; texts is empty or as long as token_ids."""
        if self._runs:
            first, ids, words = self._runs[-1]
            known = first + len(ids) - start
            if start >= first and known >= 0:
                ids.extend(token_ids[known:])
                words.extend(texts[known:])
                return
        self._runs.append((start, list(token_ids), list(texts)))

    def ids(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Return the token ids of positions `start..stop`, -1 where unknown."""
        ids = np.full(stop - start, -1, np.int32)
        for first, run, _ in self._runs:
            low, high = max(start, first), min(stop, first + len(run))
            if low < high:
                ids[low - start : high - start] = run[low - first : high - first]
        return ids

    def texts(self) -> list[tuple[int, list[str]]]:
        """Return `(start, texts)` for each run whose texts are known."""
        return [(first, words) for first, ids, words in self._runs if words and len(words) == len(ids)]
