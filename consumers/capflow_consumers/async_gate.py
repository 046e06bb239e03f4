"""The async gate: a consumer that scores rows in the hub and steers requests whose probe fires.

It decides as the `gate` does, by the latest row that fires or releases. But its actions travel from the hub to the
engine, so they hold some positions later, and how many depends on time. Use it where the engine's own time matters more
than the delay, and as the place to begin a controller that cannot run inside a worker.

An action that was rejected is sent again by a later row that decides the same, at most once in `RETRY_S`. A freeze
takes back what the gate did; then nothing is sent until the engine is not frozen any more.

Invariant: an action is sent only when the decision differs from what holds, for the request of the frame that decided.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import ClassVar, Literal

import msgspec
import numpy as np

from capflow.capture.frame import Frame
from capflow.capture.model import ModelInfo
from capflow.capture.result import CaptureResult, RequestDone
from capflow.capture.site import SHAPED_HOOKS
from capflow.capture.spec import CaptureSpec
from capflow.errors import UsageError, explain
from capflow.plugins.consumer import Consumer, Context, hookimpl
from capflow.probes.probe import Probe, as_float32, load_vector
from capflow.steering.action import Answered, Steer, Unsteer
from capflow.steering.vector import SteeringVector

RETRY_S = 1.0
"""The least time between a rejection and the next action on a request, seconds."""


@dataclass
class _Decision:
    """What the gate did to a request.

    steers: whether the latest action steers; None if what became of it is unknown.
    rejected_at: when an action was rejected last, on the gate's clock.
    """

    incarnation: str
    steers: bool | None = False
    rejected_at: float = float("-inf")


class AsyncGateConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of `--consumer async_gate:`.

    probe: a probe file with one probe.
    vector: a vector file; its site is where the vector is added.
    threshold: the score from which a row fires; the probe file's by default.
    scale: the factor of the vector.
    release: the score below which a row ends the steering, at most the threshold; never by default.
    positions: which tokens are scored.
    requests: only requests whose id matches this pattern.
    capture: `all` captures the probe's site of every request; `requests` scores what requests ask to capture for this
        consumer.
    """

    probe: str
    vector: str
    threshold: float | None = None
    scale: float = 1.0
    release: float | None = None
    positions: str = "all"
    requests: str = "*"
    capture: Literal["all", "requests"] = "all"


