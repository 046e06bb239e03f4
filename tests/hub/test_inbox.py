"""Inboxes: their owners, the files beside them, and their frames when the disk fails."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import threading
import time
from collections import Counter

import pytest

from capflow import limits
from capflow.buffers.policy import WhenFull
from capflow.buffers.queue import ByteQueue
from capflow.buffers.spool import Files, FullError, Spool, heads
from capflow.buffers.spool.report import in_use
from capflow.capture.frame import Frame, Rank
from capflow.capture.result import CaptureResult
from capflow.errors import CapflowError
from capflow.hub.hub import Hub
from capflow.hub.lanes import inbox as inboxes
from capflow.hub.lanes.inbox import Gone, Inbox, Known, read_head
from capflow.hub.lanes.inbox_requests import requests_in
from capflow.hub.lanes.writer import InboxWriter, QueuedFrame
from capflow.plugins.configure import ConfiguredConsumer, Spill
from tests.kit.disks import mounted
from tests.kit.frames import make_finished, make_frame, make_hello, make_model
from tests.kit.hubs import Later, Recorder, address, configured, running_hub, worker_link
from tests.kit.spills import ROWS, Sender, once, spills, waiting
from tests.kit.waiting import eventually

__all__ = ["address", "spills"]


def told(done):
    """Return how many rows of a request were lost, by reason."""
    return {dropped.reason: dropped.rows for dropped in done.dropped}


def said(caplog, event):
    return [record for record in caplog.records if getattr(record, "event", "") == event]


# Whose an inbox is.


def test_a_hub_waits_for_the_inbox_of_one_that_is_ending(address, spills):
    made = spills(Recorder())
    place = made.spill.root / made.spill.name
    ending = Spool(place)
    ending.open()
    threading.Timer(0.5, ending.close).start()
    with running_hub(address, made) as hub:
        assert hub.lanes[0].inbox.directory == place


def test_what_a_hub_left_beside_another_is_given_to_the_next_one_and_goes_on(address, spills, monkeypatch):
    monkeypatch.setattr(inboxes, "_WAIT_S", 0.1)
    one, two, three = Recorder(), Recorder(), Recorder()
    root = spills(one).spill.root
    with worker_link(f"{address}2", make_hello("engine-2"), wait=False) as link:
        worker = Sender(link, engine="engine-2")
        with running_hub(address, spills(one)):
            with running_hub(f"{address}2", spills(two)) as hub:
                assert link.wait_welcome(20)
                worker.rows("open", "over")
                worker.end("over")
                worker.rows("open")
                worker.rows("twice")
                worker.end("twice")
                eventually(lambda: set(two.done) == {"over", "twice"})
                worker.sent["twice"] = 0
                worker.rows("twice")
                eventually(lambda: worker.acknowledged)
                assert hub.lanes[0].inbox.directory.name.endswith(".2")
            with worker_link(address) as other:
                Sender(other).rows("r1")
                eventually(lambda: one.rows["r1"] == ROWS)
        with running_hub(f"{address}2", spills(three)) as hub:
            eventually(lambda: three.rows["open"] == 2 * ROWS)
            assert hub.lanes[0].inbox.directory == root / spills(three).spill.name
            worker.rows("open")
            worker.end("open", "twice")
            eventually(lambda: set(three.done) == {"open", "twice"})
            assert three.done["twice"].rows == three.rows["twice"] == ROWS  # of the second with that id
            assert three.done["open"].rows == three.done["open"].rows_promised == 3 * ROWS
            assert three.done["open"].dropped == ()
            assert "over" not in three.rows  # it was done with, although its frame was not
            once(three.positions)
            assert len(list(root.iterdir())) == 1


def left_in(spills, address, recorder, number, *requests, **options):
    """Have a hub leave frames of open requests, each a boot of its own, in an inbox that has a number."""
    made = spills(recorder, **options)
    with contextlib.ExitStack() as before:
        for n in range(1, number):
            place = made.spill.root / (made.spill.name if n == 1 else f"{made.spill.name}.{n}")
            before.enter_context(Spool(place))
        with running_hub(address, made) as hub, worker_link(address, make_hello(f"engine-{number}")) as link:
            worker = Sender(link, engine=f"engine-{number}")
            for name in requests:
                worker.rows(name)
            eventually(lambda: worker.acknowledged)
            hub.stop(5)
    return hub.lanes[0].inbox.directory


def test_what_was_copied_before_a_kill_is_not_copied_again(address, spills, tmp_path, monkeypatch):
    monkeypatch.setattr(inboxes, "_WAIT_S", 0.1)
    beside = left_in(spills, address, Recorder(), 2, "r1", "r2")
    shutil.copytree(beside, tmp_path / "saved")
    with running_hub(address, spills(Recorder())) as hub:
        eventually(lambda: not beside.exists())
        hub.stop(5)
    shutil.copytree(tmp_path / "saved", beside)  # as if the hub had been killed before it was done with it
    recorder = Recorder()
    with running_hub(address, spills(recorder)):
        eventually(lambda: not beside.exists())
        eventually(lambda: recorder.rows == {"r1": ROWS, "r2": ROWS})
        once(recorder.positions)


def test_what_has_no_room_in_the_inbox_stays_in_the_one_beside_it_when_the_hub_stops(address, spills, monkeypatch):
    monkeypatch.setattr(inboxes, "_WAIT_S", 0.1)
    names = [f"r{n}" for n in range(60)]
    beside = left_in(spills, address, Recorder(), 2, *names)
    slow, recorder = Recorder(held=True), Recorder()
    with running_hub(address, spills(slow, spool_bytes=10_000), drain_s=0.1) as hub:
        eventually(slow.waiting.is_set)
        eventually(lambda: hub.lanes[0].inbox.unread > 10)
        hub.lanes[0].discard()
        slow.go.set()
    assert beside.exists()
    with running_hub(address, spills(recorder)):
        eventually(lambda: set(recorder.rows) == set(names))
        once(recorder.positions)


def test_an_inbox_beside_it_that_cannot_be_used_is_said_and_left_alone(address, spills, caplog):
    made = spills(Recorder())
    beside = made.spill.root / f"{made.spill.name}.2"
    Spool(beside).open()
    threading.Event().wait(0)
    broken = made.spill.root / f"{made.spill.name}.3"
    (broken / "cursor").mkdir(parents=True)
    with running_hub(address, made):
        (status,) = said(caplog, "inbox_left")
        assert status.directory == str(broken)
        assert "its frames do not reach the consumer: spool" in status.getMessage()
    assert (broken / "cursor").is_dir()


def test_frames_of_a_consumer_with_other_options_are_told_of(address, spills, tmp_path, caplog):
    root = tmp_path / "spool"

    def hub(config):
        recorder = Recorder()
        recorder.config = config
        return configured(recorder, "spill", spool_dir=root)

    with running_hub(address, hub({"depth": 1})) as first, worker_link(address) as link:
        Sender(link).rows("r1")
        eventually(lambda: first.lanes[0].frames == 1)
        first.stop(5)
    (left,) = root.iterdir()
    assert not said(caplog, "inbox_left")
    with running_hub(address, hub({"depth": 2})):
        (status,) = said(caplog, "inbox_left")
        assert (status.levelname, status.consumer, status.directory) == ("ERROR", "recorder", str(left))
        assert "start a hub once with its old options and directory" in status.getMessage()
        assert f"`capflow spool inspect {left}`" in status.getMessage()
        caplog.clear()
        with Spool(left), running_hub(f"{address}3", hub({"depth": 3})):  # a hub has it
            assert not said(caplog, "inbox_left")
    shutil.copytree(left, root / "recorders-0123456789abcdef")  # another consumer's
    with running_hub(address, hub({"depth": 1})) as first:
        assert not said(caplog, "inbox_left")
        eventually(lambda: first.lanes[0].frames == 1)


# Disks that fail.


class Faulty(Files):
    """A disk that fails in one way from when it is told to until it is mended."""

    def __init__(self):
        self.code = None

    def _check(self, *codes):
        if self.code in codes:
            raise OSError(self.code, os.strerror(self.code))

    def create(self, path):
        self._check(errno.EROFS, errno.ENOSPC)
        return super().create(path)

    def write(self, fd, parts, offset):
        self._check(errno.EROFS, errno.ENOSPC)
        super().write(fd, parts, offset)

    def read(self, fd, length, offset):
        self._check(errno.EMFILE)
        return super().read(fd, length, offset)

    def fdatasync(self, fd):
        self._check(errno.EIO)
        super().fdatasync(fd)

    def fsync_dir(self, path):
        self._check(errno.EIO)
        super().fsync_dir(path)

    def rename(self, path, to):
        self._check(errno.EROFS)
        super().rename(path, to)

    def unlink(self, path):
        self._check(errno.EROFS)
        super().unlink(path)


@contextlib.contextmanager
def hub_on(address, made, files):
    """Run a hub whose consumer's inbox is on these files, of which little is kept in memory."""
    hub = Hub(str(address), [made])
    hub.lanes[0].inbox._files = files
    hub.start()
    hub.lanes[0].inbox.spool.unsynced_bytes_max = 2000
    try:
        yield hub
    finally:
        hub.stop(5)


