"""The tables of `capflow status` and `capflow top`, drawn from a hub's status.

Invariant: no name that a peer chose moves the terminal. Control characters are shown as escapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.styled import Styled
from rich.text import Text

from capflow.cli.fitted import Column, FittedTable, LineOfParts, SortOrder, TableRow
from capflow.cli.hub.rates import Rates
from capflow.cli.units import human_bytes, human_count, human_seconds
from capflow.text.engine_name import name_of
from capflow.text.printable import printable

REQUESTS_SHOWN = 10
"""How many requests are shown where nobody says how many."""

SORTS = ("age", "tokens", "rows/s", "rows", "dropped", "queue", "name")
"""The columns by which rows can be sorted. Each table has some of them."""

OLDEST_FIRST = SortOrder("age")

_METER_CELLS = 6
_FULL_SHARE = 0.9  # a queue or credit above this share is shown as full
_LAG_S = 5.0  # a consumer with more lag is shown as behind
_KIND_LENGTH_MIN = 4
_MODELS_LENGTH = 48
_NOTICE_LENGTH = 400
_SPOOL = "spool"  # the key of a spool in the status of a consumer or a worker

Status = Mapping[str, Any]


def view(status: Status, rates: Rates | None) -> RenderableType:
    """Return the tables of a hub's status.

    rates: the rates to show; None leaves their columns out.
    """
    return stacked(sections(status, rates).values())


def sections(
    status: Status,
    rates: Rates | None,
    *,
    rows_max: int | None = None,
    requests_max: int = REQUESTS_SHOWN,
    order: SortOrder | None = None,
    note: Text | None = None,
) -> dict[str, RenderableType]:
    """Return the parts of a hub's status by name, `hub` first. Those without rows are left out.

    rates: the rates to show; None leaves their columns out.
    rows_max: the largest number of rows in the tables of workers, spools and taps.
    requests_max: the largest number of requests.
    order: the order of the rows, in the tables that have its column; None for that of the status.
    note: shown in place of the hub's state, if the hub does not answer; the other parts are dim then.
    """
    workers = [session for session in status["sessions"] if session["role"] == "worker"]
    parts: dict[str, RenderableType] = {"hub": Group(_head(status, note), *_sum(status, rates), *_troubles(status))}
    if workers:
        parts["workers"] = _workers(workers, rates, order, rows_max)
    if status["consumers"]:
        parts["consumers"] = _consumers(status["consumers"], rates, order)
    if status.get("running_requests"):  # hubs of earlier versions send none
        parts["requests"] = _requests(status, rates, order, requests_max)
    if spools := list(_spools(status)):
        parts["spools"] = _spool_table(spools, order, rows_max)
    if status["taps"]:
        parts["taps"] = _taps(status["taps"], order, rows_max)
    if notices := status.get("notices"):  # hubs of earlier versions send none
        parts["notices"] = Text("\n".join(clean(notice, _NOTICE_LENGTH) for notice in notices), "yellow")
    return parts if note is None else {name: Styled(part, "dim") for name, part in parts.items()}


class HubShown(NamedTuple):
    """A hub in the table of several.

    status: its latest status; None before its first answer.
    gone: for how many seconds it has not answered, and why; None if it answers.
    """

    address: str
    status: Status | None
    rates: Rates | None
    gone: tuple[float, str] | None


def several(hubs: Sequence[HubShown], order: SortOrder | None = None) -> RenderableType:
    """Return the table of several hubs, with their sums above it and their problems below it."""
    columns = [
        Column("hub", 0, "name"),
        Column("rows/s", 1, "rows/s"),
        Column("bytes/s", 5),
        Column("workers", 6),
        Column("open", 4),
        Column("fullest queue", 2, "queue"),
        Column("lag", 7),
        Column("dropped", 3, "dropped"),
        Column("rows", 8, "rows"),
    ]
    rows, below = [], []
    for address, status, rates, gone in hubs:
        if gone is not None:
            below.append(Text(f"{clean(address)}: no answer for {human_seconds(gone[0])}: {clean(gone[1])}", "red"))
        if status is None:
            rows.append(TableRow(clean(address), ("",) * (len(columns) - 1), {"name": address}, "dim"))
            continue
        if gone is None:
            below += [Text(f"{clean(address)}: {clean(problem)}", "red") for problem in status["problems"]]
        lanes = list(status["consumers"].values())
        dropped = sum(status["dropped_rows"].values()) + sum(sum(lane["dropped_rows"].values()) for lane in lanes)
        queue = max(lanes, key=lambda lane: lane["queued_bytes"] / max(1, lane["queue_bytes_max"]), default=None)
        lag_s = max((lane["lag_s"] for lane in lanes), default=0.0)
        cells = (
            "" if rates is None else human_count(rates.hub.rows),
            "" if rates is None else human_bytes(rates.hub.bytes),
            human_count(sum(session["role"] == "worker" for session in status["sessions"])),
            human_count(status["requests"]["open"]),
            "" if queue is None else _meter(queue["queued_bytes"], queue["queue_bytes_max"]),
            Text(human_seconds(lag_s), "yellow" if lag_s > _LAG_S else ""),
            Text(human_count(dropped), "red" if dropped else ""),
            human_count(status["rows"]),
        )
        values = {
            "name": address,
            "rows/s": None if rates is None else rates.hub.rows,
            "queue": 0.0 if queue is None else queue["queued_bytes"] / max(1, queue["queue_bytes_max"]),
            "dropped": dropped,
            "rows": status["rows"],
        }
        style = "dim" if gone is not None else "red" if status["problems"] else ""
        rows.append(TableRow(clean(address), cells, values, style))
    return stacked([_sum_of(hubs), _fitted(columns, rows, _any_rates(hubs), order), *below])


def _sum_of(hubs: Sequence[HubShown]) -> LineOfParts:
    """Return the line with the sums of several hubs."""
    here = [hub for hub in hubs if hub.gone is None and hub.status is not None]
    state = Text(f"{len(here)} of {len(hubs)} hubs answer", "bold green" if len(here) == len(hubs) else "bold red")
    rates = [hub.rates.hub for hub in here if hub.rates is not None]
    sums = [
        f"{human_count(sum(rate.rows for rate in rates))} rows/s",
        f"{human_bytes(sum(rate.bytes for rate in rates))}/s",
    ]
    return LineOfParts(Text("capflow", "bold"), state, *(Text(part, "bold") for part in sums if rates))


def _any_rates(hubs: Sequence[HubShown]) -> Rates | None:
    return next((hub.rates for hub in hubs if hub.rates is not None), None)


def stacked(parts: Iterable[RenderableType]) -> Group:
    """Return the parts one below the other, with an empty line between two."""
    return Group(*[each for part in parts for each in (Text(), part)][1:])


def clean(text: object, length: int = 200) -> str:
    """Return a name that a peer or a user chose as one line, shortened, with control characters escaped."""
    line = printable(str(text)[: length + 1])
    return line if len(line) <= length else line[: length - 1] + "…"


def _short(name: str, length: int) -> str:
    """Return a consumer's name shortened for a table; the instance's name is kept, which tells two instances apart."""
    kind, at, instance = name.rpartition("@")
    if len(name) <= length or not at:
        return clean(name, length)
    instance = clean(instance, max(1, length - len(at) - _KIND_LENGTH_MIN))
    return clean(kind, max(1, length - len(at) - len(instance))) + at + instance


def _head(status: Status, note: Text | None) -> LineOfParts:
    state = note
    if state is None:
        state = Text("not ready", "bold red") if status["problems"] else Text("ready", "bold green")
    up = Text(f"up {human_seconds(status['uptime_s'])}", "dim") if note is None else ""
    return LineOfParts(
        Text.assemble(("capflow ", "bold"), clean(status["version"])), state, up, clean(status["address"])
    )


def _sum(status: Status, rates: Rates | None) -> Iterator[LineOfParts]:
    """Yield the lines with the sums of the hub."""
    requests = status["requests"]
    hub = [] if rates is None else [f"{human_count(rates.hub.tokens)} tok/s", f"{human_count(rates.hub.rows)} rows/s"]
    hub += [] if rates is None else [f"{human_bytes(rates.hub.bytes)}/s"]
    yield LineOfParts(*(Text(part, "bold") for part in hub), f"last frame {_ago(status['last_frame_age_s'])}")
    text = Text(f"requests {human_count(requests['open'])} open, {human_count(requests['done'])} done")
    for word in ("failed", "gapped"):
        if requests[word]:
            text.append(f", {human_count(requests[word])} {word}", "red")
    roles = [session["role"] for session in status["sessions"]]
    engines = len({session["engine"] for session in status["sessions"] if session["role"] != "client"})
    peers = f"{_plural(engines, 'engine')}, {_plural(roles.count('worker'), 'worker')}"
    models = ", ".join(sorted({str(session["model"]) for session in status["sessions"] if "model" in session}))
    yield LineOfParts(text, _memory(status), peers, f"model {clean(models, _MODELS_LENGTH)}" if models else "")


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
    off = {name: reason for session in status["sessions"] for name, reason in session.get("off", {}).items()}
    for name, reason in off.items():
        yield Text(f"off with this vLLM: {clean(name)}: {clean(reason)}", "yellow")
    lost = [(reason, rows, "") for reason, rows in status["dropped_rows"].items()]
    for name, consumer in status["consumers"].items():
        lost += [(reason, rows, f" ({name})") for reason, rows in consumer["dropped_rows"].items()]
    if lost:
        text = ", ".join(f"{human_count(rows)} {clean(reason, 40)}{clean(who, 40)}" for reason, rows, who in lost[:6])
        yield Text(f"rows lost: {text}" + (f" and {len(lost) - 6} more" if len(lost) > 6 else ""), "red")


def _workers(
    workers: Sequence[Status], rates: Rates | None, order: SortOrder | None, rows_max: int | None
) -> FittedTable:
    columns = [
        Column("worker", 0, "name"),
        Column("pp/dp/tp", 5, left=True),
        Column("rows/s", 1, "rows/s"),
        Column("bytes/s", 7),
        Column("credit used", 4),
        Column("its queue", 2, "queue"),
        Column("dropped", 3, "dropped"),
        Column("last", 6),
        Column("µs a step", 8),
        Column("rows", 9, "rows"),
        Column("frames", 10),
    ]
    rows = []
    for session in workers:
        counts, rate = session["worker"], None if rates is None else rates.worker(session)
        window = session["held_bytes"] + session["credit_bytes"]
        dropped = 0 if counts is None else sum(counts["dropped_rows"].values())
        cells = (
            "/".join(map(str, session["rank"])),
            "" if rate is None else human_count(rate.rows),
            "" if rate is None else human_bytes(rate.bytes),
            _meter(session["held_bytes"], window),
            Text("?", "dim") if counts is None else _meter(counts["queued_bytes"], counts["queue_bytes_max"]),
            Text(human_count(dropped), "red" if dropped else ""),
            _ago(session["last_frame_age_s"]).removesuffix(" ago"),
            "" if (step_us := _step_us(counts)) is None else f"{step_us:.0f}",
            human_count(session["rows"]),
            human_count(session["frames"]),
        )
        values = {
            "name": session["engine"],
            "rows/s": None if rate is None else rate.rows,
            "queue": None if counts is None else counts["queued_bytes"] / max(1, counts["queue_bytes_max"]),
            "dropped": dropped,
            "rows": session["rows"],
        }
        rows.append(TableRow(clean(name_of(session["engine"])), cells, values))
    return _fitted(columns, rows, rates, order, rows_max)


def _step_us(counts: Status | None) -> float | None:
    """Return the processor time of capflow on the thread of a worker's steps, for each step; None if unknown."""
    parts = [] if counts is None else [(ns, steps) for ns, steps in counts.get("cpu", {}).values() if steps]
    return sum(ns / steps for ns, steps in parts) / 1000 if parts else None


