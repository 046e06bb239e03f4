"""The oracle of `tests.chaos`: it reads the engine side's log, and compares what consumers made durable with it.

A row is promised when the hub acknowledged its frame. It must be stored once, with its bytes. A row that was sent but
not acknowledged may be missing, if the record of its request does not say `ok`. Nothing else may be stored.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import numpy as np

import capflow
from tests.chaos.rows import SITES, rows_of, scores_of, seed_of, token_of

TROUBLES_SHOWN_MAX = 20


@dataclass
class Sent:
    """What was sent of a request.

    frames: the frame's number in its engine's count, the first position and the number of positions.
    ended: the frame of its end, its number of tokens, and its status.
    """

    engine: str
    prompt_length: int = 0
    frames: list[tuple[int, int, int]] = field(default_factory=list)
    ended: tuple[int, int, str] | None = None


@dataclass
class Record:
    """The record of a request: its positions by site, its status and its error."""

    positions: dict[int, set[int]]
    status: str
    error: str


class Log:
    """The engine side's log, read as it grows."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._fd = os.open(path, os.O_RDONLY)
        self._rest = b""
        self.requests: dict[str, Sent] = {}
        # The frame up to which the hub acknowledged all, by engine.
        self.acked: Counter[str] = Counter()
        # The same for spilled frames, which a later engine sends.
        self.left: Counter[str] = Counter()
        self.spilled: dict[str, set[int]] = defaultdict(set)
        # When each unacknowledged frame was sent.
        self.sent_at: dict[str, dict[int, float]] = defaultdict(dict)
        # Engine, when a frame was sent, when it was acknowledged.
        self.fresh: list[tuple[str, float, float]] = []
        self.frames: Counter[str] = Counter()
        # Refused frames by reason.
        self.refused: Counter[str] = Counter()
        self.ended: set[str] = set()

    def read(self) -> None:
        """Read the lines that were written since the last call."""
        while block := os.read(self._fd, 1 << 20):
            *lines, self._rest = (self._rest + block).split(b"\n")
            for line in lines:
                self._heed(*line.decode().split())

    def _heed(self, event: str, engine: str, *rest: str) -> None:
        if event == "send":
            self._send(engine, int(rest[0]), float(rest[1]), rest[2], rest[3])
        elif event == "refused":
            self.refused[rest[1]] += 1
            self._unsend(engine, int(rest[0]))
        elif event == "acked":
            self.acked[engine], now = int(rest[0]), float(rest[1])
            waiting = self.sent_at[engine]
            for seq in [seq for seq in waiting if seq <= self.acked[engine]]:
                self.fresh.append((engine, waiting.pop(seq), now))
        elif event == "left":
            self.left[engine] = int(rest[0])
        elif event == "spilled":
            self.spilled[engine].add(int(rest[0]))
        elif event == "ended":
            self.ended.add(engine)

    def _send(self, engine: str, seq: int, at: float, sent: str, ended: str) -> None:
        self.frames[engine] = seq
        self.sent_at[engine][seq] = at
        for part in [] if sent == "-" else sent.split(","):
            name, prompt_length, start, length = part.split(":")
            request = self.requests.setdefault(name, Sent(engine))
            request.prompt_length = int(prompt_length)
            request.frames.append((seq, int(start), int(length)))
        for part in [] if ended == "-" else ended.split(","):
            name, computed_length, status = part.split(":")
            self.requests.setdefault(name, Sent(engine)).ended = seq, int(computed_length), status

    def _unsend(self, engine: str, seq: int) -> None:
        self.frames[engine] = seq - 1
        self.sent_at[engine].pop(seq, None)
        for request in self.requests.values():
            if request.engine == engine:
                request.frames = [frame for frame in request.frames if frame[0] != seq]
                if request.ended is not None and request.ended[0] == seq:
                    request.ended = None

    def is_acked(self, engine: str, seq: int) -> bool:
        """Return whether the hub acknowledged a frame, to its engine or to the one that sent its spilled frames."""
        return seq <= self.acked[engine] or (seq <= self.left[engine] and seq in self.spilled[engine])

    def acked_at(self, since: float, engine: str | None = None) -> float | None:
        """Return when the first frame sent after `since` (by `engine`, if given) was acknowledged; None if none was."""
        return min((at for who, sent, at in self.fresh if sent >= since and engine in (None, who)), default=None)

    def forget_fresh(self) -> None:
        """Forget the acknowledgements so far."""
        self.fresh.clear()


