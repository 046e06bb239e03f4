"""A filesystem consumer that is killed at any call that changes the disk: acknowledged requests are there, once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

import capflow
from capflow_consumers.dataset.layout import SHARD_PATTERN
from capflow_consumers.dataset.shards.quantization import dequantised, quantised
from tests.kit.frames import row_of
from tests.kit.processes.files import REQUESTS, rows_of
from tests.kit.sources import PROCESSES
from tests.kit.stored import SITES
from tests.kit.stored_layouts import LAYOUTS

CHILD = PROCESSES / "files.py"
SMALL = {"sharded": {"shard_bytes": 1 << 20}}  # so that shards are sealed now and then
WRITERS = {
    **LAYOUTS,
    "threads": {"layout": "per_file", "threads": 2},
    "seal": {"layout": "sharded", "fsync": "seal"},
    "int8": {"layout": "sharded", "quantization": "int8"},
}


def live(root, call, options):
    """Run the child until its end or its death; return what it acknowledged, and whether it died."""
    command = [sys.executable, CHILD, root, str(call), json.dumps(SMALL.get(options["layout"], {}) | options)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode in {0, -signal.SIGKILL}, run.stderr
    return run.stdout.split(), run.returncode != 0


def assert_has(root, requests, options):
    """Assert that a data set has these requests, whole, and return it."""
    rounding = options.get("quantization")
    dataset = capflow.open(root)
    for name in requests:
        (capture,) = dataset.captures(name)
        capture.verify()
        length = rows_of(int(name[1:]))
        assert capture.status == "ok"
        for site in SITES:
            rows, positions, _ = capture[site]
            assert positions.tolist() == list(range(length))
            expected = np.stack([row_of(name, site, p, 1024) for p in range(length)])
            if rounding:
                expected = dequantised(*quantised(expected, rounding), rounding)
            assert rows.tobytes() == expected.tobytes()
    return dataset


def killed_at(root, call, options):
    acknowledged, died = live(root, call, options)
    if acknowledged:  # also before the next one puts it in order
        assert_has(root, [name for name in acknowledged if name != "end"], options)
    again, _ = live(root, 0, options)
    assert again[-1] == "end"
    dataset = assert_has(root, again[:-1], options)
    assert sorted(dataset.requests()) == sorted(f"r{number}" for number in range(REQUESTS))
    dataset.verify()
    assert not list(root.glob(".partial-*"))
    if options["layout"] == "sharded":
        rows = sum(pq.read_metadata(path).num_rows for path in root.glob(SHARD_PATTERN))
        assert rows == sum(len(SITES) * rows_of(number) for number in range(REQUESTS))
    return died


@pytest.mark.parametrize("options", WRITERS.values(), ids=WRITERS)
def test_a_writer_killed_at_a_call_loses_and_repeats_nothing(tmp_path, options):
    assert killed_at(tmp_path, 23, options)


@pytest.mark.long
@pytest.mark.parametrize("options", WRITERS.values(), ids=WRITERS)
def test_a_writer_killed_at_every_third_call_loses_and_repeats_nothing(tmp_path, options):
    call = 1
    while killed_at(tmp_path / str(call), call, options):
        call += 3
    assert call > 40
