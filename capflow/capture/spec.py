"""What to capture: the sites, the positions of a request, the largest number of rows, and the dtype they are stored in.

A user or a consumer writes a `CaptureSpec`. `CaptureSpec.resolve` turns it into `Wanted`, a `Want` for each site.
`capflow.capture.positions` defines the positions and their written forms. Positions count from 0 over prompt and
generated tokens together. The row of a position is computed when the token *at* that position is the model's input. The
last generated token is never fed back, so it has no row: a request with `p` prompt tokens and `g` generated tokens has
`p + g - 1` rows at a site.

A request carries a `Capture`: either one spec for all consumers that read requests, or a `CaptureByConsumer`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec

from capflow import limits
from capflow.capture.positions import Form, Positions, normalise
from capflow.capture.site import HOOKS, Site, by_own_name, layers_by_hook, layers_mask, mask_of, sites_in
from capflow.errors import UsageError, explain
from capflow.limits import Name
from capflow.text.brief import brief
from capflow.text.notebook import html_fields

StoredDtype = Literal["model", "float32", "float16"]
"""The dtype that consumers store rows in: `model` keeps the captured dtype, the others convert."""

STORED_DTYPES: tuple[str, ...] = get_args(StoredDtype)

Layers = str | Annotated[list[int | str], msgspec.Meta(max_length=limits.LAYERS_MAX)]
"""`"all"`, a range, or a list of layer numbers and ranges."""

_CONSUMER = re.compile(r"[A-Za-z0-9_-]{1,64}(@[A-Za-z0-9_-]{1,64})?")
_RANGE = re.compile(r"(\d{1,4})-(\d{0,4})(?::(\d{1,4}))?")
_LAYERS_EXPECTED = '"all", layer numbers (-1 is the last), ranges like "4-11", "12-" or "0-35:4", or a list of these'


class Want(NamedTuple):
    """The positions wanted at one site, and the dtype that consumers store their rows in."""

    positions: Positions
    dtype: StoredDtype = "model"

    def joined(self, other: Want) -> Want:
        """Return a want that covers both. Different dtypes become float32, which holds every value of the others."""
        return Want(self.positions | other.positions, self.dtype if self.dtype == other.dtype else "float32")


Wanted = Mapping[Site, Want]
"""The want of each wanted site."""


class CaptureSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The sites and positions to capture.

    hooks: the layers of each hook.
    positions: one of the forms of `capflow.capture.positions`.
    max_rows: only the first `max_rows` of these positions are captured at each site of a request; None for all.
    dtype: the dtype that consumers store the rows in.
    tag: text that consumers keep with the rows of the request; empty for none.
    """

    hooks: Annotated[dict[str, Layers], msgspec.Meta(max_length=len(HOOKS))]
    positions: Form = "all"
    max_rows: int | None = None
    dtype: StoredDtype = "model"
    tag: Annotated[str, msgspec.Meta(max_length=limits.TAG_LENGTH_MAX)] = ""

    __repr__ = brief
    _repr_html_ = html_fields

    @property
    def specs(self) -> tuple[CaptureSpec, ...]:
        """The spec itself, as in `CaptureByConsumer.specs`."""
        return (self,)

    def of(self, consumer: str) -> CaptureSpec | None:  # noqa: ARG002 - as `CaptureByConsumer.of`
        """Return the spec itself: it applies to every consumer."""
        return self

    def untagged(self) -> CaptureSpec:
        """Return the spec without its tag."""
        return msgspec.structs.replace(self, tag="") if self.tag else self

    @classmethod
    def parse(cls, value: Any, *, where: str = "capture") -> CaptureSpec:
        """Return the spec that a plain value describes: a dict, or a `CaptureSpec`.

        where: the field that holds the value; messages begin with it.

        Raises UsageError with the field's path, the value and the expected form.
        """
        if isinstance(value, CaptureSpec):
            return value
        if not isinstance(value, Mapping):
            raise UsageError(explain(where, got=value, expected='a mapping like {"hooks": {"post_block": [0]}}'))
        unknown = set(value) - set(cls.__struct_fields__)
        if unknown:
            fields = ", ".join(cls.__struct_fields__)
            raise UsageError(explain(f"{where}.{min(map(str, unknown))}", expected=f"one of {fields}"))
        hooks = value.get("hooks")
        if isinstance(hooks, list | tuple) and hooks:
            hooks = _hooks_of(hooks, f"{where}.hooks")
        if not isinstance(hooks, Mapping) or not hooks:
            expected = 'a mapping like {"post_block": "all"}, or a list of sites like ["post_block:12"]'
            raise UsageError(explain(f"{where}.hooks", got=hooks, expected=expected))
        spec = cls(
            hooks={
                hook: read_layers(layers, f"{where}.hooks.{hook}")
                for hook, layers in by_own_name(hooks, f"{where}.hooks").items()
            },
            positions=normalise(value.get("positions", "all"), f"{where}.positions"),
            max_rows=value.get("max_rows"),
            dtype=value.get("dtype", "model"),
            tag=value.get("tag", ""),
        )
        spec.check_tag(where)
        spec.set_of_positions(where)
        return spec

    def check_tag(self, where: str = "capture") -> None:
        """Raise UsageError unless the tag is short, printable text."""
        tag: object = self.tag
        if not isinstance(tag, str) or len(tag) > limits.TAG_LENGTH_MAX or not tag.isprintable():
            expected = f"at most {limits.TAG_LENGTH_MAX} printable characters"
            raise UsageError(explain(f"{where}.tag", got=tag, expected=expected))

    def set_of_positions(self, where: str = "capture") -> Positions:
        """Return the positions wanted at each site of the spec.

        Raises UsageError for invalid `positions`, `max_rows` or `dtype`.
        """
        if self.max_rows is not None and (
            type(self.max_rows) is not int or not 0 < self.max_rows <= limits.POSITION_MAX
        ):
            expected = f"a whole number of 1..{limits.POSITION_MAX}"
            raise UsageError(explain(f"{where}.max_rows", got=self.max_rows, expected=expected))
        if self.dtype not in STORED_DTYPES:
            raise UsageError(explain(f"{where}.dtype", got=self.dtype, expected=f"one of {', '.join(STORED_DTYPES)}"))
        return Positions.parse(self.positions, max_rows=self.max_rows, where=f"{where}.positions")

    def mask(self, tapped: int, *, num_layers: int, where: str = "capture") -> int:
        """Return the sites of the spec as a mask; raise as `resolve` does.

        tapped: the mask of the sites that carry a tap.
        num_layers: the number of layers of the model.
        """
        mask = 0
        for hook, layers in self.hooks.items():
            at = f"{where}.hooks.{hook}"
            if hook not in HOOKS:
                raise UsageError(explain(at, expected=f"a hook: one of {', '.join(HOOKS)}"))
            selected = b"\1" * num_layers if layers == "all" else _selected(layers, num_layers, at)
            asked = layers_mask(hook, selected)
            if layers == "all":
                asked &= tapped
            if not asked or asked & ~tapped:
                missing = next(sites_in(asked & ~tapped), None)
                raise UsageError(_untapped(at, set(sites_in(tapped)), hook if missing is None else str(missing)))
            mask |= asked
        return mask

    def resolve(self, tapped: Iterable[Site], *, num_layers: int, where: str = "capture") -> dict[Site, Want]:
        """Return the want of each site.

        tapped: the sites that carry a tap.
        num_layers: the number of layers of the model.

        Raises UsageError for a layer that the model does not have, and for a site without a tap.
        """
        self.check_tag(where)
        want = Want(self.set_of_positions(where), self.dtype)
        return dict.fromkeys(sites_in(self.mask(mask_of(tapped), num_layers=num_layers, where=where)), want)


