"""The spool: appends, reads and acknowledges records; a thread syncs. `capflow.buffers.spool` describes the files."""

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
_RETRY_S = 1.0  # the pause after a failure of the disk
_REMOVED_MAX = 10  # how often the last writer may remove the directory while it is opened
_CLOSE_S = 30.0  # how long `close` waits for a disk that does not answer


class FullError(CapflowError):
    """The record was refused.

    reason: `spool_full`, `disk_full` or `disk_failed`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class InUseError(CapflowError):
    """Another process writes the spool."""


class _Entry(NamedTuple):
    """A record that is not durable yet."""

    head: bytes
    body: memoryview
    nbytes: int


class Spool:
    """A bounded queue of records on disk, between `open` and `close`.

    Any thread appends, one thread reads, one acknowledges. The spool's own thread syncs, frees segments and repeats
    what failed.

    directory: the spool's directory; made if it is missing.
    bytes_max: the bound of all segments together.
    segment_bytes: the length of a segment; by default an eighth of `bytes_max`.
    unsynced_bytes_max: the bound of the records in memory that are not durable.
    spare_bytes: room reserved on the disk for records that are appended as `needed`.
    on_synced: called with a number on the spool's thread when every record up to it is durable.
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
        # Fields of each log record.
        self._where = {"directory": str(self.directory)}
        self._on_synced = on_synced
        self._files = files or Files()
        # Used by the reading thread alone.
        self._reader = Reader(self._files)
        # Used by the spool's thread alone, between `open` and `close`.
        self._cursor = CursorFile(self._files, self.directory / CURSOR)
        # Held from `open` to the end of `close`.
        self._lock_fd: int | None = None
        # Guards the fields below; notified of each change.
        self._changed = threading.Condition()
        segment_bytes = segment_bytes or min(limits.SEGMENT_BYTES_MAX, max(1, bytes_max // 8))
        self._segments = Segments(self._files, self.directory, bytes_max, segment_bytes)
        self._spare = Spare(self._files, self.directory, spare_bytes)
        # By rising number; a sync empties it.
        self._unsynced: dict[int, _Entry] = {}
        # The error of the last sync; None if it worked.
        self._failure: OSError | None = None
        self._next_append = 1
        self._next_read = 1
        # Every record up to this number is acknowledged, perhaps not durably.
        self._acked = 0
        # The error of the thread's last round; None if it worked. Written by the thread.
        self._failing: OSError | None = None
        # The error and the time of the last refused record.
        self._refused: tuple[OSError, float] | None = None
        # The last number given to `on_synced`. Used by the thread alone.
        self._reported = 0
        self._closing = False
        # Set with `_closing`; ends the pauses of the thread.
        self._ended = threading.Event()
        # Set with `_closing`, and where `limits.SYNC_BYTES` are not durable; ends the pause between two syncs.
        self._hurried = threading.Event()
        # Set between `open` and `close`.
        self._thread: threading.Thread | None = None
        # The fields below may be read by any thread.
        # Every record up to this number is durable.
        self.synced_through = 0
        # Every record up to this number is durably acknowledged.
        self.acknowledged_through = 0
        self.unsynced_bytes = 0
        self.records_lost = 0
        self.syncs = 0
        # How often a write failed.
        self.failures = 0
        # The bytes after the last whole record when the spool was opened.
        self.bytes_cut = 0

    # Opening and closing, by the owner's thread.

    def open(self) -> None:
        """Lock the directory and read its state.

        Raises InUseError if another process writes it, CapflowError if it cannot be used.
        """
        try:
            self._lock_fd = self._lock()
            if self._lock_fd is None:
                do = "stop the process that writes it, or name another directory"
                raise InUseError(explain(f"spool {self.directory} is in use", do=do))
            self._recover()
        except OSError as e:
            self._release()
            where, got = f"spool {self.directory} cannot be used", e.strerror or str(e)
            expected, do = "a directory that can be written and read", "change its mode, or name another directory"
            raise CapflowError(explain(where, got=got, expected=expected, do=do)) from e
        self._thread = threading.Thread(target=self._run, name="capflow-spool", daemon=True)
        self._thread.start()

    def close(self) -> bool:
        """Sync the records and unlock the directory; return whether every record is durable."""
        return self._close(remove=False)

    def remove(self, beside: Sequence[str] = ()) -> bool:
        """Acknowledge all records, close the spool and remove its directory; return the same as `close`.

        A kill before the end leaves a spool without records. The directory stays if the disk fails, or if it holds a
        damaged segment that was set aside or other files.

        beside: names of the owner's files in the directory that are removed too.
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
        self._hurried.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_CLOSE_S)
            if thread.is_alive():
                message = "spool %s: the disk does not answer; unsynced records may be lost"
                logger.error(message, self.directory, extra={"event": "spool_failed"} | self._where)
                return False
            self._release(remove=remove and not self._unsynced, beside=beside)
        return not self._unsynced

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Appending, by any thread.

    def append(self, head: bytes, body: Any = b"", *, spare_bytes: int = 0, needed: bool = False) -> int:
        """Append a record; return its number. Its buffers must not change until `synced_through` reaches the number.

        It waits only for the disk, if `unsynced_bytes_max` of earlier records are not durable. Raises FullError.

        head: the small part of the record, `bytes`.
        body: an object with the buffer protocol.
        spare_bytes: refuse the record if less than this would be left of `bytes_max`.
        needed: no record can be removed without this one, so it may use the spare of a full disk.
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
                        self._begin_segment()
                    raise self._full(e) from e
                self._refused = None
            self._unsynced[self._next_append] = _Entry(head, body, nbytes)
            self.unsynced_bytes += nbytes
            if self.unsynced_bytes >= limits.SYNC_BYTES > self.unsynced_bytes - nbytes:
                self._hurried.set()
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
        """Append a record as `append` does; wait for room for at most `timeout_s`."""
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

    # Reading and acknowledging, by one thread each.

    def read(self, timeout_s: float | None = 0) -> Record | Lost | None:
        """Return the next record, waiting for at most `timeout_s`; None if none came, or if the spool is closed.

        A record that is not durable yet is read from memory. A read that fails is repeated for as long as it takes: a
        record is lost only if its bytes are damaged or gone.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            pause_s, left_s = self._reader.again_at - now, max(0.0, deadline - now)
            if pause_s > 0 and (self._ended.wait(min(pause_s, left_s)) or pause_s > left_s):
                return None
            failed = self._reader.failure is not None
            try:
                result = self._read(None if left_s == math.inf else left_s)
            except OSError as e:
                if not failed:
                    message = "spool %s: record %d cannot be read: %s; trying again"
                    reason, event = e.strerror or str(e), {"event": "spool_failed"} | self._where
                    logger.error(message, self.directory, self._next_read, reason, extra=event)
                continue
            if failed and self._reader.failure is None:
                logger.error(
                    "spool %s: it can be read again", self.directory, extra={"event": "spool_works"} | self._where
                )
            return result

    def _read(self, timeout_s: float | None) -> Record | Lost | None:
        with self._changed:
            if timeout_s != 0:
                self._changed.wait_for(lambda: self._next_read < self._next_append or self._closing, timeout_s)
            number = self._next_read
            if number >= self._next_append:
                self._reader.let_go(self._segments)  # an open descriptor would keep a removed segment on a full disk
                return None
            entry = self._unsynced.get(number)
            place = self._segments.at(number) if entry is None else None
            end = self.synced_through + 1
        result: Record | Lost
        if entry is not None:
            result = Record(number, entry.head, entry.body)
        elif place is not None:
            result = self._reader.get(number, *place[:2], min(place[2], end))
        else:  # the segment that held it was removed
            result = Lost(number, min(self._segments.first(), end) - 1, "missing")
        if isinstance(result, Lost):
            self.records_lost += result.last - result.first + 1
            event = {"event": "spool_damaged", "first": result.first, "last": result.last} | self._where
            logger.error("spool %s: records %d to %d are lost: %s", self.directory, *result[:3], extra=event)
        self._next_read = result.id + 1
        return result

    def look(self, numbers: Iterable[int]) -> Iterator[Record | Lost]:
        """Yield records that were read and not acknowledged, by rising number, without moving `read`.

        Raises OSError.
        """
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
        """Let `read` return every record after a number again; none of them may be acknowledged."""
        with self._changed:
            assert self._acked <= number < self._next_read, (
                "only records that were read and not acknowledged are read again"
            )
            self._next_read = number + 1
            self._reader.close()

    def heads(self) -> Iterator[tuple[int, bytes]]:
        """Yield the number and head of each undamaged record of earlier processes.

        Call it after `open`, before the first append and acknowledgement. Raises CapflowError if the disk cannot be
        read.
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
        """Acknowledge every record up to `number`; they must have been read, and are never read again."""
        assert number < self._next_read, "only records that were read are acknowledged"
        with self._changed:
            if number > self._acked:
                self._acked = number
                self._changed.notify_all()

    def __len__(self) -> int:
        """Return how many records are not acknowledged."""
        return self._next_append - 1 - self._acked

    @property
    def last(self) -> int:
        """The number of the last appended record."""
        return self._next_append - 1

    @property
    def unread(self) -> int:
        """How many records are not read yet."""
        return self._next_append - self._next_read

    @property
    def nbytes(self) -> int:
        """The length of all segments together."""
        return self._segments.nbytes

    def wait_synced(self, number: int, timeout_s: float | None = None) -> bool:
        """Wait until every record up to `number` is durable; return whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.synced_through >= number, timeout_s)

    def wait_acknowledged(self, number: int, timeout_s: float | None = None) -> bool:
        """Wait until the acknowledgement of `number` is durable; return whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.acknowledged_through >= number, timeout_s)

    def check(self) -> None:
        """Raise CapflowError if the newest segment was removed: its records are lost although they are synced."""
        with self._changed:
            try:
                self._segments.check()
            except OSError as e:
                do = "start the process that writes it again"
                raise CapflowError(explain(f"spool {self.directory} is gone", got=e.strerror or str(e), do=do)) from e

    @property
    def trouble(self) -> str | None:
        """Why the disk fails; None if it works. The text holds nothing of the records."""
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
        taken = segments.nbytes + (0 if self._failure is None else self.unsynced_bytes)  # those are written again
        if taken + nbytes <= segments.bytes_max:
            return
        if self._failure is None and self._next_append - 1 == self._acked:
            self._begin_segment()
        where, expected = f"spool {self.directory} is full", f"at most {segments.bytes_max}"
        got, do = f"{taken} and {nbytes} bytes", "allow it more, or read it faster"
        raise FullError("spool_full", explain(where, got=got, expected=expected, do=do))

    def _begin_segment(self) -> None:
        """Begin a new segment: an acknowledged segment is removed only if there is a newer one."""
        if self._segments.active_bytes:
            with contextlib.suppress(OSError):
                self._segments.begin(self._next_append)
                self._changed.notify_all()

    def _full(self, e: OSError) -> FullError:
        no_room = e.errno in _NO_ROOM
        where, got = f"spool {self.directory} takes nothing", e.strerror or str(e)
        expected, do = ("room on its disk", "free some") if no_room else ("a disk that works", "repair the disk")
        return FullError("disk_full" if no_room else "disk_failed", explain(where, got=got, expected=expected, do=do))

    # The steps of opening and closing.

    def _lock(self) -> int | None:
        """Make and lock the directory; return the lock's descriptor, None if another process holds it.

        Raises OSError.
        """
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
            message = "spool %s: cut after record %d; the %d bytes after it are void"
            logger.warning(
                message, self.directory, last, self.bytes_cut, extra={"event": "spool_cut", "last": last} | self._where
            )
        if last > cursor.synced:  # records of a killed writer are whole, but perhaps only in the page cache
            for segment in remains.segments:
                with opened(self._files, segment.path) as fd:
                    self._files.fdatasync(fd)
        self._segments.take(remains)
        self._segments.begin(last + 1)
        self._segments.sync(self._segments.unsynced())
        self._cursor.open(cursor._replace(synced=last))
        self._next_append = last + 1
        self.synced_through = self._reported = last
        self._acked = self.acknowledged_through = cursor.acked
        self._next_read = cursor.acked + 1
        self._free()
        self._spare.keep()
        if len(self):
            event = {"event": "spool_found", "records": len(self)} | self._where
            logger.info("spool %s: records left by earlier processes: %d", self.directory, len(self), extra=event)

    def _release(self, *, remove: bool = False, beside: Sequence[str] = ()) -> None:
        self._reader.close()
        self._spare.give()
        self._segments.seal(every=True)
        self._cursor.close()
        if remove:  # before the lock is released: a process that locks a removed file opens another
            with contextlib.suppress(OSError):
                self._segments.remove()  # before the cursor: without it they would be read again
                self._files.remove(self.directory, (*beside, *BESIDE))
        if self._lock_fd is not None:
            self._files.close(self._lock_fd)
            self._lock_fd = None

    # The thread.

    def _run(self) -> None:
        closing = False
        while not closing:
            if self._failing:
                self._ended.wait(_RETRY_S)
            elif self.unsynced_bytes < limits.SYNC_BYTES:
                self._hurried.wait(limits.SYNC_PAUSE_S)
            self._hurried.clear()
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
        """Sync, persist the cursor and free segments; a step that fails is repeated in the next round."""
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
            state = "the disk works again" if error is None else f"{error.strerror or error}; trying again"
            event = self._where | ({"event": "spool_works"} if error is None else {"event": "spool_failed"})
            logger.error("spool %s: %s", self.directory, state, extra=event)
        self._failing = error
        if self._on_synced is not None and self.synced_through > self._reported:
            self._reported = self.synced_through
            self._on_synced(self._reported)

    def _sync(self) -> None:
        """Sync all appended records. Raises OSError."""
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
        """Write all records that are not durable to a new segment."""
        self._segments.begin(self.synced_through + 1)
        for number, entry in self._unsynced.items():
            self._segments.write(number, entry.head, entry.body)

    def _give_up(self, e: OSError) -> None:
        """Give up the unsynced segments: their bytes on disk are undefined, and another sync would succeed wrongly."""
        with self._changed:
            self._failure = e
            self._segments.give_up(self.synced_through + 1)
            self._changed.notify_all()

    def _persist(self) -> None:
        """Write the acknowledgement durably."""
        with self._changed:
            cursor = Cursor(self._acked, self.synced_through)
            clean = self._closing and not self._unsynced
        if cursor.acked > self.acknowledged_through or clean:
            self._cursor.write(cursor)
            with self._changed:
                self.acknowledged_through = cursor.acked
                self._changed.notify_all()

    def _free(self) -> None:
        """Remove the segments whose records are durably acknowledged."""
        with self._changed:
            done = self._segments.done(self.acknowledged_through) if self._failure is None else []
        for segment in done:
            bytes_free = self._segments.free(segment)
            with self._changed:
                self._segments.freed(segment, bytes_free=bytes_free)
                self._spare.freed()
                self._changed.notify_all()
