"""The frame: the rows that one worker captured in one step, or a part of them, with a header that describes them.

On the wire a frame is two ZMQ parts. The first is the header, a msgpack map tagged `{"type": "frame"}` (see
`capflow.protocol.message` for the other types). The second is the payload: only the raw rows, in the byte order of the
machine (little-endian on every platform vLLM runs on). A frame without rows has an empty payload.

A header holds blocks. A block is a set of sites that want exactly the same rows, and the spans of those rows:
`Span(request, start, length, row)` says that positions `start .. start+length` of `header.requests[request]` are rows
`row .. row+length` of the block at each of its sites. Blocks lie in the payload one after another; a block is
`[len(sites), rows, width]` in C order.

All sites of a block have rows of one shape. `header.shapes`, parallel to the blocks, says which: an empty one is that
of the residual stream, `[hidden_size]`. A header without it has no other rows.

Spans tile: each row of a block belongs to at most one span, and each position of a request occurs at most once at a
site. A row without a span belongs to no request: it is a rejected draft token, or a position after the end of its
request.

`xxh3` is the XXH3 64-bit hash (xxHash specification, seed 0) of the payload. `seq` numbers the frames of one boot of
one worker, from 1, without gaps.

Invariant of a `Frame`: its blocks fill the payload exactly; its requests have different ids and at least one span each;
each span lies inside its block and inside the positions of its request; spans tile. `Frame.decode` refuses anything
else, so the bytes of a frame bound what it makes a consumer write.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from capflow import limits
from capflow.capture.dtypes import DTYPES
from capflow.capture.frame_cost import check_cost
from capflow.capture.model import Shape, width_of
from capflow.capture.positions import Positions
from capflow.capture.site import HOOKS, Site
from capflow.capture.spec import Capture, Wanted
from capflow.errors import RemoteProtocolError, explain
from capflow.limits import Count, Name, Nanoseconds, Place, Position, Token
from capflow.text.brief import brief

PROTOCOL_VERSION = 1

Rows = npt.NDArray[Any]
"""Captured rows, `[..., width]`, in the model's dtype: read-only views of a payload. Mostly `width` is hidden_size."""


class Rank(NamedTuple):
    """A worker's place: pipeline stage, data-parallel replica, tensor-parallel rank."""

    pp: Place
    dp: Place
    tp: Place


WorkerBoot = tuple[str, str, Rank]
"""One boot of one worker: engine, boot, rank."""


class Span(NamedTuple):
    """Positions `start .. start+length` of request number `request` are rows `row .. row+length`."""

    request: int
    start: int
    length: int
    row: int


class Block(NamedTuple):
    """Sites with the same `rows` rows, and the spans that assign the rows to requests."""

    sites: Annotated[tuple[Site, ...], msgspec.Meta(max_length=limits.SITES_MAX)]
    rows: int
    spans: tuple[Span, ...]

    def __repr__(self) -> str:
        return brief(self)


Shapes = Annotated[tuple[Shape, ...], msgspec.Meta(max_length=limits.SITES_MAX)]


class Weights(msgspec.Struct, frozen=True, omit_defaults=True):
    """A state of an engine's weights.

    version: how often the weights changed since the engine started; changes between two steps count once.
    label: the name that the last change was given, such as `set_weight_version` of vLLM; empty if it was given none.
    start: at the end of a request: the first captured position that was computed with these weights.
    """

    version: Count
    label: Name = ""
    start: Position = 0


