"""JSON from outside: what people write, what clients send, and what lies in files.

Every text that is not what is expected is a `msgspec.DecodeError`: also one that is nested too deeply, or is no UTF-8. In what
a person or a client wrote, `check_keys` refuses a key that stands twice in one object, of which parsers take either.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from typing import Any, TypeVar, overload

import msgspec

from capflow.errors import UsageError, explain

T = TypeVar("T")

_STRING = re.compile(rb'"((?:[^"\\]|\\.)*+)"(\s*+:)?', re.DOTALL)


@overload
def decode(text: bytes | str) -> Any: ...
@overload
def decode(text: bytes | str, kind: type[T]) -> T: ...
def decode(text: bytes | str, kind: Any = Any) -> Any:
    """Return what JSON says, as a type; raises msgspec.DecodeError, also its ValidationError."""
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError:
        raise msgspec.DecodeError("JSON is nested too deeply") from None
    except UnicodeDecodeError as e:
        raise msgspec.DecodeError(str(e)) from e


def check_keys(text: bytes, where: str) -> None:
    """Raise UsageError when a key stands twice in one object; a text that is no JSON is left to its parser.

    where: what the text is of, for the message. A text whose keys all differ is not parsed, only searched for strings.
    """
    keys = Counter(found[1] for found in _STRING.finditer(text) if found[2])
    if all(count == 1 for count in keys.values()) and not any(b"\\" in key for key in keys):
        return
    twice: list[str] = []
    with contextlib.suppress(RecursionError, UnicodeDecodeError, json.JSONDecodeError):
        json.loads(text, object_pairs_hook=lambda pairs: twice.extend(_repeated(pairs)))
    if twice:
        raise UsageError(explain(where, got=f"{twice[0]} twice in one object", expected="each key once"))


def _repeated(pairs: list[tuple[str, Any]]) -> list[str]:
    counts = Counter(key for key, _ in pairs)
    return [key for key, count in counts.items() if count > 1]
