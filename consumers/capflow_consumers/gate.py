"""The gate: steer a request from the step after a probe fires on it.

A controller: it runs in every worker, inside the step. A request is steered once its latest row at the probe's site scores
at or above `threshold`, and not again while it is; with `release`, a latest row that scores below it takes the steering
back, and the next firing steers anew. Only generated tokens are steered (see `capflow.action.Steer`).

What always holds: the same rows give the same actions on every rank, whatever else is in the batch. Scores are
computed in float64, row by row and in one fixed order of additions, not by a matrix product whose order depends on
the batch and the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec
import numpy as np

from capflow.action import Action, Steer, Unsteer
from capflow.consumer import Controller, StepView
from capflow.errors import UsageError, explain
from capflow.hookspecs import hookimpl
from capflow.message import ModelInfo
from capflow.probe import Probe, load_vector
from capflow.site import Site
from capflow.spec import CaptureSpec
from capflow.vector import SteeringVector


class GateConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of `--consumer gate:`.

    probe: a probe file with one probe. vector: a vector file; its site is where the vector is added, `scale` times.
    threshold: the probe file's unless given. release: never, unless given; at most the threshold. positions: which
    tokens are scored.
    """

    probe: str
    vector: str
    threshold: float | None = None
    scale: float = 1.0
    release: float | None = None
    positions: str = "all"


class GateState(msgspec.Struct, frozen=True):
    """What the workers are sent. weight: `[hidden_size]` float32, little-endian."""

    layer: int
    hook: str
    weight: bytes
    bias: float
    threshold: float
    release: float | None
    vector: SteeringVector
    positions: str


class Gate(Controller):
    """Steers a request while a probe says so."""

    name: ClassVar[str] = "gate"
    Config: ClassVar[type[msgspec.Struct]] = GateConfig
    State: ClassVar[type[msgspec.Struct]] = GateState

    @classmethod
    def load(cls, config: GateConfig) -> GateState:
        """Read the files; raise UsageError when they are no probe and vector, or do not agree with the options."""
        probe = Probe.load(config.probe)
        if len(probe.names) != 1:
            raise UsageError(explain(f"{config.probe}: weight", got=f"{len(probe.names)} probes", expected="one"))
        vector = load_vector(config.vector, config.scale)
        width = vector.array().size
        if width != probe.hidden_size:
            expected = f"{probe.hidden_size}, the probe's width"
            raise UsageError(explain(f"{config.vector}: vector", got=f"{width} numbers", expected=expected))
        threshold = probe.thresholds[0] if config.threshold is None else config.threshold
        if not np.isfinite(threshold):
            raise UsageError(explain("consumers.gate.threshold", got=threshold, expected="a finite number"))
        if config.release is not None and not config.release <= threshold:
            expected = f"at most the threshold, {threshold}"
            raise UsageError(explain("consumers.gate.release", got=config.release, expected=expected))
        CaptureSpec.parse(
            {"hooks": {probe.site.hook: [probe.site.layer]}, "positions": config.positions}, where="consumers.gate"
        )
        return GateState(
            layer=probe.site.layer,
            hook=probe.site.hook,
            weight=probe.weight[0].tobytes(),
            bias=float(probe.bias[0]),
            threshold=threshold,
            release=config.release,
            vector=vector,
            positions=config.positions,
        )

    def __init__(self, state: GateState) -> None:
        super().__init__(state)
        self.state: GateState = state
        self._site = Site(state.layer, state.hook)
        self._weight = np.frombuffer(state.weight, np.float32).astype(np.float64)
        self._steered: set[str] = set()

    def spec(self) -> CaptureSpec:
        """Ask for the probe's site."""
        return CaptureSpec({self.state.hook: [self.state.layer]}, self.state.positions)

    def open(self, model: ModelInfo) -> None:
        """Raise UsageError unless the model has both sites tapped and the width of the files."""
        if self._weight.size != model.hidden_size:
            expected = f"{model.hidden_size}, the model's width"
            raise UsageError(
                explain(f"consumers.{self.instance}.probe", got=f"{self._weight.size} numbers", expected=expected)
            )
        if self._site not in model.sites:
            do = f"start the engine with --sites {self._site} to tap it"
            raise UsageError(
                explain(f"consumers.{self.instance}.probe", got=str(self._site), expected="a tapped site", do=do)
            )
        self.state.vector.check(model.sites, model.hidden_size, where=f"consumers.{self.instance}.vector")

    def on_step(self, view: StepView) -> Sequence[Action]:
        """Return a `Steer` for each request that fires now, and an `Unsteer` for each that is released."""
        latest: dict[str, tuple[int, float]] = {}
        for step in view.rows():
            stop = step.start + len(step.rows)
            if step.site == self._site and len(step.rows) and stop > latest.get(step.request, (0, 0.0))[0]:
                latest[step.request] = (stop, self._score(step.rows[-1]))
        actions: list[Action] = []
        for request, (_, score) in latest.items():
            if request not in self._steered:
                if score >= self.state.threshold:
                    self._steered.add(request)
                    actions.append(Steer(request, (self.state.vector,)))
            elif self.state.release is not None and score < self.state.release:
                self._steered.remove(request)
                actions.append(Unsteer(request))
        return actions

    def on_request_done(self, request: str) -> None:
        """Forget the request, so that its id may come again."""
        self._steered.discard(request)

    def _score(self, row: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> float:
        products = row.astype(np.float64) * self._weight
        return float(np.add.reduce(products)) + self.state.bias


@hookimpl
def capflow_consumers() -> list[type[Controller]]:
    """Bring the gate."""
    return [Gate]
