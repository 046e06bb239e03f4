"""`capflow record`: a hub that stores raw frames, beside any other consumers."""

from __future__ import annotations

from typing import Any

import click

from capflow.cli.engine.run import run
from capflow.text.examples import examples


@click.command(
    params=[*run.params],
    epilog=examples("capflow record recording", "capflow record recording --model demo --prompts prompts.jsonl"),
)
@click.argument("path")
@click.option(
    "--capture",
    metavar="KEY=VALUE,…",
    default="",
    help="Options of the consumer `record`: hooks, layers, positions, capture, …; see `capflow plugins`.",
)
@click.pass_context
def record(context: click.Context, /, path: str, capture: str, consumers: tuple[str, ...], **options: Any) -> None:
    """Store raw frames in the directory PATH, for `capflow replay`.

    Equals `capflow run --consumer record:path=PATH` and takes all of its options. Alone it waits for engines until
    Ctrl-C. With --model and --prompts it runs that model. Other consumers may run beside it. An existing recording is
    continued.
    """
    from capflow.plugins.configure import escaped

    own = f"record:path={escaped(path)}" + (f",{capture}" if capture else "")
    context.invoke(run, consumers=(own, *consumers), **options)
