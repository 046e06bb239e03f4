"""The layout of a captured data set on disk, which the writer and the reader share.

    ROOT/
      REQUEST/                        the slug of the request's id; see `capflow_consumers.dataset.names`
        rows.safetensors              packed: all sites in one file
        post_block.012.safetensors    per_file: one file for each site
        request.json                  the sidecar
      shard~….parquet                 sharded: many requests in one file; see `capflow_consumers.dataset.shards.stream`
      .partial-…/, .lock              the writer's own; never part of the data set
      .damaged-shard~….parquet        a dead writer's shard of which something cannot be read; what can be is in the one of its name

A packed file holds, for each site, the tensors named below with `HOOK.LAYER.` before their names, site after site in the order of the sidecar. A site's own
file is plain safetensors too. Its header, padded with spaces, fills the first `HEADER_BYTES`, so that rows are
aligned to 64 bytes and can be written before their number is known. It holds `rows` `[n, hidden_size]` in the model's dtype, bit
for bit as captured, or in the dtype that a spec asked for, then `positions` `[n]` int64, then `token_ids` `[n]` int32 (-1
where the engine did not say).

The sidecar is a `Sidecar` as JSON, with its own hash. A request's directory appears under its name in one rename, when everything in it is
written, and is never changed after.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
import xxhash

from capflow.capture.dtypes import DTYPES, SAFETENSORS_DTYPES
from capflow.capture.frame import Rank
from capflow.capture.result import Status
from capflow.capture.site import HOOKS, Site
from capflow.limits import Total
from capflow.text import jsontext

Layout = Literal["per_file", "packed", "sharded"]

FORMAT = 1
HEADER_BYTES = 512  # which the largest numbers of a sidecar fill
SIDECAR_NAME = "request.json"
PARTIAL_PREFIX = ".partial-"
RUNNING_NAME = "running.jsonl"
PACKED_NAME = "rows.safetensors"


class SiteFile(msgspec.Struct, frozen=True):
    """One site's file, or with the layout `packed` its part of the one file.

    rows_expected is what the capture spec asked for, where the writer knew. bytes is the length of the file or part,
    xxh3_64 is of it, offset is where a part begins. dtype is that of the rows, None where it is the sidecar's.

    rows_overflowed: rows with a number too large for it, stored as infinite.
    """

    layer: Total
    hook: str
    file: str
    rows: Total
    rows_expected: Total | None
    bytes: Total
    xxh3_64: str
    dtype: str | None = None
    rows_overflowed: Total = 0
    offset: Total = 0

    @property
    def site(self) -> Site:
        """The site whose rows the file holds."""
        return Site(self.layer, self.hook)


class TokenRun(msgspec.Struct, frozen=True):
    """The texts of the tokens at positions `start, start+1, …`."""

    start: Total
    texts: list[str]


class FrameRange(msgspec.Struct, frozen=True):
    """Frames of one boot of a worker that have rows of the request, without a gap from the first to the last."""

    boot: str
    rank: Rank
    first: Total
    last: Total


class Sidecar(msgspec.Struct, frozen=True, kw_only=True):
    """What `request.json` holds.

    request is the exact id. status is how the request ended (`stop`, `length`, `abort`, `error`); capture_status and
    error say whether every promised row is here; sources, which frames they came in; dropped is `[rows, reason]` for
    what was lost on the way. dtype is that in which the rows were captured.

    budget_reached: `max_rows` left out positions that the request had.
    capture: with the layout `sharded`, the number of the capture in its shard.
    tag: of the request's spec.
    """

    format: int = FORMAT
    capflow: str
    request: str
    engine: str
    model: str
    dtype: str
    hidden_size: Total
    prompt_length: Total
    computed_length: Total
    status: str
    capture_status: Status
    error: str | None
    dropped: list[tuple[Total, str]]
    rows: Total
    budget_reached: bool = False
    sites: list[SiteFile]
    texts: list[TokenRun]
    sources: list[FrameRange] = []
    layout: Layout = "per_file"
    capture: Total | None = None
    tag: str = ""


_encoder = msgspec.json.Encoder()
_CHECKED = re.compile(rb'(.*),"xxh3_64":"([0-9a-f]{16})"\}', re.DOTALL)
_WITHIN = re.compile(rb'\{"format":\d+,"capflow":".{0,100}?","request":.*?,"xxh3_64":"[0-9a-f]{16}"\}', re.DOTALL)


def write_sidecar(sidecar: Sidecar) -> bytes:
    """Return a sidecar as JSON whose last key, `xxh3_64`, is the hash of what stands before it."""
    text = _encoder.encode(sidecar)[:-1]
    return text + b',"xxh3_64":"' + xxhash.xxh3_64_hexdigest(text).encode() + b'"}'


def check_sidecar(text: bytes) -> None:
    """Raise ValueError when a sidecar's hash is not its own."""
    found = _CHECKED.fullmatch(text)
    if found is None or xxhash.xxh3_64_hexdigest(found[1]).encode() != found[2]:
        raise ValueError("another checksum of the sidecar")


