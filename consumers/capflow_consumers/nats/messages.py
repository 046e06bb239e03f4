"""What the nats consumer publishes: which messages frames and events become, on which subjects.

| subject | body | one for each |
|---|---|---|
| `PREFIX.rows.ENGINE.BOOT.RANK` | JSON: which rows came, what they score, where they lie | frame, or part of a large one |
| `PREFIX.vectors.ENGINE.BOOT.RANK` | the rows, little-endian, as the header `Capflow-Rows` lists them | frame, or part of a large one |
| `PREFIX.done.ENGINE.REQUEST` | JSON: what became of the request | request |
| `PREFIX.actions.ENGINE.REQUEST.ID` | JSON: what was asked for, and what came of it | action, asked for through the hub or done inside a worker |
| `PREFIX.sessions.ENGINE` | JSON: the model that it runs | engine that the consumer meets, or that comes back with another model |
| `PREFIX.opened` | JSON: probes and version | start of the consumer |

BOOT is new at every start of the engine, RANK its worker: pipeline stage, replica and tensor rank, as `0-0-0`. ENGINE, BOOT and REQUEST are
`token`s of the names; the JSON has the names themselves. ENGINE is `-` where the hub does not know which one was meant.

What always holds: a frame becomes the same messages, in the same parts, whenever it is given.
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
from capflow.capture.frame import Chunk, FrameHeader, Rank
from capflow.capture.model import ModelInfo
from capflow.capture.result import RequestDone
from capflow.steering.action import Answered
from capflow_consumers.dataset.names import slug

PART_BYTES_MAX = 256 * limits.KIB
OVERHEAD_BYTES = 256 * limits.KIB  # of headers, and of one token with its text
_PIECES_MAX = 256  # in a message; the header lists them

PLACE_HEADER = "Capflow-Place"
ROWS_HEADER = "Capflow-Rows"
ID_HEADER = "Nats-Msg-Id"

_T = TypeVar("_T")

_encode = msgspec.json.Encoder().encode


class RowsPlace(msgspec.Struct, frozen=True, array_like=True):
    """Which part of which frame of which worker a message is of."""

    boot: str
    rank: Rank
    seq: int
    part: int

    @classmethod
    def of(cls, header: FrameHeader, part: int) -> Self:
        """Return the place of a part of a frame."""
        return cls(header.boot, header.rank, header.seq, part)

    def is_behind(self, last: RowsPlace | None) -> bool:
        """Return whether a message of the same worker at `last` says that this one is there too."""
        return last is not None and (self.seq, self.part) <= (last.seq, last.part)


class Message(NamedTuple):
    """One message; `body` is bytes-like. Its id is made of what it is, not of when it is sent."""

    subject: str
    place: RowsPlace | None
    headers: dict[str, str]
    body: Any


def token(name: str) -> str:
    """Return a name as one token of a subject; different names have different ones."""
    return slug(name).replace(".", "%2E")


def message(subject: str, place: RowsPlace | None, body: Any, *, rows: Any = None, identity: Any = None) -> Message:
    """Return a message whose id is made of its subject and place, or of `identity`."""
    said = _encode([subject, place if identity is None else identity])
    headers = {ID_HEADER: xxhash.xxh3_128_hexdigest(said)}
    if place is not None:
        headers[PLACE_HEADER] = _ascii(place)
    if rows is not None:
        headers[ROWS_HEADER] = _ascii(rows)
    return Message(subject, place, headers, body)


def place_of(headers: dict[str, str]) -> RowsPlace | None:
    """Return the place that a stored message says it is of; None when it says none."""
    try:
        return msgspec.json.decode(headers.get(PLACE_HEADER, ""), type=RowsPlace)
    except msgspec.MsgspecError:
        return None


def opened_message(prefix: str, probes: list[str], identity: str, *, vectors: bool) -> Message:
    """Return the message that the consumer has started, and with what.

    identity: of this start.
    """
    body = _encode({"capflow": capflow.__version__, "probes": probes, "vectors": vectors})
    return message(f"{prefix}.opened", None, body, identity=identity)


def session_message(prefix: str, engine: str, model: ModelInfo, identity: str) -> Message:
    """Return the message that an engine is there.

    identity: of this session; the same when the message is sent again.
    """
    about = {name: getattr(model, name) for name in ("num_layers", "hidden_size", "dtype", "stages")}
    body = _encode({"engine": engine, "model": model.name, **about, "sites": [str(site) for site in model.sites]})
    return message(f"{prefix}.sessions.{token(engine)}", None, body, identity=identity)


def action_message(prefix: str, answered: Answered) -> Message:
    """Return the message of an action that was answered; no other action has its subject."""
    said = {name: getattr(answered, name) for name in ("id", "engine", "request", "kind", "asked_by", "time_ns")}
    said["sites"] = [str(site) for site in answered.sites]
    said["outcome"] = "rejected" if answered.step is None else "applied"
    said |= {"step": answered.step, "reason": answered.reason or None}
    engine = token(answered.engine) if answered.engine else "-"
    subject = f"{prefix}.actions.{engine}.{token(answered.request)}.{token(answered.id)}"
    return message(subject, None, _encode(said), identity=answered.id)


def done_message(prefix: str, done: RequestDone, became: dict[str, Any], place: RowsPlace | None, root: str) -> Message:
    """Return the message that a request is over.

    became: `rows`, `capture_status` and `error`.
    place: its last frame's, None without rows.
    """
    about = {name: getattr(done, name) for name in ("engine", "request", "status", "prompt_length", "computed_length")}
    extra = {name: value for name, value in {"root": root, "tag": done.tag}.items() if value}
    body = _encode({**about, **became, "dropped": done.dropped, **extra})
    subject = f"{prefix}.done.{token(done.engine)}.{token(done.request)}"
    unplaced = [subject, done.status, done.computed_length]  # without rows there is no frame to know it by
    return message(subject, place, body, identity=None if place else unplaced)


Scores = Callable[[Chunk], dict[str, list[float]]]


def subject_of(prefix: str, kind: str, header: FrameHeader) -> str:
    """Return the subject of a worker's messages of a kind."""
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
    pieces = ((msgspec.Raw(piece), len(piece)) for chunk in chunks for piece in _pieces(chunk, scores))
    return [
        message(subject, RowsPlace.of(header, number), _encode({**about, "chunks": part}))
        for number, part in enumerate(_packed(pieces))
    ]


