"""The entries of a recording, made from a data set: the requests of `capflow.open(path)`, step by step.

A data set stores neither times nor which requests shared a step, so the steps are invented: eight requests run at a
time, a prompt is one step, or several if it is large, and each generated token is one step. Rows, positions, token ids
and texts are the stored ones. The stored events of a request come before its first step.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from capflow import limits
from capflow.capture.attention import grouped_forms
from capflow.capture.dtypes import DTYPES
from capflow.capture.frame import Block, Dropped, Finished, Frame, FrameHeader, Rank, RequestRows, Span, Weights
from capflow.capture.model import ModelInfo, grouped, width_of
from capflow.capture.site import Site, layers_by_hook
from capflow.capture.spec import CaptureSpec
from capflow.errors import explain
from capflow.protocol.recording import Entry, RecordedEngine
from capflow.steering.action import Answered

_AT_ONCE = 8  # requests that run at a time
# The largest size of the rows of one step; a single position may have more.
_STEP_BYTES_MAX = 64 * limits.MIB
_BOOT = "replayed"


class _Group(NamedTuple):
    """Sites whose rows have the same positions and the same shape.

    rows: for each site `[len(positions), width]`.
    shape: the shape of a row; empty for `[hidden_size]`.
    """

    sites: tuple[Site, ...]
    positions: npt.NDArray[np.int64]
    rows: list[npt.NDArray[Any]]
    shape: tuple[int, ...]


class _Step(NamedTuple):
    """A frame that is not numbered yet, and the events before it."""

    frame: Frame
    events: list[Answered]


def entries_of(captures: Iterable[Any], *, ask: bool = False) -> Iterator[Entry]:
    """Yield the entries that engines would have sent for these captures.

    The model of an engine has the sites that have rows, as many layers as the highest site needs, and the stored dtype.
    An engine with rows of several dtypes connects once for each dtype.

    captures: as `capflow.open(path)` iterates over them.
    ask: each request has a spec that names its sites, for consumers that have no spec of their own.
    """
    incarnations = itertools.count(1)
    for (engine, model, hidden_size), group in itertools.groupby(sorted(captures, key=_whose), key=_whose):
        mine = list(group)
        sites = tuple(sorted({site for capture in mine for site in capture.sites}))
        shapes = grouped({entry.site: entry.shape for one in mine for entry in one.sidecar.sites if entry.shape})
        entries = [entry for one in mine for entry in one.sidecar.sites]
        attention = {
            each.layer: each.attention for each in entries if each.attention and Site(each.layer, "k") in sites
        }
        router = {each.layer: each.router for each in entries if each.router}
        forms: dict[str, Any] = {"attention": grouped_forms(attention), "router": grouped_forms(router)}
        layers = max((site.layer for site in sites), default=0) + 1
        by_dtype: dict[str, list[Any]] = {}
        for capture in sorted(
            mine, key=lambda capture: not capture.sites
        ):  # a capture without rows takes the first dtype
            dtype = _dtype_of(capture.sidecar) if capture.sites or not by_dtype else next(iter(by_dtype))
            by_dtype.setdefault(dtype, []).append(capture)
        for dtype, alike in by_dtype.items():
            about = ModelInfo(model, layers, hidden_size, dtype, sites, shapes=shapes, **forms)
            yield RecordedEngine(engine, about)
            yield from _run(alike, dtype, incarnations, ask=ask)


def _run(captures: Iterable[Any], dtype: str, incarnations: Iterator[int], *, ask: bool) -> Iterator[Entry]:
    """Yield the frames and events of captures of one dtype, `_AT_ONCE` captures at a time."""
    waiting = (_steps(capture, f"{_BOOT}-{next(incarnations)}", dtype, ask=ask) for capture in captures)
    running = list(itertools.islice(waiting, _AT_ONCE))
    steps = itertools.count(1)
    while running:
        for one in list(running):
            if (part := next(one, None)) is not None:
                yield from part.events
                yield _numbered(part.frame, next(steps))
                continue
            running.remove(one)
            running += itertools.islice(waiting, 1)


def _whose(capture: Any) -> tuple[str, str, int]:
    sidecar = capture.sidecar
    return sidecar.engine, sidecar.model, sidecar.hidden_size


def _dtype_of(sidecar: Any) -> str:
    """Return the dtype of a replayed capture: that of its sites, or float32, which is exact, if they differ."""
    dtypes = {entry.dtype or sidecar.dtype for entry in sidecar.sites} or {sidecar.dtype}
    return str(dtypes.pop()) if len(dtypes) == 1 else "float32"


def _numbered(frame: Frame, step: int) -> Frame:
    return Frame(msgspec.structs.replace(frame.header, seq=step, step=step), frame.payload)


def _steps(capture: Any, incarnation: str, dtype: str, *, ask: bool) -> Iterator[_Step]:
    """Yield a request's steps; the last one ends the request."""
    sidecar = capture.sidecar
    groups, ids = _groups(capture)
    width = sum(width_of(group.shape, sidecar.hidden_size) * len(group.sites) for group in groups)
    row_bytes = DTYPES[dtype].itemsize * max(1, width)
    changes = {weights.start for weights in sidecar.weights}
    runs = list(_runs(sorted(ids), sidecar.prompt_length, max(1, _STEP_BYTES_MAX // row_bytes), changes))
    texts = capture.texts
    spec = _spec(capture.sites, sidecar.tag) if ask else None
    rows_total = sum(len(group.positions) * len(group.sites) for group in groups)
    finished = Finished(
        id=sidecar.request,
        status=sidecar.status,
        prompt_length=sidecar.prompt_length,
        computed_length=sidecar.computed_length,
        rows=rows_total,
        dropped=tuple(Dropped(rows, reason) for rows, reason in sidecar.dropped),
        capture=spec,
        incarnation=incarnation,
        adapter=sidecar.adapter,
        weights=tuple(sidecar.weights[: limits.WEIGHTS_TOLD_MAX]),
    )
    events = _events(sidecar, incarnation)
    for start, stop in runs or [(0, 0)]:
        places = range(start, stop)
        part = RequestRows(
            id=sidecar.request,
            prompt_length=sidecar.prompt_length,
            start=start,
            token_ids=tuple(ids[place] for place in places),
            texts=tuple(texts[place] for place in places) if all(place in texts for place in places) else (),
            capture=spec,
            incarnation=incarnation,
            steered=_clipped(sidecar.steered, start, stop),
            adapter=sidecar.adapter,
        )
        blocks, shapes, payload = _blocks(groups, start, stop, dtype)
        header = FrameHeader(
            engine=sidecar.engine,
            boot=_BOOT,
            rank=Rank(0, 0, 0),
            seq=1,
            step=1,
            time_ns=0,
            dtype=dtype,
            hidden_size=sidecar.hidden_size,
            requests=(part,) if places else (),
            blocks=blocks,
            finished=(finished,) if not runs or stop == runs[-1][1] else (),
            step_tokens=len(places),
            step_requests=1,
            weights=_weights_at(sidecar.weights, start) if places else None,
            shapes=shapes if any(shapes) else msgspec.UNSET,
        )
        yield _Step(Frame.seal(header, payload), events)
        events = []


def _events(sidecar: Any, incarnation: str) -> list[Answered]:
    """Return the events that a sidecar has, and one more that stands for those for which it had no room."""
    engine, request = sidecar.engine, sidecar.request
    events = [
        Answered(
            event.id,
            engine,
            request,
            event.kind,
            tuple(map(Site.parse, event.sites)),
            event.by,
            event.time_ns,
            event.step,
            event.reason,
            event.position,
            event.score,
            event.threshold,
            event.label,
            incarnation,
            event.target,
            event.scale,
            event.outcome,
        )
        for event in sidecar.events
    ]
    if sidecar.events_lost:
        name = xxhash.xxh3_128_hexdigest(repr((engine, request, incarnation, "overflow")).encode())
        got, expected = f"{sidecar.events_lost} more", f"at most {limits.EVENTS_KEPT_MAX}"
        reason = explain("events of the request", got=got, expected=expected)
        time_ns = events[-1].time_ns if events else 0
        events.append(Answered(name, engine, request, "overflow", (), "dataset", time_ns, None, reason, None,
            incarnation=incarnation, outcome="applied"))  # fmt: skip
    return events


def _weights_at(weights: list[Weights], position: int) -> Weights | None:
    """Return the weights that computed a position; None in data sets of earlier versions."""
    at = [each for each in weights if each.start <= position]
    return msgspec.structs.replace(at[-1], start=0) if at else None


def _clipped(runs: list[int] | None, start: int, stop: int) -> tuple[int, ...] | None:
    """Return the parts of runs `first, end, first, end, …` that lie in `start .. stop`."""
    if runs is None:
        return None
    clipped = ((max(first, start), min(end, stop)) for first, end in zip(runs[::2], runs[1::2], strict=True))
    return tuple(edge for first, end in clipped if first < end for edge in (first, end))


def _groups(capture: Any) -> tuple[list[_Group], dict[int, int]]:
    """Return a request's rows grouped by positions and shape, and the token id of each position that has a row."""
    groups: dict[tuple[bytes, tuple[int, ...]], _Group] = {}
    shapes = {entry.site: entry.shape or () for entry in capture.sidecar.sites}
    ids: dict[int, int] = {}
    for site in sorted(capture.sites):
        rows, positions, token_ids = capture[site]
        key = positions.tobytes(), shapes[site]
        if key not in groups:
            groups[key] = _Group((), positions, [], shapes[site])
            ids.update(zip(positions.tolist(), token_ids.tolist(), strict=True))
        groups[key] = groups[key]._replace(sites=(*groups[key].sites, site), rows=[*groups[key].rows, rows])
    return list(groups.values()), ids


def _runs(
    positions: list[int], prompt_length: int, length_max: int, changes: Collection[int]
) -> Iterator[tuple[int, int]]:
    """Yield the run of positions of each step: prompt runs of up to `length_max`, then one position a step.

    changes: positions at which a step begins.
    """
    start = stop = -1
    for position in positions:
        if position == stop and position < prompt_length and stop - start < length_max and position not in changes:
            stop += 1
            continue
        if stop > start:
            yield start, stop
        start, stop = position, position + 1
    if stop > start:
        yield start, stop


def _blocks(
    groups: list[_Group], start: int, stop: int, dtype: str
) -> tuple[tuple[Block, ...], tuple[tuple[int, ...], ...], bytes]:
    """Return the blocks of the rows at positions `start .. stop`, the shape of a row of each, and their payload."""
    blocks, shapes, payload = [], [], []
    for group in groups:
        first, last = np.searchsorted(group.positions, [start, stop])
        if first == last:
            continue
        places = group.positions[first:last]
        cuts = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]
        spans = tuple(Span(0, int(places[a]), b - a, a) for a, b in itertools.pairwise(cuts))
        blocks.append(Block(group.sites, len(places), spans))
        shapes.append(group.shape)
        payload += [rows[first:last].astype(DTYPES[dtype], copy=False).tobytes() for rows in group.rows]
    return tuple(blocks), tuple(shapes), b"".join(payload)


def _spec(sites: Iterable[Site], tag: str) -> CaptureSpec | None:
    """Return a spec with these sites and the capture's tag; None without sites."""
    hooks = layers_by_hook(sites)
    return CaptureSpec.parse({"hooks": hooks, "tag": tag}) if hooks else None
