"""`capflow status`: a running hub's counters."""

from __future__ import annotations

from typing import Any

import click

from capflow.cli.hubat import hub_options


@click.command()
@hub_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(address: str | None, key: str | None, insecure: bool, as_json: bool) -> None:
    """Show a running hub's counters."""
    from capflow.client import Client

    with Client(address, key=key, insecure=insecure) as client:
        told = client.status()
    if as_json:
        import json

        click.echo(json.dumps(told, indent=2))
        return
    _print(told)


def _print(told: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    requests = told["requests"]
    console.print(
        f"{told['address']}  up {told['uptime_s']:.0f} s  requests {requests['done']} done, {requests['open']} open, "
        f"{requests['failed']} failed  dropped {told['dropped_rows'] or 0}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    for title, rows in (("sessions", told["sessions"]), ("consumers", _named(told["consumers"]))):
        if not rows:
            continue
        table = Table(title=title, title_justify="left")
        columns = list(dict.fromkeys(key for row in rows for key in row))
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(Text(str(row.get(column, ""))) for column in columns))
        console.print(table)


def _named(consumers: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"name": name, **counters} for name, counters in consumers.items()]
