"""The report of a sweep: one HTML file with its pictures inside, that needs no network; and the pictures beside it."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from capflow.files import make_directory, write_whole
from capflow_models.sweep.results.result import SweepResult, html_table, image_of, strongest_table

PLOTS = "plots"
REPORT = "report.html"

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
    title = {"patch": "Activation patching", "ablate": "Ablation"}[manifest["kind"]]
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
    """Return a line for each metric by which some pairs do not tell clean from corrupted the way the answers do."""
    lines = []
    for metric in ("logit_diff", "probability", "logprob"):
        rows = [row for row in result.pairs.to_pylist() if row["metric"] == metric]
        weak = [row["pair"] for row in rows if not row["clean"] > row["corrupted"]]
        if weak:
            names = ", ".join(weak[:5]) + ", …" * (len(weak) > 5)
            lines.append(f"{metric}: {len(weak)} of {len(rows)} pairs are no higher clean than corrupted ({names})")
    return lines


def _summary(result: SweepResult, manifest: Mapping[str, Any]) -> str:
    return (
        f"{repr(result)[1:-1]}, of {manifest['model']}. Recovery is (value - corrupted) / (clean - corrupted): 0 is "
        f"the corrupted run, 1 the clean one. Means are over pairs, with {manifest['confidence']} bootstrap intervals."
    )


def _pairs(result: SweepResult) -> str:
    lines: dict[str, list[str]] = {}
    for row in result.pairs.to_pylist():
        texts = [row[name] for name in ("pair", "clean_prompt", "corrupted_prompt", "answer", "wrong_answer")]
        lines.setdefault(row["pair"], texts).append(f"{row['clean']:.3g} / {row['corrupted']:.3g}")
    columns = [
        "pair",
        "clean",
        "corrupted",
        "answer",
        "wrong answer",
        *(f"{m}, clean / corrupted" for m in result.metrics),
    ]
    return html_table(columns, list(lines.values()))
