"""Actions: requests to change what the model computes, and the answers to them.

An action comes from a controller inside the worker, from a consumer, or from a person through the hub.

Each is answered once: `ActionApplied`, `Rejected`, or `Unknown` where the engine was asked and did not answer. An action that was not
`ActionApplied` takes no effect after its answer.

`incarnation` says which of the requests is meant that had an id one after another: `RequestRows` and `Finished` of a frame have it.
Empty, it is the one that runs when the engine gets the action.

`engine` says which of the engines of a hub is meant, by name or id. Empty, it is the one that runs the request; the hub rejects the
action where that may be several. Workers and schedulers get actions without it.
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
    """From the next position on, add these vectors to a running request, beside those it came with.

    Actions of several owners add up. Each controller is an owner, and everything that comes through a hub has one owner
    together. A second `Steer` of one owner for the same request replaces the vectors of the first. Only generated
    positions are steered: the prompt keeps what it was computed with.
    """

    request: Name
    vectors: Annotated[tuple[SteeringVector, ...], msgspec.Meta(max_length=limits.SITES_MAX)]
    incarnation: Name = ""
    engine: Name = ""

    __repr__ = brief


class Unsteer(msgspec.Struct, frozen=True, tag="unsteer", forbid_unknown_fields=True, omit_defaults=True):
    """From the next position on, take back what the same owner's `Steer` added to a running request."""

    request: Name
    incarnation: Name = ""
    engine: Name = ""


class Abort(msgspec.Struct, frozen=True, tag="abort", forbid_unknown_fields=True, omit_defaults=True):
    """Stop a running request; what it generated so far is its result, with status `abort`."""

    request: Name
    incarnation: Name = ""
    engine: Name = ""


Action = Steer | Unsteer | Abort


class ActionApplied(msgspec.Struct, frozen=True, tag="applied"):
    """The action took effect in the step numbered `step` of the engine's scheduler."""

    id: Name
    step: Count


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The action changed nothing and will change nothing; `reason` is a message in the form of `capflow.errors`."""

    id: Name
    reason: Text


class Unknown(msgspec.Struct, frozen=True, tag="unknown"):
    """The engine got the action, or may have got it, and did not answer: it may have taken effect, and will not do so any more."""

    id: Name
    reason: Text


Outcome = ActionApplied | Rejected | Unknown


class Answered(msgspec.Struct, frozen=True):
    """An action on a request, asked for through a hub or done inside its worker, and what came of it; what consumers are told.

    id: of no other action.
    engine: that runs the request, empty when the hub does not know.
    kind: `steer`, `unsteer` or `abort`.
    sites: where vectors are added.
    asked_by: the consumer's name, or `client`, with a key's public half behind a space; inside the worker `controller
        NAME`, or `request` for the steering that it came with.
    time_ns: when it was answered.
    step: when it was applied, None when it was rejected or when that is not known, for the reason.
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

    @classmethod
    def of(cls, action: Action, outcome: Outcome, *, engine: str, asked_by: str) -> Answered:
        """Return what became of an action just now."""
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
        )