# As `FrameHeader`, the collector of reference cycles leaves these out.
class RequestRows(msgspec.Struct, frozen=True, gc=False):
    """One request's part of a step.

    start: its first captured position in this step.
    token_ids: the tokens at positions `start, start+1, …`, as many as the step captured.
    texts: the texts of these tokens; empty if the engine has no tokenizer.
    capture: the capture that the request itself asked for, if any.
    incarnation: differs between requests that use the same id one after another.
    steered: the steered positions among these, as runs: `first, end, first, end, …`, in ascending order. A position is
        steered if an operation acted there in this forward pass, at any site of the model. None in frames of earlier
        versions, which do not say it.
    adapter: the name of the LoRA adapter that the request runs with; empty for none.
    """

    id: Name
    prompt_length: Position
    start: Position
    token_ids: tuple[Token, ...]
    texts: tuple[str, ...] = ()
    capture: Capture | None = None
    incarnation: Name = ""
    steered: tuple[Position, ...] | None = None
    adapter: Name = ""

    __repr__ = brief


_SiteName = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(HOOKS)}):[0-9]{{1,4}}$")]


class Gap(msgspec.Struct, frozen=True):
    """Positions `start .. stop` whose rows are missing at each of these sites, given as `HOOK:LAYER`."""

    sites: Annotated[tuple[_SiteName, ...], msgspec.Meta(max_length=limits.SITES_MAX)]
    start: Position
    stop: Position

    __repr__ = brief


