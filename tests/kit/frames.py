"""The builder of frames that tests use: `capflow.testing`'s."""

from capflow.testing.frames import (
    BOOT,
    FIRST,
    assert_rows,
    make_finished,
    make_frame,
    make_hello,
    make_model,
    row_of,
    token_of,
)

__all__ = [
    "BOOT",
    "FIRST",
    "assert_rows",
    "make_finished",
    "make_frame",
    "make_hello",
    "make_model",
    "row_of",
    "token_of",
]
