"""`capflow spool dead`: the frames and requests that a consumer could not handle."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from capflow.cli.completion import complete_consumer
from capflow.text.examples import examples

if TYPE_CHECKING:
    from capflow.buffers.spool import Lost
    from capflow.hub.lanes.dead_letters import Found

_directory = click.argument("directory", type=click.Path(path_type=Path))
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

_ERROR_LENGTH = 80
_REQUESTS_SHOWN = 3


@click.group()
def dead() -> None:
    """Look into dead letters: the frames and requests that a consumer could not handle.

    They are in DIR.dead beside the consumer's inbox DIR.
    """


@dead.command("list", epilog=examples("capflow spool dead list DIRECTORY"))
@_directory
@_json
def list_(directory: Path, as_json: bool) -> None:
    """List the dead letters in DIRECTORY, oldest first, each with its reason."""
    from rich.console import Console
    from rich.table import Table

    from capflow.cli.hub.view import clean
    from capflow.hub.lanes.dead_letters import read

    rows = [_fields(entry) for entry in read(directory)]
    if as_json:
        _print_json(rows)
        return
    table = Table("letter", "time", "consumer", "method", "engine", "requests", "rows", "error")
    for row in rows:
        requests = [clean(name) for name in row["requests"][:_REQUESTS_SHOWN]]
        more = [f"and {len(row['requests']) - _REQUESTS_SHOWN} more"] if len(row["requests"]) > _REQUESTS_SHOWN else []
        cells = [row["letter"], row["time"], row["consumer"], row["method"], row["engine"]]
        shown = [clean(cell) for cell in cells]
        table.add_row(*shown, ", ".join(requests + more), str(row["rows"]), clean(row["error"], _ERROR_LENGTH))
    Console().print(table)


@dead.command(epilog=examples("capflow spool dead show DIRECTORY 1"))
@_directory
@click.argument("letter", type=click.IntRange(min=1))
@_json
def show(directory: Path, letter: int, as_json: bool) -> None:
    """Show dead letter number LETTER in DIRECTORY: its reason and its rows."""
    from capflow.cli.hub.view import clean
    from capflow.errors import UsageError, explain
    from capflow.hub.lanes.dead_letters import read

    entry = next((entry for entry in read(directory) if _number(entry) == letter), None)
    if entry is None:
        do = f"`capflow spool dead list {directory}` has their numbers"
        raise UsageError(explain("LETTER", got=letter, expected="the number of a dead letter", do=do))
    fields = _fields(entry) | {"holds": list(_rows(entry))}
    if as_json:
        _print_json(fields)
        return
    for name, value in fields.items():
        if name == "holds":
            for part in value:
                click.echo(f"  {clean(part['request'])}: positions {part['start']}..{part['stop']} at {part['sites']}")
        else:
            click.echo(f"{name}: {clean(', '.join(value) if isinstance(value, list) else value, 10_000)}")


@dead.command(epilog=examples("capflow spool dead drop DIRECTORY --through 3"))
@_directory
@click.option("--through", type=click.IntRange(min=1), metavar="LETTER", help="Only the letters up to this one.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def drop(directory: Path, through: int | None, yes: bool) -> None:
    """Remove the dead letters in DIRECTORY; their rows are lost."""
    from capflow.errors import UsageError, explain
    from capflow.hub.lanes.dead_letters import drop, read

    numbers = [number for entry in read(directory) if (number := _number(entry)) <= (through or number)]
    if numbers and not yes:
        if not sys.stdin.isatty():
            raise UsageError(explain(f"{directory}", got=f"{len(numbers)} dead letters", do="--yes removes them"))
        click.confirm(f"Remove {len(numbers)} dead letters?", abort=True)
    click.echo(f"removed {drop(directory, through)} dead letters")


@dead.command(epilog=examples("capflow spool dead replay DIRECTORY --consumer filesystem:root=again"))
@_directory
@click.option(
    "--consumer",
    "consumers",
    multiple=True,
    metavar="NAME[@INSTANCE]:KEY=VALUE,…",
    shell_complete=complete_consumer,
    help="A consumer and its options; may be repeated.",
)
@click.option("--config", type=click.Path(path_type=Path), help="A TOML file with a [[consumer]] table for each.")
@click.option("--keep", is_flag=True, help="Do not remove the letters.")
def replay(directory: Path, consumers: tuple[str, ...], config: Path | None, keep: bool) -> None:
    """Give the rows of the dead letters in DIRECTORY to consumers again, then remove the letters.

    If a consumer fails at a letter, the exit code is 1 and every letter stays. Consumers have policy `block` here,
    whatever their options are.
    """
    from capflow.buffers.policy import WhenFull
    from capflow.cli.hub.running import HubRun
    from capflow.errors import UsageError, explain
    from capflow.hub.lanes.dead_letters import drop, entries_of, read
    from capflow.plugins.configure import configure_all, load_plugins
    from capflow.replay.player import Replay, ReplayPace
    from capflow.transport.address import private_address

    made, controllers = configure_all(consumers, config, load_plugins())
    if controllers or not made:
        got = "a controller" if controllers else "none"
        raise UsageError(explain("--consumer", got=got, expected="at least one consumer", do="see `capflow plugins`"))
    last = max(map(_number, read(directory)), default=0)
    waiting = [_blocking(consumer, WhenFull.BLOCK) for consumer in made]
    running = HubRun(private_address("dead"), waiting, ends=True)
    with running:
        replayed = Replay(running.hub, ReplayPace(), stopped=running.stopped.is_set)
        replayed.run(entries_of(directory))
    taken = running.took_all and not (replayed.records_lost or running.stopped.is_set())
    running.tell("replayed", f"replayed {replayed.frames} frames, {replayed.rows} rows of {last} dead letters")
    if taken and last and not keep:
        click.echo(f"removed {drop(directory, last)} dead letters")
    sys.exit(0 if taken else 1)


def _blocking(consumer: Any, policy: Any) -> Any:
    import dataclasses

    return dataclasses.replace(consumer, policy=policy, spill=None)


def _number(entry: Found | Lost) -> int:
    from capflow.buffers.spool import Lost

    return entry.last if isinstance(entry, Lost) else entry.number


def _fields(entry: Found | Lost) -> dict[str, Any]:
    """Return the fields of a letter as plain JSON values."""
    from datetime import UTC, datetime

    from capflow.buffers.spool import Lost
    from capflow.capture.frame import rows_of

    if isinstance(entry, Lost):
        missing = dict.fromkeys(("time", "consumer", "method", "engine"), "")
        error = f"records {entry.first} to {entry.last} cannot be read: {entry.reason}"
        return {"letter": entry.last, **missing, "requests": [], "rows": 0, "error": error}
    letter = entry.letter
    rows = 0 if entry.frame is None else rows_of(entry.frame.header).total()
    at = datetime.fromtimestamp(letter.time_ns / 1e9, UTC).isoformat(timespec="seconds")
    about = {"letter": entry.number, "time": at, "consumer": letter.consumer, "method": letter.method}
    return about | {
        "engine": letter.engine,
        "requests": list(letter.requests),
        "rows": rows,
        "error": letter.error,
    }


def _rows(entry: Found | Lost) -> Any:
    """Yield the positions and sites of each request in a letter."""
    from capflow.buffers.spool import Lost
    from capflow.capture.site import layers_by_hook

    if isinstance(entry, Lost) or entry.frame is None:
        return
    header = entry.frame.header
    for block in header.blocks:
        sites = ", ".join(f"{hook}:{layers}" for hook, layers in layers_by_hook(block.sites).items())
        for span in block.spans:
            about = {"request": header.requests[span.request].id, "sites": sites}
            yield about | {"start": span.start, "stop": span.start + span.length - 1}


def _print_json(value: Any) -> None:
    import json

    click.echo(json.dumps(value, indent=2))
