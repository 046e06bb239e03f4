"""Consumers and disks that fail: each ends as the documentation says, and the others notice nothing."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import pytest

from capflow import limits
from capflow.buffers.spool import Files, Spool
from capflow.errors import CapflowError
from capflow.hub.hub import Hub
from capflow.transport.client import Client
from capflow.transport.links.worker import WorkerLink
from capflow.transport.outbox import Outbox
from tests.kit.disks import mounted
from tests.kit.exchanges import Desk
from tests.kit.frames import make_finished, make_frame, make_hello, make_model
from tests.kit.hubs import Recorder, address, configured, running_hub, worker_link
from tests.kit.processes.faults import Bad
from tests.kit.sources import PROCESSES
from tests.kit.waiting import eventually

__all__ = ["address"]

CHILD = PROCESSES / "faults.py"
HIDDEN = 4096
ROWS = 4  # in a frame: 64 KiB
QUEUE_BYTES = 16 * limits.MIB
MORE_BYTES_MAX = 64 * limits.MIB
STOP_S_MAX = 10.0
TURN = 1000  # frames, a quarter of a second; the consumer that sleeps takes twenty seconds for them
PAIRS_MIN = 12  # of turns, until something is known
PAIRS_MAX = {"drop": 240, "spill": 28}  # an inbox holds 32,768 frames
RATE_MIN = 0.95
FAILING_FRAME_S_MAX = 0.000_05  # of the processor; about 0.000_007 on two slow cores
SURE_SIGMA = 3.3  # about once in a thousand a median is outside its bounds
KINDS = ("sleeps", "raises", "hangs", "dies")


class HubChild:
    """A hub in a process of its own, and a worker's link to it."""

    def __init__(self, directory, kind, policy="drop"):
        self.address = f"ipc://{directory}/{kind}"
        command = [sys.executable, CHILD, self.address, kind, policy, str(QUEUE_BYTES), str(directory / "spool")]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "ready\n"
        hello = make_hello(model=make_model(1, HIDDEN))
        self.link = WorkerLink(self.address, hello, outbound_bytes_max=QUEUE_BYTES)
        self.link.start()
        assert self.link.wait_welcome(20)
        self.client = Client(self.address, 20)
        self.resident = self.memory("VmRSS")
        # The frames sent.
        self.sent = 0

    def memory(self, item):
        """Return the bytes of memory that the hub has, or had at most (`VmHWM`)."""
        report = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line for line in report.splitlines() if line.startswith(item)).split()[1]) * limits.KIB

    def send(self, count):
        """Send frames of one request and wait until the hub acknowledged them; return how many seconds it took."""
        steps = range(self.sent, self.sent + count)
        return self.send_all(
            [make_frame([("r1", ROWS, step * ROWS, ROWS)], hidden=HIDDEN, step=step) for step in steps]
        )

    def send_all(self, frames):
        """Send these as `send` does."""
        self.sent += len(frames)
        begun = time.monotonic()
        for frame in frames:
            assert self.link.send(frame.header, frame.payload) is None
        eventually(lambda: not self.link.counters["unacked_frames"] and not self.link.counters["queued_bytes"], 60)
        return time.monotonic() - begun

    def results(self, wait=True):
        """Return what the consumers say of the request."""
        return self.client.results(["r1"], wait=wait, timeout=20)["r1"]

    def end_request(self):
        rows = self.sent * ROWS
        end = make_frame((), finished=[make_finished("r1", ROWS, rows, rows=rows)], hidden=HIDDEN, step=self.sent)
        assert self.link.send(end.header, end.payload) is None

    def status(self, consumer):
        return self.client.status()["consumers"][consumer]

    def stop(self):
        """Stop the hub; return how long that took, as it says and until its process was gone."""
        begun = time.monotonic()
        self.process.terminate()
        message = float(self.process.stdout.readline())
        assert self.process.wait(20) == 0
        return message, time.monotonic() - begun

    def close(self):
        self.client.close()
        self.link.close(0.2)
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def hub_child():
    """Start hubs, each with a consumer that fails in a way."""
    with contextlib.ExitStack() as stack:

        def start(kind, **kwargs):
            directory = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cf")))
            child = HubChild(directory, kind, **kwargs)
            stack.callback(child.close)
            return child

        yield start


