"""The directory that an export is written to; an export that was stopped continues in it.

Invariant: a file or directory gets its name by one rename, once it is whole. A directory with other contents than the
beginning of the same export is refused and left unchanged.
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
    """What an export is made of. An equal export continues one that was stopped.

    source: the data set's path.
    options: the options of the format.
    """

    source: str
    format: str
    sites: list[str]
    options: dict[str, int]


class Destination:
    """A directory and its export. Only one process may use it at a time."""

    def __init__(self, path: Path, export: Export) -> None:
        self.path = path
        self._export = export

    def open(self) -> None:
        """Create the directory, or continue the same export in it. Raises UsageError when it has other contents."""
        mark = self.path / _MARK
        try:
            if mark.is_file():
                self._check_is_ours(mark)
            elif os.path.lexists(self.path) and (not self.path.is_dir() or any(self.path.iterdir())):
                got = "a directory that is not empty" if self.path.is_dir() else "a file"
                raise UsageError(explain(f"{self.path}", got=got, do="choose a new name"))
            make_directory(self.path)
            for partial in self.path.glob(f"{_PARTIAL}*"):
                shutil.rmtree(partial) if partial.is_dir() else partial.unlink()
            write_whole(mark, msgspec.json.encode(self._export))
        except OSError as e:
            raise self.failed(e) from e

    def has(self, name: str) -> bool:
        """Return whether a name exists; then it is whole."""
        return (self.path / name).exists()

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Yield the path at which to write a file or directory.

        It gets its name when the block ends, or is removed when the block fails. Raises CapflowError for an OSError.
        """
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
        """Return the error to raise for an OSError of the disk."""
        do = "make room, and run the same command again: it continues from here"
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
