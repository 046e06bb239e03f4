"""The heatmaps of a sweep: layers against places, or against heads, drawn with matplotlib without a window."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa

UNCHANGED = {"denoise": 0.0, "noise": 1.0, "zero": 1.0, "mean": 1.0, "resample": 1.0}
"""The recovery of the run that a direction changes, which has no colour."""

PANELS_MAX = 12
"""The most panels of heads, neurons and experts in one picture."""

# White would be a run that changes nothing.
_NO_RUN = "0.75"
_LABELS_MAX = 40
_COLUMNS_MAX = 4
# In the place of a place's number: rows that are changed whole, whose panel has all places.
_WHOLE = -(1 << 40)
_ROLES = {
    "before": "before", "changed_first": "first changed token", "changed_middle": "middle changed tokens",
    "changed_last": "last changed token", "after_first": "first token after", "after": "further tokens",
    "last": "last token", "together": "all positions together",
}  # fmt: skip


class Panel(NamedTuple):
    """One panel of a heatmap.

    labels: of the columns: places, or entries of rows.
    grid: `[layers, columns]`, the recovery; NaN where no run is.
    """

    title: str
    labels: list[str]
    grid: npt.NDArray[np.float64]


def figure_of(summary: pa.Table, direction: str, metric: str) -> tuple[str, Any]:
    """Return the heatmap of a direction and a metric as a matplotlib figure, with its caption.

    Rows that are changed whole have a panel for each hook, layers against places. Heads, neurons and experts have one
    for each hook and place, layers against entries, of the `PANELS_MAX` places where a run moves the metric most.
    """
    from matplotlib.figure import Figure

    rows = _rows(summary, direction, metric)
    layers = sorted({row["layer"] for row in rows})
    middle = UNCHANGED[direction]
    panels, left_out = _panels(rows, layers, middle)
    columns = max(1, min(len(panels), _COLUMNS_MAX))
    lines = -(-len(panels) // columns)
    width = max(2.6, min(9.0 if lines == 1 else 5.0, 0.34 * max(len(panel.labels) for panel in panels) + 0.8))
    height = max(2.6, min(9.0, 0.2 * len(layers) + 1.6))
    figure = Figure((0.9 + width * columns, height * lines), layout="constrained", facecolor="white")
    every = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for unused in every.flat[len(panels) :]:
        unused.remove()
    values = np.array([row["recovery"] for row in rows if row["recovery"] is not None], np.float64)
    reach = max(1.0, float(np.quantile(np.abs(values - middle), 0.995))) if len(values) else 1.0
    image: Any = None
    for axes, panel in zip(every.flat, panels, strict=False):
        bounds = {"vmin": middle - reach, "vmax": middle + reach}
        image = axes.imshow(panel.grid, origin="lower", aspect="auto", cmap="RdBu", interpolation="nearest", **bounds)
        axes.set_facecolor(_NO_RUN)
        places = range(0, len(panel.labels), max(1, -(-len(panel.labels) // _LABELS_MAX)))
        axes.set_xticks(places, [panel.labels[n] for n in places], rotation=60, ha="right", fontsize=8)
        step = max(1, -(-len(layers) // 20))
        axes.set_yticks(range(0, len(layers), step), layers[::step], fontsize=8)
        axes.set_title(panel.title, fontsize=10, loc="left")
    for axes in every[:, 0]:
        axes.set_ylabel("layer")
    figure.colorbar(image, ax=list(every.flat[: len(panels)]), label=f"recovery of {metric}", shrink=0.9)
    return _caption(rows, direction, metric, left_out), figure


def _panels(rows: list[dict[str, Any]], layers: list[int], middle: float) -> tuple[list[Panel], int]:
    """Return the panels, and how many are left out."""
    grouped: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        at = _WHOLE if row["index"] is None else row["place_number"]
        grouped.setdefault((row["hook"], at, row["receiver"] or ""), []).append(row)
    strength = {
        key: max((abs(row["recovery"] - middle) for row in some if row["recovery"] is not None), default=0.0)
        for key, some in grouped.items()
    }
    whole = [key for key in grouped if key[1] == _WHOLE]
    single = sorted((key for key in grouped if key[1] != _WHOLE), key=lambda key: -strength[key])
    shown = {*whole, *single[:PANELS_MAX]}
    hooks = list(dict.fromkeys(row["hook"] for row in rows))
    order = sorted(shown, key=lambda key: (hooks.index(key[0]), *key[1:]))
    return [_panel(grouped[key], layers) for key in order], len(grouped) - len(shown)


def _panel(rows: list[dict[str, Any]], layers: list[int]) -> Panel:
    whole = rows[0]["index"] is None
    name = "place_number" if whole else "index"
    labels = dict(sorted({row[name]: _label(row) if whole else _entries(row) for row in rows}.items()))
    columns, grid = {number: n for n, number in enumerate(labels)}, np.full((len(layers), len(labels)), np.nan)
    for row in rows:
        if row["recovery"] is not None:
            grid[layers.index(row["layer"]), columns[row[name]]] = row["recovery"]
    title = rows[0]["hook"] if whole else f"{rows[0]['hook']}, {_label(rows[0])}"
    if rows[0]["receiver"]:
        title = f"{rows[0]['hook']} to {rows[0]['receiver']}"
    return Panel(title, list(labels.values()), grid)


def _caption(rows: list[dict[str, Any]], direction: str, metric: str, left_out: int) -> str:
    pairs = max(row["pairs"] for row in rows)
    meaning = {
        "denoise": "clean rows in the corrupted run: 1 restores the clean run",
        "noise": "corrupted rows in the clean run: 0 makes it the corrupted one",
        "zero": "zeros in the clean run: 1 leaves it unchanged",
        "mean": "mean rows in the clean run: 1 leaves it unchanged",
        "resample": "corrupted rows in the clean run: 1 leaves it unchanged",
    }[direction]
    rest = f" {left_out} further places, where less changes, have no panel." if left_out else ""
    return f"{metric}, {direction} ({meaning}); mean over {pairs} pair{'s' * (pairs != 1)}.{rest}"


def _rows(summary: pa.Table, direction: str, metric: str) -> list[dict[str, Any]]:
    import pyarrow.compute as pc

    chosen = (pc.field("direction") == direction) & (pc.field("metric") == metric)
    rows: list[dict[str, Any]] = summary.filter(chosen).to_pylist()
    return rows


def png_of(figure: Any) -> bytes:
    """Return a figure as PNG."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110, metadata={"Software": None})
    return stream.getvalue()


