"""The sender: makes frames of finished steps, off the step thread, and hands them to the links.

Each hub is sent a frame of its own requests, numbered, counted and refused by itself. With one hub that is the step's buffer, not
copied. With several each hub's rows, which lie together in it, are copied out, so that no hub holds memory of another's.

A step is given to the sender when it is settled: only then is it known which requests ended in it and which drafts were
accepted, and so which of its rows belong to no token of the answer. Encoding, waiting for the device's copy and waiting for room all happen here.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from capflow import limits
from capflow.capture.dtypes import DTYPES
from capflow.capture.frame import ActedOn, Block, Finished, FrameHeader, Rank, RequestRows, Span
from capflow.capture.losses import Losses, LossLog
from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow_engine.scheduler.orders import Ended
from capflow_engine.taps.plan import Group, Plan, Tracked, block_of

logger = logging.getLogger("vllm.capflow.sender")


@dataclass
class Computed:
    """A step that was computed.

    rows: its buffer as bytes, None when it shipped nothing or its rows were lost.

    token_ids: the input ids of the step's tokens, `[tokens]`, valid when `ready` returned.
    lost: why `rows` is None although rows were planned.
    ended: requests that are over, with what is known of them.
    limits: by vLLM's id, the position behind the last row that is the request's; without one, all are.
    lent: the bytes that the worker's ring lent for it.
    """

    number: int
    time_ns: int
    plan: Plan
    rows: npt.NDArray[np.uint8] | None
    token_ids: npt.NDArray[Any]
    ready: Callable[[], None]
    lost: str | None = None
    ended: list[tuple[Tracked, Ended]] = field(default_factory=list)
    limits: dict[str, int] = field(default_factory=dict)
    lent: int = 0

    def cut(self, key: str, limit: int) -> None:
        """Keep no row of a request at position `limit` or behind it."""
        self.limits[key] = min(limit, self.limits.get(key, limit))

    def holds(self, key: str) -> bool:
        """Return whether a request has a part in the step."""
        return any(part.request.key == key for part in self.plan.batch)


class FrameSink(Protocol):
    """What the sender needs of a transport."""

    def send(self, header: FrameHeader, payload: Any) -> str | None:
        """Take a frame; return None, or why it was not taken."""

    def close(self, drain_s: float = ...) -> None:
        """Send what is left for at most that long, and stop."""


class Way(NamedTuple):
    """The way to one hub.

    boot: what the worker calls its life there.
    """

    link: FrameSink
    boot: str


class Sender:
    """One thread and its queue, from the start of a worker to its end.

    ways: to each hub, by number. texts: makes the text of a token id, None without a tokenizer. The queue needs no
        bound of its own: each step in it holds a buffer of the worker's ring, which is bounded.
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
    ) -> None:
        self.ways = tuple(ways)
        self.engine, self.rank, self.info, self.sites = engine, rank, info, sites
        self.text_of = functools.lru_cache(maxsize=65536)(text_of) if text_of is not None else None
        self.dropped: tuple[Counter[str], ...] = tuple(Counter() for _ in ways)
        """Rows not sent, by hub and reason, since the start; written by the thread."""
        self._row_bytes = info.hidden_size * DTYPES[info.dtype].itemsize
        # Rows sent, by vLLM's id, of requests that run.
        self._sent: dict[str, int] = {}
        # Rows not sent, likewise.
        self._lost: dict[str, Losses] = {}
        self._log = LossLog(logger, f"worker {tuple(rank)}", engine=engine, rank=list(rank))
        self._steps: queue.SimpleQueue[Computed | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="capflow-sender", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, step: Computed) -> None:
        """Take a step to send; never waits."""
        for request, ended in step.ended:
            step.cut(request.key, ended.limit)
        self._steps.put(step)

    def close(self, drain_s: float) -> None:
        """Send what was put, for at most `drain_s` seconds, then stop the links."""
        self._steps.put(None)
        self._thread.join(drain_s)
        closing = [threading.Thread(target=way.link.close, args=(drain_s,)) for way in self.ways]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            try:
                self._send(step)
            except Exception:
                logger.exception("step %d was not sent", step.number)

    def _send(self, step: Computed) -> None:
        step.ready()
        for hub in range(len(self.ways)):
            self._send_to(hub, step)

    def _send_to(self, hub: int, step: Computed) -> None:
        """Send a hub its part of a step, if it has one."""
        link = self.ways[hub].link
        groups = step.plan.shipped(hub)
        ended = [(request, how) for request, how in step.ended if request.hub == hub]
        spans = self._trimmed(step, groups)
        counts = _count(step.plan, groups, spans)
        reason = step.lost
        if step.rows is not None and counts:
            blocks, requests = self._describe(step, groups, spans)
            header = self._header(hub, step, requests, blocks, ended[: limits.FINISHED_PER_FRAME_MAX], counts)
            reason = link.send(header, self._payload(step.rows, groups))
            if reason is None:
                for key, rows in counts.items():
                    self._sent[key] = self._sent.get(key, 0) + rows
        if reason is not None:
            self.dropped[hub][reason] += sum(counts.values())
            self._lose(step.plan, groups, spans, reason)
        untold = ended if reason is not None or not counts else ended[limits.FINISHED_PER_FRAME_MAX :]
        for begin in range(0, len(untold), limits.FINISHED_PER_FRAME_MAX):
            ends = untold[begin : begin + limits.FINISHED_PER_FRAME_MAX]
            link.send(self._header(hub, step, (), (), ends, {}), b"")
        for request, _ in ended:
            self._sent.pop(request.key, None)
            if (lost := self._lost.pop(request.key, None)) is not None:
                self._log.tell(request.id, lost.dropped)

    def _lose(self, plan: Plan, groups: Sequence[Group], trimmed: list[tuple[Span, ...]], reason: str) -> None:
        """Note which rows of a step are not sent."""
        for group, spans in zip(groups, trimmed, strict=True):
            sites = [self.sites[number] for number in group.sites]
            for number, start, length, _ in spans:
                losses = self._lost.setdefault(plan.batch[number].request.key, Losses())
                losses.add(reason, sites, start, start + length)

    def _payload(self, rows: npt.NDArray[np.uint8], groups: Sequence[Group]) -> npt.NDArray[np.uint8]:
        """Return the rows of a hub's groups, `[bytes]`."""
        if len(self.ways) == 1:
            return rows
        last = groups[-1]
        end = last.base + last.rows * len(last.sites)
        return rows[groups[0].base * self._row_bytes : end * self._row_bytes].copy()

    def _trimmed(self, step: Computed, groups: Sequence[Group]) -> list[tuple[Span, ...]]:
        """Return each group's spans, without the rows that are no request's."""
        ends = step.limits
        trimmed = []
        for group in groups:
            spans = group.spans
            if ends:
                cut = []
                for span in spans:
                    limit = ends.get(step.plan.batch[span.request].request.key)
                    length = span.length if limit is None else min(span.length, limit - span.start)
                    if length > 0:
                        cut.append(span if length == span.length else span._replace(length=length))
                spans = tuple(cut)
            trimmed.append(spans)
        return trimmed

    def _describe(
        self, step: Computed, groups: Sequence[Group], trimmed: list[tuple[Span, ...]]
    ) -> tuple[tuple[Block, ...], tuple[RequestRows, ...]]:
        """Return the frame's blocks and requests; requests are numbered by their place in the latter."""
        first: dict[int, int] = {}
        end: dict[int, int] = {}
        for spans in trimmed:
            for number, start, length, _ in spans:
                first[number] = min(first.get(number, start), start)
                end[number] = max(end.get(number, 0), start + length)
        places = {number: place for place, number in enumerate(first)}
        requests = tuple(self._request(step, number, first[number], end[number]) for number in first)
        blocks = tuple(
            block_of(group, self.sites)._replace(
                spans=tuple(span._replace(request=places[span.request]) for span in spans)
            )
            for group, spans in zip(groups, trimmed, strict=True)
        )
        return blocks, requests

    def _request(self, step: Computed, number: int, first: int, end: int) -> RequestRows:
        request, row, start, _ = step.plan.batch[number]
        ids = tuple(step.token_ids[row + first - start : row + end - start].tolist())
        texts = tuple(map(self.text_of, ids)) if self.text_of is not None else ()
        return RequestRows(request.id, request.prompt_length, first, ids, texts, request.capture, request.incarnation)

    def _finished(self, over: Sequence[tuple[Tracked, Ended]], more: Mapping[str, int]) -> tuple[Finished, ...]:
        """Return what is said of the requests that are over, `more` rows of them being in this frame."""
        return tuple(
            Finished(
                id=request.id,
                status=ended.status,
                prompt_length=request.prompt_length,
                computed_length=min(ended.limit, request.computed),
                rows=self._sent.get(request.key, 0) + more.get(request.key, 0),
                dropped=lost.dropped if (lost := self._lost.get(request.key)) is not None else (),
                capture=request.capture,
                acted=tuple(request.acted),
                incarnation=request.incarnation,
            )
            for request, ended in over
            if request.watched
        )

    def _header(
        self,
        hub: int,
        step: Computed,
        requests: tuple[RequestRows, ...],
        blocks: tuple[Block, ...],
        over: Sequence[tuple[Tracked, Ended]],
        counts: Mapping[str, int],
    ) -> FrameHeader:
        """Return a frame's header, with the ends of requests.

        counts: their rows in it.
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
            finished=self._finished(over, counts),
            acted=tuple(
                ActedOn(request.id, request.incarnation, tuple(request.acted))
                for request, _ in over
                if not request.watched
            ),
            step_tokens=step.plan.tokens,
            step_requests=len(step.plan.batch),
        )


def _count(plan: Plan, groups: Sequence[Group], trimmed: list[tuple[Span, ...]]) -> dict[str, int]:
    """Return the rows (positions times sites) of each request, by vLLM's id."""
    counts: dict[str, int] = {}
    for group, spans in zip(groups, trimmed, strict=True):
        for span in spans:
            key = plan.batch[span.request].request.key
            counts[key] = counts.get(key, 0) + span.length * len(group.sites)
    return counts