def _consumers(consumers: Mapping[str, Status], rates: Rates | None, order: SortOrder | None) -> FittedTable:
    columns = [
        Column("consumer", 0, "name"),
        Column("policy", 5, left=True),
        Column("rows/s", 2, "rows/s"),
        Column("bytes/s", 7),
        Column("queue", 1, "queue"),
        Column("lag", 6),
        Column("dropped", 3, "dropped"),
        Column("errors", 4),
        Column("rows", 8, "rows"),
        Column("frames", 9),
    ]
    rows = []
    for name, consumer in consumers.items():
        dropped, rate = sum(consumer["dropped_rows"].values()), None if rates is None else rates.consumer(name)
        cells = (
            clean(consumer["policy"], 8),
            "" if rate is None else human_count(rate.rows),
            "" if rate is None else human_bytes(rate.bytes),
            _meter(consumer["queued_bytes"], consumer["queue_bytes_max"]),
            Text(human_seconds(consumer["lag_s"]), "yellow" if consumer["lag_s"] > _LAG_S else ""),
            Text(human_count(dropped), "red" if dropped else ""),
            Text(human_count(consumer["errors"]), "red" if consumer["errors"] else ""),
            human_count(consumer["rows"]),
            human_count(consumer["frames"]),
        )
        values = {
            "name": name,
            "rows/s": None if rate is None else rate.rows,
            "queue": consumer["queued_bytes"] / max(1, consumer["queue_bytes_max"]),
            "dropped": dropped,
            "rows": consumer["rows"],
        }
        rows.append(TableRow(clean(name), cells, values, "red" if consumer["trouble"] else ""))
    return _fitted(columns, rows, rates, order, shorten=_short)


