"""The sender: makes frames of settled steps, off the step thread, and hands them to the links.

Each hub gets a frame of its own requests, or several if their rows are many; frames are numbered, counted and refused
per hub. With one hub, payloads are parts of the step's buffer, without a copy. With several, the rows of each hub,
which are contiguous in the buffer, are copied, so that the frame of one hub does not keep the memory of another's rows.

The sender gets a step when it is settled. Only then is it decided which requests ended and which drafts were accepted,
and so which rows belong to no token of the answer. The sender's thread waits for the copy from the device, encodes
frames, and waits for room in the links.
"""

from __future__ import annotations

import functools
import itertools
import logging
import operator
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from capflow import limits
from capflow.capture.dtypes import DTYPES
from capflow.capture.frame import Acted, ActedOn, Block, Finished, FrameHeader, Rank, RequestRows, Span, Weights
from capflow.capture.losses import Losses, LossLog
from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow_engine.scheduler.orders import Ended
from capflow_engine.taps.acting import Opened, steered_runs
from capflow_engine.taps.plan import Plan, PlannedBlock, block_of
from capflow_engine.taps.requests import Tracked
from capflow_engine.taps.widths import Width, Widths
from capflow_engine.worker.marks import clipped, merged

logger = logging.getLogger("vllm.capflow.sender")

# About the size of an event in a header, and of each of its sites.
_EVENT_BYTES, _EVENT_SITE_BYTES = 512, 24


class Noted(NamedTuple):
    """An event of a request's steering.

    decided: the positions that decided it are those before this one.
    """

    request: Tracked
    event: Acted
    decided: int

    def lowered(self, count: int) -> Noted:
        """Return the event with its positions lower by `count`."""
        if self.event.position is None:
            return self
        event = msgspec.structs.replace(self.event, position=self.event.position - count)
        return Noted(self.request, event, self.decided - count)


class Computed(msgspec.Struct, eq=False):
    """A step that was computed.

    rows: its rows for consumers as bytes, those of class 0 first; None if it has none, or if they are lost.
    shaped_at: where the rows of further width classes begin in it, in the order of `Plan.shaped`.
    token_ids: the input ids of the step's tokens, `[tokens]`; valid after `ready` returned.
    ready: waits until `rows` and `token_ids` are copied from the device.
    lost: why `rows` is None although rows were planned.
    ended: the finished requests whose end leaves with this step.
    limits: by vLLM's id, the end of the positions that belong to the request; without an entry, all do.
    shifts: by vLLM's id, by how much the request's positions are lower than planned, until `place` corrects them.
    lent: the bytes that the worker's ring lent for the rows.
    events: the events of the step, in order.
    events_lost: by request, how many events of the step had no room.
    opened: where hard gates were open in the step; None where that is unknown.
    marks: by vLLM's id, what controllers and gates of other pipeline stages steered, as in `orders.Marked`.
    weights: the weights that computed it; None for a step without rows.
    """

    number: int
    time_ns: int
    plan: Plan
    rows: npt.NDArray[np.uint8] | None
    token_ids: npt.NDArray[Any]
    ready: Callable[[], None]
    lost: str | None = None
    ended: list[tuple[Tracked, Ended]] = msgspec.field(default_factory=list)
    limits: dict[str, int] = msgspec.field(default_factory=dict)
    shifts: dict[str, int] = msgspec.field(default_factory=dict)
    lent: int = 0
    shaped_at: int = 0
    events: list[Noted] = msgspec.field(default_factory=list)
    events_lost: Counter[Tracked] = msgspec.field(default_factory=Counter)
    opened: Callable[[Tracked], Opened] | None = None
    marks: dict[str, tuple[int, ...]] = msgspec.field(default_factory=dict)
    weights: Weights | None = None

    def note(self, noted: Noted) -> None:
        """Add an event; count it only if the request has too many in this step."""
        if sum(other.request is noted.request for other in self.events) < limits.EVENTS_PER_STEP_MAX:
            self.events.append(noted)
        else:
            self.events_lost[noted.request] += 1

    def cut(self, key: str, limit: int) -> None:
        """Drop the rows of a request at position `limit` and later, and the events that these decided."""
        self.limits[key] = min(limit, self.limits.get(key, limit))

    def shift(self, key: str, count: int) -> None:
        """Lower all positions of a request by `count`; limits, cuts and later events have corrected positions."""
        self.shifts[key] = self.shifts.get(key, 0) + count
        self.events = [noted.lowered(count) if noted.request.key == key else noted for noted in self.events]

    def place(self) -> None:
        """Correct the positions of the plan that `shift` lowered."""
        if not self.shifts:
            return
        by, self.shifts = self.shifts, {}
        lower = [by.get(request.key, 0) for request in self.plan.batch.requests]
        batch = self.plan.batch.later(self.plan.batch.starts - np.array(lower, np.int64))
        blocks = tuple(
            block._replace(spans=tuple(s._replace(start=s.start - lower[s.request]) for s in block.spans))
            for block in self.plan.blocks
        )
        histories = {
            number: tuple(
                h._replace(first=h.first - lower[number]) if h.first > batch[number].start else h for h in held
            )
            for number, held in self.plan.histories.items()
        }
        self.plan = msgspec.structs.replace(self.plan, batch=batch, blocks=blocks, histories=histories)

    def holds(self, key: str) -> bool:
        """Return whether a request has a part in the step."""
        batch = any(request.key == key for request in self.plan.batch.requests)
        return batch or any(noted.request.key == key for noted in self.events)

    @property
    def true_events(self) -> list[Noted]:
        """The events that no cut has undone."""
        return [noted for noted in self.events if noted.decided <= self.limits.get(noted.request.key, noted.decided)]