@pytest.mark.parametrize("kind", KINDS)
def test_a_consumer_that_fails_costs_its_own_rows_and_nobody_elses(hub_child, kind):
    """The frames exceed its queue: its losses are counted, the other has all rows, memory and the end are bounded."""
    hub = hub_child(kind)
    for _ in range(4):
        hub.send(QUEUE_BYTES // (HIDDEN * 4 * ROWS) // 2)
    hub.end_request()
    eventually(lambda: hub.results(wait=False)["good"].status == "ok")
    assert hub.status("good")["rows"] == hub.sent * ROWS
    if kind != "hangs":
        eventually(lambda: hub.results(wait=False)["bad"].status != "pending")
    bad, result = hub.status("bad"), hub.results(wait=False)["bad"]
    lost = bad["dropped_rows"].get("consumer_queue_full", 0)
    if kind == "sleeps":
        assert result.status == "partial_error"
        assert [(each.rows, each.reason) for each in result.dropped] == [(lost, "consumer_queue_full")]
        assert bad["rows"] + lost == hub.sent * ROWS
    elif kind == "hangs":
        assert result.status == "pending"
        assert bad["frames"] == 0
    else:
        assert result.status == "error"
        assert {"raises": "ValueError: no", "dies": "SystemExit: no more"}[kind] in result.error
        assert bad["errors"] == bad["frames"]
        assert "failed at each of its last" in bad["trouble"]
        assert bad["rows"] + lost == hub.sent * ROWS
    assert lost > 0 or kind in ("raises", "dies")
    assert bad["queue_bytes_peak"] <= QUEUE_BYTES
    assert hub.memory("VmHWM") - hub.resident <= 2 * QUEUE_BYTES + MORE_BYTES_MAX
    message, took = hub.stop()
    assert message <= took <= STOP_S_MAX


@pytest.mark.parametrize("kind", KINDS)
def test_a_consumer_that_fails_and_spills_loses_nothing_that_it_did_not_refuse(hub_child, kind):
    hub = hub_child(kind, policy="spill")
    for _ in range(4):
        hub.send(QUEUE_BYTES // (HIDDEN * 4 * ROWS) // 2)
    hub.end_request()
    eventually(lambda: hub.results(wait=False)["good"].status == "ok")
    assert hub.status("good")["rows"] == hub.sent * ROWS
    if kind == "raises":
        eventually(lambda: hub.results(wait=False)["bad"].status == "error")
        assert (
            hub.status("bad")["errors"] == hub.status("bad")["dead_letters"]["letters"] - 1 == hub.sent
        )  # and the end
    else:
        assert hub.status("bad")["frames"] < hub.sent
        assert hub.results(wait=False)["bad"].status == "pending"
    assert hub.status("bad")["dropped_rows"] == {}
    assert hub.memory("VmHWM") - hub.resident <= 2 * QUEUE_BYTES + MORE_BYTES_MAX
    assert max(hub.stop()) <= STOP_S_MAX


@pytest.mark.parametrize("kind", ["raises", "dies"])
def test_a_frame_that_fails_takes_the_lane_little_time(kind, monkeypatch):
    """It is processor time, so other load does not count. A log line for each frame would take ten times as much."""
    monkeypatch.setattr(limits, "RETRY_S_MIN", 0.001)
    desk = Desk(Bad(kind), policy="drop")
    desk.hello(b"w", model=make_model(1, HIDDEN))
    (lane,) = desk.lanes
    frames = [
        make_frame([("r1", ROWS, step * ROWS, ROWS)], hidden=HIDDEN, step=step, seq=step + 1) for step in range(600)
    ]
    took_s = []
    for batch in (frames[begin : begin + 100] for begin in range(0, len(frames), 100)):
        for frame in batch:
            desk.say(b"w", frame)
        items = list(iter(lambda: lane.queue.get(0), None))
        begun = time.thread_time()
        for item in items:
            lane._safely_handle(item)
        took_s.append((time.thread_time() - begun) / len(items))
    assert lane.errors == len(frames)
    assert min(took_s) < FAILING_FRAME_S_MAX


def bounds_of_median(numbers):
    """Return between which two of some numbers the median lies of what they are samples of, whatever that is like."""
    ordered, half = sorted(numbers), SURE_SIGMA * math.sqrt(len(numbers)) / 2
    middle = (len(numbers) - 1) / 2
    return ordered[max(0, math.floor(middle - half))], ordered[min(len(numbers) - 1, math.ceil(middle + half))]


def rate_beside(hub_child, kind, policy, seconds):
    """Return between which bounds the rate of the others beside a consumer of this kind is, over that beside one that
    does well, and the first hub.

    Both as fast as they can, in turns, each first in every other. What else the machine does slows either turn of a
    pair: so the bounds are those of the median of the ratios, and measuring ends when they are on one side of
    `RATE_MIN`.
    """
    bad, well = hub_child(kind, policy=policy), hub_child("takes", policy=policy)
    frames = [make_frame([("r1", ROWS, step * ROWS, ROWS)], hidden=HIDDEN, step=step) for step in range(100)]
    frames *= TURN // len(frames)
    for hub in (bad, well):
        hub.send_all(frames)  # whatever is done once
    ratios = []
    low, high = 0.0, math.inf
    begun = time.monotonic()
    while time.monotonic() - begun < seconds and len(ratios) < PAIRS_MAX[policy]:
        took = {hub: hub.send_all(frames) for hub in ((bad, well) if len(ratios) % 2 else (well, bad))}
        ratios.append(took[well] / took[bad])
        low, high = bounds_of_median(ratios)
        if len(ratios) >= PAIRS_MIN and not low < RATE_MIN <= high:
            break
    print(f"{kind}, {policy}: {statistics.median(ratios):.3f}, {low:.3f} to {high:.3f}, {len(ratios)} pairs of turns")
    return low, high, bad


@pytest.mark.long
@pytest.mark.parametrize("policy", ["drop", "spill"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_others_keep_their_rate_beside_a_consumer_that_fails(hub_child, kind, policy):
    """At most a minute of turns; memory does not grow meanwhile."""
    _, high, bad = rate_beside(hub_child, kind, policy, 60)
    assert bad.memory("VmHWM") - bad.resident <= 2 * QUEUE_BYTES + MORE_BYTES_MAX
    assert max(bad.stop()) <= STOP_S_MAX
    assert high >= RATE_MIN


@pytest.mark.long
@pytest.mark.parametrize("kind", ["hogs", "hogs_a_little"])
def test_a_consumer_that_costs_the_others_something_would_be_noticed(hub_child, kind):
    _, high, _ = rate_beside(hub_child, kind, "drop", 60)
    assert high < RATE_MIN


def test_a_hub_whose_consumers_hang_stops_in_time_however_long_it_may_drain(address, monkeypatch):
    monkeypatch.setattr(limits, "HANG_S_MAX", 0.5)
    consumers = [Recorder("first", held=True), Recorder("second", held=True)]
    hub = Hub(str(address), [configured(consumer) for consumer in consumers])
    hub.start()
    with worker_link(address) as link:
        frame = make_frame()
        assert link.send(frame.header, frame.payload) is None
        for consumer in consumers:
            assert consumer.waiting.wait(20)
        begun = time.monotonic()
        assert not hub.stop(60)
        assert time.monotonic() - begun < 30
    for consumer in consumers:
        consumer.go.set()


class Failing(Files):
    """A disk whose syncs fail until told otherwise."""

    fails = False

    def fdatasync(self, fd):
        if self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().fdatasync(fd)


@contextlib.contextmanager
def spilling(address, directory, files=None, **kwargs):
    """Run a worker's link that has met a hub which is gone now, so that it spills."""
    hello = make_hello()
    outbox = Outbox.of(directory, hello, limits.SPOOL_BYTES_DEFAULT)
    if files is not None:
        outbox._spool = Spool(
            outbox.directory, bytes_max=limits.SPOOL_BYTES_DEFAULT, files=files, unsynced_bytes_max=20_000
        )
    link = WorkerLink(str(address), hello, policy="spill", outbox=outbox, fallback="drop", **kwargs)
    link.start()
    try:
        with running_hub(address, Recorder()):
            assert link.wait_welcome(20)
        eventually(lambda: not link.connected)
        yield link
    finally:
        link.close(0.2)


def send(link, count, first=0):
    """Send frames of four rows; return why they were not taken."""
    frames = [make_frame([("r1", 4, step * 4, 4)], step=step) for step in range(first, first + count)]
    return [link.send(frame.header, frame.payload) for frame in frames]


def test_a_worker_whose_disk_is_full_drops_counts_and_goes_on(address, tmp_path):
    with mounted(tmp_path, "512k"), spilling(address, tmp_path) as link:
        message = send(link, 3000)
        taken = message.count(None)
        assert set(message) == {None, "disk_full"}
        assert 200 < taken < 2500
        assert link.counters["dropped_frames"] == {"disk_full": 3000 - taken}
        consumer = Recorder()
        with running_hub(address, consumer):
            eventually(lambda: len(consumer.seqs) == taken)
            eventually(lambda: link.outbox.unacknowledged == 0)
            assert send(link, 5, first=3000) == [None] * 5
            eventually(lambda: len(consumer.seqs) == taken + 5)
        assert consumer.rows["r1"] == 4 * (taken + 5)


def test_a_worker_whose_syncs_fail_drops_counts_and_loses_nothing_that_it_took(address, tmp_path):
    files = Failing()
    with spilling(address, tmp_path, files) as link:
        assert send(link, 20) == [None] * 20
        files.fails = True
        message = send(link, 200, first=20)
        taken = message.count(None)
        assert set(message) == {None, "disk_failed"}
        assert taken < 100
        eventually(lambda: link.counters["spool"]["failures"])
        files.fails = False
        consumer = Recorder()
        with running_hub(address, consumer):
            eventually(lambda: len(consumer.seqs) == 20 + taken)
            assert consumer.rows["r1"] == 4 * (20 + taken)
            eventually(lambda: link.outbox.unacknowledged == 0)


def test_a_worker_on_a_read_only_disk_does_not_start(address, tmp_path):
    with mounted(tmp_path, "512k"):
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        hello = make_hello()
        outbox = Outbox.of(tmp_path, hello, limits.SPOOL_BYTES_DEFAULT)
        with pytest.raises(CapflowError, match="cannot be used: got Read-only file system"):
            WorkerLink(str(address), hello, policy="spill", outbox=outbox).start()
