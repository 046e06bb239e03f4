"""The state of one request in the filesystem consumer: its rows in memory, and where they go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from capflow import limits
from capflow.capture.frame import Chunk
from capflow.capture.intervals import Intervals
from capflow.capture.site import Site
from capflow.capture.spec import Wanted
from capflow.errors import UsageError, explain
from capflow.steering.action import Answered
from capflow_consumers.dataset import layout
from capflow_consumers.dataset.rows import Piece, RowBuffer, TokenLog
from capflow_consumers.dataset.stored_dtype import converted
from capflow_consumers.filesystem.files import RequestFiles
from capflow_consumers.framelog import FrameLog


class EventLog:
    """The events of one request, each once, at most `limits.EVENTS_KEPT_MAX`; others are counted."""

    __slots__ = ("_events", "lost")

    def __init__(self) -> None:
        self._events: dict[str, Answered] = {}
        self.lost = 0

    def add(self, answered: Answered) -> None:
        """Take an event."""
        if answered.id not in self._events and len(self._events) >= limits.EVENTS_KEPT_MAX:
            self.lost += 1
        else:
            self._events[answered.id] = answered

    def join(self, early: EventLog) -> None:
        """Take the events of another log; they come first."""
        later, self._events = self._events, early._events
        self.lost += early.lost
        for answered in later.values():
            self.add(answered)

    def take(self, incarnation: str) -> list[layout.SteeringEvent]:
        """Return the events of a request of this incarnation, in order; `""`: of any."""
        events = [
            e for e in self._events.values() if not (incarnation and e.incarnation) or e.incarnation == incarnation
        ]
        return [layout.SteeringEvent.of(event) for event in events]


class FiledRequest:
    """One request from its first row to its result.

    error: why its rows are no longer taken.
    incarnation: differs between requests of the same id; empty until a frame or the end of the request says it.
    published: its path and its sidecar, if it was written before this consumer was opened. Then its
        frames are repeats, and its rows are not taken either.
    """

    __slots__ = (
        "_sites",
        "appended",
        "appending",
        "appending_bytes",
        "buffer",
        "dtypes",
        "error",
        "events",
        "files",
        "frames",
        "incarnation",
        "published",
        "steered",
        "tokens",
        "wanted",
    )

    def __init__(self, files: RequestFiles, wanted: Wanted | None, incarnation: str = "") -> None:
        self.files = files
        self.wanted = wanted
        self.buffer = RowBuffer()
        # Rows that have left the buffer, and that the disk refused for now.
        self.appending: dict[Site, list[Piece]] = {}
        # Their memory, as the buffer counted it.
        self.appending_bytes = 0
        # Whether no rows wait in `appending`.
        self.appended = True
        self.tokens = TokenLog()
        # The steered positions; None once a frame did not say them.
        self.steered: Intervals | None = Intervals()
        self.events = EventLog()
        self.incarnation = incarnation
        self.error: str | None = None
        self.frames = FrameLog()
        self.published: tuple[PurePath, layout.Sidecar] | None = None
        # The sites that have rows.
        self._sites: set[Site] = set()
        # By a chunk's sites and shape: the indices of the sites stored in each dtype.
        self.dtypes: dict[tuple[tuple[Site, ...], tuple[int, ...]], dict[str, list[int]]] = {}

    def note_steered(self, runs: Sequence[int] | None) -> None:
        """Take the steered positions of a frame, as `RequestRows.steered`."""
        if runs is None:
            self.steered = None
        elif self.steered is not None:
            for first, end in zip(runs[::2], runs[1::2], strict=True):
                self.steered.add(first, end - 1)

    @property
    def steered_runs(self) -> list[int] | None:
        """The steered positions as a sidecar has them."""
        return None if self.steered is None else [edge for first, last in self.steered for edge in (first, last + 1)]

    def add(self, chunk: Chunk, held_bytes: int | None) -> int:
        """Take a chunk's rows, each in the dtype that it is stored in; return by how much the buffer grew.

        held_bytes: the size of the memory that holds the rows, to keep them there; None to copy them.

        Raises UsageError, having taken nothing, for rows of another shape than the site's first.
        """
        files, sites = self.files, chunk.sites
        kinds = self.dtypes.get((sites, chunk.shape))
        if kinds is None:
            kinds = self.dtypes[sites, chunk.shape] = self._begun(sites, chunk.shape)
        grown = 0
        for dtype, indices in kinds.items():
            whole = len(indices) == len(sites)
            stored = sites if whole else tuple(sites[index] for index in indices)
            rows = chunk.rows if whole else chunk.rows[indices]
            if dtype != files.dtype:
                rows, overflowed = converted(rows, dtype)
                files.rows_overflowed.update(dict(zip(stored, overflowed.tolist(), strict=True)))
            held = rows.nbytes if rows.base is None else held_bytes
            grown += self.buffer.add(stored, chunk.start, rows, held)
        return grown

    def _begun(self, sites: Sequence[Site], shape: tuple[int, ...]) -> dict[str, list[int]]:
        """Note the shape of some sites' rows; return the indices of the sites stored in each dtype."""
        files = self.files
        for site in sites:
            had = files.shapes.get(site, ()) if site in self._sites else shape
            if had != shape:
                got, expected = (list(each or (files.hidden_size,)) for each in (shape, had))
                raise UsageError(
                    explain(f"rows of another shape at {site}", got=got, expected=f"{expected}, as the first")
                )
        self._sites.update(sites)
        if shape:
            files.shapes.update(dict.fromkeys(sites, shape))
        kinds: dict[str, list[int]] = {}
        for index, site in enumerate(sites):
            kinds.setdefault(files.dtype_of(site), []).append(index)
        return kinds
