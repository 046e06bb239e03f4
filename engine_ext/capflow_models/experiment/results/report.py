"""The report: one HTML file with its pictures inside, that needs no network; and the pictures as PNG beside it."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from capflow.files import make_directory, write_whole
from capflow_models.experiment.arms import Setting
from capflow_models.experiment.file import Experiment
from capflow_models.experiment.fits import DirectionFit
from capflow_models.experiment.prompts import LabelledPrompt
from capflow_models.experiment.records import Cell
from capflow_models.experiment.results import statistics
from capflow_models.experiment.results.manifest import Manifest
from capflow_models.experiment.results.metrics import MEANINGS, SPEEDS, Match, ResultTables, broken, point_of
from capflow_models.experiment.results.plots import PICTURES, pictures

ANSWERS_SHOWN = 3
"""Prompts of each label whose answers are shown."""

REACHED_MIN = 0.5
"""The share of resamples in which the other arm must reach an effect, as intervals need it."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px } td, th { padding: .25rem .6rem; text-align: left }
th { border-bottom: 2px solid #999 } td { border-bottom: 1px solid #ddd; vertical-align: top }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.i { color: #777; font-size: 11px } figure { margin: 1.5rem 0 } img { max-width: 100% } figcaption { color: #555 }
pre { background: #f5f5f5; padding: .7rem; overflow-x: auto; font-size: 12px } .s { overflow-x: auto }
"""


def write_report(
    experiment: Experiment,
    settings: Sequence[Setting],
    prompts: Sequence[LabelledPrompt],
    cells: Sequence[Cell],
    tables: ResultTables,
    fits: Sequence[DirectionFit],
    manifest: Manifest,
    out: Path,
) -> None:
    """Write `report.html` and `plots/*.png`."""
    drawn = pictures(experiment, settings, cells, tables)
    make_directory(out / "plots")
    for name in PICTURES:
        (out / "plots" / f"{name}.png").unlink(missing_ok=True)
    for name, (_, picture) in drawn.items():
        write_whole(out / "plots" / f"{name}.png", picture)
    name = experiment.path.stem
    body = [
        f"<h1>{_text(name)}</h1>",
        f"<p>{_text(_summary(experiment, settings, prompts, cells))}</p>",
        *(f"<p><b>{_text(line)}</b></p>" for line in broken_lines(settings, cells)),
        *_matches(experiment, settings, tables),
        *(_figure(name, drawn[name]) for name in drawn),
        "<h2>By arm</h2>",
        _metrics(experiment, settings, tables, "target"),
        _metrics(experiment, settings, tables, "benign"),
        *_answers(settings, prompts, cells),
        "<h2>Probes and vectors</h2>",
        _fits(fits),
        "<h2>Metrics</h2>",
        _table(["metric", "meaning"], [[_text(MEANINGS[m][0]), _text(MEANINGS[m][1])] for m in experiment.metrics]),
        "<h2>How to repeat it</h2>",
        f"<pre>{_text(manifest.command)}</pre>",
        _table(["package", "version"], [[_text(k), _text(v)] for k, v in manifest.versions.items()]),
        _table(["file", "SHA-256"], [[_text(k), f"<code>{v}</code>"] for k, v in manifest.files.items()]),
        f"<pre>{_text(experiment.text)}</pre>",
    ]
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(name)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )
    write_whole(out / "report.html", page.encode())


def _summary(
    experiment: Experiment, settings: Sequence[Setting], prompts: Sequence[LabelledPrompt], cells: Sequence[Cell]
) -> str:
    target = sum(prompt.label == "target" for prompt in prompts)
    general = experiment.general
    return (
        f"{len(cells)} answers of {general.model}: {len(settings)} settings of {len(experiment.arms)} arms on {target} "
        f"target and {len(prompts) - target} benign prompts, seeds {', '.join(map(str, general.seeds))}. Intervals are "
        f"{general.confidence:.0%} bootstrap intervals over prompts ({general.resamples} resamples, the same ones for "
        f"every arm); a mean of fewer than {statistics.PROMPTS_MIN} prompts has none."
    )


def broken_lines(settings: Sequence[Setting], cells: Sequence[Cell]) -> list[str]:
    """Return a line for each setting with answers that have a NaN or infinite value."""
    counts = broken(cells)
    total = len(cells) // max(1, len(settings))
    return [
        f"{setting.title}: {count} of {total} answers have NaN or infinite values, which are in no mean"
        for setting in settings
        if (count := counts.get(point_of(setting)))
    ]


def _matches(experiment: Experiment, settings: Sequence[Setting], tables: ResultTables) -> Iterable[str]:
    if not tables.matches or experiment.effect is None or experiment.harm is None:
        return
    titles = {setting.name: setting.title for setting in settings}
    yield "<h2>Harm at equal effect</h2>"
    effect, harm = MEANINGS[experiment.effect][0], MEANINGS[experiment.harm][0]
    yield (
        f"<p>Effect is the change of {_text(effect)} on target prompts against the baseline; harm is the change of "
        f"{_text(harm)} on benign ones. The other arm's harm is read off its line through its scales at the same "
        "effect, in every resample. It has none where its line does not reach the effect: those resamples are left "
        "out, and reached is the share of the others.</p>"
    )
    columns = ["setting", "effect", "harm", "harm of", "at this effect", "difference", "reached", "verdict"]
    yield _table(columns, [
        [_text(titles[m.setting]), _number(*m.effect), _number(*m.harm), _text(m.other), _number(*m.other_harm),
         _number(*m.difference), f"<b>{m.reached:.0%}</b>", _text(verdict(m))]
        for m in tables.matches
    ])  # fmt: skip


def verdict(match: Match) -> str:
    """Return what the difference of harms says: nothing if the other arm reaches the effect by chance only."""
    point, low, high = match.difference
    if math.isnan(point):
        return f"{match.other} does not reach the effect"
    if match.reached < REACHED_MIN:
        return f"{match.other} reaches the effect in {match.reached:.0%} of the resamples only"
    if math.isnan(low):
        return "too few prompts"
    if high < 0:
        return "less harm"
    return "more harm" if low > 0 else "no difference shown"


def _figure(name: str, picture: tuple[str, bytes]) -> str:
    data = base64.b64encode(picture[1]).decode()
    caption = _text(picture[0])
    return (
        f'<figure><img alt="{_text(name)}: {caption}" src="data:image/png;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _metrics(experiment: Experiment, settings: Sequence[Setting], tables: ResultTables, label: str) -> str:
    rows = {(row.setting, row.metric): row for row in tables.rows if row.label == label}
    lines = []
    for setting in settings:
        line = [_text(setting.title)]
        for metric in experiment.metrics:
            row = rows.get((setting.name, metric))
            line.append("" if row is None else _number(row.mean, row.low, row.high))
        lines.append(line)
    differences = [m for m in experiment.metrics if m not in SPEEDS]
    changes = [
        [_text(setting.title)]
        + [
            "" if (row := rows.get((setting.name, metric))) is None
            else _number(row.difference, row.difference_low, row.difference_high)
            for metric in differences
        ]
        for setting in settings if setting.kind != "baseline"
    ]  # fmt: skip
    return (
        f"<h3>{label} prompts</h3>"
        + _table(["setting", *map(_title, experiment.metrics)], lines)
        + "<p>Difference to the baseline, paired by prompt:</p>"
        + _table(["setting", *map(_title, differences)], changes)
    )


def _title(metric: str) -> str:
    return f'<span title="{_text(MEANINGS[metric][1])}">{_text(MEANINGS[metric][0])}</span>'


def _answers(settings: Sequence[Setting], prompts: Sequence[LabelledPrompt], cells: Sequence[Cell]) -> Iterable[str]:
    yield "<h2>Some answers</h2>"
    for label in ("target", "benign"):
        for prompt in [p for p in prompts if p.label == label][:ANSWERS_SHOWN]:
            yield f"<h3>{label}: {_text(prompt.prompt)}</h3>"
            lines = []
            for setting in settings:
                cell = next((c for c in cells if c.prompt_id == prompt.id and point_of(c) == point_of(setting)), None)
                if cell is not None:
                    fired = "" if cell.first_firing is None else f"fired at {cell.first_firing:+d}"
                    lines.append([_text(setting.title), _text(cell.text), fired])
            yield _table(["setting", "answer", "gate"], lines)


def _fits(fits: Sequence[DirectionFit]) -> str:
    lines = []
    for fit in fits:
        judged = "" if fit.auc is None else f"{fit.auc:.3f}"
        threshold = "" if fit.threshold is None else f"{fit.threshold:.4g}"
        counts = [str(fit.texts), str(fit.held_out)] if fit.auc is not None else ["", ""]
        lines.append([fit.name, fit.site, _text(fit.source), *counts, judged, threshold, f"{fit.norm:.4g}"])
    columns = ["name", "site", "from", "fitted on", "held out", "AUC or share along it", "threshold", "norm"]
    return _table(columns, lines)


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{column}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f'<td class="{"n" if c.startswith("<b>") else ""}">{c}</td>' for c in line) + "</tr>"
        for line in lines
    )
    return f'<div class="s"><table><tr>{head}</tr>{body}</table></div>'


def _number(mean: float, low: float, high: float) -> str:
    if math.isnan(mean):
        return ""
    inside = "" if math.isnan(low) or low == high else f'<br><span class="i">{_short(low)} to {_short(high)}</span>'
    return f"<b>{_short(mean)}</b>{inside}"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _text(text: str) -> str:
    return html.escape(text)
