"""Frames that wait on disk: in order, once, across a hub that is gone and a worker that was killed."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
import time

import msgspec
import pytest
from rich.console import Console

from capflow import limits
from capflow.buffers.spool import check_root, default_root
from capflow.capture.frame import Frame
from capflow.capture.spec import CaptureSpec
from capflow.cli.hub.view import view
from capflow.errors import CapflowError, UsageError
from capflow.hub.monitor.metrics import registry_of
from capflow.protocol import message
from capflow.protocol.message import Ack, Welcome
from capflow.protocol.session import State
from capflow.transport.links.former import FormerLink
from capflow.transport.links.worker import WorkerLink
from capflow.transport.outbox import Outbox, left_behind
from capflow.transport.promises import Broken
from tests.kit.frames import make_finished, make_frame, make_hello
from tests.kit.hubs import Recorder, address, configured, running_hub
from tests.kit.sources import PROCESSES
from tests.kit.waiting import eventually

__all__ = ["address"]

CHILD = PROCESSES / "outbox.py"
LEAVING = PROCESSES / "leaving_worker.py"


class Spilling:
    """A worker's link with an outbox, closed at the end."""

    def __init__(self, address, root, bytes_max=limits.SPOOL_BYTES_DEFAULT, **kwargs):
        hello = make_hello()
        self.outbox = Outbox.of(root, hello, bytes_max)
        self.link = WorkerLink(str(address), hello, policy="spill", outbox=self.outbox, **kwargs)

    def __enter__(self):
        self.link.start()
        return self

    def __exit__(self, *_):
        self.link.close(0.2)

    def send(self, count, first=0):
        """Send frames of four rows each; return why they were not taken."""
        refusals = []
        for step in range(first, first + count):
            frame = make_frame([("r1", 4, step * 4, 4)], step=step)
            refusals.append(self.link.send(frame.header, frame.payload))
        return refusals


def test_what_is_sent_while_the_hub_is_gone_comes_in_order_when_it_is_back(address, tmp_path):
    first, second = Recorder(), Recorder()
    with Spilling(address, tmp_path) as worker:
        with running_hub(address, first):
            assert worker.link.wait_welcome(20)
            assert worker.send(5) == [None] * 5
            eventually(lambda: first.rows["r1"] == 20)
        eventually(lambda: not worker.link.connected)
        assert worker.send(30, first=5) == [None] * 30
        assert worker.link.counters["queued_bytes"] == 0
        assert worker.outbox.waiting == 30
        with running_hub(address, second) as hub:
            eventually(lambda: second.rows["r1"] == 120)
            eventually(lambda: hub.status()["spilled"] == 30)
            assert hub.snapshot().spilled == 30
            rank = {"engine": "engine-1", "rank": "pp0-dp0-tp0"}
            assert registry_of(hub).get_sample_value("capflow_worker_spooled_frames_total", rank) == 30
            with (console := Console(width=80)).capture() as shown:
                console.print(view(hub.status(), None))
            assert "spool of" in shown.get()
            assert worker.send(5, first=35) == [None] * 5
            eventually(lambda: second.rows["r1"] == 140)
            eventually(lambda: worker.link.counters["unacked_frames"] == 0)
            assert second.seqs == list(range(6, 41))
            assert worker.link.counters["spool"]["frames_spilled"] < 36
            eventually(lambda: worker.outbox.unacknowledged == 0)
    assert list(tmp_path.iterdir()) == []


def test_what_is_sent_while_the_hub_refuses_comes_when_it_does_not(address, tmp_path):
    """Also if no hub has ever taken the worker."""
    strange, consumer = Recorder(spec=CaptureSpec({"post_block": [9]})), Recorder()
    with Spilling(address, tmp_path) as worker:
        with running_hub(address, strange):
            assert worker.link.wait_welcome(20) is None
            eventually(lambda: worker.link.refused)
            assert worker.send(10) == [None] * 10
        eventually(lambda: worker.link._session.state is State.LOST)
        assert worker.send(10, first=10) == [None] * 10
        with running_hub(address, consumer):
            eventually(lambda: consumer.rows["r1"] == 80)
            assert consumer.seqs == list(range(1, 21))


