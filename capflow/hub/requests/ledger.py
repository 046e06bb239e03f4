"""The ledger: which requests run, what each consumer wants of them, and what became of them.

It belongs to the hub's thread and does no I/O. A request enters with the first frame that names it and is
over when every pipeline stage of its engine's replica has sent its `Finished`, or the engine is gone.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import xxhash

from capflow import limits
from capflow.buffers.kept import Kept
from capflow.buffers.memo import Memo
from capflow.buffers.newest import keep_newest
from capflow.buffers.shares import Shares
from capflow.capture.frame import Acted, Dropped, Finished, Frame, FrameHeader, Rank, RequestRows, rows_of
from capflow.capture.losses import Losses, described, narrowed, note_frame
from capflow.capture.model import ModelInfo
from capflow.capture.positions import Positions
from capflow.capture.result import CaptureResult, RequestDone
from capflow.capture.site import Site, mask_of
from capflow.capture.spec import Capture, CaptureByConsumer, CaptureSpec, Wanted
from capflow.errors import RemoteProtocolError, UsageError, explain
from capflow.hub.requests.share import Groups, Share
from capflow.protocol.row_format import RowFormat
from capflow.steering.action import Answered
from capflow.text.engine_name import is_of, name_of

_GROUPS_BYTES_MAX = 16 * limits.MIB  # of what blocks of frames hold of what consumers want
_SPECS_BYTES_MAX = 16 * limits.MIB  # of specs that requests brought, for the next request that brings the same
_ENGINE_BYTES, _SITE_BYTES = 2048, 144  # of memory
_REQUEST_BYTES, _TALLY_BYTES, _NAME_BYTES = (
    1024,
    256,
    96,
)  # of memory, of a request, each consumer's part in it, and a name
_DROPPED_BYTES, _GAP_BYTES, _GAP_SITE_BYTES = 320, 480, 96  # of memory, with their part in results
_SPEC_BYTES = 512  # of memory, of a spec with its key, besides its shares
_NOTHING: dict[int, Any] = {}  # of a request that is over and done with; never written to
_NO_LOSSES = Losses()  # likewise


NOT_ENDED = "the request did not end: its engine is gone or the hub stopped"


class Wish(NamedTuple):
    """What one consumer wants: of every request, and whether also what requests ask for themselves.

    keeps: its lane has a ledger of its own, so that it is not given frames from here, but named by `keepers`.
    """

    consumer: str
    spec: CaptureSpec | None
    reads_requests: bool
    keeps: bool = False


class Tally:
    """What one consumer has had of one request."""

    __slots__ = ("error", "lost", "opening", "request", "rows", "rows_failed")

    def __init__(self, request: str) -> None:
        self.request = request
        self.rows = 0  # given to its queue; written by the hub's thread
        self.lost = Losses()  # by the hub's thread, and at shutdown by the consumer's
        self.rows_failed = 0  # in frames that the consumer raised on; written by its thread
        self.error: str | None = None  # the first such error; written by its thread
        self.opening: int | None = None  # which opening of the consumer got its first rows; written by its thread


class KnownEngine:
    """An engine that is known: its model, its open requests by id, and the public key of its workers ("" where there are none)."""

    def __init__(self, name: str, model: ModelInfo, user: str = "") -> None:
        self.name = name
        self.model = model
        self.user = user
        self.stages_left: set[int] = set()  # pipeline stages that said Bye and did not come back
        self.missed_since: float | None = None  # when nobody of it was connected or expected any more
        # By data-parallel replica, since when no worker of it is connected; None while one is.
        self.replicas: dict[int, float | None] = {}
        self.open: dict[str, Request] = {}  # until they are over
        self.format = RowFormat(model)
        self.tapped = mask_of(model.sites)
        self.step_last: dict[int, int] = {}  # the last step counted, by data-parallel replica
        self.full = False  # whether requests of it had no room here, and were not opened

    @property
    def owner(self) -> str:
        """Who has what it takes, as of `capflow.buffers.shares`."""
        return self.user or f"engine {self.name}"

    @property
    def nbytes(self) -> int:
        """About how many bytes of memory it takes, besides its requests."""
        return _ENGINE_BYTES + _SITE_BYTES * (len(self.model.sites) + len(self.model.fixed)) + 4 * len(self.model.name)


class Request:
    """A request and, per consumer (None where it wants nothing of it): its share, tally and result.

    When it is over and has every result, all else of it is let go of: thousands are kept so.
    """

    __slots__ = (
        "before",
        "engine",
        "finished",
        "first_stage",
        "id",
        "lost",
        "nbytes",
        "prompt_length",
        "received",
        "replica",
        "results",
        "shares",
        "status",
        "strangers",
        "tags",
        "tallies",
    )

    def __init__(
        self,
        engine: str,
        request: str,
        replica: int,
        shares: tuple[Share | None, ...],
        tags: tuple[str, ...],
        strangers: tuple[str, ...] = (),
        first_stage: int = 0,
    ) -> None:
        self.engine = engine
        self.id = request
        self.replica = replica
        self.first_stage = first_stage  # the pipeline stage that named it first
        self.shares = shares
        self.tallies: tuple[Tally | None, ...] = tuple(None if share is None else Tally(request) for share in shares)
        self.results: list[CaptureResult | None] = [
            CaptureResult("not_requested") if share is None else None for share in shares
        ]
        self.tags = tags  # of its spec for each consumer
        self.strangers = strangers  # names in its capture that no consumer here has
        self.prompt_length = 0
        self.received: dict[int, int] = {}  # rows by pipeline stage
        self.before: dict[
            int, list[tuple[tuple[Site, ...], int]]
        ] = {}  # by pipeline stage: sites, and the first position that came
        self.finished: dict[int, Finished] = {}  # by pipeline stage
        self.lost = Losses()  # rows that did not reach this hub
        self.status: str | None = None  # set when it is over
        self.nbytes = 0  # of memory that its engine's owner has for it, while it is open

    @property
    def key(self) -> tuple[str, str]:
        """The name of its engine, and its id."""
        return name_of(self.engine), self.id

    def settle(self, consumer: int, result: CaptureResult) -> None:
        """Note what a consumer made of it."""
        self.results[consumer] = result
        self.let_go()

    def let_go(self) -> None:
        """Keep nothing but the results, if they are all there; to be called when every consumer was told that it is over."""
        if self.status is not None and None not in self.results:
            self.tallies = ()
            self.received, self.before, self.finished, self.lost = _NOTHING, _NOTHING, _NOTHING, _NO_LOSSES

    def done_for(self, consumer: int) -> RequestDone:
        """Return what a consumer is told at the end, with its own counts."""
        tally = self.tallies[consumer]
        assert tally is not None
        finished = tuple(self.finished[stage] for stage in sorted(self.finished))
        return RequestDone(
            engine=self.engine,
            request=self.id,
            status=self.status or "error",
            prompt_length=self.prompt_length,
            computed_length=self.computed_length,
            rows_promised=sum(max(f.rows, self.received.get(stage, 0)) for stage, f in self.finished.items())
            + sum(rows for stage, rows in self.received.items() if stage not in self.finished),
            rows=tally.rows,
            dropped=self._lost_to(consumer, tally),
            finished=finished,
            budget_reached=self._budget_reached(consumer),
            tag=self.tags[consumer],
        )

    def acted(self) -> list[Answered]:
        """Return what changed the steering of it inside its workers, oldest first; told again, each has the same id."""
        told = [
            answered
            for stage, finished in self.finished.items()
            for answered in answered_by(self.engine, self.id, stage, finished.acted)
        ]
        return sorted(told, key=lambda answered: answered.time_ns)

    def ends_with(self, stage: int, *, anew: bool) -> bool:
        """Return whether the request cannot end any more, because a pipeline stage is gone, or is here anew."""
        if anew:
            return stage == self.first_stage or (stage in self.received and stage not in self.finished)
        return stage not in self.finished

    @property
    def computed_length(self) -> int:
        """How many tokens were computed, as far as the stages that ended it have said."""
        return max((finished.computed_length for finished in self.finished.values()), default=0)

    def _budget_reached(self, consumer: int) -> bool:
        share = self.shares[consumer]
        return share is not None and share.cut(self.prompt_length, self.computed_length)

    def _lost_to(self, consumer: int, tally: Tally) -> tuple[Dropped, ...]:
        """Return what a consumer did not get of what it wants, by reason."""
        share, mine = self.shares[consumer], self.lost.dropped
        if share is not None and mine:
            mine = narrowed(mine, functools.partial(share.places, self.prompt_length))
        if not tally.lost:
            return mine
        lost = Losses()
        lost.update((*mine, *tally.lost.dropped))
        return lost.dropped

    def judge(self, consumer: int, said: CaptureResult | None) -> CaptureResult:
        """Return a consumer's own result, worsened by what it did not get and what it failed on."""
        tally = self.tallies[consumer]
        assert tally is not None
        result = said or CaptureResult("ok")
        if tag := self.tags[consumer]:
            result = msgspec.structs.replace(result, tag=tag)
        if self._budget_reached(consumer):
            result = msgspec.structs.replace(result, budget_reached=True)
        if dropped := self._lost_to(consumer, tally):
            result = msgspec.structs.replace(result, dropped=dropped)
        troubles = [tally.error] if tally.error else []
        troubles += map(described, dropped)
        if self.status == "error":
            troubles.append(NOT_ENDED)
        if not troubles or result.status in ("error", "not_requested"):
            return result
        status = "partial_error" if tally.rows > tally.rows_failed else "error"
        return msgspec.structs.replace(result, status=status, error="; ".join(filter(None, [result.error, *troubles])))


