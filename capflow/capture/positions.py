"""Positions: the tokens of a request whose rows are captured.

A set is written in one of these forms, or as a list of them, which is their union:

| form | positions |
|---|---|
| `"last_prompt"`, `"all_prompt"`, `"all_generated"`, `"all"` | by name |
| `7` | position 7, counted over prompt and generated tokens |
| `-1` | the last of the prompt; `-2` the one before it |
| `{"last": 16}` | the last 16 of the prompt |
| `{"generated": [10, 20]}` | the 11th to the 20th generated; `[10, null]`: from the 11th on |
| `{"every": 8}` | 0, 8, 16 … over prompt and generated tokens |

Where only text is possible, the forms are `7`, `-1`, `last:16`, `generated:10:20`, `generated:10:`, `every:8`, joined
with `+`.

`Positions` is such a set for requests of any length. `Positions.at` resolves it with the length of a prompt, to
`capflow.capture.places.Places`. A position that a request does not reach, before its start or after its end, has no row
and is not an error.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

from msgspec import Meta

from capflow import limits
from capflow.capture.places import FOREVER, Places
from capflow.errors import UsageError, explain

Bounds = Annotated[list[int | None], Meta(max_length=2)]
Counted = Annotated[dict[str, int | Bounds], Meta(max_length=1)]
Form = str | Annotated[list[int | str | Counted], Meta(max_length=limits.POSITIONS_LISTED_MAX)] | Counted
"""The written forms; `normalise` checks a value and returns it in one of the forms above."""


class Edge(NamedTuple):
    """A place in any request, counted from its first token or from the end of its prompt.

    prompt: 0 counts from the first token, 1 from the end of the prompt.
    offset: the distance from there, in tokens.
    """

    prompt: int
    offset: int

    def at(self, prompt_length: int) -> int:
        """Return the position."""
        return self.prompt * prompt_length + self.offset


class Window(NamedTuple):
    """Every `step`th position from `first` up to, but not including, `end`."""

    first: Edge
    end: Edge
    step: int = 1


class Spots(NamedTuple):
    """Single positions: `offsets`, in order, each counted like `first` and `end`.

    first: a place at or before all of them.
    end: a place after all of them.
    """

    first: Edge
    end: Edge
    offsets: tuple[int, ...]


_START, _PROMPT_END, _NEVER = Edge(0, 0), Edge(1, 0), Edge(0, FOREVER)
_PROMPT, _GENERATED, _ALL = Window(_START, _PROMPT_END), Window(_PROMPT_END, _NEVER), Window(_START, _NEVER)
_NAMED = {
    "last_prompt": Window(Edge(1, -1), _PROMPT_END),
    "all_prompt": _PROMPT,
    "all_generated": _GENERATED,
    "all": _ALL,
}

POSITION_NAMES: tuple[str, ...] = tuple(_NAMED)

_EXPECTED = (
    f"one of {', '.join(POSITION_NAMES)}, a position, "
    '{"last": N}, {"generated": [A, B]}, {"every": N}, or a list of these'
)
# This many single positions or more are kept as `Spots`.
_SPOTS_MIN = 8
# The places of a set of at most this many windows are small: `_places` caches more of them than `_places_of_many`.
_FEW = 16
# Approximate memory of a set, of each of its windows and of each number of its spots.
_SET_BYTES, _WINDOW_BYTES, _NUMBER_BYTES = 768, 320, 40
_TEXT = re.compile(
    r"(?P<position>-?\d{1,12})|(?P<kind>last|every):(?P<count>\d{1,12})|generated:(?P<a>\d{1,12}):(?P<b>\d{0,12})"
)


class Positions:
    """A set of positions that applies to any request. Sets are equal if they are written equally; `|` joins sets.

    parts: windows, and the number of their first positions to take (None: all). The set is the union of the parts.
    """

    __slots__ = ("_few", "_hash", "parts")

    NONE: ClassVar[Positions]
    LAST_PROMPT: ClassVar[Positions]
    ALL_PROMPT: ClassVar[Positions]
    ALL_GENERATED: ClassVar[Positions]
    ALL: ClassVar[Positions]

    def __init__(self, parts: Iterable[tuple[frozenset[Window | Spots], int | None]]) -> None:
        whole: frozenset[Window | Spots] = frozenset()
        limited = set()
        for windows, rows in parts:
            if rows is None:
                whole |= windows
            else:
                limited.add((_plainest(windows), rows))
        self.parts: frozenset[tuple[frozenset[Window | Spots], int | None]] = frozenset(
            [*limited, *([(_plainest(whole), None)] if whole else [])]
        )
        self._hash = hash(self.parts)
        self._few = sum(len(windows) for windows, _ in self.parts) <= _FEW and not any(
            isinstance(item, Spots) for windows, _ in self.parts for item in windows
        )

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Positions) and self.parts == other.parts)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Positions], tuple[Any, ...]]:
        # The hash is not pickled: that of None, which stands in parts, differs between processes.
        return Positions, (tuple(self.parts),)

    def __bool__(self) -> bool:
        return bool(self.parts)

    def __or__(self, other: Positions) -> Positions:
        if self == other or not other:
            return self
        return Positions([*self.parts, *other.parts]) if self else other

    def __repr__(self) -> str:
        return f"Positions({set(self.parts)})"

    @classmethod
    def named(cls, name: str) -> Positions:
        """Return the set with a name of the table above, e.g. `last_prompt`."""
        return cls([(frozenset([_NAMED[name]]), None)])

    @classmethod
    def parse(cls, form: Any, *, max_rows: int | None = None, where: str = "positions") -> Positions:
        """Return the set that a form describes.

        max_rows: if given, only its first `max_rows` positions.
        where: the field that holds the form; messages begin with it.

        Raises UsageError with the field, the value and the expected form.
        """
        return cls([(frozenset(_windows(normalise(form, where))), max_rows)])

    @property
    def nbytes(self) -> int:
        """The approximate memory of the set, in bytes."""
        items = [item for windows, _ in self.parts for item in windows]
        numbers = sum(len(item.offsets) for item in items if isinstance(item, Spots))
        return _SET_BYTES + _WINDOW_BYTES * len(items) + _NUMBER_BYTES * numbers

    def at(self, prompt_length: int) -> Places:
        """Return the positions in requests whose prompt has this length."""
        return (_places if self._few else _places_of_many)(self, prompt_length)

    def count(self, prompt_length: int, computed_length: int) -> int:
        """Return the number of rows that a request has in the set once `computed_length` tokens are computed."""
        return self.at(prompt_length).count(0, computed_length)

    def cut(self, prompt_length: int, computed_length: int) -> bool:
        """Return whether `max_rows` leaves out a position that such a request has."""
        return any(
            rows is not None and _resolved(windows, prompt_length).count(0, computed_length) > rows
            for windows, rows in self.parts
        )


def normalise(form: Any, where: str = "positions") -> Form:
    """Return a form in its normal form: names and objects unchanged, text parsed, numbers in order.

    Raises UsageError with the field `where`, the value and the expected form.
    """
    if isinstance(form, str):
        items = [_read(text, form, where) for text in form.split("+")]
        form = items[0] if len(items) == 1 else items
    if isinstance(form, str):
        return form
    if type(form) is int:
        form = [form]
    if isinstance(form, Mapping):
        return _checked_window(form, where)
    if not isinstance(form, Sequence) or not form:
        raise UsageError(explain(where, got=form, expected=_EXPECTED))
    if len(form) > limits.POSITIONS_LISTED_MAX:
        expected = f"at most {limits.POSITIONS_LISTED_MAX}"
        raise UsageError(explain(where, got=f"{len(form)} positions", expected=expected))
    numbers: set[int] = set()
    others: list[str | dict[str, Any]] = []
    for index, item in enumerate(form):
        at = f"{where}[{index}]"
        read = _read(item, item, at) if isinstance(item, str) else item
        if type(read) is int:
            numbers.add(_bounded(read, at, -limits.POSITION_MAX))
        elif isinstance(read, str):
            others.append(read)
        elif isinstance(read, Mapping):
            others.append(_checked_window(read, at))
        else:
            raise UsageError(explain(at, got=item, expected=_EXPECTED))
    if sum(isinstance(item, dict) and "every" in item for item in others) > 1:
        raise UsageError(explain(where, got='several {"every": N}', expected="one"))
    return [*sorted(numbers), *others]


def _read(text: str, whole: str, where: str) -> Any:
    """Return the name, the number or the object that a piece of text describes.

    whole: the text that it is a piece of, for the message.
    """
    text = text.strip()
    if text in _NAMED:
        return text
    match = _TEXT.fullmatch(text)
    if match is None:
        raise UsageError(explain(where, got=whole, expected=_EXPECTED))
    if match["position"]:
        return int(match["position"])
    if match["kind"]:
        return _checked_window({match["kind"]: int(match["count"])}, where)
    return _checked_window({"generated": [int(match["a"]), int(match["b"]) if match["b"] else None]}, where)


def _checked_window(form: Mapping[Any, Any], where: str) -> dict[str, Any]:
    if len(form) != 1 or not set(form) <= {"last", "generated", "every"}:
        raise UsageError(
            explain(where, got=dict(form), expected='one of {"last": N}, {"generated": [A, B]}, {"every": N}')
        )
    ((kind, value),) = form.items()
    where = f"{where}.{kind}"
    if kind != "generated":
        return {kind: _bounded(value, where, 1)}
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise UsageError(explain(where, got=value, expected="[A, B], the generated tokens A..B-1"))
    first = _bounded(value[0], where, 0)
    end = None if value[1] is None else _bounded(value[1], where, first + 1)
    return {kind: [first, end]}


def _bounded(value: Any, where: str, low: int) -> int:
    if type(value) is not int or not low <= value <= limits.POSITION_MAX:
        raise UsageError(explain(where, got=value, expected=f"a whole number of {low}..{limits.POSITION_MAX}"))
    return value


def _windows(form: Any) -> Iterator[Window | Spots]:
    """Yield the windows and spots of a normalised form."""
    items = form if isinstance(form, list) else [form]
    numbers = [item for item in items if type(item) is int]
    if len(numbers) >= _SPOTS_MIN:
        yield from _spots(0, [number for number in numbers if number >= 0])
        yield from _spots(1, [number for number in numbers if number < 0])
        items = [item for item in items if type(item) is not int]
    for item in items:
        match item:
            case str():
                yield _NAMED[item]
            case int():
                edge = Edge(0, item) if item >= 0 else Edge(1, item)
                yield Window(edge, edge._replace(offset=item + 1))
            case {"last": count}:
                yield Window(Edge(1, -count), _PROMPT_END)
            case {"every": step}:
                yield Window(_START, _NEVER, step)
            case {"generated": [first, end]}:
                yield Window(Edge(1, first), _NEVER if end is None else Edge(1, end))


def _spots(prompt: int, offsets: list[int]) -> Iterator[Spots]:
    if offsets:
        yield Spots(Edge(prompt, offsets[0]), Edge(prompt, offsets[-1] + 1), tuple(offsets))


def _plainest(windows: frozenset[Window | Spots]) -> frozenset[Window | Spots]:
    """Return the same set without the windows that lie inside a named one."""
    if windows >= {_PROMPT, _GENERATED}:
        windows |= {_ALL}
    for wide in (_ALL, _PROMPT, _GENERATED):
        if wide in windows:
            windows = frozenset(
                w for w in windows if w == wide or not (_before(wide[0], w[0]) and _before(w[1], wide[1]))
            )
    return windows


def _before(one: Edge, other: Edge) -> bool:
    """Return whether an edge is at or before another in every request."""
    same = one.prompt == other.prompt and one.offset <= other.offset
    return same or one == _START or other == _NEVER


def _resolved(windows: frozenset[Window | Spots], prompt_length: int) -> Places:
    stretches: list[tuple[int, int]] = []
    strides = []
    for item in windows:
        start, stop = max(0, item.first.at(prompt_length)), item.end.at(prompt_length)
        if isinstance(item, Spots):
            begin = item.first.prompt * prompt_length
            stretches += [(begin + offset, begin + offset + 1) for offset in item.offsets if begin + offset >= 0]
        elif item.step == 1:
            stretches.append((start, stop))
        else:
            strides.append(range(start, stop, item.step))
    return Places(stretches, strides)


def _placed(positions: Positions, prompt_length: int) -> Places:
    parts = [
        _resolved(windows, prompt_length) if rows is None else _resolved(windows, prompt_length).until(rows)
        for windows, rows in positions.parts
    ]
    return parts[0] if len(parts) == 1 else Places.union(parts)


_places = functools.lru_cache(maxsize=2048)(_placed)
# Each entry takes up to 16 KiB.
_places_of_many = functools.lru_cache(maxsize=256)(_placed)


Positions.NONE = Positions([])
Positions.LAST_PROMPT = Positions.named("last_prompt")
Positions.ALL_PROMPT = Positions.named("all_prompt")
Positions.ALL_GENERATED = Positions.named("all_generated")
Positions.ALL = Positions.named("all")
