"""The messages of the nats consumer: their subjects, bodies and ids.

| subject | body | one for each |
|---|---|---|
| `PREFIX.rows.ENGINE.BOOT.RANK` | JSON: rows, their scores and their place | frame, or part of a large one |
| `PREFIX.vectors.ENGINE.BOOT.RANK` | rows, little-endian, listed by the header `Capflow-Rows` | same |
| `PREFIX.done.ENGINE.REQUEST` | JSON: the result of the request | request |
| `PREFIX.actions.ENGINE.REQUEST.ID` | JSON: the event | action asked of the hub, and event of a worker |
| `PREFIX.sessions.ENGINE` | JSON: the engine's model | engine that connects, or returns with another model |
| `PREFIX.opened` | JSON: probes and version | start of the consumer |

BOOT is new at every start of the engine. RANK is the worker: pipeline stage, replica and tensor rank, as `0-0-0`.
ENGINE, BOOT, REQUEST and ID are `token`s of the names; the JSON has the names themselves. ENGINE is `-` if the hub does
not know the engine.

Invariant: a frame always becomes the same messages, in the same parts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
import numpy as np
import xxhash

import capflow
from capflow import limits
from capflow.capture.frame import Chunk, FrameHeader, Rank, runs_of
from capflow.capture.model import ModelInfo
from capflow.capture.result import RequestDone
from capflow.steering.action import Answered
from capflow_consumers.dataset.names import slug

PART_BYTES_MAX = 256 * limits.KIB
# Space in a message for its headers, and for one token with its text.
OVERHEAD_BYTES = 256 * limits.KIB
# The largest number of pieces in a message, whose header lists them.
_PIECES_MAX = 256

PLACE_HEADER = "Capflow-Place"
ROWS_HEADER = "Capflow-Rows"
ID_HEADER = "Nats-Msg-Id"

_T = TypeVar("_T")

_encode = msgspec.json.Encoder().encode


class RowsPlace(msgspec.Struct, frozen=True, array_like=True):
    """The place of a message: worker, frame and part of the frame.

    boot, rank: the worker.
    seq: the frame's number.
    part: the part's number, from 0.
    """

    boot: str
    rank: Rank
    seq: int
    part: int

    @classmethod
    def of(cls, header: FrameHeader, part: int) -> Self:
        """Return the place of a part of a frame."""
        return cls(header.boot, header.rank, header.seq, part)

    def is_behind(self, last: RowsPlace | None) -> bool:
        """Return whether the stream has this place, when `last` is the worker's last place in it."""
        return last is not None and (self.seq, self.part) <= (last.seq, last.part)


class Message(NamedTuple):
    """One message. Its id depends on its content, not on when it is sent.

    place: None if it belongs to no frame.
    headers: include the id.
    body: bytes-like.
    """

    subject: str
    place: RowsPlace | None
    headers: dict[str, str]
    body: Any


def token(name: str) -> str:
    """Return a name as one token of a subject; different names have different tokens."""
    return slug(name).replace(".", "%2E")


def message(subject: str, place: RowsPlace | None, body: Any, *, rows: Any = None, identity: Any = None) -> Message:
    """Return a message.

    rows: what the header `Capflow-Rows` says, as JSON; None without that header.
    identity: what the id is made of, with the subject; the place if None.
    """
    source = _encode([subject, place if identity is None else identity])
    headers = {ID_HEADER: xxhash.xxh3_128_hexdigest(source)}
    if place is not None:
        headers[PLACE_HEADER] = _ascii(place)
    if rows is not None:
        headers[ROWS_HEADER] = _ascii(rows)
    return Message(subject, place, headers, body)


def place_of(headers: dict[str, str]) -> RowsPlace | None:
    """Return the place of a stored message by its headers; None if they have none."""
    try:
        return msgspec.json.decode(headers.get(PLACE_HEADER, ""), type=RowsPlace)
    except msgspec.MsgspecError:
        return None


