"""The prompts of `capflow run --model`: a JSON Lines file. A line is a prompt with its capture and its steering."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from capflow import limits
from capflow.capture.spec import Capture, parse_capture
from capflow.errors import UsageError, explain
from capflow.steering.request import STEERING_FIELDS, Steering
from capflow.text import jsontext

_FIELDS = ("id", "prompt", "max_tokens", "capture", *STEERING_FIELDS)


class Prompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a prompts file: `{"id": …, "prompt": …}`, and any other of `_FIELDS`.

    max_tokens: replaces the job's.
    capture: in the form of `capflow.capture.spec.parse_capture`.
    steering: the steering fields of the line; None without one.
    line: its number in the file, from 1.
    """

    id: str
    prompt: str
    max_tokens: int | None = None
    capture: Any = None
    steering: Steering | None = None
    line: int = 0

    @property
    def asked(self) -> Capture | None:
        """What the prompt asks to capture; raises UsageError."""
        return None if self.capture is None else parse_capture(self.capture)


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts in a JSON Lines file.

    Raises UsageError naming the file and the line when it cannot be read, a line is not a prompt, or an id comes twice.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as e:
        raise UsageError(explain(f"--prompts {path}", got=e.strerror or str(e), expected="a readable file")) from e
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        prompt = _prompt(line, number, where)
        if prompt.id in seen:
            raise UsageError(explain(f"{where}, id", got=prompt.id, expected=f"another than in line {seen[prompt.id]}"))
        seen[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise UsageError(explain(f"--prompts {path}", got="no prompts", expected="one JSON object a line"))
    return prompts


def _prompt(line: bytes, number: int, where: str) -> Prompt:
    """Return the prompt of a line; raise UsageError with `where` and the field first."""
    try:
        fields = jsontext.decode(line, dict[str, Any])
        jsontext.check_keys(line, where)
        for name in fields:
            if name not in _FIELDS:
                raise UsageError(explain(f"{where}, {name}: unknown", expected=f"one of {', '.join(_FIELDS)}"))
        steering = {name: value for name in STEERING_FIELDS if (value := fields.pop(name, None)) is not None}
        prompt = msgspec.convert({**fields, "line": number}, Prompt)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise UsageError(explain(where, got=str(e), expected='{"id": "…", "prompt": "…"}')) from e
    if not prompt.prompt or not 0 < len(prompt.id) <= limits.REQUEST_ID_LENGTH_MAX:
        expected = f"a prompt that is not empty and an id of 1..{limits.REQUEST_ID_LENGTH_MAX} characters"
        raise UsageError(explain(where, got=line.decode(errors="replace"), expected=expected))
    if prompt.max_tokens is not None and prompt.max_tokens < 1:
        raise UsageError(explain(f"{where}, max_tokens", got=prompt.max_tokens, expected="1 or more"))
    try:
        _ = prompt.asked
        return msgspec.structs.replace(prompt, steering=Steering.parse(steering)) if steering else prompt
    except UsageError as e:
        raise UsageError(f"{where}, {e}") from e
