"""The session protocol, without any I/O: what may be said when, and what must be kept until it is acknowledged.

`PeerSession` is the side of a worker, a scheduler or a client; `HubSession` is the hub's side of one
connection, and `Intake` is what the hub has of one boot of one worker, which outlives connections.
Parts that arrived go into `receive`, which returns what they say; what is to be said goes into the other
methods, which return the parts to send. Time is an argument everywhere, in seconds of any monotonic clock.

States of a peer, and what moves it:

| state | connected | Welcome | Refused | Bye, lost |
|---|---|---|---|---|
| LOST | HELLO | | | LOST |
| HELLO | HELLO | OPEN | REFUSED | LOST |
| OPEN | HELLO | error | REFUSED | LOST |
| REFUSED | HELLO | error | REFUSED | REFUSED (Bye), LOST |

Credit: a frame costs the bytes of its parts. A peer starts with `Welcome.credit_bytes`, pays for each frame that it
sends, and gains `Ack.credit_bytes`. It sends a frame that it cannot pay for only when it has
none unacknowledged, so that a frame larger than all its credit still gets through. Whatever credit it is given, it
has no more than `limits.UNACKED_BYTES_MAX` of frames sent and not acknowledged: a hub can hold it up, not fill its memory. Frames are kept
until `Ack.seq` covers them. After a reconnect those above `Welcome.last_seq` are sent again, in order; the
others wait for their acknowledgement: a hub that is killed before it gives it has them resent to its successor.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from capflow import limits
from capflow.capture.frame import DTYPES, PROTOCOL_VERSION, Frame, FrameHeader
from capflow.capture.site import HOOKS
from capflow.errors import LocalProtocolError, RemoteProtocolError, explain
from capflow.protocol import message
from capflow.protocol.credit import Intake
from capflow.protocol.message import (
    Ack,
    Act,
    ActionOutcome,
    Await,
    Beat,
    Bye,
    Hello,
    Message,
    Refused,
    Results,
    Status,
    Watched,
    WatchRequest,
    Welcome,
)
from capflow.protocol.row_format import RowFormat

Parts = Sequence[Any]
"""One message as it lies in ZMQ parts: objects with the buffer protocol."""


class State(enum.Enum):
    """Where a session stands."""

    LOST = "lost"
    """Not connected."""
    HELLO = "hello"
    """Hello was said, the answer has not come."""
    OPEN = "open"
    REFUSED = "refused"


_FROM_PEER: dict[str, tuple[type[Any], ...]] = {
    "worker": (Frame, Beat, Bye),
    "scheduler": (ActionOutcome, Beat, Bye),
    "client": (Act, Await, Status, WatchRequest, Beat, Bye),
}
_FROM_HUB: dict[str, tuple[type[Any], ...]] = {
    "worker": (Ack, Beat, Bye, Refused),
    "scheduler": (Act, Beat, Bye, Refused),
    "client": (ActionOutcome, Results, Status, Watched, Frame, Beat, Bye, Refused),
}


class UnexpectedMessageError(RemoteProtocolError):
    """The peer sent a message that is one, but not for this state or this peer."""


def cost(parts: Parts) -> int:
    """Return the credit that a frame's parts cost, in bytes."""
    return sum(map(len, parts))


