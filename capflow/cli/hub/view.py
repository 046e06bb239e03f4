"""How a hub's status looks: the tables of `capflow status` and `capflow top`, made of what the hub tells.

What peers call themselves is shown with everything cut out that a terminal would obey.
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
_FULL_SHARE = 0.9  # of a queue or of credit, above which it is shown as full
_LAG_S = 5.0  # above which a consumer is shown as behind
_NAME_LENGTH = 18
_KIND_LENGTH_MIN = 4
_MODELS_LENGTH = 28
_NOTICE_LENGTH = 400
_SPOOL = "spool"  # the key under which a consumer, or a worker's counts, tells of a spool

Told = Mapping[str, Any]


def view(told: Told, rates: Rates | None, *, rows_max: int | None = None, note: Text | None = None) -> RenderableType:
    """Return a hub's status as it is shown.

    rows_max: of the tables of workers, of spools and of taps.
    note: what is said in place of the hub's state, when it does not answer.
    """
    workers = [session for session in told["sessions"] if session["role"] == "worker"]
    head = _head(told, note)
    parts: list[RenderableType] = [_sum(told, rates), *_troubles(told)]
    if workers:
        parts += [Text(), _workers(workers, rates, rows_max)]
    if told["consumers"]:
        parts += [Text(), _consumers(told["consumers"], rates)]
    if spools := list(_spools(told)):
        parts += [Text(), _spool_table(spools[:rows_max], len(spools))]
    if told["taps"]:
        parts += [Text(), _taps(told["taps"], rows_max)]
    if note is None:
        return Group(head, *parts)
    old = Table.grid()
    old.add_row(Group(*parts), style="dim")
    return Group(head, old)


def clean(text: object, length: int = 200) -> str:
    """Return what a peer or a user called something, as one line without anything that a terminal obeys."""
    said = printable(str(text)[: length + 1])
    return said if len(said) <= length else said[: length - 1] + "…"


def _short(name: str) -> str:
    """Return a consumer's name as a table has it; of two instances, what makes them two is kept."""
    kind, at, instance = name.rpartition("@")
    if len(name) <= _NAME_LENGTH or not at:
        return clean(name, _NAME_LENGTH)
    instance = clean(instance, _NAME_LENGTH - len(at) - _KIND_LENGTH_MIN)
    return clean(kind, _NAME_LENGTH - len(at) - len(instance)) + at + instance


def _head(told: Told, note: Text | None) -> Table:
    state = note
    if state is None:
        state = Text("not ready", "bold red") if told["problems"] else Text("ready", "bold green")
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    up = (f"up {human_seconds(told['uptime_s'])}  ", "dim") if note is None else ""
    grid.add_row(
        Text.assemble(("capflow ", "bold"), clean(told["version"]), "  ", clean(told["address"])),
        Text.assemble(up, state),
    )
    return grid


def _sum(told: Told, rates: Rates | None) -> Text:
    requests = told["requests"]
    said = Text()
    if rates is not None:
        hub = rates.hub
        said.append(f"{human_count(hub.tokens)} tok/s   {human_count(hub.rows)} rows/s   ", "bold")
        said.append(f"{human_bytes(hub.bytes)}/s   ", "bold")
    said.append(f"last frame {_ago(told['last_frame_age_s'])}\n")
    said.append(f"requests {human_count(requests['open'])} open, {human_count(requests['done'])} done")
    for word in ("failed", "gapped"):
        if requests[word]:
            said.append(f", {human_count(requests[word])} {word}", "red")
    said.append(f"   {memory}" if (memory := _memory(told)) else "")
    roles = [session["role"] for session in told["sessions"]]
    engines = len({session["engine"] for session in told["sessions"] if session["role"] != "client"})
    models = ", ".join(sorted({str(session["model"]) for session in told["sessions"] if "model" in session}))
    said.append(f"   {_plural(engines, 'engine')}, {_plural(roles.count('worker'), 'worker')}")
    said.append(f" of {clean(models, _MODELS_LENGTH)}" if models else "")
    return said


def _memory(told: Told) -> str:
    """Return how much of the hub's memory is taken, and what of each part that is half full."""
    parts = told.get("memory", {}).get("parts", {})  # an earlier hub has none
    taken = sum(part["bytes"] for part in parts.values())
    full = [
        f"{name} {part['bytes'] / part['bytes_max']:.0%}"
        for name, part in parts.items()
        if part["bytes"] > part["bytes_max"] // 2
    ]
    return (
        ", ".join([f"memory {human_bytes(taken)} of {human_bytes(told['memory']['bytes_max'])}", *full])
        if parts
        else ""
    )