FAULTS = pytest.mark.parametrize(
    ("code", "reason"), [(errno.ENOSPC, "disk_full"), (errno.EIO, "disk_failed"), (errno.EROFS, "disk_failed")]
)
FRAMES = 30


def trouble(hub):
    return hub.lanes[0].trouble(time.monotonic())


def send_to_failing(worker, files, code):
    """Send a frame, which is acknowledged, and more from when the disk fails."""
    worker.rows("r1")
    eventually(lambda: worker.acknowledged)
    files.code = code
    for _ in range(FRAMES):
        worker.rows("r1")


@FAULTS
def test_frames_wait_for_a_disk_that_fails_and_all_arrive_when_it_works(address, spills, code, reason):
    files, recorder = Faulty(), Recorder()
    with hub_on(address, spills(recorder), files) as hub, worker_link(address) as link:
        worker = Sender(link)
        send_to_failing(worker, files, code)
        worker.end("r1")
        eventually(lambda: trouble(hub) == f"the disk of its inbox: {os.strerror(code)}")
        assert hub.status()["problems"] == [f"consumer recorder: the disk of its inbox: {os.strerror(code)}"]
        eventually(lambda: link.counters["unacked_frames"] == FRAMES + 1)
        files.code = None
        eventually(lambda: "r1" in recorder.done)
        eventually(lambda: worker.acknowledged)
        assert recorder.done["r1"].rows == recorder.rows["r1"] == (FRAMES + 1) * ROWS
        assert recorder.done["r1"].dropped == ()
        once(recorder.positions)
        eventually(lambda: trouble(hub) is None)


