"""The rows that a consumer wants of a frame, as the parts of a smaller frame."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from capflow.capture.frame import Block, Chunk, Frame, FrameHeader, Span
from capflow.capture.site import Site


def wanted_rows(frame: Frame, request: str | None = None) -> tuple[FrameHeader, list[Any]]:
    """Return a header and the rows of its blocks, with only what the consumer wants, of one request or of all.

    Chunks of the same sites are in one block. The header names no ends and no events. Its hash is not that of the rows.
    """
    header = msgspec.structs.replace(frame.header, finished=(), acted=())
    if frame.wants is None and request is None:
        return header, [memoryview(frame.payload).cast("B")]
    numbers: dict[str, int] = {}
    requests = []
    by_sites: dict[tuple[Site, ...], list[Chunk]] = {}
    for chunk in frame.chunks():
        if request in (None, chunk.request.id):
            if chunk.request.id not in numbers:
                numbers[chunk.request.id] = len(numbers)
                requests.append(chunk.request)
            by_sites.setdefault(chunk.sites, []).append(chunk)
    blocks, parts = [], []
    for sites, chunks in by_sites.items():
        spans, row = [], 0
        for chunk in chunks:
            length = chunk.rows.shape[1]
            spans.append(Span(numbers[chunk.request.id], chunk.start, length, row))
            row += length
        blocks.append(Block(sites, row, tuple(spans)))
        joined = np.ascontiguousarray(np.concatenate([chunk.rows for chunk in chunks], axis=1))
        parts.append(joined.view(np.uint8).data.cast("B"))
    nbytes = sum(len(part) for part in parts)
    return msgspec.structs.replace(header, requests=tuple(requests), blocks=tuple(blocks), payload_bytes=nbytes), parts
