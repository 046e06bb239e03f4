"""The assertions of the rules about results and processes. Each raises AssertionError with the reason."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

# The time that a thread may take to end on a busy machine.
_ENDS_S = 20.0


def compare(expected: Any, got: Any, where: str) -> None:
    """Assert that a result, or the stored data, equals that of a request that runs alone."""
    assert got == expected, f"{where}: got {got}, expected {expected}, as when it runs alone"


def check_plain(result: Any) -> None:
    """Assert that a result consists of plain JSON values."""
    try:
        encoded = msgspec.json.encode(result)
    except (TypeError, ValueError) as e:
        raise AssertionError(f"the result cannot be sent: {e}; got {result!r}, expected plain JSON values") from e
    payload = msgspec.json.decode(encoded)["payload"]
    assert isinstance(payload, dict), f"the payload is {result.payload!r}, expected a dict"
    for key, value in result.payload.items():
        plain = isinstance(value, float) or payload.get(key) == value
        assert plain, f"payload[{key!r}] is {value!r}, expected a plain JSON value"


def check_given_back(threads: set[threading.Thread], directory: Path, after: str) -> None:
    """Assert that after a while no other threads run and no file below a directory is open."""
    gc.collect()
    deadline = time.monotonic() + _ENDS_S
    while (left := set(threading.enumerate()) - threads) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left, f"threads still running after {after}: {', '.join(thread.name for thread in left)}"
    held = open_below(directory)
    assert not held, f"files still open after {after}: {', '.join(held)}"


def open_below(directory: Path) -> list[str]:
    """Return the files below a directory that this process has open."""
    held = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            held.append(str(descriptor.readlink()))
        except OSError:
            continue
    return sorted(path for path in held if path.startswith(f"{directory}/"))
