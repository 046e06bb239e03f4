"""One read-only query on a DuckDB database.

A query is one SELECT or EXPLAIN, in a read-only transaction. DuckDB counts `FROM …`, `DESCRIBE`, `SUMMARIZE` and `SHOW`
as SELECTs. The connection must be opened with `SETTINGS`, so that a query reaches nothing outside the database.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from capflow import limits
from capflow.errors import CapflowError, UsageError, explain

SETTINGS = {"enable_external_access": "false"}

# DuckDB's own unit.
_BATCH_ROWS = 2_048
# How an error of DuckDB begins, in Arrow's reader, when a query was interrupted.
_INTERRUPTED = "INTERRUPT Error"
# In DuckDB's error when a column of a batch has more text than Arrow can hold.
_ARROW_FULL = "maximum total string size"
_KINDS = ("SELECT", "EXPLAIN")
_WRONG_SQL = (duckdb.ProgrammingError, duckdb.DataError, duckdb.TransactionException, duckdb.PermissionException)


class SqlQuery:
    """A query on a connection of its own, which it closes at its end."""

    def __init__(self, connection: Any, sql: str) -> None:
        self._connection = connection
        self._sql = sql
        # Guards `_closed`: a closed connection is not interrupted.
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def on_file(cls, path: Path, sql: str) -> SqlQuery:
        """Return a query on a file that no process writes.

        Raises UsageError for a path without a database, CapflowError for a database in use.
        """
        if not path.is_file():
            got = f"{path}, {'a directory' if path.is_dir() else 'which does not exist'}"
            do = "name the file that the duckdb consumer writes, its option `path`"
            raise UsageError(explain("query", got=got, expected="a DuckDB database", do=do))
        try:
            return cls(duckdb.connect(str(path), read_only=True, config=SETTINGS), sql)
        except duckdb.Error as e:
            if "lock" in str(e).lower():
                do = "ask as the hub's user, with its XDG_RUNTIME_DIR; any other program must close the file first"
                raise CapflowError(explain(f"query: {path} is open in another process", got=_line(e), do=do)) from e
            raise UsageError(explain("query", got=f"{path}: {_line(e)}", expected="a DuckDB database")) from e

    def batches(self) -> Generator[Any]:
        """Yield the answer as Arrow record batches, at least one.

        Raises UsageError for invalid SQL, for SQL that writes, and for a batch above `limits.QUERY_BATCH_BYTES_MAX`;
        CapflowError when the query fails or is stopped.
        """
        reader = None
        try:
            _check(self._sql)
            self._connection.execute("BEGIN TRANSACTION READ ONLY")
            reader = self._connection.sql(self._sql).to_arrow_reader(_BATCH_ROWS)
            first = next(iter(reader), None)
            yield pa.RecordBatch.from_pylist([], schema=reader.schema) if first is None else _bounded(first)
            yield from map(_bounded, reader)
        except duckdb.InterruptException as e:
            raise _stopped() from e
        except _WRONG_SQL as e:
            raise UsageError(explain("query", got=_line(e))) from e
        # DuckDB raises OSError in Arrow's reader.
        except (duckdb.Error, pa.ArrowException, OSError, MemoryError) as e:
            if _ARROW_FULL in str(e):
                raise _too_large("more than 2 GiB of text in one column") from e
            if str(e).startswith(_INTERRUPTED):
                raise _stopped() from e
            raise CapflowError(explain("query", got=_line(e))) from e
        finally:
            with self._lock:
                self._closed = True
            if reader is not None:
                # Stops the computation of rows that were not read.
                self._connection.interrupt()
                reader.close()
            self._connection.close()

    def stop(self) -> None:
        """Make `batches` end soon. Callable on any thread."""
        with self._lock:
            if not self._closed:
                self._connection.interrupt()


def _check(sql: str) -> None:
    kinds = [statement.type.name for statement in duckdb.extract_statements(sql)]
    if len(kinds) != 1 or kinds[0] not in _KINDS:
        got = " and ".join(kinds) or "nothing"
        raise UsageError(explain("query", got=got, expected="one SELECT", do="a query only reads"))


def _bounded(batch: Any) -> Any:
    """Return a batch; raise UsageError when it is too large."""
    if batch.nbytes > limits.QUERY_BATCH_BYTES_MAX:
        raise _too_large(f"{batch.nbytes:,} bytes")
    return batch


def _stopped() -> CapflowError:
    expected = f"an answer within {limits.QUERY_S_MAX:g} s, while the hub runs"
    return CapflowError(explain("query: it was stopped", expected=expected, do="ask for fewer rows"))


def _too_large(got: str) -> UsageError:
    expected = f"at most {limits.QUERY_BATCH_BYTES_MAX:,} bytes in {_BATCH_ROWS:,} rows"
    return UsageError(
        explain("query: the answer is too large", got=got, expected=expected, do="ask for shorter values")
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
