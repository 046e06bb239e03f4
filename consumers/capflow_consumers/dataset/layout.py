"""The layout of a captured data set on disk, which the writer and the reader share.

    ROOT/
      REQUEST/                        the slug of the request's id; see `capflow_consumers.dataset.names`
        rows.safetensors              packed: all sites in one file
        post_block.012.safetensors    per_file: one file for each site
        request.json                  the sidecar
      shard~….parquet                 sharded: many requests in one file; see `capflow_consumers.dataset.shards.stream`
      .partial-…/, .lock              the writer's own; never part of the data set
      .damaged-shard~….parquet        a dead writer's shard with damage; shard~….parquet has its whole requests

A packed file holds three tensors for each site. Their names begin with `HOOK.LAYER.`, and sites come in the order of
the sidecar.

A site's own file is plain safetensors too. Its header is padded with spaces to `HEADER_BYTES`. So rows are aligned to
64 bytes, and can be written before their number is known.

The three tensors of a site, in this order:

* `rows` `[n, hidden_size]`, in the model's dtype, bit for bit as captured, or in the dtype that a spec asked for; at a
  hook whose rows have a shape of their own `[n, *shape]`, such as `[n, heads, head_dim]`
* `positions` `[n]` int64
* `token_ids` `[n]` int32, -1 where the engine sent none

The sidecar is a `Sidecar` as JSON, with its own hash. A request's directory gets its name in one rename, when
everything in it is written. It never changes after that.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import xxhash

from capflow.capture.attention import AttentionForm
from capflow.capture.dtypes import DTYPES, SAFETENSORS_DTYPES
from capflow.capture.frame import Rank, Weights
from capflow.capture.model import Shape
from capflow.capture.result import Status
from capflow.capture.router import RouterForm
from capflow.capture.site import HOOKS, Site
from capflow.errors import UsageError, explain
from capflow.limits import Total
from capflow.steering.action import Answered
from capflow.text import jsontext

Layout = Literal["per_file", "packed", "sharded"]

Quantization = Literal["int8", "float8_e4m3"]
"""What numbers are rounded to; see `capflow_consumers.dataset.shards.quantization`."""

FORMAT = 1
FORMAT_SHAPED = 2
"""The format of a capture with rows of another shape than the stream's; readers of format 1 alone refuse it."""

# Enough for the largest numbers that a sidecar may hold.
HEADER_BYTES = 512
SIDECAR_NAME = "request.json"
PARTIAL_PREFIX = ".partial-"
RUNNING_NAME = "running.jsonl"
PACKED_NAME = "rows.safetensors"
SHARD_PATTERN = "shard~*.parquet"


class SiteFile(msgspec.Struct, frozen=True):
    """One site's file; with the layout `packed`, the site's part of the one file.

    rows_expected: how many rows the capture spec asked for; None where the writer did not know.
    bytes: the length of the file or part.
    xxh3_64: the hash of the file or part.
    dtype: of the rows; None where it is the sidecar's.
    rows_overflowed: how many rows have a number too large for the dtype; it is stored as infinite.
    offset: where a part begins in its file, bytes; with the layout `sharded`, the index of the site's first row among
        the request's.
    shape: the shape of a row; left out where it is `[hidden_size]`.
    attention: at `q`, how attention makes its weights; left out where the engine did not say it, or has no tap at `k`.
    router: at `router`, how experts are chosen; left out where the engine did not say it.
    quantization: in a shard, what the rows are rounded to; `dtype` is then float32, in which they are read. Left out
        where they are not rounded.
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
    shape: Shape | msgspec.UnsetType = msgspec.UNSET
    attention: AttentionForm | msgspec.UnsetType = msgspec.UNSET
    router: RouterForm | msgspec.UnsetType = msgspec.UNSET
    quantization: Quantization | msgspec.UnsetType = msgspec.UNSET

    @property
    def site(self) -> Site:
        """The site whose rows the file holds."""
        return Site(self.layer, self.hook)

    def row_shape(self, hidden_size: int) -> tuple[int, ...]:
        """Return the shape of a row in a capture of this width."""
        return self.shape or (hidden_size,)


class SitePart(NamedTuple):
    """What a site's tensors are: `[rows, *shape]` of a dtype, and as many positions and token ids."""

    site: Site
    dtype: str
    rows: int
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """The length of a row, bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """The length of the three tensors, bytes."""
        return self.rows * (self.row_bytes + 12)


class TokenRun(msgspec.Struct, frozen=True):
    """The texts of the tokens at positions `start`, `start + 1` and so on."""

    start: Total
    texts: list[str]


class FrameRange(msgspec.Struct, frozen=True):
    """Frames of one boot of a worker that have rows of the request, from `first` to `last` without a gap."""

    boot: str
    rank: Rank
    first: Total
    last: Total


class SteeringEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event of the request's steering; the fields are those of `capflow.Answered`.

    sites: as `HOOK:LAYER`.
    outcome: sidecars of earlier versions lack it; without a step it is `rejected`, which may have been `unknown`.
    """

    id: str
    kind: str
    by: str
    time_ns: int
    step: Total | None = None
    position: Total | None = None
    score: float | None = None
    threshold: float | None = None
    label: str = ""
    sites: list[str] = []
    reason: str = ""
    target: str = ""
    scale: float | None = None
    outcome: str = ""

    def __post_init__(self) -> None:
        """Fill an outcome that is not stored."""
        if not self.outcome:
            msgspec.structs.force_setattr(self, "outcome", "rejected" if self.step is None else "applied")

    @classmethod
    def of(cls, answered: Answered) -> SteeringEvent:
        """Return an event as it is stored."""
        names = ("step", "position", "score", "threshold", "label", "reason", "target", "scale", "outcome")
        about = {name: getattr(answered, name) for name in names}
        sites = [str(site) for site in answered.sites]
        return cls(answered.id, answered.kind, answered.asked_by, answered.time_ns, sites=sites, **about)


