"""Makes printable what comes from outside, such as names that peers choose: nothing of it moves a terminal or begins a line."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Return a text in which every character that is no letter, mark, digit, sign or plain space is its escape, such as `\x1b` or `\n`."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)
