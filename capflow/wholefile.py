"""A file that is there whole or not at all: written beside its place, synced, and renamed into it. Only its owner can read it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from capflow.errors import CapflowError, explain


@contextlib.contextmanager
def whole_file(file: Path) -> Iterator[IO[bytes]]:
    """Write a private file in the place of one that is there, which stays when the block raises. Raises CapflowError when it cannot be written."""
    try:
        with tempfile.NamedTemporaryFile(dir=file.absolute().parent, suffix=".new", delete=False) as stream:
            try:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
                Path(stream.name).replace(file)
            except BaseException:
                os.unlink(stream.name)  # noqa: PTH108
                raise
    except OSError as e:
        raise CapflowError(explain(f"{file} cannot be written", got=e.strerror or str(e))) from e
