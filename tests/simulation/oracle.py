"""What honest workers sent, and the invariants that must be true at the end.

A row is a hash of its engine, request, site and position, so that a misplaced row, or one of another request, is seen
at once. Invariants, for every request of an honest engine and every consumer:

* each stored row is right, and stored once;
* a result `ok` means that every row is stored;
* rows that are missing although their worker did not die with them are named in the request's results, with a reason;
* an honest peer is never refused or cut off.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from capflow.capture.dtypes import DTYPES
from capflow.capture.losses import Losses

FAULTS_KEPT = 20  # of one run


def seed_of(engine, request, site):
    """Return the number that the rows of a request at a site are made from."""
    return zlib.crc32(f"{engine}/{request}/{site.hook}/{site.layer}".encode()) % 65_521


def rows_of(engine, request, site, start, count, hidden, dtype="float32"):
    """Return rows `[count, hidden]` at positions `start ..`; exact in float32."""
    first = (seed_of(engine, request, site) + 7919 * np.arange(start, start + count)) % 65_521
    return (first[:, None] * 8 + np.arange(hidden) % 8).astype(DTYPES[dtype])


@dataclass
class Sent:
    """A request of one life of an honest engine; rows are sites times positions.

    sites: by pipeline stage.
    computed: the computed positions, by stage.
    sent: the rows that the link took, by stage.
    lost: the rows that the link did not take, by stage.
    lasts: the number of the last frame with rows, by stage.
    ends: the number of the frame with its end, by stage.
    ending: its end was sent, or was being sent when its worker died.
    cut: its worker died before the hub had acknowledged all of it.
    large: the number of rows in frames that an inbox may refuse for their size.
    kept: a worker that died left on disk what it had promised of the request.
    late: the next worker died before it had sent all of that.
    """

    engine: str
    boot: str
    id: str
    hidden: int
    sites: dict
    prompt_length: int
    computed: dict = field(default_factory=Counter)
    sent: dict = field(default_factory=Counter)
    lost: dict = field(default_factory=dict)
    lasts: dict = field(default_factory=dict)
    ends: dict = field(default_factory=dict)
    ending: bool = False
    cut: bool = False
    large: int = 0
    kept: bool = False
    late: bool = False

    @property
    def key(self):
        """Engine and request."""
        return self.engine, self.id

    def losses(self, stage):
        """Return the rows that a stage could not send."""
        return self.lost.setdefault(stage, Losses())

    def lost_at(self, only=None):
        """Return how many rows its workers could not send, by reason.

        only: count only rows at this site, and rows whose place is unknown.
        """
        lost = Counter()
        for dropped in (dropped for losses in self.lost.values() for dropped in losses.dropped):
            others = [len({*gap.sites} - {str(only)}) * (gap.stop - gap.start) for gap in dropped.gaps if only]
            lost[dropped.reason] += dropped.rows - sum(others)
        return +lost

    def rows(self, only=None):
        """Return every row that was computed, as `(site, position)`; only: at this site."""
        return {
            (site, at)
            for stage, sites in self.sites.items()
            for site in sites
            for at in range(self.computed[stage])
            if only in (None, site)
        }


@dataclass
class Took:
    """What one consumer has of a request: how often each `(site, position)`, and the results, oldest first."""

    rows: Counter = field(default_factory=Counter)
    results: list = field(default_factory=list)


class Oracle:
    """The truth, and what consumers have of it. fits_bytes: of rows, in a frame that every inbox takes."""

    def __init__(self, world, fits_bytes):
        self.fits_bytes = fits_bytes
        self.world = world
        # By engine and request.
        self.sent = {}
        # By consumer, and by life of the hub where the consumer does not outlive it.
        self.took = defaultdict(lambda: defaultdict(Took))
        self.off = []
        self.counts = Counter()
        # Reasons for which rows may be lost on the way to a consumer that outlives its hub.
        self.excused = set()

    def fail(self, text):
        """Record a fault."""
        self.counts["off"] += 1
        if len(self.off) < FAULTS_KEPT:
            self.off.append(text)
            self.world.trace(f"OFF {text}")

    def check_rows(self, consumer, frame):
        """Check the rows of a frame that a consumer got; return how often each `(request, site, position)` occurs."""
        header = frame.header
        given = Counter()
        nbytes = 0
        for chunk in frame.chunks():
            request, count = chunk.request.id, chunk.rows.shape[1]
            nbytes += chunk.rows.nbytes
            honest = (header.engine, request) in self.sent
            for number, site in enumerate(chunk.sites):
                if honest:
                    expected = rows_of(
                        header.engine, request, site, chunk.start, count, header.hidden_size, header.dtype
                    )
                    if chunk.rows[number].tobytes() != expected.tobytes():
                        self.fail(
                            f"{consumer}: wrong rows of {header.engine}/{request} at {site} {chunk.start}+{count}"
                        )
                for at in range(chunk.start, chunk.start + count):
                    given[request, site, at] += 1
        if nbytes > max(frame.nbytes, 1):
            self.fail(f"{consumer}: given {nbytes} bytes of a frame of {frame.nbytes} of {header.engine}")
        return given

    def check(self, lasting):
        """Check everything at the end of a run.

        lasting: consumers whose storage outlives kills, with the one site that they want, or None for all.
        """
        for (consumer, life), took in self.took.items():
            for key, had in took.items():
                sent = self.sent.get(key)
                if sent is not None:
                    name = consumer if consumer in lasting else f"{consumer} in life {life}"
                    self._check_took(name, sent, had, sent.rows(lasting.get(consumer)))
        for sent in self.sent.values():
            self.counts["requests"] += 1
            self.counts["rows"] += len(sent.rows())
            for consumer, only in lasting.items():
                if computed := sent.rows(only):
                    self._check_lasting(consumer, sent, self.took[consumer, 0][sent.key], computed, only)

    def _check_took(self, consumer, sent, had, computed):
        name = f"{consumer}: {sent.engine}/{sent.id}"
        twice = [row for row, count in had.rows.items() if count > 1]
        if twice:
            self.fail(f"{name}: {len(twice)} rows twice, {twice[0]}")
        strange = had.rows.keys() - computed
        if strange:
            self.fail(f"{name}: {len(strange)} rows that nobody computed, {min(strange)}")
        missing = computed - had.rows.keys()
        if missing and any(result.status == "ok" for result in had.results):
            self.fail(f"{name}: ok, and {len(missing)} of {len(computed)} rows are missing, {min(missing)}")

    def _check_lasting(self, consumer, sent, had, computed, only):
        name = f"{consumer}: {sent.engine}/{sent.id}"
        missing = computed - had.rows.keys()
        named = Counter()
        for result in had.results:
            for dropped in result.dropped:
                named[dropped.reason] = max(named[dropped.reason], dropped.rows)
        if sent.cut:
            self._check_cut(name, sent, had, computed, named)
            return
        if not had.results:
            self.fail(f"{name}: no result")
            return
        own = sent.lost_at(only)
        # A hub that is killed forgets that it refused a frame: its rows are then those of an earlier hub.
        own += Counter(too_large=sent.large, earlier_hub=sent.large)
        failed = any(result.status in ("error", "partial_error") for result in had.results)
        if missing and not failed:
            self.fail(f"{name}: {len(missing)} rows are missing, and results are {[r.status for r in had.results]}")
        if len(missing) > named.total() and not any(result.error for result in had.results):
            self.fail(f"{name}: {len(missing)} rows are missing, of which {dict(named)} are named")
        if len(missing) > own.total() and not self.excused:
            self.fail(f"{name}: {len(missing)} rows are lost, which no fault is to lose: {had.results[-1].error}")
        for reason, count in named.items():
            if count > own[reason] and reason not in self.excused:
                self.fail(f"{name}: {count} rows lost for {reason}, without a cause: {had.results[-1].error}")
        if failed and not missing and not own and not self.excused:
            self.fail(f"{name}: {had.results[-1].status}, though nothing is missing: {had.results[-1].error}")

    def _check_cut(self, name, sent, had, computed, named):
        """Check what is left of a request whose worker died."""
        if any(result.status == "ok" for result in had.results) and not sent.ending:
            self.fail(f"{name}: ok, and its worker died before its end")
        if sent.kept and sum(sent.sent.values()) and not had.results:
            self.fail(f"{name}: nothing tells of it, and its worker left what it promised")
        elif sent.kept and len(computed) == len(sent.rows()):
            short = sum(sent.sent.values()) - len(computed & had.rows.keys())
            given_up = sent.late and any("engine is gone" in (result.error or "") for result in had.results)
            if short > named.total() and not given_up:
                self.fail(f"{name}: {short} rows died with their worker, of which {dict(named)} are named")
