"""Exports a data set as one plain safetensors file for each capture.

`NAME.safetensors` has for each site, such as `post_block.012`, the rows `post_block.012.rows` `[n, hidden_size]` bit for bit as stored,
`post_block.012.positions` `[n]` int64 and `post_block.012.token_ids` `[n]` int32; the header's `__metadata__` says of the request what
`METADATA` names, as text. NAME is the directory name that the request's id has in a data set; a second capture of it has `~2`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from capflow.capture.dtypes import DTYPES, SAFETENSORS_DTYPES
from capflow.capture.site import Site
from capflow_consumers.dataset.names import slug
from capflow_consumers.dataset.reader import Dataset, RequestCapture
from capflow_consumers.export.destination import Destination

METADATA = ("request", "model", "prompt_length", "computed_length", "status", "capture_status", "error")
_DTYPES = {**SAFETENSORS_DTYPES, "int64": "I64", "int32": "I32"}
_SIZES = {**{name: dtype.itemsize for name, dtype in DTYPES.items()}, "int64": 8, "int32": 4}
_ALIGNMENT = 64
_PART_BYTES = 8 << 20


def to_safetensors(
    dataset: Dataset, sites: Sequence[Site], destination: Destination, on_capture: Callable[[], object]
) -> int:
    """Write each capture that is not there yet; return how many were written.

    on_capture: called after each of them all.
    """
    written = 0
    numbers: Counter[str] = Counter()
    for capture in dataset:
        numbers[capture.id] += 1
        number = numbers[capture.id]
        name = slug(capture.id) + (f"~{number}" if number > 1 else "") + ".safetensors"
        if not destination.has(name):
            with destination.writing(name) as path, path.open("wb") as stream:
                _write(capture, [site for site in sites if site in capture], stream)
            written += 1
        on_capture()
    return written


def _write(capture: RequestCapture, sites: Sequence[Site], stream: Any) -> None:
    """Write a capture's rows at these sites; they are read a part at a time, once for where they are and once to be copied."""
    tensors: list[tuple[str, str, tuple[int, ...], Iterable[npt.NDArray[Any]]]] = []
    for site in sites:
        dtype, width = "", 0
        places = []
        for rows, positions, token_ids in capture.in_batches(site):
            dtype, width = rows.dtype.name, rows.shape[1]
            places.append((positions, token_ids))
        at, ids = (np.concatenate(arrays) for arrays in zip(*places, strict=True))
        name = f"{site.hook}.{site.layer:03d}"
        tensors += [
            (f"{name}.rows", dtype, (len(at), width), (part.rows for part in capture.in_batches(site))),
            (f"{name}.positions", "int64", at.shape, [at]),
            (f"{name}.token_ids", "int32", ids.shape, [ids]),
        ]
    sidecar = capture.sidecar
    told = {name: getattr(sidecar, name) for name in METADATA}
    header: dict[str, Any] = {
        "__metadata__": {name: "" if value is None else str(value) for name, value in told.items()}
    }
    # The widest first: safetensors wants tensors without gaps, and readers want each aligned.
    ordered = sorted(tensors, key=lambda tensor: -_SIZES[tensor[1]])
    end = 0
    for name, dtype, shape, _ in ordered:
        end, start = end + math.prod(shape) * _SIZES[dtype], end
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    stream.write(len(text).to_bytes(8, "little") + text)
    for *_, parts in ordered:
        for part in parts:
            flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            for start in range(0, len(flat), _PART_BYTES):
                stream.write(flat[start : start + _PART_BYTES].data)
