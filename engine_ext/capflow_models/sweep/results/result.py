"""What a sweep returns: its tables, heatmaps, and how a notebook shows them."""

from __future__ import annotations

import base64
import html
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capflow.errors import UsageError, explain
from capflow.extras import missing, require
from capflow.files import make_directory, whole_file
from capflow.text.notebook import html_table
from capflow.text.tabular import Tabular
from capflow_models.sweep.results.heatmap import figure_of, part_of, png_of, strongest

if TYPE_CHECKING:
    import matplotlib.figure
    import pyarrow as pa

TABLES = ("patches", "summary", "pairs")
DATABASE = "sweep.duckdb"
_SHOWN = 8


class SweepResult(Tabular):
    """A finished sweep.

    patches: a row for each pair, direction, hook, layer, index, position and metric, as a `pyarrow.Table`: `value`,
        those of the unchanged runs `clean` and `corrupted`, and `recovery`, 0 for the corrupted run and 1 for the clean
        one. `index` is the head, the expert or the first of `entries` neurons; NULL for a whole row. `position` is NULL
        where all positions are changed together.
    summary: means over pairs by direction, hook, layer, index, place and metric, with bootstrap intervals.
    pairs: a row for each pair and metric: the prompts, the answers, and the values of the unchanged runs.
    """

    def __init__(self, patches: pa.Table, summary: pa.Table, pairs: pa.Table) -> None:
        self.patches, self.summary, self.pairs = patches, summary, pairs

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> SweepResult:
        """Return the sweep that a directory has. Raises UsageError if it has none that is finished."""
        require("files", "a sweep's tables", "pyarrow")
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return cls(*(pq.read_table(Path(directory) / f"{name}.parquet") for name in TABLES))
        except (OSError, pa.ArrowException) as e:
            expected = "the output directory of a finished sweep"
            raise UsageError(explain(f"{directory}", got=str(e), expected=expected)) from e

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the tables as Parquet files, and all of them as one DuckDB file, each whole."""
        require("duckdb", "a sweep's tables")
        import duckdb
        import pyarrow.parquet as pq

        out = Path(directory)
        make_directory(out)
        for name in TABLES:
            with whole_file(out / f"{name}.parquet") as file:
                pq.write_table(getattr(self, name), file)
        new = out / f".{DATABASE}.new"
        new.unlink(missing_ok=True)
        with duckdb.connect(str(new)) as database:
            for name in TABLES:
                path = os.fspath(out / f"{name}.parquet")
                database.execute(f"CREATE TABLE {name} AS SELECT * FROM read_parquet(?)", [path])  # noqa: S608
        new.replace(out / DATABASE)

    @property
    def directions(self) -> list[str]:
        """The directions of the sweep."""
        return list(self.summary["direction"].unique().to_pylist())

    @property
    def metrics(self) -> list[str]:
        """The metrics of the sweep."""
        return list(self.summary["metric"].unique().to_pylist())

    def to_arrow(self) -> pa.Table:
        """Return `patches`."""
        return self.patches

    def heatmap(self, metric: str = "", direction: str = "") -> matplotlib.figure.Figure:
        """Return the heatmap of a metric in a direction, by default of the first ones, as a figure of matplotlib.

        Raises UsageError for one that the sweep does not have.
        """
        require("plot", "a heatmap")
        metric, direction = metric or self.metrics[0], direction or self.directions[0]
        for name, value, values in (("metric", metric, self.metrics), ("direction", direction, self.directions)):
            if value not in values:
                raise UsageError(explain(name, got=value, expected=f"one of {', '.join(values)}"))
        figure: matplotlib.figure.Figure = figure_of(self.summary, direction, metric)[1]
        return figure

    def pictures(self) -> dict[str, tuple[str, bytes]]:
        """Return all heatmaps as PNG, each with its caption, by name."""
        drawn = {}
        for direction in self.directions:
            for metric in self.metrics:
                caption, figure = figure_of(self.summary, direction, metric)
                drawn[f"{direction}-{metric.replace(':', '.')}"] = (caption, png_of(figure))
        return drawn

    def __repr__(self) -> str:
        pairs, patches = len(self.pairs["pair"].unique()), self.patches.num_rows // len(self.metrics)
        counts = f"{pairs} pair{'s' * (pairs != 1)}, {patches} patches"
        return f"<SweepResult: {counts}, {', '.join(self.directions)}, {', '.join(self.metrics)}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the heatmap of the first metric, and the strongest cells."""
        parts = [f"<p>{html.escape(repr(self)[1:-1])}</p>"]
        for direction in self.directions:
            if not missing("plot"):
                caption, figure = figure_of(self.summary, direction, self.metrics[0])
                parts.append(image_of(caption, png_of(figure)))
            parts.append(strongest_table(self.summary, direction, self.metrics[0]))
        return "".join(parts)


def image_of(caption: str, picture: bytes) -> str:
    """Return a PNG inside HTML."""
    data, text = base64.b64encode(picture).decode(), html.escape(caption)
    return f'<figure><img alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'


def strongest_table(summary: Any, direction: str, metric: str, count: int = _SHOWN) -> str:
    """Return the strongest cells of a direction and a metric as an HTML table."""
    lines = [
        [
            part_of(row),
            row["place"],
            row["token"] or "",
            _number(row, "recovery"),
            _number(row, "value"),
        ]
        for row in strongest(summary, direction, metric, count)
    ]
    return html_table(["site", "place", "token", f"recovery of {metric}, {direction}", metric], lines)


def _number(row: dict[str, Any], name: str) -> str:
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    inside = "" if low is None or high is None else f" ({low:.3g} to {high:.3g})"
    return "" if row[name] is None else f"{row[name]:.3g}{inside}"
