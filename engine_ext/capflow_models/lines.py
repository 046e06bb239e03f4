"""JSON Lines: read whole, each line checked; written so that a file is never left with a line that is cut short."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from capflow.errors import CapflowError, UsageError, explain
from capflow.files import create_private
from capflow.text import jsontext

T = TypeVar("T")

_READ_BYTES = 1 << 16


def read_lines(path: Path, option: str, kind: type[T]) -> list[T]:
    """Return the objects of a file; raises UsageError, naming the file and the line, for what is no such object or for none."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as e:
        raise UsageError(explain(f"{option} {path}", got=e.strerror or str(e), expected="a readable file")) from e
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(jsontext.decode(line, kind))
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            fields = ", ".join(_fields(kind))
            raise UsageError(explain(f"{path}, line {number}", got=str(e), expected=f"an object of {fields}")) from e
    if not found:
        raise UsageError(explain(f"{option} {path}", got="no lines", expected="one JSON object a line"))
    return found


def _fields(kind: Any) -> Iterator[str]:
    return (field.name for field in msgspec.structs.fields(kind))


class LineFile:
    """A file that lines are added to, by one process at a time.

    Opening it cuts off a last line without an end, which only a kill or a full disk leaves. Raises UsageError when another process
    has it open, and CapflowError when it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    def __enter__(self) -> Self:
        try:
            self._file = create_private(self.path, os.O_RDWR | os.O_APPEND)
        except OSError as e:
            got = e.strerror or str(e)
            raise CapflowError(explain(f"{self.path}", got=got, expected="a place to write to")) from e
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            self._close()
            do = "wait for it, or give --stride and --offset to share the work"
            raise UsageError(explain(f"{self.path}: another process writes it", do=do)) from e
        self._cut()
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def lines(self) -> list[bytes]:
        """Return the lines that are there."""
        return self.path.read_bytes().splitlines()

    def add(self, lines: list[bytes]) -> None:
        """Add whole lines; they are with the kernel, and so outlive this process, when this returns."""
        assert self._file is not None
        content = b"".join(line + b"\n" for line in lines)
        while content:
            try:
                content = content[os.write(self._file, content) :]
            except OSError as e:
                raise CapflowError(explain(f"{self.path}", got=e.strerror or str(e), expected="room to write")) from e

    def _cut(self) -> None:
        """Cut the file behind its last whole line."""
        assert self._file is not None
        stop = os.fstat(self._file).st_size
        while stop:
            start = max(0, stop - _READ_BYTES)
            found = os.pread(self._file, stop - start, start).rfind(b"\n")
            if found >= 0:
                stop = start + found + 1
                break
            stop = start
        os.ftruncate(self._file, stop)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
