"""The gate: a controller that steers a request from the position after one at which a probe fires.

It runs between two steps, in the worker. A row at the probe's site fires when it scores at or above `threshold`, and
the request is steered from the next position on. With `release`, a row that scores below it ends the steering, and the
next row that fires starts it again. Only generated tokens are steered (see `capflow.steering.action.Steer`), so the
state after the prompt's rows takes effect at the first generated token.

Invariant: every row counts, in the order of the positions. The result depends neither on how a prompt is cut into
chunks nor on the other requests of the batch. Scores are computed in float64, row by row and in one fixed order of
additions; a matrix product's order would depend on the batch and the machine. The gate has no state of its own: the
latest row that fires or releases decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow.errors import UsageError, explain
from capflow.plugins.consumer import Controller, StepView, hookimpl
from capflow.probes.probe import Probe, load_vector
from capflow.steering.action import Action, Steer, Unsteer
from capflow.steering.vector import SteeringVector


class GateConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of `--consumer gate:`.

    probe: a probe file with one probe.
    vector: a vector file; its site is where the vector is added.
    threshold: the score from which a row fires; the probe file's by default.
    scale: the factor of the vector.
    release: the score below which a row ends the steering, at most the threshold; never by default.
    positions: which tokens are scored.
    """

    probe: str
    vector: str
    threshold: float | None = None
    scale: float = 1.0
    release: float | None = None
    positions: str = "all"


class GateState(msgspec.Struct, frozen=True):
    """The state that the workers receive.

    layer, hook: the probe's site.
    weight: `[hidden_size]` float32, little-endian.
    """

    layer: int
    hook: str
    weight: bytes
    bias: float
    threshold: float
    release: float | None
    vector: SteeringVector
    positions: str


class Gate(Controller):
    """Steers a request while a probe fires."""

    name: ClassVar[str] = "gate"
    Config: ClassVar[type[msgspec.Struct]] = GateConfig
    State: ClassVar[type[msgspec.Struct]] = GateState

    @classmethod
    def load(cls, config: GateConfig) -> GateState:
        """Read the files; raise UsageError when they hold no probe and vector, or do not fit the options."""
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
            positions=config.positions,
        )

    def __init__(self, state: GateState) -> None:
        super().__init__(state)
        self.state: GateState = state
        self._site = Site(state.layer, state.hook)
        self._weight = np.frombuffer(state.weight, np.float32).astype(np.float64)
        self._vectors = (state.vector,)

    def spec(self) -> CaptureSpec:
        """Ask for the probe's site."""
        return CaptureSpec({self.state.hook: [self.state.layer]}, self.state.positions)

    def steers(self) -> Sequence[Site]:
        """Name the vector's site."""
        return [self.state.vector.site]

    def open(self, model: ModelInfo) -> None:
        """Raise UsageError unless the model has both sites tapped, and the width of the files."""
        probe = f"consumers.{self.instance}.probe"
        if self._weight.size != model.hidden_size:
            expected = f"{model.hidden_size}, the model's width"
            raise UsageError(explain(probe, got=f"{self._weight.size} numbers", expected=expected))
        if self._site not in model.sites:
            do = f"start the engine with --sites {self._site} to tap it"
            raise UsageError(explain(probe, got=str(self._site), expected="a tapped site", do=do))
        self.state.vector.check(model.sites, model.hidden_size, where=f"consumers.{self.instance}.vector")

    def on_step(self, view: StepView) -> Sequence[Action]:
        """Return a `Steer` or an `Unsteer` for each request with a row that fires or releases; the latest decides."""
        # By request: the position of the latest row that decides, and whether it fires.
        latest: dict[str, tuple[int, bool]] = {}
        for step in view.rows():
            if step.site == self._site and (last := self._last(step.rows)) is not None:
                position = step.start + last[0]
                if position > latest.get(step.request, (-1, False))[0]:
                    latest[step.request] = position, last[1]
        return [Steer(request, self._vectors) if fires else Unsteer(request) for request, (_, fires) in latest.items()]

    def _last(self, rows: Rows) -> tuple[int, bool] | None:
        """Return the index of the last row that fires or releases, and whether it fires; None when there is none."""
        for end in range(len(rows), 0, -_BLOCK):
            first = max(end - _BLOCK, 0)
            scores = self._scores(rows[first:end])
            fires = scores >= self.state.threshold
            decides = fires if self.state.release is None else fires | (scores < self.state.release)
            if decides.any():
                last = int(np.flatnonzero(decides)[-1])
                return first + last, bool(fires[last])
        return None

    def _scores(self, rows: Rows) -> npt.NDArray[np.float64]:
        products = np.multiply(rows, self._weight, dtype=np.float64, order="C")
        scores: npt.NDArray[np.float64] = np.add.reduce(products, axis=1) + self.state.bias
        return scores


Rows = npt.NDArray[np.float32]
# How many rows are scored at a time. The last block comes first.
_BLOCK = 64


@hookimpl
def capflow_consumers() -> list[type[Controller]]:
    """Bring the gate."""
    return [Gate]
