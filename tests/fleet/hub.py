"""A hub of the fleet: `python -m tests.fleet.hub ADDRESS [DIRECTORY]`, until its standard input ends.

With a directory, its consumer writes a ledger of the frames that it was given, and has an inbox. Without, its consumer
does nothing: the hub alone is measured.
"""

from __future__ import annotations

import logging
import resource
import sys
from pathlib import Path

import msgspec

from capflow.capture.frame import Frame
from capflow.capture.result import CaptureResult, RequestDone
from capflow.capture.spec import CaptureSpec
from capflow.cli.hub.running import rare_collections
from capflow.hub.hub import Hub
from capflow.plugins.configure import ConfiguredConsumer
from capflow.plugins.consumer import Consumer
from tests.kit.frames import assert_rows

LEDGER = "ledger.jsonl"


class Given(msgspec.Struct, frozen=True, array_like=True):
    """Rows that the consumer was given: of which frame, and of which request from position `start` on."""

    boot: str
    seq: int
    request: str
    start: int
    rows: int


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The end of a request, with the rows that were promised and the rows that came."""

    request: str
    promised: int
    rows: int


class Null(Consumer):
    """Takes every row and does nothing."""

    name = "null"

    def __init__(self) -> None:
        super().__init__(None)

    def spec(self) -> CaptureSpec:
        """Ask for everything."""
        return CaptureSpec({"post_block": "all"})

    def on_frame(self, frame: Frame) -> None:
        """Do nothing."""


class Ledger(Null):
    """Checks every row and writes down what it was given, before the hub may forget it."""

    name = "ledger"

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("ab")

    def on_frame(self, frame: Frame) -> None:
        """Write the rows of each request down."""
        boot, seq = frame.header.boot, frame.header.seq
        lines = [Given(boot, seq, c.request.id, c.start, assert_rows(c)) for c in frame.chunks()]
        self._write(lines)

    def on_request_done(self, done: RequestDone) -> CaptureResult | None:
        """Write the end down."""
        self._write([Ended(done.request, done.rows_promised, done.rows)])
        return None

    def _write(self, lines: list[Given] | list[Ended]) -> None:
        self._file.write(msgspec.json.Encoder().encode_lines(lines))
        self._file.flush()


def main() -> None:
    """Run the hub; print a line when it listens, and the CPU seconds that it has used for each line read."""
    # Of a thousand sessions that come and go, only errors are worth a line.
    logging.basicConfig(level=logging.ERROR)
    address, *directory = sys.argv[1:]
    if directory:
        home = Path(directory[0])
        consumer = ConfiguredConsumer.of(Ledger(home / LEDGER), policy="spill", spool_dir=home / "spool")
    else:
        consumer = ConfiguredConsumer.of(Null(), policy="block")
    with rare_collections(), Hub(address, [consumer]):
        print("ready", flush=True)
        for _ in sys.stdin:
            used = resource.getrusage(resource.RUSAGE_SELF)
            print(used.ru_utime + used.ru_stime, flush=True)


if __name__ == "__main__":
    main()
