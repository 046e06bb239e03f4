"""The runs: one hub until it saturates, and the whole fleet while a hub dies."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from capflow import limits
from capflow.capture.frame import Frame
from capflow.protocol.routing import hub_of
from tests.fleet.hub import LEDGER, Ended, Given
from tests.fleet.workers import Fleet, boot_of
from tests.kit.frames import make_finished, make_frame

START_S = 60.0
# Positions of a request, two in each frame.
LENGTH, STEP = 8, 2
# The hub that dies is away for so long.
AWAY_S = 1.0


class Hub:
    """The process of a hub."""

    def __init__(self, address: str, directory: Path | None = None) -> None:
        self.address, self._directory = address, directory
        self._process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.fleet.hub", self.address]
        command += [] if self._directory is None else [str(self._directory)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def await_ready(self) -> None:
        """Wait until the hub listens."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "the hub did not start"

    def cpu_s(self) -> float:
        """Return the CPU seconds that the process has used."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def kill(self) -> None:
        """Kill the process, in whatever it does."""
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate()

    def restart(self) -> None:
        """Start a process at the same address, with the same directory."""
        self._process = self._started()

    def stop(self) -> None:
        """Stop the hub in order."""
        self._process.communicate()


@contextlib.contextmanager
def hubs(directory: Path, count: int, *, ledgers: bool = True) -> Iterator[list[Hub]]:
    """Run hubs; they are stopped in order at the end."""
    started: list[Hub] = []
    try:
        for number in range(count):
            home = directory / f"hub-{number}"
            home.mkdir(mode=0o700)
            started.append(Hub(f"ipc://{home}/s", home if ledgers else None))
        for hub in started:
            hub.await_ready()
        yield started
        for hub in started:
            hub.stop()
    except BaseException:
        for hub in started:
            hub.kill()
        raise


def turn_until(fleet: Fleet, condition: Callable[[], bool], limit_s: float, name: str) -> None:
    """Drive the fleet until a condition holds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{name} took more than {limit_s:g} s"
        fleet.turn(0.01)


# --- what one hub can take ---


class Load(NamedTuple):
    """A hub under load.

    seconds: from the first frame sent to the last one acknowledged.
    cpu_s: the CPU seconds that the hub used in this time.
    """

    sessions: int
    frames: int
    rows: int
    nbytes: int
    seconds: float
    cpu_s: float

    def line(self, copy_rate: float) -> str:
        """Return a row of the table."""
        frames, rows, nbytes = (each / self.cpu_s for each in (self.frames, self.rows, self.nbytes))
        return (
            f"| {self.sessions} | {self.nbytes // self.frames // limits.KIB} KiB | {frames:,.0f} | {rows:,.0f} | "
            f"{nbytes / 1e6:,.0f} | {nbytes / copy_rate:.1%} | {self.cpu_s / self.seconds:.0%} |"
        )


HEAD = "| sessions | payload of a frame | frames/s | rows/s | MB/s | of a copy | CPU |\n|---|---|---|---|---|---|---|"
"""The head of the table; rates are for each second of CPU time of the hub's process."""


