"""Actions: requests to change what the model computes, and their answers.

An action comes from a controller inside the worker, from a consumer, or from a person through the hub. Its sender is
its *owner*: the controller, the consumer, or the client by its key. What several owners add to a request adds up:
controllers first, in their order, then consumers by name, clients last.

Each action gets one answer: `ActionApplied`, `Rejected`, or `Unknown` if the engine got it and did not answer. An
action that was not answered with `ActionApplied` takes no effect after its answer. An action for all engines is
answered with `ActionApplied` if any engine applied it; the reason in the answer names the engines that did not.

An action on a request applies from the request's next position on. Positions that were computed before it stay as they
were, also if a preempted request computes them again.

These fields mean the same in all actions that have them:

* `incarnation` selects one of the requests that used the same id one after another; the `RequestRows` and `Finished` of
  a frame have it. Empty, it means the request that runs when the engine gets the action.
* `engine` selects one of a hub's engines, by name or id. Empty, it means the engine that runs the request; if several
  may run it, the hub rejects the action. Workers and schedulers get actions without it.
* `label` is a name for events and logs.
* `lease_s` and `lease_positions` end the action: so many seconds after the engine applied it, or after so many
  positions, whichever comes first. None: it holds until the request ends. The engine ends a lease by itself, also
  without a hub. A later action of the same owner for the same thing replaces the action and its lease.
"""

from __future__ import annotations

import math
import time
import uuid
from typing import Annotated, Literal

import msgspec

from capflow import limits
from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.limits import Count, Name, Text
from capflow.steering.clamp import Clamp
from capflow.steering.plain import NUMBER_MAX
from capflow.steering.vector import SteeringVector
from capflow.text.brief import brief


class Steer(msgspec.Struct, frozen=True, tag="steer", forbid_unknown_fields=True, omit_defaults=True):
    """Add vectors and clamps to a running request, from the next position on, beside those that it came with.

    A second `Steer` of one owner for the same request replaces the first. Only generated positions are steered: the
    rows of the prompt stay as they were computed. The clamps come after all vectors and after the request's own clamps.

    gain: multiplies the vectors and the strengths of the clamps.
    """

    request: Name
    vectors: Annotated[tuple[SteeringVector, ...], msgspec.Meta(max_length=limits.SITES_MAX)]
    incarnation: Name = ""
    engine: Name = ""
    clamps: Annotated[tuple[Clamp, ...], msgspec.Meta(max_length=limits.SITES_MAX)] = ()
    gain: float = 1.0
    label: Name = ""
    lease_s: float | None = None
    lease_positions: int | None = None

    __repr__ = brief


class Unsteer(msgspec.Struct, frozen=True, tag="unsteer", forbid_unknown_fields=True, omit_defaults=True):
    """Remove what the same owner's `Steer` added to a running request, from the next position on."""

    request: Name
    incarnation: Name = ""
    engine: Name = ""
    label: Name = ""


class Abort(msgspec.Struct, frozen=True, tag="abort", forbid_unknown_fields=True, omit_defaults=True):
    """Stop a running request. The text generated so far is its result.

    as_: its status, `abort` or `stop`; `as` on the wire.
    reason: its `stop_reason`, for `stop`.
    """

    request: Name
    incarnation: Name = ""
    engine: Name = ""
    label: Name = ""
    as_: Literal["abort", "stop"] = msgspec.field(default="abort", name="as")
    reason: Text = ""


class Gain(msgspec.Struct, frozen=True, tag="gain", forbid_unknown_fields=True, omit_defaults=True):
    """Multiply what an owner contributes to a request, from the next position on.

    request: empty for all running requests of the engine and all later ones.
    owner: `request`, `global`, `module NAME`, `controller NAME`, a consumer's name, or a client as in
        `Answered.asked_by`.
    scale: 1 is the contribution as it came, 0 is none. It replaces the scale of an earlier `Gain` for this owner, and
        multiplies vectors and the strengths of clamps and patches.
    """

    request: Name
    owner: Name
    scale: float
    incarnation: Name = ""
    engine: Name = ""
    label: Name = ""
    lease_s: float | None = None
    lease_positions: int | None = None


