"""Where the rows of a token are stored: the data set or database, the file, the index of the row, and how to read it.

It runs in the server's event loop, which it never blocks: a thread reads the data set. One ask is answered at a time.

Invariant: a line of Python is given only if the row that it returns has the norm that is shown. A data set may hold
other captures of the same id.
"""

from __future__ import annotations

import asyncio
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import capflow
from capflow.capture.site import Site
from capflow.errors import CapflowError, UsageError, explain
from capflow_dashboard import limits
from capflow_dashboard.board.board import Board, RecordOwner
from capflow_dashboard.board.series import norms
from capflow_dashboard.wire import TokenAsk

# A stored dtype with fewer digits moves a norm by less than this, and another row by more.
_SAME = 5e-3
# Rounding to 8 bits moves it by up to this.
_SAME_ROUNDED = 1 / 16
# How many sites of a row are compared with what is shown.
_COMPARED = 4
_SITES_NAMED = 8


class _Place(NamedTuple):
    """A store: the consumer that writes it, its kind, and its path on the hub's machine."""

    consumer: str
    kind: str
    path: str


class StoredRows:
    """Answers the pages' asks for the places of rows.

    board: knows the requests, their norms, and the hub's status.
    data: the data set that is shown; empty if a hub or a recording is.
    """

    def __init__(self, board: Board, data: str = "") -> None:
        self._board = board
        self._data = data
        # Held by the ask that is answered.
        self._lock = asyncio.Lock()
        # A read that took too long, until it ends.
        self._late: asyncio.Future[Any] | None = None
        # Data sets by root, the latest last; used by the thread.
        self._open: dict[str, Any] = {}

    @property
    def known(self) -> bool:
        """Whether there may be stores: a data set or a hub is shown, and no recording."""
        return bool(self._data) or self._board.source[0] != "stored"

    async def answer(self, ask: TokenAsk) -> dict[str, Any]:
        """Return the answer to an ask, as `capflow_dashboard.wire` describes it. Errors are in its `error`."""
        fields = {"id": ask.id, "request": ask.request, "position": ask.position}
        try:
            return {**fields, "stores": await self._stores(ask), "error": ""}
        except CapflowError as e:
            return {**fields, "stores": [], "error": _printable(str(e))}

    async def _stores(self, ask: TokenAsk) -> list[dict[str, Any]]:
        owner = self._board.owner(ask.request)
        if owner is None:
            raise CapflowError(explain("stored rows", got=f"request {ask.request}", expected="a request that is shown"))
        async with self._lock:
            places = await self._places()
            if self._late is not None and not self._late.done():
                raise CapflowError(explain("stored rows", got="a disk that does not answer", do="try it later"))
            shown = self._board.norms_at(ask.request, ask.position)
            running = self._board.find(ask.request) is not None
            reading = asyncio.to_thread(self._read, places, owner, ask.position, shown, running=running)
            self._late = asyncio.ensure_future(reading)
            done, _ = await asyncio.wait({self._late}, timeout=limits.STORED_S_MAX)
            if not done:
                got = f"no answer of the disk within {limits.STORED_S_MAX:g} s"
                raise CapflowError(explain("stored rows", got=got, do="try it later"))
            stores: list[dict[str, Any]] = self._late.result()
            return stores

    async def _places(self) -> list[_Place]:
        """Return the stores. The hub's status comes once a second after the first ask; it is waited for."""
        if self._data:
            return [_Place("", "filesystem", self._data)]
        for _ in range(round(limits.STATUS_S_MAX / limits.STATUS_LOOK_S)):
            if self._board.status is not None:
                return _places_of(self._board.status)
            await asyncio.sleep(limits.STATUS_LOOK_S)
        raise CapflowError(explain("stored rows", got="no status of the hub", do="try it when the hub answers"))

    # The rest runs on a thread.

    def _read(
        self, places: Sequence[_Place], owner: RecordOwner, position: int, shown: dict[Site, float], *, running: bool
    ) -> list[dict[str, Any]]:
        stores = []
        for place in places[: limits.STORES_MAX]:
            store: dict[str, Any] = {"consumer": place.consumer, "kind": place.kind, "path": _printable(place.path)}
            if place.kind == "duckdb":
                store["command"] = _query(place.path, owner, position)
            else:
                try:
                    store |= self._in_dataset(place.path, owner, position, shown, running=running)
                except (CapflowError, OSError) as e:
                    store["note"] = _printable(str(e))
            stores.append(store)
        return stores

    def _in_dataset(
        self, root: str, owner: RecordOwner, position: int, shown: dict[Site, float], *, running: bool
    ) -> dict[str, Any]:
        """Return where a token's rows lie in a data set, or a note that says why they are not there."""
        in_bucket = "://" in root
        if not in_bucket and not Path(root).is_dir():
            key = f"capflow.open({root!r})[{owner.engine!r}, {owner.request!r}]"
            return {"expression": key, "note": "This directory is not on the dashboard's machine."}
        dataset = self._open.pop(root, None) or capflow.open(root)
        self._open[root] = dataset
        if len(self._open) > limits.STORES_MAX:
            del self._open[next(iter(self._open))]
        captures = dataset.captures(owner.request, engine=owner.engine)
        if not captures:
            when = "It is written when the request is over." if running else "Its consumer may capture other requests."
            when = "Its shard may wait for its upload." if in_bucket and not running else when
            return {"note": f"The data set does not have this request. {when}"}
        note = "The data set does not have this request of this engine."
        for key, capture in _ways(dataset, owner, captures):
            if capture.engine != owner.engine:
                continue
            rows = _rows_at(capture, position)
            if rows and _is_shown(capture, rows, shown):
                return {"expression": f"capflow.open({root!r}){key}", **_described(capture, position, rows)}
            if rows:
                note = "The data set has another capture of this id, with other rows at this position."
            else:
                have = ", ".join(map(str, capture.sites[:_SITES_NAMED])) or "no site"
                note = f"The data set has no row of this position. It has this request's rows of {have}."
        return {"note": note}


