"""A picture of norms by layer and position: a panel for each hook, all with one logarithmic colour scale.

Needs matplotlib, which the extra `plot` installs. It draws to a file and never opens a window.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from capflow.capture.site import FORWARD_HOOKS, Site
from capflow.errors import UsageError, explain
from capflow.extras import require
from capflow.files import whole_file
from capflow_consumers.inspect.norms import NormStats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# All lengths are in inches.
_WIDTH = 10.0
# Of all layers together, within the bounds of a layer's height.
_HEIGHT = 12.0
_ROW_HEIGHTS = 0.1, 0.22
_PANEL_HEIGHTS = 1.2, 9.0
_TICK_HEIGHT = 0.13
# Cells at either end that do not stretch the colour scale.
_EXTREMES_PERCENT = 1.0
_HOOK_TITLES = {
    "pre_attn": "pre_attn: residual stream entering the layer",
    "attn_in": "attn_in: normalised input of attention",
    "attn_out": "attn_out: what attention adds",
    "post_attn": "post_attn: residual stream after attention",
    "post_block": "post_block: residual stream leaving the layer",
    "mlp_in": "mlp_in: normalised input of the MLP",
    "mlp_out": "mlp_out: what the MLP adds",
    "final": "final: residual stream after the last norm",
}


def check_plot(file: Path) -> None:
    """Raise UsageError when a picture cannot be drawn to a file; called before the data set is read."""
    require("plot", "--png")
    if file.suffix.lower() != ".png":
        raise UsageError(explain("--png", got=str(file), expected="a file whose name ends in .png"))
    if not file.absolute().parent.is_dir():
        raise UsageError(explain("--png", got=f"{file}, whose directory does not exist", do="make it first"))


def plot_norms(norms: dict[Site, NormStats], file: Path, title: str) -> None:
    """Draw the mean norm at every layer and position to a PNG file, which appears once it is whole.

    Raises UsageError when there is no norm above 0, CapflowError when the file cannot be written.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    panels = _panels(norms)
    values = np.concatenate([grid.ravel() for _, grid in panels.values()]) if panels else np.zeros(0)
    values = values[values > 0]
    if not len(values):
        raise UsageError(explain("--png: no row has a norm above 0", do="run it without --png to see the norms"))
    low, high = np.percentile(values, [_EXTREMES_PERCENT, 100 - _EXTREMES_PERCENT])
    # A scale needs a width.
    if high < low * 1.01:
        low, high = low / 1.1, high * 1.1
    scale = LogNorm(low, high)
    width = max(stats.column_width for stats in norms.values())
    row = np.clip(_HEIGHT / sum(len(grid) for _, grid in panels.values()), *_ROW_HEIGHTS)
    heights = [float(np.clip(row * len(grid), *_PANEL_HEIGHTS)) for _, grid in panels.values()]
    figure = Figure((_WIDTH, sum(heights) + 0.55 * len(heights) + 0.9), layout="constrained")
    axes = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for ax, height, (hook, (layers, grid)) in zip(axes, heights, panels.items(), strict=True):
        image = _draw(ax, layers, grid, width, scale, max(1, int(np.ceil(len(layers) * _TICK_HEIGHT / height))))
        ax.set_title(_HOOK_TITLES[hook], loc="left", fontsize=10)
    axes[-1].set_xlabel("position (tokens from the start of the prompt)" + (f", {width} a column" * (width > 1)))
    ends = ("min" if low > values.min() else "") + ("max" if high < values.max() else "")
    extend = {"minmax": "both"}.get(ends, ends or "neither")
    look: dict[str, Any] = {
        "extend": extend,
        "extendfrac": 0.15 / sum(heights),
        "pad": 0.015,
        "aspect": max(8.0, sum(heights) * 5),
    }
    bar = figure.colorbar(image, ax=list(axes), **look)
    bar.set_label("mean norm (activation units, log)" if sum(heights) > 2 else "mean norm\n(activation units, log)")
    _label_ticks(bar.ax.yaxis, low, high)
    holes = any(np.isnan(grid).any() for _, grid in panels.values())
    figure.suptitle(title + "; grey: no row" * holes, fontsize=11, x=0.01, ha="left")
    with whole_file(file) as stream:
        figure.savefig(stream, format="png", dpi=130)


def _panels(norms: dict[Site, NormStats]) -> dict[str, tuple[list[int], npt.NDArray[np.float64]]]:
    """Return, for each hook with rows, its layers and the mean norms `[layers, columns]`, NaN where there is no row."""
    width = max((stats.column_width for stats in norms.values()), default=1)
    for stats in norms.values():
        stats.widen(width)
    lines = {site: stats.column_norms for site, stats in norms.items()}
    columns = max(map(len, lines.values()), default=0)
    panels = {}
    for hook in FORWARD_HOOKS:
        layers = sorted(site.layer for site in lines if site.hook == hook)
        if layers:
            grid = np.full((len(layers), columns), np.nan)
            for row, layer in enumerate(layers):
                line = lines[Site(layer, hook)]
                grid[row, : len(line)] = line
            panels[hook] = (layers, grid)
    return panels


def _draw(ax: Axes, layers: list[int], grid: npt.NDArray[np.float64], width: int, scale: Any, step: int) -> Any:
    from matplotlib.ticker import MaxNLocator

    # The colour of cells without a row.
    ax.set_facecolor("0.85")
    extent = (-0.5, grid.shape[1] * width - 0.5, -0.5, len(layers) - 0.5)
    # 0 has no logarithm; NaN leaves a cell empty.
    shown = np.where(grid == 0, scale.vmin / 2, grid)
    image = ax.imshow(
        shown, norm=scale, cmap="viridis", aspect="auto", origin="lower", extent=extent, interpolation="nearest"
    )
    ax.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]], fontsize=8)
    ax.set_ylabel("layer")
    ax.xaxis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
    return image


def _label_ticks(axis: Any, low: float, high: float) -> None:
    """Label the colour scale with plain numbers; several per decade if it spans few decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    decades = np.log10(high / low)
    steps = [1.0] if decades > 3 else [1.0, 2.0, 5.0] if decades > 0.7 else [1 + number / 2 for number in range(18)]
    axis.set_major_locator(LogLocator(subs=steps, numticks=12))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
