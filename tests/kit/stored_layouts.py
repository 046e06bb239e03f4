"""The layouts of a data set."""

from __future__ import annotations

LAYOUTS = {
    "per_file": {"layout": "per_file"},
    "packed": {"layout": "packed"},
    "sharded": {"layout": "sharded"},
    "zstd": {"layout": "sharded", "compression": "zstd"},
}
