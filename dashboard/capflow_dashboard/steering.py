"""Steering from pages: what they may ask for, its bounds, its leases, and the kill switch.

A page names a vector or a module that the operator allowed; it sends no numbers but a ratio. What it asks for holds as
long as it says that it is alive. Each action has a lease, which the engine ends by itself, so a page, this process or
the hub that dies leaves nothing on. This process renews the leases of pages that are alive.

A vector is added with `ratio` times the norm of the residual stream at each token (a relative vector), so the bound on
the ratio holds whatever the model's norms are. Or its direction is removed from the stream (directional ablation,
Arditi et al. 2024, arXiv:2406.11717), `ratio` of the way.

Invariant: nothing is sent for a page without the right, beyond a bound, or faster than a page may act; the kill switch
is sent at once, whatever else is bounded.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import msgspec

from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.limits import Name
from capflow.probes.probe import load_vector
from capflow.steering.action import (
    FROZEN_TROUBLE,
    Abort,
    Action,
    Answered,
    Freeze,
    Gain,
    Steer,
    Unfreeze,
    Unsteer,
)
from capflow.steering.clamp import Clamp
from capflow.steering.vector import SteeringVector
from capflow_dashboard import limits

Kind = Literal["steer", "gain", "unsteer", "abort", "kill", "release"]


class PageAction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a page asks for.

    id: the page's number of it; the same number again is the same action.
    kind: `steer`, `gain` (of a module), `unsteer` (both), `abort`, `kill` and `release` (of the kill switch).
    request: the request's key; 0 for all that run and come later, of `steer`, `gain` and `unsteer`.
    name: the vector's or the module's.
    mode: whether the vector is added or its direction removed.
    ratio: of the stream's norm to add; how far to remove; the scale of a module.
    """

    id: int
    kind: Kind
    request: int = 0
    name: Name = ""
    mode: Literal["add", "remove"] = "add"
    ratio: float = 0.0


class NamedVector(NamedTuple):
    """A vector that pages may use."""

    name: str
    vector: SteeringVector

    @property
    def site(self) -> Site:
        """The site that it is added at."""
        return self.vector.site


def load_vectors(texts: Iterable[str], where: str) -> dict[str, NamedVector]:
    """Return the vectors that `NAME=FILE` texts name. Raises UsageError for a text or a file that cannot be used."""
    vectors: dict[str, NamedVector] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise UsageError(explain(where, got=text, expected="NAME=FILE, a vector file with a site"))
        if name in vectors:
            raise UsageError(explain(where, got=f"{name} twice", expected="different names"))
        vectors[name] = NamedVector(name, load_vector(path))
    return vectors


class Target(NamedTuple):
    """A request that can be acted on."""

    key: int
    engine: str
    request: str
    incarnation: str


@dataclass
class _Hold:
    """What a page holds on one request or on all: the last `steer` and the last `gain` of each module.

    number: of the action, for its label.
    renewed_s: when it was last sent.
    """

    page: str
    asked: PageAction
    label: str
    renewed_s: float


@dataclass
class PageRights:
    """One page's part: its name, what it sent, and what was answered.

    acks: the answers that are to be sent to it.
    """

    name: str
    alive_s: float
    times: deque[float] = field(default_factory=lambda: deque(maxlen=limits.ACTIONS_PER_S_MAX))
    seen: dict[int, dict[str, Any]] = field(default_factory=dict)
    acks: list[dict[str, Any]] = field(default_factory=list)
    version: int = -1


