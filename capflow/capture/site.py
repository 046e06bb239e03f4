"""Sites: the places in a model that can be tapped. A site is one hook point of one layer."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from capflow import limits
from capflow.errors import UsageError, explain

Hook = Literal[
    "pre_attn",
    "post_attn",
    "post_block",
    "mlp_in",
    "mlp_out",
    "attn_in",
    "attn_out",
    "final",
    "heads",
    "q",
    "k",
    "v",
    "neurons",
    "router",
]
"""The hook points of a decoder layer.

`pre_attn`: the residual stream entering the layer.
`attn_in`: the normalised input of attention.
`attn_out`: attention's output, before it is added to the stream.
`post_attn`: the stream after attention is added.
`mlp_in`: the normalised input of the MLP.
`mlp_out`: the MLP's output, before it is added to the stream.
`post_block`: the stream leaving the layer.
`final`: the stream after the model's last norm, which the LM head reads. It belongs to the last layer.

The others have a shape of their own (`ModelInfo.shape_of`):

`q`: the queries that attention compares with keys, after norm and rotary embedding, `[heads, head_dim]`.
`k`: the keys that go to the cache, after norm and rotary embedding, `[KV heads, head_dim]`.
`v`: the values that go to the cache, `[KV heads, head_dim]`.
`heads`: each head's result, which the output projection reads, `[heads, head_dim]`.
`neurons`: what the down projection of the MLP reads, `[intermediate size]`.
`router`: the logits of the experts, before any are selected, `[experts]`.
"""

HOOKS: tuple[str, ...] = get_args(Hook)

SHAPED_HOOKS = ("heads", "q", "k", "v", "neurons", "router")
"""The hooks whose rows have a shape of their own."""

DIVIDED_HOOKS = ("heads", "q", "k", "v", "neurons")
"""The hooks among them whose rows are divided among tensor-parallel ranks."""

STREAM_HOOKS = tuple(hook for hook in HOOKS if hook not in SHAPED_HOOKS)
"""The hooks whose rows are as wide as the residual stream."""

FORWARD_HOOKS = (
    "pre_attn",
    "attn_in",
    "q",
    "k",
    "v",
    "heads",
    "attn_out",
    "post_attn",
    "mlp_in",
    "router",
    "neurons",
    "mlp_out",
    "post_block",
    "final",
)
"""The hooks in the order of a layer's forward pass, in which each may depend on those before it."""

_FORWARD = {hook: n for n, hook in enumerate(FORWARD_HOOKS)}

_HOOK_NUMBERS = {hook: number for number, hook in enumerate(HOOKS)}

HOOK_DEFAULT: Hook = "post_block"
"""The hook point of a layer that is given without one."""

TRANSFORMER_LENS_NAMES = {
    "pre_attn": "hook_resid_pre",
    "attn_in": "ln1.hook_normalized",
    "attn_out": "hook_attn_out",
    "post_attn": "hook_resid_mid",
    "mlp_in": "ln2.hook_normalized",
    "mlp_out": "hook_mlp_out",
    "post_block": "hook_resid_post",
    "final": "ln_final.hook_normalized",
    "heads": "attn.hook_z",
    "q": "attn.hook_rot_q",
    "k": "attn.hook_rot_k",
    "v": "attn.hook_v",
    "neurons": "mlp.hook_post",
    "router": "mlp.gate.hook_out",
}
"""The names of hook points in TransformerLens and SAELens: that of `final` alone, the others as in
`blocks.12.hook_resid_post`. https://transformerlensorg.github.io/TransformerLens/
"""

NNSIGHT_NAMES = {
    "pre_attn": "input",
    "attn_in": "self_attn.input",
    "mlp_in": "mlp.input",
    "post_block": "output",
    "heads": "self_attn.o_proj.input",
    "neurons": "mlp.down_proj.input",
}
"""What nnsight calls hook points of a Llama-like model in Transformers, as in `model.layers.12.output`.

What a module of Transformers returns is not always what it adds to the stream: the others have no name.
https://nnsight.net/
"""

HOOK_ALIASES = {"post_mlp": "post_block", **{name: hook for hook, name in TRANSFORMER_LENS_NAMES.items()}}
"""Aliases of hook points. Input may use them; stored and sent data has the hook's own name."""

_LENS = re.compile(r"blocks\.([^.\s]+)\.(\S+)")
_NNSIGHT = re.compile(r"model(?:\.model)?\.layers(?:\.([^.\s]+)|\[([^]\s]+)])\.(\S+?)(?:\[0])?")
_OF_LENS = {name: hook for hook, name in TRANSFORMER_LENS_NAMES.items() if hook != "final"}
_OF_NNSIGHT = {name: hook for hook, name in NNSIGHT_NAMES.items()}


