"""A data set and its captures as tables: one of rows for Arrow, and one of HTML for notebooks.

A capture is a `capflow_consumers.dataset.capture.RequestCapture`, which imports this module.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from capflow.extras import require
from capflow.probes.probe import as_float32
from capflow.text.notebook import html_table

if TYPE_CHECKING:
    import pyarrow as pa

_SHOWN = 8


def arrow_of(captures: Iterable[Any]) -> pa.Table:
    """Return a table with a line for each row of captures.

    Columns: `request`, `layer`, `hook`, `position`, `token_id`, and `row`, a list of float32.
    """
    require("files", "to_arrow", "pyarrow")
    import pyarrow as pa

    schema = pa.schema(
        [
            ("request", pa.string()),
            ("layer", pa.int32()),
            ("hook", pa.string()),
            ("position", pa.int64()),
            ("token_id", pa.int32()),
            ("row", pa.large_list(pa.float32())),
        ]
    )
    tables = [
        pa.table(_columns(capture.id, site, part), schema)
        for capture in captures
        for site in capture.sites
        for part in capture.in_batches(site)
    ]
    return pa.concat_tables(tables) if tables else schema.empty_table()


def _columns(request: str, site: Any, rows: Any) -> dict[str, Any]:
    import pyarrow as pa

    count = len(rows.rows)
    values = as_float32(np.asarray(rows.rows)).reshape(count, -1)
    ends = np.arange(count + 1, dtype=np.int64) * (values.shape[1] if count else 0)
    return {
        "request": [request] * count,
        "layer": [site.layer] * count,
        "hook": [site.hook] * count,
        "position": rows.positions,
        "token_id": rows.token_ids,
        "row": pa.LargeListArray.from_arrays(ends, values.reshape(-1)),
    }


def capture_html(capture: Any) -> str:
    """Return what a notebook shows of a capture: its sites."""
    lines = [(str(site), f"{capture.rows_at(site):,}", _shape(capture, site)) for site in capture.sites]
    return html_table(["site", "rows", "row"], lines, repr(capture))


def _shape(capture: Any, site: Any) -> str:
    return " x ".join(map(str, capture.shape_of(site)))


def dataset_html(captures: Iterable[Any], caption: str) -> str:
    """Return what a notebook shows of a data set: its first captures."""
    lines = [
        (
            capture.id,
            str(capture.prompt_length),
            str(capture.computed_length),
            f"{len(capture.sites)}",
            f"{capture.sidecar.rows:,}",
            capture.status,
        )
        for capture in itertools.islice(captures, _SHOWN)
    ]
    return html_table(["request", "prompt tokens", "computed tokens", "sites", "rows", "status"], lines, caption)
