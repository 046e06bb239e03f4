"""The index: which requests run, what each consumer wants of them, and the result that each consumer gave.

It belongs to one thread and does no I/O. A request enters with the first frame that names it and is
over when every pipeline stage of its engine's replica has sent its `Finished`, or the engine is gone. What a consumer
was given of a request is in the tally of its lane (`capflow.hub.lanes.tally`).
"""

from __future__ import annotations

import heapq
import itertools
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from capflow import limits
from capflow.buffers.kept import Kept
from capflow.buffers.memo import Memo
from capflow.buffers.newest import keep_newest
from capflow.buffers.shares import Shares
from capflow.capture.frame import Dropped, Finished, Frame, FrameHeader, Rank, RequestRows, rows_of
from capflow.capture.losses import Losses, note_frame
from capflow.capture.model import ModelInfo
from capflow.capture.result import CaptureResult
from capflow.capture.site import Site
from capflow.capture.spec import Capture, CaptureByConsumer, CaptureSpec
from capflow.errors import RemoteProtocolError, UsageError, explain
from capflow.hub.requests.request import REQUEST_BYTES, Before, KnownEngine, Request, RequestName
from capflow.hub.requests.share import Groups, Share
from capflow.steering.action import Answered
from capflow.steering.events import events_of
from capflow.text.engine_name import is_of, name_of

# The size of the memo of which sites of a block each consumer wants.
_GROUPS_BYTES_MAX = 16 * limits.MIB
# The size of the memo of resolved specs, for later requests with the same specs.
_SPECS_BYTES_MAX = 16 * limits.MIB
# The memory of each consumer's part in a request, and of a name.
_TALLY_BYTES, _NAME_BYTES = 256, 96
# The memory of the parts of a loss, and of their part in results.
_DROPPED_BYTES, _GAP_BYTES, _GAP_SITE_BYTES = 320, 480, 96
# The memory of a change of the weights, without its label.
_WEIGHTS_BYTES = 160
# The memory of a spec with its key, besides its shares.
_SPEC_BYTES = 512
_opened_at_of = operator.attrgetter("opened_at")


class Wish(NamedTuple):
    """What one consumer wants: of every request, and whether also what requests ask for themselves.

    durable: its lane has rows that an earlier hub took. That this hub did not get them is no loss to the consumer.
    """

    consumer: str
    spec: CaptureSpec | None
    reads_requests: bool
    durable: bool = False


class Arrival(NamedTuple):
    """A frame that came, with the requests that it names.

    requests: that of each part of its header.
    ends: what each consumer wants of each request that the frame ends.
    shares: what each consumer wants of every request of it; None when they differ.
    events: its events, in order.
    """

    frame: Frame
    model: ModelInfo
    requests: Sequence[Request]
    ends: Sequence[tuple[Share | None, ...]]
    shares: tuple[Share | None, ...] | None
    events: Sequence[Answered] = ()

    def concerns(self, consumer: int) -> bool:
        """Return whether a consumer wants something of a request that the frame names."""
        named = any(request.shares[consumer] is not None for request in self.requests)
        return named or any(shares[consumer] is not None for shares in self.ends)


@dataclass
class _Lost:
    """A request that `RequestIndex.lose` ended.

    received: the rows that had come, by pipeline stage.
    ended: the stages that ended it, before or since.
    rows: those that were lost, by reason.
    logged: rows that a result or the log named, by reason.
    given: whether a consumer wanted something of it whose lane is not durable.
    """

    received: dict[int, int]
    ended: set[int]
    rows: Counter[str]
    logged: Counter[str]
    given: bool


class Late(NamedTuple):
    """What the ends of a request say that come after it was ended, its engine being gone.

    dropped: what was lost of it.
    untold: what no result of it could say.
    given: whether a consumer wanted something of it whose lane is not durable.
    came: whether rows of it had come.
    """

    dropped: tuple[Dropped, ...]
    untold: tuple[Dropped, ...]
    given: bool
    came: bool


