"""One query on a DuckDB database that only reads: how that is held, whoever asks.

A query is one statement that is a SELECT or an EXPLAIN (`FROM …`, `DESCRIBE`, `SUMMARIZE` and `SHOW` are SELECTs to DuckDB), in a transaction
that is read-only. The connection is to be one that reaches nothing outside the database, `SETTINGS` being those that say so.
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

_BATCH_ROWS = 2_048  # DuckDB's own unit
_INTERRUPTED = "INTERRUPT Error"  # DuckDB's word in Arrow's reader for a query that was stopped
_ARROW_FULL = "maximum total string size"  # DuckDB's words for more text than a column of a batch can have
_KINDS = ("SELECT", "EXPLAIN")
_WRONG_SQL = (duckdb.ProgrammingError, duckdb.DataError, duckdb.TransactionException, duckdb.PermissionException)


class SqlQuery:
    """A query on a connection of its own, which is closed at its end."""

    def __init__(self, connection: Any, sql: str) -> None:
        self._connection = connection
        self._sql = sql
        # Guards that nobody stops what is closed.
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def on_file(cls, path: Path, sql: str) -> SqlQuery:
        """Return a query on a file that nobody writes; raises UsageError for a path that is no database, CapflowError for one that is in use."""
        if not path.is_file():
            got = f"{path}, {'a directory' if path.is_dir() else 'where nothing is'}"
            do = "name the file that the duckdb consumer writes, its option `path`"
            raise UsageError(explain("query", got=got, expected="a DuckDB database", do=do))
        try:
            return cls(duckdb.connect(str(path), read_only=True, config=SETTINGS), sql)
        except duckdb.Error as e:
            if "lock" in str(e).lower():
                do = "a hub answers for its own file, to its own user and XDG_RUNTIME_DIR; any other program must close it first"
                raise CapflowError(explain(f"query: {path} is open in another process", got=_line(e), do=do)) from e
            raise UsageError(explain("query", got=f"{path}: {_line(e)}", expected="a DuckDB database")) from e

    def batches(self) -> Generator[Any]:
        """Yield the answer as Arrow record batches, one at least.

        Raises UsageError for SQL that is none or would write and for an answer with more than `limits.QUERY_BATCH_BYTES_MAX` in one
        batch, CapflowError when the query fails.
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
        except (
            duckdb.Error,
            pa.ArrowException,
            OSError,
            MemoryError,
        ) as e:  # OSError: what DuckDB raises in Arrow's reader
            if _ARROW_FULL in str(e):
                raise _too_large("more than 2 GiB of text in one column") from e
            if str(e).startswith(_INTERRUPTED):
                raise _stopped() from e
            raise CapflowError(explain("query", got=_line(e))) from e
        finally:
            with self._lock:
                self._closed = True
            if reader is not None:
                self._connection.interrupt()  # what was not asked for
                reader.close()
            self._connection.close()

    def stop(self) -> None:
        """Have `batches` end soon; called on any thread."""
        with self._lock:
            if not self._closed:
                self._connection.interrupt()


def _check(sql: str) -> None:
    kinds = [statement.type.name for statement in duckdb.extract_statements(sql)]
    if len(kinds) != 1 or kinds[0] not in _KINDS:
        got = " and ".join(kinds) or "nothing"
        raise UsageError(explain("query", got=got, expected="one SELECT", do="nothing is written here"))


def _bounded(batch: Any) -> Any:
    """Return a batch; raise UsageError when it is too large."""
    if batch.nbytes > limits.QUERY_BATCH_BYTES_MAX:
        raise _too_large(f"{batch.nbytes:,} bytes")
    return batch


def _stopped() -> CapflowError:
    expected = f"an answer within {limits.QUERY_S_MAX:g} s, while the hub runs"
    return CapflowError(explain("query: it was stopped", expected=expected, do="ask for less"))


def _too_large(got: str) -> UsageError:
    expected = f"at most {limits.QUERY_BATCH_BYTES_MAX:,} bytes in {_BATCH_ROWS:,} rows"
    return UsageError(
        explain("query: the answer is too large", got=got, expected=expected, do="ask for shorter values")
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