class Delivery(NamedTuple):
    """A frame as one consumer gets it. parts: whose rows these are and how many."""

    consumer: int
    frame: Frame
    rows: int
    parts: Sequence[tuple[Tally, int]]


@dataclass
class _Lost:
    """What is known of a request that `Ledger.lose` ended.

    received: the rows that had come, by pipeline stage. ended: the stages that ended it, before or since. rows: those that were lost, by reason.
    told: those of them that were said. given: whether a consumer whose lane does not keep wanted something of it.
    """

    received: dict[int, int]
    ended: set[int]
    rows: Counter[str]
    told: Counter[str]
    given: bool


class Late(NamedTuple):
    """What the ends of a request say that come after it was ended, its engine being gone.

    dropped: what was lost of it. untold: what no result of it could say. given: whether a consumer whose lane does not keep wanted something of it.
    """

    dropped: tuple[Dropped, ...]
    untold: tuple[Dropped, ...]
    given: bool


class Ledger:
    """All requests of a hub, open ones and the latest `results_kept_max` that are over (None: `limits.RESULTS_KEPT_MAX`).

    state: the memory that open requests share. results_bytes_max: of those that are over.
    """

    def __init__(
        self,
        wishes: Sequence[Wish],
        state: Shares,
        results_kept_max: int | None = None,
        results_bytes_max: int = limits.MIB,
    ) -> None:
        self.state = state
        self.wishes = tuple(wishes)
        self._groups: Memo[tuple[Share, tuple[Site, ...]], Groups] = Memo(_GROUPS_BYTES_MAX)
        self._specs: Memo[tuple[int, int, bytes], tuple[Share | None, ...]] = Memo(
            _SPECS_BYTES_MAX
        )  # by model and spec
        self._no_tags = ("",) * len(self.wishes)
        kept_max = limits.RESULTS_KEPT_MAX if results_kept_max is None else results_kept_max
        self.kept = Kept(kept_max, results_bytes_max)  # of `_requests`, those that are over
        self._given = tuple(index for index, wish in enumerate(self.wishes) if not wish.keeps)
        self._keeping = tuple(index for index, wish in enumerate(self.wishes) if wish.keeps)
        self.requests_done = 0
        self.requests_failed = 0  # of these, those whose engine went away
        self.requests_open = 0
        self.requests_gapped = 0  # that are over, and of which rows did not reach this hub
        self.dropped: Counter[str] = Counter()  # rows that did not reach this hub, by reason
        # The newest request of each engine's name and id, open or over.
        self._requests: dict[tuple[str, str], Request] = {}
        # The names of the engines that have a request in `_requests`, by id.
        self._engines_of: dict[str, tuple[str, ...]] = {}
        # The requests that `lose` ended, by engine and id, oldest first, at most `limits.RESULTS_KEPT_MAX`.
        self._lost: dict[tuple[str, str], _Lost] = {}
        # The ends, by stage, of requests that had no room and that other stages have not ended, oldest first; bounded so too.
        self._unopened: dict[tuple[str, str], dict[int, Finished]] = {}

    def check(self, model: ModelInfo) -> None:
        """Raise UsageError when a consumer's own spec names a site that the model does not have or tap."""
        for wish in self.wishes:
            if wish.spec is not None:
                where = f"consumers.{wish.consumer}.capture"
                wish.spec.resolve(model.sites, num_layers=model.num_layers, where=where)

    def admit(self, header: FrameHeader, engine: KnownEngine) -> None:
        """Check that what the requests of a frame want fits the engine's model, before anything of the frame is taken.

        `take`, `miss`, `keepers` and `finish` of an admitted frame raise nothing. Raises RemoteProtocolError.
        """
        known = engine.open
        parts: list[RequestRows | Finished] = [part for part in header.requests if part.id not in known]
        for part in (*parts, *header.finished):
            if part.id not in known:
                self._shares(engine, None if part.capture is None else part.capture.untagged())

    def take(self, frame: Frame, engine: KnownEngine) -> list[Delivery]:
        """Note a frame's rows; return it for each consumer that wants some of them."""
        header = frame.header
        rank, stage = header.rank, header.rank.pp
        known = engine.open.get
        requests = [known(part.id) or self._request(engine, part, rank) for part in header.requests]
        sent = frame.counts
        for request, part, rows in zip(requests, header.requests, sent, strict=True):
            request.prompt_length = part.prompt_length
            received = request.received
            if stage in received:
                received[stage] += rows
            else:
                if part.start:
                    request.before[stage] = _first(header, part)
                received[stage] = rows
        if not any(sent):
            return []
        shares = [request.shares for request in requests]
        first = shares[0]
        alike = shares.count(first) == len(shares)  # the usual case: they want the same
        deliveries = []
        for consumer in self._given:
            share = first[consumer]
            whole = alike and share is not None and all(share.wants_all(block.sites) for block in header.blocks)
            if alike and not whole and (share is None or not any(share.groups(block.sites) for block in header.blocks)):
                continue
            counts = sent if whole else _count(header, requests, consumer)
            rows = sum(counts)
            if rows:
                mine = frame if counts == sent else frame.narrowed(_Wants(requests, consumer))
                tallies = [request.tallies[consumer] for request in requests]
                parts = [(tally, n) for tally, n in zip(tallies, counts, strict=True) if n and tally is not None]
                deliveries.append(Delivery(consumer, mine, rows, parts))
        return deliveries

    def miss(self, header: FrameHeader, engine: KnownEngine, reason: str, *, placed: bool = True) -> int:
        """Note that the rows of a frame are lost; return how many of them are of requests that somebody wants something of.

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
            if part.id in losses and any(tally is not None for tally in request.tallies):
                request.lost.update(losses[part.id].dropped)
                missed += rows[part.id]
        return missed

    def keepers(self, header: FrameHeader, engine: KnownEngine) -> Sequence[int]:
        """Return the consumers with lanes that keep that want something of the requests that a frame names; before `finish`."""
        if not self._keeping:
            return ()
        wanted = [self._request(engine, part, header.rank).shares for part in header.requests]
        for f in header.finished:
            part = RequestRows(f.id, f.prompt_length, 0, (), capture=f.capture)
            if not self.was_lost(f, engine):
                self._request(engine, part, header.rank, ends=True)
            if (request := engine.open.get(f.id)) is not None:
                wanted.append(request.shares)
            else:  # it had no room here, or was ended before; its end is told all the same
                wanted.append(self._shares(engine, None if part.capture is None else part.capture.untagged()))
        return [index for index in self._keeping if any(shares[index] is not None for shares in wanted)]

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
        """Note the ends that a frame tells of; return the requests that are over now."""
        over = []
        for finished in header.finished:
            if self.was_lost(finished, engine):
                continue
            part = RequestRows(finished.id, finished.prompt_length, 0, (), capture=finished.capture)
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
        if missing > 0 and any(request.tallies[index] is not None for index in self._given):
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
        self, engine: KnownEngine, replica: int | None = None, stage: int | None = None, *, anew: bool = False
    ) -> list[Request]:
        """As `losing`, all at once; return the requests."""
        return list(itertools.chain.from_iterable(self.losing(engine, replica, stage, anew=anew)))

    def losing(
        self, engine: KnownEngine, replica: int | None = None, stage: int | None = None, *, anew: bool = False
    ) -> Iterator[list[Request]]:
        """End open requests of an engine with status `error`; yield them in slices. Meanwhile it is to open none.

        replica: only those of one replica.
        stage: only those that this pipeline stage has not ended. The other stages may still send what they have of the others.
        anew: the stage started again. Requests that another stage named first are of the new start, until this stage has sent rows of them.
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
                and (stage is None or request.ends_with(stage, anew=anew))
            ]
            for request in lost:
                self._end(engine, request, "error")
                given = any(request.tallies[index] is not None for index in self._given)
                rows = request.lost.rows
                self._lost[engine.name, request.id] = _Lost(
                    dict(request.received), set(request.finished), rows, rows, given
                )
            keep_newest(self._lost, limits.RESULTS_KEPT_MAX)
            self.requests_failed += len(lost)
            yield lost

    def was_lost(self, finished: Finished, engine: KnownEngine) -> bool:
        """Return whether an end is of a request that `lose` ended, of which nothing came since: consumers know that it did not end."""
        lost = finished.status == "error" and finished.id not in engine.open
        return lost and (engine.name, finished.id) in self._lost

    def late(self, finished: Finished, engine: KnownEngine, stage: int) -> Late | None:
        """Note an end of a pipeline stage of a request that `was_lost`; return what all of them say when each stage has ended it."""
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
        untold, lost.told = lost.rows - lost.told, lost.rows
        return Late(losses.dropped, tuple(Dropped(rows, reason) for reason, rows in untold.items()), lost.given)

    def settle(self, over: Request, consumer: int, result: CaptureResult) -> Request | None:
        """Note the result of a lane that keeps, told by its own ledger; return the request here, None when it is not known or not over."""
        request = self._over(over)
        if request is None or request.results[consumer]:
            return None
        request.settle(consumer, result)
        return request

    def told(self, over: Request, consumer: int) -> CaptureResult | None:
        """Return the result of a request that a lane that keeps told before; None when it told none."""
        request = self._over(over)
        return None if request is None else request.results[consumer]

    def _over(self, over: Request) -> Request | None:
        """Return the request here that a lane's own ledger says is over, None when it is not known or not over."""
        request = self._requests.get(over.key)
        return request if request is not None and request.engine == over.engine and request.status is not None else None

    def named(self, request: str, engine: str = "") -> list[Request]:
        """Return the newest request of an id of each engine that has one, or of one engine, which is given by its name or id."""
        if not engine:
            return [self._requests[name, request] for name in self._engines_of.get(request, ())]
        found = self._requests.get((name_of(engine), request))
        return [found] if found is not None and is_of(found.engine, engine) else []

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

    def _end(self, engine: KnownEngine, request: Request, status: str) -> None:
        request.status = status
        del engine.open[request.id]
        self.requests_open -= 1
        self.requests_done += 1
        self.dropped.update(request.lost.rows)
        self.requests_gapped += bool(request.lost)
        self.state.give(engine.owner, request.nbytes)
        if self._requests.get(request.key) is request:
            self.kept.add(engine.owner, request.key, max(request.nbytes, _REQUEST_BYTES))
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
        nbytes = _REQUEST_BYTES + 2 * len(part.id) + _NAME_BYTES * len(self._strangers(capture))
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
        """Return the end of a request without the places of lost rows, if these have no room."""
        sites = sum(len(gap.sites) for dropped in finished.dropped for gap in dropped.gaps)
        gaps = sum(len(dropped.gaps) for dropped in finished.dropped)
        if not gaps:
            return finished
        nbytes = _DROPPED_BYTES * len(finished.dropped) + _GAP_BYTES * gaps + _GAP_SITE_BYTES * sites
        if self.state.offer(engine.owner, nbytes):
            request.nbytes += nbytes
            return finished
        dropped = tuple(Dropped(each.rows, each.reason) for each in finished.dropped)
        return msgspec.structs.replace(finished, dropped=dropped)

    def _add(self, request: Request, engine: KnownEngine) -> None:
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