def own_name(text: str) -> str:
    """Return `HOOK:LAYER` for a site's name, or for a pattern of sites, in the form of TransformerLens or nnsight.

    Text of another form is returned with an alias of the hook replaced.
    """
    if (match := _LENS.fullmatch(text)) is not None and match[2] in _OF_LENS:
        return f"{_OF_LENS[match[2]]}:{match[1]}"
    if (match := _NNSIGHT.fullmatch(text)) is not None and match[3] in _OF_NNSIGHT:
        return f"{_OF_NNSIGHT[match[3]]}:{match[1] or match[2]}"
    hook, colon, layer = text.partition(":")
    return f"{HOOK_ALIASES.get(hook, hook)}{colon}{layer}"


_OF_ATTENTION = ("attn_in", "q", "k", "v", "heads", "attn_out")
_OF_MLP = ("mlp_in", "router", "neurons", "mlp_out")


class Site(NamedTuple):
    """`(layer, hook)`. Layers count from 0 over the whole model, under pipeline parallelism too."""

    layer: int
    hook: str

    def __str__(self) -> str:
        return f"{self.hook}:{self.layer}"

    @classmethod
    def parse(cls, text: str, field: str = "site") -> Site:
        """Return the site that `HOOK:LAYER` names, e.g. `post_block:12`, or a name of TransformerLens or nnsight.

        Raises UsageError for text of another form.

        field: the field that has the text; the message begins with it.
        """
        name, colon, layer = own_name(text).partition(":")
        hook = hook_named(name)
        if not colon or hook is None or not layer.isdigit():
            raise UsageError(explain(field, got=text, expected=f"HOOK:LAYER with HOOK one of {', '.join(HOOKS)}"))
        return cls(int(layer), hook)

    @property
    def number(self) -> int:
        """The site's bit number in a mask of sites."""
        return self.layer * len(HOOKS) + _HOOK_NUMBERS[self.hook]

    @property
    def depth(self) -> int:
        """The place of the site in the forward pass; the value at a site depends on those at lesser depths."""
        return self.layer * len(HOOKS) + _FORWARD[self.hook]

    def precedes(self, other: Site) -> bool:
        """Return whether the value at this site is there, in every model, before the value at the other is computed.

        Attention may stand beside the MLP of its layer.
        """
        beside = self.layer == other.layer and self.hook in _OF_ATTENTION and other.hook in _OF_MLP
        return self.depth < other.depth and not beside

    @property
    def transformer_lens_name(self) -> str:
        """The site's name in TransformerLens."""
        name = TRANSFORMER_LENS_NAMES[self.hook]
        return name if self.hook == "final" else f"blocks.{self.layer}.{name}"

    @classmethod
    def of_transformer_lens(cls, name: str) -> Site | None:
        """Return the site with this name in TransformerLens; None if no site has it.

        The name of `final` says no layer, so it gives no site.
        """
        hook, _, layer = own_name(name).partition(":")
        ours = name.startswith("blocks.") and hook in HOOKS and layer.isdecimal() and len(layer) < 6
        return cls(int(layer), hook) if ours else None

    def check_stream(self, field: str) -> None:
        """Raise UsageError unless the site's rows are as wide as the residual stream.

        field: the field that names the site; the message begins with it.
        """
        if self.hook in SHAPED_HOOKS:
            raise UsageError(explain(field, got=str(self), expected="a site of the residual stream"))

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


def site_named(value: object, sites: Iterable[Site] = ()) -> Site:
    """Return the site that a key names: `(layer, hook)`, a name as `Site.parse` takes, or a hook that one site has.

    sites: those that have rows.

    Raises UsageError for anything else.
    """
    if isinstance(value, tuple) and len(value) == 2:
        return Site(*value)
    if not isinstance(value, str):
        raise UsageError(explain("site", got=value, expected='(layer, hook) or "hook:layer"'))
    hook = hook_named(value)
    named = [] if hook is None else [site for site in sites if site.hook == hook]
    return named[0] if len(named) == 1 else Site.parse(value)


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
    if site.hook in ("attn_in", "mlp_in"):  # some models cannot be steered there
        reader = "attention" if site.hook == "attn_in" else "the MLP"
        do = f"{verb} another hook: a change there would reach more than {reader}, or --steer-sites leaves the site out"
    elif site.hook in SHAPED_HOOKS:
        do = f"{verb} another hook: the model reads these numbers in several places, or --steer-sites leaves them out"
    else:
        do = f"{verb} another site, or start the engine with --steer-sites {site}"
    return explain(field, got=got, do=do)


def refusal_of_divided(field: str, site: Site, ranks: int, got: str) -> str:
    """Return the message for what needs whole rows of a site that tensor-parallel ranks divide.

    got: what was asked for there.
    """
    return explain(
        field,
        got=f"{got} at {site}, whose rows {ranks} tensor-parallel ranks divide",
        expected="what changes each number by itself: a vector, a patch, or a clamp with index",
        do="use one of these, or another hook",
    )


def mask_of(sites: Iterable[Site]) -> int:
    """Return a set of sites as a number that has bit `Site.number` of each site set.

    The number takes at most 1 KiB, however many sites there are.
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
