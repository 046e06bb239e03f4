"""What a run changes at a site: the whole row, or some entries of it: a head, a group of neurons, an expert.

A sweep of paths has a part, the sender, and the place where its change is received.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from capflow import limits
from capflow.capture.site import SHAPED_HOOKS, Site, hook_named
from capflow.errors import UsageError, explain
from capflow.steering.plain import unit_of
from capflow_models.sweep.items import items_of

GROUP_DEFAULT = 64
"""How many neurons a run changes at once."""

_NAME = re.compile(r"([^\[]*)(?:\[(\d+)(?:-(\d+))?])?")
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_INDEX = "all, whole, numbers such as 3 or 2-5, or several of these separated by commas"


class RowPart(NamedTuple):
    """A site, or some entries of its rows: heads where rows have heads, else single numbers.

    first: the first entry; None for the whole row.
    size: how many entries there are; 0 for the whole row.
    """

    site: Site
    first: int | None = None
    size: int = 0

    def __str__(self) -> str:
        if self.first is None:
            return str(self.site)
        last = f"-{self.first + self.size - 1}" if self.size > 1 else ""
        return f"{self.site}[{self.first}{last}]"

    @classmethod
    def parse(cls, text: str, field: str = "site") -> RowPart:
        """Return the part that `HOOK:LAYER`, `HOOK:LAYER[INDEX]` or `HOOK:LAYER[FIRST-LAST]` names.

        Raises UsageError for text of another form.
        """
        match = _NAME.fullmatch(text)
        first, last = (match[2], match[3] or match[2]) if match else (None, None)
        if match is None or (first is not None and last is not None and int(first) > int(last)):
            raise UsageError(explain(field, got=text, expected="HOOK:LAYER, HOOK:LAYER[3] or HOOK:LAYER[0-15]"))
        site = Site.parse(match[1], field)
        return cls(site) if first is None or last is None else cls(site, int(first), int(last) - int(first) + 1)

    @property
    def entries(self) -> list[int]:
        """The entries, in the form of steering; empty for the whole row."""
        return [] if self.first is None else list(range(self.first, self.first + self.size))

    def of(self, rows: npt.NDArray[np.float32], shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """Return this part of rows `[…, width]`, as a patch takes it: `[…, width]` or `[…, entries * entry's width]`.

        shape: that of a row.
        """
        if self.first is None:
            return rows
        unit = unit_of(shape)
        return rows[..., self.first * unit : (self.first + self.size) * unit]


class Path(NamedTuple):
    """The direct path from a sender to a receiver, named `SENDER>RECEIVER`."""

    sender: RowPart
    receiver: RowPart

    def __str__(self) -> str:
        return f"{self.sender}>{self.receiver}"

    @classmethod
    def parse(cls, text: str) -> Path:
        """Return the path that a text names. Raises UsageError for text of another form."""
        sender, _, receiver = text.partition(">")
        return cls(RowPart.parse(sender), RowPart.parse(receiver))


class Chosen(NamedTuple):
    """Which entries of rows a sweep changes.

    numbers: the entries, ascending; None for all.
    whole: whether entire rows are changed instead, or besides.
    entries: whether entries are changed.
    """

    numbers: tuple[int, ...] | None
    whole: bool
    entries: bool

    @classmethod
    def parse(cls, value: Any, where: str = "--index") -> Chosen:
        """Return the choice of a comma-separated text, of a number or of a list of both. Raises UsageError."""
        every, whole, numbers = False, False, set[int]()
        for item in items_of(value, where, _INDEX):
            match = _RANGE.fullmatch(item)
            if item == "all":
                every = True
            elif item == "whole":
                whole = True
            elif match and int(match[1]) <= int(match[2] or match[1]) < limits.HIDDEN_SIZE_MAX:
                numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
            else:
                raise UsageError(explain(where, got=item or repr(value), expected=_INDEX))
        return cls(None if every else tuple(sorted(numbers)), whole, every or bool(numbers))

    def check(self, hooks: Sequence[str], where: str = "--index") -> None:
        """Raise UsageError if numbers are chosen and a hook's rows have no entries to choose from."""
        stream = [hook for hook in hooks if hook not in SHAPED_HOOKS]
        if self.numbers and stream:
            expected = f"hooks among {', '.join(SHAPED_HOOKS)}"
            got = f"numbers with the hook {stream[0]}, whose rows are changed whole"
            raise UsageError(explain(where, got=got, expected=expected))

    def parts(
        self, sites: Sequence[Site], shapes: Mapping[Site, tuple[int, ...]], group: int, where: str = "--index"
    ) -> Iterator[RowPart]:
        """Yield the parts of sites. Neurons are grouped, within neighbours; a stream's row is whole.

        shapes: of the sites whose rows are not the stream's.
        group: how many neurons a part has at most.

        Raises UsageError for an entry that a site's rows do not have.
        """
        for site in sites:
            if site not in shapes:
                yield RowPart(site)
                continue
            if self.whole:
                yield RowPart(site)
            if not self.entries:
                continue
            count = shapes[site][0]
            numbers = range(count) if self.numbers is None else self.numbers
            if numbers[-1] >= count:
                noun = {"neurons": "neurons", "router": "experts"}.get(site.hook, "heads")
                expected = f"0..{count - 1}, as {site} has {count} {noun}"
                raise UsageError(explain(where, got=numbers[-1], expected=expected))
            size = group if site.hook == "neurons" else 1
            start = 0
            while start < len(numbers):
                stop = start + 1
                while stop < len(numbers) and stop - start < size and numbers[stop] == numbers[stop - 1] + 1:
                    stop += 1
                yield RowPart(site, numbers[start], stop - start)
                start = stop


