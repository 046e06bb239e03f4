"""The cost of the filesystem consumer over plain writing and reading of files, layout by layout.

    PYTHONPATH=.:consumers python3 benchmarks/files.py --directory DISK

Writing: the consumer gets frames of whole requests and the requests' ends, as from a hub. Beside it, a loop writes the
    rows of the same frames into one file, with the same fsync policy: with `fsync`, both have each request on the disk
    before the next. The clock runs until the consumer is closed and its shards are sealed.

Requests with one row at each site are compared with opening, writing and renaming as many files of as many bytes as
`per_file` makes. `packed` and `sharded` make fewer files of the same requests; the first figure counts them as if they
had made those of `per_file`, the second counts their own files. No file is removed before all turns are over: ext4
passes over inodes that were removed in the last minutes, one by one, and then takes 200 to 900 µs for a new file
instead of 10. Run it on a disk on which nobody removed many files in the last five minutes.

Reading: every byte of a sharded set is read through `capflow.open`, against `cat` to /dev/null; the page cache is
    dropped before each. Then one site of a random request is read, in a set that was just opened and in one that is
    open. All take turns; a line has the medians and their ratio.

Uploading, with `--bucket`: the same requests go into shards of 32 MiB that stay in a directory, or that are uploaded.

Predicted, on two cores and a disk of 150 to 400 MB/s:

* Synced, packed and sharded wait for the disk: 0.9.
* Not synced, a request is copied out of its frame (3 GB/s), hashed row by row (2 GB/s), and its CRC32 is taken (2
  GB/s), beside the copy into the page cache (1 GB/s). The last two are on other threads: 0.7 for sharded, 0.8 for
  packed, which only hashes.
* per_file: 200 µs of Python a request, and 20 µs a file more than a bare one: 0.3 with one site, 0.7 with 18.
* Random access: a dictionary, one page of the file for each batch, a page for a row: below 1 ms in an open set. Opening
  reads 30 µs a shard and 1 µs a request.
* Sequentially 0.9 of cat, which waits for the same disk.

Goals: 0.85 for writing, 0.8 for per_file and for reading, milliseconds for random access.

Measured instead: see docs/performance.md. The disk and the page cache are faster than predicted, and the loop writes
one payload that stays in the processor's cache. So processor time decides where the disk is not the limit.

A virtual machine whose host takes free memory back writes five times as slowly to memory that it must ask for again,
whoever writes. So a turn writes little enough to need none, and there are many turns.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

import capflow
from capflow import limits
from capflow.capture.frame import Block, Frame, FrameHeader, Rank, RequestRows, Span
from capflow.capture.model import ModelInfo
from capflow.capture.result import RequestDone
from capflow.capture.site import Site
from capflow_consumers.filesystem.consumer import FilesystemConfig, FilesystemConsumer

HIDDEN = 640
MODEL_DTYPE = "bfloat16"


class Took(NamedTuple):
    """How long a run took, by the clock, and the time of the processor in this process, seconds."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Self:
        """Return the time now."""
        return cls(time.perf_counter(), time.process_time())

    def until_now(self) -> Took:
        """Return the time since then."""
        now = Took.now()
        return Took(now.wall_s - self.wall_s, now.cpu_s - self.cpu_s)


def frames(count: int, layers: int, tokens: int, payload: bytes | None = None) -> Iterator[tuple[Frame, RequestDone]]:
    """Yield requests, each as a frame with all of its rows, and its end; all share one payload.

    payload: rows `[layers, tokens, HIDDEN]` bfloat16; random bits by default.
    """
    sites = tuple(Site(layer, "post_block") for layer in range(layers))
    if payload is None:
        payload = np.random.default_rng(0).bytes(layers * tokens * HIDDEN * 2)
    for number in range(count):
        name = f"r{number}"
        rows = RequestRows(name, tokens, 0, tuple(range(tokens)))
        header = FrameHeader(
            engine="engine",
            boot="boot",
            rank=Rank(0, 0, 0),
            seq=number + 1,
            step=number,
            time_ns=0,
            dtype=MODEL_DTYPE,
            hidden_size=HIDDEN,
            requests=(rows,),
            blocks=(Block(sites, tokens, (Span(0, 0, tokens, 0),)),),
            payload_bytes=len(payload),
        )
        total = layers * tokens
        yield Frame(header, payload), RequestDone("engine", name, "stop", tokens, tokens, total, total, ())


def consumed(directory: Path, requests: list[tuple[Frame, RequestDone]], *, fsync: bool, **options: object) -> Took:
    """Return how long the consumer takes."""
    config = FilesystemConfig(root=str(directory), fsync=fsync, **options)  # type: ignore[arg-type]
    consumer = FilesystemConsumer(config)
    consumer.open(None)  # type: ignore[arg-type]
    sites = requests[0][0].header.blocks[0].sites
    consumer.on_session("engine", ModelInfo("model", len(sites), HIDDEN, MODEL_DTYPE, sites))
    begun = Took.now()
    results = []
    for frame, done in requests:
        consumer.on_frame(frame)
        results.append(consumer.on_request_done(done))
    consumer.close()
    took = begun.until_now()
    for result in results:
        assert isinstance(result, Future)
        assert result.result().status == "ok", result.result()
    return took