@FAULTS
def test_rows_are_lost_to_a_disk_that_fails_counted_and_told_when_it_works(address, spills, code, reason):
    files, recorder = Faulty(), Recorder()
    made = spills(recorder, spill_fallback="drop")
    with hub_on(address, made, files) as hub, worker_link(address) as link:
        worker = Sender(link)
        send_to_failing(worker, files, code)
        eventually(lambda: hub.lanes[0].dropped[reason] and not hub.lanes[0].queue.nbytes)
        worker.end("r1")
        files.code = None
        eventually(lambda: "r1" in recorder.done)
        eventually(lambda: worker.acknowledged)
        lost = hub.lanes[0].dropped[reason]
        assert hub.lanes[0].dropped == {reason: lost}
        assert told(recorder.done["r1"]) == {reason: lost}
        assert recorder.done["r1"].rows == recorder.rows["r1"] == (FRAMES + 1) * ROWS - lost


@pytest.mark.parametrize("fallback", ["block", "drop"])
@FAULTS
def test_a_hub_stops_in_time_while_the_disk_fails_and_loses_nothing_that_it_acknowledged(
    address, spills, code, reason, fallback
):
    files, first, second = Faulty(), Recorder(), Recorder()
    made = spills(first, spill_fallback=fallback)
    with worker_link(address, wait=False) as link:
        worker = Sender(link)
        with hub_on(address, made, files) as hub:
            assert link.wait_welcome(20)
            for _ in range(5):
                worker.rows("r1")
            eventually(lambda: worker.acknowledged)
            files.code = code
            for _ in range(FRAMES):
                worker.rows("r1")
            eventually(lambda: trouble(hub))
            begun = time.monotonic()
            hub.stop(60)
            assert time.monotonic() - begun < 10
            lost = hub.lanes[0].dropped.total()
            assert lost == 0 or fallback == "drop"
        with running_hub(address, spills(second)):
            worker.end("r1")
            eventually(lambda: "r1" in second.done)
            once(second.positions)
            lost_of_it = sum(told(second.done["r1"]).values())
            assert (
                lost_of_it <= lost
            )  # a frame that was dropped after one that is not durable is not acknowledged, and comes again
            assert second.done["r1"].rows == second.rows["r1"] == (5 + FRAMES) * ROWS - lost_of_it