class Sidecar(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `request.json`.

    capflow: the version that wrote it.
    request: the exact id.
    engine: the id of the engine that ran the request.
    dtype: the dtype in which the rows were captured.
    status: how the request ended: `stop`, `length`, `abort` or `error`.
    capture_status, error: whether every promised row is here, and what is missing.
    dropped: `(rows, reason)` of the rows lost on the way.
    budget_reached: whether `max_rows` left out positions of the request.
    sources: the frames that the rows came in.
    capture: with the layout `sharded`, which capture of its id it is, from 1.
    tag: the tag of the request's spec.
    steered: the steered positions, as runs `first, end, first, end, …`; None if the engine did not say it, also in
        sidecars of earlier versions.
    events: the events of its steering, in order; empty in sidecars of earlier versions.
    events_lost: further events, for which there was no room.
    adapter: the name of the LoRA adapter that the request ran with; empty for none.
    weights: the weights that computed its rows, in order; empty in sidecars of earlier versions.
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
    steered: list[Total] | None = None
    events: list[SteeringEvent] = []
    events_lost: Total = 0
    adapter: str = ""
    weights: list[Weights] = []


_encoder = msgspec.json.Encoder()
_CHECKED = re.compile(rb'(.*),"xxh3_64":"([0-9a-f]{16})"\}', re.DOTALL)
_WITHIN = re.compile(rb'\{"format":\d+,"capflow":".{0,100}?","request":.*?,"xxh3_64":"[0-9a-f]{16}"\}', re.DOTALL)


def write_sidecar(sidecar: Sidecar) -> bytes:
    """Encode a sidecar as JSON. Its last key, `xxh3_64`, is the hash of everything before that key."""
    text = _encoder.encode(sidecar)[:-1]
    return text + b',"xxh3_64":"' + xxhash.xxh3_64_hexdigest(text).encode() + b'"}'


def read_sidecar(text: bytes) -> Sidecar:
    """Decode a sidecar.

    Raises UsageError for one of another format, and ValueError for one that is damaged or holds unknown hooks or
    dtypes.
    """
    match = _CHECKED.fullmatch(text)
    if match is None or xxhash.xxh3_64_hexdigest(match[1]).encode() != match[2]:
        raise ValueError("a checksum that does not match")
    try:
        sidecar = jsontext.decode(text, Sidecar)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise ValueError(str(e)) from e
    if sidecar.format not in (FORMAT, FORMAT_SHAPED):
        do = f"read it with capflow {sidecar.capflow}"
        raise UsageError(explain("format", got=sidecar.format, expected=f"{FORMAT} or {FORMAT_SHAPED}", do=do))
    if any(entry.hook not in HOOKS for entry in sidecar.sites):
        raise ValueError(f"an unknown hook point, expected one of {', '.join(HOOKS)}")
    if not {sidecar.dtype, *(entry.dtype for entry in sidecar.sites)} <= {None, *DTYPES}:
        raise ValueError(f"an unknown dtype, expected one of {', '.join(DTYPES)}")
    return sidecar


def sidecars_within(data: Any) -> Iterator[tuple[int, Sidecar]]:
    """Search bytes for whole sidecars; yield the offset where each ends, and the sidecar."""
    for match in _WITHIN.finditer(memoryview(data)):
        with contextlib.suppress(ValueError):
            yield match.end(), read_sidecar(bytes(match[0]))


def file_name(site: Site) -> str:
    """Return the name of a site's file."""
    return f"{site.hook}.{site.layer:03d}.safetensors"


@functools.lru_cache(maxsize=1024)
def header(part: SitePart) -> bytes:
    """Return the first `HEADER_BYTES` of a site's file."""
    tensors: dict[str, Any] = {"__metadata__": {"site": str(part.site)}}
    _add_tensors(tensors, "", 0, part)
    text = _encoder.encode(tensors)
    length = HEADER_BYTES - 8
    assert len(text) <= length
    return length.to_bytes(8, "little") + text.ljust(length)


def packed_header(parts: Sequence[SitePart]) -> tuple[bytes, list[int]]:
    """Return the header of a packed file, and the offset of each site's part in it.

    The header is padded to a multiple of 64 bytes.
    """
    tensors: dict[str, Any] = {}
    begins = []
    end = 0
    for part in parts:
        begins.append(end)
        end = _add_tensors(tensors, f"{part.site.hook}.{part.site.layer:03d}.", end, part)
    text = _encoder.encode(tensors)
    length = len(text) + -(len(text) + 8) % 64
    return length.to_bytes(8, "little") + text.ljust(length), [length + 8 + begin for begin in begins]


def _add_tensors(tensors: dict[str, Any], prefix: str, begin: int, part: SitePart) -> int:
    """Add the three tensors of a site that begins at `begin`; return where it ends."""
    rows = part.rows
    for name, kind, shape, size in (
        ("rows", SAFETENSORS_DTYPES[part.dtype], [rows, *part.shape], rows * part.row_bytes),
        ("positions", "I64", [rows], rows * 8),
        ("token_ids", "I32", [rows], rows * 4),
    ):
        tensors[prefix + name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, begin + size]}
        begin += size
    return begin
