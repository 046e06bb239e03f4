"""The newest rows, as they came: frames are kept without a copy, and whole frames make room for newer ones."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from capflow.capture.frame import Frame
from capflow.capture.site import Site
from capflow_dashboard import limits


class KeptRows:
    """A bounded store of frames. One thread adds frames, any thread finds rows.

    bytes_max: the memory of all frames, in bytes: their payloads, and an estimate of their headers.
    """

    def __init__(self, bytes_max: int = limits.KEPT_ROWS_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        # Guards the fields below; held for a few instructions.
        self._lock = threading.Lock()
        # The frames with their memory, oldest first.
        self._frames: deque[tuple[Frame, int]] = deque()
        self._bytes = 0

    @property
    def nbytes(self) -> int:
        """The memory of the frames that are kept."""
        return self._bytes

    def add(self, frame: Frame) -> None:
        """Keep a frame; drop the oldest ones if there is no room."""
        if not frame.header.blocks:
            return
        tokens = sum(len(request.token_ids) for request in frame.header.requests)
        nbytes = len(frame.payload) + limits.KEPT_FRAME_BYTES + limits.TOKEN_BYTES * tokens
        with self._lock:
            self._frames.append((frame, nbytes))
            self._bytes += nbytes
            while self._bytes > self._bytes_max:
                _, dropped = self._frames.popleft()
                self._bytes -= dropped

    def find(
        self, engine: str, request: str, incarnation: str, position: int, sites: Collection[Site]
    ) -> dict[Site, npt.NDArray[np.float32]]:
        """Return the newest kept row of a position of a request at each of these sites, `[hidden_size]` float32.

        A site whose row is not kept is left out. The rows of one position may lie in several frames: each pipeline
        stage sends its own, and a request that was preempted is computed again.
        """
        with self._lock:
            frames = [frame for frame, _ in self._frames]
        missing = set(sites)
        rows: dict[Site, npt.NDArray[np.float32]] = {}
        for frame in reversed(frames):
            if not missing:
                break
            if frame.header.engine == engine:
                for site, row in _rows_at(frame, request, incarnation, position, missing).items():
                    rows[site] = row
                    missing.discard(site)
        return rows


def _rows_at(
    frame: Frame, request: str, incarnation: str, position: int, sites: Collection[Site]
) -> dict[Site, npt.NDArray[np.float32]]:
    """Return a frame's rows of a position of a request at these sites."""
    parts = enumerate(frame.header.requests)
    numbers = [n for n, part in parts if part.id == request and part.incarnation == incarnation]
    # Most frames have no rows of the request, and it is in a frame once.
    if not numbers:
        return {}
    (number,) = numbers
    return {
        site: rows[index, span.row + position - span.start].astype(np.float32)
        for block, rows in frame.blocks()
        for span in block.spans
        if span.request == number and span.start <= position < span.start + span.length
        for index, site in enumerate(block.sites)
        if site in sites
    }
