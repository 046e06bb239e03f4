"""Runs `capflow` with small caches for `tests.soak`, so that they are full within minutes: `python hub.py run ...`."""

from __future__ import annotations

RESULTS_KEPT_MAX = 2_000

if __name__ == "__main__":
    from capflow import limits
    from capflow.cli import main

    limits.RESULTS_KEPT_MAX = RESULTS_KEPT_MAX
    main()
