"""Shows the parameters of docstrings as lists.

capflow's docstrings describe a parameter or a field on a line of its own, `name: what it is.` Markdown would run such
lines together into one paragraph.
"""

import re
from typing import Any

import griffe

_LINE = re.compile(r"^(?P<names>[a-z_]\w*(?:(?:, | and )[a-z_]\w*)*): (?P<meaning>.+)$")
_AND = re.compile(", | and ")


class Fields(griffe.Extension):
    """Turns lines `name: meaning` into list items, where the object has a parameter or a member of the name."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of a function, a class or a module."""
        if obj.docstring is None:
            return
        names = {parameter.name for parameter in getattr(obj, "parameters", ())} | set(obj.members)
        obj.docstring.value = listed(obj.docstring.value, names)


def listed(text: str, names: set[str]) -> str:
    """Return a docstring with each line `name: meaning` as an item of a list, and what follows it as part of that item.

    names: those of the parameters and members.
    """
    lines: list[str] = []
    item = False  # whether the line before belongs to an item
    for line in text.splitlines():
        match = _LINE.match(line)
        if match and names.issuperset(_AND.split(match["names"])):
            if not item:
                lines.append("")
            shown = ", ".join(f"`{name}`" for name in _AND.split(match["names"]))
            lines.append(f"* {shown}: {match['meaning']}")
            item = True
        else:
            item = item and bool(line.strip())
            lines.append(f"  {line.strip()}" if item else line)
    return "\n".join(lines)
