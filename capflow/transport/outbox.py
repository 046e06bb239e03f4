"""The outbox: a worker's frames on disk, from when memory was full or no hub was there until a hub has acknowledged them.

A worker has a directory of its own below the one that it is given, named after engine, rank and boot, with a spool in it and a file
`hello`: the worker's Hello, by which a later process sends what is left in the worker's name; a file `hub`, the address
that it is for; and its `promises`. A record's head is `seq`, 8 bytes
little-endian, and the frame's sealed header; its body is the payload. Numbers rise and may leave some out: those frames went by memory.
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
    """A frame that comes from disk."""

    seq: int
    parts: Parts


class Outbox:
    """One worker's spool, from `open` to `close`. One thread puts frames in, another takes them out.

    directory: of this worker alone.
    hub: the address of the hub that the frames are for; empty where it is not known.
    """

    def __init__(self, directory: Path, hello: Hello, bytes_max: int, hub: str = "") -> None:
        self.directory = directory
        self.hub = hub
        self.hello = hello
        # Put in, in this process.
        self.frames = 0
        # That could not be read again.
        self.frames_lost = 0
        # The rows in these, by request, as far as it is known; emptied by `amended`.
        self.lost: dict[str, Losses] = {}
        self.promises = Promises(directory)
        # What the worker had promised that is gone, of an outbox that was there.
        self.broken = promises.Broken([], [], 0)
        self._spool = Spool(directory, bytes_max=bytes_max)
        # Seq and number of what was taken and is not acknowledged.
        self._taken: deque[tuple[int, int]] = deque()
        # Of what was taken last.
        self._seq = 0

    @classmethod
    def of(cls, root: Path, hello: Hello, bytes_max: int, hub: str = "") -> Self:
        """Return the outbox of a worker below a directory that others share."""
        pp, dp, tp = hello.rank
        return cls(root / f"{hello.engine}-{pp}.{dp}.{tp}-{hello.boot}", hello, bytes_max, hub)

    def open(self) -> None:
        """Take the directory. Raises CapflowError."""
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
                what, got = f"{path} cannot be written", e.strerror or str(e)
                expected, do = "room on its disk, and leave to write", "see to that, or name another --spool-dir"
                raise CapflowError(explain(what, got=got, expected=expected, do=do)) from e
        else:
            self.broken = promises.read(self.directory)

    @property
    def waiting(self) -> int:
        """How many frames were put in and not taken."""
        return self._spool.unread

    @property
    def unacknowledged(self) -> int:
        """How many frames were put in and are not acknowledged."""
        return len(self._spool)

    def status(self) -> dict[str, Any]:
        """Return the spool's counters, and the outbox's own."""
        return self._spool.status() | {"frames_spilled": self.frames, "frames_lost": self.frames_lost}

    def promise(self, seq: int, header: FrameHeader) -> None:
        """Note a frame that is taken, on disk or in memory."""
        self.promises.add(seq, header)

    def keep_promises(self) -> None:
        """Note that the hub has all that a worker that is gone had promised, or the word that it does not come."""
        self.broken = promises.Broken([], [], 0)

    def put(self, seq: int, header: FrameHeader, payload: Any, wait_s: float) -> str | None:
        """Take a frame, waiting for room for at most `wait_s`; return None, or why it was not taken."""
        frame = Frame.seal(msgspec.structs.replace(header, seq=seq), payload)
        encoded, body = frame.encode()
        try:
            self._spool.put(_SEQ.pack(seq) + encoded, body, timeout_s=wait_s)
        except FullError as e:
            return e.reason
        self.frames += 1
        return None

    def take(self) -> Spilled | None:
        """Return the next frame, None when there is none. One that cannot be read is counted, and left out."""
        while (found := self._spool.read()) is not None:
            if isinstance(found, Lost):
                self.frames_lost += found.last - found.first + 1
                self._taken.append((self._seq, found.last))
                if found.head is not None:
                    note_frame(self.lost, _decoder.decode(found.head[_SEQ.size :]), "spool_damaged")
                continue
            (self._seq,) = _SEQ.unpack_from(found.head)
            self._taken.append((self._seq, found.id))
            encoded = found.head[_SEQ.size :]
            if self.lost:
                encoded = msgspec.msgpack.encode(self.amended(_decoder.decode(encoded)))
            return Spilled(self._seq, [encoded, found.body])
        return None

    def amended(self, header: FrameHeader) -> FrameHeader:
        """Return a header whose ends of requests say which of their rows the disk did not give back."""
        return lessened(header, self.lost)

    def acknowledge(self, seq: int) -> None:
        """Note that the hub has every frame up to here."""
        self.promises.acknowledge(seq)
        number = 0
        while self._taken and self._taken[0][0] <= seq:
            number = self._taken.popleft()[1]
        if number:
            self._spool.acknowledge(number)

    def close(self) -> bool:
        """Leave what is not acknowledged to a later process, and nothing if everything is; return whether no frame is left, durably."""
        broken = self.promises.broken or self.broken.ends or self.broken.running
        self.promises.close()
        clean = self._spool.close() if len(self._spool) or broken else self._spool.remove([_HELLO, _HUB, promises.NAME])
        if not clean:
            event = {"event": "spool_failed", "directory": str(self.directory)}
            logger.error("spool %s: not everything is on the disk", self.directory, extra=event)
        return self._spool.acknowledged_through == self._spool.last


def left_behind(root: Path, hub: str = "", *, only: bool = False) -> list[Outbox]:
    """Return, opened, what workers that are gone left below a directory; what is empty is removed, what cannot be used is left alone, and said.

    hub: the address of the hub that it goes to. Promises without frames are for the hub that they were made to; those
        of a hub that does not come for `limits.PROMISES_KEPT_S` are removed.
    only: nothing that is for another hub, but all that is for this one, whichever of its engine's hubs that is.
    """
    found = []
    paths = [*root.glob(f"*/{_HELLO}"), *(root.glob(f"hub-*/*/{_HELLO}") if only else ())]
    for path in sorted(paths):
        others = hub != "" and _hub_of(path.parent) not in ("", hub)
        if only and _hub_of(path.parent) != hub and not (others and _is_old(path)):
            continue
        try:
            outbox = Outbox(path.parent, _hello_of(path), limits.SPOOL_BYTES_MAX)
            outbox.open()
        except InUseError:  # its worker lives
            continue
        except CapflowError as e:
            event = {"event": "spool_left", "directory": str(path.parent)}
            logger.error("what a worker that is gone left is not sent: %s", e, extra=event)
            continue
        broken = bool(outbox.broken.ends or outbox.broken.running)
        if (outbox.unacknowledged and not (only and others)) or (broken and not others):
            found.append(outbox)
            continue
        if broken and others and not outbox.unacknowledged and _is_old(path):
            event = {"event": "spool_left", "directory": str(path.parent)}
            requests = sum(len(ends) for _, ends in outbox.broken.ends) + len(outbox.broken.running)
            text = "what %s promised of %d requests to a hub that does not come is forgotten"
            logger.error(text, outbox.hello.engine, requests, extra=event)
            outbox.keep_promises()
        outbox.close()
    return found


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
    """Return the hello in a file. Raises CapflowError when there is none in it."""
    got = "another message"
    try:
        hello = message.decode(path.read_bytes())
        if isinstance(hello, Hello):
            return hello
    except OSError as e:
        got = e.strerror or str(e)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        got = str(e)
    do = f"see what is there with `capflow spool inspect {path.parent}`"
    raise CapflowError(explain(str(path), got=got, expected="the hello of its worker", do=do))
