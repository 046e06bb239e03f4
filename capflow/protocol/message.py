"""The messages of a session between a peer (worker, scheduler or client) and a hub.

Each message is one msgpack map with its type under `type`, alone in its ZMQ part. Only `frame` has a second part, and
a message may hold several frames, up to `welcome.frames_max`: their parts one after another. A peer opens with `Hello`;
the hub answers `Welcome` or `Refused`. All other messages come after.

| type | from | meaning |
|---|---|---|
| hello | peer | the peer's identity; a worker adds its model and tapped sites |
| welcome | hub | what the hub wants, the credit in bytes, the last frame it has of this boot |
| refused | hub | the hub does not talk to this peer, and why |
| frame | worker | captured rows |
| ack | hub | every frame up to `seq` is taken; `credit_bytes` more may be sent |
| beat | both | a sign of life; a worker's has its counts |
| act | client, hub | a requested action; the hub passes it to the engine's scheduler |
| acts | client | several requested actions; each is answered |
| outcome | scheduler, hub | the answer to an action; the hub passes it back |
| await | client | a question for the results of requests |
| results | hub | the results of a request, by consumer |
| status | client, hub | the hub's counters; empty as a question |
| tap | client | a request for copies of frames, `credit_bytes` more; frames beyond that are skipped |
| tapped | hub | an engine whose frames are copied; without a model: its open requests are over |
| told | hub | the answer to an action, for a client that asked for copies with `events` |
| follow | client | a front end of an engine asks for the steering that its front ends share |
| steering | client, hub | a part of that steering; the hub passes the newest one to the other front ends |
| held | client, hub | a front end has the part; from the hub: each of them has it |
| bye | both | the sender leaves; nothing follows |
"""

from __future__ import annotations

import fnmatch
from typing import Annotated, Any, Literal

import msgspec

from capflow import limits
from capflow.capture.frame import PROTOCOL_VERSION, Rank
from capflow.capture.model import ModelInfo
from capflow.capture.result import CaptureResult
from capflow.capture.spec import CaptureSpec
from capflow.limits import Count, Name, Place, Text, Total
from capflow.steering.action import Action, Answered, Outcome
from capflow.steering.request import Steering

Role = Literal["worker", "scheduler", "client"]


class ControllerSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sync controller for every worker of an engine.

    name: the name of its plugin.
    state: its encoded state.
    instance: its instance name, `NAME@…`; empty if that is the plugin's name.
    capture: the rows that it reads, of every request; rows in the prefix cache are computed again.
    scored: the rows that its probes score, one spec for each probe.
    mode: `replicated` or `ordered`, as in `capflow.plugins.consumer.Controller`.
    requests: a pattern of the ids of the requests that it sees.
    steering: what steers each of these requests from its admission on, beside what the request brings; without vectors
        of modules and without patches.
    """

    name: str
    state: bytes
    instance: str = ""
    capture: CaptureSpec | None = None
    scored: tuple[CaptureSpec, ...] = ()
    mode: str = "replicated"
    requests: str = "*"
    steering: Steering | None = None

    @property
    def runs(self) -> bool:
        """Whether workers run it. One that only brings steering has nothing to see."""
        return self.steering is None or bool(self.captures)

    @property
    def captures(self) -> tuple[CaptureSpec, ...]:
        """The rows that it reads, and those that it scores."""
        return (*(() if self.capture is None else (self.capture,)), *self.scored)

    @property
    def ordered(self) -> bool:
        """Whether its decisions apply by orders of the scheduler."""
        return self.mode == "ordered"

    def sees(self, request: str) -> bool:
        """Return whether it sees the request of this id."""
        return self.requests == "*" or fnmatch.fnmatchcase(request, self.requests)

    @property
    def label(self) -> str:
        """Its name in events and logs."""
        return self.instance or self.name


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The identity of a peer.

    role: `worker`, `scheduler` or `client`.
    boot: new at every start of the peer's process.
    model: the engine's model; None for a client.
    former: the process sends frames of an earlier process, and its engine may be gone.
    off: from a scheduler: the features that do not work with the engine's version of vLLM, and for each the reason.
    """

    role: Role
    engine: Name
    boot: Name
    rank: Rank = Rank(0, 0, 0)
    model: ModelInfo | None = None
    version: int = PROTOCOL_VERSION
    former: bool | msgspec.UnsetType = msgspec.UNSET
    off: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """What the hub wants of this engine.

    credit_bytes: the bytes that the peer may have in flight.
    last_seq: the last frame that the hub has of the peer's boot; 0 if none.
    captures: the consumers' own specs, each to be applied to every request. Schedulers and clients get them; schedulers
        pass them to their workers.
    controllers: the controllers to run in every worker. Schedulers get them and pass them to their workers.
    clock_s: the hub's clock; `Act.until_s` is on this clock.
    actions: whether consumers want reports of steering, also for requests without wanted rows.
    readers: for clients: the consumers that requests may name. Hubs of earlier releases leave it out.
    shares: for clients: whether the hub passes on shared steering. Hubs of earlier releases leave it out.
    frames_max: for workers: how many frames a message may have. Hubs of earlier releases leave it out: one.
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
    shares: bool | msgspec.UnsetType = msgspec.UNSET
    frames_max: Count | msgspec.UnsetType = msgspec.UNSET


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The hub does not talk to this peer."""

    reason: Text


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """The hub has taken the frames up to `seq`; `credit_bytes` more bytes may be sent."""

    seq: int
    credit_bytes: int


