"""The pictures of a report, drawn with matplotlib to files; no window is ever opened."""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from capflow_models.experiment.arms import Setting
from capflow_models.experiment.file import Experiment
from capflow_models.experiment.records import Cell
from capflow_models.experiment.results.metrics import MEANINGS, MetricRow, ResultTables

COLOURS = {
    "baseline": "#6f6f6f", "always_on": "#d1590f", "random": "#a0a0a0", "shadow": "#8c6bb1", "gated_sync": "#0b62a4",
    "gated_async": "#2e8b57", "in_graph": "#c2185b", "prompt_only": "#b8860b",
}  # fmt: skip
MARKERS = {
    "baseline": "o", "always_on": "s", "random": "x", "shadow": "D", "gated_sync": "^", "gated_async": "v",
    "in_graph": "P", "prompt_only": "*",
}  # fmt: skip
TRAJECTORIES_MAX = 24
"""Requests of each label whose scores are drawn."""


PICTURES = ("effect", "gate", "scores", "kl", "costs")
"""The names of all pictures."""


def pictures(
    experiment: Experiment, settings: Sequence[Setting], cells: Sequence[Cell], tables: ResultTables
) -> dict[str, tuple[str, bytes]]:
    """Return the pictures that the results allow, by name: each with its caption, as PNG."""
    import matplotlib as mpl

    mpl.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    draws: dict[str, Callable[[], tuple[str, Any] | None]] = {
        "effect": lambda: _effect(experiment, settings, tables),
        "gate": lambda: _gate(tables, settings),
        "scores": lambda: _scores(settings, cells),
        "kl": lambda: _kl(settings, cells),
        "costs": lambda: _costs(settings, tables),
    }
    drawn = {}
    for name in PICTURES:
        picture = draws[name]()
        if picture is not None:
            stream = io.BytesIO()
            picture[1].savefig(stream, format="png", dpi=110, metadata={"Software": None})
            drawn[name] = (picture[0], stream.getvalue())
    return drawn


def _figure(width: float, height: float, columns: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained", facecolor="white")
    axes = list(figure.subplots(1, columns, squeeze=False)[0])
    for each in axes:
        each.grid(color="#e3e3e3", lw=0.7)
        each.set_axisbelow(True)
    return figure, axes


def _rows(tables: ResultTables) -> dict[tuple[str, str, str], MetricRow]:
    return {(row.setting, row.label, row.metric): row for row in tables.rows}


def _effect(experiment: Experiment, settings: Sequence[Setting], tables: ResultTables) -> tuple[str, Any] | None:
    """Draw effect on target prompts against harm on benign ones, each arm a line in the order of its scales."""
    effect, harm, rows = experiment.effect, experiment.harm, _rows(tables)
    if effect is None or harm is None:
        return None
    figure, (axes,) = _figure(7.6, 5.2)
    lines: dict[tuple[Any, ...], list[tuple[Setting, MetricRow, MetricRow]]] = defaultdict(list)
    for setting in settings:
        own = rows.get((setting.name, "target", effect))
        theirs = rows.get((setting.name, "benign", harm))
        if own is not None and theirs is not None:
            key = (setting.arm, setting.layer, setting.threshold, setting.sharpness)
            lines[key].append((setting, own, theirs))
    for points in lines.values():
        points.sort(key=lambda point: point[0].scale or 0.0)
        setting = points[0][0]
        colour, marker = COLOURS[setting.kind], MARKERS[setting.kind]
        x = np.array([[p[1].difference, p[1].difference_low, p[1].difference_high] for p in points])
        y = np.array([[p[2].difference, p[2].difference_low, p[2].difference_high] for p in points])
        title = msgspec.structs.replace(setting, scale=None).title
        errors = {"xerr": _errors(x), "yerr": _errors(y)}
        axes.errorbar(
            x[:, 0],
            y[:, 0],
            **errors,
            color=colour,
            marker=marker,
            ms=6,
            lw=1.4,
            elinewidth=0.7,
            alpha=0.9,
            label=title,
        )
        for point, each, height in zip(points, x[:, 0], y[:, 0], strict=True):
            if point[0].scale is not None and len(points) > 1:
                axes.annotate(
                    f"{point[0].scale:g}", (each, height), (5, 4), textcoords="offset points", fontsize=8, color=colour
                )
    _limit(axes, [point for points in lines.values() for point in points])
    axes.axhline(0, color="#999999", lw=0.8)
    axes.axvline(0, color="#999999", lw=0.8)
    axes.set_xlabel(f"effect on target prompts: change of {MEANINGS[effect][0]}")
    axes.set_ylabel(f"harm on benign prompts: change of {MEANINGS[harm][0]}")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8.5)
    caption = (
        f"Effect against harm, each against the baseline, with {experiment.general.confidence:.0%} intervals. Numbers "
        "are scales. At one effect, the lower arm is better."
    )
    return caption, figure


