"""What the scheduler tells every worker of an engine about a step, beside what vLLM tells them.

Orders ride on vLLM's own `SchedulerOutput`, as one more attribute, so they reach all ranks with the same
step: whatever they change, it changes on every tensor-parallel rank and pipeline stage in the same forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from capflow.capture.spec import Capture, CaptureSpec
from capflow.protocol.message import ControllerSpec
from capflow.steering.action import Steer, Unsteer

_ATTRIBUTE = "capflow_orders"


@dataclass(frozen=True)
class Wishes:
    """What a hub wants of each of its requests: its consumers' specs, the controllers to run, and to be told what steers it."""

    captures: tuple[CaptureSpec, ...] = ()
    controllers: tuple[ControllerSpec, ...] = ()
    actions: bool = False


@dataclass(frozen=True)
class Ended:
    """A request is over: why, and the position behind the last row that belongs to it."""

    status: str
    limit: int


@dataclass(frozen=True)
class Unscheduled:
    """A request was over before any of it was scheduled: what is said of it, so that nobody waits for its results."""

    name: str
    wishes: int
    incarnation: str
    prompt_length: int
    capture: Capture | None
    status: str


@dataclass
class Orders:
    """One step's orders.

    admitted: for each request first scheduled now, what it is called outside, the number of the wishes
    it was admitted under, and its incarnation. wishes: new ones of all hubs, by number. ended: requests (by vLLM's id) that are over since the last
    step, and unscheduled those that no worker ever heard of. actions: changes to running requests, by vLLM's id, that hold from this step on.

    settled: of steps up to this one everything is known: which drafts were accepted, and which requests ended in them.
    cuts: by vLLM's id, the position behind the last row that is the request's in all steps before this one that were
    not settled before: what lies behind it was computed for tokens that were never taken.
    """

    step: int
    settled: int = 0
    cuts: dict[str, int] = field(default_factory=dict)
    admitted: dict[str, tuple[str, int, str]] = field(default_factory=dict)
    wishes: dict[int, tuple[Wishes, ...]] = field(default_factory=dict)
    ended: dict[str, Ended] = field(default_factory=dict)
    unscheduled: dict[str, Unscheduled] = field(default_factory=dict)
    actions: list[tuple[str, Steer | Unsteer]] = field(default_factory=list)

    def attach(self, scheduler_output: Any) -> None:
        """Put the orders on a step's scheduler output."""
        setattr(scheduler_output, _ATTRIBUTE, self)

    @staticmethod
    def of(scheduler_output: Any) -> Orders | None:
        """Return the orders on a step's scheduler output."""
        orders: Orders | None = getattr(scheduler_output, _ATTRIBUTE, None)
        return orders
