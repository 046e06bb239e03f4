"""JSON Lines: files are read whole and checked line by line; an incomplete last line is removed before writing."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import msgspec

from capflow.errors import CapflowError, UsageError, explain
from capflow.files import create_private, write_whole
from capflow.text import jsontext

T = TypeVar("T")

_READ_BYTES = 1 << 16


def read_lines(path: Path, option: str, kind: type[T]) -> list[T]:
    """Return the objects of a file, one a line; empty lines are skipped.

    option: the option that names the file, for errors.
    kind: the type of the objects, a msgspec.Struct.

    Raises UsageError that names the file and the line for an invalid object, and for a file without lines.
    """
    return [each for _, each in numbered_lines(read_content(path, option), path, option, kind)]


def read_content(path: Path, option: str) -> bytes:
    """Return the content of a file. Raises UsageError, as `read_lines` does, if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as e:
        raise UsageError(explain(f"{option} {path}", got=e.strerror or str(e), expected="a readable file")) from e


def numbered_lines(content: bytes, path: Path, option: str, kind: type[T]) -> list[tuple[int, T]]:
    """Return the objects of a file's content, each with the number of its line. It raises as `read_lines` does."""
    objects = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            objects.append((number, jsontext.decode(line, kind)))
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            fields = ", ".join(field.name for field in msgspec.structs.fields(cast("Any", kind)))
            raise UsageError(explain(f"{path}, line {number}", got=str(e), expected=f"an object of {fields}")) from e
    if not objects:
        raise UsageError(explain(f"{option} {path}", got="no lines", expected="one JSON object a line"))
    return objects


class TextLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a file of texts: `{"text": "…"}`."""

    text: str


def read_texts(path: Path) -> tuple[bytes, list[str]]:
    """Return the content of a file, and its texts: lines of a .txt file, or JSON Lines.

    Raises UsageError for a file that cannot be read, an invalid line, and a file without texts.
    """
    if path.suffix != ".txt":
        texts = [line.text for line in read_lines(path, "--texts", TextLine)]
        return path.read_bytes(), texts
    try:
        content = path.read_bytes()
        texts = [line for line in content.decode().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as e:
        got = e.strerror if isinstance(e, OSError) else str(e)
        raise UsageError(explain(f"--texts {path}", got=got, expected="a readable file of UTF-8 text")) from e
    if not texts:
        raise UsageError(explain(f"--texts {path}", got="no lines", expected="one text a line"))
    return content, texts


class LineFile:
    """A file to which one process at a time adds lines.

    An incomplete last line, which a kill or a full disk may leave, is not read. Only `add` and `replace` change the
    file: one that turns out to be another's stays whole.

    Opening raises UsageError when another process has the file open, CapflowError when the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        # Whether the last line is whole.
        self._whole = False

    def __enter__(self) -> Self:
        try:
            self._file = create_private(self.path, os.O_RDWR | os.O_APPEND)
        except OSError as e:
            got = e.strerror or str(e)
            raise CapflowError(explain(f"{self.path}", got=got, expected="a file that can be written")) from e
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            self._close()
            do = "wait for it, or give --stride and --offset to share the work"
            raise UsageError(explain(f"{self.path}: another process writes it", do=do)) from e
        self._whole = False
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def lines(self) -> list[bytes]:
        """Return the file's whole lines."""
        content = self.path.read_bytes()
        return content[: content.rfind(b"\n") + 1].splitlines()

    def add(self, lines: list[bytes]) -> None:
        """Add lines. When this returns, the kernel has them, so a kill of this process does not lose them."""
        assert self._file is not None
        if lines and not self._whole:
            self._cut()
            self._whole = True
        content = b"".join(line + b"\n" for line in lines)
        while content:
            try:
                content = content[os.write(self._file, content) :]
            except OSError as e:
                raise CapflowError(
                    explain(f"{self.path}", got=e.strerror or str(e), expected="room on the disk")
                ) from e

    def replace(self, lines: list[bytes]) -> None:
        """Put these lines in the place of all the file's. A kill leaves the earlier ones or these."""
        try:
            write_whole(self.path, b"".join(line + b"\n" for line in lines))
        except OSError as e:
            raise CapflowError(explain(f"{self.path}", got=e.strerror or str(e), expected="room on the disk")) from e
        self._close()
        self.__enter__()

    def _cut(self) -> None:
        """Cut the file after its last complete line."""
        assert self._file is not None
        stop = os.fstat(self._file).st_size
        while stop:
            start = max(0, stop - _READ_BYTES)
            index = os.pread(self._file, stop - start, start).rfind(b"\n")
            if index >= 0:
                stop = start + index + 1
                break
            stop = start
        os.ftruncate(self._file, stop)

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
