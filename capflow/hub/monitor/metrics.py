"""The metrics of a hub, for Prometheus: the rows of `capflow.hub.monitor.table`, read when someone asks.

`markdown` is the table in docs/operations.md; `make metrics` renews it there.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry

from capflow import limits
from capflow.hub.hub import Hub
from capflow.hub.monitor.table import TABLE, Labels, Part, Row, Value

BEGIN, END = "<!-- metrics: generated -->\n", "<!-- metrics: end -->\n"
"""What stands around the table in the docs."""

# The label of reasons and names beyond those that are shown.
_OTHER = "other"
# The ends of the names of moments.
_MOMENTS = ("_timestamp_seconds", "_start_time_seconds")
# The last words of names that are no unit.
_UNITLESS = {"info", "ready", "up", "retrying", "counts", "fds"}


def registry_of(hub: Hub) -> CollectorRegistry:
    """Return what gives a hub's metrics, and its process's, at each scrape."""
    registry = CollectorRegistry(auto_describe=True)
    registry.register(HubCollector(hub))
    ProcessCollector(registry=registry)
    return registry


class HubCollector(Collector):
    """Reads a hub's counters, on any thread; the hub takes no part in it."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub

    def collect(self) -> Iterator[Metric]:
        """Yield every family, also those that have no value now."""
        for part in TABLE:
            subjects = list(part.find(self.hub))
            for row in part.rows:
                yield _family(part, row, subjects)


def _family(part: Part, row: Row, subjects: Iterable[tuple[Labels, Any]]) -> Metric:
    # Each series once: Prometheus refuses a scrape with one that comes twice.
    values: defaultdict[Labels, float] = defaultdict(float)
    for labels, subject in subjects:
        for more, number in _samples(row.read(subject)):
            values[*labels, *more] += number
    family = row.kind(f"capflow_{row.name}", row.meaning, labels=(*part.labels, *row.labels))
    for labels, number in values.items():
        family.add_metric(labels, number)
    return family


def _samples(value: Value) -> Iterator[tuple[Labels, float]]:
    """Yield the largest numbers of a value with their labels; `other` is the sum of the rest."""
    if not isinstance(value, Mapping):
        yield from () if value is None else [((), value)]
        return
    metrics = Counter(dict(value)).most_common()
    shown = {key: number for key, number in metrics[: limits.REASONS_MAX] if key != _OTHER}
    yield from (((key,) if isinstance(key, str) else key, number) for key, number in shown.items())
    if rest := sum(number for key, number in metrics if key not in shown):
        yield (_OTHER,), rest


def markdown() -> str:
    """Return the table of all metrics for the docs."""
    lines = ["| metric | type | labels | unit | meaning |", "|---|---|---|---|---|"]
    rows = ((part, row) for part in TABLE for row in part.rows)
    lines += [_line(_family(part, row, ()), (*part.labels, *row.labels)) for part, row in rows]
    lines += [_line(family, ()) for family in ProcessCollector(registry=None).collect()]
    return "".join(f"{line}\n" for line in lines)


def _line(family: Metric, labels: Labels) -> str:
    unit = family.name.rpartition("_")[2]
    unit = "" if unit in _UNITLESS else "Unix seconds" if family.name.endswith(_MOMENTS) else unit
    name = f"{family.name}_total" if family.type == "counter" else family.name
    named = ", ".join(f"`{label}`" for label in labels)
    return f"| `{name}` | {family.type} | {named} | {unit} | {family.documentation} |"


def renew(page: Path) -> None:
    """Put the table into a page of the docs, in the place of the one that is there."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{markdown()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    renew(Path(sys.argv[1]))
