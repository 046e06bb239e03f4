"""How fast a replay delivers frames to a consumer, against only reading the same frames.

    PYTHONPATH=.:consumers python3 benchmarks/replay.py --directory DISK

A recording (`capflow record`) and a data set (the `filesystem` consumer, `packed`) hold the same requests: a prompt as
one step, each generated token as one. Bare: every frame of `recording.read` or `entries_of` is read in this thread.
Replay: every frame also goes through a hub of this process to a consumer that does nothing, until the consumer has had
the last. The files are in the page cache. Both run with the settings of `capflow replay` for the collector of cycles
and for freed memory. The two take turns; a line has the medians, and their ratio by the clock and by CPU time.

Predicted, on two cores: a frame of one token at 18 sites takes 15 µs to read from a recording, and costs the hub and
the threads 40 beside that, where it was encoded, decoded and checked twice before, for 80. The goal is 0.5 by CPU time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

import capflow
from capflow import limits
from capflow.capture.frame import Block, Finished, Frame, FrameHeader, Rank, RequestRows, Span, rows_of
from capflow.capture.model import ModelInfo
from capflow.capture.result import RequestDone
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow.cli.hub.running import rare_collections
from capflow.plugins.configure import ConfiguredConsumer
from capflow.plugins.consumer import Consumer
from capflow.protocol import recording
from capflow.protocol.recording import Entry, RecordedEngine, Recorder
from capflow.replay.dataset import entries_of
from capflow.replay.player import Replay, ReplayPace
from capflow.system import heap
from capflow.testing import MemoryHub
from capflow_consumers.filesystem.consumer import FilesystemConfig, FilesystemConsumer

HIDDEN, LAYERS = 640, 18
SITES = tuple(Site(layer, "post_block") for layer in range(LAYERS))
MODEL = ModelInfo("bench", LAYERS, HIDDEN, "bfloat16", SITES)
# Tokens of a prompt, and steps of a request.
SHAPES = {"prompts of 160 tokens": (160, 1), "answers of 160 tokens": (1, 160)}


class Null(Consumer):
    """Counts rows."""

    name = "null"

    def __init__(self) -> None:
        super().__init__(None)
        self.rows = 0

    def spec(self) -> CaptureSpec:
        """Return every layer."""
        return CaptureSpec({"post_block": "all"})

    def on_frame(self, frame: Frame) -> None:
        """Count."""
        self.rows += rows_of(frame.header).total()


def entries(prompt: int, steps: int, megabytes: int) -> Iterator[Entry]:
    """Yield the entries of requests, one request after another."""
    yield RecordedEngine("engine", MODEL)
    tokens = prompt + steps - 1
    rows = tokens * LAYERS
    random = np.random.default_rng(0)
    seq = 0
    for number in range(max(1, megabytes * limits.MIB // (rows * HIDDEN * 2))):
        name = f"r{number}"
        for step in range(steps):
            seq += 1
            start, count = (0, prompt) if step == 0 else (prompt + step - 1, 1)
            finished = (Finished(name, "stop", prompt, tokens, rows),) if step == steps - 1 else ()
            header = FrameHeader(
                engine="engine", boot="boot", rank=Rank(0, 0, 0), seq=seq, step=seq, time_ns=seq,
                dtype="bfloat16", hidden_size=HIDDEN,
                requests=(RequestRows(name, prompt, start, tuple(range(count))),),
                blocks=(Block(SITES, count, (Span(0, start, count, 0),)),), finished=finished,
            )  # fmt: skip
            yield Frame.seal(header, random.bytes(LAYERS * count * HIDDEN * 2))
        yield RequestDone(
            "engine", name, "stop", prompt, tokens, rows, rows, (), (Finished(name, "stop", prompt, tokens, rows),)
        )


def keep(directory: Path, entries: Iterable[Entry]) -> tuple[Path, Path]:
    """Write entries as a recording and as a data set; return where both are."""
    root = directory / "rows"
    files = FilesystemConsumer(FilesystemConfig(str(root), fsync=False))
    files.open(None)  # type: ignore[arg-type]
    with Recorder(directory / "recording") as recorder:
        for entry in entries:
            match entry:
                case RecordedEngine(name, model):
                    recorder.engine(name, model)
                    files.on_session(name, model)
                case Frame():
                    recorder.frame(entry)
                    files.on_frame(entry)
                case RequestDone():
                    recorder.done(entry, sync=False)
                    files.on_request_done(entry)
    files.close()
    return directory / "recording", root


def rows_in(entries: Iterable[Entry]) -> int:
    return sum(rows_of(entry.header).total() for entry in entries if isinstance(entry, Frame))


def replayed(entries: Iterable[Entry]) -> int:
    null = Null()
    with MemoryHub(ConfiguredConsumer.of(null, policy="block")) as hub:
        Replay(hub.hub, ReplayPace()).run(entries)
        assert hub.stop()
    return null.rows


def measure(name: str, turns: int, source: Callable[[], Iterable[Entry]]) -> None:
    """Print a line of the table."""
    took: dict[str, list[float]] = {"bare": [], "replay": []}
    busy: dict[str, list[float]] = {"bare": [], "replay": []}
    rows: set[int] = set()
    frames = sum(isinstance(entry, Frame) for entry in source())
    for _ in range(turns):
        for label, run in (("bare", rows_in), ("replay", replayed)):
            begun, used = time.perf_counter(), time.process_time()
            rows.add(run(source()))
            took[label].append(time.perf_counter() - begun)
            busy[label].append(time.process_time() - used)
    assert len(rows) == 1, rows
    bare, replay = (statistics.median(took[label]) for label in ("bare", "replay"))
    megabytes = rows.pop() * HIDDEN * 2 / 1e6
    cells = [f"{frames / bare:,.0f}", f"{frames / replay:,.0f}", f"{megabytes / replay:,.0f}"]
    for seconds in (took, busy):
        ratios = [b / r for b, r in zip(seconds["bare"], seconds["replay"], strict=True)]
        cells += [f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}-{max(ratios):.2f}"]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="where to write")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=200, help="of rows in each")
    arguments = parser.parse_args()
    print("| what | frames/s read | frames/s replayed | MB/s | ratio | spread | by CPU time | spread |")
    print("|---|---|---|---|---|---|---|---|")
    for shape, (prompt, steps) in SHAPES.items():
        with rare_collections(), heap.trimmed(), tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            kept, root = keep(Path(directory), entries(prompt, steps, arguments.megabytes))
            measure(f"recording, {shape}", arguments.turns, lambda kept=kept: recording.read(kept))
            measure(f"data set, {shape}", arguments.turns, lambda root=root: entries_of(capflow.open(root)))


if __name__ == "__main__":
    main()