@pytest.mark.parametrize("fallback", ["block", "drop"])
def test_an_inbox_on_a_disk_that_is_full(address, fallback, tmp_path):
    (tmp_path / "small").mkdir()
    with mounted(tmp_path / "small", "512k"):
        slow = Recorder(held=True)
        made = configured(slow, "spill", spool_dir=tmp_path / "small" / "s", spill_fallback=fallback)
        with running_hub(address, made) as hub, worker_link(address) as link:
            worker = Sender(link)
            names = [f"r{n}" for n in range(1500)]
            for name in names:
                worker.rows(name)
                worker.end(name)
            eventually(lambda: trouble(hub) == "the disk of its inbox: No space left on device")
            slow.go.set()
            eventually(lambda: len(slow.done) == len(names) or fallback == "drop", 60)
            eventually(lambda: worker.acknowledged)
            lost = hub.lanes[0].dropped["disk_full"]
            assert bool(lost) == (fallback == "drop")
            eventually(lambda: sum(slow.rows.values()) == len(names) * ROWS - lost)


def test_what_the_disk_does_not_give_for_a_while_is_given_later(address, spills):
    files, recorder = Faulty(), Recorder(held=True)
    with hub_on(address, spills(recorder), files) as hub, worker_link(address) as link:
        worker = Sender(link)
        for _ in range(FRAMES):
            worker.rows("r1")
        worker.end("r1")
        eventually(lambda: worker.acknowledged)
        files.code = errno.EMFILE
        recorder.go.set()
        eventually(lambda: trouble(hub) == f"the disk of its inbox: {os.strerror(errno.EMFILE)}")
        files.code = None
        eventually(lambda: "r1" in recorder.done)
        assert recorder.done["r1"].dropped == ()
        assert recorder.rows["r1"] == FRAMES * ROWS
        assert hub.lanes[0].inbox.status()["frames_lost"] == 0


def test_an_inbox_that_cannot_be_read_at_the_start_is_given_back(spills, monkeypatch):
    spill: Spill = spills(Recorder()).spill
    with Spool(spill.root / spill.name) as spool:
        spool.append(b"E", b"")
    files = Faulty()
    inbox = Inbox(spill.root, spill.name, 10_000, on_synced=print, files=files)
    recover = Spool._recover

    def recovered(spool):
        recover(spool)
        files.code = errno.EMFILE

    monkeypatch.setattr(Spool, "_recover", recovered)
    with pytest.raises(CapflowError, match=r"cannot be read: got Too many open files, expected a readable disk"):
        inbox.open()
    assert not inbox.is_open
    assert not in_use(spill.root / spill.name)


def test_a_writer_that_meets_what_it_should_not_waits_says_so_and_goes_on(address, spills, caplog):
    recorder = Recorder()
    with running_hub(address, spills(recorder)) as hub, worker_link(address) as link:
        lane, worker = hub.lanes[0], Sender(link)
        put = lane.inbox.put_frame

        mended = threading.Event()

        def broken(frame, *args, **kwargs):
            if not mended.is_set():
                raise ValueError("no")
            return put(frame, *args, **kwargs)

        lane.inbox.put_frame = broken
        worker.rows("r1")
        worker.end("r1")
        eventually(lambda: trouble(hub) == "its inbox failed; see the log")
        (status,) = said(caplog, "inbox_failed")
        assert (status.consumer, status.exc_info[0]) == ("recorder", ValueError)
        assert not worker.acknowledged
        mended.set()
        eventually(lambda: "r1" in recorder.done)
        eventually(lambda: worker.acknowledged)
        assert recorder.done["r1"].dropped == ()
        assert trouble(hub) is None