def test_what_has_no_room_in_memory_goes_to_disk_and_nothing_is_lost(address, tmp_path):
    consumer = Recorder(held=True)
    made = configured(consumer, queue_bytes_max=1500)
    with running_hub(address, made), Spilling(address, tmp_path, outbound_bytes_max=5000) as worker:
        assert worker.link.wait_welcome(20)
        before = time.monotonic()
        assert worker.send(200) == [None] * 200
        assert time.monotonic() - before < limits.BLOCK_S_MAX / 2
        assert worker.outbox.waiting > 150
        header = make_frame((), finished=[make_finished("r1", 800, rows=800)], step=200).header
        assert worker.link.send(header, b"") is None
        consumer.go.set()
        eventually(lambda: "r1" in consumer.done, 60)
        assert consumer.seqs == list(range(1, 201))
        assert (consumer.rows["r1"], consumer.done["r1"].dropped) == (800, ())


def test_a_full_spool_drops_and_says_so(address, tmp_path):
    with running_hub(address, Recorder()) as hub, Spilling(address, tmp_path, 20_000, fallback="drop") as worker:
        assert worker.link.wait_welcome(20)
        hub.stop(1)
        eventually(lambda: not worker.link.connected)
        refusals = worker.send(200)
        kept = refusals.index("spool_full")
        assert 10 < kept < 60
        assert set(refusals) == {None, "spool_full"}
        assert worker.link.counters["dropped_frames"] == {"spool_full": refusals.count("spool_full")}


def test_a_full_spool_that_blocks_waits_for_a_hub_that_is_gone_once(address, tmp_path):
    with running_hub(address, Recorder()) as hub, Spilling(address, tmp_path, 5_000, block_s_max=0.5) as worker:
        assert worker.link.wait_welcome(20)
        hub.stop(1)
        eventually(lambda: not worker.link.connected)
        before = time.monotonic()
        assert "spool_full" in worker.send(100)
        assert 0.4 < time.monotonic() - before < 20


def test_rows_on_a_damaged_disk_are_counted_and_the_rest_arrives(address, tmp_path, monkeypatch):
    consumer = Recorder()
    with Spilling(address, tmp_path) as worker:
        with running_hub(address, first := Recorder()):
            assert worker.link.wait_welcome(20)
            worker.send(1)
            eventually(lambda: first.rows["r1"] == 4 and worker.link.counters["unacked_frames"] == 0)
        eventually(lambda: not worker.link.connected)
        worker.send(9, first=1)
        header = make_frame((), finished=[make_finished("r1", 40, rows=40)], step=10).header
        assert worker.link.send(header, b"") is None
        assert worker.outbox._spool.wait_synced(10, 20)
        (segment,) = [p for p in worker.outbox.directory.glob("*.spool") if p.stat().st_size]
        data = bytearray(segment.read_bytes())
        data[data.index(bytes(make_frame([("r1", 4, 20, 4)]).payload))] ^= 1
        segment.write_bytes(data)
        with running_hub(address, consumer):
            eventually(lambda: "r1" in consumer.done)
        assert consumer.seqs == [2, 3, 4, 5, 7, 8, 9, 10]
        assert consumer.rows["r1"] == 32
        gaps = [
            (lost.rows, lost.reason, [(gap.start, gap.stop) for gap in lost.gaps])
            for lost in consumer.done["r1"].dropped
        ]
        assert gaps == [(4, "earlier_hub", [(0, 4)]), (4, "spool_damaged", [(20, 24)])]
        assert worker.link.counters["spool"]["frames_lost"] == 1