class CaptureByConsumer(NamedTuple):
    """A request's specs for single consumers, by instance name. Other consumers get no rows of the request."""

    by_name: Annotated[dict[Name, CaptureSpec], msgspec.Meta(max_length=limits.CONSUMERS_NAMED_MAX)]

    @property
    def specs(self) -> tuple[CaptureSpec, ...]:
        """All the specs."""
        return tuple(self.by_name.values())

    def of(self, consumer: str) -> CaptureSpec | None:
        """Return the spec of a consumer; None if it is not named."""
        return self.by_name.get(consumer)

    def untagged(self) -> CaptureByConsumer:
        """Return the same specs without their tags."""
        return CaptureByConsumer({name: spec.untagged() for name, spec in self.by_name.items()})

    def resolve(self, tapped: Iterable[Site], *, num_layers: int, where: str = "capture") -> dict[Site, Want]:
        """Return the union of what the specs want; raise as `CaptureSpec.resolve` does."""
        taps = set(tapped)
        return join(
            spec.resolve(taps, num_layers=num_layers, where=_of_consumer(name, where))
            for name, spec in self.by_name.items()
        )


Capture = CaptureSpec | CaptureByConsumer
"""A request's capture: one spec for all consumers that read requests, or one for each consumer that it names."""


def parse_capture(value: Any, *, where: str = "capture") -> Capture:
    """Return the capture that a request's plain value describes: a spec, or a mapping of consumer name to spec.

    A mapping is by consumer if it has no key `hooks` and at least one of its values is a spec.

    Raises UsageError as `CaptureSpec.parse` does.
    """
    if isinstance(value, CaptureByConsumer):
        return value
    if not isinstance(value, Mapping) or "hooks" in value or not any(map(_is_spec, value.values())):
        return CaptureSpec.parse(value, where=where)
    if len(value) > limits.CONSUMERS_NAMED_MAX:
        expected = f"at most {limits.CONSUMERS_NAMED_MAX}"
        raise UsageError(explain(where, got=f"{len(value)} consumers", expected=expected))
    return CaptureByConsumer(
        {name: CaptureSpec.parse(spec, where=_of_consumer(name, where)) for name, spec in value.items()}
    )


