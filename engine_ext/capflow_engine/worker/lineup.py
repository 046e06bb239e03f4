"""The lineup: the running requests that a step's batch names by vLLM's ids.

Mostly a batch is that of the step before, in the same order. Then nothing is looked up again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from capflow_engine.compat.step import RunnerBatch
from capflow_engine.taps.plan import Batch
from capflow_engine.taps.requests import Tracked


class Lineup:
    """Looks up the requests of each step.

    requests: the running requests, by vLLM's id.
    """

    def __init__(self, requests: Mapping[str, Tracked]) -> None:
        self._requests = requests
        # Of the last batch: its ids, its requests, and which of the ids are those of requests; None if all are.
        self._keys: Sequence[str] | None = None
        self._found: tuple[Tracked, ...] = ()
        self._which: npt.NDArray[np.bool_] | None = None

    def change(self) -> None:
        """Look up everything again: a request came, went, or was replaced."""
        self._keys = None

    def of(self, batch: RunnerBatch) -> Batch:
        """Return the batch of a step. Ids of no running request are left out."""
        starts, lengths = batch.starts, batch.lengths
        if batch.keys != self._keys:
            self._look_up(batch.keys[: len(lengths)])
        if self._which is None:
            return Batch(self._found, starts, lengths)
        rows = np.cumsum(lengths) - lengths
        return Batch(self._found, *(column[self._which] for column in (starts, lengths, rows)))

    def _look_up(self, keys: Sequence[str]) -> None:
        requests = [self._requests.get(key) for key in keys]
        self._found = tuple(request for request in requests if request is not None)
        every = len(self._found) == len(requests)
        self._which = None if every else np.array([request is not None for request in requests], np.bool_)
        self._keys = list(keys)
