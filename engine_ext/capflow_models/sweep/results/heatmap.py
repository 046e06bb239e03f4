"""The heatmaps of a sweep: layers against places, a panel for each hook, drawn with matplotlib without a window."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

UNCHANGED = {"denoise": 0.0, "noise": 1.0, "zero": 1.0, "mean": 1.0}
"""The recovery of the run that a direction changes, which has no colour."""

_LABELS_MAX = 40
_ROLES = {
    "before": "before", "changed_first": "first changed token", "changed_middle": "middle changed tokens",
    "changed_last": "last changed token", "after_first": "first token after", "after": "further tokens",
    "last": "last token",
}  # fmt: skip


def figure_of(summary: pa.Table, direction: str, metric: str) -> tuple[str, Any]:
    """Return the heatmap of a direction and a metric as a matplotlib figure, with its caption."""
    from matplotlib.figure import Figure

    rows = _rows(summary, direction, metric)
    hooks = list(dict.fromkeys(row["hook"] for row in rows))
    places = dict(sorted({row["place_number"]: _label(row) for row in rows}.items()))
    layers = sorted({row["layer"] for row in rows})
    width = max(2.6, min(9.0, 0.34 * len(places) + 0.8))
    height = max(2.6, min(9.0, 0.2 * len(layers) + 1.6))
    figure = Figure((0.9 + width * len(hooks), height), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(hooks), squeeze=False, sharey=True)[0]
    middle = UNCHANGED[direction]
    values = np.array([row["recovery"] for row in rows if row["recovery"] is not None], np.float64)
    reach = max(1.0, float(np.quantile(np.abs(values - middle), 0.995))) if len(values) else 1.0
    image: Any = None
    for axes, hook in zip(panels, hooks, strict=True):
        grid = np.full((len(layers), len(places)), np.nan)
        for row in rows:
            if row["hook"] == hook and row["recovery"] is not None:
                grid[layers.index(row["layer"]), list(places).index(row["place_number"])] = row["recovery"]
        bounds = {"vmin": middle - reach, "vmax": middle + reach}
        image = axes.imshow(grid, origin="lower", aspect="auto", cmap="RdBu", interpolation="nearest", **bounds)
        step = max(1, -(-len(places) // _LABELS_MAX))
        axes.set_xticks(range(0, len(places), step), list(places.values())[::step], rotation=60, ha="right", fontsize=8)
        step = max(1, -(-len(layers) // 20))
        axes.set_yticks(range(0, len(layers), step), layers[::step], fontsize=8)
        axes.set_title(hook, fontsize=10, loc="left")
    panels[0].set_ylabel("layer")
    figure.colorbar(image, ax=list(panels), label=f"recovery of {metric}", shrink=0.9)
    pairs = max(row["pairs"] for row in rows)
    meaning = {
        "denoise": "clean rows in the corrupted run: 1 restores the clean run",
        "noise": "corrupted rows in the clean run: 0 makes it the corrupted one",
        "zero": "zeros in the clean run: 1 leaves it unchanged",
        "mean": "mean rows in the clean run: 1 leaves it unchanged",
    }[direction]
    return f"{metric}, {direction} ({meaning}); mean over {pairs} pair{'s' * (pairs != 1)}.", figure


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


def printable(token: str) -> str:
    """Return a token's text on one line, as a plot shows it: `$` starts no formula, and a blank is visible."""
    text = token.replace("$", r"\$").replace("\n", "⏎").strip(" ")
    return text or "␣"


def strongest(summary: pa.Table, direction: str, metric: str, count: int) -> Sequence[dict[str, Any]]:
    """Return the cells that move a metric most from the unchanged run, the strongest first."""
    rows = [row for row in _rows(summary, direction, metric) if row["recovery"] is not None]
    middle = UNCHANGED[direction]
    return sorted(rows, key=lambda row: -abs(row["recovery"] - middle))[:count]
