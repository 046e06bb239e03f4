"""The DuckDB file of the duckdb consumer: appends rows to it and begins queries on it.

`capflow_consumers.duckdb.schema` defines its tables. Rows are only appended; the only indexes are those of `KEYS`. One
`append` is one transaction. When it returns, its rows are durable: the next process that opens the file finds them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import duckdb
import msgspec
import pyarrow as pa
import xxhash

from capflow.capture.frame import FrameHeader, Rank
from capflow.capture.intervals import Intervals
from capflow.errors import CapflowError, FatalError, RetryError, UsageError, explain
from capflow.probes.probe import Scorer
from capflow.saes.sae import Sae
from capflow_consumers.duckdb.query import SETTINGS, SqlQuery
from capflow_consumers.duckdb.schema import ADDED, KEYS, TABLES, VIEWS
from capflow_consumers.framelog import FrameLog

if TYPE_CHECKING:
    from capflow_consumers.duckdb.lens import LensRecord

_STORED = """
SELECT capture, marks.request_id, boot, rank, first_frame, last_frame, capture_status
FROM marks LEFT JOIN requests USING (capture)
WHERE marks.engine = ?
ORDER BY capture, boot, rank, first_frame
"""
_TOKENS = """
SELECT capture, min(position), max(position)
FROM (
    SELECT capture, position, position - row_number() OVER (PARTITION BY capture ORDER BY position) AS run
    FROM tokens
    WHERE engine = ? AND capture NOT IN (SELECT capture FROM requests)
)
GROUP BY capture, run
ORDER BY ALL
"""
_EARLY = """
SELECT engine, request_id, incarnation
FROM actions
WHERE capture IS NULL AND incarnation IS NOT NULL
GROUP BY ALL
ORDER BY max(rowid) DESC
LIMIT ?
"""
_ADOPT = """
UPDATE actions SET capture = ?
WHERE capture IS NULL AND engine = ? AND request_id = ? AND incarnation = ?
"""
# A killed consumer may leave events of a capture without rows, whose number another request gets. Events without an
# incarnation, of earlier versions, would find no other capture.
_RELEASE = """
UPDATE actions SET capture = NULL
WHERE incarnation IS NOT NULL AND capture NOT IN (SELECT capture FROM requests UNION ALL SELECT capture FROM marks)
"""
_DEAD = (duckdb.FatalException, duckdb.InternalException, duckdb.ConnectionException)
"""Errors of DuckDB after which the database must be reopened."""
_REMEDIES = {
    errno.ENOENT: "put the file back where it was, or start the hub again",
    errno.ENOSPC: "make room on its disk",
    errno.EDQUOT: "make room on its disk",
    errno.EFBIG: "allow larger files (ulimit -f)",
}


class Adopted(NamedTuple):
    """A request whose events came before its capture had a number, and this number."""

    capture: int
    engine: str
    request: str
    incarnation: str


class Stored(NamedTuple):
    """A capture that is in the file.

    capture: its number.
    status: its `capture_status`; None while it is not finished.
    frames: the frames whose rows are in the file.
    positions: the positions whose tokens are in the file; empty for a finished capture.
    """

    capture: int
    status: str | None
    frames: FrameLog
    positions: Intervals

    def continues(self, header: FrameHeader) -> bool:
        """Return whether a frame with rows of this request id belongs to this capture, not to a later one."""
        if self.status is None:
            return not self.frames.knows_otherwise(header)
        return self.frames.reaches(header)


class Database:
    """An open database file. No other process can open it until `close`. Its SQL reaches nothing outside the file."""

    def __init__(self, path: Path, connection: Any, last_capture: int, engines: set[str]) -> None:
        self.path = path
        self.last_capture = last_capture
        # Engines that had captures in the file when it was opened.
        self.engines = engines
        self._identity = _identity(path)
        # DuckDB's write-ahead log: has the committed rows until they are merged into the file.
        self._log = path.with_name(f"{path.name}.wal")
        self._connection = connection
        # Runs no query itself: each query gets a cursor of it.
        self._reading = connection.cursor()
        # Guards `_reading`.
        self._reading_lock = threading.Lock()

    @classmethod
    def open(cls, path: Path, *, memory_bytes_max: int, where: str) -> Database:
        """Open or create the file.

        memory_bytes_max: memory that DuckDB may use.
        where: the option that names the file, for errors.

        Raises UsageError when the file is no database, is in use, or has different tables of these names.
        """
        try:
            connection = duckdb.connect(
                str(path), config={"threads": "1", "memory_limit": f"{memory_bytes_max // 1024}KiB", **SETTINGS}
            )
        except duckdb.Error as e:
            raise UsageError(_why(path, str(e), where)) from e
        try:
            connection.execute("BEGIN")
            _make_tables(connection, path, where)
            connection.execute(_RELEASE)
            connection.execute("COMMIT")
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

    def add_probe(self, probe: Scorer) -> None:
        """Record a file's probes. Raises UsageError when the database has scores of a different probe of that name."""
        new = []
        fixed = (probe.kind, probe.pool, probe.site.layer, probe.site.hook)
        for index, name in enumerate(probe.names):
            digest = xxhash.xxh3_64_hexdigest(b"".join(probe.parts(index)))
            row = (name, *fixed, probe.thresholds[index], probe.where, digest)
            query = "SELECT * FROM probes WHERE name = ? ORDER BY rowid DESC LIMIT 1"
            had = self._connection.execute(query, [name]).fetchone()
            if had and (had[1:5], had[7]) != (fixed, digest):
                do = "give the probe another name, or use another database"
                problem = f"{probe.where}: the database has scores of another probe {name}"
                got, expected = _described(fixed, digest), _described(had[1:5], had[7])
                raise UsageError(explain(problem, got=got, expected=expected, do=do))
            if had != row:
                new.append(row)
        if new:
            self.append({"probes": self._table("probes", new)})

    def add_sae(self, name: str, sae: Sae) -> None:
        """Record an autoencoder. Raises UsageError when the database has features of a different one of that name."""
        row = (name, sae.site.layer, sae.site.hook, sae.features, sae.k, sae.where, sae.digest)
        query = "SELECT * FROM saes WHERE name = ? ORDER BY rowid DESC LIMIT 1"
        had = self._connection.execute(query, [name]).fetchone()
        if had and (had[1:5], had[6]) != (row[1:5], row[6]):
            do = "give it another name (NAME=PATH), or use another database"
            got, expected = (f"{one[2]}:{one[1]}, {one[3]} features, xxh3 {one[6]}" for one in (row, had))
            problem = f"{sae.where}: the database has features of another autoencoder {name}"
            raise UsageError(explain(problem, got=got, expected=expected, do=do))
        if had != row:
            self.append({"saes": self._table("saes", [row])})

    def check_lens(self, lens: LensRecord) -> None:
        """Raise UsageError when the database has tokens of a different lens of that name."""
        had = self._lens(lens.name)
        if had and (had[1], had[4]) != (lens.kind, lens.digest):
            do = "use another database" if not lens.file else "rename its file, or use another database"
            problem = f"lens {lens.name}: the database has tokens of another lens of this name"
            got, expected = f"{lens.model}, xxh3 {lens.digest}", f"{had[2]}, xxh3 {had[4]}"
            raise UsageError(explain(problem, got=got, expected=expected, do=do))

    def lens_table(self, lens: LensRecord) -> dict[str, pa.Table]:
        """Return the table to append that records a lens; none if the database has it."""
        row = msgspec.structs.astuple(lens)
        if self._lens(lens.name) == row:
            return {}
        return {"lenses": self._table("lenses", [row])}

    def _table(self, name: str, rows: Sequence[tuple[Any, ...]]) -> pa.Table:
        """Return rows for a table. DuckDB makes it: Arrow's first array imports pandas, where that is installed."""
        columns = TABLES[name]
        line = f"({', '.join(f'?::{kind}' for _, kind in columns)})"
        names, lines = ", ".join(column for column, _ in columns), ", ".join([line] * len(rows))
        # The statement is made of TABLES.
        query = f"SELECT * FROM (VALUES {lines}) AS lines({names})"  # noqa: S608
        values = [value for row in rows for value in row]
        with self._connection.cursor() as making:
            table: pa.Table = making.sql(query, params=values).to_arrow_table()
        return table

    def _lens(self, name: str) -> tuple[str, ...] | None:
        query = "SELECT * FROM lenses WHERE name = ? ORDER BY rowid DESC LIMIT 1"
        row: tuple[str, ...] | None = self._connection.execute(query, [name]).fetchone()
        return row

    def stored(self, engine: str) -> dict[str, list[Stored]]:
        """Return the captures of an engine by request id, oldest first."""
        by_request: dict[str, list[Stored]] = {}
        positions: dict[int, Intervals] = {}
        for capture, first, last in self._connection.execute(_TOKENS, [engine]).fetchall():
            positions.setdefault(capture, Intervals()).add(first, last)
        for capture, request, boot, rank, first, last, status in self._connection.execute(_STORED, [engine]).fetchall():
            captures = by_request.setdefault(request, [])
            if not captures or captures[-1].capture != capture:
                captures.append(Stored(capture, status, FrameLog(), positions.get(capture, Intervals())))
            captures[-1].frames.note((boot, Rank(*map(int, rank.split(".")))), first, last)
        return by_request

    def append(self, tables: Mapping[str, pa.Table], adopted: Adopted | None = None) -> None:
        """Insert the rows of all tables in one transaction; rows whose key the table already has are skipped.

        adopted: the request whose events get a capture in the same transaction.

        The rows are on the disk when this returns. Raises RetryError when no row was inserted; FatalError when only
        reopening the file tells which rows it has.
        """
        try:
            self._check()
            self._insert(tables, adopted)
        except _DEAD as e:
            raise self._failed(e, FatalError) from e
        except (duckdb.Error, OSError) as e:
            raise self._failed(e, RetryError) from e
        try:
            self._check()
            # The log was merged; or somebody removed it with the rows in it, and a checkpoint writes them from memory.
            if not self._log.exists():
                self._connection.execute("CHECKPOINT")
        except (duckdb.Error, OSError) as e:
            raise self._failed(e, FatalError) from e

    def early(self, count: int) -> list[tuple[str, str, str]]:
        """Return the newest requests with events of no capture: engine, id and incarnation, oldest first."""
        requests: list[tuple[str, str, str]] = self._connection.execute(_EARLY, [count]).fetchall()
        return requests[::-1]

    def query(self, sql: str) -> SqlQuery:
        """Return a query on the committed rows. Callable on any thread."""
        with self._reading_lock:
            return SqlQuery(self._reading.cursor(), sql)

    def close(self) -> None:
        """Merge all rows into the file and close it. Raises CapflowError if it was removed or replaced."""
        self._reading.close()
        self._connection.close()
        try:
            self._check()
        except OSError as e:
            raise self._failed(e, CapflowError) from e

    def _insert(self, tables: Mapping[str, pa.Table], adopted: Adopted | None) -> None:
        self._connection.execute("BEGIN")
        try:
            for name, rows in tables.items():
                into = f"OR IGNORE INTO {name}" if name in KEYS else f"INTO {name}"
                self._connection.register("new_rows", rows)
                # `into` is made of the keys of TABLES.
                self._connection.execute(f"INSERT {into} BY NAME SELECT * FROM new_rows")  # noqa: S608
                self._connection.unregister("new_rows")
            if adopted is not None:
                self._connection.execute(_ADOPT, adopted)
            self._connection.execute("COMMIT")
        except BaseException:
            # A COMMIT that failed has already rolled back.
            with contextlib.suppress(duckdb.Error):
                self._connection.execute("ROLLBACK")
            raise

    def _check(self) -> None:
        """Raise OSError when the file was removed or replaced: rows written to it would be lost."""
        if _identity(self.path) != self._identity:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def _failed(self, error: duckdb.Error | OSError, kind: type[CapflowError]) -> CapflowError:
        reason = error.strerror if isinstance(error, OSError) else str(error).rpartition("Failed to commit: ")[2]
        got = str(reason).replace(str(self.path), self.path.name)
        do = next((do for code, do in _REMEDIES.items() if os.strerror(code) in got), "")
        return kind(explain(f"{self.path} cannot be written", got=got, do=do))


