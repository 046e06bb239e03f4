"""The examples at the end of a command's help."""

from __future__ import annotations


def examples(*commands: str) -> str:
    """Return the epilog of a click command that shows examples. They are never wrapped, so that each can be copied."""
    return "\n".join(["\b", "Examples:", *(f"  {command}" for command in commands)])