# Why rows are lost.


def test_each_row_is_lost_for_its_own_reason(address, spills):
    files, slow = Faulty(), Recorder(held=True)
    made = spills(slow, spool_bytes=20_000, spill_fallback="drop")
    with hub_on(address, made, files) as hub, worker_link(address) as link:
        lane, worker = hub.lanes[0], Sender(link)
        worker.rows("early", "late")
        eventually(slow.waiting.is_set)
        files.code = errno.ENOSPC
        worker.rows("early")
        eventually(lambda: lane.dropped["disk_full"] == ROWS)
        files.code = None
        while not lane.dropped["spool_full"]:
            worker.rows("late")
            # The pace of the worker, which the hub keeps up with.
            time.sleep(0.001)
        slow.go.set()
        eventually(lambda: not waiting(hub))
        worker.end("early", "late")
        eventually(lambda: set(slow.done) == {"early", "late"})
        assert told(slow.done["early"]) == {"disk_full": ROWS}
        assert told(slow.done["late"]) == {"spool_full": lane.dropped["spool_full"]}


def test_what_had_no_room_is_remembered_until_its_stage_tells_the_end_whichever_rank_that_is(address, spills):
    files, recorder = Faulty(), Recorder()
    second = Rank(0, 0, 1)
    with (
        hub_on(address, spills(recorder, spill_fallback="drop"), files) as hub,
        worker_link(address) as one,
        worker_link(address, make_hello(boot="second", rank=second)) as two,
    ):
        lane = hub.lanes[0]
        files.code = errno.ENOSPC
        Sender(two, boot="second", rank=second).rows("r1")
        eventually(lambda: lane.dropped["disk_full"] == ROWS)
        files.code = None
        ending = Sender(one)
        ending.sent["r1"] = ROWS
        ending.end("r1")
        eventually(lambda: "r1" in recorder.done)
        assert told(recorder.done["r1"]) == {"disk_full": ROWS}
        assert lane.writer._lost == {}


def test_requests_that_never_end_are_not_remembered_without_a_bound(address, spills, monkeypatch):
    monkeypatch.setattr(limits, "RESULTS_KEPT_MAX", 3)
    files = Faulty()
    with (
        hub_on(address, spills(Recorder(), spill_fallback="drop"), files) as hub,
        worker_link(address) as link,
    ):
        lane, worker = hub.lanes[0], Sender(link)
        files.code = errno.ENOSPC
        for number in range(8):
            worker.rows(f"r{number}")
        eventually(lambda: lane.dropped["disk_full"] == 8 * ROWS)
        assert [list(lost) for lost in lane.writer._lost.values()] == [["r5", "r6", "r7"]]


def test_a_record_of_which_nothing_is_known_is_one_that_the_disk_damaged(address, spills):
    first, second = Recorder(held=True), Recorder()
    made: ConfiguredConsumer = spills(first)
    with worker_link(address, wait=False) as link:
        worker = Sender(link)
        with running_hub(address, made, drain_s=0.1) as hub:
            assert link.wait_welcome(20)
            for _ in range(5):
                worker.rows("r1")
            eventually(lambda: worker.acknowledged)
            hub.lanes[0].discard()
            first.go.set()
        place = made.spill.root / made.spill.name
        third = [head for _, head in heads(place) if head[:1] == b"F"][2]
        (segment,) = [path for path in place.glob("*.spool") if third in path.read_bytes()]
        data = bytearray(segment.read_bytes())
        data[data.index(third) + 5] ^= 16
        segment.write_bytes(data)
        with running_hub(address, spills(second)) as hub:
            worker.end("r1")
            eventually(lambda: "r1" in second.done)
            assert second.rows["r1"] == second.done["r1"].rows == 4 * ROWS
            assert told(second.done["r1"]) == {"spool_damaged": ROWS}
            assert hub.snapshot().dropped_rows == {"spool_damaged": ROWS}