def _requests(status: Status, rates: Rates | None, order: SortOrder | None, rows_max: int) -> FittedTable:
    columns = [
        Column("request", 0, "name"),
        Column("engine", 5, left=True),
        Column("age", 1, "age"),
        Column("prompt", 7),
        Column("tokens", 2, "tokens"),
        Column("tok/s", 4),
        Column("rows", 3, "rows"),
        Column("rows/s", 6, "rows/s"),
    ]
    rows = []
    for request in status["running_requests"]:
        rate = None if rates is None else rates.request(request)
        cells = (
            clean(name_of(request["engine"]), 16),
            human_seconds(request["age_s"]),
            human_count(request["prompt_length"]),
            human_count(request["tokens"]),
            "" if rate is None else human_count(rate.tokens),
            human_count(request["rows"]),
            "" if rate is None else human_count(rate.rows),
        )
        values = {
            "name": request["id"],
            "age": request["age_s"],
            "tokens": request["tokens"],
            "rows": request["rows"],
            "rows/s": None if rate is None else rate.rows,
        }
        rows.append(TableRow(clean(request["id"]), cells, values))
    newer = status["requests"]["open"] - len(rows)
    return _fitted(columns, rows, rates, order, rows_max, (max(0, newer), "newer ones that are not listed"))