class SetGate(msgspec.Struct, frozen=True, tag="set_gate", forbid_unknown_fields=True, omit_defaults=True):
    """Change a gate of a running request, from the next position on. None leaves a parameter as it is.

    A latched gate keeps the margins of the positions that were scored before.

    gate: its name, as in `steering_gates`; `OWNER/NAME` for the gate of a module or a consumer.
    threshold: in the units of the score.
    sharpness: above 0; infinity makes a hard gate.
    enabled: False closes the gate.
    """

    request: Name
    gate: Name
    threshold: float | None = None
    sharpness: float | None = None
    enabled: bool | None = None
    incarnation: Name = ""
    engine: Name = ""
    label: Name = ""
    lease_s: float | None = None
    lease_positions: int | None = None


class Freeze(msgspec.Struct, frozen=True, tag="freeze", forbid_unknown_fields=True, omit_defaults=True):
    """Take back everything that changes requests beside their own steering, on all ranks in one step.

    That is every action, the vectors of controllers, the gates of consumers, and the contributions of modules and of
    the global state. The engine stays frozen until `Unfreeze`: it rejects other actions except `Abort`, and new
    requests run with their own steering only.

    engine: empty for all engines of the hub.
    """

    engine: Name = ""
    label: Name = ""

    @property
    def request(self) -> str:
        """No request: it is for all."""
        return ""

    @property
    def incarnation(self) -> str:
        """No incarnation: it is for all."""
        return ""


class Unfreeze(msgspec.Struct, frozen=True, tag="unfreeze", forbid_unknown_fields=True, omit_defaults=True):
    """End `Freeze`: modules and the global state contribute again from each request's next position on.

    The actions that were taken back stay so.

    engine: empty for all engines of the hub.
    """

    engine: Name = ""
    label: Name = ""

    @property
    def request(self) -> str:
        """No request: it is for all."""
        return ""

    @property
    def incarnation(self) -> str:
        """No incarnation: it is for all."""
        return ""


Action = Steer | Unsteer | Abort | Gain | SetGate | Freeze | Unfreeze
Leased = Steer | Gain | SetGate


OWNERS = ("client", "request", "global", "hub")
"""The owners that are no consumers."""

OWNER_PREFIXES = ("client ", "module ", "controller ")
"""The beginnings of further such owners, before a name."""

FROZEN = explain("engine", got="frozen", expected="one that is not frozen", do="run `capflow unfreeze` first")
"""The reason for which a frozen engine rejects actions."""

NO_ENGINE = explain(
    "action: no engine is connected to this hub", do="start one with its hub set to this address, then try again"
)
"""The reason for which a hub without an engine rejects actions."""

FROZEN_TROUBLE = "frozen: nothing but their own steering changes requests"
"""The end of the trouble that a frozen engine reports."""


def check_action(action: Action) -> None:
    """Raise UsageError, with the field first, if a number of an action cannot be."""
    kind = str(action.__struct_config__.tag)
    if isinstance(action, Leased):
        if action.lease_s is not None and not 0 < action.lease_s < math.inf:
            raise UsageError(explain(f"{kind}.lease_s", got=f"{action.lease_s:g}", expected="seconds above 0, or none"))
        if action.lease_positions is not None and action.lease_positions <= 0:
            got = str(action.lease_positions)
            raise UsageError(explain(f"{kind}.lease_positions", got=got, expected="a number of 1 or more, or none"))
    match action:
        case Steer():
            _check_number(f"{kind}.gain", action.gain)
        case Gain():
            _check_number(f"{kind}.scale", action.scale)
            if not action.owner:
                raise UsageError(explain(f"{kind}.owner", got="no name", expected="an owner such as global"))
            if not action.request and (action.lease_s is not None or action.lease_positions is not None):
                expected = "a request, because only a request's gain has a lease"
                raise UsageError(explain(f"{kind}.request", got="none, with a lease", expected=expected))
        case SetGate():
            if action.threshold is not None:
                _check_number(f"{kind}.threshold", action.threshold)
            if action.sharpness is not None and not action.sharpness > 0:
                raise UsageError(explain(f"{kind}.sharpness", got=f"{action.sharpness:g}", expected="a number above 0"))
        case _:
            pass


def _check_number(field: str, number: float) -> None:
    if not abs(number) <= NUMBER_MAX:
        raise UsageError(explain(field, got=f"{number:g}", expected=f"a number of at most {NUMBER_MAX:.3g}"))


class ActionApplied(msgspec.Struct, frozen=True, tag="applied", omit_defaults=True):
    """The action took effect in step `step` of the engine's scheduler.

    Of an action for several engines, at least one applied it, and it holds there.

    step: of several engines, that of the last one that applied it.
    position: the first position of the request at which it holds; None if it is for no single request.
    incarnation: that of the request; empty if it is for no single request, and from earlier versions.
    reason: which engines did not apply it, and why; empty if all did. An engine that left is not named by a `Freeze`.
    """

    id: Name
    step: Count
    position: Count | None = None
    incarnation: Name = ""
    reason: Text = ""


