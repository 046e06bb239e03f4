"""The gate: a controller that acts on a request from the position after one at which a probe fires.

The engine scores the rows at the probe's site; the gate reads the scores. A row passes if its score, or with `ema` the
smoothed score, is at or above `threshold`. The gate fires after `consecutive` passing rows in a row, and acts from the
next position on. With `release`, a row that scores below it ends the action, and the gate may fire again. Only
generated tokens are steered (see `capflow.steering.action.Steer`), so the state after the prompt's rows takes effect at
the first generated token.

Invariant: every row counts, in the order of the positions. The result depends neither on how a prompt is cut into
chunks nor on the other requests of the batch. Without `ema`, `consecutive` and `proportional` the latest row that fires
or releases decides, so the gate has no state of its own. With them it keeps the state after each of the latest rows: a
position that is seen again, because a draft was rejected, continues from the state before it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

import msgspec
import numpy as np

from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow.errors import UsageError, explain
from capflow.plugins.consumer import MODES, SCORES, Controller, Decision, ScoreBatch, StepProbe, StepView, hookimpl
from capflow.probes.probe import Probe, load_vector
from capflow.steering.action import Abort, Action, Gain, Steer, Unsteer
from capflow.steering.clamp import Clamp
from capflow.steering.request import Steering
from capflow.steering.vector import SteeringVector
from capflow_consumers.gate_in_graph import in_graph, steering_of

ACTIONS = ("steer", "clamp", "gain", "abort", "stop")


class GateConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of `--consumer gate:`.

    probe: a probe file with one probe.
    vector: a vector file; its site is where the vector is added, or where the stream is clamped along it.
    threshold: the score from which a row passes; the probe file's by default.
    scale: the factor of the vector.
    release: the score below which a row ends the action, at most the threshold; never by default.
    positions: which tokens are scored.
    mode: replicated (acts at the next position) or ordered (one later with async scheduling; the step waits for
        nothing).
    score: dot, cosine or cast.
    ema: the part of the smoothed score that stays at each row, 0 to below 1; 0 for no smoothing.
    consecutive: the number of passing rows in a row after which the gate fires.
    proportional: how much the scale grows for each unit of the score above the threshold.
    scale_max: the bound of that scale.
    action: steer (adds the vector), clamp (along the vector), gain, abort or stop (these two need mode=ordered).
    value: with clamp, the projection that is set.
    min, max: with clamp, the bounds of the projection.
    owner: with gain, whose contribution is multiplied, such as request or module NAME.
    gain: with gain, the factor while the gate is open.
    shadow: whether the gate only records what it would do.
    label: the label of its actions and events.
    requests: only requests whose id matches this pattern.
    tier: sync, or in-graph: requests get the vector with a gate of their own, which the forward pass computes.
    sharpness, latch: with tier=in-graph, as in `capflow.steering.gate.SteeringGate`.
    """

    probe: str
    vector: str = ""
    threshold: float | None = None
    scale: float = 1.0
    release: float | None = None
    positions: str = "all"
    mode: str = "replicated"
    score: str = "dot"
    ema: float = 0.0
    consecutive: int = 1
    proportional: float = 0.0
    scale_max: float | None = None
    action: str = "steer"
    value: float | None = None
    min: float | None = None
    max: float | None = None
    owner: str = ""
    gain: float = 0.0
    shadow: bool = False
    label: str = ""
    requests: str = "*"
    tier: str = "sync"
    sharpness: float | None = None
    latch: bool = False


class GateState(msgspec.Struct, frozen=True, kw_only=True):
    """The state that the workers receive.

    layer, hook: the probe's site.
    weight: `[hidden_size]` float32, little-endian.
    scale, scale_max: the bounds of the vector's factor.
    steering: with tier=in-graph, what every request gets. The controller then runs nowhere.
    The other fields are as in `GateConfig`.
    """

    layer: int
    hook: str
    weight: bytes
    bias: float
    threshold: float
    release: float | None = None
    vector: SteeringVector | None = None
    clamp: Clamp | None = None
    positions: str = "all"
    mode: str = "replicated"
    score: str = "dot"
    ema: float = 0.0
    consecutive: int = 1
    proportional: float = 0.0
    scale: float = 1.0
    scale_max: float = 1.0
    action: Literal["steer", "clamp", "gain", "abort", "stop"] = "steer"
    owner: str = ""
    gain: float = 0.0
    shadow: bool = False
    label: str = ""
    requests: str = "*"
    steering: Steering | None = None