def _spools(status: Status) -> Iterator[tuple[str, Status]]:
    for name, consumer in status["consumers"].items():
        if consumer.get(_SPOOL):
            yield clean(name), consumer[_SPOOL]
    for session in status["sessions"]:
        if (session.get("worker") or {}).get(_SPOOL):
            yield f"{clean(session['engine'], 8)} {'/'.join(map(str, session['rank']))}", session["worker"][_SPOOL]


def _spool_table(spools: Sequence[tuple[str, Status]], order: SortOrder | None, rows_max: int | None) -> FittedTable:
    columns = [
        Column("spool of", 0, "name"),
        Column("records", 4),
        Column("on disk", 1),
        Column("bytes", 5),
        Column("lost", 2),
        Column("failures", 3),
    ]
    rows = []
    for name, spool in spools:
        lost, failures = spool.get("records_lost", 0), spool.get("failures", 0)
        cells = (
            human_count(spool["records"]),
            _meter(spool["bytes"], spool["bytes_max"]),
            human_bytes(spool["bytes"]),
            Text(human_count(lost), "red" if lost else ""),
            Text(human_count(failures), "red" if failures else ""),
        )
        rows.append(TableRow(name, cells, {"name": name}))
    return _fitted(columns, rows, None, order, rows_max, shorten=_short)


def _taps(taps: Sequence[Status], order: SortOrder | None, rows_max: int | None) -> FittedTable:
    columns = [Column("tap", 0, "name"), Column("frames", 2), Column("bytes", 3), Column("skipped", 1)]
    rows = []
    for tap in taps:
        skipped = tap["skipped_frames"]
        cells = (
            human_count(tap["frames"]),
            human_bytes(tap["bytes"]),
            Text(human_count(skipped), "yellow" if skipped else ""),
        )
        rows.append(TableRow(clean(tap["tap"]), cells, {"name": tap["tap"]}))
    return _fitted(columns, rows, None, order, rows_max)


def _fitted(
    columns: Sequence[Column],
    rows: Sequence[TableRow],
    rates: Rates | None,
    order: SortOrder | None,
    rows_max: int | None = None,
    unlisted: tuple[int, str] = (0, ""),
    shorten: Callable[[str, int], str] = clean,
) -> FittedTable:
    """Return a table; without rates, it has no columns of rates."""
    shown = [number for number, column in enumerate(columns) if rates is not None or not column.title.endswith("/s")]
    kept = [row._replace(cells=[row.cells[number - 1] for number in shown if number]) for row in rows]
    return FittedTable(
        [columns[number] for number in shown], kept, order=order, shorten=shorten, rows_max=rows_max, unlisted=unlisted
    )


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
