"""A short run of `chaos.py`, which `make chaos` runs whole."""

from __future__ import annotations

from chaos import Options, run


def test_what_was_acknowledged_is_there_once_though_everything_was_killed():
    options = Options(
        kills={"hub": 3, "engine": 2, "both": 1},
        rate=200,
        seed=1,
        consumers=("filesystem", "duckdb"),
        pause_s=(0.2, 1.0),
        return_s_max=30.0,  # whatever else the machine does
    )
    assert run(options) == ({}, [])
