"""A duckdb consumer filled until its disk has no room."""

import pytest

from capflow.errors import RetryError
from tests.kit.databases import SITES, done, opened
from tests.kit.frames import make_frame

HIDDEN = 4096  # numbers in a row, of which `vectors` writes four bytes each


def vectors(tmp_path):
    """Return a consumer that writes 16 KiB for each token."""
    return opened(tmp_path, site="post_block:1", vectors=True)


def give(consumer, request, length=4):
    """Give a request, whole; return its result."""
    consumer.on_frame(make_frame([(request, length, 0, length)], SITES[1:2], hidden=HIDDEN))
    return consumer.on_request_done(done(request, length, length, rows=length))


def filled(tmp_path, little_room, room):
    """Give requests, one of them while there is no room for it; return the errors of the tries, and the last result."""
    consumer = vectors(tmp_path)
    little_room()
    assert give(consumer, "first").status == "ok"
    errors = []
    big = make_frame([("big", 400, 0, 400)], SITES[1:2], hidden=HIDDEN, seq=2)
    consumer.on_frame(big)
    for _ in range(3):
        with pytest.raises(RetryError) as refused:
            consumer.on_request_done(done("big", 400, 400, rows=400))
        errors.append(str(refused.value))
    room()
    result = consumer.on_request_done(done("big", 400, 400, rows=400))
    consumer.close()
    return errors, result.status
