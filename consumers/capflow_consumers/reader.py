"""Reading a captured data set: `capflow.open(path)`.

Needs numpy only. Rows are memory-mapped: opening a request reads its sidecar, and indexing a site reads that file's
header. Nothing is checked against the checksums until `verify` is called.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from capflow.errors import CapflowError, UsageError, explain
from capflow.frame import DTYPES
from capflow.site import HOOKS, Site
from capflow_consumers import layout
from capflow_consumers.slug import slug

_decoder = msgspec.json.Decoder(layout.Sidecar)
_READ_BYTES = 1 << 22

assert DTYPES["bfloat16"] == ml_dtypes.bfloat16


class Rows(NamedTuple):
    """A site's rows: `rows` `[n, hidden_size]` as stored, `positions` `[n]` int64, `token_ids` `[n]` int32."""

    rows: npt.NDArray[Any]
    positions: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int32]


class RequestCapture:
    """One request's directory; `capture[(12, "post_block")]` or `capture["post_block:12"]` gives a site's rows."""

    def __init__(self, path: Path, sidecar: layout.Sidecar) -> None:
        self.path = path
        self.sidecar = sidecar
        self._files = {entry.site: entry for entry in sidecar.sites}

    def __repr__(self) -> str:
        about = f"{len(self._files)} sites, {self.sidecar.rows} rows, {self.prompt_length} prompt tokens"
        return f"<capture {self.id!r}: {about}, {self.status}>"

    @property
    def id(self) -> str:
        """The request's id, exactly."""
        return self.sidecar.request

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites that have rows."""
        return tuple(self._files)

    @property
    def prompt_length(self) -> int:
        """How many tokens the prompt has."""
        return self.sidecar.prompt_length

    @property
    def computed_length(self) -> int:
        """How many tokens were computed: position `computed_length - 1` is the last that can have a row."""
        return self.sidecar.computed_length

    @property
    def status(self) -> str:
        """`ok` when every promised row is here; else `partial_error` or `error`, and `error` says what is missing."""
        return self.sidecar.capture_status

    @property
    def error(self) -> str | None:
        """What is missing."""
        return self.sidecar.error

    @property
    def budget_reached(self) -> bool:
        """Whether `max_rows` left out positions that were asked for and that the request has."""
        return self.sidecar.budget_reached

    @property
    def texts(self) -> dict[int, str]:
        """The token's text at each position where it is known."""
        return {run.start + i: text for run in self.sidecar.texts for i, text in enumerate(run.texts)}

    def __contains__(self, site: object) -> bool:
        return _site(site) in self._files

    def __getitem__(self, site: tuple[int, str] | str) -> Rows:
        """Return a site's rows, memory-mapped and read-only; raises UsageError when it has none."""
        entry = self._files.get(_site(site))
        if entry is None:
            have = ", ".join(map(str, self._files)) or "none"
            raise UsageError(
                explain(f"{self.path}: no rows at a site", got=str(_site(site)), expected=f"one of {have}")
            )
        file = self.path / entry.file
        dtype = entry.dtype or self.sidecar.dtype
        row_bytes = self.sidecar.hidden_size * DTYPES[dtype].itemsize
        self._check_header(file, entry, dtype, row_bytes)
        whole = np.memmap(file, np.uint8, "r").view(np.ndarray)
        ends = np.cumsum([layout.HEADER_BYTES, entry.rows * row_bytes, entry.rows * 8, entry.rows * 4])
        rows, positions, token_ids = (whole[start:end] for start, end in itertools.pairwise(ends))
        shape = (entry.rows, self.sidecar.hidden_size)
        return Rows(rows.view(DTYPES[dtype]).reshape(shape), positions.view(np.int64), token_ids.view(np.int32))

    def verify(self) -> None:
        """Read every file; raise CapflowError naming the first that is not what was written."""
        for entry in self.sidecar.sites:
            file = self.path / entry.file
            digest = xxhash.xxh3_64()
            try:
                with file.open("rb") as stream:
                    while part := stream.read(_READ_BYTES):
                        digest.update(part)
            except OSError as e:
                raise _damaged(file, e.strerror or str(e), "the file") from e
            if digest.hexdigest() != entry.xxh3_64:
                raise _damaged(file, f"checksum {digest.hexdigest()}", entry.xxh3_64)

    def _check_header(self, file: Path, entry: layout.SiteFile, dtype: str, row_bytes: int) -> None:
        expected = layout.header(entry.site, dtype, entry.rows, self.sidecar.hidden_size, row_bytes)
        try:
            with file.open("rb") as stream:
                header = stream.read(layout.HEADER_BYTES)
            size = file.stat().st_size
        except OSError as e:
            raise _damaged(file, e.strerror or str(e), "the file") from e
        if header != expected or size != layout.HEADER_BYTES + entry.rows * (row_bytes + 12):
            raise _damaged(
                file, f"{size} bytes or a header", f"{entry.bytes} bytes and the header the sidecar describes"
            )


