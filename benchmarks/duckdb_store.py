"""The cost of the duckdb consumer over DuckDB: scoring and writing rows, against bare inserts of the same Arrow tables.

    PYTHONPATH=. python3 benchmarks/duckdb_store.py --directory DISK

There are four linear probes at one site of 640 numbers, bfloat16. The consumer gets frames as from a hub, and the end
of each request. Every table that it appends is kept; a bare connection with the same settings then inserts the same
tables in the same transactions. The two take turns. Each line has the medians of their rates in token rows a second,
the medians of the ratios of neighbouring turns, by the clock and by the processor, and the processor's time for a token
row. A token row is one row of `tokens` and four of `scores`. After each turn the two files are compared.

`prompts`: frames of 4 requests with 256 tokens each. `answers`: frames of 64 requests with one token each.

Predicted, on two slow cores: an insert of 5 rows with text costs DuckDB 4 µs (200 ns a value-heavy row, one thread, and
a write-ahead log). In `prompts` the consumer copies 1280 bytes of each row, widens them, and multiplies 640 by 4: 0.7
µs. Its columns cost 1 µs more: ratio 0.7, above 100k rows/s. In `answers` each row is a Python object with a token, a
mark and a copy, 10 to 15 µs: ratio 0.25, 50k rows/s. An engine of 64 requests makes that many in 780 steps a second.
Goal: 0.8 of the bare inserts.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import duckdb
import numpy as np
import pyarrow as pa

from capflow.capture.dtypes import DTYPES
from capflow.capture.frame import Block, Frame, FrameHeader, Rank, RequestRows, Span
from capflow.capture.model import ModelInfo
from capflow.capture.result import RequestDone
from capflow.capture.site import Site
from capflow.probes.probe import Probe
from capflow_consumers.duckdb.consumer import DuckdbConfig, DuckdbConsumer
from capflow_consumers.duckdb.database import Adopted, Database

HIDDEN = 640
SITE = Site(12, "post_block")
MODEL = ModelInfo("bench", 18, HIDDEN, "bfloat16", (SITE,), 1)
# Requests in a frame, and tokens of each.
SHAPES = {"prompts": (4, 256), "answers": (64, 1)}
REQUEST_TOKENS = 1024


class Took(NamedTuple):
    """Seconds by the clock, and of the processor for this process."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Took:
        """Return the readings of the two clocks."""
        return cls(time.perf_counter(), time.process_time())

    def until(self, end: Took) -> Took:
        """Return what lies between two readings."""
        return Took(end.wall - self.wall, end.cpu - self.cpu)


class Nothing:
    """A context for a consumer that has no hub."""

    def act(self, action: object) -> None:
        """Refuse: the consumer has no actions."""
        raise AssertionError(action)

    def count(self, name: str, amount: int = 1) -> None:
        """Refuse: a count here is an error."""
        raise AssertionError((name, amount))


