"""The rows of running requests: `running.jsonl`, beside the files that rows are appended to.

    {"request": …, "engine": …, "model": …, "dtype": …, "hidden_size": …, "prompt_length": …, "dtypes": …,
     "attention": …, "router": …}
    {"sites": ["post_block:12", …], "spans": [[0, 6]], "token_ids": […]}         for each time that rows were appended
    {"sites": ["heads:12"], "spans": [[0, 6]], "token_ids": […], "shape": [4, 256]}
    …

Invariant: a line is complete only after its rows are in the files, in the order of the lines. So a reader that uses
complete lines only sees whole rows only.
The file is removed before the request gets its name in the data set.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import msgspec
import numpy as np

from capflow import limits
from capflow.capture.attention import AttentionForms, form_of
from capflow.capture.dtypes import DTYPES
from capflow.capture.model import Shape
from capflow.capture.router import RouterForms
from capflow.capture.site import Site, site_named
from capflow.errors import UsageError, explain
from capflow.files import create_private, open_regular, read_regular
from capflow.text import jsontext
from capflow_consumers.dataset import layout
from capflow_consumers.dataset.capture import Rows
from capflow_consumers.dataset.derived import DerivedRows
from capflow_consumers.dataset.disk import found_in, mapped
from capflow_consumers.dataset.rows import Piece, TokenLog

Spans = tuple[tuple[int, int], ...]


class About(msgspec.Struct, frozen=True):
    """A running request.

    dtypes: the dtypes of sites whose rows have another one than `dtype`, by `hook:layer`.
    attention, router: as in `ModelInfo`.
    """

    request: str
    engine: str
    model: str
    dtype: str
    hidden_size: int
    prompt_length: int
    dtypes: dict[str, str] = {}
    attention: AttentionForms | msgspec.UnsetType = msgspec.UNSET
    router: RouterForms | msgspec.UnsetType = msgspec.UNSET


class Added(msgspec.Struct, frozen=True):
    """Rows that were appended to the files of some sites.

    spans: `(start, stop)` of their positions.
    token_ids: one for each position.
    shape: the shape of a row; left out where it is `[hidden_size]`.
    """

    sites: list[str]
    spans: Spans
    token_ids: list[int]
    shape: Shape | msgspec.UnsetType = msgspec.UNSET


_encoder = msgspec.json.Encoder()


class RunningCapture(DerivedRows):
    """The rows of a running request, as far as they were written when it was opened; indexed like a capture.

    about: the request, its engine and its model.
    """

    def __init__(self, path: Path, about: About, added: Sequence[Added]) -> None:
        self.path = path
        self.about = about
        self._added = added
        self.sites = tuple(sorted({Site.parse(site) for lines in added for site in lines.sites}))

    @property
    def id(self) -> str:
        """The request's id, exactly."""
        return self.about.request

    @property
    def prompt_length(self) -> int:
        """The number of tokens of the prompt."""
        return self.about.prompt_length

    @property
    def computed_length(self) -> int:
        """The number of tokens up to the last that has a row so far."""
        return max((stop for lines in self._added for _, stop in lines.spans), default=0)

    def _forms(self, name: Literal["attention", "router"]) -> Mapping[Site, Any]:
        groups = getattr(self.about, name)
        return {site: form_of(groups, site.layer) or msgspec.UNSET for site in self.sites}

    def __getitem__(self, site: tuple[int, str] | str) -> Rows:
        """Return the rows of a site so far, memory-mapped.

        Raises UsageError when there are none, or the request has ended.
        """
        wanted = site_named(site, self.sites)
        lines = [line for line in self._added if str(wanted) in line.sites]
        dtype = DTYPES[self.about.dtypes.get(str(wanted), self.about.dtype)]
        spans = [span for line in lines for span in line.spans]
        rows = sum(stop - start for start, stop in spans)
        do = "look for the request in the data set if it has ended"
        gone = UsageError(explain(f"{self.path}: no rows of {self.id} at a site", got=str(wanted), do=do))
        if not spans:
            raise gone
        shape = lines[0].shape or (self.about.hidden_size,)
        row_bytes = math.prod(shape) * dtype.itemsize
        try:
            whole = mapped(self.path / layout.file_name(wanted))
        except FileNotFoundError:
            raise gone from None
        # A network file system may show the file's new length late.
        rows = min(rows, (len(whole) - layout.HEADER_BYTES) // row_bytes)
        values = whole[layout.HEADER_BYTES : layout.HEADER_BYTES + rows * row_bytes]
        positions = np.concatenate([np.arange(*span, dtype=np.int64) for span in spans])[:rows]
        token_ids = np.array([token for line in lines for token in line.token_ids], np.int32)[:rows]
        return Rows(values.view(dtype).reshape(rows, math.prod(shape)), positions, token_ids, shape)


def tell(
    directory: Path,
    about: About,
    pieces: Mapping[Site, Sequence[Piece]],
    tokens: TokenLog,
    mode: int,
    shapes: Mapping[Site, tuple[int, ...]] = MappingProxyType({}),
) -> None:
    """Append to `running.jsonl` which rows were appended to the files of a request. Raises OSError.

    mode: the mode of the file.
    shapes: the shapes of the rows that are not of `[hidden_size]`.
    """
    groups: dict[tuple[Spans, tuple[int, ...]], list[str]] = {}
    for site, parts in pieces.items():
        spans = tuple(span for part in parts for span in part.spans)
        groups.setdefault((spans, shapes.get(site, ())), []).append(str(site))
    fd = create_private(directory / layout.RUNNING_NAME, os.O_WRONLY | os.O_APPEND, mode)
    try:
        size = os.fstat(fd).st_size
        lines = [] if size else [_encoder.encode(about)]
        for (spans, shape), sites in groups.items():
            token_ids = [int(token) for span in spans for token in tokens.ids(*span)]
            lines.append(_encoder.encode(Added(sites, spans, token_ids, shape or msgspec.UNSET)))
        text = b"".join(line + b"\n" for line in lines)
        if os.write(fd, text) < len(text):
            os.ftruncate(fd, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))
    finally:
        os.close(fd)


def running(root: Path) -> Iterator[RunningCapture]:
    """Yield the running requests under a root that have rows in files. Those of dead writers are left out."""
    for writer in sorted(root.glob(layout.PARTIAL_PREFIX + "*")):
        if _lives(writer):
            for file in sorted(found_in(writer, f"*/{layout.RUNNING_NAME}")):
                try:
                    first, *lines = read_regular(file, limits.SIDECAR_BYTES_MAX).split(b"\n")[:-1]
                    about = jsontext.decode(first, About)
                    added = [jsontext.decode(line, Added) for line in lines]
                except (OSError, ValueError, msgspec.MsgspecError):  # it has ended, or no line is complete
                    continue
                yield RunningCapture(file.parent, about, added)


def _lives(writer: Path) -> bool:
    try:
        fd = open_regular(writer / "lock")
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