def _places_of(status: dict[str, Any]) -> list[_Place]:
    """Return the stores that the consumers of a hub write, by its status."""
    return [
        _Place(name, one["kind"], one["claim"][1])
        for name, one in status.get("consumers", {}).items()
        if one.get("kind") in ("filesystem", "duckdb") and one.get("claim")
    ]


def _printable(text: str) -> str:
    """Return a text that can be encoded: a path may hold bytes that are no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def _ways(dataset: Any, owner: RecordOwner, captures: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return the ways to write a request of a data set in Python, the shortest first, and what each returns."""
    ways = []
    for key, item in (
        (f"[{owner.request!r}]", owner.request),
        (f"[{owner.engine!r}, {owner.request!r}]", (owner.engine, owner.request)),
    ):
        # Several engines may have the id.
        try:
            ways.append((key, dataset[item]))
        except UsageError:
            continue
    of = f".captures({owner.request!r}, engine={owner.engine!r})"
    return ways + [(f"{of}[{number}]", captures[number]) for number in reversed(range(len(captures)))]


def _rows_at(capture: Any, position: int) -> dict[Site, int]:
    """Return the index of the row of a position at each site that has one."""
    rows = {}
    for site in capture.sites:
        positions = capture.positions(site)
        index = int(positions.searchsorted(position))
        if index < len(positions) and positions[index] == position:
            rows[site] = index
    return rows


def _is_shown(capture: Any, rows: dict[Site, int], shown: dict[Site, float]) -> bool:
    """Return whether rows have the norms that are shown; a stored infinity is a number too large for the dtype."""
    for site in [site for site in rows if site in shown][:_COMPARED]:
        stored = float(norms(capture[site].rows[None, rows[site] : rows[site] + 1])[0, 0])
        norm = shown[site]
        same = _SAME if capture.quantization_of(site) is None else _SAME_ROUNDED
        if math.isnan(norm) != math.isnan(stored) or (math.isinf(norm) and not math.isinf(stored)):
            return False
        if math.isfinite(norm) and math.isfinite(stored) and not math.isclose(norm, stored, rel_tol=same):
            return False
    return True


def _described(capture: Any, position: int, rows: dict[Site, int]) -> dict[str, Any]:
    """Return the layout, and for each site with a row its name, the row's index, and the file that it is in."""
    described = []
    for site, index in rows.items():
        # A request may have parts; the one with the row has the file.
        parts = (one for one in getattr(capture, "parts", ()) if site in one and position in one.positions(site))
        part = next(parts, capture)
        (entry,) = (entry for entry in part.sidecar.sites if entry.site == site)
        file = part.path if part.sidecar.layout == "sharded" else part.path / entry.file
        described.append([str(site), index, _printable(str(file))])
    return {"layout": capture.sidecar.layout, "rows": described}


def _query(path: str, owner: RecordOwner, position: int) -> str:
    """Return the command that prints a token's scores of a database."""
    engine, request = (f"'{text.replace(chr(39), 2 * chr(39))}'" for text in (owner.engine, owner.request))
    where = f"engine = {engine} AND request_id = {request} AND position = {position}"
    sql = f"SELECT probe, hook, layer, score FROM scores WHERE {where}"  # noqa: S608  to be copied by its reader
    return _printable(f"capflow query {shlex.quote(sql)} --path {shlex.quote(path)}")