def frames(together: int, length: int, tokens: int) -> tuple[list[Frame], list[RequestDone]]:
    """Return frames that make `tokens` rows, and the ends of their requests."""
    count = together * length
    rows = np.random.default_rng(0).normal(size=(count, HIDDEN)).astype(DTYPES["bfloat16"])
    payload = rows.reshape(-1).view(np.uint8)
    made, ends = [], []
    for number in range(tokens // count):
        turn, start = divmod(number * length, REQUEST_TOKENS)
        names = [f"request-{turn}-{index}" for index in range(together)]
        ids = range(start, start + length)
        parts = tuple(RequestRows(name, 512, start, tuple(ids), tuple(f" w{i}" for i in ids)) for name in names)
        spans = tuple(Span(index, start, length, index * length) for index in range(together))
        header = FrameHeader(
            engine="bench", boot="boot", rank=Rank(0, 0, 0), seq=number + 1, step=number, time_ns=time.time_ns(),
            dtype="bfloat16", hidden_size=HIDDEN, requests=parts, blocks=(Block((SITE,), count, spans),),
        )  # fmt: skip
        made.append(Frame.seal(header, payload))
        if start + length == REQUEST_TOKENS or number == tokens // count - 1:
            done = start + length
            ends += [RequestDone("bench", name, "length", 512, done, done, done, ()) for name in names]
    return made, ends


def scored(
    file: Path, probes: Path, made: list[Frame], ends: list[RequestDone]
) -> tuple[Took, list[dict[str, pa.Table]]]:
    """Return how long the consumer takes, and the tables that it appended."""
    appended: list[dict[str, pa.Table]] = []

    def append(self: Database, tables: Mapping[str, pa.Table], adopted: Adopted | None = None) -> None:
        appended.append(dict(tables))
        original(self, tables, adopted)

    consumer = DuckdbConsumer(DuckdbConfig(str(file), probes=[str(probes)]))
    consumer.check()
    consumer.open(Nothing())
    consumer.on_session("bench", MODEL)
    original, Database.append = Database.append, append  # type: ignore[method-assign]
    begun = Took.now()
    for frame in made:
        consumer.on_frame(frame)
    results = [consumer.on_request_done(done) for done in ends]
    consumer.close()
    took = begun.until(Took.now())
    Database.append = original  # type: ignore[method-assign]
    assert {result.status for result in results} == {"ok"}
    return took, appended


def bare(file: Path, probes: Path, appended: list[dict[str, pa.Table]]) -> Took:
    """Return how long a bare connection takes for the same tables."""
    database = Database.open(file, memory_bytes_max=DuckdbConfig("").memory_bytes_max, where="bench")
    database.add_probe(Probe.load(probes))
    connection = database._connection  # noqa: SLF001  the same tables and settings
    begun = Took.now()
    for tables in appended:
        connection.execute("BEGIN")
        for name, rows in tables.items():
            connection.register("new_rows", rows)
            connection.execute(f"INSERT INTO {name} BY NAME SELECT * FROM new_rows")  # noqa: S608
            connection.unregister("new_rows")
        connection.execute("COMMIT")
    connection.close()
    return begun.until(Took.now())


def contents(file: Path) -> list[tuple[object, ...]]:
    with duckdb.connect(str(file), read_only=True) as connection:
        return connection.execute(
            "SELECT count(*), count(DISTINCT (capture, position, probe)), sum(hash(score, position, capture)) "
            "FROM scores "
            "UNION ALL SELECT count(*), count(DISTINCT (capture, position)), sum(hash(token_id, text)) FROM tokens"
        ).fetchall()


def main() -> None:
    parser = argparse.ArgumentParser(description="The duckdb consumer against bare inserts of the same tables.")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="where to write")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (default: 7)")
    parser.add_argument("--tokens", type=int, default=102_400, help="token rows in each turn (default: 102,400)")
    arguments = parser.parse_args()
    print("| frames | bare rows/s | consumer rows/s | ratio | CPU ratio | spread | bare CPU µs | consumer CPU µs |")
    print("|---|---|---|---|---|---|---|---|")
    for shape, (together, length) in SHAPES.items():
        made, ends = frames(together, length, arguments.tokens)
        took: dict[str, list[Took]] = {"bare": [], "consumer": []}
        for turn in range(arguments.rounds + 1):  # the first warms up
            directory = Path(tempfile.mkdtemp(dir=arguments.directory))
            probes = directory / "four.safetensors"
            rng = np.random.default_rng(1)
            Probe.make(SITE, rng.normal(size=(4, HIDDEN)), names=list("abcd")).save(probes)
            seconds, appended = scored(directory / "consumer.duckdb", probes, made, ends)
            plainly = bare(directory / "bare.duckdb", probes, appended)
            counts = contents(directory / "consumer.duckdb")
            assert counts == contents(directory / "bare.duckdb")
            assert counts[0][0] == counts[0][1] == 4 * arguments.tokens
            shutil.rmtree(directory)
            if turn:
                took["bare"].append(plainly)
                took["consumer"].append(seconds)
        rates = {name: arguments.tokens / statistics.median(t.wall for t in times) for name, times in took.items()}
        pairs = list(zip(took["bare"], took["consumer"], strict=True))
        wall = statistics.median(bare.wall / consumer.wall for bare, consumer in pairs)
        cpu = sorted(bare.cpu / consumer.cpu for bare, consumer in pairs)
        micro = {name: statistics.median(t.cpu for t in times) / arguments.tokens * 1e6 for name, times in took.items()}
        ratios = f"{wall:.2f} | {statistics.median(cpu):.2f} | {cpu[0]:.2f}-{cpu[-1]:.2f}"
        print(
            f"| {shape} | {rates['bare']:,.0f} | {rates['consumer']:,.0f} | {ratios} "
            f"| {micro['bare']:.1f} | {micro['consumer']:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
