"""The duckdb consumer opened by itself, and queries at what it wrote."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import duckdb
import numpy as np

from capflow.capture.model import ModelInfo
from capflow.capture.result import RequestDone
from capflow.capture.site import Site
from capflow.probes.probe import Probe
from capflow_consumers.duckdb.consumer import DuckdbConfig, DuckdbConsumer
from tests.kit.checked import checked
from tests.kit.frames import make_model

SITES = (Site(0, "post_block"), Site(1, "post_block"), Site(1, "mlp_in"))


class Counts:
    """A context that keeps its counters."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def act(self, action: object) -> None:
        raise AssertionError(action)

    def count(self, name: str, amount: int = 1) -> None:
        self.counts[name] += amount

    def working(self) -> None:
        self.counts["working"] += 1


class Clock:
    """A clock that stands still until told otherwise."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def probe_file(
    tmp_path: Path, name: str, site: Site = SITES[1], *, width: int = 8, threshold: float = 0.0, seed: int = 1
) -> Probe:
    """Write NAME.safetensors with two probes, `NAME.a` and `NAME.b`."""
    rng = np.random.default_rng(seed)
    weight, bias = rng.normal(size=(2, width)), rng.normal(size=2)
    probe = Probe.make(site, weight, bias, names=(f"{name}.a", f"{name}.b"), threshold=threshold)
    probe.save(tmp_path / f"{name}.safetensors")
    return probe


def opened(
    tmp_path: Path, *probes: str, clock: Clock | None = None, model: ModelInfo | None = None, **options: object
) -> DuckdbConsumer:
    files = [str(tmp_path / f"{name}.safetensors") for name in probes]
    config = DuckdbConfig(str(tmp_path / "scores.duckdb"), probes=files, **options)
    consumer = DuckdbConsumer(config, clock or Clock())
    checked(consumer)
    consumer.open(Counts())
    consumer.on_session("engine-1", model or make_model())
    return consumer


def done(
    request: str = "r1", prompt_length: int = 4, computed_length: int = 4, *, rows: int, dropped: tuple = ()
) -> RequestDone:
    return RequestDone("engine-1", request, "stop", prompt_length, computed_length, rows, rows, dropped)


def query(tmp_path: Path, sql: str) -> list[tuple]:
    with duckdb.connect(str(tmp_path / "scores.duckdb"), read_only=True) as connection:
        return connection.execute(sql).fetchall()


OPENER = (
    "import sys, duckdb; c = duckdb.connect(sys.argv[1], read_only='ro' in sys.argv); "
    "print('open', flush=True); input()"
)
