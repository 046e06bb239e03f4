"""The names of engines.

The id of a named engine is `NAME@START`, on the wire and in the data. The user chooses NAME, and START is new at each
start. So frames of an engine that ended are never taken for frames of the next engine with the same name. An engine
without a name has a random id, which is also its name. An engine that several commands start has one START, which
the user gives to each of them.
"""

from __future__ import annotations

import re
import uuid
from typing import Any

from capflow import limits
from capflow.errors import UsageError, explain

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_START_LENGTH = 12


def new_engine(
    name: str | None = None,
    start: str | None = None,
    *,
    where: str = "engine_name",
    where_start: str = "engine_id",
) -> str:
    """Return the id of an engine that starts now.

    name: the name that the user chose; None for a random id.
    start: what all commands of the engine were given, new at each start; None for a random one.
    where, where_start: the beginning of an error message about either.

    Raises UsageError if the name or the start is not valid.
    """
    if start is not None:
        checked(start, where=where_start)
    if name is None:
        return start or uuid.uuid4().hex
    return f"{checked(name, where=where)}@{start or uuid.uuid4().hex[:_START_LENGTH]}"


def checked(name: Any, *, where: str = "engine_name") -> str:
    """Return a valid engine name. Raises UsageError if it is not valid."""
    if isinstance(name, str) and len(name) <= limits.ENGINE_NAME_LENGTH_MAX and _NAME.fullmatch(name):
        return name
    expected = f"1..{limits.ENGINE_NAME_LENGTH_MAX} letters, digits, and `.`, `_` or `-` between them"
    raise UsageError(explain(where, got=name, expected=expected))


def name_of(engine: str) -> str:
    """Return the name in an engine's id."""
    name, _, _ = engine.rpartition("@")
    return name or engine


def start_of(engine: str) -> str:
    """Return the START in an engine's id, or the whole id if the engine has no name."""
    return engine.rpartition("@")[2]


def is_of(engine: str, asked: str) -> bool:
    """Return whether `asked` is the name or the id of an engine, or empty, which matches every engine."""
    return asked in ("", engine, name_of(engine))
