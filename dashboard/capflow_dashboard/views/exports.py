"""Exports: the list of requests and the tokens of one request, as CSV or Parquet.

CSV follows RFC 4180, in UTF-8. A text that a spreadsheet would take for a formula has a `'` before it. Numbers are
written with all digits of float32: `NaN` and `inf` as such, nothing for a token without a row. Parquet holds texts and
values as they are, and null for a token without a row.

It computes on any thread, and yields parts, so that neither the memory nor the time of one part grows with a request.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np

from capflow_dashboard import limits
from capflow_dashboard.board.board import Board
from capflow_dashboard.board.record import RecordCopy
from capflow_dashboard.board.series import MISSING

_LIST_PATH = "/api/requests.csv"
_TOKENS_PATH = re.compile(r"/api/requests/([0-9]{1,15})\.(csv|parquet)")
_KINDS = {"csv": "text/csv; charset=utf-8; header=present", "parquet": "application/vnd.apache.parquet"}
# What spreadsheets take for the start of a formula, also in full width and behind spaces.
_FORMULA = re.compile(r"\s*[=+\-@\t\r\n＝＋－＠]")  # noqa: RUF001
_QUOTED = re.compile(r'[",\r\n]')


class ExportFile(NamedTuple):
    """A file to be downloaded.

    kind: its media type.
    parts: its content.
    """

    name: str
    kind: str
    parts: Iterator[bytes]


def formats() -> list[str]:
    """Return the formats of the tokens of a request that can be written here."""
    return ["csv", "parquet"] if importlib.util.find_spec("pyarrow") else ["csv"]


def export_of(board: Board, path: str) -> ExportFile | None:
    """Return the file at a path below `pages.API_PATH`; None if there is none."""
    if path == _LIST_PATH:
        parts = _list_parts(*board.summaries())
        return ExportFile("capflow-requests.csv", _KINDS["csv"], parts)
    match = _TOKENS_PATH.fullmatch(path)
    if match is None or match[2] not in formats():
        return None
    copy = board.copy_of(int(match[1]))
    if copy is None:
        return None
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", copy.id)[: limits.EXPORT_NAME_LENGTH_MAX].strip("._") or "request"
    parts = _csv_parts(copy) if match[2] == "csv" else _parquet_parts(copy)
    return ExportFile(f"capflow-{name}.{match[2]}", _KINDS[match[2]], parts)


def _list_parts(summaries: Sequence[dict[str, Any]], probes: dict[str, list[str]]) -> Iterator[bytes]:
    """Yield the list of requests.

    probes: the names of each engine's probes.
    """
    names = list(dict.fromkeys(name for names in probes.values() for name in names))
    titles = ["id", "engine", "status", "prompt_tokens", "tokens", "started", "ended", "lost_rows", "steered", "text"]
    titles += [f"{name} {number}" for name in names for number in ("max", "mean", "last", "fired")]
    yield _line(map(_cell, titles))
    for first in range(0, len(summaries), limits.EXPORT_ROWS):
        lines = []
        for one in summaries[first : first + limits.EXPORT_ROWS]:
            cells = [_cell(one[name]) for name in ("id", "engine", "status")]
            cells += [str(one["prompt_length"]), str(one["tokens"]), _time(one["started_s"]), _time(one["ended_s"])]
            cells += [str(one["rows_lost"]), str(one["steered"]), _cell(one["text"])]
            numbers = dict(zip(probes[one["engine"]], one["probes"], strict=False))
            for name in names:
                cells += ["" if number is None else str(number) for number in numbers.get(name, (None,) * 4)]
            lines.append(_line(cells))
        yield b"".join(lines)


def _csv_parts(copy: RecordCopy) -> Iterator[bytes]:
    yield _line(_cell(name) for name, _ in _columns(copy))
    positions = np.arange(copy.base, copy.base + len(copy.ids))
    for first in range(0, len(copy.ids), limits.EXPORT_ROWS):
        part = slice(first, first + limits.EXPORT_ROWS)
        columns = [
            [str(position) for position in positions[part]],
            ["prompt" if position < copy.prompt_length else "generated" for position in positions[part]],
            ["" if number < 0 else str(number) for number in copy.ids[part]],
            ["" if text is None else _cell(text) for text in copy.texts[part]],
            ["1" if steered else "0" for steered in copy.steered[part]],
        ]
        columns += [_numbers(row[part]) for row in copy.values]
        yield b"".join(map(_line, zip(*columns, strict=True)))


def _parquet_parts(copy: RecordCopy) -> Iterator[bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = [name for name, _ in _columns(copy)]
    positions = np.arange(copy.base, copy.base + len(copy.ids), dtype=np.int64)
    prompt = positions < copy.prompt_length
    columns = [
        pa.array(positions),
        pa.array(np.where(prompt, "prompt", "generated").tolist(), pa.string()),
        pa.array(copy.ids, mask=copy.ids < 0),
        pa.array(copy.texts, pa.string()),
        pa.array(copy.steered),
        *(pa.array(row, mask=row == MISSING) for row in copy.values),
    ]
    schema = pa.schema(
        [pa.field(name, column.type) for name, column in zip(names, columns, strict=True)],
        metadata={"request": copy.id, "engine": copy.engine, "model": copy.model, "status": copy.status},
    )
    target = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(columns, schema=schema), target, compression="zstd")
    content = target.getbuffer()
    for first in range(0, len(content), limits.EXPORT_PART_BYTES):
        yield bytes(content[first : first + limits.EXPORT_PART_BYTES])


def _columns(copy: RecordCopy) -> list[tuple[str, int | None]]:
    """Return the name of each column, and the series that it holds.

    Names are unique: two probes of one name and site are numbered.
    """
    columns: list[tuple[str, int | None]] = [
        (name, None) for name in ("position", "part", "token_id", "text", "steered")
    ]
    names: set[str] = set()
    for row, series in enumerate(copy.series):
        name = f"{series.probe}@{series.site}" if series.probe else f"norm {series.site}"
        unique, number = name, 2
        while unique in names:
            unique, number = f"{name} {number}", number + 1
        names.add(unique)
        columns.append((unique, row))
    return columns


def _numbers(values: Any) -> list[str]:
    return [
        "" if text == "-inf" else "NaN" if text == "nan" else text.removesuffix(".0")
        for text in values.astype("U").tolist()
    ]


def _time(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _cell(text: str) -> str:
    if _FORMULA.match(text):
        text = f"'{text}"
    return '"' + text.replace('"', '""') + '"' if _QUOTED.search(text) else text


def _line(cells: Any) -> bytes:
    return (",".join(cells) + "\r\n").encode(errors="replace")