def copy_rate(nbytes: int) -> float:
    """Return how many bytes a second of CPU time copies in memory, in pieces of `nbytes`."""
    source = [np.random.default_rng(n).integers(0, 255, nbytes, np.uint8) for n in range(max(2, 2**28 // nbytes // 8))]
    target = np.empty(nbytes, np.uint8)
    count, began = 0, time.process_time()
    while (took := time.process_time() - began) < 0.3:
        for each in source:
            np.copyto(target, each)
        count += len(source)
    return count * nbytes / took


def saturate(directory: Path, sessions: int, rows: int, hidden: int, frames: int) -> Load:
    """Send a hub frames as fast as it takes them; return its load."""
    with hubs(directory, 1, ledgers=False) as (hub,):
        fleet = Fleet(sessions, [hub.address], hidden)
        turn_until(fleet, lambda: fleet.connected, START_S, "connecting")
        each = -(-frames // sessions)
        payload = np.zeros(rows * hidden * 4, np.uint8)
        for worker in range(sessions):
            made = make_frame([("r", 4, 0, rows)], hidden=hidden, engine=f"engine-{worker}", boot=boot_of(worker, 0))
            sealed = []
            for seq in range(1, each + 1):
                request = msgspec.structs.replace(made.header.requests[0], start=(seq - 1) * rows)
                span = made.header.blocks[0].spans[0]._replace(start=(seq - 1) * rows)
                block = made.header.blocks[0]._replace(spans=(span,))
                header = msgspec.structs.replace(made.header, seq=seq, requests=(request,), blocks=(block,))
                sealed.append((seq, Frame.seal(header, payload).encode()))
            fleet.push_sealed(0, worker, sealed)
        used, began = hub.cpu_s(), time.monotonic()
        turn_until(fleet, lambda: not fleet.unacked, 600.0, "sending")
        seconds, used = time.monotonic() - began, hub.cpu_s() - used
        fleet.leave()
    count = each * sessions
    return Load(sessions, count, count * rows, count * len(payload), seconds, used)


# --- the fleet, of which a hub dies ---


class Outcome(NamedTuple):
    """What became durable of the requests of a fleet.

    rows: rows in the ledgers.
    again: frames that the hub gave its consumer again after it died.
    faults: rows that were lost, that came twice, or that another hub has, and requests without an end; by kind.
    """

    requests: int
    rows: int
    again: int
    faults: Counter[str]


def live(
    directory: Path, *, workers: int, hubs_count: int, requests: int, frames_s: float, kill: int | None = 0
) -> Outcome:
    """Run requests on each worker, share them out among the hubs, and kill a hub in the middle; read the ledgers.

    requests: of each worker.
    frames_s: how many frames all workers send in a second.
    kill: the number of the hub that is killed and comes back; None kills none.
    """
    with hubs(directory, hubs_count) as running:
        fleet = Fleet(workers, [hub.address for hub in running])
        turn_until(fleet, lambda: fleet.connected, START_S + workers * hubs_count / 100, "connecting")
        killed_at: float | None = None
        restarted = kill is None
        steps = [(n, p) for n in range(requests) for p in range(0, LENGTH, STEP)]
        frames = (
            (worker, f"w{worker}-r{number}", start, start + STEP == LENGTH)
            for number, start in steps
            for worker in range(workers)
        )
        began, total = time.monotonic(), workers * len(steps)
        for sent, (worker, name, start, ends) in enumerate(frames, 1):
            while (now := time.monotonic()) < began + sent / frames_s:
                fleet.turn(0.002)
            if not sent % 64:
                fleet.turn()
            hub = hub_of(name, hubs_count)
            finished = [make_finished(name, STEP, LENGTH)] if ends else []
            made = make_frame(
                [(name, STEP, start, STEP)], finished=finished, engine=f"engine-{worker}", boot=boot_of(worker, hub)
            )
            fleet.push(hub, worker, made)
            if kill is not None and killed_at is None and sent >= total // 3:
                running[kill].kill()
                killed_at = now
            if not restarted and killed_at is not None and now > killed_at + AWAY_S:
                assert kill is not None
                running[kill].restart()
                restarted = True
        if not restarted and kill is not None:
            running[kill].restart()
        turn_until(fleet, lambda: fleet.connected and not fleet.unacked, 600.0, "the rest")
        if kill is not None:
            running[kill].await_ready()
        fleet.leave()
    return read(directory, workers, hubs_count, requests)


def read(directory: Path, workers: int, hubs_count: int, requests: int) -> Outcome:
    """Return what is in the ledgers of a fleet's hubs."""
    faults: Counter[str] = Counter()
    places: Counter[tuple[str, int]] = Counter()
    ends: Counter[str] = Counter()
    again = 0
    for hub in range(hubs_count):
        frames: dict[tuple[str, int], set[Given]] = {}
        for line in (directory / f"hub-{hub}" / LEDGER).read_bytes().splitlines():
            if line.startswith(b'["Ended"'):
                ended = msgspec.json.decode(line, type=Ended)
                faults["requests that lack rows"] += ended.rows != ended.promised or ended.rows != LENGTH
                ends[ended.request] += 1
                continue
            given = msgspec.json.decode(line, type=Given)
            faults["rows at the wrong hub"] += given.rows * (hub_of(given.request, hubs_count) != hub)
            # A consumer is given a frame again if the hub died before it knew that the consumer has it.
            again += given in frames.setdefault((given.boot, given.seq), set())
            frames[given.boot, given.seq].add(given)
        for each in frames.values():
            for given in each:
                places.update((given.request, given.start + n) for n in range(given.rows))
    names = [f"w{worker}-r{number}" for worker in range(workers) for number in range(requests)]
    for name in names:
        counts = [places[name, position] for position in range(LENGTH)]
        faults["rows lost"] += counts.count(0)
        faults["rows twice"] += sum(count > 1 for count in counts)
        faults["requests without an end"] += not ends[name]
    faults["rows of nobody"] += sum(places.values()) - sum(places[name, p] for name in names for p in range(LENGTH))
    return Outcome(len(names), sum(places.values()), again, +faults)