def _limit(axes: Any, points: Sequence[tuple[Setting, MetricRow, MetricRow]]) -> None:
    """Leave out points far above the others, such as random vectors, and name them."""
    ceiling = 1.3 * max((harm.difference for setting, _, harm in points if setting.kind != "random"), default=0.0)
    outside = [(setting, harm) for setting, _, harm in points if harm.difference > 2 * ceiling]
    if ceiling > 0 and outside:
        axes.set_ylim(-0.08 * ceiling, ceiling)
        names = ", ".join(f"{setting.title}: {harm.difference:.2g}" for setting, harm in outside)
        axes.set_title(f"outside: {names}", fontsize=9, loc="left", color="#777777")


def _errors(values: Any) -> Any:
    low, high = values[:, 0] - values[:, 1], values[:, 2] - values[:, 0]
    return np.nan_to_num(np.maximum(0, np.array([low, high])))


def _gate(tables: ResultTables, settings: Sequence[Setting]) -> tuple[str, Any] | None:
    """Draw the ROC curve, and the rate of each gate by label."""
    if not tables.separations:
        return None
    rows = _rows(tables)
    figure, (left, right) = _figure(10.5, 4.4, 2)
    roc = tables.separations[0]
    left.plot(roc.false, roc.true, color="#0b62a4", lw=2, drawstyle="steps-post")
    left.plot([0, 1], [0, 1], color="#999999", lw=0.8, ls=":")
    left.set_xlabel("benign prompts whose gate fires")
    left.set_ylabel("target prompts whose gate fires")
    left.set_title(f"AUC {roc.auc:.3f} ({roc.low:.3f} to {roc.high:.3f})", fontsize=10, loc="left")
    seen: set[tuple[Any, ...]] = set()
    for setting in settings:
        own = [rows.get((setting.name, label, "gate_rate")) for label in ("target", "benign")]
        if None in own:
            continue
        point = tuple(row.mean for row in own if row is not None)
        # Arms whose gates fire alike share a place.
        size = 11 - 2.5 * sum(1 for each in seen if each == point)
        seen.add(point)
        left.plot(point[1], point[0], MARKERS[setting.kind], color=COLOURS[setting.kind], ms=max(4, size), mfc="none")
    bars = [s for s in settings if (s.name, "target", "gate_rate") in rows][:16]
    if not bars:
        right.remove()
        return "How well the highest score of a request separates the labels; no arm has a gate.", figure
    places = np.arange(len(bars))
    for offset, label, colour in ((-0.2, "target", "#0b62a4"), (0.2, "benign", "#d1590f")):
        each = [rows[s.name, label, "gate_rate"] for s in bars]
        heights = np.array([[row.mean, row.low, row.high] for row in each])
        right.barh(places + offset, heights[:, 0], 0.36, xerr=_errors(heights), color=colour, label=label, alpha=0.85)
    right.set_yticks(places, [s.title for s in bars], fontsize=8)
    right.invert_yaxis()
    right.set_xlim(0, 1.05)
    right.set_xlabel("share of answers whose gate fired")
    figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=8.5)
    return "Left: how well the highest score of a request separates the labels. Right: how often gates fired.", figure