def test_rows_that_a_damaged_inbox_beside_it_lost_are_counted(address, spills, monkeypatch):
    monkeypatch.setattr(inboxes, "_WAIT_S", 0.1)
    beside = left_in(spills, address, Recorder(), 2, "r1", "r1")
    payload = bytes(make_frame([("r1", 4, 4, 4)]).payload)
    (segment,) = [path for path in beside.glob("*.spool") if payload in path.read_bytes()]
    data = bytearray(segment.read_bytes())
    data[data.index(payload)] ^= 1
    segment.write_bytes(data)
    recorder = Recorder()
    hello = make_hello("engine-2", boot="boot-1")
    with running_hub(address, spills(recorder)) as hub, worker_link(address, hello, wait=False) as link:
        eventually(lambda: hub.lanes[0].dropped == {"spool_damaged": ROWS})
        assert link.wait_welcome(20)
        for step in range(4):  # what the hubs before had comes again, and is known
            finished = [make_finished("r1", 4, 8)] if step == 3 else []
            parts = [("r1", 4, 4 * step, 4)] if step < 2 else []
            frame = make_frame(parts, step=step, engine="engine-2", finished=finished)
            assert link.send(frame.header, frame.payload) is None
        eventually(lambda: "r1" in recorder.done)
        assert told(recorder.done["r1"]) == {"spool_damaged": ROWS}
        assert recorder.done["r1"].rows == recorder.rows["r1"] == ROWS


def test_what_lies_beside_an_inbox_that_is_full_comes_with_its_engine(tmp_path):
    """The engine is known by a checkpoint alone: its record was forgotten."""

    def opened(number):
        inbox = Inbox(tmp_path, "n", 400_000, on_synced=lambda _: None)
        inbox.open_at(inbox.place(number))
        return inbox

    frames = [make_frame([("r1", ROWS, step * ROWS, ROWS)], seq=step + 1, engine="other") for step in range(2)]
    beside = opened(2)
    beside.put(Known("other", make_model()))
    beside.put_frame(frames[0], 0.0)
    while beside.unread:
        beside.take(0.0)
    beside.forget(2, lambda _: [], needed=lambda: {"other": make_model()}, at_once=True)
    beside.put_frame(frames[1], 0.0)
    beside.close(2, lambda _: [], keep=True, needed=lambda: {"other": make_model()})

    inbox, beside = opened(1), opened(2)
    large = make_frame([("r2", 8, 0, 8)], seq=1, hidden=512)
    with contextlib.suppress(FullError):
        while True:
            inbox.put_frame(large, 0.0, spared=True)
    with contextlib.suppress(FullError):
        while True:
            inbox.put(Gone("nobody", None))
    inbox.join(beside, {})
    writer = InboxWriter("n", inbox, ByteQueue(1), WhenFull.BLOCK, Counter())
    writer.start([beside], {})
    result = []
    while "other" not in result:
        if (item := inbox.take(5.0)) is not None and isinstance(item.record, Frame):
            result.append(item.record.header.engine)
            inbox.forget(item.number - 1, lambda _: [], at_once=True)
    model = inbox.model("other")
    writer._queue.close()
    assert writer.ended.wait(10)
    inbox.close(0, lambda _: [], keep=True)
    assert model is not None


def test_a_frame_that_comes_again_before_it_is_durable_is_acknowledged_when_it_is(tmp_path):
    class Slow(Files):
        def __init__(self):
            self.go = threading.Event()
            self.go.set()

        def fdatasync(self, fd):
            self.go.wait(20)
            super().fdatasync(fd)

    disk, taken, queue = Slow(), [], ByteQueue(1 << 20)
    writers = []
    inbox = Inbox(
        tmp_path, "n", 400_000, on_synced=lambda number: [each.synced(number) for each in writers], files=disk
    )
    writer = InboxWriter("n", inbox, queue, WhenFull.BLOCK, Counter())
    writers.append(writer)
    inbox.open_at(inbox.place(1))
    writer.start([], {})
    disk.go.clear()
    frame = make_frame([("r1", ROWS, 0, ROWS)], seq=1)
    for number in range(2):
        queue.force(QueuedFrame(frame, functools.partial(taken.append, number), make_model()), frame.nbytes)
    eventually(lambda: len(writer._pending) == 2)
    assert taken == []
    disk.go.set()
    eventually(lambda: taken == [0, 1])
    queue.close()
    assert writer.ended.wait(10)
    inbox.close(0, lambda _: [], keep=True)


