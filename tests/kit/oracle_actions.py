"""Random actions on the oracle's requests: what is drawn, how it is sent, and what must hold at which positions.

An action holds from the position that its answer names; a controller's, from the position of its event. What holds at a
position is worked out here from the documentation, by none of capflow's code.
"""

from __future__ import annotations

import concurrent.futures
import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from capflow.capture.site import Site
from capflow.steering.action import Abort, ActionApplied, Freeze, Gain, SetGate, Steer, Unfreeze, Unsteer
from capflow.steering.clamp import Clamp, parse_clamps
from capflow.steering.vector import SteeringVector
from capflow.transport.client import Client
from tests.kit.engines import LAYERS
from tests.kit.entries import LLAMA_HOOKS, shape_of, unit_of, width_of

FOREVER = 10**9
SITES = [Site(n, hook) for n in range(LAYERS) for hook in LLAMA_HOOKS if hook != "final" or n == LAYERS - 1]
CONTROLLERS = ("a", "b")
"""The gates of the hub: each acts on the requests whose ids begin with its name, the first replicated, the second
ordered."""

FAULTS = ("incarnation", "layer", "lease", "gate", "owner", "name")
"""What is wrong with an action that must be refused."""

OWNERS = ("request", "client", "controller gate@a", "controller gate@b", "global")

_leases = st.sampled_from(
    [{}, {}, *({"lease_positions": count} for count in (1, 3, 9)), {"lease_s": 0.02}, {"lease_s": 0.2}]
)
_steers = st.fixed_dictionaries(
    {
        "kind": st.just("steer"),
        "site": st.sampled_from(SITES),
        "clamped": st.one_of(st.none(), st.sampled_from(SITES)),
        "entries": st.booleans(),
        "seed": st.integers(20, 23),
        "gain": st.sampled_from((1.0, 0.5, -1.0)),
        "lease": _leases,
    }
)
_gains = st.fixed_dictionaries(
    {
        "kind": st.just("gain"),
        "owner": st.sampled_from(OWNERS),
        "scale": st.sampled_from((0.0, 0.5, 2.0, 1.0)),
        "everywhere": st.sampled_from((False, False, False, True)),
        "lease": _leases,
    }
)
_sets = st.fixed_dictionaries(
    {
        "kind": st.just("set_gate"),
        "change": st.sampled_from(
            [{"threshold": t} for t in (-0.1, 0.02, 0.3)]
            + [{"sharpness": s} for s in (2.0, np.inf)]
            + [{"enabled": False}, {"enabled": True}, {"threshold": 0.1, "sharpness": 4.0}]
        ),
        "lease": _leases,
    }
)
_others = st.sampled_from(
    [
        *({"kind": kind} for kind in ("unsteer", "freeze", "unfreeze", "unfreeze")),
        *({"kind": "abort", "as": status} for status in ("abort", "stop")),
        *({"kind": "wrong", "fault": fault} for fault in FAULTS),
    ]
)
_one = st.one_of(_steers, _steers, _gains, _sets, _others)
drawn = st.one_of(st.just([]), *[st.lists(st.tuples(st.integers(1, 20), _one), min_size=1, max_size=5)] * 2)
"""The actions on a request, each with the number of steps after which it is sent."""


def vector(seed, site):
    """Return the vector of a number at a site."""
    values = np.random.default_rng(100 * seed + site.layer).normal(size=width_of(site.hook))
    return (values * 3 / np.linalg.norm(values)).astype(np.float32)


def entries_clamp(site, seed, strength=1.0):
    """Return a clamp of the first and of the last entry of a site's rows; it leaves no row without any number."""
    index = sorted({shape_of(site.hook)[0] - 1, 0}, reverse=True)
    values = vector(seed, site)[: unit_of(site.hook) * len(index)] if seed % 2 else 0.25
    return {"index": index, "value": values, "strength": strength}


