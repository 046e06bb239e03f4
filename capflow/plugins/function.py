"""Functions of a user, by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from capflow.errors import UsageError, explain


def function_named(name: str, where: str) -> Callable[..., Any]:
    """Return the function that `module:function` names. Raises UsageError if there is none.

    where: the option that names it, for errors.
    """
    module, colon, function = name.partition(":")
    expected = "module:function, importable from here"
    if not colon or not module or not function or "," in name:
        raise UsageError(explain(where, got=name, expected=expected))
    try:
        value = getattr(importlib.import_module(module), function)
    except Exception as e:
        got = f"{name}: {type(e).__name__}: {e}"
        raise UsageError(explain(where, got=got, expected=expected)) from e
    if not callable(value):
        raise UsageError(explain(where, got=f"{name}, a {type(value).__name__}", expected="a function"))
    function_value: Callable[..., Any] = value
    return function_value