class Rejected(msgspec.Struct, frozen=True, tag="rejected", omit_defaults=True):
    """The action changed nothing and will change nothing, on any engine.

    reason: a message in the form of `capflow.errors`.
    incarnation: that of the request that the action was for; empty if none ran.
    """

    id: Name
    reason: Text
    incarnation: Name = ""


class Unknown(msgspec.Struct, frozen=True, tag="unknown"):
    """The engine may have got the action and did not answer. Of several engines, none applied it for certain.

    It may have taken effect, and will not take effect any more.

    reason: a message in the form of `capflow.errors`.
    """

    id: Name
    reason: Text


Outcome = ActionApplied | Rejected | Unknown


def not_running(request: str | None) -> str:
    """Return why an action is rejected whose request does not run."""
    return explain("request", got=request, expected="one that is running")


def not_meant(action: Action, running: str) -> str:
    """Return why an action is rejected that names another incarnation than the running one of its request."""
    expected = f"{running}, that of the request {action.request} that is running"
    return explain("incarnation", got=action.incarnation, expected=expected)


def sites_of(action: Action) -> tuple[Site, ...]:
    """Return the sites that an action steers at."""
    if not isinstance(action, Steer):
        return ()
    return (*(vector.site for vector in action.vectors), *(clamp.site for clamp in action.clamps))


def target_of(action: Action) -> str:
    """Return the owner that a `Gain` scales or the gate that a `SetGate` changes; empty for other actions."""
    match action:
        case Gain():
            return action.owner
        case SetGate():
            return action.gate
        case _:
            return ""


def scale_of(action: Action) -> float | None:
    """Return the factor of an action that has one."""
    match action:
        case Gain():
            return action.scale
        case Steer():
            return action.gain
        case _:
            return None


def threshold_of(action: Action) -> float | None:
    """Return the threshold that an action gives a gate."""
    return action.threshold if isinstance(action, SetGate) else None


class Answered(msgspec.Struct, frozen=True):
    """An event of a request's steering, as consumers get it: an action with its answer, or an event inside the worker.

    id: unique among actions.
    engine: the engine that runs the request; empty if the hub does not know it.
    kind: one of `capflow.capture.frame.EVENT_KINDS`.
    sites: the sites of the added vectors and clamps, or of the gate.
    asked_by: the consumer's name; or `client`, followed by a space and the public half of its key if it has one; inside
        the worker `controller NAME`, or `request` for the steering that it came with.
    time_ns: the wall clock of the answer.
    step: the step in which it was applied; None if it was rejected or this is unknown.
    reason: why `step` is None; else empty, or which replicas of the engine did not apply it.
    position: the first position of the request at which it holds; None if it does not hold or this is unknown.
    score: the score that caused it, if a score did.
    threshold: the threshold that the score was compared with, or that an action gives a gate.
    label: the label of the gate or of the action.
    incarnation: differs between requests that use the same id one after another; empty if it is unknown.
    target: the owner whose contribution a gain scales, or the gate that an action sets.
    scale: the factor of a gain or of added vectors and clamps.
    outcome: `applied`, `rejected` or `unknown`. Records of earlier versions lack it: without a step it is `rejected`.
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
    target: str = ""
    scale: float | None = None
    outcome: str = ""

    def __post_init__(self) -> None:
        """Fill an outcome that is not given."""
        if not self.outcome:
            msgspec.structs.force_setattr(self, "outcome", "rejected" if self.step is None else "applied")

    @classmethod
    def of(cls, action: Action, outcome: Outcome, *, engine: str, asked_by: str) -> Answered:
        """Return the record of an action that was answered now."""
        return cls(
            uuid.uuid4().hex,
            engine,
            action.request,
            str(action.__struct_config__.tag),
            sites_of(action),
            asked_by,
            time.time_ns(),
            outcome.step if isinstance(outcome, ActionApplied) else None,
            outcome.reason,
            position=outcome.position if isinstance(outcome, ActionApplied) else None,
            threshold=threshold_of(action),
            label=action.label,
            incarnation=action.incarnation or ("" if isinstance(outcome, Unknown) else outcome.incarnation),
            target=target_of(action),
            scale=scale_of(action),
            outcome=str(outcome.__struct_config__.tag),
        )
