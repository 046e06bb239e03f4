"""Losses: which rows of a request did not arrive, and why.

Rows are lost in runs: a worker that has no room has none for the next step either. So what is kept of them is gaps, runs of positions at
the same sites, which grow as positions follow each other. Of each reason `limits.GAPS_MAX` gaps are kept; rows beyond these are
counted, and their places are not known any more.
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
"""Reasons for which live consumers do not get rows, as they ask: these count as no loss."""

_GAPS_TOLD_MAX = 4  # in a message; all that are kept are in `Dropped`


class _Reason:
    """What was lost for one reason: how many rows, and their gaps as `[start, stop]` by sites."""

    __slots__ = ("gaps", "rows", "runs")

    def __init__(self) -> None:
        self.rows = 0
        self.gaps: dict[tuple[str, ...], list[list[int]]] = {}
        # In `gaps`.
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
        """Note that positions `start .. stop` were lost at each of some sites."""
        lost = self._of(reason)
        lost.rows += len(sites) * (stop - start)
        lost.add(tuple(map(str, sites)), start, stop)

    def count(self, reason: str, rows: int) -> None:
        """Note that rows were lost of which it is not known where they were."""
        if rows:
            self._of(reason).rows += rows

    def update(self, dropped: Iterable[Dropped]) -> None:
        """Note what someone before noted."""
        for each in dropped:
            lost = self._of(each.reason)
            lost.rows += each.rows
            for gap in each.gaps:
                lost.add(gap.sites, gap.start, gap.stop)

    def blame(self, reason: str, rows: int, *, instead_of: str) -> None:
        """Give some of the rows of one reason another: with their places when these are all, else without."""
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
        """How many rows, by reason."""
        return Counter({reason: lost.rows for reason, lost in self._reasons.items()})

    @property
    def dropped(self) -> tuple[Dropped, ...]:
        """What a result says of it, a reason each."""
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
    """Note, by request, that the rows of a frame were lost."""
    for block in header.blocks:
        for request, start, length, _ in block.spans:
            losses = into.setdefault(header.requests[request].id, Losses())
            losses.add(reason, block.sites, start, start + length)


def note_chunk(losses: Losses, chunk: Chunk, reason: str) -> None:
    """Note that a chunk was lost."""
    losses.add(reason, chunk.sites, chunk.start, chunk.start + chunk.rows.shape[1])


def lessened(header: FrameHeader, lost: dict[str, Losses]) -> FrameHeader:
    """Return a header whose ends of requests say which of their rows were lost on the way.

    lost: by request, of the worker that sent the header; the entries of these requests are removed.
    """
    if not any(finished.id in lost for finished in header.finished):
        return header
    told = []
    for finished in header.finished:
        if (losses := lost.pop(finished.id, None)) is not None:
            rows = max(0, finished.rows - losses.rows.total())
            losses.update(finished.dropped)
            finished = msgspec.structs.replace(finished, rows=rows, dropped=losses.dropped)  # noqa: PLW2901
        told.append(finished)
    return msgspec.structs.replace(header, finished=tuple(told))


def narrowed(dropped: Iterable[Dropped], wanted: Callable[[str], Places | None]) -> tuple[Dropped, ...]:
    """Return the lost rows that one consumer wants; rows of which the place is not known may be among them, and are.

    wanted: returns the positions wanted at a site, given as `HOOK:LAYER`; None where none are.
    """
    mine = []
    at = functools.cache(wanted)  # many gaps are at the same sites
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
    """Return what a person is told: `36 rows lost: queue_full, at post_block:0-17 positions 5..6`; as many places as are known, and few of many."""
    told = [f"at {_sites(gap.sites)} {_positions(gap)}" for gap in dropped.gaps[:_GAPS_TOLD_MAX]]
    known = sum(len(gap.sites) * (gap.stop - gap.start) for gap in dropped.gaps[:_GAPS_TOLD_MAX])
    if told and known < dropped.rows:
        told.append(f"and {dropped.rows - known} rows elsewhere")
    return ", ".join([f"{dropped.rows} rows lost: {dropped.reason}", *told])


def _positions(gap: Gap) -> str:
    return f"position {gap.start}" if gap.stop == gap.start + 1 else f"positions {gap.start}..{gap.stop - 1}"


def _sites(sites: Sequence[str]) -> str:
    """Return sites in few words: `post_block:0-17 mlp_in:3`."""
    said = []
    for hook, layers in layers_by_hook(Site.parse(site) for site in sites).items():
        runs: list[list[int]] = []
        for layer in sorted(layers):
            if runs and runs[-1][1] == layer - 1:
                runs[-1][1] = layer
            else:
                runs.append([layer, layer])
        said += [f"{hook}:{first}" if first == last else f"{hook}:{first}-{last}" for first, last in runs]
    return " ".join(said)


class LossLog:
    """Says which rows of a request were lost, and why; for any number of threads.

    who: begins each line, such as `consumer log`.
    fields: of each record, beside `event`, `request` and `dropped`. Of one second `limits.LOSSES_LOGGED_MAX` lines are
        said; how many were left out stands in the next.
    """

    def __init__(self, logger: logging.Logger, who: str, **fields: Any) -> None:
        self._logger, self._who, self._fields = logger, who, fields
        # Guards the next.
        self._lock = threading.Lock()
        # When the second began in which lines are counted.
        self._since = 0.0
        # In it.
        self._said = 0
        # Since a line was said.
        self._left_out = 0

    def tell(self, request: str, dropped: Sequence[Dropped], **fields: Any) -> None:
        """Say what was lost of a request that is over; nothing when nothing was.

        fields: of this record.
        """
        if dropped:
            told = {"event": "rows_lost", "request": request, "dropped": msgspec.to_builtins(dropped), **fields}
            self._say({request: dropped}, "", told)

    def tell_late(self, lost: Mapping[str, Sequence[Dropped]], engine: str) -> None:
        """Say in one line what was lost of requests of an engine that had their results before, by request; nothing when nothing was."""
        if lost:
            told = {"event": "rows_lost_late", "engine": engine, "requests": msgspec.to_builtins(lost)}
            self._say(lost, f"engine {engine}, after the results: ", told)

    def _say(self, lost: Mapping[str, Sequence[Dropped]], before: str, told: dict[str, Any]) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._since >= 1:
                self._since, self._said = now, 0
            if self._said >= limits.LOSSES_LOGGED_MAX:
                self._left_out += len(lost)
                return
            self._said += 1
            left_out, self._left_out = self._left_out, 0
        meant = {each.reason for dropped in lost.values() for each in dropped} <= MEANT
        text = "; ".join(f"request {name}: {'; '.join(map(described, dropped))}" for name, dropped in lost.items())
        if left_out:
            text += f" ({left_out} requests before it are not told here)"
        level = logging.INFO if meant else logging.WARNING
        self._logger.log(level, "%s: %s%s", self._who, before, text, extra=told | self._fields)
