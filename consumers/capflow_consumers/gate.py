"""The gate: steer a request from the position after one at which a probe fires.

A controller: it runs between two steps, in the worker. A request is steered from the position behind a row at the probe's site
that scores at or above `threshold`; with `release`, a row that scores below it takes the steering back, and the next firing
steers anew. Only generated tokens are steered (see `capflow.steering.action.Steer`), so what the prompt's rows come to holds from the first
of them on.

Invariant: every row counts, in the order of the positions, so that it makes no difference how a prompt is cut into chunks or
what else is in the batch. Scores are computed in float64, row by row and in one fixed order of additions, not by a matrix
product whose order depends on the batch and the machine. The gate remembers nothing: the latest row that says something holds.
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
    vector: a vector file; its site is where the vector is added, `scale` times.
    threshold: the probe file's unless given.
    release: never, unless given; at most the threshold.
    positions: which tokens are scored.
    """

    probe: str
    vector: str
    threshold: float | None = None
    scale: float = 1.0
    release: float | None = None
    positions: str = "all"


class GateState(msgspec.Struct, frozen=True):
    """What the workers are sent.

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
        self._vectors = (state.vector,)

    def spec(self) -> CaptureSpec:
        """Ask for the probe's site."""
        return CaptureSpec({self.state.hook: [self.state.layer]}, self.state.positions)

    def steers(self) -> Sequence[Site]:
        """Name the vector's site."""
        return [self.state.vector.site]

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
        """Return a `Steer` for each request whose latest row that says something fires, and an `Unsteer` where it releases."""
        latest: dict[str, tuple[int, bool]] = {}  # the position of that row, and whether it fires
        for step in view.rows():
            if step.site == self._site and (last := self._last(step.rows)) is not None:
                position = step.start + last[0]
                if position > latest.get(step.request, (-1, False))[0]:
                    latest[step.request] = position, last[1]
        return [Steer(request, self._vectors) if fires else Unsteer(request) for request, (_, fires) in latest.items()]

    def _last(self, rows: Rows) -> tuple[int, bool] | None:
        """Return the number of the last row that fires or releases, and whether it fires; None where none does either."""
        for end in range(len(rows), 0, -_BLOCK):
            first = max(end - _BLOCK, 0)
            scores = self._scores(rows[first:end])
            fires = scores >= self.state.threshold
            says = fires if self.state.release is None else fires | (scores < self.state.release)
            if says.any():
                last = int(np.flatnonzero(says)[-1])
                return first + last, bool(fires[last])
        return None

    def _scores(self, rows: Rows) -> npt.NDArray[np.float64]:
        products = np.multiply(rows, self._weight, dtype=np.float64, order="C")
        scores: npt.NDArray[np.float64] = np.add.reduce(products, axis=1) + self.state.bias
        return scores


Rows = npt.NDArray[np.float32]
_BLOCK = 64  # rows that are scored at once, from the last one back


@hookimpl
def capflow_consumers() -> list[type[Controller]]:
    """Bring the gate."""
    return [Gate]
