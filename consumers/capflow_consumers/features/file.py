"""The Parquet file of features: a row for each captured token and feature that is among the most active ones there.

| column | type | content |
|---|---|---|
| `request` | string | the request's id |
| `position` | int64 | the token's position |
| `token_id` | int32 | the token |
| `phase` | string | `prompt` or `generated` |
| `sae` | string | the name of the autoencoder |
| `layer`, `hook` | int32, string | the site that it reads |
| `feature` | int32 | the feature's number |
| `activation` | float32 | its activation, above 0 |

The features of a token stand together, the most active one first.
"""

from __future__ import annotations

from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import parquet

from capflow.capture.site import Site
from capflow.saes.sae import INACTIVE
from capflow_consumers.dataset.capture import Rows

_TEXT = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    {
        "request": _TEXT,
        "position": pa.int64(),
        "token_id": pa.int32(),
        "phase": _TEXT,
        "sae": _TEXT,
        "layer": pa.int32(),
        "hook": _TEXT,
        "feature": pa.int32(),
        "activation": pa.float32(),
    }
)
_GROUP_ROWS = 1 << 20


class FeatureWriter:
    """Writes the file to a stream, which stays open; `close` completes the file."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._writer = parquet.ParquetWriter(stream, SCHEMA, compression="zstd", write_page_checksum=True)
        # Tables that wait for the next row group, and their rows.
        self._waiting: list[pa.Table] = []
        self._rows = 0

    def add(
        self,
        request: str,
        prompt_length: int,
        rows: Rows,
        sae: str,
        site: Site,
        ids: npt.NDArray[np.int32],
        activations: npt.NDArray[np.float32],
    ) -> int:
        """Add the features of some rows of a request; return how many are active.

        ids, activations: `[rows, k]`, as `Sae.top` returns them.
        """
        tokens, columns = np.nonzero(ids != INACTIVE)
        count = len(tokens)
        positions = np.asarray(rows.positions, np.int64)[tokens]
        table: dict[str, Any] = {
            "request": _same(request, count),
            "position": positions,
            "token_id": np.asarray(rows.token_ids, np.int32)[tokens],
            "phase": pa.DictionaryArray.from_arrays(
                pa.array((positions >= prompt_length).astype(np.int32)), pa.array(["prompt", "generated"])
            ),
            "sae": _same(sae, count),
            "layer": np.full(count, site.layer, np.int32),
            "hook": _same(site.hook, count),
            "feature": ids[tokens, columns],
            "activation": activations[tokens, columns],
        }
        self._waiting.append(pa.table(table, schema=SCHEMA))
        self._rows += count
        if self._rows >= _GROUP_ROWS:
            self._flush()
        return count

    def close(self) -> None:
        """Write what waits, and the end of the file."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.concat_tables(self._waiting).unify_dictionaries())
        self._waiting, self._rows = [], 0


def _same(text: str, count: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([text], pa.string()))
