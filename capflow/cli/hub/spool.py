"""`capflow spool`: shows, verifies and empties a spool."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from capflow.cli.hub.dead import dead
from capflow.text.examples import examples

_directory = click.argument("directory", type=click.Path(path_type=Path))
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def spool() -> None:
    """Look into spools: the directories where frames wait on disk."""


spool.add_command(dead)


@spool.command(epilog=examples("capflow spool inspect DIRECTORY"))
@_directory
@_json
def inspect(directory: Path, as_json: bool) -> None:
    """Show what the spool in DIRECTORY holds; safe while a process writes it."""
    _show(_report(directory), as_json)


@spool.command(epilog=examples("capflow spool verify DIRECTORY --json"))
@_directory
@_json
def verify(directory: Path, as_json: bool) -> None:
    """Read every record of the spool in DIRECTORY.

    The exit code is 1 if a record cannot be read, or if rows of a request are missing from an inbox that no hub uses.
    """
    report = _report(directory, verify=True)
    _show(report, as_json)
    requests = report["requests"]
    sys.exit(1 if report["lost"] or (requests and requests["incomplete"] and not report["in_use"]) else 0)


@spool.command(epilog=examples("capflow spool purge DIRECTORY --yes"))
@_directory
@click.option("--yes", is_flag=True, help="Do not ask.")
def purge(directory: Path, yes: bool) -> None:
    """Remove all records of the spool in DIRECTORY; refused while a process writes it."""
    from capflow.buffers.spool.report import inspect, purge
    from capflow.errors import UsageError, explain

    report = inspect(directory)
    if report["records"] and not yes and not report["in_use"]:
        if not sys.stdin.isatty():
            got = f"{report['records']} records that were not delivered"
            raise UsageError(explain(f"spool {directory}", got=got, do="--yes removes them"))
        click.confirm(f"Remove {report['records']} records that were not delivered?", abort=True)
    click.echo(f"removed {purge(directory)} bytes")


def _report(directory: Path, *, verify: bool = False) -> dict[str, Any]:
    """Return the report of a spool; for an inbox also its requests."""
    from capflow.buffers.spool.report import inspect
    from capflow.hub.lanes.inbox_requests import requests_in

    return {**inspect(directory, verify=verify), "requests": requests_in(directory)}


def _show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        import json

        click.echo(json.dumps(report, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    from capflow.text.printable import printable

    console = Console()
    lost = ", ".join(f"{first}-{last}" for first, last in report["lost"]) or "none"
    console.print(
        f"{printable(report['directory'])}  {'in use  ' if report['in_use'] else ''}records {report['records']} left, "
        f"{report['acknowledged']} of {report['last']} done  bytes {report['bytes']}  "
        f"void {report['void_bytes']}  lost {lost}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if report["requests"] is not None:
        for line in _request_lines(report["requests"]):
            console.print(printable(line), highlight=False, markup=False, soft_wrap=True)
    for name in report["set_aside"]:
        console.print(f"set aside: {printable(name)}", highlight=False, markup=False, soft_wrap=True)
    table = Table("segment", "records left", "bytes", "damaged bytes")
    for row in report["segments"]:
        table.add_row(row["name"], *(str(row[key]) for key in ("records", "bytes", "damaged_bytes")))
    console.print(table)


def _request_lines(requests: dict[str, Any]) -> Iterator[str]:
    """Yield the lines about the requests of an inbox."""
    yield f"requests {requests['waiting']} waiting, {requests['split']} split, {requests['incomplete']} incomplete"
    for row in requests["named"]:
        also = f", also in {', '.join(row['also_in'])}" if row["also_in"] else ""
        missing = f", {row['rows_missing']} missing" if row["incomplete"] else ""
        yield f"  {row['request']} of {row['engine']}: {row['rows']} rows{missing}{also}"
    if (unnamed := requests["unnamed"]) > 0:
        yield f"  and {unnamed} more"