def _is_spec(value: Any) -> bool:
    fields = CaptureSpec.__struct_fields__
    return isinstance(value, CaptureSpec) or (isinstance(value, Mapping) and any(field in value for field in fields))


def _of_consumer(name: Any, where: str) -> str:
    """Return the path of a consumer's spec; raise UsageError for an impossible consumer name."""
    if not isinstance(name, str) or not _CONSUMER.fullmatch(name):
        expected = "a consumer's name, such as filesystem or filesystem@cold"
        raise UsageError(explain(where, got=name, expected=expected))
    return f"{where}.{name}"


def _hooks_of(names: Sequence[Any], where: str) -> dict[str, list[int]]:
    """Return the layers of each hook of sites that are given by name; raise UsageError for a wrong name."""
    if len(names) > limits.SITES_MAX:
        raise UsageError(explain(where, got=f"{len(names)} sites", expected=f"at most {limits.SITES_MAX}"))
    sites = {Site.parse(str(name), f"{where}[{number}]") for number, name in enumerate(names)}
    return layers_by_hook(sorted(sites))


def read_layers(value: Any, where: str = "layers") -> Layers:
    """Return normalised layers; raise UsageError for a value of another form."""
    if value == "all":
        return "all"
    items = value.split("+") if isinstance(value, str) else value
    wrong = explain(where, got=value, expected=_LAYERS_EXPECTED)
    if not isinstance(items, Sequence) or not 0 < len(items) <= limits.LAYERS_MAX:
        raise UsageError(wrong)
    numbers: set[int] = set()
    # Without repetitions, in order.
    ranges: dict[str, None] = {}
    for item in items:
        if type(item) is int:
            numbers.add(item)
        elif isinstance(item, str) and re.fullmatch(r"-?\d{1,4}", item):
            numbers.add(int(item))
        elif isinstance(item, str) and _RANGE.fullmatch(item):
            ranges[item] = None
        else:
            raise UsageError(wrong)
    return [*sorted(numbers), *ranges]


def layers_of(value: Any, num_layers: int, where: str = "layers") -> list[int]:
    """Return the layers of a model that a value names, in order.

    Raises UsageError for a value of another form, and for a layer that the model does not have.
    """
    layers = read_layers(value, where)
    if layers == "all":
        return list(range(num_layers))
    return [layer for layer, chosen in enumerate(_selected(layers, num_layers, where)) if chosen]


def _selected(layers: Layers, num_layers: int, where: str) -> bytearray:
    """Return a byte for each layer, 1 for those selected; raise UsageError for a layer that does not exist."""
    selected = bytearray(num_layers)
    for item in [layers] if isinstance(layers, str) else layers:
        if isinstance(item, int):
            if not -num_layers <= item < num_layers:
                raise UsageError(explain(where, got=f"layer {item}", expected=_counted(num_layers)))
            selected[item] = 1
            continue
        match = _RANGE.fullmatch(item)
        if match is None:
            raise UsageError(explain(where, got=item, expected=_LAYERS_EXPECTED))
        first, last, step = int(match[1]), int(match[2] or num_layers - 1), int(match[3] or 1)
        if not (first <= last < num_layers and step):
            raise UsageError(explain(where, got=f"layers {item}", expected=f"a range within {_counted(num_layers)}"))
        selected[first : last + 1 : step] = b"\1" * len(range(first, last + 1, step))
    return selected


def _counted(num_layers: int) -> str:
    return f"0..{num_layers - 1}, or -{num_layers}..-1 from the last"


def _untapped(where: str, tapped: Collection[Site], asked: str) -> str:
    hooks = sorted({site.hook for site in tapped})
    return explain(
        f"{where}: no tap at {asked}",
        expected=f"a tapped site (hooks tapped: {', '.join(hooks) or 'none'})",
        do=f"start the engine with --sites {asked if ':' in asked else asked + ':*'} to tap it",
    )


def join(specs: Iterable[Wanted]) -> dict[Site, Want]:
    """Return the union: every site wanted by any of these, with all positions wanted there."""
    union: dict[Site, Want] = {}
    for wanted in specs:
        for site, want in wanted.items():
            union[site] = union[site].joined(want) if site in union else want
    return union
