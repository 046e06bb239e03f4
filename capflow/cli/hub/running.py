"""Runs a hub for a command: starts the consumers, shows the rates, drains, and prints a summary at the end."""

from __future__ import annotations

import contextlib
import gc
import io
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TextIO, cast

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from capflow import limits
from capflow.buffers.spool import default_root
from capflow.capture.losses import MEANT
from capflow.capture.site import Site
from capflow.cli.fitted import LineOfParts
from capflow.cli.hub.rates import Rate, RecentRate
from capflow.cli.logs import Format, dropped_as_json, dropped_as_text, logger, logs_to
from capflow.cli.signals import Signals
from capflow.cli.units import human_bytes
from capflow.files import private_umask
from capflow.hub.counts import Snapshot
from capflow.hub.hub import Hub
from capflow.hub.monitor.endpoint import Endpoint
from capflow.plugins.configure import ConfiguredConsumer, ConfiguredController
from capflow.system import descriptors, heap
from capflow.system.stderr import Outlet
from capflow.text.printable import printable
from capflow.transport.links.former import FormerLink
from capflow.transport.outbox import left_behind

_LIVE_S = 0.5  # between two drawings of the live line
_GOING_S = 0.01  # between two looks at whether engines are gone
_RATE_S = 5.0  # the window of the rates
# As in `gc.set_threshold`: new objects, collections of generation 0, collections of generation 1.
_COLLECT_AT = (20_000, 50, 100)
_PLAIN_S = 10.0  # between two plain lines, without a terminal


