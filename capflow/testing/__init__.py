"""Tests of a consumer without a model: frames, a hub in the test process, and the rules for every consumer.

`make_frame`, `make_finished` and `make_model` build the messages of engines. `row_of` and `token_of` return their rows
and tokens. `MemoryHub` gives frames to a consumer as a hub does. `conformance` makes a whole test class in one line:

    TestLoudest = conformance(Loudest, {"path": "out.jsonl"})

Plugin authors import it; capflow itself does not.
Invariant: the hub is the real one; only the workers' sockets are missing.
"""

from capflow.testing.conformance import conformance
from capflow.testing.frames import assert_rows, make_finished, make_frame, make_hello, make_model, row_of, token_of
from capflow.testing.hub import Engine, MemoryHub

__all__ = [
    "Engine",
    "MemoryHub",
    "assert_rows",
    "conformance",
    "make_finished",
    "make_frame",
    "make_hello",
    "make_model",
    "row_of",
    "token_of",
]
