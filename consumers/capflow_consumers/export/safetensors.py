"""Exports a data set as one safetensors file for each capture.

For each site, such as `post_block.012`, `NAME.safetensors` has these tensors: `post_block.012.rows` `[n, hidden_size]`,
or at a hook such as `heads` in the rows' own shape, `[n, heads, head_dim]`, bit for bit as stored;
`post_block.012.positions`, int64 `[n]`; `post_block.012.token_ids`, int32 `[n]`; and `post_block.012.steered`, bool
`[n]`, unless the data set does not say which positions were steered. The header's `__metadata__` has the request's
fields `METADATA`, as text, and what rounded rows were rounded to as `post_block:12.quantization`. NAME is the directory
name of the request's id in a data set; a second capture of the same id has `~2` appended.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from capflow.capture.dtypes import SAFETENSORS_DTYPES
from capflow.capture.site import Site
from capflow_consumers.dataset.capture import steered_at
from capflow_consumers.dataset.names import slug
from capflow_consumers.dataset.reader import Dataset, RequestCapture
from capflow_consumers.export.destination import Destination
from capflow_consumers.export.selection import selected

METADATA = ("request", "model", "prompt_length", "computed_length", "status", "capture_status", "error")
_DTYPES = {**SAFETENSORS_DTYPES, "int64": "I64", "int32": "I32", "bool": "BOOL"}
_ALIGNMENT = 64
_PART_BYTES = 8 << 20


def to_safetensors(
    dataset: Dataset,
    sites: Sequence[Site],
    destination: Destination,
    on_capture: Callable[[], object],
    *,
    unsteered: bool = False,
) -> int:
    """Write each capture that has no file yet; return how many were written.

    on_capture: called after each capture, written or not.
    unsteered: whether rows at steered positions are left out.
    """
    written = 0
    numbers: Counter[str] = Counter()
    for capture in dataset:
        numbers[capture.id] += 1
        number = numbers[capture.id]
        name = slug(capture.id) + (f"~{number}" if number > 1 else "") + ".safetensors"
        if not destination.has(name):
            with destination.writing(name) as path, path.open("wb") as stream:
                _write(capture, [site for site in sites if site in capture], stream, unsteered=unsteered)
            written += 1
        on_capture()
    return written


def _write(capture: RequestCapture, sites: Sequence[Site], stream: Any, *, unsteered: bool) -> None:
    """Write a capture's rows at these sites.

    Rows are read in batches, twice: for their positions, and to be copied.
    """
    tensors: list[tuple[str, np.dtype[Any], tuple[int, ...], Iterable[npt.NDArray[Any]]]] = []
    for site in sites:
        places = []
        for part in selected(capture, site, unsteered=unsteered):
            dtype = part.rows.dtype
            places.append((part.positions, part.token_ids))
        at, ids = (np.concatenate(arrays) for arrays in zip(*places, strict=True))
        name = f"{site.hook}.{site.layer:03d}"
        tensors += [
            (
                f"{name}.rows",
                dtype,
                (len(at), *capture.shape_of(site)),
                (part.rows for part in selected(capture, site, unsteered=unsteered)),
            ),
            (f"{name}.positions", at.dtype, at.shape, [at]),
            (f"{name}.token_ids", ids.dtype, ids.shape, [ids]),
        ]
        if (steered := steered_at(capture.sidecar, at)) is not None:
            tensors.append((f"{name}.steered", steered.dtype, steered.shape, [steered]))
    fields = {name: getattr(capture.sidecar, name) for name in METADATA}
    fields |= {f"{site}.quantization": rounded for site in sites if (rounded := capture.quantization_of(site))}
    header: dict[str, Any] = {
        "__metadata__": {name: "" if value is None else str(value) for name, value in fields.items()}
    }
    # The widest dtype first: safetensors allows no gaps between tensors, and readers want each tensor aligned.
    ordered = sorted(tensors, key=lambda tensor: -tensor[1].itemsize)
    end = 0
    for name, dtype, shape, _ in ordered:
        end, start = end + math.prod(shape) * dtype.itemsize, end
        header[name] = {"dtype": _DTYPES[dtype.name], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    stream.write(len(text).to_bytes(8, "little") + text)
    for *_, arrays in ordered:
        for array in arrays:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            for start in range(0, len(flat), _PART_BYTES):
                stream.write(flat[start : start + _PART_BYTES].data)