_Totals = Annotated[dict[Name, Total], msgspec.Meta(max_length=limits.REASONS_MAX)]


class CpuTime(msgspec.Struct, frozen=True, array_like=True):
    """Processor time of capflow in an engine's process.

    ns: nanoseconds.
    steps: the number of steps in which it was spent; 0 for a thread of capflow's own.
    """

    ns: Total = 0
    steps: Total = 0


class WorkerCounts(msgspec.Struct, frozen=True):
    """A worker's counts of its side of the session, since its boot.

    Counts of `queued`, `unacked` and `staged` are current values.

    A *sent* frame was taken for the hub. A *queued* frame waits in the outbound queue. An *unacked* frame was given to
    the session and is not acknowledged. A *peak* is the largest value so far.

    staged_bytes: host memory that holds rows, from their step until the acknowledgement.
    dropped_rows: the number of dropped rows, by the reasons of `docs/backpressure.md`.
    reconnects: the number of lost connections.
    spool: the counts of its spool, by the names of `Outbox.status`; None without a spool.
    cpu: the processor time of capflow in the worker's process. `worker` and `scheduler` are on the thread of the steps,
        in the steps that were measured; `scheduler` is there if it is in the same process. The others are threads.
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
    cpu: Annotated[dict[Name, CpuTime], msgspec.Meta(max_length=limits.REASONS_MAX)] = msgspec.field(
        default_factory=dict
    )


class ControllerCounts(msgspec.Struct, frozen=True, array_like=True):
    """A worker's counts of one controller, since the worker's start.

    calls: calls of `on_step`.
    seconds: their time.
    actions: applied actions.
    refused: refused actions.
    failed: exceptions.
    """

    calls: Total = 0
    seconds: float = 0.0
    actions: Total = 0
    refused: Total = 0
    failed: Total = 0


class Determinism(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether the ranks of an engine steer alike, by the checksums that they keep of each step.

    actions: the number of steps with a steered request.
    step: the last step that was compared.
    first_mismatch: the first step in which ranks differed; None if none did.
    ranks: the ranks that were compared, as `STAGE.RANK`.
    differing: those that differ from the first rank.
    """

    consistent: bool
    actions: Total
    step: Count
    first_mismatch: Count | None = None
    ranks: Annotated[tuple[Name, ...], msgspec.Meta(max_length=limits.RANKS_TOLD_MAX)] = ()
    differing: Annotated[tuple[Name, ...], msgspec.Meta(max_length=limits.RANKS_TOLD_MAX)] = ()


