"""The outbox: a worker's frames on disk, which did not fit in memory or had no hub, until a hub has acknowledged them.

Each worker has a directory of its own, named after engine, rank and boot. It holds a spool and three files:

* `hello`: the worker's Hello, with which a later process sends the remaining frames in the worker's name.
* `hub`: the address of the hub that the frames are for.
* `promises`: see `capflow.transport.promises`.

The head of a record is `seq`, 8 bytes little-endian, and the frame's sealed header; the body is the payload. The
numbers rise, with gaps for the frames that went through memory.
"""

from __future__ import annotations

import logging
import struct
import time
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from capflow import limits
from capflow.buffers.spool import FullError, InUseError, Lost, Spool
from capflow.capture.frame import Frame, FrameHeader
from capflow.capture.losses import Losses, lessened, note_frame
from capflow.errors import CapflowError, explain
from capflow.files import write_whole
from capflow.protocol import message
from capflow.protocol.message import Hello
from capflow.protocol.session import Parts
from capflow.transport import promises
from capflow.transport.promises import Promises

logger = logging.getLogger("capflow.link")

_SEQ = struct.Struct("<Q")
_HELLO = "hello"
_HUB = "hub"
_decoder = msgspec.msgpack.Decoder(FrameHeader)


class Spilled(NamedTuple):
    """A frame read from disk."""

    seq: int
    parts: Parts


class Outbox:
    """One worker's spool between `open` and `close`. One thread puts frames in, another takes them out.

    directory: the directory of this worker alone.
    hub: the address of the hub that the frames are for; empty if it is unknown.
    """

    def __init__(self, directory: Path, hello: Hello, bytes_max: int, hub: str = "") -> None:
        self.directory = directory
        self.hub = hub
        self.hello = hello
        # Frames that this process put in.
        self.frames = 0
        # Frames that could not be read again.
        self.frames_lost = 0
        # The rows of lost frames by request, as far as their headers are readable; emptied by `amended`.
        self.lost: dict[str, Losses] = {}
        self.promises = Promises(directory)
        # The promises of an ended worker, read from an existing outbox.
        self.broken = promises.Broken([], [], 0)
        self._spool = Spool(directory, bytes_max=bytes_max)
        # The seq and record number of each frame that was taken and is not acknowledged.
        self._taken: deque[tuple[int, int]] = deque()
        # The seq of the last frame taken.
        self._seq = 0

    @classmethod
    def of(cls, root: Path, hello: Hello, bytes_max: int, hub: str = "") -> Self:
        """Return the outbox of a worker below a shared directory."""
        pp, dp, tp = hello.rank
        return cls(root / f"{hello.engine}-{pp}.{dp}.{tp}-{hello.boot}", hello, bytes_max, hub)

    def open(self) -> None:
        """Lock the directory and open the spool. Raises CapflowError."""
        self._spool.open()
        path = self.directory / _HELLO
        if not path.exists():
            try:
                if self.hub:
                    write_whole(self.directory / _HUB, self.hub.encode())
                write_whole(path, message.encode(self.hello))
                self.promises.open()
            except OSError as e:
                self._spool.close()
                where, got = f"{path} cannot be written", e.strerror or str(e)
                expected, do = "a writable disk with room", "free some, or name another --spool-dir"
                raise CapflowError(explain(where, got=got, expected=expected, do=do)) from e
        else:
            self.broken = promises.read(self.directory)

    @property
    def waiting(self) -> int:
        """How many frames wait to be taken."""
        return self._spool.unread

    @property
    def unacknowledged(self) -> int:
        """How many frames are not acknowledged."""
        return len(self._spool)

    def status(self) -> dict[str, Any]:
        """Return the counters of the spool and of the outbox."""
        return self._spool.status() | {"frames_spilled": self.frames, "frames_lost": self.frames_lost}

    def promise(self, seq: int, header: FrameHeader) -> None:
        """Record the promises of a frame that the link took, on disk or in memory."""
        self.promises.add(seq, header)

    def keep_promises(self) -> None:
        """Drop the promises of an ended worker: the hub has the rows, or knows that they are lost."""
        self.broken = promises.Broken([], [], 0)

    def put(self, seq: int, header: FrameHeader, payload: Any, wait_s: float) -> str | None:
        """Store a frame, waiting for room for at most `wait_s`; return None, or the reason why it was refused."""
        frame = Frame.seal(header, payload, seq=seq)
        encoded, body = frame.encode()
        try:
            self._spool.put(_SEQ.pack(seq) + encoded, body, timeout_s=wait_s)
        except FullError as e:
            return e.reason
        self.frames += 1
        return None

    def take(self) -> Spilled | None:
        """Return the next frame; None if there is none. Frames that cannot be read are counted and skipped."""
        while (record := self._spool.read()) is not None:
            if isinstance(record, Lost):
                self.frames_lost += record.last - record.first + 1
                self._taken.append((self._seq, record.last))
                if record.head is not None:
                    note_frame(self.lost, _decoder.decode(record.head[_SEQ.size :]), "spool_damaged")
                continue
            (self._seq,) = _SEQ.unpack_from(record.head)
            self._taken.append((self._seq, record.id))
            encoded = record.head[_SEQ.size :]
            if self.lost:
                encoded = msgspec.msgpack.encode(self.amended(_decoder.decode(encoded)))
            return Spilled(self._seq, [encoded, record.body])
        return None

    def amended(self, header: FrameHeader) -> FrameHeader:
        """Return a header whose ends of requests count the rows that could not be read from disk."""
        return lessened(header, self.lost)

    def acknowledge(self, seq: int) -> None:
        """Acknowledge every frame up to `seq`, which the hub has."""
        self.promises.acknowledge(seq)
        number = 0
        while self._taken and self._taken[0][0] <= seq:
            number = self._taken.popleft()[1]
        if number:
            self._spool.acknowledge(number)

    def close(self, acked: int = 0) -> bool:
        """Close the outbox; remove it if every frame is acknowledged. Return whether no frame is left.

        A later process sends the frames that are left.

        acked: the last frame that the hub acknowledged, also if that came together with the hub's Bye.
        """
        self.acknowledge(acked)
        broken = self.promises.broken or self.broken.ends or self.broken.running
        self.promises.close()
        clean = self._spool.close() if len(self._spool) or broken else self._spool.remove([_HELLO, _HUB, promises.NAME])
        if not clean:
            event = {"event": "spool_failed", "directory": str(self.directory)}
            logger.error("spool %s: some records are not on the disk", self.directory, extra=event)
        return self._spool.acknowledged_through == self._spool.last


