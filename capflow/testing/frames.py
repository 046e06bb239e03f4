"""Builders of valid frames. The values of a row identify its place.

The row of a request at a position and site is `row_of(request, site, position, hidden)`. A row that is misplaced,
repeated or taken from another request differs from the expected row, but for one in 2,039.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from capflow.capture.dtypes import DTYPES
from capflow.capture.frame import Block, Chunk, Finished, Frame, FrameHeader, Rank, RequestRows, Span
from capflow.capture.model import ModelInfo, grouped, width_of
from capflow.capture.site import STREAM_HOOKS, Site
from capflow.capture.spec import Capture
from capflow.protocol.message import Hello

BOOT = "boot-1"
FIRST = Rank(0, 0, 0)


def row_of(
    request: str, site: Site | tuple[int, str], position: int, hidden: int = 8, dtype: str = "float32"
) -> npt.NDArray[Any]:
    """Return the row `[hidden]` of a request at a site and a position; dtypes of 16 bits round it."""
    layer, hook = site
    where = zlib.crc32(f"{request}/{hook}/{layer}/{position}".encode()) % 2039
    row = np.arange(hidden, dtype=np.float32) / 16 + where / 8
    return row.astype(DTYPES[dtype])


def token_of(request: str, position: int) -> int:
    """Return the token id of a request's position."""
    return zlib.crc32(f"{request}/{position}".encode()) % 50_000