def _troubles(told: Told) -> Iterator[Text]:
    for problem in told["problems"]:
        yield Text(clean(problem), "red")
    for notice in told.get("notices", ()):  # an earlier hub has none
        yield Text(clean(notice, _NOTICE_LENGTH), "yellow")
    lost = [(reason, rows, "") for reason, rows in told["dropped_rows"].items()]
    for name, consumer in told["consumers"].items():
        lost += [(reason, rows, f" ({name})") for reason, rows in consumer["dropped_rows"].items()]
    if lost:
        said = ", ".join(f"{human_count(rows)} {clean(reason, 40)}{clean(who, 40)}" for reason, rows, who in lost[:6])
        yield Text(f"rows lost: {said}" + (f" and {len(lost) - 6} more" if len(lost) > 6 else ""), "red")


def _workers(workers: Sequence[Told], rates: Rates | None, rows_max: int | None) -> Table:
    table = _table("worker", "pp/dp/tp", *(() if rates is None else ("rows/s", "bytes/s")))
    for column in ("credit used", "its queue", "dropped", "last"):
        table.add_column(column, justify="right", no_wrap=True)
    for session in workers[:rows_max]:
        told = session["worker"]
        window = session["held_bytes"] + session["credit_bytes"]
        dropped = 0 if told is None else sum(told["dropped_rows"].values())
        cells: list[RenderableType] = [clean(session["engine"], 8), "/".join(map(str, session["rank"]))]
        if rates is not None:
            rate = rates.worker(session)
            cells += [human_count(rate.rows), human_bytes(rate.bytes)]
        cells += [
            _meter(session["held_bytes"], window),
            Text("?", "dim") if told is None else _meter(told["queued_bytes"], told["queue_bytes_max"]),
            Text(human_count(dropped), "red" if dropped else ""),
            _ago(session["last_frame_age_s"]).removesuffix(" ago"),
        ]
        table.add_row(*cells)
    return _and_more(table, len(workers))


def _consumers(consumers: Mapping[str, Told], rates: Rates | None) -> Table:
    table = _table("consumer", "policy", *(() if rates is None else ("rows/s", "bytes/s")))
    for column in ("queue", "lag", "dropped", "errors"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, told in consumers.items():
        dropped = sum(told["dropped_rows"].values())
        cells: list[RenderableType] = [_short(name), clean(told["policy"], 8)]
        if rates is not None:
            rate = rates.consumer(name)
            cells += [human_count(rate.rows), human_bytes(rate.bytes)]
        cells += [
            _meter(told["queued_bytes"], told["queue_bytes_max"]),
            Text(human_seconds(told["lag_s"]), "yellow" if told["lag_s"] > _LAG_S else ""),
            Text(human_count(dropped), "red" if dropped else ""),
            Text(human_count(told["errors"]), "red" if told["errors"] else ""),
        ]
        table.add_row(*cells, style="red" if told["trouble"] else "")
    return table


def _spools(told: Told) -> Iterator[tuple[str, Told]]:
    for name, consumer in told["consumers"].items():
        if consumer.get(_SPOOL):
            yield _short(name), consumer[_SPOOL]
    for session in told["sessions"]:
        if (session.get("worker") or {}).get(_SPOOL):
            yield f"{clean(session['engine'], 8)} {'/'.join(map(str, session['rank']))}", session["worker"][_SPOOL]


def _spool_table(spools: Sequence[tuple[str, Told]], count: int) -> Table:
    table = _table("spool of", "records")
    for column in ("on disk", "bytes", "lost", "failures"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, told in spools:
        lost, failures = told.get("records_lost", 0), told.get("failures", 0)
        table.add_row(
            name,
            human_count(told["records"]),
            _meter(told["bytes"], told["bytes_max"]),
            human_bytes(told["bytes"]),
            Text(human_count(lost), "red" if lost else ""),
            Text(human_count(failures), "red" if failures else ""),
        )
    return _and_more(table, count)


def _taps(taps: Sequence[Told], rows_max: int | None) -> Table:
    table = _table("tap")
    for column in ("frames", "bytes", "skipped"):
        table.add_column(column, justify="right", no_wrap=True)
    for told in taps[:rows_max]:
        skipped = told["skipped_frames"]
        table.add_row(
            clean(told["tap"], _NAME_LENGTH + 12),
            human_count(told["frames"]),
            human_bytes(told["bytes"]),
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
    """Return how full something is."""
    share = min(1.0, part / whole) if whole else 0.0
    cells = round(share * _METER_CELLS)
    style = "red" if share > _FULL_SHARE else "green"
    percent = f"{share * 100:3.0f}%"
    return Text.assemble(("━" * cells, style), ("─" * (_METER_CELLS - cells), "dim"), f" {percent}")


def _ago(seconds: float | None) -> str:
    return "never" if seconds is None else f"{human_seconds(seconds)} ago"


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
