"""Losses: the rows of a request that did not arrive, and the reasons.

Rows are lost in runs: a worker without room has none for the next step either. So lost rows are kept as gaps: runs of
positions at the same sites, which grow while positions follow each other. At most `limits.GAPS_MAX` gaps are kept for
each reason; further rows are only counted.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from capflow import limits
from capflow.capture.frame import Chunk, Dropped, FrameHeader, Gap
from capflow.capture.places import Places
from capflow.capture.site import Site, layers_by_hook

MEANT = frozenset({"skipped", "not_tapped"})
"""Reasons for which live consumers miss rows by their own choice; these are not losses."""

# Gaps in one message; `Dropped` has all of them.
_GAPS_SHOWN_MAX = 4


class _Reason:
    """The rows lost for one reason: their number, and their gaps as `[start, stop]` by sites."""

    __slots__ = ("gaps", "rows", "runs")

    def __init__(self) -> None:
        self.rows = 0
        self.gaps: dict[tuple[str, ...], list[list[int]]] = {}
        # The number of runs in `gaps`.
        self.runs = 0

    def add(self, sites: tuple[str, ...], start: int, stop: int) -> None:
        runs = self.gaps.get(sites)
        if runs and runs[-1][1] == start:
            runs[-1][1] = stop
        elif self.runs < limits.GAPS_MAX:
            self.gaps.setdefault(sites, []).append([start, stop])
            self.runs += 1


class Losses:
    """The rows of one request that were lost, by reason."""

    __slots__ = ("_reasons",)

    def __init__(self) -> None:
        self._reasons: dict[str, _Reason] = {}

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def add(self, reason: str, sites: Sequence[Site], start: int, stop: int) -> None:
        """Add positions `start .. stop` at each of some sites."""
        lost = self._of(reason)
        lost.rows += len(sites) * (stop - start)
        lost.add(tuple(map(str, sites)), start, stop)

    def count(self, reason: str, rows: int) -> None:
        """Add a number of rows whose places are unknown."""
        if rows:
            self._of(reason).rows += rows

    def update(self, dropped: Iterable[Dropped]) -> None:
        """Add losses that an earlier party noted."""
        for each in dropped:
            lost = self._of(each.reason)
            lost.rows += each.rows
            for gap in each.gaps:
                lost.add(gap.sites, gap.start, gap.stop)

    def blame(self, reason: str, rows: int, *, instead_of: str) -> None:
        """Move `rows` of the rows lost for the reason `instead_of` to `reason`.

        Their places move if these are all the rows.
        """
        before = self._reasons.pop(instead_of)
        lost = self._of(reason)
        lost.rows += rows
        if rows == before.rows:
            for sites, runs in before.gaps.items():
                for run in runs:
                    lost.add(sites, *run)
        else:
            self._of(instead_of).rows = before.rows - rows

    @property
    def rows(self) -> Counter[str]:
        """The number of rows for each reason."""
        return Counter({reason: lost.rows for reason, lost in self._reasons.items()})

    @property
    def dropped(self) -> tuple[Dropped, ...]:
        """The losses in the form of results, one entry for each reason."""
        return tuple(
            Dropped(
                lost.rows,
                reason,
                tuple(Gap(sites, *run) for sites, runs in lost.gaps.items() for run in runs),
            )
            for reason, lost in sorted(self._reasons.items())
        )

    def _of(self, reason: str) -> _Reason:
        return self._reasons.setdefault(reason, _Reason())


def note_frame(into: dict[str, Losses], header: FrameHeader, reason: str) -> None:
    """Add the rows of a frame to the losses of its requests."""
    for block in header.blocks:
        for request, start, length, _ in block.spans:
            losses = into.setdefault(header.requests[request].id, Losses())
            losses.add(reason, block.sites, start, start + length)


def note_chunk(losses: Losses, chunk: Chunk, reason: str) -> None:
    """Add the rows of a chunk."""
    losses.add(reason, chunk.sites, chunk.start, chunk.start + chunk.rows.shape[1])


def lessened(header: FrameHeader, lost: dict[str, Losses]) -> FrameHeader:
    """Return a header whose ends of requests include the rows lost on the way.

    lost: the losses of each request of the worker that sent the header; entries of the ended requests are removed.
    """
    if not any(finished.id in lost for finished in header.finished):
        return header
    ends = []
    for finished in header.finished:
        if (losses := lost.pop(finished.id, None)) is not None:
            rows = max(0, finished.rows - losses.rows.total())
            losses.update(finished.dropped)
            finished = msgspec.structs.replace(finished, rows=rows, dropped=losses.dropped)  # noqa: PLW2901
        ends.append(finished)
    return msgspec.structs.replace(header, finished=tuple(ends))


def narrowed(dropped: Iterable[Dropped], wanted: Callable[[str], Places | None]) -> tuple[Dropped, ...]:
    """Return the lost rows that one consumer wants. Rows whose places are unknown are all included.

    wanted: returns the positions wanted at a site, given as `HOOK:LAYER`; None where none are wanted.
    """
    mine = []
    # Many gaps are at the same sites.
    at = functools.cache(wanted)
    for each in dropped:
        rows = max(0, each.rows - sum(len(gap.sites) * (gap.stop - gap.start) for gap in each.gaps))
        gaps = []
        for gap in each.gaps:
            sites = tuple(site for site in gap.sites if at(site) is not None)
            alike = Counter(places for site in gap.sites if (places := at(site)) is not None)
            if count := sum(times * places.count(gap.start, gap.stop) for places, times in alike.items()):
                rows += count
                gaps.append(Gap(sites, gap.start, gap.stop))
        if rows:
            mine.append(Dropped(min(rows, each.rows), each.reason, tuple(gaps)))
    return tuple(mine)


def described(dropped: Dropped) -> str:
    """Return a description for people: `36 rows lost: queue_full, at post_block:0-17 positions 5..6`.

    It names the places that are known, `_GAPS_SHOWN_MAX` gaps at most.
    """
    gaps = dropped.gaps[:_GAPS_SHOWN_MAX]
    places = [f"at {_sites(gap.sites)} {_positions(gap)}" for gap in gaps]
    rows = sum(len(gap.sites) * (gap.stop - gap.start) for gap in gaps)
    if places and rows < dropped.rows:
        places.append(f"and {dropped.rows - rows} rows elsewhere")
    return ", ".join([f"{dropped.rows} rows lost: {dropped.reason}", *places])


def _positions(gap: Gap) -> str:
    return f"position {gap.start}" if gap.stop == gap.start + 1 else f"positions {gap.start}..{gap.stop - 1}"


def _sites(sites: Sequence[str]) -> str:
    """Return sites in a short form: `post_block:0-17 mlp_in:3`."""
    texts = []
    for hook, layers in layers_by_hook(Site.parse(site) for site in sites).items():
        runs: list[list[int]] = []
        for layer in sorted(layers):
            if runs and runs[-1][1] == layer - 1:
                runs[-1][1] = layer
            else:
                runs.append([layer, layer])
        texts += [f"{hook}:{first}" if first == last else f"{hook}:{first}-{last}" for first, last in runs]
    return " ".join(texts)


class LossLog:
    """Logs the lost rows of requests and the reasons, and failed requests; safe for any number of threads.

    It writes at most `limits.LOSSES_LOGGED_MAX` lines a second. The next line has the number of requests left out.

    who: begins each line, such as `consumer log`.
    fields: added to each record, beside `event`, `request` and `dropped`.
    """

    def __init__(self, logger: logging.Logger, who: str, **fields: Any) -> None:
        self._logger, self._who, self._fields = logger, who, fields
        # Guards the fields below.
        self._lock = threading.Lock()
        # The start of the second in which lines are counted.
        self._since = 0.0
        # Lines written in this second.
        self._lines = 0
        # Requests left out since the last line.
        self._left_out = 0

    def tell(self, request: str, dropped: Sequence[Dropped], **fields: Any) -> None:
        """Log the lost rows of a request that is over; nothing if there are none.

        fields: added to this record.
        """
        if dropped:
            record = {"event": "rows_lost", "request": request, "dropped": msgspec.to_builtins(dropped), **fields}
            self._write_lost({request: dropped}, "", record)

    def tell_late(self, lost: Mapping[str, Sequence[Dropped]], engine: str) -> None:
        """Log in one line what requests of an engine lost after their results were given; nothing if they lost nothing.

        lost: the losses of each request.
        """
        if lost:
            record = {"event": "rows_lost_late", "engine": engine, "requests": msgspec.to_builtins(lost)}
            self._write_lost(lost, f"engine {engine}, after the results: ", record)

    def tell_failed(self, request: str, error: str, **fields: Any) -> None:
        """Log the error in a consumer's own result of a request.

        fields: added to this record.
        """
        record = {"event": "request_failed", "request": request, "error": error, **fields}
        self._write(logging.WARNING, f"request {request}: {error}", 1, record)

    def _write_lost(self, lost: Mapping[str, Sequence[Dropped]], before: str, record: dict[str, Any]) -> None:
        meant = {each.reason for dropped in lost.values() for each in dropped} <= MEANT
        text = "; ".join(f"request {name}: {'; '.join(map(described, dropped))}" for name, dropped in lost.items())
        self._write(logging.INFO if meant else logging.WARNING, before + text, len(lost), record)

    def _write(self, level: int, text: str, requests: int, record: dict[str, Any]) -> None:
        """Write a line about a number of requests, or count them as left out."""
        with self._lock:
            now = time.monotonic()
            if now - self._since >= 1:
                self._since, self._lines = now, 0
            if self._lines >= limits.LOSSES_LOGGED_MAX:
                self._left_out += requests
                return
            self._lines += 1
            left_out, self._left_out = self._left_out, 0
        if left_out:
            text += f" ({left_out} earlier requests were left out)"
        self._logger.log(level, "%s: %s", self._who, text, extra=record | self._fields)
