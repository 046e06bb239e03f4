"""Messages and frames that are nearly right: real ones of every kind, and what a hostile or broken peer makes of them.

Everything is drawn from a seed, so that what failed once fails again.
"""

from __future__ import annotations

import random
import struct

import msgspec
import xxhash

from capflow.capture.frame import Dropped, Rank
from capflow.capture.spec import CaptureSpec
from capflow.protocol import message
from capflow.protocol.message import Ack, Refused, Results, Welcome
from tests.kit.frames import make_finished, make_frame, make_hello
from tests.kit.messages import MESSAGES

_SPECS = {
    "r1": CaptureSpec({"post_block": [0, "1-3"], "mlp_in": "all"}, [1, {"last": 3}, {"generated": [0, None]}], 7),
    "r2": CaptureSpec({"post_attn": "all"}, {"every": 2}, dtype="float32"),
}
_FRAMES = [
    make_frame(),
    make_frame([("r1", 4, 0, 4), ("r2", 3, 2, 5)], [(0, "post_block"), (3, "mlp_out")], texts=True, captures=_SPECS),
    make_frame([], finished=[make_finished(), make_finished("r2", dropped=(Dropped(3, "queue_full"),))]),
    make_frame([("r1", 40, 0, 40)], [(layer, "pre_attn") for layer in range(4)], hidden=16, dtype="bfloat16", seq=2),
    make_frame([("r3", 1, 0, 1)], dtype="float16", rank=Rank(0, 1, 0), finished=[make_finished("r3", 1, 1)]),
]
_MORE = [make_hello(role="scheduler"), Welcome("h", 1_000_000), Ack(0, 4096), Refused("x"), Results("r1", {})]
CORPUS = [
    *([message.encode(sent)] for sent in [*MESSAGES, *_MORE]),
    *([bytes(part) for part in frame.encode()] for frame in _FRAMES),
    [bytes(part) for seq in (1, 2, 3) for part in make_frame([("r1", 12, 4 * seq, 4)], seq=seq).encode()],
]
"""The parts of one message of each kind, of frames of several shapes, and of several frames in one message."""

# By the first byte of a msgpack type: the format of the length after it.
_LENGTHS = {
    0xC4: "B", 0xC5: ">H", 0xC6: ">I", 0xD9: "B", 0xDA: ">H", 0xDB: ">I",
    0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I",
}  # fmt: skip
_HEADS = bytes([*_LENGTHS, 0xCB, 0xCF, 0xD3, 0xC0, 0xC1, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0x7F, 0xE0])


def mutated(seed: int, corpus: list[list[bytes]] = CORPUS) -> list[bytes]:
    """Return the parts of a message that is one of the corpus after one mutation or a few.

    Half of the frames have their length and checksum made right again, so that the checks after these are reached.
    """
    rng = random.Random(seed)
    parts = list(rng.choice(corpus))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        which = rng.randrange(len(parts))
        parts[which] = rng.choice(_MUTATIONS)(rng, parts[which])
    if rng.random() < 0.02:
        parts = [*parts, bytes(rng.randrange(8))] if rng.random() < 0.5 else parts[:-1] or [b""]
    for at in range(0, len(parts) - len(parts) % 2, 2):
        if rng.random() < 0.5:
            parts[at] = _sealed(*parts[at : at + 2])
    return parts


def role_of(seed: int, parts: list[bytes]) -> str:
    """Return whose side most likely gets to read a message: `hub/ROLE`, `peer/ROLE`, or one at random."""
    rng = random.Random(seed)
    if rng.random() < 0.2:
        return rng.choice(SIDES)
    if len(parts) > 1:
        return "hub/worker"
    kind = next((kind for kind in _READERS if kind in parts[0][:40]), None)
    return rng.choice(_READERS[kind]) if kind else rng.choice(SIDES)


SIDES = (
    "hub/new",
    "hub/worker",
    "hub/scheduler",
    "hub/client",
    "peer/worker",
    "peer/scheduler",
    "peer/client",
    "peer/new",
)
_READERS = {
    b"\xa5hello": ("hub/new",),
    b"\xa7welcome": ("peer/new",),
    b"\xa7refused": ("peer/worker", "peer/client"),
    b"\xa3ack": ("peer/worker",),
    b"\xa4beat": SIDES[1:7],
    b"\xa7outcome": ("hub/scheduler", "peer/client"),
    b"\xa3act": ("hub/client", "peer/scheduler"),
    b"\xa5await": ("hub/client",),
    b"\xa7results": ("peer/client",),
    b"\xa6status": ("hub/client", "peer/client"),
    b"\xa3bye": SIDES[1:7],
}


def _sealed(header, payload):
    try:
        value = msgspec.msgpack.decode(header)
        return msgspec.msgpack.encode(
            {**value, "payload_bytes": len(payload), "xxh3": xxhash.xxh3_64_intdigest(payload)}
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, OverflowError):
        return header


