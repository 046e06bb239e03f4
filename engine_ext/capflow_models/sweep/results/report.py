"""The report of a sweep: one HTML file with its pictures inside, that needs no network; and the pictures beside it."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capflow.files import make_directory, write_whole
from capflow.text.notebook import html_table
from capflow_models.sweep.results.result import SweepResult, image_of, strongest_table

PLOTS = "plots"
REPORT = "report.html"

SPAN_SHARE_MIN = 0.05
"""Pairs with a smaller share of the median span are named: their recoveries divide by nearly nothing."""

_HIGHER = ("logit_diff", "probability", "logprob")
"""The metrics by which an answer is higher after the clean prompt."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px } td, th { padding: .25rem .6rem; text-align: left }
th { border-bottom: 2px solid #999 } td { border-bottom: 1px solid #ddd; vertical-align: top }
figure { margin: 1.5rem 0 } img { max-width: 100% } figcaption { color: #555 }
pre { background: #f5f5f5; padding: .7rem; overflow-x: auto; font-size: 12px }
"""


def write_report(result: SweepResult, manifest: Mapping[str, Any], out: Path) -> None:
    """Write `report.html` and `plots/*.png`; pictures of earlier reports are removed.

    manifest: how the sweep was made, by name.
    """
    drawn = result.pictures()
    make_directory(out / PLOTS)
    for path in (out / PLOTS).glob("*.png"):
        path.unlink()
    for name, (_, picture) in drawn.items():
        write_whole(out / PLOTS / f"{name}.png", picture)
    title = {"patch": "Activation patching", "ablate": "Ablation", "path": "Path patching"}[manifest["kind"]]
    body = [
        f"<h1>{title}</h1>",
        f"<p>{html.escape(_summary(result, manifest))}</p>",
        *(f"<p><b>{html.escape(line)}</b></p>" for line in weak_lines(result)),
        *(image_of(caption, picture) for caption, picture in drawn.values()),
        "<h2>The strongest cells</h2>",
        *(
            strongest_table(result.summary, direction, metric)
            for direction in result.directions
            for metric in result.metrics
        ),
        "<h2>Pairs</h2>",
        _pairs(result),
        "<h2>How to repeat it</h2>",
        html_table(["name", "value"], [[name, str(value)] for name, value in manifest.items()]),
    ]
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>'
        f"{title}</title><style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )
    write_whole(out / REPORT, page.encode())


def weak_lines(result: SweepResult) -> list[str]:
    """Return lines about pairs whose recoveries mean little, by metric.

    Such a pair has no value of an unchanged run, or is no higher clean than corrupted by a metric of the answer, or has
    a span |clean - corrupted| below `SPAN_SHARE_MIN` of the median span.
    """
    lines = []
    for metric in result.metrics:
        rows = [row for row in result.pairs.to_pylist() if row["metric"] == metric]
        spans = {row["pair"]: _span(row) for row in rows}
        weak = [row["pair"] for row in rows if metric in _HIGHER and not _is_higher(row)]
        finite = [span for span in spans.values() if math.isfinite(span)]
        least = SPAN_SHARE_MIN * statistics.median(finite) if finite else 0.0
        near = [pair for pair, span in spans.items() if pair not in weak and (span == 0.0 or not span >= least)]
        for pairs, fault in (
            (weak, "are no higher clean than corrupted"),
            (near, f"differ by less than {SPAN_SHARE_MIN:.0%} of the median, or have no value"),
        ):
            if pairs:
                names = ", ".join(pairs[:5]) + ", …" * (len(pairs) > 5)
                lines.append(f"{metric}: {len(pairs)} of {len(rows)} pairs {fault} ({names})")
    return lines


def _is_higher(row: Mapping[str, Any]) -> bool:
    return row["clean"] is not None and row["corrupted"] is not None and row["clean"] > row["corrupted"]


def _span(row: Mapping[str, Any]) -> float:
    """Return |clean - corrupted|; NaN if one of them is not there."""
    if row["clean"] is None or row["corrupted"] is None:
        return math.nan
    return float(abs(row["clean"] - row["corrupted"]))


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _summary(result: SweepResult, manifest: Mapping[str, Any]) -> str:
    return (
        f"{repr(result)[1:-1]}, of {manifest['model']}. Recovery is (value - corrupted) / (clean - corrupted): 0 is "
        f"the corrupted run, 1 the clean one. Means are over pairs, with {manifest['confidence']} bootstrap intervals."
    )


def _pairs(result: SweepResult) -> str:
    lines: dict[str, list[str]] = {}
    for row in result.pairs.to_pylist():
        texts = [row[name] for name in ("pair", "clean_prompt", "corrupted_prompt", "answer", "wrong_answer")]
        lines.setdefault(row["pair"], texts).append(f"{_shown(row['clean'])} / {_shown(row['corrupted'])}")
    columns = [
        "pair",
        "clean",
        "corrupted",
        "answer",
        "wrong answer",
        *(f"{m}, clean / corrupted" for m in result.metrics),
    ]
    return html_table(columns, list(lines.values()))
