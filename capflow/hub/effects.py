"""Effects: what the exchange asks its hub to do.

An effect is data. The exchange returns effects in the order in which they are to be done; `capflow.hub.dispatch` does
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from capflow.capture.frame import Dropped
from capflow.capture.model import ModelInfo
from capflow.hub.peers.roster import Roster, WorkerState
from capflow.hub.requests.index import Arrival
from capflow.hub.requests.request import Request
from capflow.protocol.message import Message
from capflow.protocol.session import Parts, State
from capflow.steering.action import Action, Answered, Outcome


@dataclass(eq=False, slots=True)
class Hold:
    """A frame that is still needed.

    source: the worker that sent the frame.
    seq: its number.
    left: how many need the frame, the exchange itself until its next `acknowledge`. At 0 its worker gets the credit
        back.
    """

    source: WorkerState
    seq: int
    left: int = 1


class Send(NamedTuple):
    """Send a message to a peer."""

    peer: bytes
    parts: Parts


class Refuse(NamedTuple):
    """Send a refusal to a peer.

    engine: the engine of a worker or a scheduler; "" for other peers.
    first: whether the engine was not refused for this reason before.
    """

    peer: bytes
    parts: Parts
    engine: str
    reason: str
    first: bool


class SendStatus(NamedTuple):
    """Read the hub's counters, and call `Exchange.send_status` with them."""

    peer: bytes


class Pause(NamedTuple):
    """Let other peers have their turn before the next effect."""


class Continue(NamedTuple):
    """Call `Exchange.proceed` for an engine when other peers have had their turn."""

    engine: str


class FindMissed(NamedTuple):
    """Ask each lane which engines are missing, and call `Exchange.miss` with each.

    here: connected engines and replicas.
    """

    here: set[tuple[str, int]]


class Give(NamedTuple):
    """Give frames of one worker, in order, to each lane. A lane that needs a frame for longer holds it.

    arrivals: the frames; while this effect is the last one, further frames of the worker are added.
    holds: that of each frame.
    """

    arrivals: list[Arrival]
    holds: list[Hold]


class End(NamedTuple):
    """Tell lanes that a request is over, and then let go of it.

    lanes: the numbers of the lanes that want something of the request.
    hold: the frame that ended the request; None if no frame did.
    """

    request: Request
    lanes: Sequence[int]
    hold: Hold | None


class Greet(NamedTuple):
    """Tell each lane that an engine connected, or one more worker of it."""

    engine: str
    model: ModelInfo
    worker: bool


class Lose(NamedTuple):
    """Tell lanes that a part of an engine is gone; the fields are those of `RequestIndex.lose`.

    lane: a lane's number; None for all.
    """

    engine: str
    replica: int | None = None
    stage: int | None = None
    restarted: bool = False
    lane: int | None = None


class NoteFull(NamedTuple):
    """Tell each lane that the hub has no room for requests of an engine."""

    engine: str


class Tell(NamedTuple):
    """Tell lanes what changed the steering of a request.

    lane: a lane's number; None for all.
    """

    answered: Answered
    lane: int | None = None


class TellOutcome(NamedTuple):
    """Tell each lane the outcome of an action; the fields are those of `Answered.of`."""

    action: Action
    outcome: Outcome
    engine: str
    asked_by: str


class AnswerLane(NamedTuple):
    """Answer the lane that asked for an action."""

    lane: int
    outcome: Outcome


class CountResult(NamedTuple):
    """Count a result that a consumer gave."""

    lane: int
    status: str


class Log(NamedTuple):
    """Log a line.

    event: the fields of the record; its name is under `event`.
    who: the key or the connection of the peer that the line is about; None if it is about no peer.
    error: an exception whose traceback is logged.
    """

    level: int
    text: str
    args: tuple[object, ...]
    event: dict[str, Any]
    who: bytes | str | None = None
    error: BaseException | None = None


class LogLate(NamedTuple):
    """Log which rows were lost of requests that have their results.

    lost: by request.
    """

    lost: Mapping[str, Sequence[Dropped]]
    engine: str


Effect = (
    Send
    | Refuse
    | SendStatus
    | Pause
    | Continue
    | FindMissed
    | Give
    | End
    | Greet
    | Lose
    | NoteFull
    | Tell
    | TellOutcome
    | AnswerLane
    | CountResult
    | Log
    | LogLate
)


class Effects:
    """The effects of one call of the exchange, in order.

    roster: the sessions that messages are sent in.
    """

    def __init__(self, roster: Roster) -> None:
        # When the exchange was called, in seconds of any monotonic clock.
        self.now = 0.0
        self._roster = roster
        self._effects: list[Effect] = []

    def add(self, effect: Effect) -> None:
        """Add an effect after the others."""
        self._effects.append(effect)

    @property
    def last(self) -> Effect | None:
        """The effect that was added last; None if there is none."""
        return self._effects[-1] if self._effects else None

    def say(self, peer: bytes, message: Message) -> None:
        """Send a message to a peer, if its session is open."""
        member = self._roster.peers.get(peer)
        if member is not None and member.session.state is State.OPEN:
            self._effects.append(Send(peer, member.session.send(message, self.now)))

    def take(self) -> list[Effect]:
        """Return the effects, and forget them."""
        effects, self._effects = self._effects, []
        return effects