def _flip(rng, part):
    data = bytearray(part)
    for _ in range(rng.randint(1, 8)):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def _set(rng, part):
    data = bytearray(part)
    if data:
        data[rng.randrange(len(data))] = rng.choice(_HEADS)
    return bytes(data)


def _cut(rng, part):
    return part[: rng.randrange(len(part) + 1)]


def _extend(rng, part):
    return part + rng.randbytes(rng.randint(1, 64))


def _splice(rng, part):
    other = rng.choice(rng.choice(CORPUS))
    at, begin = rng.randrange(len(part) + 1), rng.randrange(len(other) + 1)
    piece = other[begin : begin + rng.randint(1, 64)]
    return part[:at] + piece + part[at + rng.choice((0, len(piece))) :]


def _repeat(rng, part):
    at = rng.randrange(len(part) + 1)
    piece = part[at : at + rng.randint(1, 32)]
    return part[:at] + piece * rng.randint(2, 200) + part[at:]


def _edit_length(rng, part):
    """Make a string, array or map claim another length, up to 4 GiB."""
    data = bytearray(part)
    places = [index for index, head in enumerate(data) if head in _LENGTHS or 0x80 <= head <= 0xBF]
    if not places:
        return part
    at = rng.choice(places)
    kind = rng.choice([0xC6, 0xDB, 0xDD, 0xDF])
    length = rng.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1, rng.randrange(2**16), rng.randrange(2**32)])
    form = _LENGTHS.get(data[at])
    behind = at + 1 + (struct.calcsize(form) if form else 0)
    return bytes(data[:at]) + bytes([kind]) + struct.pack(">I", length) + bytes(data[behind:])


def _edit_value(rng, part):
    """Replace one value of the message, at any depth, by an odd one; the message stays msgpack."""
    try:
        value = msgspec.msgpack.decode(part)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _flip(rng, part)
    odd = rng.choice(_ODD)
    try:
        return msgspec.msgpack.encode(_replaced(rng, value, lambda _: odd))
    except (OverflowError, TypeError, ValueError, RecursionError):
        return part


def _nudge(rng, part):
    """Replace one value by one of its kind, or add a field."""

    def near(value):
        match value:
            case bool():
                return not value
            case int():
                return value + rng.choice((-1, 1, 2, 7))
            case str():
                return rng.choice((value + "x", value[:-1], "r1", "float32", "post_block"))
            case float():
                return value * 2
            case bytes():
                return value[1:] + b"x"
            case dict():
                return {**value, "new": rng.choice((1, [{}], "x"))}
            case list():
                return value[1:] or [*value, 1]
        return value

    try:
        value = msgspec.msgpack.decode(part)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return part
    try:
        return msgspec.msgpack.encode(_replaced(rng, value, near))
    except (OverflowError, TypeError, ValueError):
        return part


def _replaced(rng, value, odd):
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        return {**value, key: _replaced(rng, value[key], odd)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value * rng.randint(2, 50)
        if rng.random() < 0.2:
            return [value[at]]
        return [*value[:at], _replaced(rng, value[at], odd), *value[at + 1 :]]
    return odd(value)


def _nested(depth, leaf=1):
    value = leaf
    for _ in range(depth):
        value = [value]
    return value


_ODD = [
    None, True, -1, 0, 1, 2**31, 2**53 + 1, 2**63, -(2**63), 2**64 - 1, 1e308, float("nan"), float("-inf"), "",
    "x" * 600, "\x00/../..", b"", b"\xff" * 64, [], {}, [[]] * 300, {"": {}}, {str(n): n for n in range(300)},
    _nested(60), [0] * 5000, "float32", "int8", "post_block", "post_block:*", [1, "last_prompt", {"last": 0}],
]  # fmt: skip
_BOMBS = [
    b"\x91" * 3000 + b"\xc0",
    b"\x81\xa0" * 3000 + b"\xc0",
    b"\xdd\xff\xff\xff\xff" * 200,
    b"\xdf\xff\xff\xff\xff" * 200,
    b"\x90" * 4000,
    b"\x80" * 4000,
    b"\xa0" * 4000,
    b"\xc0" * 4000,
    b"\x92\x00\xa0" * 2000,
]


def _bomb(rng, part):
    """Put a nest of arrays or maps, or a crowd of the smallest values, in place of some bytes."""
    bomb = rng.choice(_BOMBS)
    at = rng.randrange(len(part) + 1)
    if rng.random() < 0.5:
        return part[:at] + bomb + part[at + 1 :]
    key = rng.choice([b"\xa8counters", b"\xa5sites", b"\xa9positions", b"\xa8requests", b"\xa3new", b"\xa6blocks"])
    if part and 0x80 < part[0] < 0x8F:  # one more entry of the map
        return bytes([part[0] + 1]) + part[1:] + key + b"\xdd" + struct.pack(">I", len(bomb)) + bomb
    return part[:at] + bomb


_MUTATIONS = [
    _flip,
    _set,
    _cut,
    _extend,
    _splice,
    _repeat,
    _edit_length,
    _edit_value,
    _edit_value,
    _bomb,
    *[_nudge] * 6,
]
