"""The channel between the consumer, which runs in the hub, and the process that serves the page.

A message is the length of its head (uint32), the length of its rows (uint64), both little-endian, the head (msgpack, a
map with `type`) and the rows. Only `RowsTaken` has rows. Both sides are of one version of capflow and of one user, so
heads are decoded without further checks.

Invariant: one side's messages arrive whole and in order, or the channel is broken.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from capflow.capture.frame import FrameHeader
from capflow.capture.model import ModelInfo, Sites
from capflow.capture.result import RequestDone
from capflow.steering.action import Action, Answered

_LENGTHS = struct.Struct("<IQ")


class PageSetup(msgspec.Struct, frozen=True, tag_field="type", tag="setup"):
    """What the page's process serves, and where. The first message to it.

    probes: the probe files.
    kind, name: what is shown: `live` and a hub's address, or `stored` and a name.
    allow_steering: whether pages may act.
    vectors: those that pages may name, as `NAME=FILE`.
    modules: the engines' modules that pages may name.
    labels: a file with the labels of requests; empty for none.
    alerts: the rules, each as `NAME: RULE`.
    completions, completions_key: the address of the server that runs requests again, and its key; empty for none.
    data: the path of the data set that is shown; empty for a hub and for a recording.
    lens, other_weights: the lens file, and whether it may be of other weights; empty for the logit lens.
    """

    host: str
    port: int
    token: str
    requests_max: int
    tokens_max: int
    probes: tuple[str, ...] = ()
    kind: str = "live"
    name: str = ""
    allow_steering: bool = False
    vectors: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    labels: str = ""
    alerts: tuple[str, ...] = ()
    completions: str = ""
    completions_key: str = ""
    data: str = ""
    lens: str = ""
    other_weights: bool = False


class EngineMet(msgspec.Struct, frozen=True, tag_field="type", tag="engine"):
    """An engine connected. sites: those of which rows come."""

    engine: str
    model: ModelInfo
    sites: Sites


class EngineLeft(msgspec.Struct, frozen=True, tag_field="type", tag="engine_left"):
    """An engine is gone."""

    engine: str


class RowsTaken(msgspec.Struct, frozen=True, tag_field="type", tag="rows"):
    """A frame, with the rows that the dashboard wants."""

    header: FrameHeader


class RequestOver(msgspec.Struct, frozen=True, tag_field="type", tag="request_over"):
    """A request ended."""

    done: RequestDone


class EventTaken(msgspec.Struct, frozen=True, tag_field="type", tag="event"):
    """An event of a request's steering."""

    answered: Answered


class ActionAnswered(msgspec.Struct, frozen=True, tag_field="type", tag="action_answered"):
    """The answer to an action of a page."""

    answered: Answered


class HubAlive(msgspec.Struct, frozen=True, tag_field="type", tag="hub_alive"):
    """The hub is alive, or has been silent for a while.

    silent_s: for how long nothing has come from the hub that is shown.
    status: its counters, if a page shows them.
    """

    silent_s: float = 0.0
    status: dict[str, Any] | None = None


class Listening(msgspec.Struct, frozen=True, tag_field="type", tag="listening"):
    """The page's process listens at a port."""

    port: int


class StartFailed(msgspec.Struct, frozen=True, tag_field="type", tag="start_failed"):
    """The page's process cannot serve. usage: whether the options are the cause."""

    reason: str
    usage: bool


class Counted(msgspec.Struct, frozen=True, tag_field="type", tag="counted"):
    """To be added to a counter of the consumer."""

    name: str
    amount: int = 1


class LogWanted(msgspec.Struct, frozen=True, tag_field="type", tag="log_wanted"):
    """Something to be logged.

    event: its fields in a JSON log.
    level: of the module `logging`.
    """

    text: str
    event: dict[str, Any]
    level: int


class ActionWanted(msgspec.Struct, frozen=True, tag_field="type", tag="action_wanted"):
    """An action of a page, for the hub."""

    action: Action


class HealthWanted(msgspec.Struct, frozen=True, tag_field="type", tag="health_wanted"):
    """Whether a page shows the hub's counters."""

    wanted: bool


ToPages = PageSetup | EngineMet | EngineLeft | RowsTaken | RequestOver | EventTaken | ActionAnswered | HubAlive
FromPages = Listening | StartFailed | Counted | LogWanted | HealthWanted | ActionWanted

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ToPages | FromPages] = msgspec.msgpack.Decoder(ToPages | FromPages)


class Channel:
    """One end of the channel. Any thread may send; one thread receives.

    timeout_s: how long a message may take to be sent; the channel is broken after that.
    """

    def __init__(self, end: socket.socket, timeout_s: float | None = None) -> None:
        end.settimeout(timeout_s)
        self._end = end
        # Held while a message is sent.
        self._lock = threading.Lock()

    def send(self, message: ToPages | FromPages, rows: Sequence[Any] = ()) -> None:
        """Send a message. Raises OSError if the other side is gone or does not read."""
        head = _encoder.encode(message)
        nbytes = sum(len(part) for part in rows)
        with self._lock:
            self._end.sendall(_LENGTHS.pack(len(head), nbytes) + head)
            for part in rows:
                self._end.sendall(part)

    def receive(self) -> tuple[ToPages | FromPages, memoryview]:
        """Wait for a message and return it with its rows. Raises EOFError if the other side is gone."""
        head_bytes, nbytes = _LENGTHS.unpack(self._read(_LENGTHS.size))
        head = self._read(head_bytes)
        return _decoder.decode(head), self._read(nbytes)

    def close(self) -> None:
        """End the channel; a `receive` that waits raises EOFError."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _read(self, nbytes: int) -> memoryview:
        # A bytearray would be filled with zeros first.
        data = memoryview(np.empty(nbytes, np.uint8).data)
        done = 0
        while done < nbytes:
            try:
                count = self._end.recv_into(data[done:], nbytes - done)
            except TimeoutError:
                continue
            except OSError as e:
                raise EOFError from e
            if not count:
                raise EOFError
            done += count
        return data