class Beat(msgspec.Struct, frozen=True, tag="beat", omit_defaults=True):
    """A sign of life, sent after `limits.HEARTBEAT_S` without another message.

    A worker sends one at least that often, with its counts.

    counts: a worker's counts.
    troubles: a worker's or a scheduler's reasons why controllers do not work.
    controllers: the counts of a worker's controllers, by name.
    determinism: whether the ranks of the engine steer alike; from the first rank of the first pipeline stage.
    handover: from a hub: it ends, so new requests shall go to the engine's other hubs. From a scheduler: they do, and
        it has no request of this hub any more.
    """

    counts: WorkerCounts | None = None
    troubles: Annotated[tuple[Text, ...], msgspec.Meta(max_length=limits.REASONS_MAX)] = ()
    controllers: Annotated[dict[Name, ControllerCounts], msgspec.Meta(max_length=limits.CONTROLLERS_MAX)] = (
        msgspec.field(default_factory=dict)
    )
    determinism: Determinism | None = None
    handover: bool = False


class Act(msgspec.Struct, frozen=True, tag="act", omit_defaults=True):
    """A requested action. A hub never uses an id twice, except to send the same `Act` again.

    A sender may send an action again, also over another connection and to another hub. It is applied once, and each
    time the answer is the first one.

    id: chosen by the sender; the outcome has it too.
    until_s: when the action expires, on the hub's clock; set by hubs.
    sender: an id that no other sender has; empty for an action that is never sent again.
    number: of the action among those of its sender.
    owner: as in `Answered.asked_by`; set by hubs.
    """

    id: Name
    action: Action
    until_s: float | None = None
    sender: Name = ""
    number: Count = 0
    owner: Name = ""

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for the same action, however often it was sent."""
        return (self.owner, self.sender, str(self.number)) if self.sender else (self.id,)


class ActBatch(msgspec.Struct, frozen=True, tag="acts"):
    """Several requested actions, in order. Each has an answer of its own."""

    acts: Annotated[tuple[Act, ...], msgspec.Meta(max_length=limits.ACTIONS_WAITING_MAX)]


class ActionOutcome(msgspec.Struct, frozen=True, tag="outcome"):
    """The answer to an action."""

    outcome: Outcome


class Await(msgspec.Struct, frozen=True, tag="await"):
    """A question for the results of requests, answered at once, or when every consumer is done with them.

    wait: whether to answer only when every consumer is done.
    engine: the engine of the requests, by name or id; empty for the only engine that has a request of the id.
    """

    requests: Annotated[tuple[Name, ...], msgspec.Meta(max_length=limits.AWAITED_MAX)]
    wait: bool = True
    engine: Name = ""


class Results(msgspec.Struct, frozen=True, tag="results"):
    """The results of a request, by consumer; empty if the hub has no request of the id, or several.

    engine: as in the question; hubs of earlier releases leave it out.
    engines: the names of the engines that have a request of the id, at most `limits.ENGINES_TOLD_MAX`. With several
        there are no results.
    """

    request: Name
    results: dict[str, CaptureResult]
    engine: Name | msgspec.UnsetType = msgspec.UNSET
    engines: Annotated[tuple[Name, ...], msgspec.Meta(max_length=limits.ENGINES_TOLD_MAX)] = ()


class Status(msgspec.Struct, frozen=True, tag="status"):
    """The hub's counters, gauges and consumers. A question has none of them."""

    counters: dict[str, Any] = msgspec.field(default_factory=dict)


class WatchRequest(msgspec.Struct, frozen=True, tag="tap", omit_defaults=True):
    """A request for copies of frames, of `credit_bytes` more bytes. A client repeats it as it takes frames.

    events: also send a `WatchedEvent` for each answered action.
    """

    credit_bytes: Count
    events: bool = False