class FrameSink(Protocol):
    """The interface of a transport."""

    def send(self, header: FrameHeader, payload: Any) -> str | None:
        """Take a frame; return None, or why it was refused."""

    def close(self, drain_s: float = ...) -> None:
        """Send the queued frames for at most `drain_s` seconds, and stop."""


class Way(NamedTuple):
    """The way to one hub.

    boot: the worker's boot id at that hub.
    """

    link: FrameSink
    boot: str


class Sender:
    """One thread and its queue, for the life of a worker.

    The queue has no bound of its own: each step in it holds a buffer of the worker's ring, which is bounded.

    ways: the way to each hub, by the hub's index.
    text_of: returns the text of a token id; None without a tokenizer.
    widths: the width classes of the worker; without them, all rows are of the stream's width.
    """

    def __init__(
        self,
        ways: Sequence[Way],
        *,
        engine: str,
        rank: Rank,
        info: ModelInfo,
        sites: tuple[Site, ...],
        text_of: Callable[[int], str] | None,
        widths: Sequence[Width] = (),
    ) -> None:
        self.ways = tuple(ways)
        self.engine, self.rank, self.info, self.sites = engine, rank, info, sites
        self.text_of = functools.lru_cache(maxsize=65536)(text_of) if text_of is not None else None
        self.dropped: tuple[Counter[str], ...] = tuple(Counter() for _ in ways)
        """The rows that were not sent, by hub and reason, since the start; written by the sender's thread."""
        # The width classes, and the bytes of a row of each.
        self._widths = tuple(widths) or Widths.uniform(info.hidden_size, len(sites)).classes
        self._row_bytes = [each.width * DTYPES[info.dtype].itemsize for each in self._widths]
        # The rows sent of each running request, by vLLM's id.
        self._sent: dict[str, int] = {}
        # The weights that computed the rows sent of each running request, by vLLM's id.
        self._weights: dict[str, tuple[Weights, ...]] = {}
        # The rows lost of each running request, by vLLM's id.
        self._lost: dict[str, Losses] = {}
        self._log = LossLog(logger, f"worker {tuple(rank)}", engine=engine, rank=list(rank))
        # An event is set when all before it was sent; None ends the thread.
        self._steps: queue.SimpleQueue[Computed | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="capflow-sender", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, step: Computed) -> None:
        """Take a step to send; never waits."""
        for request, ended in step.ended:
            step.cut(request.key, ended.limit)
        self._steps.put(step)

    def mark(self) -> threading.Event:
        """Return an event that is set when the steps put so far are with the links."""
        sent = threading.Event()
        self._steps.put(sent)
        return sent

    def close(self, drain_s: float) -> None:
        """Send the queued steps for at most `drain_s` seconds, then close the links."""
        self._steps.put(None)
        self._thread.join(drain_s)
        closing = [threading.Thread(target=way.link.close, args=(drain_s,)) for way in self.ways]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def _run(self) -> None:
        while self._take():
            pass

    def _take(self) -> bool:
        """Wait for a step and send it; return whether another one may follow.

        The thread keeps nothing of a step while it waits: a large one gets memory only when all before it came back.
        """
        step = self._steps.get()
        if isinstance(step, threading.Event):
            step.set()
        elif step is not None:
            try:
                self._send(step)
            except Exception:
                logger.exception("step %d was not sent", step.number)
        return step is not None

    def _send(self, step: Computed) -> None:
        step.ready()
        step.place()
        for hub in range(len(self.ways)):
            self._send_to(hub, step)

    def _send_to(self, hub: int, step: Computed) -> None:
        """Send a hub its part of a step, if there is one."""
        link = self.ways[hub].link
        ended = [(request, end) for request, end in step.ended if request.hub == hub]
        *before, events = _events(step, hub) or [()]
        for some in before:
            link.send(self._header(hub, step, (), (), (), {}, some), b"")
        shipped = step.plan.shipped(hub)
        spans = _trimmed(step, shipped)
        parts = [part for part in _parts(step.plan, shipped, spans, self._row_bytes) if part.counts]
        self._note_weights(step, dict.fromkeys(itertools.chain.from_iterable(part.counts for part in parts)), spans)
        is_sent = False
        for part in parts:
            last = part is parts[-1]
            ends, events_here = (ended[: limits.FINISHED_PER_FRAME_MAX], events) if last else ([], ())
            is_sent = self._send_part(hub, step, part, ends, events_here)
        if events and not is_sent:
            link.send(self._header(hub, step, (), (), (), {}, events), b"")
        rest = ended[limits.FINISHED_PER_FRAME_MAX :] if is_sent else ended
        for begin in range(0, len(rest), limits.FINISHED_PER_FRAME_MAX):
            ends = rest[begin : begin + limits.FINISHED_PER_FRAME_MAX]
            link.send(self._header(hub, step, (), (), ends, {}), b"")
        for request, _ in ended:
            self._sent.pop(request.key, None)
            self._weights.pop(request.key, None)
            if (lost := self._lost.pop(request.key, None)) is not None:
                self._log.tell(request.id, lost.dropped)

    def _send_part(
        self,
        hub: int,
        step: Computed,
        part: _Part,
        ended: Sequence[tuple[Tracked, Ended]],
        events: Sequence[ActedOn],
    ) -> bool:
        """Send a hub rows of a step in a frame; return whether they are sent, and count them as lost if they are not.

        ended, events: what leaves in that frame, too.
        """
        reason = step.lost
        if step.rows is not None:
            blocks, requests = self._describe(step, part.blocks, part.spans)
            header = self._header(hub, step, requests, blocks, ended, part.counts, events)
            reason = self.ways[hub].link.send(header, self._payload(step, step.rows, part.blocks))
        if reason is None and step.rows is not None:
            sent = self._sent
            for key, rows in part.counts.items():
                sent[key] = sent.get(key, 0) + rows
            return True
        if reason is not None:
            self.dropped[hub][reason] += sum(part.counts.values())
            self._lose(step.plan, part.blocks, part.spans, reason)
        return False

    def _note_weights(self, step: Computed, keys: Iterable[str], trimmed: Sequence[Sequence[Span]]) -> None:
        """Note the weights of a step that is sent, for each request with rows in it."""
        weights = step.weights
        if weights is None or step.rows is None:
            return
        used = self._weights
        changed = [key for key in keys if key not in used or used[key][-1].version != weights.version]
        if not changed:
            return
        first: dict[str, int] = {}
        for spans in trimmed:
            for number, start, _, _ in spans:
                key = step.plan.batch[number].request.key
                first[key] = min(first.get(key, start), start)
        for key in changed:
            every = (*used.get(key, ()), msgspec.structs.replace(weights, start=first[key]))
            used[key] = every if len(every) <= limits.WEIGHTS_TOLD_MAX else (every[0], *every[2:])

    def _lose(
        self, plan: Plan, shipped: Sequence[PlannedBlock], trimmed: Sequence[Sequence[Span]], reason: str
    ) -> None:
        """Count the rows of a step that are not sent."""
        for block, spans in zip(shipped, trimmed, strict=True):
            sites = [self.sites[number] for number in block.sites]
            for number, start, length, _ in spans:
                losses = self._lost.setdefault(plan.batch[number].request.key, Losses())
                losses.add(reason, sites, start, start + length)

    def _payload(
        self, step: Computed, rows: npt.NDArray[np.uint8], shipped: Sequence[PlannedBlock]
    ) -> npt.NDArray[np.uint8]:
        """Return the rows of a hub's blocks, `[bytes]`, block after block."""
        begins = [0, step.shaped_at]
        for number, count in enumerate(step.plan.shaped, start=1):
            begins.append(begins[-1] + count * self._row_bytes[number])
        parts: list[tuple[int, int]] = []
        for number, group in itertools.groupby(shipped, key=_class_of):
            blocks = tuple(group)
            size = self._row_bytes[number]
            begin, end = begins[number] + blocks[0].base * size, begins[number] + blocks[-1].end * size
            if parts and parts[-1][1] == begin:
                begin = parts.pop()[0]
            parts.append((begin, end))
        if len(parts) > 1:
            return np.concatenate([rows[begin:end] for begin, end in parts])
        part = rows[slice(*parts[0])]
        return part if len(self.ways) == 1 else part.copy()

    def _describe(
        self, step: Computed, shipped: Sequence[PlannedBlock], trimmed: Sequence[Sequence[Span]]
    ) -> tuple[tuple[Block, ...], tuple[RequestRows, ...]]:
        """Return the frame's blocks and requests; a block's spans name a request by its index in the requests."""
        first: dict[int, int] = {}
        end: dict[int, int] = {}
        for spans in trimmed:
            for number, start, length, _ in spans:
                if number not in first:
                    first[number], end[number] = start, start + length
                else:
                    first[number] = min(first[number], start)
                    end[number] = max(end[number], start + length)
        requests = tuple(self._requests(step, first, end))
        index = {number: n for n, number in enumerate(first)}
        same = all(number == n for number, n in index.items())
        blocks = tuple(
            block_of(block, self.sites)._replace(
                spans=tuple(spans)
                if same
                else tuple(_span((index[number], start, length, row)) for number, start, length, row in spans)
            )
            for block, spans in zip(shipped, trimmed, strict=True)
        )
        return blocks, requests

    def _requests(self, step: Computed, firsts: Mapping[int, int], ends: Mapping[int, int]) -> Iterator[RequestRows]:
        """Yield the parts of requests in a frame.

        firsts, ends: their positions, by index in the batch.
        """
        batch, histories, text_of = step.plan.batch.made, step.plan.histories, self.text_of
        every_id = step.token_ids.tolist()
        for number, first in firsts.items():
            request, row, start, _ = batch[number]
            end, shift = ends[number], row - start
            ids = tuple(every_id[first + shift : end + shift])
            runs: tuple[int, ...] = ()
            if (history := histories.get(number)) is not None:
                runs = steered_runs(history, first, end, None if step.opened is None else step.opened(request))
            if step.marks and (marks := step.marks.get(request.key)) is not None:
                runs = merged(runs, clipped([start + edge for edge in marks], first, end))
            yield RequestRows(
                request.id,
                request.prompt_length,
                first,
                ids,
                tuple(map(text_of, ids)) if text_of is not None else (),
                request.capture,
                request.incarnation,
                runs,
                request.adapter,
            )

    def _finished(self, ended: Sequence[tuple[Tracked, Ended]], counts: Mapping[str, int]) -> tuple[Finished, ...]:
        """Return the ends of watched requests; `counts` are their rows in this frame, which is not sent yet."""
        return tuple(
            Finished(
                id=request.id,
                status=end.status,
                prompt_length=request.prompt_length,
                computed_length=min(end.limit, request.computed),
                rows=self._sent.get(request.key, 0) + counts.get(request.key, 0),
                dropped=lost.dropped if (lost := self._lost.get(request.key)) is not None else (),
                capture=request.capture,
                incarnation=request.incarnation,
                adapter=request.adapter,
                weights=self._weights.get(request.key, ()),
            )
            for request, end in ended
            if request.watched
        )

    def _header(
        self,
        hub: int,
        step: Computed,
        requests: tuple[RequestRows, ...],
        blocks: tuple[Block, ...],
        ended: Sequence[tuple[Tracked, Ended]],
        counts: Mapping[str, int],
        events: Sequence[ActedOn] = (),
    ) -> FrameHeader:
        """Return a frame's header.

        ended: the finished requests whose end is in the frame.
        counts: the rows of each request in the frame, by vLLM's id.
        events: the events in the frame, by request.
        """
        return FrameHeader(
            engine=self.engine,
            boot=self.ways[hub].boot,
            rank=self.rank,
            seq=0,  # numbered by the link
            step=step.number,
            time_ns=step.time_ns,
            dtype=self.info.dtype,
            hidden_size=self.info.hidden_size,
            requests=requests,
            blocks=blocks,
            finished=self._finished(ended, counts),
            acted=tuple(events),
            step_tokens=step.plan.tokens,
            step_requests=len(step.plan.batch),
            weights=step.weights if blocks else None,
            shapes=self._shapes(blocks) if step.plan.shaped else msgspec.UNSET,
        )

    def _shapes(self, blocks: Sequence[Block]) -> tuple[tuple[int, ...], ...] | msgspec.UnsetType:
        """Return the shape of a row of each block, as in a frame's header."""
        shapes = tuple(self.info.own_shape(block.sites[0]) for block in blocks)
        return shapes if any(shapes) else msgspec.UNSET


