"""The file of labels that `capflow probe` reads.

The file is JSON Lines, `{"request": "r1", "label": "glad"}` a line, or CSV with the columns `request` and `label`, by
its suffix. A probe fires on one label, the positive one. If there are two labels, the default is 1, true, yes or
positive; otherwise the user names it.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from capflow.errors import UsageError, explain

_POSITIVE = ("1", "true", "yes", "positive")
_NAMED_MAX = 8
_EXPECTED = 'a request and a label, {"request": "…", "label": "…"}'


def read_labels(path: Path, positive: str | None, *, where: str = "--labels") -> dict[str, bool]:
    """Return whether each request has the positive label. Raises UsageError with the file and the line.

    where: the option that names the file, for errors.
    """
    labels = read_groups(path, where=where)
    different = sorted(set(labels.values()))
    if len(different) < 2:
        raise _wrong(f"{path}: labels", ", ".join(different[:8]) or "none", "two different ones or more")
    wanted = positive.lower() if positive is not None else None
    if positive is None and len(different) == 2:
        wanted = next((name for name in different if name in _POSITIVE), None)
    if wanted not in different:
        do = f"name what the probe is to fire on: --positive {different[0]}"
        raise UsageError(
            explain("--positive", got=positive or "nothing", expected=f"one of {_named(different)}", do=do)
        )
    return {request: label == wanted for request, label in labels.items()}


def read_groups(path: Path, *, where: str = "--labels") -> dict[str, str]:
    """Return the label of each request, in lower case. Raises UsageError with the file and the line.

    where: the option that names the file, for errors.
    """
    labels: dict[str, str] = {}
    for number, entry in _lines(path, where):
        request, label = (
            (entry.get(field) for field in ("request", "label")) if isinstance(entry, dict) else (None, None)
        )
        if (
            not isinstance(request, str)
            or not isinstance(label, str | int | bool)
            or set(entry) != {"request", "label"}
        ):
            raise _wrong(f"{path}: line {number}", entry, _EXPECTED)
        if labels.setdefault(request, str(label).lower()) != str(label).lower():
            raise _wrong(f"{path}: line {number}", f"another label of {request}", "one label for each request")
    return labels


def _named(labels: list[str]) -> str:
    more = [f"… {len(labels):,} in all"] if len(labels) > _NAMED_MAX else []
    return ", ".join([*labels[:_NAMED_MAX], *more])


def _lines(path: Path, where: str) -> Iterator[tuple[int, Any]]:
    if path.suffix not in (".csv", ".jsonl"):
        raise _wrong(where, str(path), "a file named .csv or .jsonl")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise _wrong(f"{where} {path}", str(e), "a file of labels in UTF-8") from e
    if path.suffix == ".csv":
        yield from enumerate(csv.DictReader(text.splitlines()), 2)
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as e:
                raise _wrong(f"{path}: line {number}", line, _EXPECTED) from e


def _wrong(where: str, got: Any, expected: str) -> UsageError:
    return UsageError(explain(where, got=got, expected=expected))