class SteeringDesk:
    """Takes the actions of pages and sends them to the hub, with leases.

    vectors, modules: what pages may name.
    send: sends an action to the hub; its label comes back with the answer.
    find: returns a running request by its key; None if it is over or unknown.
    running: returns all running requests.
    clock: returns monotonic seconds.
    """

    def __init__(
        self,
        vectors: dict[str, NamedVector],
        modules: tuple[str, ...],
        *,
        allowed: bool,
        send: Callable[[Action], None],
        find: Callable[[int], Target | None],
        running: Callable[[], list[Target]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.allowed = allowed
        self._vectors = vectors
        self._modules = modules
        self._send = send
        self._find = find
        self._running = running
        self._clock = clock
        # Guards the fields below: pages act on the server's thread, answers come on the channel's.
        self._lock = threading.Lock()
        self._pages: dict[str, PageRights] = {}
        # What is held, by request (0 for all), kind and, of a gain, the module.
        self._holds: dict[tuple[int, str, str], _Hold] = {}
        # Requests that an action for all was sent to already, by hold.
        self._covered: dict[tuple[int, str, str], set[int]] = {}
        # Actions without an answer, by label: the page and its number.
        self._waiting: dict[str, tuple[str, int]] = {}
        # Called with the lock held, on any thread, when steering is frozen.
        self.on_freeze: Callable[[], None] = lambda: None
        self._frozen = False
        # When that changed.
        self._frozen_s = -math.inf
        self._version = 0

    def describe(self) -> dict[str, Any] | None:
        """Return what pages may do, for their first message; None if they may not act."""
        if not self.allowed:
            return None
        return {
            "vectors": [{"name": one.name, "site": str(one.site)} for one in self._vectors.values()],
            "modules": list(self._modules),
            "ratio_max": limits.RATIO_MAX,
            "lease_s": limits.LEASE_S,
            "lease_positions": limits.LEASE_POSITIONS,
        }

    # Called on the server's thread.

    def enter(self, name: str) -> PageRights:
        """Return the part of a page; a page that comes back has the same name and holds what it held.

        What it gets from now on goes to this connection alone: an earlier one may be dead without having ended.
        """
        with self._lock:
            before = self._pages.get(name)
            if before is None:
                page = PageRights(name, self._clock())
            else:
                page = replace(before, version=-1)
                before.acks = []
            self._pages[name] = page
            self._forget_pages()
            return page

    def renew(self, page: PageRights) -> None:
        """Note that a page is alive."""
        page.alive_s = self._clock()

    def take(self, page: PageRights, asked: PageAction) -> None:
        """Do what a page asks for, or refuse it; either is in `page.acks`."""
        with self._lock:
            if (before := page.seen.get(asked.id)) is not None:
                page.acks.append(before)
                return
            page.alive_s = now = self._clock()
            # A page that only watched for long may be forgotten.
            self._pages[page.name] = page
            reason = self._refusal(page, asked, now)
            if reason is not None:
                self._answer(page, asked.id, "rejected", reason=reason)
                return
            page.times.append(now)
            self._do(page, asked, now)

    def admit(self, page: PageRights, asked: PageAction, begin: Callable[[], None]) -> str | None:
        """Call `begin` if a page may steer so now, or return why not. No freeze comes between the two."""
        with self._lock:
            page.alive_s = now = self._clock()
            reason = self._refusal(page, asked, now)
            if reason is None:
                page.times.append(now)
                begin()
            return reason

    def fields(self, asked: PageAction, *, everywhere: bool) -> dict[str, Any]:
        """Return the fields with which a new request brings an action's steering over HTTP.

        everywhere: whether its prompt is steered too, and not generated positions alone; of a vector.
        """
        if asked.kind == "gain":
            return {"steering_name": asked.name, "steering_scale": asked.ratio}
        vector = self._vectors[asked.name].vector
        adds = asked.mode == "add"
        name = f"{'' if everywhere else 'decode_'}steering_{'vectors' if adds else 'clamps'}"
        how = {"scale": asked.ratio, "relative": True} if adds else _removal(asked.ratio)
        return {name: {vector.hook: {str(vector.layer): {"vector": vector.array().tolist(), **how}}}}

    def news(self, page: PageRights) -> dict[str, Any]:
        """Return what a page has not received yet: answers to its actions, and what is held by all pages."""
        with self._lock:
            head: dict[str, Any] = {}
            if page.acks:
                head["acks"], page.acks = page.acks, []
            if self.allowed and page.version != self._version:
                page.version = self._version
                head["steering"] = {"frozen": self._frozen, "holds": [_hold_fields(h) for h in self._holds.values()]}
            return head

    def tick(self) -> None:
        """Renew the leases of pages that are alive, let those of others end, and steer requests that are new."""
        with self._lock:
            now = self._clock()
            for key, hold in list(self._holds.items()):
                page = self._pages.get(hold.page)
                over = key[0] != 0 and self._find(key[0]) is None
                if over or page is None or now - page.alive_s > limits.PAGE_ALIVE_S:
                    self._drop(key)
                elif now - hold.renewed_s >= limits.RENEW_S:
                    hold.renewed_s = now
                    self._covered[key] = set()
                    self._apply(key, hold)
                elif key[0] == 0:
                    self._apply(key, hold)

    # Called on the channel's thread.

    def note(self, answered: Answered) -> None:
        """Take an event of steering: the answer to an action of a page, and a freeze by anyone."""
        with self._lock:
            if answered.kind in ("freeze", "unfreeze"):
                if answered.outcome == "applied":
                    self._freeze(answered.kind == "freeze")
                else:
                    # The hub's next counters say whether an engine is frozen.
                    self._frozen_s = -math.inf
            name, number = self._waiting.pop(answered.label, ("", 0))
            page = self._pages.get(name)
            if page is not None:
                self._answer(
                    page,
                    number,
                    answered.outcome,
                    step=answered.step,
                    position=answered.position,
                    reason=answered.reason,
                )

    def check_frozen(self, status: dict[str, Any]) -> None:
        """Take from the hub's counters whether an engine is frozen; an own change is trusted for some seconds."""
        frozen = any(str(problem).endswith(FROZEN_TROUBLE) for problem in status.get("problems", ()))
        with self._lock:
            if frozen != self._frozen and self._clock() - self._frozen_s > limits.FROZEN_CHECK_S:
                self._freeze(frozen)

    # Called with the lock held.

    def _refusal(self, page: PageRights, asked: PageAction, now: float) -> str | None:
        """Return why a page's action is refused; None if it is taken."""
        if not self.allowed:
            return explain("steering", got="a dashboard that only shows", do="start it with --allow-steering")
        if asked.kind == "kill":
            return None
        if len(page.times) == page.times.maxlen and now - page.times[0] < 1:
            return explain("actions", got="more", expected=f"at most {limits.ACTIONS_PER_S_MAX} a second from one page")
        if asked.kind == "release":
            return None
        if self._frozen and asked.kind != "abort":
            return explain("steering", got="frozen by the kill switch", do="release it first")
        if asked.kind == "abort" and not asked.request:
            return explain("abort", got="no request", expected="one request")
        if asked.request and self._find(asked.request) is None:
            return explain("request", got="one that is over", expected="one that is running")
        match asked.kind:
            case "steer":
                return self._unfit(asked, self._vectors, "vector", limits.RATIO_MAX if asked.mode == "add" else 1.0)
            case "gain":
                return self._unfit(asked, self._modules, "module", limits.GAIN_MAX)
        return None

    @staticmethod
    def _unfit(asked: PageAction, names: Iterable[str], kind: str, ratio_max: float) -> str | None:
        if asked.name not in names:
            return explain(kind, got=asked.name, expected=f"one of {', '.join(names) or 'none'}")
        low = 0.0 if kind == "module" or asked.mode == "remove" else -ratio_max
        if not low <= asked.ratio <= ratio_max:
            return explain("ratio", got=f"{asked.ratio:g}", expected=f"{low:g}..{ratio_max:g}")
        return None

    def _do(self, page: PageRights, asked: PageAction, now: float) -> None:
        label = label_of(page, asked)
        self._waiting[label] = page.name, asked.id
        while len(self._waiting) > limits.WAITING_MAX:
            del self._waiting[next(iter(self._waiting))]
        match asked.kind:
            case "steer" | "gain":
                key = asked.request, asked.kind, asked.name if asked.kind == "gain" else ""
                self._holds[key] = hold = _Hold(page.name, asked, label, now)
                self._covered[key] = set()
                self._version += 1
                if not self._apply(key, hold):
                    del self._waiting[label]
                    self._answer(page, asked.id, "waiting", reason="no request is running; the next ones are steered")
            case "unsteer":
                self._unsteer(page, asked, label)
            case "abort":
                target = self._find(asked.request)
                assert target is not None
                self._send(Abort(target.request, target.incarnation, target.engine, label))
            case "kill":
                self._send(Freeze(label=label))
                self._freeze(True)
            case "release":
                self._send(Unfreeze(label=label))

    def _unsteer(self, page: PageRights, asked: PageAction, label: str) -> None:
        keys = [key for key in self._holds if key[0] == asked.request]
        targets = self._running() if not asked.request else [self._find(asked.request)]
        for key in keys:
            self._drop(key)
        sent = False
        for target in targets:
            if target is None or (not asked.request and (target.key, "steer", "") in self._holds):
                continue
            self._send(Unsteer(target.request, target.incarnation, target.engine, label))
            for _, kind, module in keys:
                if kind == "gain":
                    self._send(_gain(target, module, 1.0, label))
            sent = True
        if not sent:
            del self._waiting[label]
            self._answer(page, asked.id, "applied", reason="nothing was steered")

    def _apply(self, key: tuple[int, str, str], hold: _Hold) -> bool:
        """Send a hold to its request, or to the running ones that it does not cover yet; return whether one was sent.

        What is held on one request goes before what is held on all.
        """
        targets = self._running() if not key[0] else [self._find(key[0])]
        covered = self._covered.setdefault(key, set())
        sent = False
        for target in targets:
            if target is None or target.key in covered or (not key[0] and (target.key, *key[1:]) in self._holds):
                continue
            covered.add(target.key)
            self._send(self._action(target, hold))
            sent = True
        return sent

    def _action(self, target: Target, hold: _Hold) -> Action:
        asked = hold.asked
        if asked.kind == "gain":
            return _gain(target, asked.name, asked.ratio, hold.label)
        vector = self._vectors[asked.name].vector
        vectors: tuple[SteeringVector, ...] = ()
        clamps: tuple[Clamp, ...] = ()
        if asked.mode == "add":
            vectors = (msgspec.structs.replace(vector, scale=asked.ratio, relative=True),)
        else:
            clamps = (Clamp.make(vector.site, vector.array(), _removal(asked.ratio), where="dashboard"),)
        return Steer(
            target.request,
            vectors,
            target.incarnation,
            target.engine,
            clamps,
            label=hold.label,
            lease_s=limits.LEASE_S,
            lease_positions=limits.LEASE_POSITIONS,
        )

    def _freeze(self, frozen: bool) -> None:
        if frozen:
            self._holds.clear()
            self._covered.clear()
            self.on_freeze()
        self._frozen = frozen
        self._frozen_s = self._clock()
        self._version += 1

    def _drop(self, key: tuple[int, str, str]) -> None:
        self._holds.pop(key, None)
        self._covered.pop(key, None)
        self._version += 1

    def _answer(self, page: PageRights, number: int, state: str, **more: Any) -> None:
        page.seen[number] = ack = {"id": number, "state": state, **more}
        while len(page.seen) > limits.WAITING_MAX:
            del page.seen[next(iter(page.seen))]
        page.acks.append(ack)

    def _forget_pages(self) -> None:
        """Forget the pages that were alive least recently."""
        held = {hold.page for hold in self._holds.values()}
        idle = sorted((page.alive_s, name) for name, page in self._pages.items() if name not in held)
        for _, name in idle[: max(0, len(self._pages) - limits.PAGES_KNOWN_MAX)]:
            del self._pages[name]


def label_of(page: PageRights, asked: PageAction) -> str:
    """Return the label of an action, for events and logs."""
    # What the other kinds name is not checked, and a label has a limit.
    text = f"{asked.name} {asked.ratio:+.3g}" if asked.kind in ("steer", "gain") else asked.kind
    return f"{text} by page {page.name} #{asked.id}"


def _removal(ratio: float) -> dict[str, float]:
    """Return the fields of a clamp that removes its direction, `ratio` of the way."""
    return {"value": 0.0, "strength": ratio}


def _gain(target: Target, module: str, scale: float, label: str) -> Gain:
    return Gain(
        target.request,
        f"module {module}",
        scale,
        target.incarnation,
        target.engine,
        label,
        limits.LEASE_S,
        limits.LEASE_POSITIONS,
    )


def _hold_fields(hold: _Hold) -> dict[str, Any]:
    asked = hold.asked
    return {
        "request": asked.request,
        "kind": asked.kind,
        "name": asked.name,
        "mode": asked.mode,
        "ratio": asked.ratio,
        "page": hold.page,
    }