class Dataset:
    """A root directory; `ds.requests()` names what is in it, `ds[request_id]` opens one.

    Requests published while it is open are seen. An id captured several times (`on_collision=suffix`) stands for its
    last capture; `captures` gives all of them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def requests(self) -> list[str]:
        """Return the ids of the requests, each once, in the order of their directories' names."""
        return list(dict.fromkeys(capture.id for capture in self))

    def captures(self, request_id: str) -> list[RequestCapture]:
        """Return every capture of an id, first to last."""
        name = slug(request_id)
        found = []
        number = 1
        while (path := self.path / (name if number == 1 else f"{name}~{number}")).is_dir():
            found.append(_open_request(path))
            number += 1
        return found

    def __iter__(self) -> Iterator[RequestCapture]:
        for path in sorted(self.path.iterdir()):
            if not path.name.startswith(".") and (path / layout.SIDECAR_NAME).is_file():
                yield _open_request(path)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<data set {str(self.path)!r}: {len(self)} captures>"

    def __contains__(self, request_id: object) -> bool:
        return isinstance(request_id, str) and (self.path / slug(request_id) / layout.SIDECAR_NAME).is_file()

    def __getitem__(self, request_id: str) -> RequestCapture:
        """Return the capture of a request; raises UsageError when there is none."""
        if request_id not in self:
            do = "requests() lists what is there; a request appears when it is over"
            raise UsageError(explain(f"{self.path}: no such request", got=request_id, do=do))
        return self.captures(request_id)[-1]

    def verify(self) -> None:
        """Check every file of every request; raise CapflowError naming the first that is damaged."""
        for capture in self:
            capture.verify()


def open_dataset(path: str | Path) -> Dataset:
    """Return the data set that the filesystem consumer wrote to `path`.

    Raises UsageError when there is no such directory, or something else is in it.
    """
    root = Path(path).absolute()
    if not root.is_dir():
        got = "a file" if root.exists() else "nothing"
        raise UsageError(explain(f"{root}", got=got, expected="the root directory of a captured data set"))
    if (root / layout.SIDECAR_NAME).is_file():
        do = f"open {root.parent} and index it with the request's id"
        raise UsageError(explain(f"{root}", got="one request's directory", expected="the root above it", do=do))
    if (root / ".lock").is_file() or any(root.glob(f"*/{layout.SIDECAR_NAME}")):
        return Dataset(root)
    expected = f"directories with a {layout.SIDECAR_NAME}, as the filesystem consumer writes"
    raise UsageError(explain(f"{root} is not a captured data set", expected=expected))


def _open_request(path: Path) -> RequestCapture:
    file = path / layout.SIDECAR_NAME
    try:
        sidecar = _decoder.decode(file.read_bytes())
    except (OSError, msgspec.MsgspecError) as e:
        raise _damaged(file, str(e), "a sidecar") from e
    if sidecar.format != layout.FORMAT:
        do = f"read it with capflow {sidecar.capflow}"
        raise UsageError(explain(f"{file} format", got=sidecar.format, expected=str(layout.FORMAT), do=do))
    if any(entry.hook not in HOOKS or entry.file != layout.file_name(entry.site) for entry in sidecar.sites):
        raise _damaged(file, "a file that is no site's", "names like post_block.000.safetensors")
    if not {sidecar.dtype, *(entry.dtype for entry in sidecar.sites)} <= {None, *DTYPES}:
        raise _damaged(file, "a dtype that rows do not have", f"one of {', '.join(DTYPES)}")
    return RequestCapture(path, sidecar)


def _site(value: object) -> Site:
    if isinstance(value, str):
        return Site.parse(value)
    if isinstance(value, tuple) and len(value) == 2:
        return Site(*value)
    raise UsageError(explain("site", got=value, expected='(layer, hook) or "hook:layer"'))


def _damaged(file: Path, got: str, expected: str) -> CapflowError:
    return CapflowError(explain(str(file), got=got, expected=expected, do="restore it from a copy or capture it again"))
