"""The cost of the spool over plain writing: its append against a `write` loop with the same fsync policy.

    PYTHONPATH=. python3 benchmarks/spool.py --directory DISK

Both write the same records into files of 64 MiB. In both, a thread syncs whatever is not synced yet, 5 ms after its
last sync; writers wait for it when 64 MiB are not synced. The name of a new file is synced with its first bytes. The
clock runs from the first record until all are durable. The two take turns. Each line has the medians of their rates and
the ratio of the medians. After each turn the spool's records are read back and compared.

Predicted: a record costs the spool a hash (34 GB/s), a header, a lock and a wake-up, some 15 µs, beside a copy into the
    page cache of about 20 µs for 64 KiB and 300 µs for 1 MiB. With the disk at 1.3 GB/s it is hidden behind the sync at
    both sizes: 0.9 at 64 KiB and 0.97 at 1 MiB. Goal: 0.8.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path

from capflow import limits
from capflow.buffers.spool import Record, Spool

# 65,000 bytes fill no whole pages, as records mostly do; `write` is slower with them too.
SIZES = (65_000, 64 * limits.KIB, limits.MIB)


class Plain:
    """A write loop, its files, and the thread that syncs them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.names = os.open(directory, os.O_RDONLY)
        self.changed = threading.Condition()
        # Files that are not wholly synced, the newest last.
        self.files: list[int] = []
        self.made = 0
        # The size of the newest file.
        self.size = 0
        self.written = 0
        self.synced = 0
        self.ended = False
        # Set at the end.
        self.rest = threading.Event()
        self.thread = threading.Thread(target=self.sync)
        self.thread.start()

    def write(self, record: bytes) -> None:
        """Write a record; wait while too many bytes are not synced."""
        with self.changed:
            self.changed.wait_for(lambda: self.written - self.synced + len(record) <= limits.SPOOL_UNSYNCED_BYTES_MAX)
            if not self.files or self.size + len(record) > limits.SEGMENT_BYTES_MAX:
                self.files.append(os.open(self.directory / str(self.made), os.O_CREAT | os.O_WRONLY))
                self.made += 1
                self.size = 0
            os.write(self.files[-1], record)
            self.size += len(record)
            self.written += len(record)
            self.changed.notify_all()

    def sync(self) -> None:
        """Sync until the end."""
        named = 0  # files whose names are synced
        while True:
            self.rest.wait(limits.SYNC_PAUSE_S)
            with self.changed:
                self.changed.wait_for(lambda: self.written > self.synced or self.ended)
                target, files = self.written, list(self.files)
                if self.ended and target == self.synced:
                    return
            for file in files:
                os.fdatasync(file)
            if self.made > named:
                named = self.made
                os.fsync(self.names)
            with self.changed:
                for file in files[:-1]:
                    os.close(file)
                    self.files.remove(file)
                self.synced = target
                self.changed.notify_all()

    def close(self) -> None:
        """End the thread."""
        with self.changed:
            self.ended = True
            self.changed.notify_all()
        self.rest.set()
        self.thread.join()
        os.close(self.files[-1])
        os.close(self.names)


def plain(directory: Path, record: bytes, count: int) -> float:
    writer = Plain(directory)
    begun = time.perf_counter()
    for _ in range(count):
        writer.write(record)
    with writer.changed:
        writer.changed.wait_for(lambda: writer.synced == writer.written)
    took = time.perf_counter() - begun
    writer.close()
    return took


def spooled(directory: Path, record: bytes, count: int) -> float:
    with Spool(directory, bytes_max=2 * count * len(record), segment_bytes=limits.SEGMENT_BYTES_MAX) as spool:
        begun = time.perf_counter()
        for _ in range(count):
            spool.append(b"", record)
        assert spool.wait_synced(count)
        took = time.perf_counter() - begun
        for number in range(1, count + 1):
            entry = spool.read()
            assert isinstance(entry, Record)
            assert (entry.id, entry.body) == (number, record)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description="What the spool costs over a plain write loop.")
    parser.add_argument(
        "--directory", default=tempfile.gettempdir(), help="where to write (default: the temporary one)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="turns of each (default: 9)")
    parser.add_argument("--mib", type=int, default=256, help="MiB written in each turn (default: 256)")
    arguments = parser.parse_args()
    print("| record | write MB/s | spool MB/s | ratio | goal |")
    print("|---|---|---|---|---|")
    for size in SIZES:
        record, count = os.urandom(size), arguments.mib * limits.MIB // size
        took: dict[str, list[float]] = {"plain": [], "spool": []}
        for turn in range(arguments.rounds + 1):  # the first warms up
            for name, run in (("plain", plain), ("spool", spooled)):
                directory = Path(tempfile.mkdtemp(dir=arguments.directory))
                seconds = run(directory, record, count)
                shutil.rmtree(directory)
                if turn:
                    took[name].append(seconds)
        rates = {name: count * size / 1e6 / statistics.median(seconds) for name, seconds in took.items()}
        ratio = rates["spool"] / rates["plain"]
        print(
            f"| {size / limits.KIB:.1f} KiB | {rates['plain']:.0f} | {rates['spool']:.0f} | {ratio:.2f} | 0.8 |",
            flush=True,
        )


if __name__ == "__main__":
    main()