def _label(row: dict[str, Any]) -> str:
    """Return the label of a place: the role, or the position with the token that all pairs have there."""
    if row["place"] in _ROLES:
        return _ROLES[row["place"]]
    token = row["token"]
    return row["place"] if token is None else f"{row['place']} {printable(token)}"


def part_of(row: dict[str, Any]) -> str:
    """Return the name of what a row of the summary changes: `heads:5[3]`, or `post_block:5` for a whole row."""
    name = f"{row['hook']}:{row['layer']}" + ("" if row["index"] is None else f"[{_entries(row)}]")
    return f"{name} to {row['receiver']}" if row["receiver"] else name


def _entries(row: dict[str, Any]) -> str:
    """Return the label of entries: a number, or the first and the last."""
    first, count = row["index"], row["entries"]
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def printable(token: str) -> str:
    """Return a token's text on one line, as a plot shows it: `$` starts no formula, and a blank is visible."""
    text = token.replace("$", r"\$").replace("\n", "⏎").strip(" ")
    return text or "␣"


def strongest(summary: pa.Table, direction: str, metric: str, count: int) -> Sequence[dict[str, Any]]:
    """Return the cells that move a metric most from the unchanged run, the strongest first."""
    rows = [row for row in _rows(summary, direction, metric) if row["recovery"] is not None]
    middle = UNCHANGED[direction]
    return sorted(rows, key=lambda row: -abs(row["recovery"] - middle))[:count]