class HubRun:
    """A hub that runs inside a `with` block. At the end of the block it drains and prints a summary.

    The first Ctrl-C or SIGTERM sets `stopped`, and `wait` returns. The second one cuts the handover and the drain
    short. `refusals` lists engines that were refused, and the reason of each, oldest first.

    drain_s: how long consumers may take at the end; by default `limits.DRAIN_S_MAX` with `ends`, else
        `DRAIN_S_DEFAULT`.
    handover_s: how long its requests may run on at the end, while engines send new ones to their other hubs.
    memory_bytes_max: as in `Hub`.
    ends: whether this run is the last on its inboxes: consumers that spill then handle all their frames before the
        end. Otherwise frames that are not handled stay in the inbox for the next hub.
    metrics: the host and port at which to serve metrics and health.
    log_format: `json` logs every event and prints nothing.
    live: whether the rates are shown in one line that changes in place, if the output is a terminal.
    shown: whether the consumers are what the user sees: neither the hub's address nor a summary is printed.
    """

    def __init__(
        self,
        address: str,
        consumers: Sequence[ConfiguredConsumer],
        controllers: Sequence[ConfiguredController] = (),
        *,
        key: str | None = None,
        insecure: bool = False,
        drain_s: float | None = None,
        handover_s: float = 0.0,
        memory_bytes_max: int | None = None,
        ends: bool = False,
        metrics: tuple[str, int] | None = None,
        log_format: Format = "text",
        console: Console | None = None,
        live: bool = True,
        signals: Signals | None = None,
        shown: bool = False,
    ) -> None:
        self.log_format: Format = log_format
        self._outlet = _outlet(log_format) if console is None else None
        if console is None and log_format == "text":
            console = Console(file=self._file, force_terminal=None if live else False)
        self.console = console or Console(file=io.StringIO(), quiet=True)
        self.ends = ends
        self._shown = shown
        self.drain_s = (limits.DRAIN_S_MAX if ends else limits.DRAIN_S_DEFAULT) if drain_s is None else drain_s
        self.handover_s = handover_s
        self.refusals: list[tuple[str, str]] = []
        self.signals = signals or Signals()
        self.stopped = self.signals.first
        self._owns_signals = signals is None
        self.controllers = tuple(controllers)
        self.hub = Hub(
            address,
            consumers,
            controllers,
            key=key,
            insecure=insecure,
            on_refused=lambda *refusal: self.refusals.append(refusal),
            memory_bytes_max=memory_bytes_max,
            log_lines_dropped=lambda: 0 if self._outlet is None else self._outlet.lines_dropped,
        )
        self.endpoint = None if metrics is None else Endpoint(self.hub, *metrics)
        # Whether the consumers handled all their frames.
        self._drained = True
        self._recent = RecentRate(_RATE_S)
        self._undo = contextlib.ExitStack()
        # Links that send the outboxes of workers of this machine that ended.
        self._former: list[FormerLink] = []
        # The umask of this process before the run: children use it.
        self.umask_before = -1

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            if self._owns_signals:
                undo.enter_context(self.signals)
            descriptors.raise_limit()
            self.umask_before = undo.enter_context(private_umask())
            undo.enter_context(rare_collections())
            undo.enter_context(heap.trimmed())
            if self._outlet is not None:
                undo.callback(self._outlet.close)
            undo.enter_context(logs_to(self.console, self.log_format, self._file))
            if self.endpoint is not None:
                self.endpoint.start()  # before the consumers open: opening may take long, and health reports it
                undo.callback(self.endpoint.stop)
            self.hub.start()
            self._undo = undo.pop_all()
        self._former = _former_links(self.hub.address)
        self.rate()
        if not self._shown:
            self.tell("listening", f"listening at {self.hub.address}", address=self.hub.address)
        self.tell_addresses()
        for notice in () if self._shown else self.hub.notices:
            self.tell("notice", notice)
        if self.endpoint is not None:
            self.tell("metrics", f"metrics at {self.endpoint.url}/metrics", url=self.endpoint.url)
            if not self.endpoint.is_local:
                logger.warning("other machines can read the metrics", extra={"event": "metrics_open"})
        return self

    @property
    def _file(self) -> TextIO:
        return sys.stderr if self._outlet is None else cast("TextIO", self._outlet)

    def tell(self, event: str, text: str, *, style: str = "", **fields: Any) -> None:
        """Print a line, or log it as an event with `fields` if the log is JSON."""
        if self.log_format == "json":
            logger.info("%s", text, extra={"event": event, **fields})
        else:
            self.console.print(Text(printable(f"capflow: {text}"), style=style), highlight=False, soft_wrap=True)

    def tell_addresses(self) -> None:
        """Print the address of each consumer that listens on one."""
        for consumer in self.hub.consumers:
            address = getattr(consumer.consumer, "address", None)
            if not address:
                continue
            fields = {"consumer": consumer.name, "url": address}
            # A link admits whoever has it, so it is shown on a terminal and never logged.
            link, link_file = (getattr(consumer.consumer, name, None) for name in ("link", "link_file"))
            text = f"{consumer.name} at {address}"
            if link and self.console.is_terminal:
                text = f"{consumer.name} at {link}"
            elif link_file:
                text += f", the link is in {link_file}"
            if link_file:
                fields["link_file"] = link_file
            self.tell("consumer_listening", text, **fields)

    def check_specs(self, num_layers: int, sites: tuple[Site, ...]) -> None:
        """Raise UsageError if a consumer or a controller asks for a site or layer that the model does not have."""
        for consumer in self.hub.consumers:
            if consumer.spec is not None:
                consumer.spec.resolve(sites, num_layers=num_layers, where=f"consumers.{consumer.name}")
        for controller in self.controllers:
            for capture in controller.captures:
                capture.resolve(sites, num_layers=num_layers, where=f"consumers.{controller.name}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._undo:
            if self.handover_s and error is None:
                self._hand_over()
            before = self.hub.snapshot()
            if before.queued_bytes:
                size = human_bytes(before.queued_bytes)
                self.tell("draining", f"draining {size}", queued_bytes=before.queued_bytes)
            for link in self._former:
                link.close(0.0)
            self._drained = self._stop_hub()
            self._tell_left()
            if not self._shown:
                self.console.print(self._summary())
            if self.log_format == "json":
                self._tell_end()

    @property
    def exit_code(self) -> int:
        """1 if a promised row may be missing, else 0; final at the end of the run.

        It is 1 if rows were lost, or if a consumer failed, did not store its rows, missed the end of a request, did not
        drain, or gave up when the hub stopped.
        """
        now = self.hub.snapshot()
        failed = any(lane.notes.lost["end"] or lane.unkept or lane.gave_up for lane in self.hub.lanes)
        return 1 if now.rows_lost or now.errors or failed or not self._drained else 0

    @property
    def took_all(self) -> bool:
        """Whether every consumer handled all its frames; final at the end of the run.

        Rows that a replayed recording does not have, `not_recorded`, are no failure.
        """
        lanes = self.hub.lanes
        failed = any(lane.errors or lane.unkept or lane.gave_up or lane.results["error"] for lane in lanes)
        return self._drained and not failed and not any(lane.dropped.keys() - {"not_recorded"} for lane in lanes)

    def rate(self) -> Rate:
        """Return the rate of the hub over the last seconds; for that it must be called every second or so."""
        return self._recent.update(time.monotonic(), self.hub.snapshot())

    def wait(self, until: Callable[[], bool] = lambda: False) -> None:
        """Show the rates until `until` returns True or a signal comes."""
        if self.console.is_terminal:
            with Live(self._line(), console=self.console, auto_refresh=False, transient=True) as live:
                for _ in self._turns(until, _LIVE_S):
                    live.update(self._line(), refresh=True)
            return
        shown = self.hub.snapshot()
        for _ in self._turns(until, _PLAIN_S):
            now = self.hub.snapshot()
            if now != shown:
                self.console.print(Text("  ").join(self._parts()), soft_wrap=True)
            shown = now

    def _turns(self, until: Callable[[], bool], every_s: float) -> Iterator[None]:
        """Yield every `every_s` seconds until `until` returns True or a signal comes; check both every `IDLE_S`."""
        due = time.monotonic() + every_s
        while not until() and not self.stopped.wait(limits.IDLE_S):
            self.rate()
            if time.monotonic() >= due:
                due = time.monotonic() + every_s
                yield

    def _hand_over(self) -> None:
        """Hand new requests over to other hubs; wait until those of this hub are over, at most `handover_s`."""
        until = time.monotonic() + self.handover_s
        running = self.hub.snapshot().requests_open
        text = f"handing over: engines send new requests to their other hubs, and {running} run on here"
        self.tell("handing_over", text, requests=running)
        self.hub.hand_over()
        while not (done := self.hub.handed_over) and time.monotonic() < until:
            if self.signals.second.wait(limits.IDLE_S):
                break
        left = self.hub.snapshot().requests_open
        text = "handed over" if done else f"the handover was cut short; {left} requests run on"
        self.tell("handed_over", text, requests=left, done=done)

    def _stop_hub(self) -> bool:
        """Stop the hub within `drain_s`, or at once after a second signal; return whether it drained."""
        result: list[bool] = []

        def stop() -> None:
            if self.ends:
                self._see_engines_off()
            result.append(self.hub.stop(self.drain_s, leave=not self.ends))

        stopping = threading.Thread(target=stop, name="capflow-stop")
        stopping.start()
        while stopping.is_alive():
            stopping.join(limits.IDLE_S)
            if self.signals.second.is_set():
                for lane in self.hub.lanes:
                    lane.discard()
        return bool(result and result[0])

    def _see_engines_off(self) -> None:
        """Wait until no engine is connected, for at most `limits.BYE_S`, or until a second signal.

        A run that ends does so when its engine has ended. That engine's Bye may be on its way, and until it is here the
        hub keeps an inbox for the engine.
        """
        until = time.monotonic() + limits.BYE_S
        while self.hub.snapshot().engines and time.monotonic() < until:
            if self.signals.second.wait(_GOING_S):
                return

    def _line(self) -> LineOfParts:
        return LineOfParts(*self._parts())

    def _parts(self) -> list[Text]:
        now, rate = self.hub.snapshot(), self.rate()
        parts = [
            f"{now.sessions} sessions",
            f"requests {now.requests_done} done, {now.requests_open} open",
            f"{rate.tokens:.0f} tok/s",
            f"{rate.rows:.0f} rows/s",
            f"{human_bytes(rate.bytes)}/s",
            f"queued {human_bytes(now.queued_bytes)}",
            f"dropped {now.rows_lost}",
            *([f"skipped {now.rows_skipped}"] if now.rows_skipped else []),
            f"spilled {now.spilled}",
        ]
        return [Text(part, "red" if now.rows_lost else "") for part in parts]

    def _tell_left(self) -> None:
        for lane in self.hub.lanes:
            frames, requests = lane.left
            if (stored := lane.stored()) is not None and (frames or requests):
                waiting = f"{requests} requests run on, {frames} frames wait"
                text = f"{lane.name}: {waiting}; the next hub with this consumer goes on with them"
                self.tell(
                    "left",
                    text,
                    consumer=lane.name,
                    frames=frames,
                    requests=requests,
                    directory=str(stored.directory),
                )

    def _tell_end(self) -> None:
        now = self.hub.snapshot()
        consumers = {
            lane.name: {"rows": lane.rows, "dropped_rows": dict(lane.dropped), "errors": lane.errors}
            for lane in self.hub.lanes
        }
        counts = msgspec.to_builtins(now)
        self.tell("stopped", "stopped", **counts, drained=self._drained, exit_code=self.exit_code, consumers=consumers)

    def _summary(self) -> Table:
        now = self.hub.snapshot()
        title = f"{now.requests_done} requests, {now.tokens} tokens, {now.rows} rows, {human_bytes(now.bytes)}"
        if now.requests_failed:
            title += f", {now.requests_failed} requests unfinished"
        table = Table(title=title, title_justify="left", caption=_lost(now), caption_justify="left")
        table.add_column("consumer")
        for column in ("frames", "rows", "bytes", "dropped", "errors"):
            table.add_column(column, justify="right")
        for lane in self.hub.lanes:
            cells = (lane.frames, lane.rows, human_bytes(lane.bytes), sum(lane.dropped.values()), lane.errors)
            is_bad = lane.errors or lane.dropped.keys() - MEANT
            table.add_row(lane.name, *map(str, cells), style="red" if is_bad else "")
        return table


def _lost(now: Snapshot) -> str | None:
    """Return a line of lost rows and one of skipped rows, each by reason; None if there are none."""
    lines = []
    for word, reasons in (("lost", now.dropped_rows.keys() - MEANT), ("skipped by live consumers", MEANT)):
        if rows := [
            f"{now.dropped_rows[reason]} {reason}" for reason in sorted(reasons) if now.dropped_rows.get(reason)
        ]:
            lines.append(f"rows {word}: {', '.join(rows)}")
    return "\n".join(lines) or None


def _outlet(log_format: Format) -> Outlet | None:
    """Return an outlet to standard error that never blocks; None if standard error has no file descriptor."""
    try:
        descriptor = sys.stderr.fileno()
    except (OSError, AttributeError):
        return None
    return Outlet(descriptor, dropped_as_text if log_format == "text" else dropped_as_json)


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Run the collector of reference cycles less often.

    Frames in flight are thousands of small objects without cycles. With Python's defaults the collector scans them
    again and again, which takes a quarter of the time that a hub spends on a frame.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AT)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _former_links(address: str) -> list[FormerLink]:
    """Start a link for each outbox that an ended worker left for this hub in the default spool; only for `ipc://`."""
    if not address.startswith("ipc://"):
        return []
    links = [FormerLink(address, outbox) for outbox in left_behind(default_root(), address, only=True)]
    for link in links:
        link.start()
    return links
