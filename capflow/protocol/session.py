"""The session protocol without any I/O: which message may be sent when, and what is kept until it is acknowledged.

`PeerSession` is the side of a worker, a scheduler or a client. `HubSession` is the hub's side of one connection.
`Intake` is what the hub has of one boot of one worker; it outlives connections. Parts that arrived go into `receive`,
which returns their message. The other methods take a message to send and return its parts. Time is always an argument,
in seconds of any monotonic clock.

The states of a peer, and the events that change them:

| state | connected | Welcome | Refused | Bye, lost |
|---|---|---|---|---|
| LOST | HELLO | | | LOST |
| HELLO | HELLO | OPEN | REFUSED | LOST |
| OPEN | HELLO | error | REFUSED | LOST |
| REFUSED | HELLO | error | REFUSED | REFUSED (Bye), LOST |

Credit: a frame costs the bytes of its parts. A peer starts with `Welcome.credit_bytes`, pays for each frame that it
sends, and gains `Ack.credit_bytes`. Without enough credit it sends a frame only if it has no unacknowledged one, so a
frame larger than the whole credit still gets through. Whatever the credit, the frames sent and not acknowledged are at
most `limits.UNACKED_BYTES_MAX`: a hub can delay a peer but not fill its memory. Frames are kept until `Ack.seq` covers
them. After a reconnect the frames above `Welcome.last_seq` are sent again, in order. The others wait for their
acknowledgement; if the hub is killed before it gives one, they are sent again to its successor.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from capflow import limits
from capflow.capture.dtypes import DTYPES
from capflow.capture.frame import PROTOCOL_VERSION, Frame, FrameHeader
from capflow.capture.site import HOOKS, Site
from capflow.errors import LocalProtocolError, RemoteProtocolError, explain
from capflow.protocol import message as messages
from capflow.protocol.credit import Intake
from capflow.protocol.message import (
    Ack,
    Act,
    ActBatch,
    ActionOutcome,
    Await,
    Beat,
    Bye,
    FollowSteering,
    HeldSteering,
    Hello,
    Message,
    Refused,
    Results,
    SharedSteering,
    Status,
    Watched,
    WatchedEvent,
    WatchRequest,
    Welcome,
)
from capflow.protocol.row_format import RowFormat
from capflow.version import __version__

Parts = Sequence[Any]
"""One message as its ZMQ parts: objects with the buffer protocol."""

FRAME_PARTS = 2
"""The parts of a frame: its header and its payload."""


class State(enum.Enum):
    """The state of a session."""

    LOST = "lost"
    """Not connected."""
    HELLO = "hello"
    """The Hello was sent; the answer has not come."""
    OPEN = "open"
    REFUSED = "refused"


_FROM_PEER: dict[str, tuple[type[Any], ...]] = {
    "worker": (Frame, Beat, Bye),
    "scheduler": (ActionOutcome, Beat, Bye),
    "client": (Act, ActBatch, Await, Status, WatchRequest, FollowSteering, SharedSteering, HeldSteering, Beat, Bye),
}
_FROM_HUB: dict[str, tuple[type[Any], ...]] = {
    "worker": (Ack, Beat, Bye, Refused),
    "scheduler": (Act, Beat, Bye, Refused),
    "client": (
        *(ActionOutcome, Results, Status, Watched, WatchedEvent, SharedSteering, HeldSteering),
        *(Frame, Beat, Bye, Refused),
    ),
}


class UnexpectedMessageError(RemoteProtocolError):
    """The peer sent a valid message that this state or this peer does not allow."""


def cost(parts: Parts) -> int:
    """Return the credit that a frame's parts cost, in bytes."""
    return sum(map(len, parts))


