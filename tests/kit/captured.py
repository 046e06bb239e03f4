"""Captured data sets for tests, written by the filesystem consumer from frames whose rows say where they belong."""

import contextlib
import io
import itertools
import sys
from typing import NamedTuple
from unittest import mock

from msgspec.structs import replace

from capflow.capture.frame import Dropped
from capflow.capture.result import RequestDone
from capflow.capture.site import Site
from capflow.cli import main
from capflow_consumers.filesystem.consumer import FilesystemConfig, FilesystemConsumer
from tests.kit.frames import make_frame, make_model

SITES = (Site(2, "post_block"), Site(3, "post_block"), Site(3, "mlp_out"))
REQUESTS = {"a": (4, 9), "b/c": (3, 3), "long": (40, 150)}  # prompt_length, computed_length
LAYOUTS = ("per_file", "packed", "sharded")
STORED = [*({"layout": layout} for layout in LAYOUTS), {"layout": "sharded", "compression": "zstd"}]
IDS = [*LAYOUTS, "zstd"]
_BOOTS = itertools.count()  # frames of one boot that come again are known


def write(
    root,
    requests=None,
    sites=SITES,
    *,
    dtype="bfloat16",
    hidden=8,
    texts=False,
    dropped=None,
    lost=None,
    layout="per_file",
    died=(),
    **options,
):
    """Write a data set of requests, each with every row at every site, and return its root.

    dropped: by request, `(rows, reason)` that its worker counts as dropped.
    lost: by request, the positions `start, stop` without a frame.
    died: requests whose engine died before it reported their end.
    """
    consumer = FilesystemConsumer(
        FilesystemConfig(str(root), hooks=sorted({site.hook for site in sites}), fsync=False, layout=layout, **options)
    )
    consumer.open(None)
    boot = f"boot-{next(_BOOTS)}"
    consumer.on_session("engine-1", replace(make_model(hidden=hidden), sites=tuple(sites), dtype=dtype))
    for seq, (request, (prompt, computed)) in enumerate((requests or REQUESTS).items()):
        start, stop = (lost or {}).get(request, (computed, computed))
        spans = [(0, start), (stop, computed - stop)]
        for part, (first, length) in enumerate(spans):
            if length:
                span = (request, prompt, first, length)
                consumer.on_frame(
                    make_frame(
                        [span], sites, hidden=hidden, dtype=dtype, seq=1 + seq * 2 + part, texts=texts, boot=boot
                    )
                )
        rows = sum(length for _, length in spans) * len(sites)
        drops = tuple(Dropped(*drop) for drop in (dropped or {}).get(request, ()))
        status, length = ("error", 0) if request in died else ("stop", computed)
        consumer.on_request_done(RequestDone("engine-1", request, status, prompt, length, rows, rows, drops))
    consumer.close()
    return root


def flip(file, index=-1):
    """Flip a bit of a file's byte."""
    whole = bytearray(file.read_bytes())
    whole[index] ^= 1
    file.write_bytes(whole)


class Done(NamedTuple):
    """How a command ended, and what it said."""

    returncode: int
    stdout: str
    stderr: str


def run(*arguments):
    """Run `capflow` with these arguments in this process; an error of no kind that it knows is raised."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["capflow", *map(str, arguments)]),
        mock.patch.dict("os.environ", {"CAPFLOW_TRACEBACK": "1"}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as e:
            return Done(int(e.code or 0), out.buffer.getvalue().decode(), err.getvalue())
