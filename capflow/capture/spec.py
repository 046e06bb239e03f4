"""What to capture: which sites, which positions of a request, how many rows at most, and how they are stored.

A `CaptureSpec` is what a user or a consumer writes; `resolve` turns it into `Wanted`: for each site a `Want`. Positions, and
how they are written, are those of `capflow.capture.positions`; they count from 0 over prompt and generated tokens together. The row
of a position is what the model computed when the token *at* that position was its input, so the
last generated token, which is never fed back, has no row: a request with `p` prompt tokens and `g`
generated tokens has `p + g - 1` rows at a site.

A request asks with a `Capture`: one spec for every consumer that reads requests, or a `CaptureByConsumer`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec

from capflow import limits
from capflow.capture.positions import Form, Positions, normalise
from capflow.capture.site import HOOKS, Site, by_own_name, layers_mask, sites_in
from capflow.errors import UsageError, explain
from capflow.limits import Name
from capflow.text.brief import brief

StoredDtype = Literal["model", "float32", "float16"]
"""How consumers that store rows store them: as they were captured, or converted."""

STORED_DTYPES: tuple[str, ...] = get_args(StoredDtype)

Layers = str | Annotated[list[int | str], msgspec.Meta(max_length=limits.LAYERS_MAX)]
"""`"all"`, a range, or a list of layer numbers and ranges."""

_CONSUMER = re.compile(r"[A-Za-z0-9_-]{1,64}(@[A-Za-z0-9_-]{1,64})?")
_RANGE = re.compile(r"(\d{1,4})-(\d{0,4})(?::(\d{1,4}))?")
_LAYERS_EXPECTED = '"all", layer numbers (-1 is the last), ranges like "4-11", "12-" or "0-35:4", or a list of these'


class Want(NamedTuple):
    """What is wanted at one site: positions, and how consumers store their rows."""

    positions: Positions
    dtype: StoredDtype = "model"

    def joined(self, other: Want) -> Want:
        """Return what satisfies both; float32 holds every value of the other dtypes."""
        return Want(self.positions | other.positions, self.dtype if self.dtype == other.dtype else "float32")


Wanted = Mapping[Site, Want]
"""For each wanted site what is wanted there."""


class CaptureSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which sites and positions to capture.

    hooks: for each hook its layers.
    positions: one of the forms of `capflow.capture.positions`.
    max_rows: at each site only the first so many of these positions of a request, None for all.
    dtype: how consumers store the rows.
    tag: of a request's spec, text that consumers keep with the request's rows; empty for none.
    """

    hooks: Annotated[dict[str, Layers], msgspec.Meta(max_length=len(HOOKS))]
    positions: Form = "all"
    max_rows: int | None = None
    dtype: StoredDtype = "model"
    tag: Annotated[str, msgspec.Meta(max_length=limits.TAG_LENGTH_MAX)] = ""

    __repr__ = brief

    @property
    def specs(self) -> tuple[CaptureSpec, ...]:
        """The spec itself, as `CaptureByConsumer.specs`."""
        return (self,)

    def of(self, consumer: str) -> CaptureSpec | None:  # noqa: ARG002 - as `CaptureByConsumer.of`
        """Return the spec: it is every consumer's."""
        return self

    def untagged(self) -> CaptureSpec:
        """Return the same without its tag."""
        return msgspec.structs.replace(self, tag="") if self.tag else self

    @classmethod
    def parse(cls, value: Any, *, where: str = "capture") -> CaptureSpec:
        """Return the spec that a plain value (a dict, or a spec already) describes.

        Raises UsageError naming the field under `where`, what came and what was expected.
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
        if not isinstance(hooks, Mapping) or not hooks:
            raise UsageError(explain(f"{where}.hooks", got=hooks, expected='a mapping like {"post_block": "all"}'))
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
        """Raise UsageError unless the tag is short text that any terminal and file may hold."""
        tag: object = self.tag
        if not isinstance(tag, str) or len(tag) > limits.TAG_LENGTH_MAX or not tag.isprintable():
            expected = f"at most {limits.TAG_LENGTH_MAX} printable characters"
            raise UsageError(explain(f"{where}.tag", got=tag, expected=expected))

    def set_of_positions(self, where: str = "capture") -> Positions:
        """Return the positions wanted at each site of the spec; raise UsageError for what is no set of them."""
        if self.max_rows is not None and (
            type(self.max_rows) is not int or not 0 < self.max_rows <= limits.POSITION_MAX
        ):
            expected = f"a whole number of 1..{limits.POSITION_MAX}"
            raise UsageError(explain(f"{where}.max_rows", got=self.max_rows, expected=expected))
        if self.dtype not in STORED_DTYPES:
            raise UsageError(explain(f"{where}.dtype", got=self.dtype, expected=f"one of {', '.join(STORED_DTYPES)}"))
        return Positions.parse(self.positions, max_rows=self.max_rows, where=f"{where}.positions")

    def mask(self, tapped: int, *, num_layers: int, where: str = "capture") -> int:
        """Return the sites of the spec as a mask, given that of the sites that carry a tap; raises as `resolve` does."""
        mask = 0
        for hook, layers in self.hooks.items():
            at = f"{where}.hooks.{hook}"
            if hook not in HOOKS:
                raise UsageError(explain(at, expected=f"a hook: one of {', '.join(HOOKS)}"))
            meant = b"\1" * num_layers if layers == "all" else _meant(layers, num_layers, at)
            asked = layers_mask(hook, meant)
            if layers == "all":
                asked &= tapped
            if not asked or asked & ~tapped:
                missing = next(sites_in(asked & ~tapped), None)
                raise UsageError(_untapped(at, set(sites_in(tapped)), hook if missing is None else str(missing)))
            mask |= asked
        return mask

    def resolve(self, tapped: Iterable[Site], *, num_layers: int, where: str = "capture") -> dict[Site, Want]:
        """Return what is wanted at each site, given the sites that carry a tap.

        Raises UsageError for a layer that the model does not have and for a site without a tap.
        """
        self.check_tag(where)
        have = set(tapped)
        want = Want(self.set_of_positions(where), self.dtype)
        wanted: dict[Site, Want] = {}
        for hook, layers in self.hooks.items():
            at = f"{where}.hooks.{hook}"
            if layers == "all":
                sites = sorted(site for site in have if site.hook == hook)
                if not sites:
                    raise UsageError(_untapped(at, have, hook))
            else:
                sites = [Site(layer, hook) for layer, is_meant in enumerate(_meant(layers, num_layers, at)) if is_meant]
            for site in sites:
                if site not in have:
                    raise UsageError(_untapped(at, have, str(site)))
                wanted[site] = want
        return wanted


class CaptureByConsumer(NamedTuple):
    """What a request asks of single consumers: a spec for each, by the name of the instance. Other consumers get no rows by it."""

    by_name: Annotated[dict[Name, CaptureSpec], msgspec.Meta(max_length=limits.CONSUMERS_NAMED_MAX)]

    @property
    def specs(self) -> tuple[CaptureSpec, ...]:
        """Every spec."""
        return tuple(self.by_name.values())

    def of(self, consumer: str) -> CaptureSpec | None:
        """Return the spec of a consumer; None when it is not named."""
        return self.by_name.get(consumer)

    def untagged(self) -> CaptureByConsumer:
        """Return the same without tags."""
        return CaptureByConsumer({name: spec.untagged() for name, spec in self.by_name.items()})

    def resolve(self, tapped: Iterable[Site], *, num_layers: int, where: str = "capture") -> dict[Site, Want]:
        """Return what all the specs want together; raises as `CaptureSpec.resolve` does."""
        have = set(tapped)
        return join(
            spec.resolve(have, num_layers=num_layers, where=_of_consumer(name, where))
            for name, spec in self.by_name.items()
        )


Capture = CaptureSpec | CaptureByConsumer
"""What a request asks for: one spec for every consumer that reads requests, or one for each consumer that it names."""


def parse_capture(value: Any, *, where: str = "capture") -> Capture:
    """Return what a request's plain value asks for: a spec, or a mapping of consumers' names to specs.

    A mapping without `hooks` and with a value that is a spec is by consumer. Raises UsageError as `CaptureSpec.parse` does.
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
    """Return the path of a consumer's spec; raise UsageError for a name that no consumer can have."""
    if not isinstance(name, str) or not _CONSUMER.fullmatch(name):
        expected = "a consumer's name, such as filesystem or filesystem@cold"
        raise UsageError(explain(where, got=name, expected=expected))
    return f"{where}.{name}"


