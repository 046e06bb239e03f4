"""`capflow inspect`: describes a captured data set and checks that it is whole."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from capflow.errors import CapflowError
from capflow.text.examples import examples
from capflow.text.printable import printable
from capflow_consumers.dataset.reader import open_dataset
from capflow_consumers.inspect.survey import SiteSurvey, Survey, Surveyor

if TYPE_CHECKING:
    from rich.console import Console

_LISTED_MAX = 10
# The width of the output if it is not a terminal.
_WIDTH = 120


@click.command(epilog=examples("capflow inspect rows", "capflow inspect rows --png norms.png"))
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--png", type=click.Path(path_type=Path), metavar="FILE", help="Draw norms by layer and position.")
@click.option("--quick", is_flag=True, help="Read no rows: show no norms and check no checksums.")
def inspect(path: Path, png: Path | None, *, as_json: bool, quick: bool) -> None:
    """Describe the captured data set in PATH; the exit code is 1 when some of it is damaged."""
    from rich.console import Console

    from capflow_consumers.inspect.norms_plot import check_plot, plot_norms
    from capflow_consumers.progress import progress

    if png is not None:
        if quick:
            raise click.UsageError("--png needs norms, which --quick does not compute")
        check_plot(png)
    dataset = open_dataset(path)
    surveyor = Surveyor(dataset, check=not quick)
    with progress("captures") as step:
        survey = surveyor.survey(step)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(survey)).decode())
    else:
        _show(survey, Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH))
    if png is not None and (surveyor.norms or not survey.damaged):
        plot_norms(surveyor.norms, png, f"{dataset.path.name}: {survey.captures} captures, {survey.rows:,} rows")
    if survey.damaged:
        counts = f"{survey.captures_damaged} of {max(survey.captures, survey.captures_damaged)}"
        raise CapflowError(f"{path}: {counts} captures are damaged; the first: {survey.damaged[0]}")


def _show(survey: Survey, console: Console) -> None:
    from rich.filesize import decimal
    from rich.table import Table

    def say(label: str, text: str) -> None:
        console.print(f"{label:9} {printable(text)}", markup=False, soft_wrap=True)

    say("captures", f"{survey.captures} {_listed(survey.statuses)}; requests ended {_listed(survey.ended)}")
    say("models", _listed(survey.models) or "none")
    say("rows", f"{survey.rows:,} at {survey.positions:,} positions, {survey.prompt_tokens:,} prompt tokens")
    if survey.positions_steered or survey.events:
        steered = f"{survey.positions_steered:,} positions of {survey.captures_steered} captures"
        say("steered", f"{steered}; events {_listed(survey.events) or 'none'}")
    say("bytes", f"{decimal(survey.bytes)} of rows, {decimal(survey.bytes_on_disk)} on disk")
    if survey.sites:
        table = Table(box=None)
        for heading in ("site", "captures", "shape", "dtype", "missing"):
            table.add_column(heading, no_wrap=True)
        for heading in ("norm: median", "mean", "min", "max", "not finite") if survey.checked else ():
            table.add_column(heading, justify="right", no_wrap=True)
        for site in survey.sites:
            table.add_row(*_cells(site, norms=survey.checked))
        console.print(table)
    _show_integrity(survey, say)


def _cells(site: SiteSurvey, *, norms: bool) -> list[str]:
    shape = "/".join(", ".join(map(str, shape)) for shape in site.shapes)
    dtype = "/".join(site.dtypes) + (f" ({'/'.join(site.quantizations)})" if site.quantizations else "")
    cells = [site.site, str(site.captures), f"[{site.rows}, {shape}]".replace("[", r"\["), dtype]
    cells.append(str(site.rows_missing or "-"))
    if norms:
        values = (site.norm_median, site.norm_mean, site.norm_min, site.norm_max)
        cells += ["-" if value is None else f"{value:.4g}" if value < 1000 else f"{value:,.0f}" for value in values]
        cells.append(str(site.rows_not_finite or "-"))
    return list(map(printable, cells))


def _show_integrity(survey: Survey, say: Callable[[str, str], None]) -> None:
    for gap in survey.gaps[:_LISTED_MAX]:
        missing = "; ".join(f"{site} lacks {positions}" for site, positions in gap.missing.items())
        dropped = f"dropped {_listed(gap.dropped)}" if gap.dropped else ""
        say("gap", f"{gap.request!r} {gap.status}: {'; '.join(filter(None, (missing, dropped))) or gap.error}")
    if survey.captures_with_gaps > _LISTED_MAX:
        say("gap", f"and {survey.captures_with_gaps - _LISTED_MAX} more captures; --json lists them")
    for damage in survey.damaged[:_LISTED_MAX]:
        say("damaged", damage)
    if survey.captures_damaged > _LISTED_MAX:
        say("damaged", f"and {survey.captures_damaged - _LISTED_MAX} more captures; --json lists them")
    if not survey.checked:
        checksums = "not checked; run without --quick to check them"
    else:
        checksums = "all right, except in damaged captures" if survey.captures_damaged else "all right"
    say("checksums", checksums)
    dropped = f"dropped {_listed(survey.dropped) or 'none'}"
    gaps = f"{survey.captures_with_gaps} captures, {survey.rows_missing} rows missing, {dropped}"
    say("gaps", gaps if survey.captures_with_gaps else "none")


def _listed(counts: dict[str, int]) -> str:
    """Return counts as `ok 3, error 1`."""
    return ", ".join(f"{name} {count}" for name, count in counts.items())