def make_frame(
    requests: Sequence[tuple[str, int, int, int]] = (("r1", 4, 0, 4),),
    sites: Iterable[Site | tuple[int, str]] = ((0, "post_block"),),
    *,
    hidden: int = 8,
    dtype: str = "float32",
    seq: int = 1,
    finished: Iterable[Finished] = (),
    engine: str = "engine-1",
    boot: str = BOOT,
    rank: Rank = FIRST,
    step: int | None = None,
    texts: bool = False,
    captures: dict[str, Capture] | None = None,
    incarnation: str = "",
    step_tokens: int | None = None,
    steered: dict[str, tuple[int, ...]] | None = None,
    shape: tuple[int, ...] = (),
    shapes: Mapping[Site, tuple[int, ...]] = MappingProxyType({}),
    within: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> Frame:
    """Return a sealed frame: `requests` are `(id, prompt_length, start, length)`.

    Rows are `row_of(...)`; a request of length 0 is not in the frame. Sites with the same shape and positions are a
    block; there is one block unless `shapes` or `within` says otherwise.

    captures: the requests' own specs.
    incarnation: the incarnation of each request.
    steered: the runs of steered positions of each request; without it, frames do not say what was steered.
    shape: the shape of a row, if it is not `[hidden]`.
    shapes: the shapes of rows at sites where it is not `shape`.
    within: hooks that have rows of some positions only, `(first, end)`, of every request.
    """
    asked = [request for request in requests if request[3] > 0]
    groups: dict[tuple[tuple[int, ...], tuple[int, int]], list[Site]] = {}
    for site in (Site(*site) for site in sites):
        bounds = within.get(site.hook, (0, sys.maxsize))
        groups.setdefault((shapes.get(site, shape), bounds), []).append(site)
    blocks, payload, shaped = [], [], []
    for (own, bounds), places in groups.items():
        made = _block(asked, tuple(places), width_of(own, hidden), dtype, bounds)
        if made is not None:
            blocks.append(made[0])
            payload.append(made[1].tobytes())
            shaped.append(own)
    parts = []
    for request, prompt_length, start, length in asked:
        tokens = tuple(token_of(request, position) for position in range(start, start + length))
        parts.append(
            RequestRows(
                id=request,
                prompt_length=prompt_length,
                start=start,
                token_ids=tokens,
                texts=tuple(f" {token}" for token in tokens) if texts else (),
                capture=(captures or {}).get(request),
                incarnation=incarnation,
                steered=None if steered is None else steered.get(request, ()),
            )
        )
    rows_total = sum(length for *_, length in asked)
    header = FrameHeader(
        engine=engine,
        boot=boot,
        rank=rank,
        seq=seq,
        step=seq if step is None else step,
        time_ns=1_700_000_000_000_000_000 + seq,
        dtype=dtype,
        hidden_size=hidden,
        requests=tuple(parts),
        blocks=tuple(blocks),
        finished=tuple(finished),
        step_tokens=rows_total if step_tokens is None else step_tokens,
        step_requests=len(asked),
        shapes=tuple(shaped) if any(shaped) else msgspec.UNSET,
    )
    return Frame.seal(header, b"".join(payload))


def _block(
    requests: Sequence[tuple[str, int, int, int]],
    sites: tuple[Site, ...],
    width: int,
    dtype: str,
    bounds: tuple[int, int],
) -> tuple[Block, npt.NDArray[Any]] | None:
    """Return a block with the positions of requests within bounds, and its rows; None if there are none."""
    spans, row = [], 0
    for index, (_, _, start, length) in enumerate(requests):
        first, end = max(start, bounds[0]), min(start + length, bounds[1])
        if first < end:
            spans.append(Span(index, first, end - first, row))
            row += end - first
    rows = np.empty((len(sites), row, width), dtype=DTYPES[dtype])
    for span in spans:
        for offset in range(span.length):
            for number, site in enumerate(sites):
                name = requests[span.request][0]
                rows[number, span.row + offset] = row_of(name, site, span.start + offset, width, dtype)
    return (Block(sites, row, tuple(spans)), rows) if spans else None


def make_finished(
    request: str = "r1",
    prompt_length: int = 4,
    computed_length: int = 4,
    *,
    rows: int | None = None,
    status: str = "stop",
    dropped: tuple[Any, ...] = (),
    capture: Capture | None = None,
    acted: tuple[Any, ...] = (),
    incarnation: str = "",
) -> Finished:
    """Return the end of a request; `rows` is one per computed token by default."""
    return Finished(
        id=request,
        status=status,
        prompt_length=prompt_length,
        computed_length=computed_length,
        rows=computed_length if rows is None else rows,
        dropped=dropped,
        capture=capture,
        acted=acted,
        incarnation=incarnation,
    )


def make_model(
    num_layers: int = 4,
    hidden: int = 8,
    *,
    stages: int = 1,
    hooks: Sequence[str] = STREAM_HOOKS,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> ModelInfo:
    """Return a model that is tapped at each of `hooks` in every layer.

    shapes: the shape of a row at further hooks, such as `{"heads": (2, 8)}`.
    """
    own = {Site(layer, hook): shape for layer in range(num_layers) for hook, shape in (shapes or {}).items()}
    sites = (*(Site(layer, hook) for layer in range(num_layers) for hook in hooks), *own)
    return ModelInfo("test-model", num_layers, hidden, "float32", sites, stages, shapes=grouped(own))


def make_hello(
    engine: str = "engine-1",
    boot: str = BOOT,
    *,
    role: Any = "worker",
    rank: Rank = FIRST,
    model: ModelInfo | None = None,
) -> Hello:
    """Return the Hello of a worker or a scheduler."""
    return Hello(role=role, engine=engine, boot=boot, rank=rank, model=model or make_model())


def assert_rows(chunk: Chunk, dtype: str = "float32") -> int:
    """Assert that every row of a chunk belongs to its place; return the number of rows."""
    count, length, width = chunk.rows.shape
    assert count == len(chunk.sites)
    assert len(chunk.token_ids) == length
    for number, site in enumerate(chunk.sites):
        expected = np.empty((length, width), np.float32)
        for offset in range(length):
            expected[offset] = row_of(chunk.request.id, site, chunk.start + offset, width, dtype)
        np.testing.assert_array_equal(chunk.rows[number].astype(np.float32), expected, err_msg=str(site))
    assert chunk.token_ids == tuple(token_of(chunk.request.id, chunk.start + i) for i in range(length))
    return int(count * length)
