"""The messages of a session between a peer (worker, scheduler or client) and a hub.

Each message is one msgpack map with its type under `type`, alone in its ZMQ part; only `frame` has a second
part. A peer opens with `Hello` and the hub answers `Welcome` or `Refused`; everything else comes after.

| type | from | meaning |
|---|---|---|
| hello | peer | who I am; a worker says which sites of which model it taps |
| welcome | hub | what the hub wants, how many bytes may be in flight, the last frame it has of this boot |
| refused | hub | the hub does not talk to this peer; the reason |
| frame | worker | captured rows |
| ack | hub | every frame up to `seq` is taken; `credit_bytes` more may be sent |
| beat | both | I am alive; a worker's says what it has counted |
| act | client, hub | please do this; the hub passes it to the scheduler of the engine |
| outcome | scheduler, hub | what came of it; the hub passes it back |
| await | client | tell me what became of these requests |
| results | hub | what became of a request, by consumer |
| status | client, hub | the hub's counters (empty when asked) |
| tap | client | send me a copy of every frame that you take: `credit_bytes` more, and of the rest none |
| tapped | hub | an engine whose frames a tap is sent; without a model: its open requests are over |
| bye | both | I am leaving; nothing follows |
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from capflow import limits
from capflow.capture.frame import PROTOCOL_VERSION, Rank
from capflow.capture.model import ModelInfo
from capflow.capture.result import CaptureResult
from capflow.capture.spec import CaptureSpec
from capflow.limits import Count, Name, Place, Text, Total
from capflow.steering.action import Action, Outcome

Role = Literal["worker", "scheduler", "client"]


class ControllerSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sync controller that every worker of an engine is to run.

    name: its plugin's.
    state: encoded.
    instance: what it is called, `NAME@…`; empty where that is its plugin's name.
    capture: the rows of every request that it sees, computed anew where they are cached.
    """

    name: str
    state: bytes
    instance: str = ""
    capture: CaptureSpec | None = None

    @property
    def label(self) -> str:
        """What it is called in events and logs."""
        return self.instance or self.name


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Who is speaking. boot is new at every start of the peer's process; model is None for a client.

    former: whether the engine may be gone, and this process brings frames that another one made.
    """

    role: Role
    engine: Name
    boot: Name
    rank: Rank = Rank(0, 0, 0)
    model: ModelInfo | None = None
    version: int = PROTOCOL_VERSION
    former: bool | msgspec.UnsetType = msgspec.UNSET


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """What the hub wants of this engine.

    last_seq: the last frame it has of the peer's boot, 0 if none.

    captures: the consumers' own specs, each to be applied to every request.
    controllers: to be run in every worker. Both go to schedulers, which give them to their workers; clients get
        captures.
    readers: the consumers that requests may name, for clients; an earlier hub leaves them out.
    clock_s: of the hub, on which `Act.until_s` is.
    actions: whether consumers want to be told what steers requests, also those of which nobody wants rows.
    """

    hub: Name
    credit_bytes: Count
    last_seq: int = 0
    captures: tuple[CaptureSpec, ...] = ()
    controllers: tuple[ControllerSpec, ...] = ()
    version: int = PROTOCOL_VERSION
    clock_s: float = 0.0
    actions: bool = False
    readers: tuple[Name, ...] | msgspec.UnsetType = msgspec.UNSET


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The hub will not talk to this peer."""

    reason: Text


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """Frames up to `seq` are the hub's now; `credit_bytes` more bytes may be sent."""

    seq: int
    credit_bytes: int


_Totals = Annotated[dict[Name, Total], msgspec.Meta(max_length=limits.REASONS_MAX)]


class WorkerCounts(msgspec.Struct, frozen=True):
    """What a worker counts on its side of the session, since its boot; what is `queued`, `unacked` or `staged` is so now.

    sent: frames taken for the hub. queued: those that wait in the outbound queue. unacked: those given to the session,
    which the hub has not acknowledged. peak: the most that did or were.

    staged_bytes: host memory lent for rows, from the step until the acknowledgement.
    dropped_rows: by the reasons of `docs/backpressure.md`.
    reconnects: connections lost.
    spool: what its spool counts, by the names of `Outbox.status`; None without one.
    """

    sent_frames: Total = 0
    sent_bytes: Total = 0
    queued_frames: Total = 0
    queued_bytes: Total = 0
    queue_bytes_max: Total = 0
    queue_bytes_peak: Total = 0
    unacked_frames: Total = 0
    unacked_bytes: Total = 0
    unacked_bytes_peak: Total = 0
    staged_bytes: Total = 0
    staged_bytes_max: Total = 0
    dropped_rows: _Totals = msgspec.field(default_factory=dict)
    reconnects: Total = 0
    spool: _Totals | None = None


