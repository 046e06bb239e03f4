"""The fleet in small: a hub dies and nothing is lost, the check finds what is, and a hub's load is measured."""

from __future__ import annotations

import re

import pytest

from tests.fleet.hub import LEDGER
from tests.fleet.run import LENGTH, copy_rate, live, read, saturate

WORKERS, HUBS, REQUESTS = 12, 3, 2


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("f")


@pytest.fixture(scope="module")
def outcome(directory):
    return live(directory, workers=WORKERS, hubs_count=HUBS, requests=REQUESTS, frames_s=40)


def test_a_hub_that_dies_costs_nothing(outcome):
    assert (outcome.requests, outcome.rows) == (WORKERS * REQUESTS, WORKERS * REQUESTS * LENGTH)
    assert not outcome.faults


@pytest.mark.parametrize(
    ("pattern", "by", "faults"),
    [
        (rb'\["boot-1-.*\n', b"", {"rows lost"}),
        (rb'(\["boot-1-\d+",)(.*\n)', rb"\1\2\g<1>9\2", {"rows twice"}),
        (rb'\["Ended","w1-r0".*\n', b"", {"requests without an end"}),
        (rb'(\["Ended","w1-r0",\d+),\d+', rb"\1,1", {"requests that lack rows"}),
        (rb'"w1-r0"', b'"x"', {"rows lost", "requests without an end", "rows of nobody"}),
    ],
)
def test_what_is_wrong_is_found(outcome, directory, pattern, by, faults):
    ledgers = [directory / f"hub-{hub}" / LEDGER for hub in range(HUBS)]
    before = [ledger.read_bytes() for ledger in ledgers]
    try:
        for ledger, lines in zip(ledgers, before, strict=True):
            ledger.write_bytes(re.sub(pattern, by, lines))
        assert faults <= set(read(directory, WORKERS, HUBS, REQUESTS).faults)
    finally:
        for ledger, lines in zip(ledgers, before, strict=True):
            ledger.write_bytes(lines)


def test_the_load_of_a_hub_is_measured(tmp_path_factory):
    load = saturate(tmp_path_factory.mktemp("s"), sessions=4, rows=2, hidden=64, frames=40)
    assert (load.frames, load.rows, load.nbytes) == (40, 80, 40 * 2 * 64 * 4)
    assert load.cpu_s > 0
    assert re.match(r"\| 4 \| 0 KiB \| [\d,]+ \|", load.line(copy_rate(512)))
