"""What tests of a consumer need, without a model: frames, a hub in the process, and the rules for every consumer.

`make_frame`, `make_finished` and `make_model` build what engines send. `row_of` and `token_of` return what is in it.
`MemoryHub` gives it to a consumer as a hub does. `conformance` is a whole test class in one line:

    TestLoudest = conformance(Loudest, {"path": "out.jsonl"})

Plugin authors import it; capflow itself does not.
Invariant: everything but the workers' sockets is the real hub.
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
