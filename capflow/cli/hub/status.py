"""`capflow status`: a running hub's counters."""

from __future__ import annotations

import click

from capflow.cli.hub.address import hub_options
from capflow.text.examples import examples


@click.command(epilog=examples("capflow status", "capflow status --json"))
@hub_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(address: str | None, key: str | None, insecure: bool, as_json: bool) -> None:
    """Show a running hub's counters."""
    from capflow.transport.client import Client

    with Client(address, key=key, insecure=insecure) as client:
        answer = client.status()
    if as_json:
        import json

        click.echo(json.dumps(answer, indent=2))
        return
    from rich.console import Console

    from capflow.cli.hub.view import view

    Console().print(view(answer, None))