def _scores(settings: Sequence[Setting], cells: Sequence[Cell]) -> tuple[str, Any] | None:
    """Draw the scores of some requests by position, where nothing steers and in the gated arm of the largest scale."""
    gated = sorted((s for s in settings if s.kind in ("gated_sync", "in_graph", "gated_async")), key=_scale)
    plain = min(settings, key=lambda s: {"shadow": 0, "baseline": 1}.get(s.kind, 2))
    chosen = [plain, *gated[-1:]]
    if not any(cell.scores for cell in cells):
        return None
    figure, panels = _figure(10.5, 4.2, len(chosen))
    for axes, setting in zip(panels, chosen, strict=True):
        counts: dict[str, int] = defaultdict(int)
        for cell in cells:
            same = (cell.arm, cell.threshold, cell.sharpness, cell.scale, cell.layer)
            if same != (setting.arm, setting.threshold, setting.sharpness, setting.scale, setting.layer):
                continue
            counts[cell.label] += 1
            if counts[cell.label] <= TRAJECTORIES_MAX and cell.scores:
                places = np.array(cell.score_positions) - cell.prompt_tokens
                # The first token's stream is often a hundred times as long as the others.
                inside = np.array(cell.score_positions) > 0
                axes.plot(
                    places[inside], np.array(cell.scores)[inside], lw=0.8, alpha=0.6,
                    marker="." if inside.sum() < 3 else None,
                    color="#0b62a4" if cell.label == "target" else "#d1590f",
                )  # fmt: skip
        if setting.threshold is not None:
            axes.axhline(setting.threshold, color="black", lw=0.9, ls="--")
        axes.axvline(-0.5, color="#999999", lw=0.9)
        axes.set_title(setting.title, fontsize=10, loc="left")
        axes.set_xlabel("position, from the first generated one")
    panels[0].set_ylabel("score of the gate's probe")
    return "Scores by position: target prompts blue, benign ones orange, the threshold dashed.", figure


def _scale(setting: Setting) -> float:
    return setting.scale or 0.0


def _kl(settings: Sequence[Setting], cells: Sequence[Cell]) -> tuple[str, Any] | None:
    """Draw the mean KL by position of the baseline's answer, for each arm at its largest scale."""
    if not any(cell.kl for cell in cells):
        return None
    largest: dict[str, Setting] = {}
    for setting in settings:
        if setting.kind != "baseline" and (
            setting.arm not in largest or _scale(setting) > _scale(largest[setting.arm])
        ):
            largest[setting.arm] = setting
    if not largest:
        return None
    figure, panels = _figure(10.5, 4.0, 2)
    for axes, label in zip(panels, ("target", "benign"), strict=True):
        for setting in largest.values():
            mine = [
                cell.kl for cell in cells
                if (cell.arm, cell.threshold, cell.sharpness, cell.scale, cell.layer, cell.label)
                == (setting.arm, setting.threshold, setting.sharpness, setting.scale, setting.layer, label)
            ]  # fmt: skip
            length = max(map(len, mine), default=0)
            averages = [np.mean([each[n] for each in mine if n < len(each)]) for n in range(length)]
            style = {"marker": MARKERS[setting.kind], "ms": 4, "color": COLOURS[setting.kind]}
            axes.plot(range(length), averages, lw=1.3, label=setting.title, **style)
        axes.set_title(f"{label} prompts", fontsize=10, loc="left")
        axes.set_xlabel("token of the baseline's answer")
    panels[0].set_ylabel("mean KL(baseline || arm), nats")
    panels[1].sharey(panels[0])
    panels[0].set_yscale("symlog", linthresh=0.05)
    panels[0].set_ylim(bottom=0)
    panels[0].legend(frameon=False, fontsize=8)
    return "KL to the baseline at each of the baseline's tokens, each arm at its largest scale.", figure


def _costs(settings: Sequence[Setting], tables: ResultTables) -> tuple[str, Any] | None:
    rows = _rows(tables)
    metrics = [m for m in ("tokens_per_s", "ttft_ms", "tpot_ms") if any(row.metric == m for row in tables.rows)]
    if not metrics:
        return None
    shown = list(settings)[:24]
    figure, panels = _figure(11, 1.2 + 0.24 * len(shown), len(metrics))
    places = np.arange(len(shown))
    for axes, metric in zip(panels, metrics, strict=True):
        each = [rows.get((s.name, "all", metric)) for s in shown]
        values = np.array([[r.mean, r.low, r.high] if r is not None else [math.nan] * 3 for r in each])
        colours = [COLOURS[s.kind] for s in shown]
        axes.barh(places, np.nan_to_num(values[:, 0]), 0.7, xerr=_errors(values), color=colours, alpha=0.85)
        axes.set_yticks(places, [s.title for s in shown] if axes is panels[0] else [""] * len(shown), fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(MEANINGS[metric][0])
    return "Costs: every arm captures the rows that score its answers, so arms compare with each other only.", figure
