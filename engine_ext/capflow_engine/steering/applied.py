"""What was applied: what a response says of what steered its request."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import msgspec

from capflow.steering.program import DIGEST_BYTES, SiteOps, SteeringProgram
from capflow.steering.request import Steering

NOTHING_KEY = "none"
"""Stands for the key of a program that does nothing."""


DYNAMIC_KEY = "dynamic"
"""Stands for the key, or at its end behind a plus, where something else may have steered the request while it ran."""


class Change(msgspec.Struct, frozen=True):
    """An action through a hub that holds from a position of a request on; `request` is what the sample is called."""

    request: str
    kind: str
    sites: tuple[str, ...]
    position: int


class Dynamic(msgspec.Struct, frozen=True):
    """What may have steered a request while it ran. controllers: those that watched it, by name; they may have steered it or not."""

    actions: tuple[Change, ...] = ()
    controllers: tuple[str, ...] = ()


class SteeringSummary(msgspec.Struct, frozen=True, rename={"everywhere": "global"}):
    """What steers a request, as its response says it.

    key: of the program, equal for requests that are steered alike; `none` when nothing is done; `dynamic`, or `KEY+dynamic`, where
    actions or controllers may have steered it besides, which `actions` and `controllers` name, as `Dynamic` has them. prefill, decode: how many
    operations there are at each site, at the prompt's positions and at generated ones; no generated position is computed of an
    answer of one token at most, so that nothing is done there. patched: the same at single positions, before that.
    modules: the scales of the modules in it. everywhere: whether the global state is in it.
    """

    key: str
    prefill: dict[str, int] = msgspec.field(default_factory=dict)
    decode: dict[str, int] = msgspec.field(default_factory=dict)
    patched: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)
    modules: Mapping[str, float] = msgspec.field(default_factory=dict)
    everywhere: bool = False
    actions: tuple[Change, ...] | msgspec.UnsetType = msgspec.UNSET
    controllers: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET

    def beside(self, dynamic: Dynamic | None) -> SteeringSummary:
        """Return this with what may have steered the request while it ran."""
        if dynamic is None:
            return self
        key = dynamic_key(self.key)
        return msgspec.structs.replace(self, key=key, actions=dynamic.actions, controllers=dynamic.controllers)

    @classmethod
    def of(
        cls, program: SteeringProgram | None, asked: Steering, *, everywhere: bool, max_tokens: int | None = None
    ) -> SteeringSummary:
        """Return what a program applies, which was made of what a request asked for.

        max_tokens: how many tokens its answer has at most; None where that is not known.
        """
        modules = {use.name: use.scale for use in asked.modules}
        if program is None:
            return cls(NOTHING_KEY, modules=modules, everywhere=everywhere)
        return cls(
            key_of(program),
            _counts(program.prefill),
            _counts(program.decode if max_tokens is None or max_tokens > 1 else ()),
            {str(position): _counts(ops) for position, ops in program.patched},
            modules,
            everywhere,
        )


def dynamic_key(key: str | None) -> str:
    """Return the key of a request that something may have steered while it ran; key: of what it came with."""
    return DYNAMIC_KEY if key in (None, NOTHING_KEY) else f"{key}+{DYNAMIC_KEY}"


def key_of(program: SteeringProgram | None) -> str:
    """Return the name of everything that a program does: equal for equal programs; `none` for none."""
    if program is None:
        return NOTHING_KEY
    said = msgspec.msgpack.encode(msgspec.structs.replace(program, rows=b""))  # its digests say what the rows hold
    return hashlib.blake2b(said, digest_size=DIGEST_BYTES).hexdigest()


def _counts(sites: Iterable[SiteOps]) -> dict[str, int]:
    return {f"{hook}:{layer}": len(ops) for layer, hook, ops in sites}