def left_behind(root: Path, hub: str = "", *, only: bool = False) -> list[Outbox]:
    """Open and return the outboxes of ended workers below a directory. Empty ones are removed, unusable ones logged.

    hub: the address of the hub that gets the frames. Promises without frames are only for the hub that they were made
        to. They are removed if that hub does not come for `limits.PROMISES_KEPT_S`.
    only: return only the outboxes for this hub, whichever of its engine's hubs it is.
    """
    outboxes = []
    paths = [*root.glob(f"*/{_HELLO}"), *(root.glob(f"hub-*/*/{_HELLO}") if only else ())]
    for path in sorted(paths):
        others = hub != "" and _hub_of(path.parent) not in ("", hub)
        if only and _hub_of(path.parent) != hub and not (others and _is_old(path)):
            continue
        try:
            outbox = Outbox(path.parent, _hello_of(path), limits.SPOOL_BYTES_MAX)
            outbox.open()
        except InUseError:  # the worker lives
            continue
        except CapflowError as e:
            event = {"event": "spool_left", "directory": str(path.parent)}
            logger.error("frames of an ended worker are not sent: %s", e, extra=event)
            continue
        broken = bool(outbox.broken.ends or outbox.broken.running)
        if (outbox.unacknowledged and not (only and others)) or (broken and not others):
            outboxes.append(outbox)
            continue
        if broken and others and not outbox.unacknowledged and _is_old(path):
            event = {"event": "spool_left", "directory": str(path.parent)}
            requests = sum(len(ends) for _, ends in outbox.broken.ends) + len(outbox.broken.running)
            text = "promises of %s for %d requests are removed: their hub did not come back"
            logger.error(text, outbox.hello.engine, requests, extra=event)
            outbox.keep_promises()
        outbox.close()
    return outboxes


def _is_old(hello: Path) -> bool:
    try:
        return time.time() - (hello.parent / promises.NAME).stat().st_mtime > limits.PROMISES_KEPT_S
    except OSError:
        return False


def _hub_of(directory: Path) -> str:
    try:
        return (directory / _HUB).read_text(errors="replace")
    except OSError:
        return ""


def _hello_of(path: Path) -> Hello:
    """Return the Hello in a file. Raises CapflowError if the file holds none."""
    got = "another message"
    try:
        hello = message.decode(path.read_bytes())
        if isinstance(hello, Hello):
            return hello
    except OSError as e:
        got = e.strerror or str(e)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        got = str(e)
    do = f"inspect it with `capflow spool inspect {path.parent}`"
    raise CapflowError(explain(str(path), got=got, expected="the hello of its worker", do=do))
