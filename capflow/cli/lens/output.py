"""What a lens reads, as rows: JSON Lines, a Parquet file, or the table `lens` of a DuckDB file.

In a table, each row is one of the most likely tokens of one captured row:

| column | content |
|---|---|
| `lens` | `logit`, or the name of the lens file without its suffix |
| `engine`, `request_id`, `position` | whose captured row it is, as in the other tables |
| `layer`, `hook` | its site |
| `rank` | 1 for the most likely token |
| `token_id`, `text`, `logit`, `probability` | the token; `text` is NULL if the model's files do not say it |
| `divergence` | KL(last layer ‖ lens) in nats; NULL if the last layer was not captured |
| `chosen_id`, `chosen_rank`, `chosen_probability` | those of `--token`; NULL without it |

A captured row with NaN or infinity has no rows here.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from capflow.errors import CapflowError, UsageError, explain
from capflow.extras import require
from capflow.files import whole_file
from capflow.lenses.captured import SiteReading

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS: Mapping[str, str] = {
    "lens": "VARCHAR",
    "engine": "VARCHAR",
    "request_id": "VARCHAR",
    "position": "BIGINT",
    "layer": "INTEGER",
    "hook": "VARCHAR",
    "rank": "INTEGER",
    "token_id": "INTEGER",
    "text": "VARCHAR",
    "logit": "FLOAT",
    "probability": "DOUBLE",
    "divergence": "DOUBLE",
    "chosen_id": "INTEGER",
    "chosen_rank": "INTEGER",
    "chosen_probability": "DOUBLE",
}
"""The columns of the table, with their types in DuckDB."""

_ARROW = {"VARCHAR": "string", "BIGINT": "int64", "INTEGER": "int32", "FLOAT": "float32", "DOUBLE": "float64"}


def json_lines(capture: Any, site_reading: SiteReading) -> Iterator[str]:
    """Yield a JSON object for each captured row."""
    site, positions, token_ids, reading = site_reading
    for index, position in enumerate(positions.tolist()):
        line: dict[str, Any] = {
            "request": capture.id,
            "engine": capture.engine,
            "site": str(site),
            "position": position,
            "token_id": token_ids[index].item(),
            "tokens": [
                {"id": token, "text": text, "logit": float(f"{logit:.6g}"), "probability": float(f"{probability:.6g}")}
                for token, text, logit, probability in zip(
                    reading.ids[index].tolist(),
                    reading.texts[index],
                    reading.logits[index].tolist(),
                    reading.probabilities[index].tolist(),
                    strict=True,
                )
                if token >= 0
            ],
            "divergence": _number(reading.divergences[index]),
        }
        if reading.token_ids[index] >= 0:
            line["chosen"] = {
                "id": reading.token_ids[index].item(),
                "rank": reading.token_ranks[index].item() or None,
                "probability": _number(reading.token_probabilities[index]),
            }
        yield json.dumps(line, ensure_ascii=False)


def table_of(lens: str, capture: Any, site_reading: SiteReading) -> pa.Table:
    """Return the rows of the table for some captured rows of one site."""
    import pyarrow as pa

    site, positions, _, reading = site_reading
    count, k = reading.ids.shape
    has = reading.ids.ravel() >= 0
    total = int(has.sum())

    def each(values: Any) -> Any:
        return np.repeat(np.asarray(values), k)[has]

    chosen = reading.token_ranks > 0
    columns = {
        "lens": [lens] * total,
        "engine": [capture.engine] * total,
        "request_id": [capture.id] * total,
        "position": each(positions),
        "layer": np.full(total, site.layer),
        "hook": [site.hook] * total,
        "rank": np.tile(np.arange(1, k + 1), count)[has],
        "token_id": reading.ids.ravel()[has],
        "text": [text for texts, ids in zip(reading.texts, reading.ids, strict=True) if ids[0] >= 0 for text in texts],
        "logit": reading.logits.ravel()[has],
        "probability": reading.probabilities.ravel()[has],
        "divergence": pa.array(each(reading.divergences), mask=np.isnan(each(reading.divergences))),
        "chosen_id": pa.array(each(reading.token_ids), mask=~each(chosen)),
        "chosen_rank": pa.array(each(reading.token_ranks), mask=~each(chosen)),
        "chosen_probability": pa.array(each(reading.token_probabilities), mask=~each(chosen)),
    }
    schema = table_schema()
    arrays = [
        (column.cast(field.type) if isinstance(column, pa.Array) else pa.array(column, field.type))
        for field, column in zip(schema, columns.values(), strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def check_output(path: Path, option: str, extra: str) -> None:
    """Raise UsageError if a path cannot be a file, or a package that writes it is missing."""
    require(extra, option, *(("pyarrow",) if extra == "files" else ()))
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise UsageError(explain(option, got=str(path), expected="a file in a directory that exists"))


@contextlib.contextmanager
def parquet_output(path: Path) -> Iterator[Callable[[pa.Table], object]]:
    """Yield a function that adds rows to a Parquet file, which is written whole or not at all.

    Raises CapflowError if it cannot be written.
    """
    import pyarrow.parquet as pq

    with whole_file(path) as stream, pq.ParquetWriter(stream, table_schema(), compression="zstd") as writer:
        yield writer.write_table


@contextlib.contextmanager
def duckdb_output(path: Path) -> Iterator[Callable[[pa.Table], object]]:
    """Yield a function that adds rows of one request to the table `lens` of a DuckDB file, all in one transaction.

    Earlier rows of the same lens and request are replaced. Raises UsageError for a file that is no database, is in use,
    or has another table of this name; CapflowError if it cannot be written.
    """
    import duckdb

    try:
        connection = duckdb.connect(str(path))
    except duckdb.Error as e:
        do = "end the hub that writes it, or choose another file"
        got = " ".join(f"{path}: {e}".split())
        raise UsageError(explain("--duckdb", got=got, expected="a DuckDB file that no process uses", do=do)) from e
    # The requests whose earlier rows were removed.
    begun: set[tuple[str, ...]] = set()

    def add(table: pa.Table) -> None:
        if not table.num_rows:
            return
        key = tuple(table.column(name)[0].as_py() for name in ("lens", "engine", "request_id"))
        if key not in begun:
            connection.execute("DELETE FROM lens WHERE lens = ? AND engine = ? AND request_id = ?", key)
            begun.add(key)
        connection.register("read_now", table)
        connection.execute("INSERT INTO lens BY NAME SELECT * FROM read_now")
        connection.unregister("read_now")

    with contextlib.closing(connection):
        try:
            connection.execute("BEGIN")
            listed = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
            connection.execute(f"CREATE TABLE IF NOT EXISTS lens ({listed})")
            columns = connection.execute("SELECT column_name, column_type FROM (DESCRIBE lens)").fetchall()
            if dict(columns) != dict(COLUMNS):
                got = f"{path}, whose table lens has {', '.join(name for name, _ in columns)}"
                raise UsageError(explain("--duckdb", got=got, expected=f"a table of {', '.join(COLUMNS)}"))
            yield add
            connection.execute("COMMIT")
        except duckdb.Error as e:
            raise CapflowError(explain(f"{path} cannot be written", got=" ".join(str(e).split()))) from e


def table_schema() -> pa.Schema:
    """Return the schema of the table in Arrow."""
    import pyarrow as pa

    return pa.schema([(name, getattr(pa, _ARROW[kind])()) for name, kind in COLUMNS.items()])


def _number(value: Any) -> float | None:
    number = float(value)
    return None if math.isnan(number) else float(f"{number:.6g}")