_class_of = operator.attrgetter("width_class")
_span = functools.partial(tuple.__new__, Span)


class _Part(NamedTuple):
    """The part of a step that one frame has.

    blocks: its blocks, in the order of the step's.
    spans: the spans of each that belong to requests.
    counts: the rows of each request in it, by vLLM's id.
    """

    blocks: Sequence[PlannedBlock]
    spans: Sequence[Sequence[Span]]
    counts: Mapping[str, int]


def _parts(
    plan: Plan, shipped: Sequence[PlannedBlock], trimmed: Sequence[Sequence[Span]], row_bytes: Sequence[int]
) -> Iterator[_Part]:
    """Yield the parts of a step: one up to `limits.STEP_BYTES_MAX`; else several, of a site's rows of a block at least.

    A whole step is admitted to any empty queue. Of several parts, queues that drop may lose some.

    trimmed: the spans of each block.
    row_bytes: the bytes of a row of each width class.
    """
    nbytes = sum(len(block.sites) * block.rows * row_bytes[block.width_class] for block in shipped)
    part_bytes = limits.STEP_BYTES_MAX if nbytes <= limits.STEP_BYTES_MAX else limits.STEP_PART_BYTES_MAX
    blocks, spans, room = list[PlannedBlock](), list[Sequence[Span]](), part_bytes
    for whole, held in zip(shipped, trimmed, strict=True):
        block, site_bytes = whole, whole.rows * row_bytes[whole.width_class]
        while len(block.sites) * site_bytes > room:
            count = room // site_bytes or (0 if blocks else 1)
            if count:
                blocks.append(block._replace(sites=block.sites[:count]))
                spans.append(held)
                block = block._replace(sites=block.sites[count:], base=block.base + count * block.rows)
            yield _Part(blocks, spans, _count(plan, blocks, spans))
            blocks, spans, room = [], [], part_bytes
        if block.sites:
            blocks.append(block)
            spans.append(held)
            room -= len(block.sites) * site_bytes
    if blocks:
        yield _Part(blocks, spans, _count(plan, blocks, spans))