class Dropped(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rows of a request that were captured or promised and did not arrive.

    reason: one of the reasons in `docs/backpressure.md`.
    gaps: their places, as far as they are known; together at most `rows` rows.
    """

    rows: Count
    reason: Name
    gaps: Annotated[tuple[Gap, ...], msgspec.Meta(max_length=limits.GAPS_MAX)] = ()


class Acted(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event of a request's steering inside its worker: a change of its steering, or a gate that opened or closed.

    by: `request` for what the request came with, `controller NAME`, or the owner of an action.
    kind: what happened: one of `EVENT_KINDS`.
    sites: the sites that it concerns.
    step: the step in which it takes effect.
    time_ns: the wall clock of the event.
    position: the first position of the request at which it holds; None in frames of earlier versions.
    score: the score that caused it, if a score did.
    threshold: the threshold that the score was compared with.
    label: the label of the gate or of the action.
    target: the owner whose contribution a gain scales, or the gate that an action sets.
    scale: the factor of a gain or of added vectors and clamps.
    """

    by: Name
    kind: Name
    sites: Annotated[tuple[Site, ...], msgspec.Meta(max_length=limits.SITES_MAX)]
    step: Count
    time_ns: Nanoseconds
    position: Position | None = None
    score: float | None = None
    threshold: float | None = None
    label: Name = ""
    target: Name = ""
    scale: float | None = None


EVENT_KINDS = (
    "steer",
    "unsteer",
    "gain",
    "set_gate",
    "gate",
    "abort",
    "lease_end",
    "freeze",
    "unfreeze",
)
"""The kinds of events. A consumer passes over kinds that it does not know."""


class Finished(msgspec.Struct, frozen=True):
    """A request is over on this worker. This is the last frame that names it.

    status: `stop`, `length`, `abort` or `error`.
    computed_length: the number of its tokens that were computed; position `computed_length - 1` is its last row.
    rows: the number of rows (positions times sites) that this worker sent for it, over all frames.
    dropped: the rows that this worker did not send.
    capture: the capture that the request itself asked for, if any.
    acted: the changes to its steering, in order, as workers of earlier versions send them: with the request's end.
    incarnation: differs between requests that use the same id one after another.
    adapter: the name of the LoRA adapter that the request ran with; empty for none.
    weights: the weights that computed its rows, in order; at most the first and the latest. Empty without rows, and in
        frames of earlier versions.
    """

    id: Name
    status: Name
    prompt_length: Position
    computed_length: Position
    rows: Count
    dropped: Annotated[tuple[Dropped, ...], msgspec.Meta(max_length=limits.DROPPED_REASONS_MAX)] = ()
    capture: Capture | None = None
    acted: Annotated[tuple[Acted, ...], msgspec.Meta(max_length=limits.ACTED_MAX)] = ()
    incarnation: Name = ""
    adapter: Name = ""
    weights: Annotated[tuple[Weights, ...], msgspec.Meta(max_length=limits.WEIGHTS_TOLD_MAX)] = ()

    __repr__ = brief


class ActedOn(msgspec.Struct, frozen=True, omit_defaults=True):
    """The events of a request's steering in one step, whether or not anybody wants its rows.

    acted: the events, in order.
    lost: further events of the step, for which there was no room.
    """

    id: Name
    incarnation: Name
    acted: Annotated[tuple[Acted, ...], msgspec.Meta(max_length=limits.ACTED_MAX)]
    lost: Count = 0


# The collector of reference cycles leaves these out: a hub has thousands of them, and none can be part of a cycle.
class FrameHeader(msgspec.Struct, frozen=True, tag="frame", kw_only=True, gc=False):
    """Everything about a frame except its rows; the module describes the layout.

    seq: the number of the frame, from 1, without gaps within a boot.
    time_ns: the wall clock when the step was planned.
    dtype: the dtype of the rows, by torch's name.
    requests: the requests with rows in the frame.
    blocks: the sites and spans of the rows.
    shapes: the shape of a row of each block, empty for `[hidden_size]`; left out if all are empty.
    finished: the requests that are over.
    acted: the requests with events of their steering in the step.
    step_tokens: the number of tokens that the whole step computed, captured or not.
    step_requests: the number of requests in the step, captured or not.
    weights: the weights that computed the rows; None in a frame without rows, and in frames of earlier versions.
    xxh3: the hash of the payload.
    """

    version: int = PROTOCOL_VERSION
    engine: str
    boot: str
    rank: Rank
    seq: Count
    step: Count
    time_ns: Nanoseconds
    dtype: str
    hidden_size: int
    requests: Annotated[tuple[RequestRows, ...], msgspec.Meta(max_length=limits.REQUESTS_PER_FRAME_MAX)]
    blocks: Annotated[tuple[Block, ...], msgspec.Meta(max_length=limits.SITES_MAX)]
    finished: Annotated[tuple[Finished, ...], msgspec.Meta(max_length=limits.FINISHED_PER_FRAME_MAX)] = ()
    acted: Annotated[tuple[ActedOn, ...], msgspec.Meta(max_length=limits.FINISHED_PER_FRAME_MAX)] = ()
    step_tokens: Count = 0
    step_requests: Count = 0
    weights: Weights | None = None
    payload_bytes: int = 0
    xxh3: int = 0
    shapes: Shapes | msgspec.UnsetType = msgspec.UNSET

    __repr__ = brief

    @property
    def block_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of a row of each block; empty for that of the residual stream."""
        return ((),) * len(self.blocks) if self.shapes is msgspec.UNSET else self.shapes

    @property
    def widths(self) -> tuple[int, ...]:
        """How many numbers a row of each block has."""
        if self.shapes is msgspec.UNSET:
            return (self.hidden_size,) * len(self.blocks)
        return tuple(width_of(shape, self.hidden_size) for shape in self.shapes)

    @property
    def source(self) -> WorkerBoot:
        """The boot of the worker that sent the frame; `seq` numbers the frames of each."""
        return self.engine, self.boot, self.rank


class Chunk(NamedTuple):
    """One request's new rows at some sites.

    sites: the sites, in the order of `rows`.
    start: the position of the first row.
    rows: `[len(sites), length, width]`, positions `start .. start+length`, read-only.
    shape: the shape of a row, such as `(heads, head_dim)`; empty for `[hidden_size]`.
    """

    request: RequestRows
    sites: tuple[Site, ...]
    start: int
    rows: Rows
    shape: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return brief(self)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids of the chunk's positions."""
        first = self.start - self.request.start
        return self.request.token_ids[first : first + self.rows.shape[1]]

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of the chunk's tokens; empty when the engine has no tokenizer."""
        first = self.start - self.request.start
        return self.request.texts[first : first + self.rows.shape[1]]

    @property
    def steered(self) -> npt.NDArray[np.bool_] | None:
        """Whether each position of the chunk was steered, `[length]`; None in frames of earlier versions."""
        if self.request.steered is None:
            return None
        return mask_of(self.request.steered, self.start, self.start + self.rows.shape[1])


def mask_of(runs: Sequence[int], start: int, stop: int) -> npt.NDArray[np.bool_]:
    """Return whether each of the positions `start .. stop` is in runs `first, end, first, end, …`."""
    mask = np.zeros(stop - start, np.bool_)
    for first, end in zip(runs[::2], runs[1::2], strict=True):
        mask[max(first - start, 0) : max(end - start, 0)] = True
    return mask


def runs_of(mask: npt.NDArray[np.bool_], start: int) -> tuple[int, ...]:
    """Return the positions of a mask that begins at position `start`, as runs `first, end, first, end, …`."""
    padded = np.concatenate(([False], mask, [False]))
    return tuple((np.flatnonzero(padded[1:] != padded[:-1]) + start).tolist())


Wants = Callable[[RequestRows], Wanted]
"""Returns the want of a consumer at each site of a request."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FrameHeader)
_id_of = operator.attrgetter("id")
# The first row of a span.
_row_of = operator.itemgetter(3)


class Frame:
    """A header and its payload.

    payload: the rows, an object with the buffer protocol; views of it keep it alive.
    wants: narrows what `chunks` yields; None yields everything.
    """

    __slots__ = ("_counts", "header", "header_bytes", "payload", "wants")

    def __init__(self, header: FrameHeader, payload: Any, wants: Wants | None = None, *, header_bytes: int = 0) -> None:
        self.header = header
        # The encoded size of the header; 0 for a frame that was made in this process, until `measure`.
        self.header_bytes = header_bytes
        self.payload = payload
        self.wants = wants
        # The result of `counts`, set at its first use.
        self._counts: list[int] | None = None

    def __repr__(self) -> str:
        header = self.header
        requests, sites = len(header.requests), len({site for block in header.blocks for site in block.sites})
        rows = f"{requests} requests, {sites} sites, {self.nbytes:,} bytes of {header.dtype}"
        return f"<frame {header.seq} of {header.engine!r}, step {header.step}: {rows}>"

    @property
    def nbytes(self) -> int:
        """The number of bytes of rows in the frame."""
        return self.header.payload_bytes

    def bytes_of(self, rows: int) -> int:
        """Return the number of bytes of so many of its rows; with rows of several shapes, of rows of mean length."""
        if self.header.shapes is msgspec.UNSET:
            return rows * self.header.hidden_size * DTYPES[self.header.dtype].itemsize
        return rows * self.nbytes // max(1, sum(len(block.sites) * block.rows for block in self.header.blocks))

    @property
    def wire_bytes(self) -> int:
        """The size of its parts on the wire; `measure` a frame that was made in this process first."""
        return self.header.payload_bytes + self.header_bytes

    def measure(self) -> None:
        """Set `header_bytes` if it is not known. Raises RemoteProtocolError for a header that no hub takes."""
        if not self.header_bytes:
            self.header_bytes = len(_encoder.encode(self.header))
        if self.header_bytes > limits.FRAME_HEADER_BYTES_MAX:
            raise _large(self.header_bytes)

    @property
    def memory_bytes(self) -> int:
        """The largest amount of memory that the frame takes: its rows, and the objects of a header that was read."""
        return self.header.payload_bytes + limits.STATE_PER_BYTE_MAX * self.header_bytes

    @property
    def counts(self) -> Sequence[int]:
        """The number of rows of each request, over all its sites, in the order of the header's requests."""
        if self._counts is None:
            self._counts = [0] * len(self.header.requests)
            for block in self.header.blocks:
                for number, _, length, _ in block.spans:
                    self._counts[number] += len(block.sites) * length
        return self._counts

    def narrowed(self, wants: Wants | None) -> Frame:
        """Return the same frame, with `chunks` limited to what `wants` selects."""
        return Frame(self.header, self.payload, wants, header_bytes=self.header_bytes)

    def chunks(self) -> Iterator[Chunk]:
        """Yield the wanted rows as chunks. The chunks of a request at a site come in the order of their positions."""
        wants, whole = self.wants, self._whole()
        if wants is None:
            return whole
        return itertools.chain.from_iterable(_narrow(chunk, wants(chunk.request)) for chunk in whole)

    def blocks(self) -> Iterator[tuple[Block, Rows]]:
        """Yield every block with its rows `[len(sites), rows, width]`, wanted or not."""
        header = self.header
        if not header.blocks:
            return
        flat = np.frombuffer(self.payload, dtype=DTYPES[header.dtype])
        begin = 0
        for block, width in zip(header.blocks, header.widths, strict=True):
            end = begin + len(block.sites) * block.rows * width
            yield block, flat[begin:end].reshape(len(block.sites), block.rows, width)
            begin = end

    def _whole(self) -> Iterator[Chunk]:
        """Yield every span of every block as a chunk."""
        header = self.header
        blocks = zip(self.blocks(), header.block_shapes, strict=True)
        spans = [(span, block, rows, shape) for (block, rows), shape in blocks for span in block.spans]
        if len(header.blocks) > 1:
            spans.sort(key=lambda entry: entry[0][:2])
        for span, block, rows, shape in spans:
            request = header.requests[span.request]
            yield Chunk(request, block.sites, span.start, rows[:, span.row : span.row + span.length], shape)

    def encode(self) -> list[Any]:
        """Return the frame's parts for the wire, without a copy of the payload."""
        return [_encoder.encode(self.header), self.payload]

    @classmethod
    def seal(cls, header: FrameHeader, payload: Any, *, seq: int | None = None) -> Frame:
        """Return the frame, with the length and the hash of its payload in the header.

        seq: the number of the frame; None for the header's.
        """
        view = memoryview(payload).cast("B")
        digest, number = xxhash.xxh3_64_intdigest(view), header.seq if seq is None else seq
        return cls(msgspec.structs.replace(header, seq=number, payload_bytes=len(view), xxh3=digest), view)

    @classmethod
    def decode(cls, header: bytes | memoryview, payload: Any) -> Frame:
        """Return the frame in two parts, without a copy of the payload.

        Raises RemoteProtocolError for a part that is too large, for a header that is not one, and for a frame that
        breaks the module's invariant or does not match its hash.
        """
        frame = cls.read(header, payload)
        frame.check()
        return frame

    @classmethod
    def read(cls, header: bytes | memoryview, payload: Any) -> Frame:
        """Return the frame in two parts without `check`, the second half of `decode`; raise RemoteProtocolError."""
        if len(header) > limits.FRAME_HEADER_BYTES_MAX:
            raise _large(len(header))
        rows = memoryview(payload).cast("B")
        try:
            check_cost(header, len(rows))
            parsed = _decoder.decode(header)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
            raise RemoteProtocolError(explain("frame header", got=str(e), expected="a header of this version")) from e
        return cls(parsed, rows, header_bytes=len(header))

    def check(self, *, hashed: bool = True) -> None:
        """Raise RemoteProtocolError unless the module's invariant holds.

        hashed: also compare the payload with its hash.
        """
        header = self.header
        counts = [0] * len(header.requests)
        expected_bytes = _checked_numbers(header, counts) * DTYPES[header.dtype].itemsize
        if not len(self.payload) == header.payload_bytes == expected_bytes:
            raise _broken("payload", f"{len(self.payload)} bytes", f"{expected_bytes} as the blocks say")
        digest = xxhash.xxh3_64_intdigest(self.payload) if hashed else header.xxh3
        if digest != header.xxh3:
            raise _broken("payload checksum", f"{digest:#018x}", f"{header.xxh3:#018x}")
        self._counts = counts


def rows_of(header: FrameHeader) -> Counter[str]:
    """Return the number of rows that a frame holds of each request, by id."""
    rows: Counter[str] = Counter()
    for block in header.blocks:
        for request, _, length, _ in block.spans:
            rows[header.requests[request].id] += len(block.sites) * length
    return rows


def _checked_numbers(header: FrameHeader, counts: list[int]) -> int:
    """Return how many numbers the rows have; raise RemoteProtocolError for a header that breaks the invariant.

    counts: the rows of each request are added to these.
    """
    if header.version != PROTOCOL_VERSION:
        raise _broken("version", header.version, str(PROTOCOL_VERSION))
    if header.dtype not in DTYPES:
        raise _broken("dtype", header.dtype, f"one of {', '.join(DTYPES)}")
    if not 0 < header.hidden_size <= limits.HIDDEN_SIZE_MAX:
        raise _broken("hidden_size", header.hidden_size, f"1..{limits.HIDDEN_SIZE_MAX}")
    for request in header.requests:
        if request.texts and len(request.texts) != len(request.token_ids):
            raise _broken("texts", len(request.texts), f"none or {len(request.token_ids)}")
        if request.steered:
            _check_steered(request)
    numbers = total = spans = 0
    for block, width in zip(header.blocks, _checked_widths(header), strict=True):
        rows = len(block.sites) * _checked_block(block, header, counts)
        total += rows
        numbers += rows * width
        spans += len(block.spans)
    if total > limits.ROWS_PER_FRAME_MAX:
        raise _broken("rows", total, f"at most {limits.ROWS_PER_FRAME_MAX} over all sites")
    if len(counts) > 1 and len(set(map(_id_of, header.requests))) != len(counts):
        raise _broken("requests", "an id twice", "each id once")
    if 0 in counts:
        named = len(counts) - counts.count(0)
        raise _broken("requests", f"{len(counts)}, {named} of them with spans", "a span of each request")
    if spans != len(counts):
        _check_positions(header)
    return numbers


def _checked_widths(header: FrameHeader) -> tuple[int, ...]:
    """Return how many numbers a row of each block has; raise RemoteProtocolError for shapes out of bounds."""
    if header.shapes is msgspec.UNSET:
        return (header.hidden_size,) * len(header.blocks)
    if len(header.shapes) != len(header.blocks):
        raise _broken("shapes", len(header.shapes), f"{len(header.blocks)}, one for each block")
    widths = header.widths
    if widths and max(widths) > limits.HIDDEN_SIZE_MAX:
        raise _broken("shape of a row", f"{max(widths)} numbers", f"at most {limits.HIDDEN_SIZE_MAX}")
    return widths


def _check_steered(request: RequestRows) -> None:
    """Raise RemoteProtocolError unless the runs of steered positions rise and lie inside the request's part."""
    runs, reach = request.steered or (), request.start
    for first, end in itertools.zip_longest(runs[::2], runs[1::2], fillvalue=-1):
        if not reach <= first < end <= request.start + len(request.token_ids):
            raise _broken("steered positions", (first, end), f"runs of positions of request {request.id}")
        reach = end


def _checked_block(block: Block, header: FrameHeader, counts: list[int]) -> int:
    """Return the number of rows at each site of a block; raise RemoteProtocolError for a bad site or span."""
    sites = len(block.sites)
    if not sites or len(set(block.sites)) != sites:
        raise _broken("block sites", block.sites, "one or more different sites")
    for site in block.sites:
        if site.hook not in HOOKS or not 0 <= site.layer < limits.LAYERS_MAX:
            raise _broken("site", tuple(site), "a layer and a hook")
    if not 0 <= block.rows <= limits.ROWS_PER_FRAME_MAX:
        raise _broken("block rows", block.rows, f"0..{limits.ROWS_PER_FRAME_MAX}")
    requests, count, rows = header.requests, len(header.requests), block.rows
    end, in_order = 0, True
    for number, start, length, row in block.spans:
        if not 0 <= number < count or length <= 0:
            raise _broken("span", (number, start, length, row), f"a request below {count} and a length above 0")
        request = requests[number]
        first = start - request.start
        if first < 0 or first + length > len(request.token_ids):
            raise _broken("span", (number, start, length, row), f"positions of request {request.id}")
        if row < end:
            in_order = False
        end = row + length
        counts[number] += sites * length
    if not in_order or end > rows:
        _check_order(block)
    return rows


def _check_order(block: Block) -> None:
    """Raise RemoteProtocolError unless each span lies inside the block and no row has two spans."""
    end, before = 0, None
    for span in sorted(block.spans, key=_row_of):
        if span.row < 0 or span.row + span.length > block.rows:
            raise _broken("span", tuple(span), f"rows below {block.rows}")
        if before is not None and span.row < end:
            raise _broken("spans", f"{tuple(before)} and {tuple(span)}", "each row of a block in one span")
        before, end = span, span.row + span.length


def _is_in_order(spans: Sequence[Span], requests: int) -> bool:
    """Return whether the spans of each request come in the order of their positions, without overlap."""
    reach = [0] * requests
    for number, start, length, _ in spans:
        if start < reach[number]:
            return False
        reach[number] = start + length
    return True


def _check_positions(header: FrameHeader) -> None:
    """Raise RemoteProtocolError if a position of a request occurs twice at a site.

    The work is bounded by the number of rows.
    """
    if len(header.blocks) == 1 and _is_in_order(header.blocks[0].spans, len(header.requests)):
        return
    spans = sorted((span[:3], number) for number, block in enumerate(header.blocks) for span in block.spans)
    current, reach = -1, 0
    # The ends of the request's rows at each site, since the last position that no span crosses.
    ends: dict[Site, int] = {}
    # The sites and the end of a span that is not in `ends` yet.
    first: tuple[Sequence[Site], int] | None = None
    for (request, start, length), number in spans:
        sites, stop = header.blocks[number].sites, start + length
        if request != current or start >= reach:
            current, reach, ends, first = request, stop, {}, (sites, stop)
            continue
        if first is not None:
            ends, first = dict.fromkeys(*first), None
        for site in sites:
            if ends.get(site, 0) > start:
                got = f"position {start} of request {header.requests[request].id} at {site} twice"
                raise _broken("spans", got, "each position once at a site")
            ends[site] = stop
        reach = max(reach, stop)


def _narrow(chunk: Chunk, wanted: Wanted) -> Iterator[Chunk]:
    """Yield the wanted parts of a chunk; sites with the same positions stay together."""
    stop = chunk.start + chunk.rows.shape[1]
    by_positions: dict[Positions, list[int]] = {}
    for index, site in enumerate(chunk.sites):
        want = wanted.get(site)
        if want is not None:
            by_positions.setdefault(want.positions, []).append(index)
    for positions, indices in by_positions.items():
        runs = positions.at(chunk.request.prompt_length).runs(chunk.start, stop)
        if not runs:
            continue
        whole = len(indices) == len(chunk.sites)
        rows = chunk.rows if whole else chunk.rows[indices]
        sites = chunk.sites if whole else tuple(chunk.sites[i] for i in indices)
        for first, end in runs:
            yield Chunk(chunk.request, sites, first, rows[:, first - chunk.start : end - chunk.start], chunk.shape)


def _large(nbytes: int) -> RemoteProtocolError:
    return _broken("header", f"{nbytes} bytes", f"at most {limits.FRAME_HEADER_BYTES_MAX}")


def _broken(part: str, got: Any, expected: str) -> RemoteProtocolError:
    return RemoteProtocolError(explain(f"frame {part}", got=got, expected=expected))
