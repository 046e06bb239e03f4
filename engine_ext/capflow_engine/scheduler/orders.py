"""What the scheduler tells every worker of an engine about a step, beside what vLLM tells them.

Orders ride on vLLM's own `SchedulerOutput`, as one more attribute, so they reach all ranks with the same
step. Every tensor-parallel rank and pipeline stage makes the same changes in the same forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from capflow.capture.frame import Weights
from capflow.capture.spec import Wanted
from capflow.limits import Name, Position
from capflow.protocol.message import ControllerSpec
from capflow.steering.action import Abort, Gain, SetGate, Steer, Unsteer
from capflow_engine.request.options import RequestOptions

_ATTRIBUTE = "capflow_orders"

FIRST_WEIGHTS = Weights(0)
"""The weights that an engine starts with."""


@dataclass(frozen=True)
class Wants:
    """What a hub wants of each of its requests.

    wanted: what its consumers want together, resolved against the model. Once for the engine, not once for each rank.
    controllers: those to run.
    actions: whether the hub hears what steers a request that nobody captures.
    """

    wanted: Wanted = field(default_factory=dict)
    controllers: tuple[ControllerSpec, ...] = ()
    actions: bool = False


class Decided(NamedTuple):
    """A decision of a controller, checked against the model.

    key: vLLM's id of the request.
    hub: the index of the request's hub.
    order: the controller's index in the hub's list.
    action: None for an event alone.
    row: the last position on whose rows it was decided; -1 if the request was not in the step.
    position, score, threshold, label: as in `Decision`.
    gate: the gate of the request that ends it; else empty, as a controller decided.
    """

    key: str
    hub: int
    order: int
    action: Steer | Unsteer | Gain | SetGate | Abort | None
    row: int = -1
    position: Position | None = None
    score: float | None = None
    threshold: float | None = None
    label: Name = ""
    gate: str = ""


class Marked(NamedTuple):
    """Positions of a step that controllers of one pipeline stage steer, or that gates of later stages opened.

    key: vLLM's id of the request.
    runs: `first, end, first, end, …`, counted from the first position that the step computes of the request.
    """

    step: int
    key: str
    runs: tuple[int, ...]


class Divergence(NamedTuple):
    """Ranks of the engine steer differently.

    step: the first step in which they do.
    ranks: those that differ, as `STAGE.RANK`.
    requests: the requests that they steer differently, by vLLM's id; empty if that is unknown.
    """

    step: int
    ranks: tuple[str, ...]
    requests: tuple[str, ...] = ()


class StepAnswer(NamedTuple):
    """What goes to the scheduler with a step's output."""

    decided: Sequence[Decided] = ()
    marked: Sequence[Marked] = ()
    diverged: Divergence | None = None

    def encode(self) -> bytes:
        """Return the answer as bytes; none if there is nothing to say."""
        return msgspec.msgpack.encode(self) if any(self) else b""

    @staticmethod
    def decode(data: bytes) -> StepAnswer:
        """Return the answer that `encode` encoded."""
        return _answers.decode(data) if data else StepAnswer()


def encode(decided: Sequence[Decided]) -> bytes:
    """Return decisions as bytes, for other ranks."""
    return msgspec.msgpack.encode(decided)


def decode(data: bytes) -> list[Decided]:
    """Return the decisions that `encode` encoded."""
    return _decoder.decode(data)


_decoder = msgspec.msgpack.Decoder(list[Decided])
_answers = msgspec.msgpack.Decoder(StepAnswer)


class Admitted(NamedTuple):
    """A request as its workers first hear of it.

    name: its id outside of vLLM.
    wants: the number of the `Wants` that it was admitted under.
    incarnation: tells it from others of its name.
    options: what it asks for, its steering compiled.
    hub: the number of its hub.
    adapter: the name of the LoRA adapter that it runs with; empty for none.
    """

    name: str
    wants: int
    incarnation: str
    options: RequestOptions
    hub: int = 0
    adapter: str = ""


@dataclass(frozen=True)
class Ended:
    """A request is over: its status, and the position after its last row.

    decided: the decision of a controller that ended it.
    """

    status: str
    limit: int
    decided: Decided | None = None


