"""What tests of a consumer need, without a model: frames, a hub in the process, and the rules that every consumer is to keep.

`make_frame`, `make_finished` and `make_model` build what engines say, and `row_of` and `token_of` what is in it; `MemoryHub` gives it to a
consumer as a hub does. `conformance` is a whole test class in one line:

    TestLoudest = conformance(Loudest, {"path": "out.jsonl"})
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