def plain(directory: Path, requests: list[tuple[Frame, RequestDone]], *, fsync: bool) -> Took:
    """Return how long a loop takes to write the requests' rows into one file."""
    fd = os.open(directory / "plain", os.O_WRONLY | os.O_CREAT)
    begun = Took.now()
    for frame, _ in requests:
        written = 0
        while written < len(frame.payload):
            written += os.write(fd, memoryview(frame.payload)[written:])
        if fsync:
            os.fdatasync(fd)
    took = begun.until_now()
    os.close(fd)
    return took


def bare(directory: Path, count: int, nbytes: int) -> Took:
    """Return how long it takes to open, write and rename `count` files."""
    body = bytes(nbytes)
    begun = Took.now()
    for number in range(count):
        fd = os.open(directory / f".{number}", os.O_WRONLY | os.O_CREAT)
        os.write(fd, body)
        os.close(fd)
        os.rename(directory / f".{number}", directory / f"{number}")  # noqa: PTH104  as bare as it gets
    return begun.until_now()


def turn(directory: Path, run: Callable[[Path], Took], *, keep: bool = False) -> Took:
    """Return how long a run takes in a directory of its own, with the disk at rest.

    keep: leave the files for the caller to remove.
    """
    os.sync()
    place = Path(tempfile.mkdtemp(dir=directory))
    try:
        return run(place)
    finally:
        if not keep:
            shutil.rmtree(place)


def compare(
    name: str, unit: str, amount: float, count: int, turns: int, runs: dict[str, Callable[[], Took]]
) -> dict[str, float]:
    """Print the rate of each run, its ratio to that of the first run, and its processor time; return the median times.

    A ratio is the median over the turns, because the two runs of one turn see the same machine.

    amount: how many units a run does.
    count: how many requests it writes or reads.
    """
    took: dict[str, list[Took]] = {label: [] for label in runs}
    for _ in range(turns):
        for label, run in runs.items():
            took[label].append(run())
    base = next(iter(took.values()))
    medians = {}
    for label, times in took.items():
        medians[label] = median = statistics.median(time.wall_s for time in times)
        ratio = statistics.median(one.wall_s / time.wall_s for one, time in zip(base, times, strict=True))
        cpu_us = statistics.median(time.cpu_s for time in times) / count * 1e6
        rates = sorted(amount / time.wall_s for time in times)
        print(
            f"{name:34} {label:10} {amount / median:8.0f} {unit:8} {ratio:5.2f}   {rates[0]:.0f}-{rates[-1]:.0f}"
            f"   {cpu_us:.0f} µs of processor a request",
            flush=True,
        )
    return medians


