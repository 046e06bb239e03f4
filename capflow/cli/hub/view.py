"""The tables of `capflow status` and `capflow top`, drawn from a hub's status.

Invariant: no name that a peer chose moves the terminal. Control characters are shown as escapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from capflow.cli.hub.rates import Rates
from capflow.cli.units import human_bytes, human_count, human_seconds
from capflow.text.printable import printable

_METER_CELLS = 6
_FULL_SHARE = 0.9  # a queue or credit above this share is shown as full
_LAG_S = 5.0  # a consumer with more lag is shown as behind
_NAME_LENGTH = 18
_KIND_LENGTH_MIN = 4
_MODELS_LENGTH = 28
_NOTICE_LENGTH = 400
_SPOOL = "spool"  # the key of a spool in the status of a consumer or a worker

Status = Mapping[str, Any]


def view(
    status: Status, rates: Rates | None, *, rows_max: int | None = None, note: Text | None = None
) -> RenderableType:
    """Return the tables of a hub's status.

    rates: the rates to show; None leaves their columns out.
    rows_max: the largest number of rows in the tables of workers, spools and taps.
    note: shown in place of the hub's state, if the hub does not answer.
    """
    workers = [session for session in status["sessions"] if session["role"] == "worker"]
    head = _head(status, note)
    parts: list[RenderableType] = [_sum(status, rates), *_troubles(status)]
    if workers:
        parts += [Text(), _workers(workers, rates, rows_max)]
    if status["consumers"]:
        parts += [Text(), _consumers(status["consumers"], rates)]
    if spools := list(_spools(status)):
        parts += [Text(), _spool_table(spools[:rows_max], len(spools))]
    if status["taps"]:
        parts += [Text(), _taps(status["taps"], rows_max)]
    if note is None:
        return Group(head, *parts)
    old = Table.grid()
    old.add_row(Group(*parts), style="dim")
    return Group(head, old)


def clean(text: object, length: int = 200) -> str:
    """Return a name that a peer or a user chose as one line, shortened, with control characters escaped."""
    line = printable(str(text)[: length + 1])
    return line if len(line) <= length else line[: length - 1] + "…"


def _short(name: str) -> str:
    """Return a consumer's name shortened for a table; the instance's name is kept, which tells two instances apart."""
    kind, at, instance = name.rpartition("@")
    if len(name) <= _NAME_LENGTH or not at:
        return clean(name, _NAME_LENGTH)
    instance = clean(instance, _NAME_LENGTH - len(at) - _KIND_LENGTH_MIN)
    return clean(kind, _NAME_LENGTH - len(at) - len(instance)) + at + instance


def _head(status: Status, note: Text | None) -> Table:
    state = note
    if state is None:
        state = Text("not ready", "bold red") if status["problems"] else Text("ready", "bold green")
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    up = (f"up {human_seconds(status['uptime_s'])}  ", "dim") if note is None else ""
    grid.add_row(
        Text.assemble(("capflow ", "bold"), clean(status["version"]), "  ", clean(status["address"])),
        Text.assemble(up, state),
    )
    return grid


def _sum(status: Status, rates: Rates | None) -> Text:
    requests = status["requests"]
    text = Text()
    if rates is not None:
        hub = rates.hub
        text.append(f"{human_count(hub.tokens)} tok/s   {human_count(hub.rows)} rows/s   ", "bold")
        text.append(f"{human_bytes(hub.bytes)}/s   ", "bold")
    text.append(f"last frame {_ago(status['last_frame_age_s'])}\n")
    text.append(f"requests {human_count(requests['open'])} open, {human_count(requests['done'])} done")
    for word in ("failed", "gapped"):
        if requests[word]:
            text.append(f", {human_count(requests[word])} {word}", "red")
    text.append(f"   {memory}" if (memory := _memory(status)) else "")
    roles = [session["role"] for session in status["sessions"]]
    engines = len({session["engine"] for session in status["sessions"] if session["role"] != "client"})
    models = ", ".join(sorted({str(session["model"]) for session in status["sessions"] if "model" in session}))
    text.append(f"   {_plural(engines, 'engine')}, {_plural(roles.count('worker'), 'worker')}")
    text.append(f" of {clean(models, _MODELS_LENGTH)}" if models else "")
    return text


def _memory(status: Status) -> str:
    """Return how much of the hub's memory is used, and the share of each part that is over half full."""
    parts = status.get("memory", {}).get("parts", {})  # hubs of earlier versions send none
    taken = sum(part["bytes"] for part in parts.values())
    full = [
        f"{name} {part['bytes'] / part['bytes_max']:.0%}"
        for name, part in parts.items()
        if part["bytes"] > part["bytes_max"] // 2
    ]
    return (
        ", ".join([f"memory {human_bytes(taken)} of {human_bytes(status['memory']['bytes_max'])}", *full])
        if parts
        else ""
    )


