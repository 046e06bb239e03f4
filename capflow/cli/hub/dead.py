"""`capflow spool dead`: the frames and requests that a consumer could not handle."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from capflow.buffers.spool import Lost
    from capflow.hub.lanes.dead_letters import Found

_directory = click.argument("directory", type=click.Path(path_type=Path))
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

_ERROR_LENGTH = 80
_REQUESTS_SHOWN = 3


@click.group()
def dead() -> None:
    """Look into dead letters: the frames and requests that a consumer could not handle, in DIR.dead beside its inbox DIR."""


@dead.command("list")
@_directory
@_json
def list_(directory: Path, as_json: bool) -> None:
    """List the dead letters in DIRECTORY, oldest first, each with its reason."""
    from rich.console import Console
    from rich.table import Table

    from capflow.cli.hub.view import clean
    from capflow.hub.lanes.dead_letters import read

    rows = [_told(found) for found in read(directory)]
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


@dead.command()
@_directory
@click.argument("letter", type=click.IntRange(min=1))
@_json
def show(directory: Path, letter: int, as_json: bool) -> None:
    """Show dead letter number LETTER in DIRECTORY: its reason, and which rows it holds."""
    from capflow.cli.hub.view import clean
    from capflow.errors import UsageError, explain
    from capflow.hub.lanes.dead_letters import read

    found = next((found for found in read(directory) if _number(found) == letter), None)
    if found is None:
        do = f"`capflow spool dead list {directory}` has their numbers"
        raise UsageError(explain("LETTER", got=letter, expected="the number of a letter that is there", do=do))
    told = _told(found) | {"holds": list(_rows(found))}
    if as_json:
        _print_json(told)
        return
    for name, value in told.items():
        if name == "holds":
            for part in value:
                click.echo(f"  {clean(part['request'])}: positions {part['start']}..{part['stop']} at {part['sites']}")
        else:
            click.echo(f"{name}: {clean(', '.join(value) if isinstance(value, list) else value, 10_000)}")


@dead.command()
@_directory
@click.option("--through", type=click.IntRange(min=1), metavar="LETTER", help="Only the letters up to this one.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def drop(directory: Path, through: int | None, yes: bool) -> None:
    """Remove the dead letters in DIRECTORY, whose rows are lost then."""
    from capflow.errors import UsageError, explain
    from capflow.hub.lanes.dead_letters import drop, read

    numbers = [number for found in read(directory) if (number := _number(found)) <= (through or number)]
    if numbers and not yes:
        if not sys.stdin.isatty():
            raise UsageError(explain(f"{directory}", got=f"{len(numbers)} dead letters", do="--yes removes them"))
        click.confirm(f"Remove {len(numbers)} dead letters?", abort=True)
    click.echo(f"removed {drop(directory, through)} dead letters")


@dead.command()
@_directory
@click.option(
    "--consumer",
    "consumers",
    multiple=True,
    metavar="NAME[@INSTANCE]:KEY=VALUE,…",
    help="A consumer and its options; may be repeated.",
)
@click.option("--config", type=click.Path(path_type=Path), help="A TOML file with a [[consumer]] table for each.")
@click.option("--keep", is_flag=True, help="Leave the letters where they are.")
def replay(directory: Path, consumers: tuple[str, ...], config: Path | None, keep: bool) -> None:
    """Give the rows of the dead letters in DIRECTORY to consumers again, and remove the letters when all were taken.

    The exit code is 1, and every letter stays, when a consumer failed at one. Consumers have policy `block` here, whatever they say.
    """
    from capflow.buffers.policy import WhenFull
    from capflow.cli.hub.running import HubRun
    from capflow.errors import UsageError, explain
    from capflow.hub.lanes.dead_letters import drop, read, said_by
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
        replayed.run(said_by(directory))
    taken = running.took_all and not (replayed.records_lost or running.stopped.is_set())
    running.tell("replayed", f"replayed {replayed.frames} frames, {replayed.rows} rows of {last} dead letters")
    if taken and last and not keep:
        click.echo(f"removed {drop(directory, last)} dead letters")
    sys.exit(0 if taken else 1)


def _blocking(consumer: Any, policy: Any) -> Any:
    import dataclasses

    return dataclasses.replace(consumer, policy=policy, spill=None)


def _number(found: Found | Lost) -> int:
    from capflow.buffers.spool import Lost

    return found.last if isinstance(found, Lost) else found.number


def _told(found: Found | Lost) -> dict[str, Any]:
    """Return what a letter says, as plain JSON values."""
    from datetime import UTC, datetime

    from capflow.buffers.spool import Lost
    from capflow.capture.frame import rows_of

    if isinstance(found, Lost):
        missing = dict.fromkeys(("time", "consumer", "method", "engine"), "")
        error = f"records {found.first} to {found.last} cannot be read: {found.reason}"
        return {"letter": found.last, **missing, "requests": [], "rows": 0, "error": error}
    letter = found.letter
    rows = 0 if found.frame is None else rows_of(found.frame.header).total()
    at = datetime.fromtimestamp(letter.time_ns / 1e9, UTC).isoformat(timespec="seconds")
    about = {"letter": found.number, "time": at, "consumer": letter.consumer, "method": letter.method}
    return about | {
        "engine": letter.engine,
        "requests": list(letter.requests),
        "rows": rows,
        "error": letter.error,
    }


def _rows(found: Found | Lost) -> Any:
    """Yield which rows a letter holds."""
    from capflow.buffers.spool import Lost
    from capflow.capture.site import layers_by_hook

    if isinstance(found, Lost) or found.frame is None:
        return
    header = found.frame.header
    for block in header.blocks:
        sites = ", ".join(f"{hook}:{layers}" for hook, layers in layers_by_hook(block.sites).items())
        for span in block.spans:
            about = {"request": header.requests[span.request].id, "sites": sites}
            yield about | {"start": span.start, "stop": span.start + span.length - 1}


def _print_json(value: Any) -> None:
    import json

    click.echo(json.dumps(value, indent=2))
