"""What to capture: which sites, and which positions of a request.

A `CaptureSpec` is what a user or a consumer writes; `resolve` turns it into `Wanted`: one `Positions`
value for each tapped site. Positions count from 0 over prompt and generated tokens together. The row
of a position is what the model computed when the token *at* that position was its input, so the
last generated token, which is never fed back, has no row: a request with `p` prompt tokens and `g`
generated tokens has `p + g - 1` rows at a site.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from capflow import limits
from capflow.errors import UsageError, explain
from capflow.site import HOOKS, Site


class Positions(enum.IntFlag):
    """A set of positions of one request; sets are joined with `|`."""

    NONE = 0
    LAST_PROMPT = 1
    ALL_PROMPT = 2
    ALL_GENERATED = 4
    ALL = ALL_PROMPT | ALL_GENERATED

    @classmethod
    def named(cls, name: str) -> Positions:
        """Return the set with the name that specs use, e.g. `last_prompt`."""
        return _NAMED[name]

    def span(self, prompt_length: int, start: int, stop: int) -> tuple[int, int]:
        """Return the part of positions `[start, stop)` that is in the set, as `(first, end)`.

        Every set is one contiguous run of positions, so its part of a run is one too. `first == end`
        when nothing of it is in the set.
        """
        return span(int(self), prompt_length, start, stop)

    def count(self, prompt_length: int, computed_length: int) -> int:
        """Return how many rows a request has in the set once `computed_length` tokens were computed."""
        first, end = self.span(prompt_length, 0, computed_length)
        return end - first


def span(positions: int, prompt_length: int, start: int, stop: int) -> tuple[int, int]:
    """Return what `Positions.span` does, for the plain int of a set: an enum costs ten times as much."""
    if not positions:
        return start, start
    if positions & _ALL_PROMPT:
        low = 0
    elif positions & _LAST_PROMPT:
        low = prompt_length - 1
    else:
        low = prompt_length
    first = max(start, low)
    end = stop if positions & _ALL_GENERATED else min(stop, prompt_length)
    return (first, end) if first < end else (start, start)


_LAST_PROMPT = int(Positions.LAST_PROMPT)
_ALL_PROMPT = int(Positions.ALL_PROMPT)
_ALL_GENERATED = int(Positions.ALL_GENERATED)

_NAMED = {
    "last_prompt": Positions.LAST_PROMPT,
    "all_prompt": Positions.ALL_PROMPT,
    "all_generated": Positions.ALL_GENERATED,
    "all": Positions.ALL,
}

POSITION_NAMES: tuple[str, ...] = tuple(_NAMED)

Wanted = Mapping[Site, Positions]
"""For each wanted site the positions wanted there."""


class CaptureSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which sites and positions to capture.

    hooks: for each hook its layers, a list of ints or `"all"`. positions: one of `POSITION_NAMES`.
    """

    hooks: dict[str, list[int] | str]
    positions: str = "all"

    @classmethod
    def parse(cls, value: Any, *, where: str = "capture") -> CaptureSpec:
        """Return the spec that a plain value (a dict, or a spec already) describes.

        Raises UsageError naming the field under `where`, what came and what was expected.
        """
        if isinstance(value, CaptureSpec):
            return value
        if not isinstance(value, Mapping):
            raise UsageError(explain(where, got=value, expected='a mapping like {"hooks": {"post_block": [0]}}'))
        unknown = set(value) - {"hooks", "positions"}
        if unknown:
            raise UsageError(explain(f"{where}.{min(map(str, unknown))}", expected="one of hooks, positions"))
        positions = value.get("positions", "all")
        if positions not in POSITION_NAMES:
            raise UsageError(
                explain(f"{where}.positions", got=positions, expected=f"one of {', '.join(POSITION_NAMES)}")
            )
        hooks = value.get("hooks")
        if not isinstance(hooks, Mapping) or not hooks:
            raise UsageError(explain(f"{where}.hooks", got=hooks, expected='a mapping like {"post_block": "all"}'))
        return cls(
            hooks={hook: _layers(layers, hook, f"{where}.hooks") for hook, layers in hooks.items()},
            positions=positions,
        )

    def resolve(self, tapped: Iterable[Site], *, num_layers: int, where: str = "capture") -> dict[Site, Positions]:
        """Return the positions wanted at each site, given the sites that carry a tap.

        Raises UsageError for a layer that the model does not have and for a site without a tap.
        """
        have = set(tapped)
        positions = Positions.named(self.positions)
        wanted: dict[Site, Positions] = {}
        for hook, layers in self.hooks.items():
            if isinstance(layers, str):
                sites = sorted(site for site in have if site.hook == hook)
                if not sites:
                    raise UsageError(_untapped(f"{where}.hooks.{hook}", have, hook))
            else:
                sites = [Site(layer, hook) for layer in layers]
            for site in sites:
                if not 0 <= site.layer < num_layers:
                    raise UsageError(
                        explain(f"{where}.hooks.{hook}", got=f"layer {site.layer}", expected=f"0..{num_layers - 1}")
                    )
                if site not in have:
                    raise UsageError(_untapped(f"{where}.hooks.{hook}", have, str(site)))
                wanted[site] = positions
        return wanted


def _layers(value: Any, hook: Any, where: str) -> list[int] | str:
    if hook not in HOOKS:
        raise UsageError(explain(where, got=hook, expected=f"a hook, one of {', '.join(HOOKS)}"))
    if value == "all":
        return "all"
    whole = isinstance(value, Sequence) and not isinstance(value, str) and all(type(n) is int for n in value)
    if not whole or not value or len(value) > limits.LAYERS_MAX:
        raise UsageError(explain(f"{where}.{hook}", got=value, expected='a list of layer numbers or "all"'))
    return sorted(set(value))


def _untapped(where: str, have: set[Site], asked: str) -> str:
    hooks = sorted({site.hook for site in have})
    return explain(
        f"{where}: no tap at {asked}",
        expected=f"a tapped site (hooks tapped: {', '.join(hooks) or 'none'})",
        do=f"start the engine with --sites {asked if ':' in asked else asked + ':*'} to tap it",
    )


def join(specs: Iterable[Wanted]) -> dict[Site, Positions]:
    """Return the union: every site that any of them wants, with every position wanted there."""
    union: dict[Site, Positions] = {}
    for wanted in specs:
        for site, positions in wanted.items():
            union[site] = union.get(site, Positions.NONE) | positions
    return union