class _After(NamedTuple):
    """The state of a gate for a request after a row.

    value: the smoothed score; NaN before the first row.
    passed: the number of passing rows up to here, without a gap.
    fired: the position at which the gate opened; -1 if it is closed.
    score: the value at which it opened.
    scale: the factor of the vector.
    """

    position: int
    value: float
    passed: int
    fired: int
    score: float
    scale: float


class Gate(Controller):
    """Acts on a request while a probe fires."""

    name: ClassVar[str] = "gate"
    Config: ClassVar[type[msgspec.Struct]] = GateConfig
    State: ClassVar[type[msgspec.Struct]] = GateState

    @classmethod
    def load(cls, config: GateConfig) -> GateState:
        """Read the files; raise UsageError when they hold no probe and vector, or do not fit the options."""
        probe = Probe.load(config.probe)
        if len(probe.names) != 1:
            raise UsageError(explain(f"{config.probe}: weight", got=f"{len(probe.names)} probes", expected="one"))
        probe.site.check_stream(f"{config.probe}: site")
        threshold = probe.thresholds[0] if config.threshold is None else config.threshold
        if in_graph(config):
            steering = steering_of(config, probe, threshold)
            site = probe.site
            return GateState(
                layer=site.layer,
                hook=site.hook,
                weight=b"",
                bias=0.0,
                threshold=threshold,
                requests=config.requests,
                steering=steering,
            )
        _check_numbers(config, threshold)
        scale_max = config.scale if config.scale_max is None else config.scale_max
        vector, clamp = _loaded(config, probe.hidden_size)
        spec = {"hooks": {probe.site.hook: [probe.site.layer]}, "positions": config.positions}
        CaptureSpec.parse(spec, where="consumers.gate")
        return GateState(
            layer=probe.site.layer,
            hook=probe.site.hook,
            weight=probe.weight[0].tobytes(),
            bias=float(probe.bias[0]),
            threshold=threshold,
            release=config.release,
            vector=vector,
            clamp=clamp,
            positions=config.positions,
            mode=config.mode,
            score=config.score,
            ema=config.ema,
            consecutive=config.consecutive,
            proportional=config.proportional,
            scale=config.scale,
            scale_max=scale_max,
            action=config.action,  # type: ignore[arg-type]
            owner=config.owner,
            gain=config.gain,
            shadow=config.shadow,
            label=config.label,
            requests=config.requests,
        )

    def __init__(self, state: GateState) -> None:
        super().__init__(state)
        self.state: GateState = state
        self.mode, self.requests = state.mode, state.requests
        self._site = Site(state.layer, state.hook)
        self._weight = np.frombuffer(state.weight, np.float32)
        self._plain = state.ema == 0.0 and state.consecutive == 1 and state.proportional == 0.0
        self._plain = self._plain and not state.shadow and state.action in ("steer", "clamp")
        self._low = -np.inf if state.release is None else state.release
        # By request, the states after the latest rows.
        self._after: dict[str, deque[_After]] = {}
        # The vectors by their scale.
        self._vectors: dict[float, tuple[SteeringVector, ...]] = {}

    def probes(self) -> Sequence[StepProbe]:
        """Ask for the scores at the probe's site."""
        state = self.state
        if state.steering is not None:
            return []
        return [StepProbe(self._site, self._weight, state.bias, state.score, state.positions)]

    def steering(self) -> Steering | None:
        """Return the gate and its vector, with tier=in-graph."""
        return self.state.steering

    def steers(self) -> Sequence[Site]:
        """Name the site of the vector or of the clamp."""
        if self.state.shadow:
            return []
        return [each.site for each in (self.state.vector, self.state.clamp) if each is not None]

    def open(self, model: ModelInfo) -> None:
        """Raise UsageError unless the model has the sites tapped, and the width of the files."""
        if self.state.steering is not None:
            return  # the engine checks it, and runs on without it if it does not fit
        probe = f"consumers.{self.instance}.probe"
        if self._weight.size != model.hidden_size:
            expected = f"{model.hidden_size}, the model's width"
            raise UsageError(explain(probe, got=f"{self._weight.size} numbers", expected=expected))
        if self._site not in model.sites:
            do = f"start the engine with --sites {self._site} to tap it"
            raise UsageError(explain(probe, got=str(self._site), expected="a tapped site", do=do))
        for each in (self.state.vector, self.state.clamp):
            if each is not None:
                each.check(model.sites, model.hidden_size, where=f"consumers.{self.instance}.vector")

    def on_step(self, view: StepView) -> Sequence[Action | Decision]:
        """Return the decisions on the requests with a row that fires or releases."""
        decisions: list[Action | Decision] = []
        for batch in view.score_batches():
            if self._plain:
                decisions += self._latest(batch, view)
            else:
                for n, request in enumerate(batch.requests):
                    scores = batch.scores[batch.offsets[n] : batch.offsets[n + 1]].tolist()
                    decisions += self._followed(request, batch.starts[n], scores, view)
        return decisions

    def on_request_done(self, request: str) -> None:
        """Forget a request."""
        self._after.pop(request, None)

    def _latest(self, batch: ScoreBatch, view: StepView) -> list[Decision]:
        """Return decisions by the latest row of each request that fires or releases."""
        fires = batch.scores >= self.state.threshold
        parts = set()
        if fires.any():
            rows = np.flatnonzero(fires)
            parts = set((np.searchsorted(batch.offsets, rows, side="right") - 1).tolist())
        steered = view.steered() if parts or self.state.release is not None else ()
        below: set[int] = set()
        if self.state.release is not None and steered:
            lowest = np.fmin.reduceat(batch.scores, batch.offsets[:-1])
            below = set(np.flatnonzero(lowest < self.state.release).tolist())
        if steered:
            parts = {n for n in parts if batch.requests[n] not in steered} | below
        decisions = []
        for n in sorted(parts):
            first, end = int(batch.offsets[n]), int(batch.offsets[n + 1])
            releases = np.flatnonzero(batch.scores[first:end] < self._low)
            after = int(releases[-1]) + 1 if len(releases) else 0
            fired = np.flatnonzero(fires[first + after : end])
            if bool(len(fired)) == (batch.requests[n] in steered):
                continue  # it holds already
            row = after + int(fired[0]) if len(fired) else after - 1
            position, score = batch.starts[n] + row, float(batch.scores[first + row])
            decisions.append(self._decision(batch.requests[n], bool(len(fired)), position, score, self.state.scale))
        return decisions

    def _followed(self, request: str, start: int, scores: Sequence[float], view: StepView) -> list[Decision]:
        """Return the decision after the rows of a request, each of which changes the gate's state."""
        history = self._after.setdefault(request, deque(maxlen=_ROWS_KEPT))
        again = False
        while history and history[-1].position >= start:
            history.pop()
            again = True
        before = after = history[-1] if history else _After(-1, np.nan, 0, -1, 0.0, self.state.scale)
        opened = None
        for position, score in enumerate(scores, start):
            after = self._next(after, position, score)
            history.append(after)
            if opened is None and after.fired == position:
                opened = after
        if self.state.action in ("abort", "stop"):
            return [] if opened is None else [self._decision(request, True, opened.fired, opened.score, 0.0)]
        if not again and after.fired == before.fired and after.scale == before.scale:
            taken_back = after.fired >= 0 and not self.state.shadow and request not in view.steered()
            if not taken_back:
                return []
        if after.fired >= start:
            return [self._decision(request, True, after.fired, after.score, after.scale)]
        if after.fired >= 0:  # it opened before: this row changed the scale, or follows a freeze
            return [self._decision(request, True, after.position, after.value, after.scale)]
        if before.fired < 0 and not again and opened is None:
            return []
        return [self._decision(request, False, after.position, after.value, after.scale)]

    def _next(self, last: _After, position: int, score: float) -> _After:
        """Return the state after one more row."""
        state = self.state
        if math.isnan(score):  # it is no score
            return last._replace(position=position, passed=0)
        value = score if math.isnan(last.value) else state.ema * last.value + (1.0 - state.ema) * score
        passed = last.passed + 1 if value >= state.threshold else 0
        fired, fired_score = last.fired, last.score
        if value < self._low:
            fired = -1
        elif fired < 0 and passed >= state.consecutive:
            fired, fired_score = position, value
        return _After(position, value, passed, fired, fired_score, self._scale(value) if fired >= 0 else state.scale)

    def _scale(self, value: float) -> float:
        """Return the vector's factor for a score, in steps, so that few different vectors are in flight."""
        state = self.state
        more = state.scale_max - state.scale
        if state.proportional == 0.0 or more <= 0.0:
            return state.scale
        part = min(max(state.proportional * (value - state.threshold) / more, 0.0), 1.0)
        return state.scale + more * (round(part * _SCALE_STEPS) / _SCALE_STEPS)

    def _decision(self, request: str, fires: bool, position: int, score: float, scale: float) -> Decision:
        state = self.state
        threshold = state.threshold if fires or state.release is None else state.release
        action = None if state.shadow else self._action(request, fires, score, scale)
        return Decision(request, action, position, score, threshold, state.label)

    def _action(self, request: str, fires: bool, score: float, scale: float) -> Action:
        state = self.state
        if state.action in ("abort", "stop"):
            reason = f"capflow:{self.instance}:{score:.6g}"
            return Abort(request, as_=state.action, reason=reason, label=state.label)
        if state.action == "gain":
            return Gain(request, state.owner, state.gain if fires else 1.0, label=state.label)
        if not fires:
            return Unsteer(request, label=state.label)
        if state.clamp is not None:
            return Steer(request, (), clamps=(state.clamp,), label=state.label)
        return Steer(request, self._scaled(scale), label=state.label)

    def _scaled(self, scale: float) -> tuple[SteeringVector, ...]:
        vectors = self._vectors.get(scale)
        if vectors is None:
            vector = self.state.vector
            assert vector is not None
            if scale != self.state.scale:
                vector = msgspec.structs.replace(vector, scale=scale)
            vectors = self._vectors[scale] = (vector,)
        return vectors