def answered_by(engine: str, request: str, stage: int, acts: Sequence[Acted]) -> list[Answered]:
    """Return what changed the steering of a request inside the worker of a stage; told again, each has the same id."""
    return [
        Answered(
            xxhash.xxh3_128_hexdigest(repr((engine, request, stage, number, acted.time_ns)).encode()),
            engine,
            request,
            acted.kind,
            acted.sites,
            acted.by,
            acted.time_ns,
            acted.step,
            "",
        )
        for number, acted in enumerate(acts)
    ]


class _Wants:
    """What a consumer wants of the requests in one frame; called on the consumer's thread."""

    def __init__(self, requests: Sequence[Request], consumer: int) -> None:
        self._wanted = {r.id: share.wanted for r in requests if (share := r.shares[consumer]) is not None}

    def __call__(self, part: RequestRows) -> Wanted:
        return self._wanted.get(part.id, {})


def _first(header: FrameHeader, part: RequestRows) -> list[tuple[tuple[Site, ...], int]]:
    """Return at which sites a frame has rows of a request, and the first position of each."""
    return [
        (block.sites, min(starts))
        for block in header.blocks
        if (starts := [span.start for span in block.spans if header.requests[span.request] is part])
    ]


def _count_earlier(request: Request, stage: int, missing: int) -> None:
    """Note that rows are missing that an earlier hub had: everything before those that came, if the number says so."""
    before = request.before.get(stage, ())
    if sum(len(sites) * start for sites, start in before) != missing:
        request.lost.count("earlier_hub", missing)
        return
    for sites, start in before:
        if start:
            request.lost.add("earlier_hub", sites, 0, start)


def _count(header: FrameHeader, requests: Sequence[Request], consumer: int) -> list[int]:
    """Return how many rows of each request a consumer wants of a frame."""
    counts = [0] * len(requests)
    for block in header.blocks:
        share: Share | None = None
        groups: tuple[tuple[Positions, int], ...] = ()
        for index, start, length, _ in block.spans:
            mine = requests[index].shares[consumer]
            if mine is None:
                continue
            if mine is not share:
                share, groups = mine, mine.groups(block.sites)
            for positions, sites in groups:
                if positions == Positions.ALL:
                    counts[index] += sites * length
                else:
                    places = positions.at(header.requests[index].prompt_length)
                    counts[index] += sites * places.count(start, start + length)
    return counts