def read_sidecar(text: bytes) -> Sidecar:
    """Return the sidecar that JSON says; raises ValueError when it is none that can be trusted."""
    check_sidecar(text)
    try:
        sidecar = jsontext.decode(text, Sidecar)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise ValueError(str(e)) from e
    if any(entry.hook not in HOOKS for entry in sidecar.sites):
        raise ValueError("a hook point that there is not")
    if not {sidecar.dtype, *(entry.dtype for entry in sidecar.sites)} <= {None, *DTYPES}:
        raise ValueError(f"a dtype that rows do not have, expected one of {', '.join(DTYPES)}")
    return sidecar


def sidecars_within(data: Any) -> Iterator[tuple[int, Sidecar]]:
    """Yield the sidecars that bytes hold, wherever these lie, each with where it ends."""
    for found in _WITHIN.finditer(memoryview(data)):
        with contextlib.suppress(ValueError):
            yield found.end(), read_sidecar(bytes(found[0]))


def file_name(site: Site) -> str:
    """Return the name of a site's file."""
    return f"{site.hook}.{site.layer:03d}.safetensors"


def header(site: Site, dtype: str, rows: int, hidden_size: int, row_bytes: int) -> bytes:
    """Return the first `HEADER_BYTES` of a site's file."""
    tensors: dict[str, Any] = {"__metadata__": {"site": str(site)}}
    _add_tensors(tensors, "", 0, dtype, rows, hidden_size, row_bytes)
    text = json.dumps(tensors, separators=(",", ":")).encode()
    length = HEADER_BYTES - 8
    assert len(text) <= length
    return length.to_bytes(8, "little") + text.ljust(length)


def packed_header(sites: Sequence[tuple[Site, str, int, int]], hidden_size: int) -> tuple[bytes, list[int]]:
    """Return the header of a packed file, and where each site's part begins in it.

    sites: of each its dtype, its rows and a row's bytes. The header is filled up to a multiple of 64 bytes.
    """
    tensors: dict[str, Any] = {}
    begins = []
    end = 0
    for site, dtype, rows, row_bytes in sites:
        begins.append(end)
        end = _add_tensors(tensors, f"{site.hook}.{site.layer:03d}.", end, dtype, rows, hidden_size, row_bytes)
    text = json.dumps(tensors, separators=(",", ":")).encode()
    length = len(text) + -(len(text) + 8) % 64
    return length.to_bytes(8, "little") + text.ljust(length), [length + 8 + begin for begin in begins]


def part_bytes(rows: int, row_bytes: int) -> int:
    """Return how long the tensors of one site are."""
    return rows * (row_bytes + 12)


def _add_tensors(
    tensors: dict[str, Any], prefix: str, begin: int, dtype: str, rows: int, hidden_size: int, row_bytes: int
) -> int:
    """Describe the three tensors of a site that begins at `begin`; return where it ends."""
    for name, kind, shape, size in (
        ("rows", SAFETENSORS_DTYPES[dtype], [rows, hidden_size], rows * row_bytes),
        ("positions", "I64", [rows], rows * 8),
        ("token_ids", "I32", [rows], rows * 4),
    ):
        tensors[prefix + name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, begin + size]}
        begin += size
    return begin
