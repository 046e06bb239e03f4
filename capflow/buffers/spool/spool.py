"""The spool: what appends, reads and acknowledges, and the thread that syncs; `capflow.buffers.spool` says what lies on the disk."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from capflow import limits
from capflow.buffers.spool import items
from capflow.buffers.spool.cursor import Cursor, CursorFile
from capflow.buffers.spool.files import Files
from capflow.buffers.spool.reader import Lost, Reader, Record
from capflow.buffers.spool.segments import Segments
from capflow.buffers.spool.spare import Spare
from capflow.buffers.spool.survey import BESIDE, CURSOR, LOCK, heads, opened, survey, unreadable
from capflow.errors import CapflowError, explain

logger = logging.getLogger("capflow.spool")

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RETRY_S = 1.0  # after a disk failed, until it is tried again
_REMOVED_MAX = 10  # how often a directory may be removed by its last writer while it is opened
_CLOSE_S = 30.0  # how long `close` waits for a disk that does not answer


class FullError(CapflowError):
    """The record was not taken.

    reason: `spool_full`, `disk_full` or `disk_failed`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class InUseError(CapflowError):
    """Another process has the directory."""


class _Entry(NamedTuple):
    """A record that is not durable."""

    head: bytes
    body: memoryview
    nbytes: int