class Watched(msgspec.Struct, frozen=True, tag="tapped", omit_defaults=True):
    """An engine whose frames are copied.

    model: its model; None if it is gone, or one replica of it, or one pipeline stage.
    replica: the replica that is gone.
    stage: the pipeline stage that is gone.
    """

    engine: Name
    model: ModelInfo | None = None
    replica: Place | None = None
    stage: Place | None = None


class WatchedEvent(msgspec.Struct, frozen=True, tag="told"):
    """An action was answered. What the workers' frames say of steering is in the copies of these."""

    answered: Answered


class Version(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The version of a part of shared steering. Of two versions, the larger one is newer.

    count: larger than that of each version that the writer had.
    writer: an id that no other front end has.
    """

    count: Count = 0
    writer: Name = ""


class FollowSteering(msgspec.Struct, frozen=True, tag="follow"):
    """A question for the steering that the front ends of an engine share, now and as it changes.

    The hub sends the parts one by one, each when the one before is held, and then `HeldSteering` without a version.
    """

    engine: Name


class SharedSteering(msgspec.Struct, frozen=True, tag="steering"):
    """A part of the steering that the front ends of an engine share.

    module: its name; empty for the global state.
    content: the msgpack of a `Steering`; None if it was removed.
    """

    engine: Name
    module: Annotated[str, msgspec.Meta(max_length=limits.STEERING_NAME_LENGTH_MAX)]
    version: Version
    content: Annotated[bytes, msgspec.Meta(max_length=limits.SHARED_PART_BYTES_MAX)] | None = None


class HeldSteering(msgspec.Struct, frozen=True, tag="held", omit_defaults=True):
    """A front end has a part in this version or a newer one; from the hub, all that follow have it.

    version: None from the hub that has sent all parts to a new follower.
    reason: why the hub does not pass the part on; empty if it does.
    """

    engine: Name
    module: Annotated[str, msgspec.Meta(max_length=limits.STEERING_NAME_LENGTH_MAX)] = ""
    version: Version | None = None
    reason: Text = ""


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """Nothing follows from this side."""


Message = (
    Hello
    | Welcome
    | Refused
    | Ack
    | Beat
    | Act
    | ActBatch
    | ActionOutcome
    | Await
    | Results
    | Status
    | WatchRequest
    | Watched
    | WatchedEvent
    | FollowSteering
    | SharedSteering
    | HeldSteering
    | Bye
)


class _Question(msgspec.Struct, frozen=True, tag="status"):
    """A Status as a hub reads it: its other fields are ignored."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_from_peer = msgspec.msgpack.Decoder(
    Hello
    | Beat
    | Act
    | ActBatch
    | ActionOutcome
    | Await
    | _Question
    | WatchRequest
    | FollowSteering
    | SharedSteering
    | HeldSteering
    | Bye
)
_from_hub = msgspec.msgpack.Decoder(
    Welcome
    | Refused
    | Ack
    | Beat
    | Act
    | ActionOutcome
    | Results
    | Status
    | Watched
    | WatchedEvent
    | SharedSteering
    | HeldSteering
    | Bye
)


def encode(message: Message) -> bytes:
    """Return the message as the content of its ZMQ part."""
    return _encoder.encode(message)


def decode(part: bytes | memoryview) -> Message:
    """Return the message in a part that is not a frame's.

    Raises msgspec.MsgspecError if it is not a message; the session turns that into RemoteProtocolError.
    """
    return _decoder.decode(part)


def decode_from_peer(part: bytes | memoryview) -> Message:
    """Return the message in a part from a peer. Like `decode`, but only for the messages of peers."""
    decoded: Message | _Question = _from_peer.decode(part)
    return Status() if isinstance(decoded, _Question) else decoded


def decode_from_hub(part: bytes | memoryview) -> Message:
    """Return the message in a part from a hub. Like `decode`, but only for the messages of hubs."""
    decoded: Message = _from_hub.decode(part)
    return decoded
