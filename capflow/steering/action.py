"""Actions: requests to change what the model computes, and their answers.

An action comes from a controller inside the worker, from a consumer, or from a person through the hub.

Each action gets one answer: `ActionApplied`, `Rejected`, or `Unknown` if the engine got it and did not answer. An
action that was not answered with `ActionApplied` takes no effect after its answer.

`incarnation` selects one of the requests that used the same id one after another; the `RequestRows` and `Finished` of a
frame have it. Empty, it means the request that runs when the engine gets the action.

`engine` selects one of a hub's engines, by name or id. Empty, it means the engine that runs the request; if several may
run it, the hub rejects the action. Workers and schedulers get actions without it.
"""

from __future__ import annotations

import time
import uuid
from typing import Annotated

import msgspec

from capflow import limits
from capflow.capture.site import Site
from capflow.limits import Count, Name, Text
from capflow.steering.vector import SteeringVector
from capflow.text.brief import brief


class Steer(msgspec.Struct, frozen=True, tag="steer", forbid_unknown_fields=True, omit_defaults=True):
    """Add these vectors to a running request, from the next position on, beside those that it came with.

    Actions of several owners add up. Each controller is an owner; everything that comes through a hub has one owner
    together. A second `Steer` of one owner for the same request replaces the vectors of the first. Only generated
    positions are steered: the rows of the prompt stay as they were computed.

    incarnation, engine: as in the module.
    """

    request: Name
    vectors: Annotated[tuple[SteeringVector, ...], msgspec.Meta(max_length=limits.SITES_MAX)]
    incarnation: Name = ""
    engine: Name = ""

    __repr__ = brief


class Unsteer(msgspec.Struct, frozen=True, tag="unsteer", forbid_unknown_fields=True, omit_defaults=True):
    """Remove the vectors that the same owner's `Steer` added to a running request, from the next position on.

    incarnation, engine: as in the module.
    """

    request: Name
    incarnation: Name = ""
    engine: Name = ""


class Abort(msgspec.Struct, frozen=True, tag="abort", forbid_unknown_fields=True, omit_defaults=True):
    """Stop a running request. The text generated so far is its result, with status `abort`.

    incarnation, engine: as in the module.
    """

    request: Name
    incarnation: Name = ""
    engine: Name = ""


Action = Steer | Unsteer | Abort


class ActionApplied(msgspec.Struct, frozen=True, tag="applied"):
    """The action took effect in step `step` of the engine's scheduler."""

    id: Name
    step: Count


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The action changed nothing and will change nothing.

    reason: a message in the form of `capflow.errors`.
    """

    id: Name
    reason: Text


class Unknown(msgspec.Struct, frozen=True, tag="unknown"):
    """The engine may have got the action and did not answer.

    It may have taken effect, and will not take effect any more.

    reason: a message in the form of `capflow.errors`.
    """

    id: Name
    reason: Text


Outcome = ActionApplied | Rejected | Unknown


class Answered(msgspec.Struct, frozen=True):
    """An event of a request's steering, as consumers get it: an action with its answer, or an event inside the worker.

    id: unique among actions.
    engine: the engine that runs the request; empty if the hub does not know it.
    kind: one of `capflow.capture.frame.EVENT_KINDS`.
    sites: the sites of the added vectors, or of the gate.
    asked_by: the consumer's name; or `client`, followed by a space and the public half of its key if it has one; inside
        the worker `controller NAME`, or `request` for the steering that it came with.
    time_ns: the wall clock of the answer.
    step: the step in which it was applied; None if it was rejected or this is unknown.
    reason: why `step` is None; else empty.
    position: the first position of the request at which it holds; None if it does not hold or this is unknown.
    score: the score that caused it, if a score did.
    threshold: the threshold that the score was compared with.
    label: the label of the gate or of the action.
    incarnation: differs between requests that use the same id one after another; empty if it is unknown.
    """

    id: str
    engine: str
    request: str
    kind: str
    sites: tuple[Site, ...]
    asked_by: str
    time_ns: int
    step: int | None
    reason: str
    position: int | None = None
    score: float | None = None
    threshold: float | None = None
    label: str = ""
    incarnation: str = ""

    @classmethod
    def of(cls, action: Action, outcome: Outcome, *, engine: str, asked_by: str) -> Answered:
        """Return the record of an action that was answered now."""
        return cls(
            uuid.uuid4().hex,
            engine,
            action.request,
            str(action.__struct_config__.tag),
            tuple(vector.site for vector in action.vectors) if isinstance(action, Steer) else (),
            asked_by,
            time.time_ns(),
            outcome.step if isinstance(outcome, ActionApplied) else None,
            "" if isinstance(outcome, ActionApplied) else outcome.reason,
            incarnation=action.incarnation,
        )