_ROWS_KEPT = 64
_SCALE_STEPS = 16


def _loaded(config: GateConfig, width: int) -> tuple[SteeringVector | None, Clamp | None]:
    """Return the vector or the clamp of the options; raise UsageError if the file does not fit."""
    if not config.vector:
        if config.action in ("steer", "clamp") and not config.shadow:
            raise UsageError(explain("consumers.gate.vector", got="none", expected=f"a file, with {config.action}"))
        return None, None
    vector = load_vector(config.vector, config.scale)
    vector.site.check_stream(f"{config.vector}: site")
    if vector.array().size != width:
        expected = f"{width}, the probe's width"
        raise UsageError(explain(f"{config.vector}: vector", got=f"{vector.array().size} numbers", expected=expected))
    if config.action != "clamp":
        return vector, None
    bounds = {name: getattr(config, name) for name in ("value", "min", "max") if getattr(config, name) is not None}
    if not bounds or ("value" in bounds and len(bounds) > 1):
        got = ", ".join(bounds) or "none"
        raise UsageError(explain("consumers.gate.value", got=got, expected="value alone, or min or max, with clamp"))
    direction = load_vector(config.vector).array()
    return None, Clamp.make(vector.site, direction, bounds, where="consumers.gate")


def _check_numbers(config: GateConfig, threshold: float) -> None:
    """Raise UsageError, with the option first, for options that cannot work."""

    def check(holds: bool, option: str, got: object, expected: str, do: str = "") -> None:
        if not holds:
            raise UsageError(explain(f"consumers.gate.{option}", got=got, expected=expected, do=do))

    check(bool(np.isfinite(threshold)), "threshold", threshold, "a finite number")
    release = config.release
    check(release is None or release <= threshold, "release", release, f"at most the threshold, {threshold}")
    check(config.mode in MODES, "mode", config.mode, f"one of {', '.join(MODES)}")
    check(config.score in SCORES, "score", config.score, f"one of {', '.join(SCORES)}")
    check(config.action in ACTIONS, "action", config.action, f"one of {', '.join(ACTIONS)}")
    check(0.0 <= config.ema < 1.0, "ema", config.ema, "0 to below 1")
    check(config.consecutive >= 1, "consecutive", config.consecutive, "1 or more")
    rate, bound = config.proportional, config.scale_max
    check(0.0 <= rate < np.inf, "proportional", rate, "a finite number of at least 0")
    check(rate == 0.0 or bound is not None, "scale_max", "none", "a number of at least scale, with proportional")
    check(bound is None or config.scale <= bound < np.inf, "scale_max", bound, f"at least scale, {config.scale}")
    needs_order = config.action in ("abort", "stop") and not config.shadow
    do = "set mode=ordered: only then the answer ends at the firing position"
    check(not needs_order or config.mode == "ordered", "mode", config.mode, f"ordered, with {config.action}", do)
    check(bool(config.owner) == (config.action == "gain"), "owner", config.owner or "none", "an owner, with gain only")
    check(bool(np.isfinite(config.gain)), "gain", config.gain, "a finite number")


@hookimpl
def capflow_consumers() -> list[type[Controller]]:
    """Bring the gate."""
    return [Gate]
