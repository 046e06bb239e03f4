"""Escapes text from outside, such as names that peers choose, so that it cannot move a terminal or start a line."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Return a text with every unprintable character escaped, such as `\x1b` or `\n`; a plain space stays."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)