def decode(
    parts: Parts,
    read: Callable[[Any], Message] = messages.decode,
    bytes_max: int = limits.HEADER_BYTES_MAX,
) -> Frame | Message:
    """Return the message in these parts.

    read: decodes a message that is not a frame.
    bytes_max: the largest size of such a message.

    Raises RemoteProtocolError if the parts are no message of this version, or several frames: see `frames_in`.
    """
    if not 1 <= len(parts) <= FRAME_PARTS:
        raise RemoteProtocolError(explain("message", got=f"{len(parts)} parts", expected="1, or 2 for each frame"))
    if len(parts) == FRAME_PARTS:
        return Frame.decode(parts[0], parts[1])
    if len(parts[0]) > bytes_max:
        expected = f"at most {bytes_max}"
        raise RemoteProtocolError(explain("message", got=f"{len(parts[0])} bytes", expected=expected))
    try:
        return read(parts[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        expected = f"a message of protocol version {PROTOCOL_VERSION}"
        raise RemoteProtocolError(explain("message", got=str(e), expected=expected)) from e


def frames_in(parts: Parts) -> int:
    """Return how many frames a message holds, one after another; 0 if it is another message or none."""
    frames, odd = divmod(len(parts), FRAME_PARTS)
    return 0 if odd or frames > limits.MESSAGE_FRAMES_MAX else frames


class _Pulse:
    """The times when each side of a session last sent something."""

    def __init__(self, now: float) -> None:
        self.sent = now
        self.heard = now

    def beat_due(self) -> float:
        return self.sent + limits.HEARTBEAT_S

    def silence_due(self) -> float:
        return self.heard + limits.SILENCE_S_MAX


class _Kept(NamedTuple):
    """A frame that is not acknowledged."""

    seq: int
    cost: int
    parts: Parts


class _Session:
    """What both sides have: a state, and a Beat after a silence."""

    def __init__(self, now: float) -> None:
        self.state = State.LOST
        self._pulse = _Pulse(now)

    def tick(self, now: float) -> Parts | None:
        """Return a Beat if one is due."""
        if self.state is State.OPEN and now >= self._pulse.beat_due():
            return self._encoded(Beat(), now)
        return None

    def _encoded(self, message: Message, now: float) -> Parts:
        self._pulse.sent = now
        return [messages.encode(message)]


class PeerSession(_Session):
    """The side of a worker, a scheduler or a client; one for the life of the peer, over all its connections.

    hello: the peer's identity.
    seq: the last frame number used before, or a larger one.
    """

    def __init__(self, hello: Hello, *, seq: int = 0, now: float = 0.0) -> None:
        super().__init__(now)
        self.hello = hello
        # The hub's latest Welcome; kept while the connection is lost.
        self.welcome: Welcome | None = None
        # The hub's reason for a refusal; cleared by the next connection.
        self.refusal: str | None = None
        self.credit_bytes = 0
        # The last number given to a frame, or a larger one.
        self.seq = seq
        # The hub has acknowledged every frame up to this number.
        self.acked = 0
        # The cost of all unacknowledged frames; other threads may read it.
        self.unacked_bytes = 0
        # The largest value of `unacked_bytes`; other threads may read it.
        self.unacked_bytes_peak = 0
        # Frames to be sent, in order; emptied by `next_frame`.
        self._waiting: deque[_Kept] = deque()
        # Frames sent on this connection and not acknowledged; emptied by Acks.
        self._sent: deque[_Kept] = deque()
        # The cost of the frames in `_sent`.
        self._sent_bytes = 0
        # When the Hello of this connection was sent.
        self._greeted = now
        # How many frames a message may have; set by the Welcome.
        self._frames_max = 1

    @property
    def unacked(self) -> int:
        """The number of unacknowledged frames."""
        return len(self._sent) + len(self._waiting)

    @property
    def waiting(self) -> bool:
        """Whether a frame waits for credit or for a connection."""
        return bool(self._waiting)

    def connected(self, now: float) -> Parts:
        """Start a session on a new connection; return the Hello."""
        self.lost()
        self.state = State.HELLO
        self.refusal = None
        self._pulse = _Pulse(now)
        self._greeted = now
        return self._encoded(self.hello, now)

    def lost(self) -> None:
        """End the session: the connection is gone, and unacknowledged frames may have to be sent again."""
        self.state = State.LOST
        self._sent.extend(self._waiting)
        self._waiting, self._sent = self._sent, deque()
        self._sent_bytes = 0

    def push(self, header: FrameHeader, payload: Any) -> None:
        """Number and seal a frame, and queue it. `next_frame` returns its parts when there is credit.

        Raises LocalProtocolError if this peer is not a worker, or the header is larger than a hub takes.
        """
        if self.hello.role != "worker":
            raise LocalProtocolError(explain("frame", got=f"from a {self.hello.role}", expected="from a worker"))
        parts = Frame.seal(header, payload, seq=self.seq + 1).encode()
        if len(parts[0]) > limits.FRAME_HEADER_BYTES_MAX:
            expected = f"at most {limits.FRAME_HEADER_BYTES_MAX}"
            do = "compute fewer tokens a step (vLLM's max_num_batched_tokens)"
            raise LocalProtocolError(explain("frame header", got=f"{len(parts[0])} bytes", expected=expected, do=do))
        # The number is used only now, so that a frame that cannot be sent leaves no gap.
        self.seq += 1
        self._waiting.append(self._kept(self.seq, parts))

    def push_sealed(self, seq: int, parts: Parts) -> None:
        """Queue a frame that was numbered and sealed before, perhaps by an earlier process."""
        self.seq = seq
        self._waiting.append(self._kept(seq, parts))

    def push_checked(self, frames: Sequence[Frame]) -> None:
        """Queue sealed and checked frames for a hub of this process, to be sent at once: `next_frame` returns them."""
        self.seq = frames[-1].header.seq
        self._waiting.append(self._kept(self.seq, frames, sum([frame.wire_bytes for frame in frames])))

    def push_had(self, seq: int, parts: Parts) -> None:
        """Keep a frame of an earlier process that the hub has, by its Welcome; another hub will be sent it.

        All such frames come before the first one to be sent.
        """
        self._note_sent(self._kept(seq, parts))

    def _kept(self, seq: int, parts: Parts, nbytes: int | None = None) -> _Kept:
        kept = _Kept(seq, cost(parts) if nbytes is None else nbytes, parts)
        self.unacked_bytes += kept.cost
        self.unacked_bytes_peak = max(self.unacked_bytes_peak, self.unacked_bytes)
        return kept

    def _note_sent(self, kept: _Kept) -> None:
        self._sent.append(kept)
        self._sent_bytes += kept.cost

    def next_frame(self, now: float) -> Parts | None:
        """Return the parts of the next frame to send; None if none waits or none may be sent."""
        if self.state is not State.OPEN or not self._waiting:
            return None
        kept = self._waiting[0]
        assert self.welcome is not None
        too_much = self._sent_bytes + kept.cost > limits.UNACKED_BYTES_MAX
        # The hub may hold frames of an earlier process.
        held = self._sent or self.acked < self.welcome.last_seq
        if (self._sent and too_much) or (held and kept.cost > self.credit_bytes):
            return None
        self._note_sent(self._waiting.popleft())
        self.credit_bytes -= kept.cost
        self._pulse.sent = now
        return kept.parts

    def next_frames(self, now: float, fill: Callable[[], bool]) -> Parts | None:
        """Return the parts of the next message; None if no frame waits or none may be sent.

        It has several frames if they are small and may be sent now. It does not wait for more.

        fill: gives this session one more frame, if there is one; returns whether there was.
        """
        message: list[Any] = []
        room = limits.MESSAGE_FRAMES_BYTES_MAX
        for _ in range(self._frames_max):
            if not self._waiting and not fill():
                break
            nbytes = self._waiting[0].cost
            if message and nbytes > room:
                break
            if (parts := self.next_frame(now)) is None:
                break
            message += parts
            room -= nbytes
        return message or None

    def send(self, message: Message, now: float) -> Parts:
        """Return the parts of a message to send now.

        Raises LocalProtocolError if this peer must not send it now.
        """
        if self.state is not State.OPEN or not isinstance(message, _FROM_PEER[self.hello.role]):
            raise _not_allowed(message, f"a {self.hello.role}", self.state)
        return self._encoded(message, now)

    def receive(self, parts: Parts, now: float) -> Frame | Message:
        """Return the hub's message, after the session has acted on it.

        Raises RemoteProtocolError if the hub must not send it; close the connection then.
        """
        message = decode(parts, messages.decode_from_hub)
        self._pulse.heard = now
        match message:
            case Refused():
                self.state = State.REFUSED
                self.refusal = message.reason
            case Bye():
                if self.state is not State.REFUSED:
                    self.lost()
            case Welcome() if self.state is State.HELLO:
                self._open(message)
            case Ack() if self.state is State.OPEN and self.hello.role == "worker":
                self._acknowledge(message)
            case _ if self.state is not State.OPEN or not isinstance(message, _FROM_HUB[self.hello.role]):
                raise _unexpected(message, self.state)
        return message

    def deadline(self, until_s: float) -> float:
        """Return a time on this side's clock that is not later than `until_s` on the hub's clock.

        The hub read its clock for the Welcome after the Hello was sent, so `Welcome.clock_s` is not earlier than the
        Hello.
        """
        assert self.welcome is not None
        return self._greeted + until_s - self.welcome.clock_s

    def silent(self, now: float) -> bool:
        """Return whether the hub has been silent for so long that the connection counts as lost."""
        return self.state in (State.HELLO, State.OPEN) and now >= self._pulse.silence_due()

    def due(self) -> float | None:
        """Return when to call `tick` and `silent` next; None if never."""
        if self.state is State.OPEN:
            return min(self._pulse.beat_due(), self._pulse.silence_due())
        return self._pulse.silence_due() if self.state is State.HELLO else None

    def _open(self, welcome: Welcome) -> None:
        if welcome.version != PROTOCOL_VERSION:
            raise _other_version("hub", welcome.version)
        if not 0 <= welcome.last_seq <= self.seq:
            raise RemoteProtocolError(explain("last_seq", got=welcome.last_seq, expected=f"0..{self.seq}"))
        self.state = State.OPEN
        self.welcome = welcome
        frames_max = 1 if welcome.frames_max is msgspec.UNSET else welcome.frames_max
        self._frames_max = max(1, min(frames_max, limits.MESSAGE_FRAMES_MAX))
        self.credit_bytes = min(welcome.credit_bytes, limits.UNACKED_BYTES_MAX)
        while self._waiting and self._waiting[0].seq <= welcome.last_seq:
            self._note_sent(self._waiting.popleft())

    def _acknowledge(self, ack: Ack) -> None:
        sent_last = self._sent[-1].seq if self._sent else self.acked
        # These frames may be of an earlier process.
        had = self.welcome.last_seq if self.welcome is not None else 0
        if ack.credit_bytes < 0 or ack.seq > max(sent_last, self.acked, had):
            raise RemoteProtocolError(
                explain("ack", got=f"{ack.seq}, {ack.credit_bytes} bytes", expected="of what was sent")
            )
        self.credit_bytes = min(self.credit_bytes + ack.credit_bytes, limits.UNACKED_BYTES_MAX)
        self.acked = max(self.acked, ack.seq)
        while self._sent and self._sent[0].seq <= self.acked:
            nbytes = self._sent.popleft().cost
            self._sent_bytes -= nbytes
            self.unacked_bytes -= nbytes


class HubSession(_Session):
    """The hub's side of one connection, from its Hello to its end.

    user: the peer's public key; "" without keys.
    """

    def __init__(self, *, now: float = 0.0, user: str = "") -> None:
        super().__init__(now)
        self.user = user
        # Set by the Hello.
        self.hello: Hello | None = None
        # Set by `welcome`, for a worker.
        self.intake: Intake | None = None
        # The format of a worker's frames; set by the Hello.
        self._format: RowFormat | None = None

    def receive(self, parts: Parts, now: float, frame: Frame | None = None) -> Frame | Message:
        """Return the peer's message.

        frame: the result of `Frame.read` for these parts; None to read them here.

        Raises RemoteProtocolError if the peer must not send it; answer with `refuse`.
        """
        message: Frame | Message
        if frame is not None:
            frame.check()
            self._pulse.heard = now
            self._check_frame(frame)
            return frame
        bytes_max = limits.HEADER_BYTES_MAX if self.state is State.OPEN else limits.HELLO_BYTES_MAX
        message = decode(parts, messages.decode_from_peer, bytes_max)
        self._pulse.heard = now
        if isinstance(message, Hello):
            self._check_hello(message)
            self.state = State.HELLO
            self.hello = message
            self.intake = None
            self._format = None if message.model is None else RowFormat(message.model)
        elif self.state is not State.OPEN or self.hello is None or not isinstance(message, _FROM_PEER[self.hello.role]):
            raise _unexpected(message, self.state)
        elif isinstance(message, Frame):
            self._check_frame(message)
        return message

    def _check_frame(self, frame: Frame) -> None:
        """Raise RemoteProtocolError unless the peer may send this frame."""
        hello, header = self.hello, frame.header
        if self.state is not State.OPEN or hello is None or hello.role != "worker":
            raise _unexpected(frame, self.state)
        if header.engine != hello.engine or header.boot != hello.boot or header.rank != hello.rank:
            raise RemoteProtocolError(
                explain("frame", got=f"of {header.engine} {tuple(header.rank)}", expected="the peer's own")
            )
        assert self._format is not None
        self._format.check(header)

    def welcome(self, welcome: Welcome, now: float, intake: Intake | None = None) -> Iterator[Parts]:
        """Yield the messages that open the session. A worker's credit and `last_seq` come from its intake."""
        if self.state is not State.HELLO:
            raise LocalProtocolError(explain("welcome", got=f"state {self.state.value}", expected="a Hello before it"))
        self.state = State.OPEN
        self.intake = intake
        if intake is None:
            yield self._encoded(welcome, now)
            return
        credit, last = intake.grant(), intake.last_seq
        yield self._encoded(msgspec.structs.replace(welcome, credit_bytes=credit, last_seq=last), now)
        if intake.last_seq:
            yield self._encoded(Ack(intake.acked, 0), now)

    def refuse(self, reason: str, now: float) -> Parts:
        """End the session; return the refusal."""
        self.state = State.REFUSED
        return self._encoded(Refused(reason), now)

    def send(self, message: Message, now: float) -> Parts:
        """Return the parts of a message to send to this peer now.

        Raises LocalProtocolError if the hub must not send it now.
        """
        if self.state is not State.OPEN or self.hello is None or not isinstance(message, _FROM_HUB[self.hello.role]):
            raise _not_allowed(message, "the hub", self.state)
        return self._encoded(message, now)

    @property
    def heard_at(self) -> float:
        """The time of the peer's last message."""
        return self._pulse.heard

    def silent(self, now: float) -> bool:
        """Return whether the peer has been silent for so long that it counts as gone."""
        return now >= self._pulse.silence_due()

    def _check_hello(self, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            raise _other_version(hello.role, hello.version)
        if hello.role != "client" and hello.model is None:
            raise RemoteProtocolError(explain("hello.model", got="none", expected=f"the model of the {hello.role}"))
        model = hello.model
        if model is not None and not (
            1 <= model.stages <= limits.LAYERS_MAX
            and 1 <= model.num_layers <= limits.LAYERS_MAX
            and 1 <= model.hidden_size <= limits.HIDDEN_SIZE_MAX
            and model.dtype in DTYPES
        ):
            got = f"{model.num_layers} layers of {model.hidden_size} {model.dtype}"
            raise RemoteProtocolError(explain("hello.model", got=got, expected="sizes in bounds and a known dtype"))
        if model is not None and hello.rank.pp >= model.stages:
            expected = f"below {model.stages}, as many as the model has"
            raise RemoteProtocolError(explain("hello.rank, pipeline stage", got=hello.rank.pp, expected=expected))
        if model is not None and model.shapes is not msgspec.UNSET:
            for shape, sites in model.shapes:
                if not shape or math.prod(shape) > limits.HIDDEN_SIZE_MAX or not set(sites) <= set(model.sites):
                    got, expected = f"{list(shape)} for {len(sites)} sites", "sizes in bounds, of sites of the model"
                    raise RemoteProtocolError(explain("hello.model.shapes", got=got, expected=expected))
        if model is not None:
            _check_forms("attention", model.attention, ("q", "k"), model.sites)
            _check_forms("router", model.router, ("router",), model.sites)
        for site in (*model.sites, *model.fixed) if model is not None else ():
            if site.hook not in HOOKS or not 0 <= site.layer < limits.LAYERS_MAX:
                raise RemoteProtocolError(explain("hello.model.sites", got=tuple(site), expected="layers and hooks"))


def _check_forms(name: str, forms: Any, hooks: tuple[str, ...], sites: Collection[Site]) -> None:
    """Raise RemoteProtocolError unless the layers of forms have taps at the hooks that the forms are about."""
    for _, layers in () if forms is msgspec.UNSET else forms:
        if not {Site(layer, hook) for layer in layers for hook in hooks} <= set(sites):
            expected = f"layers with {' and '.join(hooks)} among the model's sites"
            raise RemoteProtocolError(explain(f"hello.model.{name}", got=layers, expected=expected))


def _other_version(who: str, version: int) -> RemoteProtocolError:
    where, expected = f"{who}: version of the wire protocol", f"{PROTOCOL_VERSION}, that of capflow {__version__} here"
    return RemoteProtocolError(explain(where, got=version, expected=expected, do="run one release on both sides"))


def _unexpected(message: Any, state: State) -> UnexpectedMessageError:
    expected = "a message that this state allows"
    return UnexpectedMessageError(explain(type(message).__name__, got=f"state {state.value}", expected=expected))


def _not_allowed(message: Message, sender: str, state: State) -> LocalProtocolError:
    subject = f"{type(message).__name__} from {sender}"
    return LocalProtocolError(explain(subject, got=f"state {state.value}", expected="an open session that allows it"))