class Unscheduled(NamedTuple):
    """A request that ended before any of it was scheduled. Workers report its end, so that nobody waits for results."""

    request: Admitted
    prompt_length: int
    status: str


class Rejection(NamedTuple):
    """Draft tokens of a step that were rejected after later steps of their request were planned.

    Those steps were planned as if all drafts were accepted.

    key: vLLM's id of the request.
    step: the number of the step.
    limit: the position after the last row of the step that belongs to the request.
    drafts: the number of rejected drafts. All positions of the request's later steps are lower by it.
    """

    key: str
    step: int
    limit: int
    drafts: int


class Ordered(NamedTuple):
    """An action that holds from this step on.

    key: vLLM's id of the request; empty for all requests of the engine.
    by: the owner, as in `Answered.asked_by`.
    prompt_length: of the request, with the input that workers get with a later step.
    """

    key: str
    by: str
    action: Steer | Unsteer | Gain | SetGate
    prompt_length: int = 0


class FreezeOrder(NamedTuple):
    """The engine freezes, or that ends.

    label: of the action.
    """

    frozen: bool
    label: str


class LeaseEnd(NamedTuple):
    """The end of an action's lease.

    key: vLLM's id of the request.
    by: the owner of the action.
    action: what ends the action; None if it ended at `position`, as workers know.
    position: the first position at which it does not hold.
    label: of the action.
    """

    key: str
    by: str
    action: Unsteer | Gain | SetGate | None
    position: int
    label: str = ""


class News(msgspec.Struct):
    """What came, ended or changed since the last step. All keys are vLLM's ids of requests, unless said otherwise.

    cuts: the position after the last row that belongs to each request, in the earlier steps that are not settled. Rows
        from there on were computed for tokens that were never taken.
    rejected: drafts that were rejected while later steps of their requests were under way, in the order of the steps.
        They apply before `cuts` and `ended`.
    admitted: requests that are first scheduled now.
    wants: new wants of all hubs, by number.
    ended: requests that ended since the last step.
    unscheduled: requests that ended since the last step and that no worker knows.
    actions: in order; all of them hold from this step on.
    decided: decisions of ordered controllers, whose actions hold from this step on.
    marked: what controllers of one pipeline stage steered in earlier steps, for the other stages; it applies before
        `Orders.settled`.
    leases: leases that ended; they apply before `freezes`.
    freezes: freezes of the engine and their ends, in order; they apply before `actions`.
    """

    cuts: dict[str, int] = msgspec.field(default_factory=dict)
    rejected: list[Rejection] = msgspec.field(default_factory=list)
    admitted: dict[str, Admitted] = msgspec.field(default_factory=dict)
    wants: dict[int, tuple[Wants, ...]] = msgspec.field(default_factory=dict)
    ended: dict[str, Ended] = msgspec.field(default_factory=dict)
    unscheduled: dict[str, Unscheduled] = msgspec.field(default_factory=dict)
    actions: list[Ordered] = msgspec.field(default_factory=list)
    decided: list[Decided] = msgspec.field(default_factory=list)
    marked: list[Marked] = msgspec.field(default_factory=list)
    leases: list[LeaseEnd] = msgspec.field(default_factory=list)
    freezes: list[FreezeOrder] = msgspec.field(default_factory=list)


class Orders(msgspec.Struct):
    """One step's orders.

    settled: steps up to this number are settled: their accepted drafts and the ends of their requests are known.
    weights: the weights that compute the step.
    news: None in a step that only goes on, which nearly every step does.
    """

    step: int
    settled: int = 0
    weights: Weights = FIRST_WEIGHTS
    news: News | None = None

    def attach(self, scheduler_output: Any) -> None:
        """Put the orders on a step's scheduler output."""
        setattr(scheduler_output, _ATTRIBUTE, self)

    @staticmethod
    def of(scheduler_output: Any) -> Orders | None:
        """Return the orders on a step's scheduler output."""
        orders: Orders | None = getattr(scheduler_output, _ATTRIBUTE, None)
        return orders
