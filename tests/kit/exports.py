"""What `capflow export` wrote, read again."""

from __future__ import annotations

import numpy as np
import pytest

from capflow_consumers.dataset.names import slug
from tests.kit.captured import REQUESTS, run, write
from tests.kit.frames import row_of, token_of


@pytest.fixture
def root(tmp_path):
    return write(tmp_path / "rows")


def export(root, dest, to, *options):
    return run("export", root, dest, "--to", to, *options)


def rows_at(site, dtype="bfloat16", requests=REQUESTS):
    """Return the rows and the token ids of a site in the order of the data set's directories."""
    places = [(name, p) for name in sorted(requests, key=slug) for p in range(requests[name][1])]
    rows = np.stack([row_of(name, site, p, dtype=dtype) for name, p in places])
    return rows, np.array([token_of(name, p) for name, p in places])
