"""The record of applied steering that a response carries."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from capflow.capture.site import Site
from capflow.steering.program import SCORES, ProgramGate, SiteOps, SteeringProgram
from capflow.steering.request import Steering

NOTHING_KEY = "none"
"""The key of a request without a steering program."""

DYNAMIC_KEY = "dynamic"
"""The key of a request that only actions or controllers may have steered; after `KEY+`, of one with a program too."""


class Change(msgspec.Struct, frozen=True):
    """An action through a hub.

    request: the id of the sample.
    position: the first position that it steers.
    """

    request: str
    kind: str
    sites: tuple[str, ...]
    position: int


class Dynamic(msgspec.Struct, frozen=True):
    """The actions and controllers that may have steered a request while it ran.

    controllers: the names of the controllers that watched the request, whether they steered it or not.
    hubs: by the name of a sample, the number of its hub, if that is not the one that its name alone leads to.
    """

    actions: tuple[Change, ...] = ()
    controllers: tuple[str, ...] = ()
    hubs: dict[str, int] = {}

    @property
    def steers(self) -> bool:
        """Whether anything may have steered the request."""
        return bool(self.actions or self.controllers)


class GateSummary(msgspec.Struct, frozen=True):
    """A gate of a request.

    name: as the request names it; `OWNER/NAME` of a module's, of the global state's and of a controller's.
    site: of the probe, `HOOK:LAYER`.
    sharpness: None for a hard gate.
    positions: the scored positions.
    abort: `stop` or `abort` if the gate may end the request; else empty.
    """

    name: str
    site: str
    score: str
    threshold: float
    sharpness: float | None
    latch: bool
    positions: str
    label: str = ""
    abort: str = ""

    @classmethod
    def of(cls, gate: ProgramGate) -> GateSummary:
        """Return the summary of a program's gate."""
        return cls(
            gate.name,
            str(Site(gate.layer, gate.hook)),
            gate.score,
            gate.threshold,
            None if math.isinf(gate.sharpness) else gate.sharpness,
            gate.latched,
            gate.positions,
            gate.label,
            gate.abort,
        )


class SteeringSummary(msgspec.Struct, frozen=True, rename={"everywhere": "global"}):
    """The steering of a request, as its response reports it.

    key: id of the steering program; equal programs have equal keys. `none` without a program; `dynamic` or
        `KEY+dynamic` if actions or controllers may have steered the request.
    prefill: the number of operations at each site, for the positions of the prompt. Scores of gates are not counted.
    decode: the same for generated positions. Empty if the answer has one token at most, which is computed from the
        prompt.
    patched: the same for single positions.
    modules: the scale of each module in the program.
    everywhere: whether the program contains the global state.
    actions: as in `Dynamic`; unset if nothing may have steered the request while it ran.
    controllers: as `actions`.
    gates: the gates, in the order of their sites; unset without one.
    """

    key: str
    prefill: dict[str, int] = msgspec.field(default_factory=dict)
    decode: dict[str, int] = msgspec.field(default_factory=dict)
    patched: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)
    modules: Mapping[str, float] = msgspec.field(default_factory=dict)
    everywhere: bool = False
    actions: tuple[Change, ...] | msgspec.UnsetType = msgspec.UNSET
    controllers: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    gates: tuple[GateSummary, ...] | msgspec.UnsetType = msgspec.UNSET

    def beside(self, dynamic: Dynamic | None) -> SteeringSummary:
        """Return this summary with what may have steered the request while it ran."""
        if dynamic is None:
            return self
        key = dynamic_key(self.key)
        return msgspec.structs.replace(self, key=key, actions=dynamic.actions, controllers=dynamic.controllers)

    @classmethod
    def of(
        cls, program: SteeringProgram | None, asked: Steering, *, everywhere: bool, max_tokens: int | None = None
    ) -> SteeringSummary:
        """Return the summary of a request's program.

        asked: the steering that the request asked for.
        everywhere: whether the program contains the global state.
        max_tokens: the maximum number of tokens of the answer; None if it is unknown.
        """
        modules = {use.name: use.scale for use in asked.modules}
        if program is None:
            return cls(NOTHING_KEY, modules=modules, everywhere=everywhere)
        return cls(
            key_of(program),
            _counts(program.prefill),
            _counts(program.decode if max_tokens is None or max_tokens > 1 else ()),
            {str(position): counts for position, ops in program.patched if (counts := _counts(ops))},
            modules,
            everywhere,
            gates=tuple(GateSummary.of(gate) for gate in program.gates) or msgspec.UNSET,
        )


def dynamic_key(key: str | None) -> str:
    """Return the key of a request that actions or controllers may have steered.

    key: the key of its own program.
    """
    return DYNAMIC_KEY if key in (None, NOTHING_KEY) else f"{key}+{DYNAMIC_KEY}"


def key_of(program: SteeringProgram | None) -> str:
    """Return the key of a program, equal for equal programs; `none` for None."""
    return NOTHING_KEY if program is None else program.id


def _counts(sites: Iterable[SiteOps]) -> dict[str, int]:
    counts = ((Site(layer, hook), sum(op.kind not in SCORES for op in ops)) for layer, hook, ops in sites)
    return {str(site): count for site, count in counts if count}