class Beat(msgspec.Struct, frozen=True, tag="beat", omit_defaults=True):
    """A sign of life, sent when nothing else was for `limits.HEARTBEAT_S`; a worker's, at least that often, has its counts.

    troubles: of a worker, why its controllers do not do what they are there for.
    """

    counts: WorkerCounts | None = None
    troubles: Annotated[tuple[Text, ...], msgspec.Meta(max_length=limits.REASONS_MAX)] = ()


class Act(msgspec.Struct, frozen=True, tag="act", omit_defaults=True):
    """Do this. id is the sender's, and comes back with the outcome. A hub never gives an id twice, but for sending the same `Act` again.

    until_s: on the hub's clock, when the action expires; said by hubs.
    """

    id: Name
    action: Action
    until_s: float | None = None


class ActionOutcome(msgspec.Struct, frozen=True, tag="outcome"):
    """What came of an action."""

    outcome: Outcome


class Await(msgspec.Struct, frozen=True, tag="await"):
    """Tell me what became of these requests: at once, or when every consumer is done with them.

    engine: whose requests they are, by name or id; empty for any engine that is the only one with a request of the id.
    """

    requests: Annotated[tuple[Name, ...], msgspec.Meta(max_length=limits.AWAITED_MAX)]
    wait: bool = True
    engine: Name = ""


class Results(msgspec.Struct, frozen=True, tag="results"):
    """What became of a request, by consumer; empty when the hub knows nothing of it, or several requests of the id.

    engine: as in the question; an earlier hub leaves it out.
    engines: the names of the engines that have a request of the id, at most `limits.ENGINES_TOLD_MAX`. With several
        there are no results.
    """

    request: Name
    results: dict[str, CaptureResult]
    engine: Name | msgspec.UnsetType = msgspec.UNSET
    engines: Annotated[tuple[Name, ...], msgspec.Meta(max_length=limits.ENGINES_TOLD_MAX)] = ()


class Status(msgspec.Struct, frozen=True, tag="status"):
    """The hub's counters, gauges and consumers; empty in the question, filled in the answer."""

    counters: dict[str, Any] = msgspec.field(default_factory=dict)


class WatchRequest(msgspec.Struct, frozen=True, tag="tap"):
    """Send me copies of frames, of `credit_bytes` more: said first, and again for what was taken."""

    credit_bytes: Count


class Watched(msgspec.Struct, frozen=True, tag="tapped", omit_defaults=True):
    """An engine whose frames come. Without a model: it is gone, or one replica of it, or one pipeline stage of that."""

    engine: Name
    model: ModelInfo | None = None
    replica: Place | None = None
    stage: Place | None = None


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """Nothing follows from this side."""


Message = (
    Hello
    | Welcome
    | Refused
    | Ack
    | Beat
    | Act
    | ActionOutcome
    | Await
    | Results
    | Status
    | WatchRequest
    | Watched
    | Bye
)


class _Question(msgspec.Struct, frozen=True, tag="status"):
    """A Status as a hub reads it: what else it says is passed over, not taken in."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_from_peer = msgspec.msgpack.Decoder(Hello | Beat | Act | ActionOutcome | Await | _Question | WatchRequest | Bye)
_from_hub = msgspec.msgpack.Decoder(
    Welcome | Refused | Ack | Beat | Act | ActionOutcome | Results | Status | Watched | Bye
)


def encode(message: Message) -> bytes:
    """Return the message as it stands in its ZMQ part."""
    return _encoder.encode(message)


def decode(part: bytes | memoryview) -> Message:
    """Return the message in a part that is not a frame's.

    Raises msgspec.MsgspecError when it is none; the session turns that into RemoteProtocolError.
    """
    return _decoder.decode(part)


def decode_from_peer(part: bytes | memoryview) -> Message:
    """Return the message in a part that a hub got; as `decode`, but for what peers never say."""
    said: Message | _Question = _from_peer.decode(part)
    return Status() if isinstance(said, _Question) else said


def decode_from_hub(part: bytes | memoryview) -> Message:
    """Return the message in a part that a peer got; as `decode`, but for what hubs never say."""
    said: Message = _from_hub.decode(part)
    return said