def opened_message(prefix: str, probes: list[str], identity: str, *, vectors: bool) -> Message:
    """Return the message of the consumer's start.

    probes: names of the probes.
    identity: unique for this start.
    vectors: whether the rows themselves are sent.
    """
    body = _encode({"capflow": capflow.__version__, "probes": probes, "vectors": vectors})
    return message(f"{prefix}.opened", None, body, identity=identity)


def session_message(prefix: str, engine: str, model: ModelInfo, identity: str) -> Message:
    """Return the message of an engine's session.

    identity: unique for this session; the same when the message is sent again.
    """
    about = {name: getattr(model, name) for name in ("num_layers", "hidden_size", "dtype", "stages")}
    if model.own_shapes:
        about["shapes"] = {str(site): shape for site, shape in model.own_shapes.items()}
    for name, groups in (("attention", model.attention), ("router", model.router)):
        if groups is not msgspec.UNSET:
            about[name] = msgspec.to_builtins({str(layer): form for form, layers in groups for layer in layers})
    body = _encode({"engine": engine, "model": model.name, **about, "sites": [str(site) for site in model.sites]})
    return message(f"{prefix}.sessions.{token(engine)}", None, body, identity=identity)


def action_message(prefix: str, answered: Answered) -> Message:
    """Return the message of an answered action. Its subject is unique."""
    about = {name: getattr(answered, name) for name in ("id", "engine", "request", "kind", "asked_by", "time_ns")}
    about["sites"] = [str(site) for site in answered.sites]
    about["outcome"] = answered.outcome
    about |= {"step": answered.step, "reason": answered.reason or None}
    about |= {name: getattr(answered, name) for name in ("position", "score", "threshold", "scale")}
    about |= {name: getattr(answered, name) or None for name in ("label", "incarnation", "target")}
    engine = token(answered.engine) if answered.engine else "-"
    subject = f"{prefix}.actions.{engine}.{token(answered.request)}.{token(answered.id)}"
    return message(subject, None, _encode(about), identity=answered.id)


def done_message(prefix: str, done: RequestDone, result: dict[str, Any], place: RowsPlace | None, root: str) -> Message:
    """Return the message of a finished request.

    result: `rows`, `capture_status` and `error`.
    place: the place of its last frame; None without rows.
    root: the path with which `capflow.open` finds the rows; empty if there is none.
    """
    about = {name: getattr(done, name) for name in ("engine", "request", "status", "prompt_length", "computed_length")}
    optional = {"root": root, "tag": done.tag, "adapter": done.adapter, "weights": done.weights}
    extra = {name: value for name, value in optional.items() if value}
    body = _encode({**about, **result, "dropped": done.dropped, **extra})
    subject = f"{prefix}.done.{token(done.engine)}.{token(done.request)}"
    # Without rows there is no place to make the id of.
    identity = None if place else [subject, done.status, done.computed_length]
    return message(subject, place, body, identity=identity)


Scores = Callable[[Chunk], dict[str, list[float]]]
"""The scores of a chunk's tokens, by probe."""


def subject_of(prefix: str, kind: str, header: FrameHeader) -> str:
    """Return the subject of a worker's messages.

    kind: `rows` or `vectors`.
    """
    rank = "-".join(map(str, header.rank))
    return f"{prefix}.{kind}.{token(header.engine)}.{token(header.boot)}.{rank}"


def rows_messages(prefix: str, header: FrameHeader, chunks: list[Chunk], scores: Scores, root: str) -> list[Message]:
    """Return the JSON messages of a frame's chunks."""
    subject = subject_of(prefix, "rows", header)
    about: dict[str, Any] = {
        name: getattr(header, name) for name in ("engine", "boot", "rank", "seq", "step", "time_ns")
    }
    if root:
        about["root"] = root
    if header.weights is not None:
        about["weights"] = header.weights
    pieces = ((msgspec.Raw(piece), len(piece)) for chunk in chunks for piece in _pieces(chunk, scores))
    return [
        message(subject, RowsPlace.of(header, number), _encode({**about, "chunks": part}))
        for number, part in enumerate(_packed(pieces))
    ]