def writing(directory: Path, turns: int, megabytes: int) -> None:
    for layers, tokens in ((18, 160), (18, 2560)):
        nbytes = layers * tokens * HIDDEN * 2
        requests = list(frames(max(4, megabytes * limits.MIB // nbytes), layers, tokens))
        total = len(requests) * nbytes / 1e6
        for fsync in (True, False):
            runs = {"plain": lambda f=fsync, r=requests: turn(directory, lambda place: plain(place, r, fsync=f))}
            for layout in ("packed", "sharded"):
                runs[layout] = lambda f=fsync, x=layout, r=requests: turn(
                    directory, lambda place: consumed(place, r, fsync=f, layout=x)
                )
            name = f"write {nbytes / 1e6:.1f} MB a request" + (", synced" if fsync else "")
            compare(name, "MB/s", total, len(requests), turns, runs)


def small(directory: Path, turns: int) -> None:
    for layers, count in ((1, 1000), (18, 200)):
        requests = list(frames(count, layers, 1))
        files = count * (layers + 1)
        made = {"per_file": files}

        def write(place: Path, layout: str, requests: list[tuple[Frame, RequestDone]], made: dict[str, int]) -> Took:
            took = consumed(place, requests, fsync=False, layout=layout)
            made[layout] = sum(path.is_file() and not path.name.startswith(".") for path in place.rglob("*"))
            return took

        with tempfile.TemporaryDirectory(dir=directory) as kept:
            place = Path(kept)
            runs = {"bare": lambda p=place, n=files: turn(p, lambda d: bare(d, n, 512 + HIDDEN * 2 + 12), keep=True)}
            for layout in ("per_file", "packed", "sharded"):
                runs[layout] = lambda p=place, x=layout, r=requests, m=made: turn(
                    p, lambda d: write(d, x, r, m), keep=True
                )
            seconds = compare(f"{count} requests of {layers + 1} files", "files/s", files, count, turns, runs)
        for layout, number in made.items():
            print(f"{'  ' + layout:34} {number} files, {number / seconds[layout]:.0f} files/s of its own", flush=True)


class Ending:
    """A context of a hub that stops, and waits as long as it takes."""

    def left_s(self) -> float:
        """Return enough time for every upload."""
        return 600.0

    def working(self) -> None:
        """Take note of progress."""


def uploading(directory: Path, turns: int, megabytes: int, url: str) -> None:
    """Compare shards that stay in a directory with shards that are uploaded, until all have results and to the end."""
    requests = list(frames(max(4, megabytes * limits.MIB // (18 * 160 * HIDDEN * 2)), 18, 160))
    nbytes = sum(len(frame.payload) for frame, _ in requests)
    times: dict[str, list[tuple[float, float]]] = {"directory": [], "bucket": []}
    for _ in range(turns):
        for label, took in times.items():
            with tempfile.TemporaryDirectory(dir=directory) as place:
                root = f"{url.partition('?')[0]}/{Path(place).name}?{url.partition('?')[2]}".rstrip("?")
                options = {"staging": place, "root": root} if label == "bucket" else {"root": place}
                options |= {"layout": "sharded"}
                config = FilesystemConfig(shard_bytes=32 * limits.MIB, **options)  # type: ignore[arg-type]
                consumer = FilesystemConsumer(config)
                consumer.open(Ending())  # type: ignore[arg-type]
                sites = requests[0][0].header.blocks[0].sites
                consumer.on_session("engine", ModelInfo("model", len(sites), HIDDEN, MODEL_DTYPE, sites))
                os.sync()
                begun = time.perf_counter()
                results = []
                for frame, done in requests:
                    consumer.on_frame(frame)
                    results.append(consumer.on_request_done(done))
                for result in results:
                    assert isinstance(result, Future)
                    assert result.result().status == "ok"
                written = time.perf_counter() - begun
                consumer.close()
                took.append((written, time.perf_counter() - begun))
    for number, until in enumerate(("until all have results", "until the end")):
        local, bucket = (statistics.median(seconds[number] for seconds in took) for took in times.values())
        rates = f"{nbytes / 1e6 / local:.0f} MB/s in a directory, {nbytes / 1e6 / bucket:.0f} to a bucket"
        print(f"{until:24} {rates}, {local / bucket:.2f}", flush=True)


def drop(root: Path) -> None:
    """Drop a data set from the page cache."""
    for path in root.iterdir():
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def sequential(root: Path) -> Took:
    drop(root)
    begun = Took.now()
    seen = 0
    for capture in capflow.open(root):
        for site in capture.sites:
            rows = capture[site].rows
            np.bitwise_xor.reduce(rows.view(np.uint64), axis=None)
            seen += rows.nbytes
    took = begun.until_now()
    assert seen > 0
    return took


def cat(root: Path) -> Took:
    drop(root)
    begun = Took.now()
    subprocess.run(f"cat {root}/*.parquet > /dev/null", shell=True, check=True)  # noqa: S602  our own path
    return begun.until_now()


def reading(directory: Path, turns: int, megabytes: int) -> None:
    layers, tokens = 18, 160
    nbytes = layers * tokens * HIDDEN * 2
    root = Path(tempfile.mkdtemp(dir=directory))
    count = megabytes * limits.MIB // nbytes
    for begin in range(0, count, 64):  # one consumer for each part, so that not all are in memory
        batch = [(f, d) for f, d in frames(min(count, begin + 64), layers, tokens)][begin:]
        consumed(root, batch, fsync=False, layout="sharded")
    os.sync()
    shards = len(list(root.glob("*.parquet")))
    total = count * nbytes / 1e6
    runs = {"cat": lambda: cat(root), "capflow": lambda: sequential(root)}
    compare(f"read {total / 1e3:.1f} GB in {shards} shards", "MB/s", total, count, turns, runs)
    choose = np.random.default_rng(1)
    times: dict[str, list[float]] = {"open and one site": [], "one site, cold": [], "one site, cached": []}
    dataset = capflow.open(root)
    for _ in range(40):
        name, layer = f"r{choose.integers(count)}", int(choose.integers(layers))
        drop(root)
        begun = time.perf_counter()
        capflow.open(root)[name][layer, "post_block"].rows[-1].tobytes()
        times["open and one site"].append(time.perf_counter() - begun)
        drop(root)
        for label in ("one site, cold", "one site, cached"):
            begun = time.perf_counter()
            dataset[name][layer, "post_block"].rows.tobytes()
            times[label].append(time.perf_counter() - begun)
    for label, took in times.items():
        print(
            f"random access, {label:20} {statistics.median(took) * 1e3:8.2f} ms, at most {max(took) * 1e3:.1f} ms",
            flush=True,
        )
    shutil.rmtree(root)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--megabytes", type=int, default=120, help="that each turn writes")
    parser.add_argument("--set-megabytes", type=int, default=4000, help="of the set that is read")
    parser.add_argument("--only", choices=("write", "small", "read"), action="append")
    parser.add_argument("--bucket", help="measure only uploads, to this address: s3://BUCKET/PREFIX?endpoint=URL")
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    if args.bucket:
        uploading(args.directory, args.turns, args.megabytes, args.bucket)
        return
    wanted = args.only or ["write", "small", "read"]
    if "write" in wanted:
        writing(args.directory, args.turns, args.megabytes)
    if "small" in wanted:
        small(args.directory, args.turns)
    if "read" in wanted:
        reading(args.directory, max(3, args.turns // 2), args.set_megabytes)


if __name__ == "__main__":
    main()