def decode(
    parts: Parts,
    read: Callable[[Any], Message] = message.decode,
    bytes_max: int = limits.HEADER_BYTES_MAX,
) -> Frame | Message:
    """Return what the parts of one message say; `read` takes one that is no frame, of at most `bytes_max` bytes.

    Raises RemoteProtocolError when they say nothing that this version knows.
    """
    if not 1 <= len(parts) <= limits.MESSAGE_PARTS_MAX:
        raise RemoteProtocolError(explain("message", got=f"{len(parts)} parts", expected="1 or 2"))
    if len(parts) == limits.MESSAGE_PARTS_MAX:
        return Frame.decode(parts[0], parts[1])
    if len(parts[0]) > bytes_max:
        expected = f"at most {bytes_max}"
        raise RemoteProtocolError(explain("message", got=f"{len(parts[0])} bytes", expected=expected))
    try:
        return read(parts[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        expected = f"a message of protocol version {PROTOCOL_VERSION}"
        raise RemoteProtocolError(explain("message", got=str(e), expected=expected)) from e


class _Pulse:
    """When each side of a session last spoke."""

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


class PeerSession:
    """The worker's, scheduler's or client's side; one for the life of the peer, over all its connections."""

    def __init__(self, hello: Hello, *, seq: int = 0, now: float = 0.0) -> None:
        self.hello = hello
        self.state = State.LOST
        # The hub's latest; kept while the connection is lost.
        self.welcome: Welcome | None = None
        # Why the hub refused; cleared by the next connection.
        self.refusal: str | None = None
        self.credit_bytes = 0
        # The last number given to a frame, or one that is not below it.
        self.seq = seq
        # Every frame up to here is the hub's.
        self.acked = 0
        # Of the frames kept because they are not acknowledged; other threads may read it.
        self.unacked_bytes = 0
        # Likewise.
        self.unacked_bytes_peak = 0
        # To be sent, in order; emptied by `next_frame`.
        self._waiting: deque[_Kept] = deque()
        # Sent on this connection, not acknowledged; emptied by Acks.
        self._sent: deque[_Kept] = deque()
        # Of these.
        self._sent_bytes = 0
        self._pulse = _Pulse(now)
        # When the Hello of this connection was said.
        self._greeted = now

    @property
    def unacked(self) -> int:
        """How many frames are kept because they are not acknowledged."""
        return len(self._sent) + len(self._waiting)

    @property
    def waiting(self) -> bool:
        """Whether a frame waits for credit or for a connection."""
        return bool(self._waiting)

    def connected(self, now: float) -> Parts:
        """Return the Hello, a new connection having been made."""
        self.lost()
        self.state = State.HELLO
        self.refusal = None
        self._pulse = _Pulse(now)
        self._greeted = now
        return self._said(self.hello, now)

    def lost(self) -> None:
        """Note that the connection is gone: what is not acknowledged may have to be sent again."""
        self.state = State.LOST
        self._sent.extend(self._waiting)
        self._waiting, self._sent = self._sent, deque()
        self._sent_bytes = 0

    def push(self, header: FrameHeader, payload: Any) -> None:
        """Take a frame to send: numbers and seals it. `next_frame` gives its parts when there is credit.

        Raises LocalProtocolError when this peer sends no frames, or the header is larger than a hub takes.
        """
        if self.hello.role != "worker":
            raise LocalProtocolError(explain("frame", got=f"from a {self.hello.role}", expected="from a worker"))
        parts = Frame.seal(msgspec.structs.replace(header, seq=self.seq + 1), payload).encode()
        if len(parts[0]) > limits.FRAME_HEADER_BYTES_MAX:
            expected = f"at most {limits.FRAME_HEADER_BYTES_MAX}"
            do = "compute fewer tokens a step (vLLM's max_num_batched_tokens)"
            raise LocalProtocolError(explain("frame header", got=f"{len(parts[0])} bytes", expected=expected, do=do))
        self.seq += 1  # only now: there is no gap where one cannot be sealed
        self._keep(parts)

    def push_sealed(self, seq: int, parts: Parts) -> None:
        """Take a frame that was numbered and sealed before, by this process or one that is gone."""
        self.seq = seq
        self._keep(parts)

    def push_had(self, seq: int, parts: Parts) -> None:
        """Take a frame that the hub had of a process that is gone, by its Welcome, before any that is to be sent: another hub is sent it."""
        self._note_sent(self._kept(seq, parts))

    def _keep(self, parts: Parts) -> None:
        self._waiting.append(self._kept(self.seq, parts))

    def _kept(self, seq: int, parts: Parts) -> _Kept:
        kept = _Kept(seq, cost(parts), parts)
        self.unacked_bytes += kept.cost
        self.unacked_bytes_peak = max(self.unacked_bytes_peak, self.unacked_bytes)
        return kept

    def _note_sent(self, kept: _Kept) -> None:
        self._sent.append(kept)
        self._sent_bytes += kept.cost

    def next_frame(self, now: float) -> Parts | None:
        """Return the parts of the next frame to send; None when none waits or none may be sent."""
        if self.state is not State.OPEN or not self._waiting:
            return None
        kept = self._waiting[0]
        assert self.welcome is not None
        too_much = self._sent_bytes + kept.cost > limits.UNACKED_BYTES_MAX
        held = self._sent or self.acked < self.welcome.last_seq  # the hub may hold frames of a process that is gone
        if (self._sent and too_much) or (held and kept.cost > self.credit_bytes):
            return None
        self._note_sent(self._waiting.popleft())
        self.credit_bytes -= kept.cost
        self._pulse.sent = now
        return kept.parts

    def send(self, said: Message, now: float) -> Parts:
        """Return the parts of a message that this peer may send now.

        Raises LocalProtocolError when it may not.
        """
        if self.state is not State.OPEN or not isinstance(said, _FROM_PEER[self.hello.role]):
            what = f"{type(said).__name__} from a {self.hello.role}"
            raise LocalProtocolError(
                explain(what, got=f"state {self.state.value}", expected="an open session that has it")
            )
        return self._said(said, now)

    def receive(self, parts: Parts, now: float) -> Frame | Message:
        """Return what the hub said, having done what it means for the session.

        Raises RemoteProtocolError when the hub may not say it; the connection is of no use then.
        """
        said = decode(parts, message.decode_from_hub)
        self._pulse.heard = now
        match said:
            case Refused():
                self.state = State.REFUSED
                self.refusal = said.reason
            case Bye():
                if self.state is not State.REFUSED:
                    self.lost()
            case Welcome() if self.state is State.HELLO:
                self._open(said)
            case Ack() if self.state is State.OPEN and self.hello.role == "worker":
                self._acknowledge(said)
            case _ if self.state is not State.OPEN or not isinstance(said, _FROM_HUB[self.hello.role]):
                raise _unexpected(said, self.state)
        return said

    def deadline(self, until_s: float) -> float:
        """Return a time on this side's clock that is not later than `until_s` on the hub's.

        The hub read its clock for the Welcome after the Hello was said, so that its time came no earlier than that.
        """
        assert self.welcome is not None
        return self._greeted + until_s - self.welcome.clock_s

    def tick(self, now: float) -> Parts | None:
        """Return a Beat if one is due."""
        if self.state is State.OPEN and now >= self._pulse.beat_due():
            return self._said(Beat(), now)
        return None

    def silent(self, now: float) -> bool:
        """Return whether the hub has said nothing for so long that the connection is of no use."""
        return self.state in (State.HELLO, State.OPEN) and now >= self._pulse.silence_due()

    def due(self) -> float | None:
        """Return when `tick` or `silent` has something to say next; None if never."""
        if self.state is State.OPEN:
            return min(self._pulse.beat_due(), self._pulse.silence_due())
        return self._pulse.silence_due() if self.state is State.HELLO else None

    def _open(self, welcome: Welcome) -> None:
        if welcome.version != PROTOCOL_VERSION:
            raise RemoteProtocolError(explain("hub's version", got=welcome.version, expected=str(PROTOCOL_VERSION)))
        if not 0 <= welcome.last_seq <= self.seq:
            raise RemoteProtocolError(explain("last_seq", got=welcome.last_seq, expected=f"0..{self.seq}"))
        self.state = State.OPEN
        self.welcome = welcome
        self.credit_bytes = min(welcome.credit_bytes, limits.UNACKED_BYTES_MAX)
        while self._waiting and self._waiting[0].seq <= welcome.last_seq:
            self._note_sent(self._waiting.popleft())

    def _acknowledge(self, ack: Ack) -> None:
        sent_last = self._sent[-1].seq if self._sent else self.acked
        had = self.welcome.last_seq if self.welcome is not None else 0  # perhaps from a process that is gone
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

    def _said(self, said: Message, now: float) -> Parts:
        self._pulse.sent = now
        return [message.encode(said)]


class HubSession:
    """The hub's side of one connection, from its Hello to its end.

    user: the peer's public key, "" where there are none.
    """

    def __init__(self, *, now: float = 0.0, user: str = "") -> None:
        self.user = user
        # Until the Hello.
        self.state = State.LOST
        # Set by the Hello.
        self.hello: Hello | None = None
        # A worker's, set by `welcome`.
        self.intake: Intake | None = None
        # Of a worker's frames, set by the Hello.
        self._format: RowFormat | None = None
        self._pulse = _Pulse(now)

    def receive(self, parts: Parts, now: float, frame: Frame | None = None) -> Frame | Message:
        """Return what the peer said.

        frame: what `Frame.read` returned for these parts; None to read them here.

        Raises RemoteProtocolError when the peer may not say it; answer with `refuse`.
        """
        said: Frame | Message
        if frame is None:
            bytes_max = limits.HEADER_BYTES_MAX if self.state is State.OPEN else limits.HELLO_BYTES_MAX
            said = decode(parts, message.decode_from_peer, bytes_max)
        else:
            frame.check()
            said = frame
        self._pulse.heard = now
        if isinstance(said, Hello):
            self._check_hello(said)
            self.state = State.HELLO
            self.hello = said
            self.intake = None
            self._format = None if said.model is None else RowFormat(said.model)
        elif self.state is not State.OPEN or self.hello is None or not isinstance(said, _FROM_PEER[self.hello.role]):
            raise _unexpected(said, self.state)
        elif isinstance(said, Frame):
            header = said.header
            if (header.engine, header.boot, header.rank) != (self.hello.engine, self.hello.boot, self.hello.rank):
                raise RemoteProtocolError(
                    explain("frame", got=f"of {header.engine} {tuple(header.rank)}", expected="the peer's own")
                )
            assert self._format is not None
            self._format.check(header)
        return said

    def welcome(self, welcome: Welcome, now: float, intake: Intake | None = None) -> Iterator[Parts]:
        """Yield the messages that open the session; a worker's credit and numbers are those of its intake."""
        if self.state is not State.HELLO:
            raise LocalProtocolError(explain("welcome", got=f"state {self.state.value}", expected="a Hello before it"))
        self.state = State.OPEN
        self.intake = intake
        if intake is None:
            yield self._said(welcome, now)
            return
        credit, last = intake.grant(), intake.last_seq
        yield self._said(msgspec.structs.replace(welcome, credit_bytes=credit, last_seq=last), now)
        if intake.last_seq:
            yield self._said(Ack(intake.acked, 0), now)

    def refuse(self, reason: str, now: float) -> Parts:
        """Return the refusal; the session is over."""
        self.state = State.REFUSED
        return self._said(Refused(reason), now)

    def send(self, said: Message, now: float) -> Parts:
        """Return the parts of a message that the hub may send this peer now.

        Raises LocalProtocolError when it may not.
        """
        if self.state is not State.OPEN or self.hello is None or not isinstance(said, _FROM_HUB[self.hello.role]):
            what = f"{type(said).__name__} from the hub"
            raise LocalProtocolError(
                explain(what, got=f"state {self.state.value}", expected="an open session that has it")
            )
        return self._said(said, now)

    def tick(self, now: float) -> Parts | None:
        """Return a Beat if one is due."""
        if self.state is State.OPEN and now >= self._pulse.beat_due():
            return self._said(Beat(), now)
        return None

    @property
    def heard_at(self) -> float:
        """When the peer last said something."""
        return self._pulse.heard

    def silent(self, now: float) -> bool:
        """Return whether the peer has said nothing for so long that it is taken to be gone."""
        return now >= self._pulse.silence_due()

    def _check_hello(self, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            raise RemoteProtocolError(explain("peer's version", got=hello.version, expected=str(PROTOCOL_VERSION)))
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
        for site in (*model.sites, *model.fixed) if model is not None else ():
            if site.hook not in HOOKS or not 0 <= site.layer < limits.LAYERS_MAX:
                raise RemoteProtocolError(explain("hello.model.sites", got=tuple(site), expected="layers and hooks"))

    def _said(self, said: Message, now: float) -> Parts:
        self._pulse.sent = now
        return [message.encode(said)]


def _unexpected(said: Any, state: State) -> UnexpectedMessageError:
    return UnexpectedMessageError(explain(type(said).__name__, got=f"state {state.value}", expected="a message for it"))