def vector_messages(prefix: str, header: FrameHeader, chunks: list[Chunk]) -> list[Message]:
    """Return the messages with the rows of a frame's chunks, little-endian."""
    subject = subject_of(prefix, "vectors", header)
    split = (part for chunk in chunks for part in _split_rows(chunk))
    pieces = ((chunk, chunk.rows.nbytes + len(_ascii(_description(chunk)))) for chunk in split)
    return [
        message(
            subject,
            RowsPlace.of(header, number),
            b"".join(_bytes_of(chunk.rows) for chunk in part),
            rows={"dtype": header.dtype, "chunks": [_description(chunk) for chunk in part]},
        )
        for number, part in enumerate(_packed(pieces))
    ]


def _packed(pieces: Iterable[tuple[_T, int]]) -> list[list[_T]]:
    """Group pieces into parts of at most `PART_BYTES_MAX` and `_PIECES_MAX`.

    pieces: each with its size in bytes.
    """
    parts: list[list[_T]] = []
    size = 0
    for piece, nbytes in pieces:
        if not parts or size + nbytes > PART_BYTES_MAX or len(parts[-1]) == _PIECES_MAX:
            parts.append([])
            size = 0
        parts[-1].append(piece)
        size += nbytes
    return parts


def _pieces(chunk: Chunk, scores: Scores) -> Iterator[bytes]:
    """Yield a chunk as JSON, split by tokens into pieces of at most `PART_BYTES_MAX` or one token."""
    fields: dict[str, Any] = {
        "request": chunk.request.id,
        "prompt_length": chunk.request.prompt_length,
        "sites": [str(site) for site in chunk.sites],
        "start": chunk.start,
        "token_ids": chunk.token_ids,
    }
    if chunk.texts:
        fields["texts"] = chunk.texts
    if chunk.request.adapter:
        fields["adapter"] = chunk.request.adapter
    if (steered := chunk.steered) is not None:
        fields["steered"] = runs_of(steered, chunk.start)
    fields["scores"] = scores(chunk)
    piece = _encode(fields)
    if len(piece) <= PART_BYTES_MAX or chunk.rows.shape[1] == 1:
        yield piece
    else:
        for half in _halves(chunk, axis=1):
            yield from _pieces(half, scores)


def _split_rows(chunk: Chunk) -> Iterator[Chunk]:
    """Yield a chunk in parts whose rows have at most `PART_BYTES_MAX`: split by tokens first, then by sites."""
    sites, tokens, _ = chunk.rows.shape
    if chunk.rows.nbytes <= PART_BYTES_MAX or (sites, tokens) == (1, 1):
        yield chunk
    else:
        for half in _halves(chunk, axis=1 if tokens > 1 else 0):
            yield from _split_rows(half)


def _halves(chunk: Chunk, axis: int) -> tuple[Chunk, Chunk]:
    middle = chunk.rows.shape[axis] // 2
    if axis == 1:
        second = chunk._replace(start=chunk.start + middle, rows=chunk.rows[:, middle:])
        return chunk._replace(rows=chunk.rows[:, :middle]), second
    second = chunk._replace(sites=chunk.sites[middle:], rows=chunk.rows[middle:])
    return chunk._replace(sites=chunk.sites[:middle], rows=chunk.rows[:middle]), second


def _description(chunk: Chunk) -> dict[str, Any]:
    return {
        "request": chunk.request.id,
        "sites": [str(site) for site in chunk.sites],
        "start": chunk.start,
        "shape": chunk.rows.shape,
        **({"row_shape": chunk.shape} if chunk.shape else {}),
    }


def _bytes_of(rows: np.ndarray[Any, Any]) -> bytes:
    """Return rows as bytes, little-endian."""
    whole = np.ascontiguousarray(rows)
    if sys.byteorder == "big":
        whole = whole.byteswap()
    return whole.tobytes()


def _ascii(value: Any) -> str:
    """Return a value as JSON for a header: ASCII, one line."""
    return json.dumps(msgspec.to_builtins(value))