SENDERS = ("heads", "attn_out", "neurons", "mlp_out")
"""The hooks of senders: what attention and MLPs make."""

FREEZABLE = ("attn_out", "mlp_out")
"""The hooks that may be frozen: what attention and MLPs add to the stream."""


class Frozen(NamedTuple):
    """What is frozen behind a sender.

    hooks: of `FREEZABLE`.
    layers: how many layers the model has.
    """

    hooks: tuple[str, ...]
    layers: int

    @classmethod
    def parse(cls, value: Any, layers: int, where: str = "--frozen") -> Frozen:
        """Return the frozen hooks that a comma-separated text or a list names. Raises UsageError."""
        expected = f"hooks, of {', '.join(FREEZABLE)}"
        hooks: dict[str, None] = {}
        for name in items_of(value, where, expected):
            if (hook := hook_named(name)) not in FREEZABLE:
                raise UsageError(explain(where, got=name, expected=expected))
            hooks[str(hook)] = None
        return cls(tuple(hooks), layers)

    @property
    def sites(self) -> list[Site]:
        """All sites that some sender freezes."""
        return [Site(layer, hook) for hook in self.hooks for layer in range(self.layers)]

    def behind(self, sender: Site) -> list[Site]:
        """Return the sites that a sender freezes: those of later layers, and the MLP after its attention."""
        beside = sender.hook in ("heads", "attn_out")
        return [
            site
            for site in self.sites
            if site.layer > sender.layer or (beside and site.hook == "mlp_out" and site.layer == sender.layer)
        ]


def check_senders(hooks: Iterable[str], where: str = "--hooks") -> None:
    """Raise UsageError for a hook that makes nothing."""
    for hook in hooks:
        if hook not in SENDERS:
            raise UsageError(explain(where, got=hook, expected=f"senders, of {', '.join(SENDERS)}"))


def check_receivers(
    receivers: Iterable[RowPart],
    present: Collection[Site],
    shapes: Mapping[Site, tuple[int, ...]],
    where: str = "--receivers",
) -> None:
    """Raise UsageError for a receiver that is not in the model.

    present: the sites that the model has.
    shapes: of the sites whose rows are not the stream's.
    """
    for part in receivers:
        if part.site not in present:
            raise UsageError(explain(where, got=str(part), expected="a site of the model"))
        count = shapes[part.site][0] if part.site in shapes else 0
        if part.entries and part.entries[-1] >= count:
            expected = f"0..{count - 1}, as {part.site} has {count} entries" if count else "no index at this hook"
            raise UsageError(explain(where, got=str(part), expected=expected))


def read_receivers(value: Any, layers: int, where: str = "--receivers") -> list[RowPart]:
    """Return the receivers that a comma-separated text or a list names, as `q:12[3]`, `k:12` or `final`.

    layers: how many layers the model has.

    Raises UsageError for another text, for a layer that the model lacks, and for what may be frozen.
    """
    receivers: dict[RowPart, None] = {}
    for text in items_of(value, where, "receivers such as q:12[3], k:12 or final"):
        part = RowPart.parse(f"final:{layers - 1}" if text == "final" else text, where)
        if part.site.layer >= layers:
            raise UsageError(explain(where, got=text, expected=f"a layer of 0..{layers - 1}"))
        if part.site.hook in FREEZABLE:
            raise UsageError(explain(where, got=text, expected="what reads the stream, such as q, k, v or final"))
        receivers[part] = None
    return list(receivers)