# Requests that the consumer is done with while the disk is full.


class AlmostFull(Faulty):
    """A disk that has room, while it is full, for what a spool gives back of it, and for no new spare file."""

    def __init__(self):
        super().__init__()
        self.given = False

    def _check(self, *codes):
        if not self.given:
            super()._check(*codes)

    def write(self, fd, parts, offset):
        if self.code and sum(map(len, parts)) > 2000:
            raise OSError(self.code, os.strerror(self.code))
        super().write(fd, parts, offset)

    def unlink(self, path):
        self.given = self.given or path.name == "spare"
        super().unlink(path)


def done_in(place):
    """Return the requests of which the records of an inbox say that its consumer is done with them."""
    return {read_head(head).request for _, head in heads(place) if head is not None and head[:1] == b"D"}


@contextlib.contextmanager
def hub_on_full_disk(address, made):
    """Run a hub whose consumer gets the result of `over` while the disk is full and `open` runs."""
    files, later = AlmostFull(), made.consumer
    with hub_on(address, made, files) as hub, worker_link(address) as link:
        lane, worker = hub.lanes[0], Sender(link)
        worker.rows("over")
        worker.rows("over", "open")
        worker.end("over")
        worker.rows("open")
        eventually(lambda: "over" in later.futures and worker.acknowledged and not waiting(hub))
        eventually(lambda: lane.inbox.spool.synced_through == lane.inbox.spool.last)
        files.code = errno.ENOSPC
        later.futures["over"].set_result(CaptureResult("ok"))
        yield lane, files
        files.code = None


def test_a_request_is_done_with_although_its_disk_was_full_just_then_and_the_hub_is_killed(address, spills, tmp_path):
    later, recorder = Later(), Recorder()
    made = spills(later, spool_bytes=limits.MIB)
    with hub_on_full_disk(address, made) as (lane, _):
        place = lane.inbox.directory
        # The first frame is forgotten, the second is not.
        eventually(lambda: len(lane._open) == 1 and lane.inbox.spool.acknowledged_through == lane._needless())
        assert done_in(place) == set()
        shutil.copytree(place, tmp_path / "killed")
    shutil.rmtree(place, ignore_errors=True)
    shutil.move(tmp_path / "killed", place)
    assert requests_in(place) == {"waiting": 1, "split": 0, "incomplete": 0, "named": [], "unnamed": 0}
    with running_hub(address, spills(recorder, spool_bytes=limits.MIB)):
        eventually(lambda: recorder.rows == {"open": 2 * ROWS})
        eventually(lambda: set(recorder.done) == {"open"}, 20)


def test_that_a_request_is_done_with_is_put_down_when_the_disk_has_room_again(address, spills):
    made = spills(Later(), spool_bytes=limits.MIB)
    with hub_on_full_disk(address, made) as (lane, files):
        eventually(lambda: len(lane._open) == 1)
        assert done_in(lane.inbox.directory) == set()
        files.code = None
        eventually(lambda: done_in(lane.inbox.directory) == {"over"})


def test_an_inbox_that_is_allowed_less_than_it_holds_is_emptied(tmp_path):
    """As when its user gave the consumer less `spool_bytes` before the hub started again."""
    root, count = tmp_path / "spool", 40
    large = Inbox(root, "x", 1 << 20, on_synced=lambda _: None)
    large.open()
    large.put(Known("engine-1", make_model()), 0.0)
    for seq in range(1, count + 1):
        large.put_frame(make_frame([(f"r{seq}", 4, 0, 4)], hidden=512, seq=seq), 0.0)
    assert large.spool.wait_synced(large.spool.last, 20)
    large.close(0, lambda _: [], keep=True)
    small = Inbox(root, "x", 64 << 10, on_synced=lambda _: None)
    small.open()
    try:
        assert small.spool.nbytes > 2 * small.bytes_max
        while (item := small.take(0)) is not None:
            last = item.number

        def emptied():
            small.forget(last, lambda _: [], at_once=True)
            return small.spool.nbytes < small.bytes_max // 2

        eventually(emptied)
        small.put_frame(make_frame([("new", 4, 0, 4)], seq=count + 1), 0.0)
    finally:
        small.close(0, lambda _: [], keep=True)
