"""Fuzzing: what comes from outside is taken or refused, in bounded time and memory, whatever it is.

| file | holds |
|---|---|
| `mutator` | what is made of an input that is right: bits, lengths, pieces |
| `messages` | targets that read messages: the wire, raw ZMTP, the dashboard's pages, JSON of bodies |
| `files` | targets that read files: spools, inboxes, recordings, data sets, probes, keys, options |
| `served` | targets that need vLLM: bodies over HTTP, messages over gRPC, files of vectors |
| `corpus/TARGET` | inputs that once did harm, or lie near: they are read first, in each run |

`python -m tests.fuzz` runs for a while; an input that does harm is put into the corpus, and its file is named.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]  # the helpers of other tests