class Spool:
    """A bounded queue of records on disk, from `open` to `close`.

    Any thread appends, one reads, one acknowledges, and the spool's own syncs, frees and tries again what failed.
    bytes_max bounds the segments together. unsynced_bytes_max bounds what is kept in memory until it is durable. spare_bytes are kept on the disk
    besides, for records that are put in as `needed`. on_synced(number) is called on the spool's thread when every record up to there is durable.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        bytes_max: int = limits.SPOOL_BYTES_DEFAULT,
        segment_bytes: int | None = None,
        unsynced_bytes_max: int = limits.SPOOL_UNSYNCED_BYTES_MAX,
        spare_bytes: int = 0,
        on_synced: Callable[[int], None] | None = None,
        files: Files | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.unsynced_bytes_max = unsynced_bytes_max
        # Of what is logged.
        self._where = {"directory": str(self.directory)}
        self._on_synced = on_synced
        self._files = files or Files()
        # The reading thread's.
        self._reader = Reader(self._files)
        # The spool's thread's, from `open` to `close`.
        self._cursor = CursorFile(self._files, self.directory / CURSOR)
        # From `open` to the end of `close`.
        self._lock_fd: int | None = None
        # Guards what follows; notified when any of it changed.
        self._changed = threading.Condition()
        segment_bytes = segment_bytes or min(limits.SEGMENT_BYTES_MAX, max(1, bytes_max // 8))
        self._segments = Segments(self._files, self.directory, bytes_max, segment_bytes)
        self._spare = Spare(self._files, self.directory, spare_bytes)
        # By number, rising; emptied by syncs.
        self._unsynced: dict[int, _Entry] = {}
        # The disk's, from a failed sync until one that works.
        self._failure: OSError | None = None
        self._next_append = 1
        self._next_read = 1
        # By `acknowledge`.
        self._acked = 0
        # Why the thread's last attempt at anything failed; written by it.
        self._failing: OSError | None = None
        # Why the last record was not written, and when.
        self._refused: tuple[OSError, float] | None = None
        # What `on_synced` was told last; the thread's alone.
        self._told = 0
        self._closing = False
        # Set with `_closing`, for the thread while it rests.
        self._ended = threading.Event()
        # From `open` to `close`.
        self._thread: threading.Thread | None = None
        # For others to read.
        # Every record up to here is durable.
        self.synced_through = 0
        # Every record up to here is done with, durably.
        self.acknowledged_through = 0
        self.unsynced_bytes = 0
        self.records_lost = 0
        self.syncs = 0
        # To write.
        self.failures = 0
        # Of no whole record, when the spool was opened.
        self.bytes_cut = 0

    # From open to close; by the owner's thread.

    def open(self) -> None:
        """Take the directory and find what is in it.

        Raises InUseError when another process has it, CapflowError when it cannot be used.
        """
        try:
            self._lock_fd = self._lock()
            if self._lock_fd is None:
                do = "stop the process that writes it, or name another directory"
                raise InUseError(explain(f"spool {self.directory} is in use", do=do))
            self._recover()
        except OSError as e:
            self._release()
            what, got = f"spool {self.directory} cannot be used", e.strerror or str(e)
            expected, do = "a directory that can be written and read", "mend that, or name another directory"
            raise CapflowError(explain(what, got=got, expected=expected, do=do)) from e
        self._thread = threading.Thread(target=self._run, name="capflow-spool", daemon=True)
        self._thread.start()

    def close(self) -> bool:
        """Sync what is there and give the directory back; return whether every record is durable."""
        return self._close(remove=False)

    def remove(self, beside: Sequence[str] = ()) -> bool:
        """Close the spool, whose records are all done with, and remove its directory; return as `close` does.

        beside: names of files that its owner keeps in the directory, which are removed too.

        A kill before the end leaves a spool without records. The directory stays when the disk fails, and while it holds a
        segment that was set aside, or anything else.
        """
        with self._changed:
            self._next_read = self._next_append
        self.acknowledge(self.last)
        empty = self.wait_acknowledged(self.last, _RETRY_S if self._failing else _CLOSE_S)
        return self._close(remove=empty and not self._segments.bad, beside=beside)

    def _close(self, *, remove: bool, beside: Sequence[str] = ()) -> bool:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._ended.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_CLOSE_S)
            if thread.is_alive():
                what = "spool %s: the disk does not answer; what is not synced is left to it"
                logger.error(what, self.directory, extra={"event": "spool_failed"} | self._where)
                return False
            self._release(remove=remove and not self._unsynced, beside=beside)
        return not self._unsynced

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # For the thread that appends.

    def append(self, head: bytes, body: Any = b"", *, spare_bytes: int = 0, needed: bool = False) -> int:
        """Take a record; return its number. Until it is durable, as `synced_through` says, its buffers must not change.

        Waits only for the disk, when `unsynced_bytes_max` of records before it are not durable. Raises FullError, also
        when less than `spare_bytes` would be left of `bytes_max`.

        needed: without it nothing can be removed, so that what is kept of a full disk is for it.
        """
        body = memoryview(body).cast("B")
        nbytes = items.HEADER_BYTES + len(head) + len(body)
        with self._changed:
            assert not self._closing, "the spool is closed"
            if not self._fits_memory(nbytes):
                self._changed.wait_for(lambda: self._failure or self._fits_memory(nbytes), limits.BLOCK_S_MAX)
            if not self._fits_memory(nbytes):
                raise self._full(self._failure or OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))
            self._check_room(nbytes + spare_bytes)
            if self._failure is None:
                try:
                    self._write(head, body, needed=needed)
                except OSError as e:
                    self._refused = e, time.monotonic()
                    if e.errno in _NO_ROOM:
                        self._begin_anew()
                    raise self._full(e) from e
                self._refused = None
            self._unsynced[self._next_append] = _Entry(head, body, nbytes)
            self.unsynced_bytes += nbytes
            self._next_append += 1
            self._changed.notify_all()
            return self._next_append - 1

    def put(
        self,
        head: bytes,
        body: Any = b"",
        timeout_s: float | None = None,
        *,
        spare_bytes: int = 0,
        needed: bool = False,
    ) -> int:
        """Take a record as `append` does, waiting for room for at most `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                return self.append(head, body, spare_bytes=spare_bytes, needed=needed)
            except FullError:
                left = _RETRY_S if deadline is None else min(_RETRY_S, deadline - time.monotonic())
                if left <= 0:
                    raise
                with self._changed:
                    self._changed.wait(left)

    # For the thread that reads.

    def read(self, timeout_s: float | None = 0) -> Record | Lost | None:
        """Return what comes next, waiting for it for at most `timeout_s`; None when nothing came, or never will.

        A record that is not durable yet is read from memory. What the disk does not give is tried for again and again, however long it takes:
        lost is only what is not what was written.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            pause_s, left_s = self._reader.again_at - now, max(0.0, deadline - now)
            if pause_s > 0 and (self._ended.wait(min(pause_s, left_s)) or pause_s > left_s):
                return None
            failed = self._reader.failure is not None
            try:
                found = self._read(None if left_s == math.inf else left_s)
            except OSError as e:
                if not failed:
                    what = "spool %s: record %d cannot be read: %s; trying again"
                    said, event = e.strerror or str(e), {"event": "spool_failed"} | self._where
                    logger.error(what, self.directory, self._next_read, said, extra=event)
                continue
            if failed and self._reader.failure is None:
                logger.error(
                    "spool %s: it can be read again", self.directory, extra={"event": "spool_works"} | self._where
                )
            return found

    def _read(self, timeout_s: float | None) -> Record | Lost | None:
        with self._changed:
            if timeout_s != 0:
                self._changed.wait_for(lambda: self._next_read < self._next_append or self._closing, timeout_s)
            number = self._next_read
            if number >= self._next_append:
                self._reader.let_go(self._segments)  # or a full disk would keep what was removed
                return None
            entry = self._unsynced.get(number)
            place = self._segments.at(number) if entry is None else None
            end = self.synced_through + 1
        found: Record | Lost
        if entry is not None:
            found = Record(number, entry.head, entry.body)
        elif place is not None:
            found = self._reader.get(number, *place[:2], min(place[2], end))
        else:  # the segment that held it was taken away
            found = Lost(number, min(self._segments.first(), end) - 1, "missing")
        if isinstance(found, Lost):
            self.records_lost += found.last - found.first + 1
            event = {"event": "spool_damaged", "first": found.first, "last": found.last} | self._where
            logger.error("spool %s: records %d to %d are lost: %s", self.directory, *found[:3], extra=event)
        self._next_read = found.id + 1
        return found

    def look(self, numbers: Iterable[int]) -> Iterator[Record | Lost]:
        """Yield records that were read and are not acknowledged, by rising numbers; what `read` gives next stays. Raises OSError."""
        reader = Reader(self._files)
        try:
            for number in numbers:
                with self._changed:
                    entry = self._unsynced.get(number)
                    place = self._segments.at(number) if entry is None else None
                    end = self.synced_through + 1
                if entry is not None:
                    yield Record(number, entry.head, entry.body)
                elif place is not None:
                    yield reader.get(number, *place[:2], min(place[2], end))
                else:
                    yield Lost(number, number, "missing")
        finally:
            reader.close()

    def rewind(self, number: int) -> None:
        """Have `read` give every record behind a number again, none of which is acknowledged."""
        with self._changed:
            assert self._acked <= number < self._next_read, "only what was read and is kept is read again"
            self._next_read = number + 1
            self._reader.close()

    def heads(self) -> Iterator[tuple[int, bytes]]:
        """Yield number and head of every record that was left by an earlier process, but for those that are damaged.

        To be called after `open`, before anything is appended or acknowledged. Raises CapflowError when the disk does not give them.
        """
        try:
            yield from self._heads()
        except OSError as e:
            raise unreadable(self.directory, e) from e

    def _heads(self) -> Iterator[tuple[int, bytes]]:
        for segment, stop in self._segments.ranges():
            with opened(self._files, segment.path) as fd:
                for number, head in heads(self._files, fd, segment, self._acked, min(stop, self._next_append)):
                    if head is not None:
                        yield number, head

    def acknowledge(self, number: int) -> None:
        """Say that every record up to here, all of them read, is done with: none of them is read again."""
        assert number < self._next_read, "only what was read is done with"
        with self._changed:
            if number > self._acked:
                self._acked = number
                self._changed.notify_all()

    def __len__(self) -> int:
        """Return how many records are not acknowledged."""
        return self._next_append - 1 - self._acked

    @property
    def last(self) -> int:
        """The number of the record that was taken last."""
        return self._next_append - 1

    @property
    def unread(self) -> int:
        """How many records were not read."""
        return self._next_append - self._next_read

    @property
    def nbytes(self) -> int:
        """The length of the segments together."""
        return self._segments.nbytes

    def wait_synced(self, number: int, timeout_s: float | None = None) -> bool:
        """Wait until every record up to here is durable; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self.synced_through >= number, timeout_s)

    def wait_acknowledged(self, number: int, timeout_s: float | None = None) -> bool:
        """Wait until the acknowledgement of every record up to here is durable; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self.acknowledged_through >= number, timeout_s)

    def check(self) -> None:
        """Raise CapflowError when somebody removed what is written to: its records are synced, and lost all the same."""
        with self._changed:
            try:
                self._segments.check()
            except OSError as e:
                do = "start the process that writes it again"
                raise CapflowError(explain(f"spool {self.directory} is gone", got=e.strerror or str(e), do=do)) from e

    @property
    def trouble(self) -> str | None:
        """Why its disk is taken to have failed; None when it has not. It names nothing that is in the spool."""
        refused, now = self._refused, time.monotonic()
        error = self._failing or self._reader.failure
        if error is None and refused is not None and now - refused[1] < limits.CALL_S_MAX:
            error = refused[0]
        return None if error is None else error.strerror or type(error).__name__

    def status(self) -> dict[str, Any]:
        """Return the spool's counters."""
        return {
            "records": len(self),
            "bytes": self.nbytes,
            "bytes_max": self._segments.bytes_max,
            "unsynced_bytes": self.unsynced_bytes,
            "records_lost": self.records_lost,
            "segments": len(self._segments),
            "segments_bad": self._segments.bad,
            "syncs": self.syncs,
            "failures": self.failures + self._reader.failures,
        }

    # Under `_changed`.

    def _write(self, head: bytes, body: Any, *, needed: bool) -> None:
        if not needed:
            self._spare.keep()
            if self._spare.is_missing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            self._segments.write(self._next_append, head, body)
        except OSError as e:
            if not (needed and e.errno in _NO_ROOM and self._spare.give()):
                raise
            self._segments.write(self._next_append, head, body)

    def _fits_memory(self, nbytes: int) -> bool:
        return not self._unsynced or self.unsynced_bytes + nbytes <= self.unsynced_bytes_max

    def _check_room(self, nbytes: int) -> None:
        segments = self._segments
        taken = segments.nbytes + (0 if self._failure is None else self.unsynced_bytes)  # which is to be written again
        if taken + nbytes <= segments.bytes_max:
            return
        if self._failure is None and self._next_append - 1 == self._acked:
            self._begin_anew()
        what, expected = f"spool {self.directory} is full", f"at most {segments.bytes_max}"
        got, do = f"{taken} and {nbytes} bytes", "allow it more, or have it read faster"
        raise FullError("spool_full", explain(what, got=got, expected=expected, do=do))

    def _begin_anew(self) -> None:
        """Write to another segment from here on: one goes, once it is done with, only when there is a newer one."""
        if self._segments.active_bytes:
            with contextlib.suppress(OSError):
                self._segments.begin(self._next_append)
                self._changed.notify_all()

    def _full(self, e: OSError) -> FullError:
        no_room = e.errno in _NO_ROOM
        what, got = f"spool {self.directory} takes nothing", e.strerror or str(e)
        expected, do = ("room on its disk", "make some") if no_room else ("a disk that takes it", "see to the disk")
        return FullError("disk_full" if no_room else "disk_failed", explain(what, got=got, expected=expected, do=do))

    # Opening and closing.

    def _lock(self) -> int | None:
        """Make the directory and lock it; return the lock's descriptor, None when another process has it. Raises OSError."""
        for _ in range(_REMOVED_MAX):
            self._files.mkdir(self.directory)
            with contextlib.suppress(FileNotFoundError):
                return self._files.lock(self.directory / LOCK)
        return None

    def _recover(self) -> None:
        remains = survey(self._files, self.directory)
        cursor, last = remains.cursor, remains.last
        if remains.cut is not None and remains.cut[2]:
            self.bytes_cut = remains.cut[2]
            message = "spool %s: cut behind record %d; the %d bytes behind it are void"
            logger.warning(
                message, self.directory, last, self.bytes_cut, extra={"event": "spool_cut", "last": last} | self._where
            )
        if last > cursor.synced:  # of a writer that was killed: whole, but perhaps only in memory
            for segment in remains.segments:
                with opened(self._files, segment.path) as fd:
                    self._files.fdatasync(fd)
        self._segments.take(remains)
        self._segments.begin(last + 1)
        self._segments.sync(self._segments.unsynced())
        self._cursor.open(cursor._replace(synced=last))
        self._next_append = last + 1
        self.synced_through = self._told = last
        self._acked = self.acknowledged_through = cursor.acked
        self._next_read = cursor.acked + 1
        self._free()
        self._spare.keep()
        if len(self):
            event = {"event": "spool_found", "records": len(self)} | self._where
            logger.info("spool %s: records left of earlier: %d", self.directory, len(self), extra=event)

    def _release(self, *, remove: bool = False, beside: Sequence[str] = ()) -> None:
        self._reader.close()
        self._spare.give()
        self._segments.seal(every=True)
        self._cursor.close()
        if remove:  # before the lock is let go: whoever locks a file that is gone takes another
            with contextlib.suppress(OSError):
                self._segments.remove()  # before the cursor, without which they would be read again
                self._files.remove(self.directory, (*beside, *BESIDE))
        if self._lock_fd is not None:
            self._files.close(self._lock_fd)
            self._lock_fd = None

    # The thread.

    def _run(self) -> None:
        closing = False
        while not closing:
            self._ended.wait(_RETRY_S if self._failing else limits.SYNC_PAUSE_S)
            with self._changed:
                if not self._failing:
                    self._changed.wait_for(self._due)
                closing = self._closing
            self._work()

    def _due(self) -> bool:
        return bool(
            self._unsynced
            or self._closing
            or self._acked > self.acknowledged_through
            or self._segments.directory_dirty
            or self._segments.done(self.acknowledged_through)
        )

    def _work(self) -> None:
        """Do what is to be done; what fails is done again after a while."""
        error = None
        for step in (self._sync, self._persist, self._free):
            try:
                step()
            except OSError as e:
                error = e
                if step == self._sync:
                    self._give_up(e)
        if error is not None:
            self.failures += 1
        if (error is None) != (self._failing is None):
            said = "the disk works again" if error is None else f"{error.strerror or error}; trying again"
            event = self._where | ({"event": "spool_works"} if error is None else {"event": "spool_failed"})
            logger.error("spool %s: %s", self.directory, said, extra=event)
        self._failing = error
        if self._on_synced is not None and self.synced_through > self._told:
            self._told = self.synced_through
            self._on_synced(self._told)

    def _sync(self) -> None:
        """Have everything that was appended on the disk. Raises OSError when that failed."""
        with self._changed:
            if self._failure is not None:
                self._rewrite()
            target = self._next_append - 1
            unsynced = self._segments.unsynced()
        self._segments.sync(unsynced)
        with self._changed:
            self._failure = None
            self._segments.seal()
            if target > self.synced_through:
                self.syncs += 1
                self.synced_through = target
                while self._unsynced and (first := next(iter(self._unsynced))) <= target:
                    self.unsynced_bytes -= self._unsynced.pop(first).nbytes
                self._segments.mark(target)
            self._changed.notify_all()

    def _rewrite(self) -> None:
        """Write everything that is not durable to a new segment."""
        self._segments.begin(self.synced_through + 1)
        for number, entry in self._unsynced.items():
            self._segments.write(number, entry.head, entry.body)

    def _give_up(self, e: OSError) -> None:
        """Write to the segments no more: what they hold is not known, and they would be synced now without an error."""
        with self._changed:
            self._failure = e
            self._segments.give_up(self.synced_through + 1)
            self._changed.notify_all()

    def _persist(self) -> None:
        """Have the acknowledgement on the disk."""
        with self._changed:
            cursor = Cursor(self._acked, self.synced_through)
            clean = self._closing and not self._unsynced
        if cursor.acked > self.acknowledged_through or clean:
            self._cursor.write(cursor)
            with self._changed:
                self.acknowledged_through = cursor.acked
                self._changed.notify_all()

    def _free(self) -> None:
        """Remove the segments whose records are done with, durably."""
        with self._changed:
            done = self._segments.done(self.acknowledged_through) if self._failure is None else []
        for segment in done:
            bytes_free = self._segments.free(segment)
            with self._changed:
                self._segments.freed(segment, bytes_free=bytes_free)
                self._spare.freed()
                self._changed.notify_all()
