"""What is made of an input that is right."""

from __future__ import annotations

import random

_NUMBERS = (0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
_TEXTS = (
    b"\x1b[2J",
    b"\n",
    b"\xff\xfe",
    b"\xe2\x80\xa8",
    b"../../../etc/passwd",
    b"NaN",
    b"1e999",
    b"-1",
    b"null",
    b"[" * 5_000,
    b'{"a":' * 5_000,
    b"\x91" * 5_000,
    b'"hooks"',
    b"\0",
)


def mutated(choose: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """Return an input after a mutation or a few. others: of the corpus, to take pieces of."""
    for _ in range(choose.choice((1, 1, 1, 2, 4))):
        data = choose.choice(_MUTATIONS)(choose, data, others)
    return data


def _flip(choose, data, _):
    out = bytearray(data)
    for _ in range(choose.choice((1, 1, 3, 10)) if out else 0):
        out[choose.randrange(len(out))] ^= 1 << choose.randrange(8)
    return bytes(out)


def _number(choose, data, _):
    size = choose.choice((1, 2, 4, 8))
    number = (choose.choice(_NUMBERS) % 256**size).to_bytes(size, choose.choice(("little", "big")))
    at = choose.randrange(len(data) + 1)
    return data[:at] + number + data[at + size :]


def _digits(choose, data, _):
    places = [index for index, byte in enumerate(data) if 48 <= byte <= 57]
    if not places:
        return data
    at = choose.choice(places)
    return data[:at] + str(choose.choice((*_NUMBERS, -1, 10**30))).encode() + data[at + 1 :]


def _cut(choose, data, _):
    return data[: choose.randrange(len(data) + 1)]


def _remove(choose, data, _):
    at = choose.randrange(len(data) + 1)
    return data[:at] + data[at + choose.choice((1, 8, 64, 512)) :]


def _repeat(choose, data, _):
    at = choose.randrange(len(data) + 1)
    piece = data[at : at + choose.choice((1, 8, 64))]
    return data[:at] + piece * choose.choice((2, 100, 1_000)) + data[at:]


def _text(choose, data, _):
    at = choose.randrange(len(data) + 1)
    return data[:at] + choose.choice(_TEXTS) + data[at + choose.choice((0, 1, 8)) :]


def _splice(choose, data, others):
    other = choose.choice(others)
    at, begin = choose.randrange(len(data) + 1), choose.randrange(len(other) + 1)
    return data[:at] + other[begin : begin + choose.choice((8, 64, len(other)))] + data[at:]


def _noise(choose, data, _):
    at = choose.randrange(len(data) + 1)
    return data[:at] + choose.randbytes(choose.choice((1, 16, 256))) + data[at:]


_MUTATIONS = (_flip, _flip, _number, _number, _digits, _cut, _remove, _repeat, _text, _splice, _noise)
