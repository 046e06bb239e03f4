"""`capflow record`: a hub that keeps frames as they came, beside whatever other consumers it has."""

from __future__ import annotations

from typing import Any

import click

from capflow.cli.engine.run import run


@click.command(params=[*run.params])
@click.argument("path")
@click.option(
    "--capture",
    metavar="KEY=VALUE,…",
    default="",
    help="Options of the consumer `record`: hooks, layers, positions, capture, …; see `capflow plugins`.",
)
@click.pass_context
def record(context: click.Context, /, path: str, capture: str, consumers: tuple[str, ...], **options: Any) -> None:
    """Keep raw frames in the directory PATH, for `capflow replay`.

    It is `capflow run --consumer record:path=PATH` and takes all of its options: alone it waits for engines until Ctrl-C, with --model
    and --prompts it runs that model, and other consumers may run beside it. A recording that is there is gone on with.
    """
    escaped = path.replace("\\", "\\\\").replace(",", "\\,")
    own = f"record:path={escaped}" + (f",{capture}" if capture else "")
    context.invoke(run, consumers=(own, *consumers), **options)