class Oracle:
    """Collects faults, by kind: `lost`, `repeated` and `wrong` rows; `unnamed` requests, whose record hides a gap."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.counts: Counter[str] = Counter()
        self.troubles: list[str] = []

    def off(self, kind: str, message: str, count: int = 1) -> None:
        self.counts[kind] += count
        if len(self.troubles) < TROUBLES_SHOWN_MAX:
            self.troubles.append(f"{kind}: {message}")

    def judge(self, records: dict[str, Record], where: str, sites: list[int]) -> None:
        """Compare the records with what was sent."""
        for request_id, request in self.log.requests.items():
            record = records.get(request_id)
            sent = {position for _, start, length in request.frames for position in range(start, start + length)}
            promised = {
                position
                for seq, start, length in request.frames
                if self.log.is_acked(request.engine, seq)
                for position in range(start, start + length)
            }
            self.counts["rows promised"] += len(promised) * len(sites)
            if record is None:
                if promised:
                    self.off("lost", f"{where}: all {len(promised)} of {request_id}", len(promised) * len(sites))
                elif sent:
                    self.counts["requests of which nothing arrived"] += 1
                continue
            missing = 0
            for site in sites:
                had = record.positions.get(site, set())
                if lost := promised - had:
                    self.off(
                        "lost", f"{where}: {request_id} {SITES[site]} {sorted(lost)[:5]}… ({record.error})", len(lost)
                    )
                if extra := had - sent:
                    self.off(
                        "wrong", f"{where}: {request_id} {SITES[site]} {sorted(extra)[:5]}…, never sent", len(extra)
                    )
                missing += len(sent - had)
            ended = request.ended is not None and self.log.is_acked(request.engine, request.ended[0])
            self.counts["rows in named gaps"] += missing
            if missing and record.status == "ok":
                self.off("unnamed", f"{where}: {request_id} lacks {missing} rows and says ok")
            if ended and not missing and record.status != "ok":
                self.off("unnamed", f"{where}: {request_id} is whole and says {record.status}: {record.error}")
        for request_id in records.keys() - self.log.requests.keys():
            self.off("wrong", f"{where}: {request_id} was never sent")


class FilesystemCheck:
    """Checks each request's files when they are published, and removes the files of rows, so that the disk has room.

    keep: remove no files.
    forget: remove the whole directory of a request.
    """

    def __init__(self, root: Path, oracle: Oracle, *, keep: bool = False, forget: bool = False) -> None:
        self.root, self.oracle, self.keep, self.forget = root, oracle, keep, forget
        self.records: dict[str, Record] = {}
        self._seen: set[str] = set()

    def sweep(self) -> None:
        """Check what was published since the last call."""
        names = {path.name for path in self.root.glob("[!.]*")}
        dataset = capflow.open(self.root) if names else None
        for name in sorted(names - self._seen):
            self._seen.add(name)
            assert dataset is not None
            self._check(name, dataset)
            if self.forget:
                shutil.rmtree(self.root / name)
                self._seen.discard(name)

    def _check(self, name: str, dataset: capflow.Dataset) -> None:
        request_id, again, _ = name.partition("~")
        capture = dataset.captures(request_id, look=False)[-1 if again else 0]
        if again or request_id in self.records:
            self.oracle.off("repeated", f"filesystem: {name}", capture.sidecar.rows)
            return
        capture.verify()
        seed, positions = seed_of(request_id), {}
        for site in capture.sites:
            number = SITES.index(site)
            rows, at, tokens = capture[site]
            positions[number] = set(at.tolist())
            if twice := len(at) - len(positions[number]):
                self.oracle.off("repeated", f"filesystem: {name} {site}", twice)
            if not len(at):
                continue
            first = int(at[0])
            expected = rows_of(seed, number, first, int(at.max()) + 1, rows.shape[1])[at - first]
            bad = (rows.view(np.uint32) != expected.view(np.uint32)).any(1)
            bad |= tokens != np.array([token_of(seed, position) for position in at.tolist()])
            if bad.any():
                self.oracle.off("wrong", f"filesystem: {name} {site} at {at[bad][:5].tolist()}", int(bad.sum()))
            self.oracle.counts["rows checked"] += len(at)
        self.records[request_id] = Record(positions, capture.status, capture.error or "")
        if not self.keep:
            for file in capture.path.glob("*.safetensors"):
                file.unlink()

    def finish(self) -> None:
        """Judge all records."""
        self.sweep()
        self.oracle.judge(self.records, "filesystem", list(range(len(SITES))))
        if not self.keep:
            shutil.rmtree(self.root, ignore_errors=True)


class DuckdbCheck:
    """Checks the tokens and the scores in a DuckDB file, when all is over."""

    site = 0  # of the probe

    def __init__(self, path: Path, oracle: Oracle) -> None:
        self.path, self.oracle = path, oracle
        self.records: dict[str, Record] = {}

    def sweep(self) -> None:
        """Nobody can read the file while the hub has it."""

    def finish(self) -> None:
        """Check everything and judge it."""
        with duckdb.connect(str(self.path), read_only=True) as db:
            records = db.execute("SELECT request_id, capture_status FROM requests ORDER BY rowid").fetchall()
            for request_id, status in records:
                if request_id in self.records:
                    self.oracle.off("repeated", f"duckdb: {request_id} in requests")
                self.records[request_id] = Record({self.site: set()}, status, status)
            for table, column in (("tokens", "token_id"), ("scores", "score")):
                self._check(db, table, column)
        self.oracle.judge(self.records, "duckdb", [self.site])

    def _check(self, db: duckdb.DuckDBPyConnection, table: str, column: str) -> None:
        query = f"SELECT request_id, list(position), list({column}) FROM {table} GROUP BY request_id"
        for request_id, listed, values in db.execute(query).fetchall():
            at, seed = np.array(listed), seed_of(request_id)
            positions = set(listed)
            if twice := len(at) - len(positions):
                self.oracle.off("repeated", f"duckdb: {table} of {request_id}", twice)
            if table == "tokens":
                expected = np.array([token_of(seed, position) for position in listed])
            else:
                first = int(at.min())
                expected = scores_of(seed, self.site, first, int(at.max()) + 1)[at - first]
            if (bad := np.array(values) != expected).any():
                self.oracle.off("wrong", f"duckdb: {table} of {request_id} at {at[bad][:5].tolist()}", int(bad.sum()))
            self.oracle.counts["rows checked"] += len(at)
            record = self.records.get(request_id)
            if record is None:  # written and never ended: no result said that they are there
                self.oracle.off("unnamed", f"duckdb: {table} of {request_id}, which is not in requests")
                continue
            if table == "tokens":
                record.positions[self.site] = positions
            else:
                record.positions[self.site] &= positions
