"""The summary of a model job: its counts, where each consumer stored its data, and the commands that show the data."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from capflow.capture.result import CaptureResult
from capflow.cli.hub.running import HubRun
from capflow.cli.units import human_bytes
from capflow.hub.counts import EngineCounts
from capflow.text.printable import printable

Done = Mapping[str, Any]
"""A finished request, as the engine's process reports it."""


def print_summary(
    running: HubRun,
    done: Sequence[Done],
    seconds: float,
    results: Mapping[str, Mapping[str, CaptureResult]],
    received: EngineCounts,
) -> None:
    """Print a table of the consumers, and below it each command on a line of its own.

    A command is never wrapped, however narrow the terminal is, so that it can be copied whole.

    done: the finished requests.
    seconds: how long they took.
    results: the result of each consumer by its name, for each request.
    received: what came from the engine.
    """
    looks = [consumer.consumer.look() or ("", "") for consumer in running.hub.consumers]
    table = Table(title=_title(running, done, seconds, received), title_justify="left")
    for column in ("consumer", "requests ok", "stored in"):
        table.add_column(column, overflow="fold")
    for consumer, (where, _) in zip(running.hub.consumers, looks, strict=True):
        ok = sum(
            by_consumer[consumer.name].status == "ok"
            for by_consumer in results.values()
            if consumer.name in by_consumer
        )
        table.add_row(consumer.name, str(ok), Text(printable(where)))
    running.console.print(table)
    commands = [command for _, command in looks if command]
    if commands:
        running.console.print("to see the result:")
    for command in commands:
        running.console.print(Text(f"  {printable(_runnable(command))}"), soft_wrap=True)


def _runnable(command: str) -> str:
    """Return a command of capflow with the path of this program, if the shell does not find `capflow` by its name."""
    name, _, rest = command.partition(" ")
    program = sys.argv[0]
    if name != "capflow" or shutil.which(name) is not None or Path(program).name != name:
        return command
    return f"{shlex.quote(program)} {rest}"


def _title(running: HubRun, done: Sequence[Done], seconds: float, received: EngineCounts) -> str:
    prompt_tokens, tokens = (sum(int(request[name]) for request in done) for name in ("prompt_tokens", "tokens"))
    steered = sum(map(_steered, done))
    return (
        f"{len(done)} requests, {prompt_tokens} prompt and {tokens} generated tokens in "
        f"{seconds:.1f} s ({tokens / seconds:.0f} generated tok/s on average), {received.rows} rows, "
        f"{human_bytes(received.bytes)}, {running.hub.snapshot().rows_lost} dropped"
        + (f", {steered} requests steered" if steered else "")
    )


def _steered(request: Done) -> bool:
    """Return whether a request came with steering. Steering by actions and controllers does not count."""
    applied = request["steering_applied"]
    return applied is not None and applied["key"].partition("+")[0] not in ("none", "dynamic")
