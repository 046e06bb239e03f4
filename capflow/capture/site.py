"""Sites: the places in a model that can be tapped. A site is one hook point of one layer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from capflow import limits
from capflow.errors import UsageError, explain

Hook = Literal["pre_attn", "post_attn", "post_block", "mlp_in", "mlp_out"]
"""The hook points of a decoder layer.

`pre_attn`: the residual stream entering the layer.
`post_attn`: the stream after attention is added.
`post_block`: the stream leaving the layer.
`mlp_in`: the normalised input of the MLP.
`mlp_out`: the MLP's output, before it is added to the stream.
"""

HOOKS: tuple[str, ...] = get_args(Hook)

# The order of the hooks in a layer's forward pass, in which each depends on the one before it.
_FORWARD = {hook: n for n, hook in enumerate(("pre_attn", "post_attn", "mlp_in", "mlp_out", "post_block"))}

_HOOK_NUMBERS = {hook: number for number, hook in enumerate(HOOKS)}

HOOK_DEFAULT: Hook = "post_block"
"""The hook point of a layer that is given without one."""

HOOK_ALIASES = {"post_mlp": "post_block"}
"""Aliases of hook points. Input may use them; stored and sent data has the hook's own name."""


TRANSFORMER_LENS_NAMES = {
    "pre_attn": "hook_resid_pre",
    "post_attn": "hook_resid_mid",
    "post_block": "hook_resid_post",
    "mlp_in": "ln2.hook_normalized",
    "mlp_out": "hook_mlp_out",
}
"""The names of hook points in TransformerLens and SAELens, as in `blocks.12.hook_resid_post`."""


class Site(NamedTuple):
    """`(layer, hook)`. Layers count from 0 over the whole model, under pipeline parallelism too."""

    layer: int
    hook: str

    def __str__(self) -> str:
        return f"{self.hook}:{self.layer}"

    @classmethod
    def parse(cls, text: str) -> Site:
        """Return the site that `HOOK:LAYER` names, e.g. `post_block:12`.

        Raises UsageError for text of another form.
        """
        name, colon, layer = text.partition(":")
        hook = hook_named(name)
        if not colon or hook is None or not layer.isdigit():
            raise UsageError(explain("site", got=text, expected=f"HOOK:LAYER with HOOK one of {', '.join(HOOKS)}"))
        return cls(int(layer), hook)

    @property
    def number(self) -> int:
        """The site's bit number in a mask of sites."""
        return self.layer * len(HOOKS) + _HOOK_NUMBERS[self.hook]

    @property
    def depth(self) -> int:
        """The place of the site in the forward pass; the value at a site depends on those at lesser depths."""
        return self.layer * len(HOOKS) + _FORWARD[self.hook]

    @property
    def transformer_lens_name(self) -> str:
        """The site's name in TransformerLens."""
        return f"blocks.{self.layer}.{TRANSFORMER_LENS_NAMES[self.hook]}"

    @classmethod
    def of_transformer_lens(cls, name: str) -> Site | None:
        """Return the site with this name in TransformerLens; None if no site has it."""
        hooks = {theirs: ours for ours, theirs in TRANSFORMER_LENS_NAMES.items()}
        begin, layer, hook = [*name.split(".", 2), "", ""][:3]
        return (
            cls(int(layer), hooks[hook])
            if begin == "blocks" and layer.isdecimal() and len(layer) < 6 and hook in hooks
            else None
        )

    def check_tapped(self, tapped: Collection[Site], field: str) -> None:
        """Raise UsageError unless this site is one of the tapped ones.

        field: the field that names the site; the message begins with it.
        """
        if self not in tapped:
            do = f"start the engine with --sites {self} to tap it"
            raise UsageError(explain(field, got=f"no tap at {self}", expected="a tapped site", do=do))


def hook_named(name: Any) -> str | None:
    """Return the hook point with this name or alias; None if there is none."""
    hook = HOOK_ALIASES.get(name, name) if isinstance(name, str) else None
    return hook if hook in HOOKS else None


def by_own_name(value: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Return a mapping keyed by hook points, with each alias replaced by the hook's own name.

    where: the field that holds the mapping.

    Raises UsageError for a key that is no hook, and for a hook that is given under two names.
    """
    hooks: dict[str, Any] = {}
    for name, content in value.items():
        hook = hook_named(name)
        if hook is None:
            raise UsageError(explain(where, got=str(name), expected=f"a hook, one of {', '.join(HOOKS)}"))
        if hook in hooks:
            names = " and ".join(other for other in value if hook_named(other) == hook)
            raise UsageError(explain(where, got=f"{hook} under two names ({names})", expected="each hook once"))
        hooks[hook] = content
    return hooks


def layers_by_hook(sites: Iterable[Site]) -> dict[str, list[int]]:
    """Return the layers of each hook of these sites, in the form of `CaptureSpec.hooks`."""
    hooks: dict[str, list[int]] = {}
    for site in sites:
        hooks.setdefault(site.hook, []).append(site.layer)
    return hooks


def refusal_of_fixed(field: str, site: Site, verb: str = "steer") -> str:
    """Return the message for a site that can only be captured: in this model, or in this engine.

    verb: what was asked for there.
    """
    got = f"{site}, which can only be captured"
    if site.hook == "mlp_in":  # some models cannot be steered there
        do = f"{verb} another hook: a change there would reach more than the MLP, or --steer-sites leaves the site out"
    else:
        do = f"{verb} another site, or start the engine with --steer-sites {site}"
    return explain(field, got=got, do=do)


def mask_of(sites: Iterable[Site]) -> int:
    """Return a set of sites as a number that has bit `Site.number` of each site set.

    The number takes at most 640 bytes, however many sites there are.
    """
    bits = bytearray(limits.SITES_MAX)
    for layer, hook in sites:
        bits[layer * len(HOOKS) + _HOOK_NUMBERS[hook]] = 1
    return _packed(bits)


def layers_mask(hook: str, layers: bytes | bytearray) -> int:
    """Return the mask of one hook's sites.

    layers: a byte for each layer; 1 selects the layer.
    """
    bits = bytearray(len(HOOKS) * len(layers))
    bits[_HOOK_NUMBERS[hook] :: len(HOOKS)] = layers
    return _packed(bits)


def sites_in(mask: int) -> Iterator[Site]:
    """Yield the sites of a mask, by layer."""
    while mask:
        lowest = mask & -mask
        layer, hook = divmod(lowest.bit_length() - 1, len(HOOKS))
        yield Site(layer, HOOKS[hook])
        mask ^= lowest


def _packed(bits: bytearray) -> int:
    return int.from_bytes(np.packbits(np.frombuffer(bits, np.uint8), bitorder="little").tobytes(), "little")