def _identity(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino


def _described(probe: tuple[str, str, int, str], digest: str) -> str:
    kind, pool, layer, hook = probe
    return f"{hook}:{layer} {digest}, {kind}, pool {pool}"


def _make_tables(connection: Any, path: Path, where: str) -> None:
    query = (
        "SELECT column_name, data_type FROM duckdb_columns() "
        "WHERE table_name = ? AND schema_name = 'main' ORDER BY column_index"
    )
    for name, columns in TABLES.items():
        listed = ", ".join(f"{column} {kind}" for column, kind in columns)
        connection.execute(f"CREATE TABLE IF NOT EXISTS {name} ({listed})")
        had = connection.execute(query, [name]).fetchall()
        for column, kind in columns[len(columns) - len(ADDED.get(name, ())) :]:
            if had == columns[: len(had)] and (column, kind) not in had:
                connection.execute(f"ALTER TABLE {name} ADD COLUMN {column} {kind}")
                had = connection.execute(query, [name]).fetchall()
        if had != columns:
            got = f"{path}, whose table {name} has {', '.join(column for column, _ in had)}"
            expected = f"a new file, or one whose table {name} has {', '.join(column for column, _ in columns)}"
            raise UsageError(explain(where, got=got, expected=expected))
    for name, key in KEYS.items():
        connection.execute(f"CREATE UNIQUE INDEX IF NOT EXISTS {name}_{key} ON {name} ({key})")
    for name, query in VIEWS.items():
        connection.execute(f"CREATE OR REPLACE VIEW {name} AS {query}")


def _why(path: Path, error: str, where: str) -> str:
    if "lock" in error.lower():
        do = "close the program that has it open; while one process writes a DuckDB file, no other can open it"
        return explain(where, got=f"{path}, which is in use: {error}", do=do)
    return explain(where, got=f"{path}: {error}", expected="a DuckDB database, or a path without a file")