class AsyncGate(Consumer):
    """Steers a request while a probe fires, from the hub."""

    name = "async_gate"
    Config: ClassVar[type[msgspec.Struct]] = AsyncGateConfig

    def __init__(self, config: AsyncGateConfig, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(config)
        self.config: AsyncGateConfig = config
        self.context: Context | None = None
        self._clock = clock
        # By engine and id, until the request ends.
        self._decisions: dict[tuple[str, str], _Decision] = {}
        # Engines that a freeze through this hub holds.
        self._frozen: set[str] = set()

    @cached_property
    def probe(self) -> Probe:
        """The probe. Raises UsageError if the file has none or several."""
        probe = Probe.load(self.config.probe)
        if len(probe.names) != 1:
            raise UsageError(explain(f"{self.config.probe}: weight", got=f"{len(probe.names)} probes", expected="one"))
        return probe

    @cached_property
    def vector(self) -> SteeringVector:
        """The vector. Raises UsageError if the file has none."""
        return load_vector(self.config.vector, self.config.scale)

    @property
    def threshold(self) -> float:
        """The score from which a row fires."""
        return self.probe.thresholds[0] if self.config.threshold is None else self.config.threshold

    def check(self) -> None:
        """Raise UsageError unless the files fit each other and the options."""
        self.vector.site.check_stream(f"{self.config.vector}: site")
        width = self.vector.array().size
        if self.probe.site.hook not in SHAPED_HOOKS and width != self.probe.hidden_size:
            expected = f"{self.probe.hidden_size}, the probe's width"
            raise UsageError(explain(f"{self.config.vector}: vector", got=f"{width} numbers", expected=expected))
        if not np.isfinite(self.threshold):
            raise UsageError(explain("threshold", got=self.threshold, expected="a finite number"))
        if self.config.release is not None and not self.config.release <= self.threshold:
            expected = f"at most the threshold, {self.threshold}"
            raise UsageError(explain("release", got=self.config.release, expected=expected))

    def spec(self) -> CaptureSpec | None:
        """Ask for the probe's site, unless requests do."""
        site = self.probe.site
        return CaptureSpec({site.hook: [site.layer]}, self.config.positions) if self.config.capture == "all" else None

    def open(self, context: Context) -> None:
        """Keep the way to act."""
        self.context = context
        self._decisions.clear()
        self._frozen.clear()

    def on_session(self, engine: str, model: ModelInfo) -> None:  # noqa: ARG002 - a consumer's signature
        """Raise UsageError, which the hub logs, unless probe and vector fit the model."""
        self.probe.check(model.sites, model.width_of(self.probe.site))
        self.vector.check(model.sites, model.hidden_size, where=f"consumers.{self.instance}.vector")

    def on_frame(self, frame: Frame) -> None:
        """Score the rows of a frame, and act where a decision changes."""
        decided: dict[str, tuple[int, bool, str]] = {}
        for chunk in frame.chunks():
            request = chunk.request
            if self.probe.site not in chunk.sites or not fnmatchcase(request.id, self.config.requests):
                continue
            rows = as_float32(chunk.rows[chunk.sites.index(self.probe.site)]).astype(np.float64)
            scores = rows @ self.probe.weight[0] + float(self.probe.bias[0])
            fires = scores >= self.threshold
            decides = fires if self.config.release is None else fires | (scores < self.config.release)
            if decides.any():
                last = int(np.flatnonzero(decides)[-1])
                position = chunk.start + last
                if position > decided.get(request.id, (-1, False, ""))[0]:
                    decided[request.id] = position, bool(fires[last]), request.incarnation
        for id, (_, fires_last, incarnation) in decided.items():  # noqa: A001 - the word for what identifies a request
            self._decide(frame.header.engine, id, incarnation, steers=fires_last)

    def on_request_done(self, done: RequestDone) -> CaptureResult | None:
        """Forget the request."""
        self._decisions.pop((done.engine, done.request), None)
        return None

    def on_engine_gone(self, engine: str) -> None:
        """Forget its requests."""
        self._decisions = {key: decision for key, decision in self._decisions.items() if key[0] != engine}
        self._frozen.discard(engine)

    def on_action(self, answered: Answered) -> None:
        """Note what became of an own action, and what a freeze took back."""
        engine, request, kind = answered.engine, answered.request, answered.kind
        if kind in ("freeze", "unfreeze"):
            if answered.outcome == "applied":
                self._freeze(engine, request, frozen=kind == "freeze")
            return
        decision = self._decisions.get((engine, request))
        if decision is None or answered.asked_by != self.instance or answered.incarnation != decision.incarnation:
            return
        if answered.outcome == "rejected":
            decision.steers = kind == "unsteer"
            decision.rejected_at = self._clock()
        elif answered.outcome == "unknown":
            decision.steers = None

    def _freeze(self, engine: str, request: str, *, frozen: bool) -> None:
        """Forget what a freeze took back: of one request, which its worker reports, or of a whole engine."""
        if request:
            if frozen:
                self._decisions.pop((engine, request), None)
            return
        if not frozen:
            self._frozen.discard(engine)
            return
        self._frozen.add(engine)
        self._decisions = {key: decision for key, decision in self._decisions.items() if key[0] != engine}

    def _decide(self, engine: str, request: str, incarnation: str, *, steers: bool) -> None:
        assert self.context is not None
        decision = self._decisions.get((engine, request))
        if decision is None or decision.incarnation != incarnation:
            decision = self._decisions[engine, request] = _Decision(incarnation)
        if steers == decision.steers or engine in self._frozen or self._clock() < decision.rejected_at + RETRY_S:
            return
        decision.steers = steers
        if steers:
            self.context.act(Steer(request, (self.vector,), incarnation))
        else:
            self.context.act(Unsteer(request, incarnation))


@hookimpl
def capflow_consumers() -> list[type[Consumer]]:
    """Bring the async gate."""
    return [AsyncGate]