def vector_messages(prefix: str, header: FrameHeader, chunks: list[Chunk]) -> list[Message]:
    """Return the messages with the rows of a frame's chunks."""
    subject = subject_of(prefix, "vectors", header)
    small = (small for chunk in chunks for small in _small(chunk))
    pieces = ((chunk, chunk.rows.nbytes + len(_ascii(_description(chunk)))) for chunk in small)
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
    """Return pieces, given with their bytes, in parts that are small enough."""
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
    """Yield a chunk as JSON, in runs of tokens that are small enough."""
    said: dict[str, Any] = {
        "request": chunk.request.id,
        "prompt_length": chunk.request.prompt_length,
        "sites": [str(site) for site in chunk.sites],
        "start": chunk.start,
        "token_ids": chunk.token_ids,
    }
    if chunk.texts:
        said["texts"] = chunk.texts
    said["scores"] = scores(chunk)
    piece = _encode(said)
    if len(piece) <= PART_BYTES_MAX or chunk.rows.shape[1] == 1:
        yield piece
    else:
        for half in _halves(chunk, axis=1):
            yield from _pieces(half, scores)


def _small(chunk: Chunk) -> Iterator[Chunk]:
    """Yield a chunk in parts whose rows are small enough: fewer tokens first, then fewer sites."""
    sites, tokens, _ = chunk.rows.shape
    if chunk.rows.nbytes <= PART_BYTES_MAX or (sites, tokens) == (1, 1):
        yield chunk
    else:
        for half in _halves(chunk, axis=1 if tokens > 1 else 0):
            yield from _small(half)


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
    }


def _bytes_of(rows: np.ndarray[Any, Any]) -> bytes:
    whole = np.ascontiguousarray(rows)
    if sys.byteorder == "big":
        whole = whole.byteswap()
    return whole.tobytes()


def _ascii(value: Any) -> str:
    """Return a value as JSON of ASCII only, without line ends, as a header holds it."""
    return json.dumps(msgspec.to_builtins(value))
