"""A model with rows of several shapes, and frames of requests that ask for them at different positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from capflow.capture.frame import Frame
from capflow.capture.model import ModelInfo, grouped
from capflow.capture.site import Site
from tests.kit.frames import make_frame, make_model, row_of, token_of
from tests.kit.stored import done, opened

HIDDEN = 8
SHAPES = {
    Site(0, "heads"): (2, 6),
    Site(1, "heads"): (4, 3),
    Site(2, "heads"): (4, 6),
    Site(1, "k"): (1, 6),
    Site(0, "neurons"): (20,),
    Site(2, "router"): (5,),
    # As wide as the stream, and of another shape.
    Site(2, "v"): (2, 4),
}
"""The same hook has other shapes in other layers."""

SITES = (Site(0, "post_block"), Site(1, "post_block"), Site(2, "mlp_in"), *SHAPES)

WITHIN = {"heads": (1, 4), "router": (3, 6)}
"""Hooks with rows of some positions only."""


def shaped_model() -> ModelInfo:
    """Return the model."""
    plain = make_model(hidden=HIDDEN)
    return msgspec.structs.replace(plain, sites=tuple(sorted(SITES)), shapes=grouped(SHAPES))


def width_of(site: Site) -> int:
    """Return how many numbers a row has."""
    return shaped_model().width_of(site)


def frame_of(requests: Sequence[tuple[str, int, int, int]], sites: Sequence[Site] = SITES, **more: Any) -> Frame:
    """Return a frame with the rows of the sites, those of `WITHIN` at these positions only."""
    return make_frame(requests, sites, hidden=HIDDEN, **{"shapes": SHAPES, "within": WITHIN, **more})


def positions_of(site: Site, length: int, within: Mapping[str, tuple[int, int]] = WITHIN) -> list[int]:
    """Return the positions that a site has rows of, of a request of so many tokens."""
    first, end = within.get(site.hook, (0, length))
    return list(range(first, min(end, length)))


def rows_total(length: int, sites: Sequence[Site] = SITES, within: Mapping[str, tuple[int, int]] = WITHIN) -> int:
    """Return how many rows a request of so many tokens has."""
    return sum(len(positions_of(site, length, within)) for site in sites)


def store(root: Path | str, lengths: dict[str, int], sites: Sequence[Site] = SITES, **options: Any) -> None:
    """Write requests step by step: four tokens, then one a step; those that are longest end last."""
    frames = options.pop("frames", {})
    consumer = opened(root, tuple(sites), capture="requests", **options)
    consumer.on_session("engine-1", shaped_model())
    for seq in range(1, max(lengths.values()) - 2):
        start, length = (0, 4) if seq == 1 else (seq + 2, 1)
        running = [(name, 4, start, length) for name, end in lengths.items() if start + length <= end]
        consumer.on_frame(frame_of(running, sites, seq=seq, texts=True, **frames))
        for name, *_ in running:
            if lengths[name] == start + length:
                rows = rows_total(lengths[name], sites)
                result = consumer.on_request_done(done(name, computed_length=lengths[name], rows=rows))
                assert (result.status, result.error) == ("ok", None)
    consumer.close()


def assert_site(
    capture: Any,
    name: str,
    site: Site,
    length: int,
    *,
    dtype: str = "float32",
    within: Mapping[str, tuple[int, int]] = WITHIN,
) -> None:
    """Assert that a site of a capture holds its rows, as wide as they are, in order, in their shape."""
    captured, positions = capture[site], positions_of(site, length, within)
    if sum(each.hook == site.hook for each in capture.sites) == 1:
        assert np.array_equal(capture[site.hook].positions, captured.positions)
        assert site.hook in capture
    assert captured.positions.tolist() == positions
    assert captured.token_ids.tolist() == [token_of(name, position) for position in positions]
    expected = np.stack([row_of(name, site, position, width_of(site), dtype) for position in positions])
    assert captured.rows.dtype == expected.dtype
    assert captured.rows.shape == (len(positions), width_of(site))
    assert captured.rows.tobytes() == expected.tobytes()
    shape = SHAPES.get(site, (HIDDEN,))
    assert capture.shape_of(site) == captured.row_shape == shape
    assert captured.shaped.shape == (len(positions), *shape)
    assert captured.shaped.tobytes() == expected.tobytes()
