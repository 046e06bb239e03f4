"""The DuckDB file that the duckdb consumer writes: its tables, and how rows get into them.

| table | one row for each | columns |
|---|---|---|
| requests | finished request | capture, engine, request_id, model, prompt_length, computed_length, status, rows, started_at, finished_at, capture_status |
| tokens | token computed of a request | capture, engine, request_id, position, token_id, text, phase |
| probes | probe, and again when its threshold or file changes | name, site_layer, site_hook, threshold, file, xxh3_64 |
| scores | row scored with a probe | capture, engine, request_id, position, probe, layer, hook, score |
| marks | request in a transaction, and worker | capture, engine, request_id, boot, rank, first_frame, last_frame |

`capture` numbers the captured requests of the file: ids come again when an engine is restarted, captures never do. Times are UTC.
phase is `prompt` or `generated`. text is NULL where the engine has no tokenizer. The view `fired` joins them: the tokens of
finished requests at which a probe's score was at or above its threshold, which is the last one the file was opened with.

`marks` says which frames of which worker (`rank` is pipeline stage, data-parallel replica, tensor-parallel rank, with dots between) a
capture's rows came in so far; it is committed with them, so that a frame that comes again after a kill is known.

Tables are only ever appended to and have no indexes. One `append` is one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa
import xxhash

from capflow.errors import UsageError, explain
from capflow.frame import Rank
from capflow.probe import Probe
from capflow_consumers.framelog import FrameLog

_KEY = [("capture", "BIGINT"), ("engine", "VARCHAR"), ("request_id", "VARCHAR")]

TABLES: dict[str, list[tuple[str, str]]] = {
    "requests": [
        *_KEY,
        ("model", "VARCHAR"),
        ("prompt_length", "BIGINT"),
        ("computed_length", "BIGINT"),
        ("status", "VARCHAR"),
        ("rows", "BIGINT"),
        ("started_at", "TIMESTAMP"),
        ("finished_at", "TIMESTAMP"),
        ("capture_status", "VARCHAR"),
    ],
    "tokens": [*_KEY, ("position", "BIGINT"), ("token_id", "INTEGER"), ("text", "VARCHAR"), ("phase", "VARCHAR")],
    "probes": [
        ("name", "VARCHAR"),
        ("site_layer", "INTEGER"),
        ("site_hook", "VARCHAR"),
        ("threshold", "DOUBLE"),
        ("file", "VARCHAR"),
        ("xxh3_64", "VARCHAR"),
    ],
    "scores": [
        *_KEY,
        ("position", "BIGINT"),
        ("probe", "VARCHAR"),
        ("layer", "INTEGER"),
        ("hook", "VARCHAR"),
        ("score", "FLOAT"),
    ],
    "marks": [*_KEY, ("boot", "VARCHAR"), ("rank", "VARCHAR"), ("first_frame", "BIGINT"), ("last_frame", "BIGINT")],
}

_STORED = """
SELECT capture, marks.request_id, boot, rank, min(first_frame), max(last_frame), any_value(capture_status)
FROM marks LEFT JOIN requests USING (capture)
WHERE marks.engine = ?
GROUP BY ALL
ORDER BY capture
"""

_FIRED = """
CREATE OR REPLACE VIEW fired AS
SELECT capture, requests.engine, requests.request_id, position, phase, token_id, text, probe, score, threshold
FROM scores
JOIN tokens USING (capture, position)
JOIN requests USING (capture)
JOIN (SELECT name AS probe, last(threshold ORDER BY rowid) AS threshold FROM probes GROUP BY name) USING (probe)
WHERE score >= threshold
"""


class Stored(NamedTuple):
    """A capture that is in the file, with the frames that it was made of; status: its `capture_status`, None when it is not finished."""

    capture: int
    status: str | None
    frames: FrameLog


class Database:
    """An open file; nobody else can open it until `close`."""

    def __init__(self, path: Path, connection: Any, last_capture: int, engines: set[str]) -> None:
        self.path = path
        self.last_capture = last_capture
        self.engines = engines  # of which captures were here when it was opened
        self._connection = connection

    @classmethod
    def open(cls, path: Path, *, memory_bytes_max: int, where: str) -> Database:
        """Open or make the file; raises UsageError when it is not one, is in use, or has other tables of these names."""
        try:
            connection = duckdb.connect(
                str(path), config={"threads": "1", "memory_limit": f"{memory_bytes_max // 1024}KiB"}
            )
        except duckdb.Error as e:
            raise UsageError(_why(path, str(e), where)) from e
        try:
            _make_tables(connection, path, where)
            query = "SELECT max(capture) FROM (SELECT capture FROM requests UNION ALL SELECT capture FROM marks)"
            (last,) = connection.execute(query).fetchone()
            engines = {engine for (engine,) in connection.execute("SELECT DISTINCT engine FROM marks").fetchall()}
        except duckdb.Error as e:
            connection.close()
            raise UsageError(explain(where, got=f"{path}: {e}", expected="a database that can be written")) from e
        except UsageError:
            connection.close()
            raise
        return cls(path, connection, last or 0, engines)

    def add_probe(self, probe: Probe, file: str) -> None:
        """Record a file's probes; raises UsageError when the database has scores of others of the same name."""
        new = []
        for name, weight, bias, threshold in zip(probe.names, probe.weight, probe.bias, probe.thresholds, strict=True):
            digest = xxhash.xxh3_64_hexdigest(weight.tobytes() + bias.tobytes())
            row = (name, probe.site.layer, probe.site.hook, threshold, file, digest)
            query = "SELECT * FROM probes WHERE name = ? ORDER BY rowid DESC LIMIT 1"
            had = self._connection.execute(query, [name]).fetchone()
            if had and (had[1:3], had[5]) != (row[1:3], digest):
                do = "give the probe another name, or use another database"
                what = f"{file}: the database has scores of another probe {name}"
                raise UsageError(
                    explain(what, got=f"{probe.site} {digest}", expected=f"{had[2]}:{had[1]} {had[5]}", do=do)
                )
            if had != row:
                new.append(row)
        if new:
            columns = zip(*new, strict=True)
            names = [name for name, _ in TABLES["probes"]]
            self.append({"probes": pa.table(dict(zip(names, map(list, columns), strict=True)))})

    def stored(self, engine: str) -> dict[str, Stored]:
        """Return the latest capture of each request of an engine."""
        found: dict[str, Stored] = {}
        for capture, request, boot, rank, first, last, status in self._connection.execute(_STORED, [engine]).fetchall():
            if request not in found or found[request].capture != capture:
                found[request] = Stored(capture, status, FrameLog())
            found[request].frames.note((boot, Rank(*map(int, rank.split(".")))), first, last)
        return found

    def append(self, tables: Mapping[str, pa.Table]) -> None:
        """Insert the rows of all tables, or of none; when this returns they are on the disk. Raises duckdb.Error."""
        self._connection.execute("BEGIN")
        try:
            for name, rows in tables.items():
                self._connection.register("new_rows", rows)
                self._connection.execute(f"INSERT INTO {name} BY NAME SELECT * FROM new_rows")  # noqa: S608 - a key of TABLES
                self._connection.unregister("new_rows")
            self._connection.execute("COMMIT")
        except duckdb.Error:
            self._connection.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Write everything into the one file, and let others open it."""
        self._connection.close()


def _make_tables(connection: Any, path: Path, where: str) -> None:
    query = "SELECT column_name, data_type FROM duckdb_columns() WHERE table_name = ? AND schema_name = 'main' ORDER BY column_index"
    for name, columns in TABLES.items():
        listed = ", ".join(f"{column} {kind}" for column, kind in columns)
        connection.execute(f"CREATE TABLE IF NOT EXISTS {name} ({listed})")
        had = connection.execute(query, [name]).fetchall()
        if had != columns:
            got = f"{path}, whose table {name} has {', '.join(column for column, _ in had)}"
            expected = f"a new file, or one whose table {name} has {', '.join(column for column, _ in columns)}"
            raise UsageError(explain(where, got=got, expected=expected))
    connection.execute(_FIRED)


def _why(path: Path, error: str, where: str) -> str:
    if "lock" in error.lower():
        do = "close the program that has it open; DuckDB lets one process write a file, and no other read it meanwhile"
        return explain(where, got=f"{path}, which is in use: {error}", do=do)
    return explain(where, got=f"{path}: {error}", expected="a DuckDB database or no file yet")