class RequestIndex:
    """All requests of a hub: open requests, and the latest requests that are over.

    state: the memory that open requests share.
    results_kept_max: how many requests that are over are kept; None for `limits.RESULTS_KEPT_MAX`.
    results_bytes_max: the memory of requests that are over.
    clock: tells when a request is opened, seconds.
    """

    def __init__(
        self,
        wishes: Sequence[Wish],
        state: Shares,
        results_kept_max: int | None = None,
        results_bytes_max: int = limits.MIB,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = state
        self._clock = clock
        self.wishes = tuple(wishes)
        self._groups: Memo[tuple[Share, tuple[Site, ...]], Groups] = Memo(_GROUPS_BYTES_MAX)
        # What consumers want, by model and spec.
        self._specs: Memo[tuple[int, int, bytes], tuple[Share | None, ...]] = Memo(_SPECS_BYTES_MAX)
        self._no_tags = ("",) * len(self.wishes)
        kept_max = limits.RESULTS_KEPT_MAX if results_kept_max is None else results_kept_max
        # The keys in `_requests` of requests that are over.
        self.kept = Kept(kept_max, results_bytes_max)
        # The consumers that lose the rows that this hub does not get.
        self._losing = tuple(index for index, wish in enumerate(self.wishes) if not wish.durable)
        self._has_inbox = len(self._losing) < len(self.wishes)
        self.requests_done = 0
        # Requests that ended because their engine went away.
        self.requests_failed = 0
        self.requests_open = 0
        # Requests that are over, and lost rows on the way to this hub.
        self.requests_gapped = 0
        # Rows that did not reach this hub, by reason.
        self.dropped: Counter[str] = Counter()
        # The newest request of each engine's name and id, open or over.
        self._requests: dict[tuple[str, str], Request] = {}
        # The names of the engines that have a request in `_requests`, by id.
        self._engines_of: dict[str, tuple[str, ...]] = {}
        # The requests that `lose` ended, by engine and id, oldest first, at most `limits.RESULTS_KEPT_MAX`.
        self._lost: dict[tuple[str, str], _Lost] = {}
        # The ends, by stage, of requests that had no room and that other stages have not ended, oldest first, at
        # most `limits.RESULTS_KEPT_MAX`.
        self._unopened: dict[tuple[str, str], dict[int, Finished]] = {}

    def check(self, model: ModelInfo) -> None:
        """Raise UsageError when a consumer's own spec names a site that the model does not have or tap."""
        for wish in self.wishes:
            if wish.spec is not None:
                where = f"consumers.{wish.consumer}.capture"
                wish.spec.resolve(model.sites, num_layers=model.num_layers, where=where)

    def admit(self, header: FrameHeader, engine: KnownEngine) -> None:
        """Check that what the requests of a frame want fits the engine's model, before anything of the frame is taken.

        `take`, `miss` and `finish` of an admitted frame raise nothing. Raises RemoteProtocolError.
        """
        is_open = engine.open
        parts: list[RequestRows | Finished] = [part for part in header.requests if part.id not in is_open]
        for part in (*parts, *header.finished):
            if part.id not in is_open:
                self._shares(engine, None if part.capture is None else part.capture.untagged())

    def take(self, frame: Frame, engine: KnownEngine) -> Arrival:
        """Note a frame's rows, and open the requests that it names; its ends are for `finish`."""
        header = frame.header
        rank, stage = header.rank, header.rank.pp
        request_of = engine.open.get
        requests = [request_of(part.id) or self._request(engine, part, rank) for part in header.requests]
        for request, part, rows in zip(requests, header.requests, frame.counts, strict=True):
            request.prompt_length = part.prompt_length
            request.tokens = max(request.tokens, part.start + len(part.token_ids))
            received = request.received
            if stage in received:
                received[stage] += rows
                if stage in request.before:
                    _note_more(request.before, header, part)
            else:
                if part.start:
                    request.before[stage] = header.step, _first(header, part)
                received[stage] = rows
        shares = [request.shares for request in requests]
        alike = bool(shares) and shares.count(shares[0]) == len(shares)  # the usual case: they want the same
        # Only lanes with an inbox read the ends. Requests that are opened for them take room.
        ends = [self._wanted_of(finished, engine, rank) for finished in header.finished] if self._has_inbox else []
        return Arrival(frame, engine.model, requests, ends, shares[0] if alike else None, events_of(header))

    def miss(self, header: FrameHeader, engine: KnownEngine, reason: str, *, placed: bool = True) -> int:
        """Note that the rows of a frame are lost; return how many of them a consumer wants.

        placed: whether the header can be believed where the rows are.
        """
        rows, missed = rows_of(header), 0
        losses: dict[str, Losses] = {}
        if placed:
            note_frame(losses, header, reason)
        else:
            for name, count in rows.items():
                losses.setdefault(name, Losses()).count(reason, count)
        for part in header.requests:
            request = self._request(engine, part, header.rank)
            request.received[header.rank.pp] = request.received.get(header.rank.pp, 0) + rows[part.id]
            if part.id in losses and any(share is not None for share in request.shares):
                request.lost.update(losses[part.id].dropped)
                missed += rows[part.id]
        return missed

    def recall(self, part: RequestRows, engine: KnownEngine, rank: Rank, rows: Mapping[int, int]) -> Request:
        """Return a request of which an earlier hub had rows that are lost, by pipeline stage; it is open."""
        request = self._request(engine, part, rank)
        request.prompt_length = part.prompt_length
        for stage, lost in rows.items():
            request.received[stage] = request.received.get(stage, 0) + lost
            request.lost.count("earlier_hub", lost)
        return request

    def pass_over(self, request: str, engine: KnownEngine, rank: Rank) -> None:
        """Note that nobody wants anything of a request, unless it is open."""
        if request not in engine.open:
            none = (None,) * len(self.wishes)
            self._add(Request(engine.name, request, rank.dp, none, self._no_tags, (), rank.pp), engine)

    def finish(self, header: FrameHeader, engine: KnownEngine) -> list[Request]:
        """Note the ends in a frame; return the requests that are over now."""
        over = []
        for finished in header.finished:
            if self.was_lost(finished, engine):
                continue
            part = _part_of(finished)
            request = self._request(engine, part, header.rank, ends=True)
            if request.id in engine.open:
                self._note_end(request, header.rank.pp, self._with_room(request, finished, engine), engine)
            elif (late := self._end_unopened(engine, part, header.rank, finished)) is not None:
                request = late
            else:
                continue  # it had no room, and other stages have not ended it
            if len(request.finished) >= engine.model.stages:
                statuses = [f.status for f in request.finished.values()]
                self._end(engine, request, max(statuses, key=lambda status: (status == "error", status == "abort")))
                over.append(request)
        return over

    @staticmethod
    def _bare(finished: Finished) -> Finished:
        """Return the end of a request with little that takes memory."""
        dropped = tuple(Dropped(each.rows, each.reason) for each in finished.dropped)
        return msgspec.structs.replace(finished, dropped=dropped, acted=(), capture=None)

    def _note_end(self, request: Request, stage: int, finished: Finished, engine: KnownEngine) -> None:
        """Note that a pipeline stage ended a request, and which of its rows did not come."""
        request.prompt_length = finished.prompt_length
        request.finished[stage] = finished
        request.lost.update(finished.dropped)
        missing = finished.rows - request.received.get(stage, 0)
        if missing > 0 and self._loses(request):
            if engine.full and stage not in request.received:
                request.lost.count("hub_full", missing)
            else:
                _count_earlier(request, stage, missing)

    def _end_unopened(self, engine: KnownEngine, part: RequestRows, rank: Rank, finished: Finished) -> Request | None:
        """Note the end of a request that had no room; return it, opened, when each pipeline stage has ended it."""
        key = engine.name, part.id
        ends = self._unopened.setdefault(key, {})
        ends[rank.pp] = self._bare(finished)
        if len(ends) < engine.model.stages:
            keep_newest(self._unopened, limits.RESULTS_KEPT_MAX)
            return None
        del self._unopened[key]
        request = self._open(engine, part, rank, 0)
        for stage, end in ends.items():
            self._note_end(request, stage, end, engine)
        return request

    def lose(
        self, engine: KnownEngine, replica: int | None = None, stage: int | None = None, *, restarted: bool = False
    ) -> list[Request]:
        """End the same requests as `losing`, all at once; return them."""
        return list(itertools.chain.from_iterable(self.losing(engine, replica, stage, restarted=restarted)))

    def losing(
        self, engine: KnownEngine, replica: int | None = None, stage: int | None = None, *, restarted: bool = False
    ) -> Iterator[list[Request]]:
        """End open requests of an engine with status `error`; yield them in slices. Meanwhile it is to open none.

        replica: only those of one replica.
        stage: only those that this pipeline stage has not ended. For all other requests, the other stages may still
            send rows.
        restarted: the stage started again. A request that another stage named first belongs to the new start, until
            this stage has sent rows of it.
        """
        if self._unopened:
            self._unopened = {key: ends for key, ends in self._unopened.items() if key[0] != engine.name}
        before = list(engine.open.values())
        for first in range(0, len(before), limits.SLICE_REQUESTS):
            lost = [
                request
                for request in before[first : first + limits.SLICE_REQUESTS]
                if request.status is None
                and replica in (None, request.replica)
                and (stage is None or request.ends_with(stage, restarted=restarted))
            ]
            for request in lost:
                self._end(engine, request, "error")
                given = self._loses(request)
                rows = request.lost.rows
                self._lost[engine.name, request.id] = _Lost(
                    dict(request.received), set(request.finished), rows, rows, given
                )
            keep_newest(self._lost, limits.RESULTS_KEPT_MAX)
            self.requests_failed += len(lost)
            yield lost

    def was_lost(self, finished: Finished, engine: KnownEngine) -> bool:
        """Return whether an end belongs to a request that `lose` ended and that sent nothing since."""
        lost = finished.status == "error" and finished.id not in engine.open
        return lost and (engine.name, finished.id) in self._lost

    def late(self, finished: Finished, engine: KnownEngine, stage: int) -> Late | None:
        """Note an end of a request that `was_lost`; return the losses when each stage has ended it."""
        lost = self._lost[engine.name, finished.id]
        losses = Losses()
        for reason, rows in lost.rows.items():
            losses.count(reason, rows)
        if stage not in lost.ended:
            lost.ended.add(stage)
            losses.update(finished.dropped)
            losses.count("earlier_hub", max(0, finished.rows - lost.received.get(stage, 0)))
            lost.rows = losses.rows
        if len(lost.ended) < engine.model.stages:
            return None
        untold, lost.logged = lost.rows - lost.logged, lost.rows
        untold_rows = tuple(Dropped(rows, reason) for reason, rows in untold.items())
        return Late(losses.dropped, untold_rows, lost.given, any(lost.received.values()))

    def over(self, request: Request | RequestName) -> Request | None:
        """Return a request that a lane says is over; None when it is not known here, or not over.

        A lane that names it has no `Request` of this index.
        """
        if isinstance(request, Request):
            return request
        newest = self._requests.get(request.key)
        return newest if newest is not None and newest.engine == request.engine and newest.status is not None else None

    def named(self, request: str, engine: str = "") -> list[Request]:
        """Return the newest request of an id, of each engine or of one, which is given by name or id."""
        if not engine:
            return [self._requests[name, request] for name in self._engines_of.get(request, ())]
        newest = self._requests.get((name_of(engine), request))
        return [newest] if newest is not None and is_of(newest.engine, engine) else []

    @staticmethod
    def running(engines: Iterable[KnownEngine], now: float) -> list[dict[str, Any]]:
        """Return the oldest open requests of engines, oldest first, as plain JSON values; any thread may call this.

        There are at most `limits.RUNNING_SHOWN_MAX`. Each engine has its requests in the order in which they came.
        """
        oldest = [list(itertools.islice(engine.open.values(), limits.RUNNING_SHOWN_MAX)) for engine in engines]
        requests = heapq.nsmallest(limits.RUNNING_SHOWN_MAX, itertools.chain(*oldest), key=_opened_at_of)
        return [request.as_running(now) for request in requests]

    def newest(self, key: tuple[str, str]) -> Request | None:
        """Return the newest request of an engine's name and an id; None where it is forgotten."""
        return self._requests.get(key)

    def results_of(self, request: Request) -> tuple[dict[str, CaptureResult], bool]:
        """Return a request's results by consumer and whether they are final."""
        pending = CaptureResult("pending")
        results = {wish.consumer: result or pending for wish, result in zip(self.wishes, request.results, strict=True)}
        results |= {name: CaptureResult("error", self.refusal(name)) for name in request.strangers}
        return results, request.status is not None and None not in request.results

    @property
    def readers(self) -> tuple[str, ...]:
        """The consumers that read what requests ask for: those that a request may name."""
        return tuple(wish.consumer for wish in self.wishes if wish.reads_requests)

    def refusal(self, consumer: str) -> str:
        """Return why a consumer that a request names gets nothing by it."""
        readers = ", ".join(self.readers) or "none, for no consumer reads what requests ask for"
        return explain("capture", got=f"consumer {consumer}", expected=f"one of this hub's: {readers}")

    def _loses(self, request: Request) -> bool:
        """Return whether a consumer wants something of a request that loses the rows that this hub does not get."""
        return any(request.shares[index] is not None for index in self._losing)

    def _wanted_of(self, finished: Finished, engine: KnownEngine, rank: Rank) -> tuple[Share | None, ...]:
        """Return what each consumer wants of a request that a frame ends."""
        if not self.was_lost(finished, engine):
            self._request(engine, _part_of(finished), rank, ends=True)
        if (request := engine.open.get(finished.id)) is not None:
            return request.shares
        # The request had no room here, or was ended before. Its end is reported all the same.
        return self._shares(engine, None if finished.capture is None else finished.capture.untagged())

    def _end(self, engine: KnownEngine, request: Request, status: str) -> None:
        request.status = status
        del engine.open[request.id]
        self.requests_open -= 1
        self.requests_done += 1
        self.dropped.update(request.lost.rows)
        self.requests_gapped += bool(request.lost)
        self.state.give(engine.owner, request.nbytes)
        if self._requests.get(request.key) is request:
            self.kept.add(engine.owner, request.key, max(request.nbytes, REQUEST_BYTES))
        for oldest in self.kept.excess():
            self._forget(oldest)

    def _forget(self, key: tuple[str, str]) -> None:
        """Forget a request that is over."""
        del self._requests[key]
        name, request_id = key
        if names := tuple(each for each in self._engines_of[request_id] if each != name):
            self._engines_of[request_id] = names
        else:
            del self._engines_of[request_id]

    def _request(self, engine: KnownEngine, part: RequestRows, rank: Rank, *, ends: bool = False) -> Request:
        """Return an open request, opened now if it is not.

        A request that has no room is opened only to end at once: else what is returned is nobody's, and wants nothing.
        """
        request = engine.open.get(part.id)
        if request is not None:
            return request
        capture = part.capture
        shares = self._shares(engine, None if capture is None else capture.untagged())
        nbytes = REQUEST_BYTES + 2 * len(part.id) + _NAME_BYTES * len(self._strangers(capture))
        nbytes += sum(_TALLY_BYTES + (0 if capture is None else share.nbytes) for share in shares if share is not None)
        if (engine.name, part.id) in self._unopened or not self.state.offer(engine.owner, nbytes):
            engine.full = True
            nbytes = 0
            if not (ends and engine.model.stages == 1):
                return Request(engine.name, part.id, rank.dp, (None,) * len(self.wishes), self._no_tags, (), rank.pp)
        return self._open(engine, part, rank, nbytes)

    def _open(self, engine: KnownEngine, part: RequestRows, rank: Rank, nbytes: int) -> Request:
        capture = part.capture
        shares = self._shares(engine, None if capture is None else capture.untagged())
        tags, strangers = self._tags(capture), self._strangers(capture)
        request = Request(engine.name, part.id, rank.dp, shares, tags, strangers, rank.pp)
        request.nbytes = nbytes
        self._add(request, engine)
        return request

    def _with_room(self, request: Request, finished: Finished, engine: KnownEngine) -> Finished:
        """Return the end of a request, with less about lost rows and changed weights if these have no room."""
        sites = sum(len(gap.sites) for dropped in finished.dropped for gap in dropped.gaps)
        gaps = sum(len(dropped.gaps) for dropped in finished.dropped)
        nbytes = sum(_WEIGHTS_BYTES + 4 * len(weights.label) for weights in finished.weights[1:])
        if gaps:
            nbytes += _DROPPED_BYTES * len(finished.dropped) + _GAP_BYTES * gaps + _GAP_SITE_BYTES * sites
        if not nbytes:
            return finished
        if self.state.offer(engine.owner, nbytes):
            request.nbytes += nbytes
            return finished
        dropped = tuple(Dropped(each.rows, each.reason) for each in finished.dropped)
        weights = (finished.weights[0], finished.weights[-1]) if len(finished.weights) > 1 else finished.weights
        return msgspec.structs.replace(finished, dropped=dropped, weights=weights)

    def _add(self, request: Request, engine: KnownEngine) -> None:
        request.opened_at = self._clock()
        engine.open[request.id] = self._requests[request.key] = request
        self.kept.remove(request.key)
        self._lost.pop((engine.name, request.id), None)
        name, names = request.key[0], self._engines_of.get(request.id, ())
        if name not in names:
            self._engines_of[request.id] = (*names, name)
        self.requests_open += 1

    def _tags(self, capture: Capture | None) -> tuple[str, ...]:
        if capture is None:
            return self._no_tags
        asked = (capture.of(wish.consumer) if wish.reads_requests else None for wish in self.wishes)
        return tuple("" if spec is None else spec.tag for spec in asked)

    def _strangers(self, capture: Capture | None) -> tuple[str, ...]:
        if not isinstance(capture, CaptureByConsumer):
            return ()
        return tuple(name for name in capture.by_name if name not in self.readers)

    def _shares(self, engine: KnownEngine, capture: Capture | None) -> tuple[Share | None, ...]:
        key = engine.tapped, engine.model.num_layers, b"" if capture is None else msgspec.msgpack.encode(capture)
        shares = self._specs.get(key)
        if shares is None:
            shares = tuple(self._share(wish, engine, capture) for wish in self.wishes)
            nbytes = len(key[2]) + _SPEC_BYTES + sum(share.nbytes for share in shares if share is not None)
            self._specs.put(key, shares, nbytes)
        return shares

    def _share(self, wish: Wish, engine: KnownEngine, capture: Capture | None) -> Share | None:
        asked = capture.of(wish.consumer) if capture is not None and wish.reads_requests else None
        specs = [spec for spec in (wish.spec, asked) if spec is not None]
        try:
            return Share.of(specs, engine.tapped, engine.model.num_layers, self._groups)
        except UsageError as e:
            raise RemoteProtocolError(explain("capture of a request", got=str(e), expected="one that fits")) from e


def _part_of(finished: Finished) -> RequestRows:
    """Return a request that a frame ends as a part of it without rows."""
    return RequestRows(finished.id, finished.prompt_length, 0, (), capture=finished.capture)


def _first(header: FrameHeader, part: RequestRows) -> list[tuple[tuple[Site, ...], int]]:
    """Return at which sites a frame has rows of a request, and the first position of each."""
    return [
        (block.sites, min(starts))
        for block in header.blocks
        if (starts := [span.start for span in block.spans if header.requests[span.request] is part])
    ]


def _note_more(before: dict[int, Before], header: FrameHeader, part: RequestRows) -> None:
    """Note at which sites another frame of a request's first step has rows of it."""
    step, first = before[header.rank.pp]
    if step != header.step:
        return
    if part.start:
        first += _first(header, part)
    else:  # it began with this step
        del before[header.rank.pp]


def _count_earlier(request: Request, stage: int, missing: int) -> None:
    """Note that rows are missing that an earlier hub had: everything before those that came, if the number says so."""
    _, before = request.before.get(stage, (0, ()))
    if sum(len(sites) * start for sites, start in before) != missing:
        request.lost.count("earlier_hub", missing)
        return
    for sites, start in before:
        if start:
            request.lost.add("earlier_hub", sites, 0, start)
