"""Which rows of a capture an export has: all, or those at positions that nothing steered.

Invariant: a row whose steering is not known is never taken for one that is not steered.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow_consumers.dataset.capture import Rows, steered_at
from capflow_consumers.dataset.reader import RequestCapture

# About the size of the rows that are copied at a time.
_PART_BYTES = 8 << 20


def selected(capture: RequestCapture, site: Site, *, unsteered: bool) -> Iterator[Rows]:
    """Yield a site's rows in consecutive parts, some perhaps empty. Memory holds one part at a time.

    unsteered: whether rows at steered positions are left out.
    """
    for batch in capture.in_batches(site):
        steered = steered_at(capture.sidecar, batch.positions) if unsteered else None
        if steered is None or not steered.any():
            yield batch
            continue
        count = max(1, _PART_BYTES // max(1, batch.rows.shape[1] * batch.rows.itemsize))
        for start in range(0, len(steered), count):
            keep = ~steered[start : start + count]
            part = batch.part(start, start + count)
            yield part.chosen(keep)


def left_out(capture: RequestCapture, site: Site) -> int:
    """Return how many rows of a site are at steered positions.

    Raises UsageError if the data set does not say it.
    """
    steered = capture.steered(site)
    if steered is None:
        got, expected = f"request {capture.id}, whose steered positions are not stored", "a data set that has them"
        raise UsageError(explain("--unsteered", got=got, expected=expected, do="leave out the option"))
    return int(np.count_nonzero(steered))
