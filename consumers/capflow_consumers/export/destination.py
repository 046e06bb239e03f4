"""The directory that an export is written to, and goes on in when it was stopped.

What always holds: a name appears in it in one rename, when what it names is whole; a directory that holds anything else than the
beginning of the very same export is refused, and not touched.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from capflow import limits
from capflow.errors import CapflowError, UsageError, explain
from capflow.files import make_directory, private_umask, read_regular, write_whole
from capflow.text import jsontext
from capflow_consumers.dataset.disk import sync

_MARK = ".capflow-export.json"
_PARTIAL = ".partial-"


class Export(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an export is of: the same again goes on where this one was stopped.

    options: of the format.
    """

    source: str
    format: str
    sites: list[str]
    options: dict[str, int]


class Destination:
    """A directory and the export that owns it. Not for two processes at once."""

    def __init__(self, path: Path, export: Export) -> None:
        self.path = path
        self._export = export

    def open(self) -> None:
        """Make the directory, or take up what was begun; raises UsageError when something else is there."""
        mark = self.path / _MARK
        try:
            if mark.is_file():
                self._check_is_ours(mark)
            elif os.path.lexists(self.path) and (not self.path.is_dir() or any(self.path.iterdir())):
                got = "a directory that is not empty" if self.path.is_dir() else "a file"
                raise UsageError(explain(f"{self.path}", got=got, do="choose a name that is not taken"))
            make_directory(self.path)
            for left in self.path.glob(f"{_PARTIAL}*"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            write_whole(mark, msgspec.json.encode(self._export))
        except OSError as e:
            raise self.failed(e) from e

    def has(self, name: str) -> bool:
        """Whether a name is there, and so whole."""
        return (self.path / name).exists()

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Give the path to write a file or directory at; it gets its name when the block ends, or is removed when it fails."""
        partial = self.path / f"{_PARTIAL}{name}"
        try:
            with private_umask():
                yield partial
            for file in partial.iterdir() if partial.is_dir() else (partial,):
                sync(file)
            partial.rename(self.path / name)
            sync(self.path)
        except OSError as e:
            raise self.failed(e) from e
        finally:
            if partial.is_dir():
                shutil.rmtree(partial, ignore_errors=True)
            else:
                partial.unlink(missing_ok=True)

    def failed(self, error: OSError) -> CapflowError:
        """Return the error to raise when the disk gave this one."""
        do = "make room, and run the same command again: it goes on from here"
        return CapflowError(explain(f"{self.path} cannot be written", got=error.strerror or str(error), do=do))

    def _check_is_ours(self, mark: Path) -> None:
        try:
            begun = jsontext.decode(read_regular(mark, limits.SIDECAR_BYTES_MAX), Export)
        except (msgspec.MsgspecError, UnicodeDecodeError) as e:
            raise UsageError(explain(f"{mark}", got=str(e), do="remove the directory, or choose another name")) from e
        if begun != self._export:
            differ = [name for name in Export.__struct_fields__ if getattr(begun, name) != getattr(self._export, name)]
            got = f"another export, whose {' and '.join(differ)} {'differs' if len(differ) == 1 else 'differ'}"
            raise UsageError(explain(f"{self.path}", got=got, do="remove the directory, or choose another name"))