def _events(step: Computed, hub: int) -> list[tuple[ActedOn, ...]]:
    """Return the true events of a hub's requests, by request, in as many parts as frames need."""
    by_request: dict[Tracked, list[Acted]] = {}
    for noted in step.true_events:
        if noted.request.hub == hub:
            by_request.setdefault(noted.request, []).append(noted.event)
    parts: list[tuple[ActedOn, ...]] = []
    part: list[ActedOn] = []
    nbytes = 0
    for request, events in by_request.items():
        size = sum(_EVENT_BYTES + _EVENT_SITE_BYTES * len(event.sites) for event in events)
        full = nbytes + size > limits.EVENTS_PER_FRAME_BYTES_MAX or len(part) == limits.FINISHED_PER_FRAME_MAX
        if part and full:
            parts.append(tuple(part))
            part, nbytes = [], 0
        part.append(ActedOn(request.id, request.incarnation, tuple(events), step.events_lost[request]))
        nbytes += size
    return [*parts, tuple(part)] if part else parts


def _trimmed(step: Computed, shipped: Sequence[PlannedBlock]) -> list[Sequence[Span]]:
    """Return each block's spans without the rows that belong to no request."""
    if not step.limits:
        return [block.spans for block in shipped]

    def trim(span: Span) -> Span:
        limit = step.limits.get(step.plan.batch[span.request].request.key)
        return span if limit is None else span._replace(length=min(span.length, limit - span.start))

    return [tuple(span for span in map(trim, block.spans) if span.length > 0) for block in shipped]


def _count(plan: Plan, shipped: Sequence[PlannedBlock], trimmed: Sequence[Sequence[Span]]) -> dict[str, int]:
    """Return the rows (positions times sites) of each request, by vLLM's id."""
    counts: dict[str, int] = {}
    requests = plan.batch.requests
    for block, spans in zip(shipped, trimmed, strict=True):
        sites = len(block.sites)
        for number, _, length, _ in spans:
            key = requests[number].key
            counts[key] = counts.get(key, 0) + length * sites
    return counts