def read_layers(value: Any, where: str = "layers") -> Layers:
    """Return layers as they are kept; raise UsageError when they are not written as layers are."""
    if value == "all":
        return "all"
    items = value.split("+") if isinstance(value, str) else value
    wrong = explain(where, got=value, expected=_LAYERS_EXPECTED)
    if not isinstance(items, Sequence) or not 0 < len(items) <= limits.LAYERS_MAX:
        raise UsageError(wrong)
    numbers: set[int] = set()
    ranges: dict[str, None] = {}  # each once, in order
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


def _meant(layers: Layers, num_layers: int, where: str) -> bytearray:
    """Return 1 for each of a model's layers that is meant, else 0; raise UsageError for one that it does not have."""
    meant = bytearray(num_layers)
    for item in [layers] if isinstance(layers, str) else layers:
        if isinstance(item, int):
            if not -num_layers <= item < num_layers:
                raise UsageError(explain(where, got=f"layer {item}", expected=_counted(num_layers)))
            meant[item] = 1
            continue
        found = _RANGE.fullmatch(item)
        if found is None:
            raise UsageError(explain(where, got=item, expected=_LAYERS_EXPECTED))
        first, last, step = int(found[1]), int(found[2] or num_layers - 1), int(found[3] or 1)
        if not (first <= last < num_layers and step):
            raise UsageError(explain(where, got=f"layers {item}", expected=f"a range within {_counted(num_layers)}"))
        meant[first : last + 1 : step] = b"\1" * len(range(first, last + 1, step))
    return meant


def _counted(num_layers: int) -> str:
    return f"0..{num_layers - 1}, or -{num_layers}..-1 from the last"


def _untapped(where: str, have: Collection[Site], asked: str) -> str:
    hooks = sorted({site.hook for site in have})
    return explain(
        f"{where}: no tap at {asked}",
        expected=f"a tapped site (hooks tapped: {', '.join(hooks) or 'none'})",
        do=f"start the engine with --sites {asked if ':' in asked else asked + ':*'} to tap it",
    )


def join(specs: Iterable[Wanted]) -> dict[Site, Want]:
    """Return the union: every site that any of them wants, with every position wanted there."""
    union: dict[Site, Want] = {}
    for wanted in specs:
        for site, want in wanted.items():
            union[site] = union[site].joined(want) if site in union else want
    return union