def _troubles(status: Status) -> Iterator[Text]:
    for problem in status["problems"]:
        yield Text(clean(problem), "red")
    for notice in status.get("notices", ()):  # hubs of earlier versions send none
        yield Text(clean(notice, _NOTICE_LENGTH), "yellow")
    lost = [(reason, rows, "") for reason, rows in status["dropped_rows"].items()]
    for name, consumer in status["consumers"].items():
        lost += [(reason, rows, f" ({name})") for reason, rows in consumer["dropped_rows"].items()]
    if lost:
        text = ", ".join(f"{human_count(rows)} {clean(reason, 40)}{clean(who, 40)}" for reason, rows, who in lost[:6])
        yield Text(f"rows lost: {text}" + (f" and {len(lost) - 6} more" if len(lost) > 6 else ""), "red")


def _workers(workers: Sequence[Status], rates: Rates | None, rows_max: int | None) -> Table:
    table = _table("worker", "pp/dp/tp", *(() if rates is None else ("rows/s", "bytes/s")))
    for column in ("credit used", "its queue", "dropped", "last"):
        table.add_column(column, justify="right", no_wrap=True)
    for session in workers[:rows_max]:
        counts = session["worker"]
        window = session["held_bytes"] + session["credit_bytes"]
        dropped = 0 if counts is None else sum(counts["dropped_rows"].values())
        cells: list[RenderableType] = [clean(session["engine"], 8), "/".join(map(str, session["rank"]))]
        if rates is not None:
            rate = rates.worker(session)
            cells += [human_count(rate.rows), human_bytes(rate.bytes)]
        cells += [
            _meter(session["held_bytes"], window),
            Text("?", "dim") if counts is None else _meter(counts["queued_bytes"], counts["queue_bytes_max"]),
            Text(human_count(dropped), "red" if dropped else ""),
            _ago(session["last_frame_age_s"]).removesuffix(" ago"),
        ]
        table.add_row(*cells)
    return _and_more(table, len(workers))


def _consumers(consumers: Mapping[str, Status], rates: Rates | None) -> Table:
    table = _table("consumer", "policy", *(() if rates is None else ("rows/s", "bytes/s")))
    for column in ("queue", "lag", "dropped", "errors"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, consumer in consumers.items():
        dropped = sum(consumer["dropped_rows"].values())
        cells: list[RenderableType] = [_short(name), clean(consumer["policy"], 8)]
        if rates is not None:
            rate = rates.consumer(name)
            cells += [human_count(rate.rows), human_bytes(rate.bytes)]
        cells += [
            _meter(consumer["queued_bytes"], consumer["queue_bytes_max"]),
            Text(human_seconds(consumer["lag_s"]), "yellow" if consumer["lag_s"] > _LAG_S else ""),
            Text(human_count(dropped), "red" if dropped else ""),
            Text(human_count(consumer["errors"]), "red" if consumer["errors"] else ""),
        ]
        table.add_row(*cells, style="red" if consumer["trouble"] else "")
    return table


def _spools(status: Status) -> Iterator[tuple[str, Status]]:
    for name, consumer in status["consumers"].items():
        if consumer.get(_SPOOL):
            yield _short(name), consumer[_SPOOL]
    for session in status["sessions"]:
        if (session.get("worker") or {}).get(_SPOOL):
            yield f"{clean(session['engine'], 8)} {'/'.join(map(str, session['rank']))}", session["worker"][_SPOOL]


def _spool_table(spools: Sequence[tuple[str, Status]], count: int) -> Table:
    table = _table("spool of", "records")
    for column in ("on disk", "bytes", "lost", "failures"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, spool in spools:
        lost, failures = spool.get("records_lost", 0), spool.get("failures", 0)
        table.add_row(
            name,
            human_count(spool["records"]),
            _meter(spool["bytes"], spool["bytes_max"]),
            human_bytes(spool["bytes"]),
            Text(human_count(lost), "red" if lost else ""),
            Text(human_count(failures), "red" if failures else ""),
        )
    return _and_more(table, count)


def _taps(taps: Sequence[Status], rows_max: int | None) -> Table:
    table = _table("tap")
    for column in ("frames", "bytes", "skipped"):
        table.add_column(column, justify="right", no_wrap=True)
    for tap in taps[:rows_max]:
        skipped = tap["skipped_frames"]
        table.add_row(
            clean(tap["tap"], _NAME_LENGTH + 12),
            human_count(tap["frames"]),
            human_bytes(tap["bytes"]),
            Text(human_count(skipped), "yellow" if skipped else ""),
        )
    return _and_more(table, len(taps))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold cyan", expand=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < 2 else "right", no_wrap=True)
    return table


def _and_more(table: Table, count: int) -> Table:
    if count > table.row_count:
        table.caption, table.caption_justify = f"and {count - table.row_count} more", "left"
    return table


def _meter(part: float, whole: float) -> Text:
    """Return a meter of six cells and the share in percent."""
    share = min(1.0, part / whole) if whole else 0.0
    cells = round(share * _METER_CELLS)
    style = "red" if share > _FULL_SHARE else "green"
    percent = f"{share * 100:3.0f}%"
    return Text.assemble(("━" * cells, style), ("─" * (_METER_CELLS - cells), "dim"), f" {percent}")


def _ago(seconds: float | None) -> str:
    return "never" if seconds is None else f"{human_seconds(seconds)} ago"


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