def action_of(drawn, name, label):
    """Return the action that a scenario's values stand for."""
    lease = drawn.get("lease", {})
    match drawn["kind"]:
        case "steer":
            site, clamped = drawn["site"], drawn["clamped"]
            clamps = ()
            if clamped is not None and drawn.get("entries"):
                clamps = parse_clamps({clamped.hook: {clamped.layer: entries_clamp(clamped, drawn["seed"])}})
            elif clamped is not None:
                clamps = (Clamp.make(clamped, vector(drawn["seed"] + 5, clamped), {"min": -0.2, "max": 0.2}, where=""),)
            vectors = (SteeringVector.make(site, vector(drawn["seed"], site)),)
            return Steer(name, vectors, clamps=clamps, gain=drawn["gain"], label=label, **lease)
        case "gain":
            everywhere = drawn["everywhere"]
            lease = {} if everywhere else lease
            return Gain("" if everywhere else name, drawn["owner"], drawn["scale"], label=label, **lease)
        case "set_gate":
            return SetGate(name, "g", label=label, **drawn["change"], **lease)
        case "abort":
            return Abort(name, label=label, as_=drawn["as"], reason="asked" if drawn["as"] == "stop" else "")
        case "unsteer":
            return Unsteer(name, label=label)
        case "wrong":
            return _wrong(drawn["fault"], name, label)
        case kind:
            return (Freeze if kind == "freeze" else Unfreeze)(label=label)


def _wrong(fault, name, label):
    """Return an action that must be refused."""
    site = Site(1, "post_block")
    added = (SteeringVector.make(site, vector(29, site)),)
    match fault:
        case "incarnation":
            return Steer(name, added, incarnation="another", label=label)
        case "layer":
            return Steer(name, (SteeringVector.make(Site(LAYERS, "post_block"), vector(29, site)),), label=label)
        case "lease":
            return Steer(name, added, lease_positions=0, label=label)
        case "gate":
            return SetGate(name, "nothing", threshold=1.0, label=label)
        case "owner":
            return Gain(name, "nobody", 0.0, label=label)
        case _:
            return Steer(f"{name}x", added, label=label)


class Sent(NamedTuple):
    """An action that was sent.

    wrong: whether it must be refused.
    """

    number: int
    wrong: bool
    action: Any
    answer: concurrent.futures.Future


class Sender:
    """Sends actions over one connection, in order, while the engine steps.

    sent: every action, in order.
    """

    def __init__(self, address):
        self._client = Client(address)
        self._threads = concurrent.futures.ThreadPoolExecutor(1)
        self._numbers = itertools.count()
        self.sent = []

    def send(self, drawn, name):
        """Send an action on a request."""
        number = next(self._numbers)
        action = action_of(drawn, name, f"a{number}")
        self.sent.append(
            Sent(number, drawn["kind"] == "wrong", action, self._threads.submit(self._client.act, action, 60))
        )

    def end(self):
        """Take back what holds for the whole engine; return all outcomes, in order."""
        outcomes = [sent.answer.result(60) for sent in self.sent]
        applied = [sent.action for sent, one in zip(self.sent, outcomes, strict=True) if isinstance(one, ActionApplied)]
        scales = {each.owner: each.scale for each in applied if isinstance(each, Gain) and not each.request}
        ends = [Unfreeze(), *(Gain("", owner, 1.0) for owner, scale in scales.items() if scale != 1.0)]
        for outcome in self._threads.submit(self._client.act, ends, 60).result(60):
            assert isinstance(outcome, ActionApplied), outcome
        self._threads.submit(self._client.close).result(60)
        self._threads.shutdown()
        return outcomes


