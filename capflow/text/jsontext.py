"""JSON from users, clients and files.

Invariant: every text that does not match raises `msgspec.DecodeError`, also if it is nested too deeply or is not UTF-8.
`check_keys` refuses a key that occurs twice in one object: parsers differ on which of the two they take.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeVar, overload

import msgspec

from capflow.errors import UsageError, explain

T = TypeVar("T")

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_COLON = re.compile(rb"\s*+:")
_BACKSLASH = ord("\\")


@overload
def decode(text: bytes | str) -> Any: ...
@overload
def decode(text: bytes | str, kind: type[T]) -> T: ...
def decode(text: bytes | str, kind: Any = Any) -> Any:
    """Return a JSON text decoded as a type. Raises msgspec.DecodeError, or its subclass ValidationError."""
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        raise msgspec.DecodeError("JSON is nested too deeply") from None
    except UnicodeDecodeError as e:
        raise msgspec.DecodeError(str(e)) from e


def check_keys(text: bytes, where: str) -> None:
    """Raise UsageError if a key occurs twice in one object. A text that is not JSON passes: its parser refuses it.

    A text whose keys all differ is only searched for quotes, not parsed: packed vectors are long strings.

    where: the beginning of the error message.
    """
    keys = Counter(_keys(text))
    if all(count == 1 for count in keys.values()) and not any(b"\\" in key for key in keys):
        return
    twice: list[str] = []
    with contextlib.suppress(RecursionError, UnicodeDecodeError, json.JSONDecodeError):
        json.loads(text, object_pairs_hook=lambda pairs: twice.extend(_repeated(pairs)))
    if twice:
        raise UsageError(explain(where, got=f"{twice[0]} twice in one object", expected="each key once"))


def _keys(text: bytes) -> Iterator[bytes]:
    """Yield the keys of a JSON text, as they are written there."""
    begin = text.find(b'"')
    while begin >= 0:
        end = text.find(b'"', begin + 1)
        # The quote may be escaped, or stand behind an escaped backslash.
        if end >= 0 and text[end - 1] == _BACKSLASH:
            string = _STRING.match(text, begin)
            end = -1 if string is None else string.end() - 1
        if end < 0:
            return
        if _COLON.match(text, end + 1):
            yield text[begin + 1 : end]
        begin = text.find(b'"', end + 1)


def _repeated(pairs: list[tuple[str, Any]]) -> list[str]:
    counts = Counter(key for key, _ in pairs)
    return [key for key, count in counts.items() if count > 1]
