"""A short run of `tests.chaos`, which `make chaos` runs whole."""

from __future__ import annotations

import pytest

from tests.chaos.run import Options, run


@pytest.mark.long
def test_what_was_acknowledged_is_there_once_though_everything_was_killed():
    options = Options(
        kills={"hub": 3, "engine": 2, "both": 1},
        disk_full=0,
        rate=200,
        seed=1,
        consumers=("filesystem", "duckdb"),
        pause_s=(0.2, 1.0),
        return_s_max=30.0,  # whatever else the machine does
    )
    assert run(options) == ({}, [])


@pytest.mark.long
def test_two_widths_and_a_full_disk_cost_nothing():
    options = Options(
        kills={"hub": 1, "both": 1},
        disk_full=2,
        full_s=(1.0, 2.0),
        rate=200,
        seed=2,
        pause_s=(0.2, 1.0),
        return_s_max=30.0,
    )
    assert run(options) == ({}, [])