@dataclass
class Steps:
    """The positions of requests at the steps of an engine, watched in its scheduler.

    positions: by step, each request's first position that was never computed; corrected when drafts are rejected.
    begun: by request, its first step.
    preempted: by request, how many of its tokens were computed whenever it was preempted.
    latched: of actions on the whole engine that were answered before a step took them: the step, and the label.
    """

    positions: dict = field(default_factory=dict)
    begun: dict = field(default_factory=dict)
    preempted: dict = field(default_factory=dict)
    latched: set = field(default_factory=set)

    def reached(self, name, step):
        """Return the first position of a request that a change of the whole engine in a step reaches; None if none."""
        positions = self.positions.get(step, {})
        if name in positions:
            return positions[name]
        return 0 if self.begun.get(name, 0) > step else None

    def watch(self, scheduler):
        """Watch a scheduler from now on."""
        admission, preempt = scheduler.capflow, scheduler._preempt_request
        take = admission.take_actions

        def taken(inner):
            take(inner)
            step = admission.step + 1
            self.positions[step] = {each.name: each.reached for _, each in admission.running(scheduler)}
            for name in self.positions[step]:
                self.begun.setdefault(name, step)

        def counted(request, *args, **kwargs):
            name = admission._names.get(request.request_id)
            self.preempted.setdefault(name, []).append(request.num_computed_tokens)
            return preempt(request, *args, **kwargs)

        shift = admission.reports.shift

        def shifted(key, first, count):
            shift(key, first, count)
            name = admission._names.get(key)
            for positions in self.positions.values():
                if positions.get(name, 0) >= first:
                    positions[name] -= count

        apply_to_all = admission.actions.apply_to_all

        def applied(act, running, *, answered=False):
            if answered:
                self.latched.add((admission.step + 1, act.action.label))
            return apply_to_all(act, running, answered=answered)

        admission.actions.apply_to_all = applied
        admission.take_actions, scheduler._preempt_request = taken, counted
        admission.reports.shift = shifted


class Held(NamedTuple):
    """An action that held.

    first: its first position.
    until: the first position at which it does not hold, as far as its lease is concerned.
    """

    owner: str
    action: Any
    first: int
    until: int = FOREVER


class State(NamedTuple):
    """What holds at a position.

    steers: the `Steer` of each owner, in the order in which they add up, with its gain.
    own: the factor of the request's own steering.
    gate: the changes of the request's gate.
    frozen: whether the engine is frozen.
    """

    steers: tuple
    own: float
    gate: tuple
    frozen: bool


def held_on(name, applied, steps, ends):
    """Return the actions that held on a request, each with its place in the order.

    applied: the actions that were answered with `ActionApplied`: a number that grows with the order in which the engine
        took them, the action, and the answer.
    steps: the positions at each step.
    ends: where leases ended, by label.
    """
    held = []
    for number, action, outcome in applied:
        if isinstance(action, Abort) or action.request not in ("", name):
            continue
        first = outcome.position if action.request else steps.reached(name, outcome.step)
        if first is None:
            continue
        until = first + (getattr(action, "lease_positions", None) or FOREVER)
        until = min(until, ends.get(action.label, FOREVER))
        # A step takes the changes of the whole engine that were answered before it, and then all others.
        order = (outcome.step, 1 if (outcome.step, action.label) in steps.latched else 2, number)
        held.append((order, Held("client", action, first, until)))
    return held


class Changes:
    """The actions that held on a request, in order.

    held: those on it and on the whole engine.
    """

    def __init__(self, held=()):
        self.held = list(held)

    def at(self, position):
        """Return what holds at a position."""
        slots, frozen, everywhere = {}, False, {}
        for owner, action, first, until in self.held:
            if isinstance(action, Gain) and not action.request:
                everywhere[action.owner] = action.scale
            if position < first:
                continue
            match action:
                case Steer():
                    slots["steer", owner] = action, until
                case Unsteer():
                    slots.pop(("steer", owner), None)
                case Gain():
                    slots["gain", _hub(owner), action.owner] = action.scale, until
                case SetGate():
                    slots["set_gate", _hub(owner)] = action, until
                case Freeze() if not frozen:
                    slots, frozen = {}, True
                case Unfreeze() if frozen:
                    frozen = False
                    slots = {("gain", "", name): (scale, FOREVER) for name, scale in everywhere.items()}
        live = {slot: value for slot, (value, until) in slots.items() if position < until}
        gains = {}
        for slot, scale in live.items():
            if slot[0] == "gain":
                gains[slot[2]] = gains.get(slot[2], 1.0) * scale
        steers = tuple(
            (action, action.gain * gains.get(slot[1], 1.0))
            for slot, action in sorted(live.items(), key=lambda each: (each[0][1] == "client", each[0]))
            if slot[0] == "steer"
        )
        gate = tuple(action for slot, action in sorted(live.items()) if slot[0] == "set_gate")
        return State(steers, gains.get("request", 1.0), gate, frozen)


def _hub(owner):
    """Return whose gains and gates an owner's replace: all that come through a hub share theirs."""
    return owner if owner.startswith("controller ") else ""
