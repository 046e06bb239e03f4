"""The filesystem consumer opened by itself, and what it stored."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from capflow.capture.dtypes import DTYPES
from capflow.capture.frame import Dropped
from capflow.capture.result import CaptureResult, RequestDone
from capflow.capture.site import Site
from capflow_consumers.filesystem.consumer import FilesystemConfig, FilesystemConsumer
from tests.kit.checked import checked
from tests.kit.frames import make_model, row_of, token_of

SITES = (Site(0, "post_block"), Site(1, "post_block"), Site(1, "mlp_in"))


def hashed(sidecar: bytes) -> bytes:
    """Return a changed sidecar with a hash that matches it."""
    text = sidecar[: sidecar.rindex(b',"xxh3_64"')]
    return text + b',"xxh3_64":"' + xxhash.xxh3_64_hexdigest(text).encode() + b'"}'


class Counts:
    """A context that keeps its counters."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def act(self, action: object) -> None:
        raise AssertionError(action)

    def count(self, name: str, amount: int = 1) -> None:
        self.counts[name] += amount

    def left_s(self) -> float:
        return 60.0

    def working(self) -> None: ...


class Waiting(FilesystemConsumer):
    """The consumer, with every request's result at once."""

    def on_request_done(self, done: RequestDone) -> CaptureResult:
        result = super().on_request_done(done)
        return result.result() if isinstance(result, Future) else result


def opened(root: Path | str, sites: tuple[Site, ...] = SITES[:1], **options: object) -> FilesystemConsumer:
    """Return a consumer that has met an engine with taps at these sites, and wants them all."""
    options = {"hooks": sorted({site.hook for site in sites}), **options}
    consumer = Waiting(FilesystemConfig(root=str(root), **{"fsync": False, "layout": "per_file", **options}))
    checked(consumer)
    consumer.open(Counts())
    consumer.on_session("engine-1", msgspec.structs.replace(make_model(), sites=sites))
    return consumer


def done(
    request: str = "r1",
    prompt_length: int = 4,
    computed_length: int = 4,
    *,
    rows: int | None = None,
    dropped: tuple[Dropped, ...] = (),
    status: str = "stop",
) -> RequestDone:
    rows = computed_length if rows is None else rows
    return RequestDone("engine-1", request, status, prompt_length, computed_length, rows, rows, dropped)


def assert_site_has(capture, request, site, positions, *, dtype="float32", stored=None):
    """Assert that a site of a capture holds exactly the rows of these positions of a request."""
    rows = capture[site]
    assert rows.rows.dtype == DTYPES[stored or dtype]
    assert rows.positions.tolist() == positions
    assert rows.token_ids.tolist() == [token_of(request, p) for p in positions]
    expected = np.stack([row_of(request, site, p, dtype=dtype) for p in positions]).astype(DTYPES[stored or dtype])
    assert rows.rows.tobytes() == expected.tobytes()


def assert_is_whole(capture, request, sites, end):
    """Assert that a capture holds exactly the rows of positions `0..end` of a request at the sites."""
    assert set(capture.sites) == set(sites)
    capture.verify()
    for site in sites:
        assert_site_has(capture, request, site, list(range(end)))


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))