def test_what_a_killed_worker_left_is_sent_in_its_name(address, tmp_path):
    command = [sys.executable, CHILD, address, tmp_path, "boot-9", "25"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with running_hub(address, first := Recorder()):
        assert child.stdout.readline() == "go\n"
    assert child.stdout.readline() == "spilled\n"
    child.kill()
    child.wait()
    child.stdout.close()
    child.stdin.close()
    assert first.seqs == [1, 2, 3]
    (outbox,) = left_behind(tmp_path)
    assert (outbox.hello.boot, outbox.unacknowledged) == ("boot-9", 22)
    assert left_behind(tmp_path) == []  # it is taken
    link = FormerLink(str(address), outbox)
    link.start()
    with running_hub(address, second := Recorder()) as hub:
        eventually(lambda: second.rows["r1"] == 88)
        eventually(lambda: not link._thread.is_alive())
        assert second.seqs == list(range(4, 26))
        eventually(lambda: "r1" in second.done)  # its worker does not come back
        assert second.done["r1"].status == "error"
        assert hub.counts.protocol_errors == 0
    assert list(tmp_path.iterdir()) == []


def left_by_a_worker(root, boot):
    """Have a worker leave frames; return the directory."""
    outbox = Outbox.of(root, make_hello(boot=boot), limits.SPOOL_BYTES_DEFAULT)
    outbox.open()
    for seq in range(1, 4):
        frame = make_frame([("r1", 4, seq * 4, 4)], step=seq)
        assert outbox.put(seq, frame.header, frame.payload, 0) is None
    outbox.close()
    return outbox.directory


def test_a_frame_that_comes_by_memory_before_one_on_disk_is_sent_before_it(address, tmp_path):
    """Although the link found memory empty a moment before it looked at the disk."""
    consumer = Recorder()
    with running_hub(address, consumer), Spilling(address, tmp_path, outbound_bytes_max=5000) as worker:
        assert worker.link.wait_welcome(20)
        take, states = worker.outbox.take, []

        def late():
            if not states:
                states.extend([*worker.send(2), len(worker.link._queue), worker.outbox.waiting])
            return take()

        worker.outbox.take = late
        worker.link._waker.wake()
        eventually(lambda: consumer.rows["r1"] == 8)
        assert states == [None, None, 1, 1]
        assert consumer.seqs == [1, 2]


def test_what_a_worker_left_is_gone_before_its_hub_forgets_the_worker(address, tmp_path, monkeypatch):
    """Or the next process would send it again, to a hub that takes it for something new."""
    left_by_a_worker(tmp_path, "boot-1")
    (outbox,) = left_behind(tmp_path)
    engines = []
    with running_hub(address, Recorder()) as hub:
        close = outbox.close

        def slow_close(acked):
            # What this outbox is: slow to close.
            time.sleep(0.3)
            engines.extend(hub.roster.engines)
            return close(acked)

        outbox.close = slow_close
        link = FormerLink(str(address), outbox)
        link.start()
        eventually(lambda: not link._thread.is_alive())
        assert engines == ["engine-1"]
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("point", ["close", "bye"])
def test_a_worker_killed_while_it_leaves_has_its_rows_delivered_once(address, tmp_path, point):
    recorder = Recorder()
    with running_hub(address, recorder) as hub:
        with subprocess.Popen([sys.executable, LEAVING, address, tmp_path, point]) as child:
            assert child.wait(60) == -signal.SIGKILL
        left = left_behind(tmp_path)
        assert bool(left) == (point == "close")
        deliver(address, left)
        eventually(lambda: not left or not hub.roster.engines)
        assert recorder.rows["r1"] == len(set(recorder.positions)) == 40
        assert recorder.events.count(("done", "r1")) == 1
        assert recorder.done["r1"].problems == []
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_leaves_before_all_is_sent_keeps_its_request_open_for_the_rest(address, tmp_path):
    recorder = Recorder(held=True)
    with running_hub(address, configured(recorder, queue_bytes_max=1500)) as hub:
        with Spilling(address, tmp_path, outbound_bytes_max=1000) as worker:
            assert worker.link.wait_welcome(20)
            assert worker.send(50) == [None] * 50
            end = make_frame(finished=[make_finished("r1", 4, 200)], requests=(), step=50)
            assert worker.link.send(end.header, end.payload) is None
        assert not worker.link.drained
        recorder.go.set()
        deliver(address, left_behind(tmp_path))
        eventually(lambda: "r1" in recorder.done and not hub.roster.engines)
        assert recorder.rows["r1"] == len(set(recorder.positions)) == 200
        assert recorder.events.count(("done", "r1")) == 1
        assert recorder.done["r1"].problems == []
    assert list(tmp_path.iterdir()) == []


def deliver(address, left):
    """Send what workers that are gone left."""
    for outbox in left:
        link = FormerLink(str(address), outbox)
        link.start()
        eventually(lambda thread=link._thread: not thread.is_alive(), 30)


def test_what_dead_workers_left_and_cannot_be_sent_is_said_and_the_rest_is_sent(tmp_path, caplog):
    good, gone, strange = (left_by_a_worker(tmp_path, f"boot-{n}") for n in range(3))
    (gone / "cursor").unlink()
    (gone / "cursor").mkdir()  # not to be read, whoever runs this
    (strange / "hello").write_bytes(b"junk")
    with Outbox.of(tmp_path, make_hello(boot="boot-3"), limits.SPOOL_BYTES_DEFAULT)._spool:  # whose worker lives
        (tmp_path / "engine-1-0.0.0-boot-3" / "hello").write_bytes((good / "hello").read_bytes())
        (outbox,) = left_behind(tmp_path)
    assert outbox.directory == good
    outbox.close()
    errors = [(record.event, record.directory) for record in caplog.records if record.levelname == "ERROR"]
    assert errors == [("spool_left", str(gone)), ("spool_left", str(strange))]
    assert "boot-1 cannot be used: got Not a regular file, expected a directory that can be" in caplog.text
    assert "expected the hello of its worker; inspect it with `capflow spool inspect" in caplog.text
    assert len(list(gone.glob("*.spool"))) == len(list(strange.glob("*.spool"))) == 1


def test_what_went_by_memory_and_died_there_leaves_a_gap_that_a_living_hub_takes(address, tmp_path):
    consumer, hello = Recorder(), make_hello()
    with running_hub(address, consumer) as hub:
        with Spilling(address, tmp_path) as worker:
            assert worker.link.wait_welcome(20)
            worker.send(3)
            eventually(lambda: consumer.rows["r1"] == 12 and worker.link.counters["unacked_frames"] == 0)
            worker.link._session.state = State.LOST  # as a process that is killed: no goodbye
            worker.link._closing.set()
            worker.link._waker.wake()
            worker.link._thread.join(20)
        outbox = Outbox.of(tmp_path, hello, limits.SPOOL_BYTES_DEFAULT)
        outbox.open()
        for seq in (2, 3, 7, 8, 12):  # two that the hub has; 4 to 6 and 9 to 11 are gone
            frame = make_frame([("r1", 4, seq * 4, 4)], step=seq)
            assert outbox.put(seq, frame.header, frame.payload, 0) is None
        link = FormerLink(str(address), outbox)
        link.start()
        eventually(lambda: not link._thread.is_alive())
        eventually(lambda: len(consumer.seqs) == 6)
        assert consumer.seqs == [1, 2, 3, 7, 8, 12]
        assert hub.counts.protocol_errors == 0


def welcomed(link, last_seq, acked=0):
    """Welcome a link that does not run, from a hub that has these frames, and let it fill its session."""
    link._session.connected(0.0)
    link._session.receive([message.encode(Welcome("hub", limits.CREDIT_BYTES_DEFAULT, last_seq=last_seq))], 0.0)
    link._session.receive([message.encode(Ack(acked, 0))], 0.0)
    while link._push():
        pass


def sent(link):
    """Return the numbers of the frames that the link may send now."""
    return [Frame.decode(*parts).header.seq for parts in iter(lambda: link._session.next_frame(0.0), None)]


def test_what_a_hub_had_of_a_dead_worker_stays_until_it_is_acknowledged_and_goes_to_the_next_hub(address, tmp_path):
    left_by_a_worker(tmp_path, "boot-1")
    (outbox,) = left_behind(tmp_path)
    link = FormerLink(str(address), outbox)
    welcomed(link, last_seq=2)  # of the three, which are in its memory
    assert sent(link) == [3]
    assert outbox.unacknowledged == 3
    assert not link._drained()
    link._session.lost()  # the hub is killed
    welcomed(link, last_seq=0)
    assert sent(link) == [1, 2, 3]
    for seq in (1, 3):
        link._session.receive([message.encode(Ack(seq, 0))], 0.0)
        outbox.acknowledge(link._session.acked)
        assert outbox.unacknowledged == 3 - seq
    assert link._drained()
    outbox.close()


def test_the_next_hub_is_sent_no_gap_between_frames_that_the_one_before_had(address, tmp_path):
    outbox = Outbox.of(tmp_path, make_hello(), limits.SPOOL_BYTES_DEFAULT)
    outbox.open()
    for seq in (2, 4, 8):  # the others went by memory
        frame = make_frame([("r1", 4, seq * 4, 4)], step=seq)
        assert outbox.put(seq, frame.header, frame.payload, 0) is None
    link = FormerLink(str(address), outbox)
    welcomed(link, last_seq=6)
    assert sent(link) == [7, 8]
    link._session.lost()
    welcomed(link, last_seq=0)
    assert sent(link) == [2, 3, 4, 5, 6, 7, 8]
    assert outbox.unacknowledged == 3
    link._session.receive([message.encode(Ack(8, 0))], 0.0)
    assert link._drained()
    outbox.close()


def test_what_a_hub_has_acknowledged_before_it_is_read_from_the_disk_is_done_with(address, tmp_path):
    left_by_a_worker(tmp_path, "boot-1")
    (outbox,) = left_behind(tmp_path)
    link = FormerLink(str(address), outbox)
    welcomed(link, last_seq=3, acked=2)
    assert link._session.unacked == 1
    link._session.receive([message.encode(Ack(3, 0))], 0.0)
    assert link._drained()
    outbox.close()


def test_an_end_that_was_spilled_and_promised_is_sent_once_and_lets_nothing_before_it_go(address, tmp_path):
    directory = left_by_a_worker(tmp_path, "boot-1")
    with Outbox(directory, make_hello(boot="boot-1"), limits.SPOOL_BYTES_DEFAULT)._spool as spool:
        end = Frame.seal(msgspec.structs.replace(make_frame((), finished=[make_finished()]).header, seq=4), b"")
        encoded, body = end.encode()
        spool.append((4).to_bytes(8, "little") + encoded, body)
    (outbox,) = left_behind(tmp_path)
    outbox.broken = Broken([(4, [make_finished()])], [], 4)
    link = FormerLink(str(address), outbox)
    welcomed(link, last_seq=0)
    assert sent(link) == [1, 2, 3, 4]
    assert outbox.unacknowledged == 4
    assert link._session.unacked == 4
    outbox.close()


def test_a_directory_that_cannot_be_used_stops_the_start(address, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CapflowError, match="cannot be used"):
        Spilling(address, tmp_path / "file").link.start()
    with pytest.raises(UsageError, match=r"--spool-dir: got .*file, expected a directory that can be written"):
        check_root(tmp_path / "file" / "x")


def test_spills_go_where_the_users_state_is(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_root() == tmp_path / "capflow" / "spool"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert default_root() == pathlib.Path.home() / ".local/state/capflow/spool"
