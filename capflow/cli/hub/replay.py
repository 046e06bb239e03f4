"""`capflow replay`: gives a recording or a data set to consumers, as if the engines were live."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from capflow.cli.completion import complete_consumer
from capflow.cli.hub.address import METRICS_OPTION
from capflow.text.examples import examples

if TYPE_CHECKING:
    from capflow.cli.logs import Format
    from capflow.plugins.configure import ConfiguredConsumer
    from capflow.protocol.recording import Entry
    from capflow.replay.player import Replay

_SPEED_MIN, _SPEED_MAX = 1e-3, 1e6


@click.command(
    epilog=examples(
        "capflow replay recording --consumer filesystem:root=again",
        "capflow replay rows --consumer dashboard --steps-per-s 20 --stay",
    )
)
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--consumer",
    "consumers",
    multiple=True,
    metavar="NAME[@INSTANCE]:KEY=VALUE,…",
    shell_complete=complete_consumer,
    help="A consumer and its options; may be repeated. See `capflow plugins`.",
)
@click.option("--config", type=click.Path(path_type=Path), help="A TOML file with a [[consumer]] table for each.")
@click.option(
    "--speed",
    default="full",
    show_default=True,
    metavar="full|recorded|FACTOR",
    help="As fast as the consumers take it, at the recorded speed, or FACTOR times that speed.",
)
@click.option(
    "--steps-per-s",
    type=click.FloatRange(min=0, min_open=True),
    help="Replay this many engine steps a second instead. Works for a data set too, which stores no times.",
)
@click.option(
    "--ask",
    is_flag=True,
    help="Let each request of a data set ask for its stored sites: for consumers that have no spec of their own.",
)
@click.option("--drain-s", type=click.FloatRange(min=0), help="How long consumers may take at the end.")
@METRICS_OPTION
@click.option("--stay", is_flag=True, help="Run until Ctrl-C after the last frame: for consumers that show something.")
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Of standard error."
)
def replay(
    path: Path,
    consumers: tuple[str, ...],
    config: Path | None,
    speed: str,
    steps_per_s: float | None,
    ask: bool,
    drain_s: float | None,
    metrics_address: str | None,
    stay: bool,
    log_format: Format,
) -> None:
    """Give the rows at PATH to consumers, as if the engines were live.

    PATH is a recording (`capflow record`) or a data set (the consumer `filesystem`). The exit code is 1 if rows were
    lost or the recording is damaged.
    """
    from capflow.cli.hub.running import HubRun
    from capflow.errors import UsageError, explain
    from capflow.hub.monitor.endpoint import parse_listen
    from capflow.plugins.configure import configure_all, load_plugins
    from capflow.replay.player import Replay, ReplayPace
    from capflow.transport.address import private_address

    factor = _factor(speed)
    metrics = parse_listen(metrics_address, "--metrics-address")
    made, controllers = configure_all(consumers, config, load_plugins())
    if controllers:
        do = "a controller acts on an engine, and none runs here"
        raise UsageError(explain(f"--consumer {controllers[0].name}", got="a controller", expected="a consumer", do=do))
    if not made:
        raise UsageError(explain("--consumer", got="none", expected="at least one", do="see `capflow plugins`"))
    entries = entries_at(path, made, ask=ask, timed=factor is not None and steps_per_s is None)
    running = HubRun(
        private_address("replay"),
        made,
        drain_s=drain_s,
        ends=True,
        metrics=metrics,
        log_format=log_format,
    )
    with running:
        replayed = Replay(running.hub, ReplayPace(factor, steps_per_s), stopped=running.stopped.is_set)
        replay_beside(replayed, entries, running.wait)
        text = f"replayed {replayed.frames} frames, {replayed.rows} rows"
        if replayed.records_lost:
            text += f"; {replayed.records_lost} records of {path} are damaged"
        counts: dict[str, Any] = {
            "frames": replayed.frames,
            "rows": replayed.rows,
            "records_lost": replayed.records_lost,
        }
        running.tell("replayed", text, **counts)
        if stay:
            running.wait()
    sys.exit(running.exit_code or bool(replayed.records_lost))


def _factor(speed: str) -> float | None:
    """Return how many recorded seconds pass in one second; None for as fast as possible."""
    from capflow.errors import UsageError, explain

    if speed in ("full", "recorded"):
        return None if speed == "full" else 1.0
    try:
        factor = float(speed)
    except ValueError:
        factor = -1.0
    if not _SPEED_MIN <= factor <= _SPEED_MAX:
        expected = f"full, recorded or a factor of {_SPEED_MIN:g}..{_SPEED_MAX:g}"
        raise UsageError(explain("--speed", got=speed, expected=expected))
    return factor


def entries_at(path: Path, consumers: Sequence[ConfiguredConsumer], *, ask: bool, timed: bool) -> Iterator[Entry]:
    """Return the entries of a recording or a data set. Raises UsageError for what is neither.

    ask, timed: as the options of `replay` say.
    """
    import capflow
    from capflow.errors import UsageError, explain
    from capflow.protocol import recording
    from capflow.replay.dataset import entries_of

    if recording.is_recording(path):
        if ask:
            do = "its requests ask for what they asked for"
            raise UsageError(explain("--ask", got="a recording", expected="a data set", do=do))
        return recording.read(path)
    try:
        captures = capflow.open(path)
    except UsageError as e:
        expected = "a recording (capflow record) or a data set (the consumer filesystem)"
        raise UsageError(explain(str(path), got=str(e), expected=expected)) from e
    if timed:
        do = "--steps-per-s N gives it a pace"
        raise UsageError(explain("--speed", got="a data set, which has no times", expected="full", do=do))
    for consumer in consumers:
        if not ask and consumer.spec is None:
            where = f"--consumer {consumer.name}"
            raise UsageError(explain(where, got="one that captures only what requests ask for", do="add --ask"))
    return entries_of(captures, ask=ask)


def replay_beside(replayed: Replay, entries: Iterator[Entry], wait: Callable[[Callable[[], bool]], None]) -> None:
    """Replay on a thread of its own while `wait` shows the rates; raise the thread's error."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            replayed.run(entries)
        except BaseException as e:  # noqa: BLE001  raised again below
            failed.append(e)

    thread = threading.Thread(target=run, name="capflow-replay", daemon=True)
    thread.start()
    wait(lambda: not thread.is_alive())
    thread.join()
    if failed:
        raise failed[0]
