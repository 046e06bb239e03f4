"""`capflow query`: SQL on the database of the duckdb consumer, while the consumer runs and afterwards."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from capflow import limits
from capflow.text.examples import examples
from capflow.text.printable import printable

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = ("table", "csv", "jsonl", "arrow")


@click.command(
    epilog=examples(
        'capflow query "SELECT request_id, text, score FROM top_tokens LIMIT 20"',
        'capflow query "FROM fired" --path scores.duckdb --format jsonl > fired.jsonl',
    )
)
@click.argument("sql")
@click.option(
    "--path",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The database. Default: that of the only duckdb consumer that is running.",
)
@click.option(
    "--format", "form", type=click.Choice(FORMATS), default="table", show_default=True, help="How to print the rows."
)
@click.option(
    "--rows",
    type=click.IntRange(1),
    default=limits.QUERY_ROWS_DEFAULT,
    show_default=True,
    metavar="N",
    help="Print at most N rows.",
)
def query(sql: str, path: Path | None, form: str, rows: int) -> None:
    """Answer one SELECT from a running duckdb consumer, or from its file when none runs.

    A query sees committed rows only: rows of the last second may be missing while the consumer runs. docs/querying.md
    lists the tables and views.
    """
    from capflow.extras import require

    require("duckdb", "capflow query")
    with _answer(sql, path, rows + 1) as batches:
        first = _First(batches, rows)
        _print(first, form, sys.stdout.buffer)
    if first.more:
        click.echo(f"capflow: the answer has more than {rows} rows; --rows N prints more", err=True)


@contextlib.contextmanager
def _answer(sql: str, path: Path | None, rows: int) -> Iterator[Iterator[pa.RecordBatch]]:
    from capflow_consumers.duckdb.port import port_path, run_query
    from capflow_consumers.duckdb.query import SqlQuery

    with run_query(port_path(path) if path is not None else _only_port(), sql, rows) as batches:
        if batches is not None:
            yield batches
            return
    assert path is not None
    with contextlib.closing(SqlQuery.on_file(path, sql).batches()) as batches:
        yield batches


def _only_port() -> Path:
    from capflow.errors import UsageError, explain
    from capflow_consumers.duckdb.port import running_ports

    ports = running_ports()
    if len(ports) != 1:
        do = "name the database with --path FILE"
        raise UsageError(explain("query", got=f"{len(ports)} running duckdb consumers", expected="one", do=do))
    return ports[0]


class _First:
    """The first rows of an answer; its schema also when it has no rows.

    batches: the answer, at least one batch.
    rows: how many rows to yield.
    more: whether the answer has further rows; valid after these were read.
    """

    def __init__(self, batches: Iterator[pa.RecordBatch], rows: int) -> None:
        self._batches = batches
        self._rows = rows
        self.more = False

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        left = self._rows
        for batch in self._batches:
            yield batch.slice(0, left)
            self.more = batch.num_rows > left
            if self.more:
                return
            left -= batch.num_rows


def _print(batches: _First, form: str, out: BinaryIO) -> None:
    import pyarrow as pa

    others = iter(batches)
    first = next(others)
    if form == "table":
        import duckdb

        table = pa.Table.from_batches([first, *others])
        width = shutil.get_terminal_size()[0] if sys.stdout.isatty() else 200
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            duckdb.from_arrow(table).show(max_rows=max(1, table.num_rows), max_width=width)
        click.echo("\n".join(map(printable, shown.getvalue().split("\n"))), nl=False)
        return
    if form == "jsonl":
        for batch in itertools.chain([first], others):
            out.writelines(
                json.dumps(row, default=str, ensure_ascii=False).encode() + b"\n" for row in batch.to_pylist()
            )
        return
    with _writer(form, out, first.schema) as writer:
        writer.write_batch(first)
        for batch in others:
            writer.write_batch(batch)


def _writer(form: str, out: BinaryIO, schema: pa.Schema) -> Any:
    """Return a writer of batches as CSV or as an Arrow stream. Raises UsageError for columns that CSV cannot hold."""
    import pyarrow as pa
    import pyarrow.csv

    from capflow.errors import UsageError, explain

    if form == "arrow":
        return pa.ipc.new_stream(out, schema)
    nested = [field.name for field in schema if pa.types.is_nested(field.type)]
    if nested:
        do = "print it with --format jsonl or arrow"
        raise UsageError(explain("query: --format csv", got=f"column {nested[0]}, which is a list", do=do))
    return pyarrow.csv.CSVWriter(out, schema)
