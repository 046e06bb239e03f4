"""The names of engines.

An engine that is given a name is `NAME@START` on the wire and in the data: the name is the user's and stays the same, START is new at each
start. So what an engine left behind is never mistaken for what the next one of its name sends. An engine without a name has a random id,
which is its name.
"""

from __future__ import annotations

import re
import uuid
from typing import Any

from capflow import limits
from capflow.errors import UsageError, explain

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_START_LENGTH = 12


def new_engine(name: str | None = None, *, where: str = "engine_name") -> str:
    """Return the id of an engine that starts now.

    name: the user's; None for a random one.
    where: begins the message of an error.

    Raises UsageError for a name that is none.
    """
    if name is None:
        return uuid.uuid4().hex
    return f"{checked(name, where=where)}@{uuid.uuid4().hex[:_START_LENGTH]}"


def checked(name: Any, *, where: str = "engine_name") -> str:
    """Return an engine's name; raises UsageError where it is none."""
    if isinstance(name, str) and len(name) <= limits.ENGINE_NAME_LENGTH_MAX and _NAME.fullmatch(name):
        return name
    expected = f"1..{limits.ENGINE_NAME_LENGTH_MAX} letters, digits, and `.`, `_` or `-` between them"
    raise UsageError(explain(where, got=name, expected=expected))


def name_of(engine: str) -> str:
    """Return the name of an engine, by its id."""
    name, _, _ = engine.rpartition("@")
    return name or engine


def start_of(engine: str) -> str:
    """Return what tells the starts of an engine apart, by its id."""
    return engine.rpartition("@")[2]


def is_of(engine: str, asked: str) -> bool:
    """Return whether an engine is the one asked for, by name or id; the empty name asks for any."""
    return asked in ("", engine, name_of(engine))
