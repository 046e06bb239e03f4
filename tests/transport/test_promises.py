"""What a worker promised and took with it: each of its rows is in the store, or named as missing."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
from collections import Counter

import pytest

import capflow
from capflow import limits
from capflow.capture.frame import Dropped, Rank
from capflow.capture.losses import described
from capflow.capture.result import CaptureResult
from capflow.capture.site import Site
from capflow.plugins.configure import configure, load_plugins
from capflow.protocol import message
from capflow.testing import MemoryHub
from capflow.transport.client import Client
from capflow.transport.links.former import FormerLink
from capflow.transport.outbox import Outbox, left_behind
from capflow.transport.promises import Promises, read
from tests.kit.frames import make_finished, make_frame, make_hello, make_model
from tests.kit.hubs import Later, Recorder, address, configured, raw_peer, running_hub, worker_link
from tests.kit.processes.hub_crash import hub_options
from tests.kit.sources import PROCESSES
from tests.kit.waiting import eventually

__all__ = ["address"]

HERE = pathlib.Path(__file__).parent


def lines_until(stream, word):
    """Return the lines of a child up to one that is this word."""
    lines = []
    for line in iter(stream.readline, b""):
        text = line.decode().strip()
        if text == word:
            return lines
        lines.append(text)
    pytest.fail(f"the child ended before it said {word}")


class Hub:
    """A hub with files and an inbox, in a process of its own."""

    def __init__(self, address, directory):
        self.address = str(address)
        command = [sys.executable, PROCESSES / "hub_crash.py", self.address, directory, "never", "0", "packed"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE)

    def __enter__(self):
        with Client(self.address, 60):  # it answers: its process has started, however long that takes
            return self.process

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait(30)


def former(address, root):
    """Send what dead workers left, and wait until all of it was taken."""
    links = [FormerLink(str(address), outbox) for outbox in left_behind(root)]
    for link in links:
        link.start()
    for link in links:
        eventually(lambda link=link: not link._thread.is_alive())


def killed_together(address, tmp_path, *, stopped, root=None, policy="spill"):
    """Kill a worker and its hub at once; return the rows that the worker promised, by request.

    stopped: the hub takes nothing from the fourth request on, so that the others stay in the worker's memory.
    """
    promised = Counter()
    with Hub(address, tmp_path) as hub:
        command = [sys.executable, PROCESSES / "promises.py", str(address), root or tmp_path / "outbox", "40", policy]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        lines = lines_until(worker.stdout, "go")
        if stopped:
            os.kill(hub.pid, signal.SIGSTOP)
        worker.stdin.write(b"\n")
        worker.stdin.flush()
        lines += lines_until(worker.stdout, "sent")
        for process in (worker, hub):
            process.send_signal(signal.SIGKILL)
        worker.wait(20)
        hub.wait(20)
        worker.stdin.close()
        worker.stdout.close()
    for line in lines:
        name, rows = line.split()
        promised[name] += int(rows)
    return promised


@pytest.mark.parametrize(("stopped", "policy"), [(True, "spill"), (False, "spill"), (True, "block")])
def test_every_row_that_dies_with_its_worker_and_its_hub_is_named(address, tmp_path, stopped, policy):
    promised = killed_together(address, tmp_path, stopped=stopped, policy=policy)
    assert len(promised) == 40
    with Hub(address, tmp_path), Client(str(address), 20) as client:
        former(address, tmp_path / "outbox")
        eventually(lambda: not client.status()["requests"]["open"])
        eventually(lambda: len(capflow.open(tmp_path / "rows").requests()) == len(promised))
        status = client.status()
        data = capflow.open(tmp_path / "rows")
        accounted, lost = Counter(), Counter()
        for capture in data:
            missing = sum(rows for rows, _ in capture.sidecar.dropped)
            assert {reason for _, reason in capture.sidecar.dropped} <= {"earlier_hub"}
            accounted[capture.id] += capture.sidecar.rows + missing
            lost[capture.id] += missing
            if missing:
                assert capture.status in ("error", "partial_error")
                assert "earlier_hub" in capture.error
        assert accounted == promised
        assert status["consumers"]["filesystem"]["dropped_rows"].get("earlier_hub", 0) == lost.total()
        if stopped:
            assert lost.total() > 0
            some = next(name for name, rows in lost.items() if rows == promised[name])
            result = client.results([some], wait=False)[some]["filesystem"]
            assert result.status == "error"
            assert described(result.dropped[0]).startswith(f"{promised[some]} rows lost: earlier_hub")
    assert not list((tmp_path / "outbox").iterdir())


def frame_of(name, start, *, seq=0, ends=False, capture=None):
    finished = [make_finished(name, 4, start + 4, rows=start + 4)] if ends else []
    captures = {} if capture is None else {name: capture}
    made = make_frame([(name, 4, start, 4)], [(0, "post_block")], finished=finished, captures=captures, seq=seq)
    return made.header


class TestFile:
    @pytest.fixture
    def promises(self, tmp_path):
        made = Promises(tmp_path)
        made.open()
        yield made
        made.close()

    def test_it_has_the_ends_that_the_hub_has_not_and_the_requests_that_run(self, promises, tmp_path):
        for seq, header in enumerate([frame_of("a", 0), frame_of("b", 0), frame_of("a", 4, ends=True)], start=1):
            promises.add(seq, header)
        promises.acknowledge(2)
        recorded = read(tmp_path)
        assert [(seq, [end.id for end in ends]) for seq, ends in recorded.ends] == [(3, ["a"])]
        assert [(one.id, one.rows, one.computed_length) for one in recorded.running] == [("b", 4, 4)]
        assert recorded.seq == 3
        promises.acknowledge(3)
        assert read(tmp_path).ends == []
        assert [one.id for one in read(tmp_path).running] == ["b"]

    def test_what_a_request_asked_for_stays_known_when_the_file_is_written_again(self, promises, tmp_path, monkeypatch):
        monkeypatch.setattr(limits, "PROMISES_BYTES_MIN", 4096)
        capture = capflow.CaptureSpec({"post_block": "all"})
        sizes = set()
        for seq in range(1, 2000):
            promises.add(seq, frame_of("long", 4 * (seq - 1), capture=capture))
            promises.add(seq, frame_of(f"r{seq}", 0, ends=True))
            promises.acknowledge(seq - 10)
            sizes.add(promises.path.stat().st_size)
        assert max(sizes) < 3 * 4096
        recorded = read(tmp_path)
        assert [(one.id, one.rows, one.capture) for one in recorded.running] == [("long", 4 * 1999, capture)]
        assert [seq for seq, _ in recorded.ends] == list(range(1990, 2000))

    def test_a_torn_end_is_left_out(self, promises, tmp_path):
        for seq in range(1, 4):
            promises.add(seq, frame_of(f"r{seq}", 0))
        whole = promises.path.read_bytes()
        for length in range(len(whole)):
            promises.path.write_bytes(whole[:length])
            assert [one.id for one in read(tmp_path).running] in (["r1", "r2"], ["r1"], [])

    def test_a_disk_that_refuses_it_stops_no_frame(self, promises, tmp_path, caplog):
        os.close(promises._fd)
        promises._fd = os.open("/dev/full", os.O_RDWR)
        promises.add(1, frame_of("r1", 0))
        promises.add(2, frame_of("r2", 0))
        promises.acknowledge(2)
        assert [record.message for record in caplog.records if "no longer stored" in record.message] != []

    def test_a_disk_that_takes_a_part_of_a_record_is_one_that_refuses_it(self, promises, tmp_path, monkeypatch, caplog):
        promises.add(1, frame_of("r1", 0))
        write = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda fd, content, at: write(fd, content[: len(content) // 2], at))
        promises.add(2, frame_of("r2", 0))
        monkeypatch.undo()
        promises.add(3, frame_of("r3", 0))
        assert [one.id for one in read(tmp_path).running] == ["r1"]
        assert [record.message for record in caplog.records if "no longer stored" in record.message] != []


def test_nothing_is_left_of_a_worker_that_ended_well(address, tmp_path):
    outbox = Outbox.of(tmp_path, make_hello(), limits.SPOOL_BYTES_DEFAULT)
    with running_hub(address, Recorder()), worker_link(address, policy="spill", outbox=outbox) as link:
        made = make_frame([("r1", 4, 0, 4)], finished=[make_finished("r1")])
        assert link.send(made.header, made.payload) is None
        eventually(lambda: not link.counters["unacked_frames"] and not link.counters["queued_frames"])
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_worker_whose_last_acknowledgement_came_with_the_end_of_the_hub(
    address, tmp_path, monkeypatch
):
    """The link does not get to its outbox between the two."""
    outbox = Outbox.of(tmp_path, make_hello(), limits.SPOOL_BYTES_DEFAULT)
    with contextlib.ExitStack() as stack:
        with running_hub(address, Recorder()):
            link = stack.enter_context(worker_link(address, policy="spill", outbox=outbox))
            monkeypatch.setattr(outbox, "acknowledge", lambda _: None)
            made = make_frame([("r1", 4, 0, 4)], finished=[make_finished("r1")])
            assert link.send(made.header, made.payload) is None
            eventually(lambda: not link.counters["unacked_frames"] and not link.counters["queued_frames"])
        eventually(lambda: not link.connected)
        monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("policy", ["block", "spill"])
def test_a_request_that_ended_with_its_worker_is_not_ended_again_by_its_promises(tmp_path, policy):
    recorder = Recorder()
    kept = configured(recorder, policy, **({"spool_dir": tmp_path} if policy == "spill" else {}))
    with MemoryHub(kept) as hub:
        engine = hub.engine("a", boot="killed")
        engine.step([("r1", 4, 0, 4)])
        engine.settle()
        engine.lose()
        result = hub.result("r1")
        assert "the request did not end" in result.error
        later = hub.engine("a", boot="killed", seq=1)
        later.promise("r1", 4, 0, 4)
        later.promise("never", 4, 0, 4)
        later.finish("r1", status="error")
        later.finish("never", status="error")
        later.settle()
        assert "earlier_hub" in hub.result("never").error
        assert hub.result("r1") == result
    ends = Counter(event for event in recorder.events if event[0] == "done")
    assert ends == {("done", "r1"): 1, ("done", "never"): 1}


def test_a_worker_alone_that_is_killed_has_its_requests_ended_with_what_never_came(address, tmp_path):
    recorder = Recorder()
    hello = make_hello(boot="killed")
    outbox = Outbox.of(tmp_path, hello, limits.SPOOL_BYTES_DEFAULT)
    outbox.open()
    frames = [make_frame([("r1", 4, 4 * step, 4)], boot="killed", seq=step + 1) for step in range(3)]
    for seq, frame in enumerate(frames, start=1):
        outbox.promise(seq, frame.header)
    outbox._spool.close()  # the kernel does this, and nothing else, when a worker is killed
    with running_hub(address, recorder), Client(str(address)) as client:
        with raw_peer(address) as worker:
            worker.send(message.encode(hello))
            worker.recv()
            worker.send_multipart(frames[0].encode())
            eventually(lambda: recorder.rows["r1"])
            former(address, tmp_path)
        (result,) = client.results(["r1"], timeout=20)["r1"].values()
    rows = recorder.rows["r1"]
    assert result.status == "partial_error"
    assert [(each.reason, each.rows) for each in result.dropped] == [("earlier_hub", 2 * rows)]


@pytest.mark.parametrize("policy", ["block", "spill"])
def test_what_died_with_a_worker_is_named_although_its_requests_had_their_results_by_then(
    address, tmp_path, policy, caplog, monkeypatch
):
    """As when the next engine loads its model for a minute."""
    monkeypatch.setattr(limits, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(limits, "SILENCE_S_MAX", 2.0)
    recorder = Recorder()
    kept = configured(recorder, policy, **({"spool_dir": tmp_path / "spool"} if policy == "spill" else {}))
    hello = make_hello(boot="killed")
    outbox = Outbox.of(tmp_path / "outbox", hello, limits.SPOOL_BYTES_DEFAULT)
    outbox.open()
    more = [f"r{number}" for number in range(2, 31)]  # more than are logged in a second
    parts = [[(name, 4, 4 * step, 4) for name in ("r1", *more)] for step in range(3)]
    frames = [make_frame(parts[step], boot="killed", seq=step + 1) for step in range(3)]
    for seq, frame in enumerate(frames, start=1):
        outbox.promise(seq, frame.header)
    outbox._spool.close()  # the kernel does this, and nothing else, when a worker is killed
    with running_hub(address, kept) as hub, Client(str(address)) as client:
        with raw_peer(address) as worker:
            worker.send(message.encode(hello))
            worker.recv()
            worker.send_multipart(frames[0].encode())
            eventually(lambda: recorder.rows["r1"])
        (result,) = client.results(["r1"], timeout=20)["r1"].values()
        assert (result.status, result.dropped) == ("partial_error", ())
        assert hub.snapshot().rows_lost == 0
        former(address, tmp_path / "outbox")
        rows = recorder.rows["r1"]
        eventually(lambda: hub.snapshot().rows_lost)
        assert hub.snapshot().dropped_rows == {"earlier_hub": 2 * rows * (1 + len(more))}
        (line,) = [record for record in caplog.records if getattr(record, "event", "") == "rows_lost_late"]
        assert (line.engine, list(line.requests)) == ("engine-1", ["r1", *more])
        for name, lost in line.requests.items():
            assert [(each["reason"], each["rows"]) for each in lost] == [("earlier_hub", 2 * rows)], name
            assert f"request {name}: {2 * rows} rows lost: earlier_hub" in line.getMessage()
        assert list(client.results(["r1"], timeout=20)["r1"].values()) == [result]
        assert hub.lanes[0].results == {"partial_error": 1 + len(more)}
    assert recorder.done["r1"].rows == rows


def test_an_end_that_comes_after_the_hub_gave_its_engine_up_leaves_no_result_pending(address, tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MISSED_S", 0.2)
    with Hub(address, tmp_path) as first, worker_link(address, make_hello(boot="killed")) as link:
        made = make_frame([("r1", 4, 0, 4)], boot="killed", seq=1)
        assert link.send(made.header, made.payload) is None
        eventually(lambda: link.acked == 1)
        first.kill()
        first.wait(20)
    kept = configure("filesystem", hub_options(tmp_path, "packed"), load_plugins())
    with running_hub(address, kept) as hub, Client(str(address)) as client:
        eventually(lambda: hub.lanes[0].results)  # for as much as came of it
        assert hub.lanes[0].results == {"partial_error": 1}
        with raw_peer(address) as worker:
            worker.send(message.encode(make_hello(boot="killed")))
            worker.recv()
            died = make_finished("r1", 4, 6, status="error")  # of 6 rows, 4 of which came
            over = make_frame([], finished=[died], boot="killed", seq=2)
            worker.send_multipart(over.encode())
            (result,) = client.results(["r1"], timeout=20)["r1"].values()
    assert (result.status, "did not end" in result.error) == ("partial_error", True)
    assert [(each.reason, each.rows) for each in result.dropped] == [("earlier_hub", 2)]
    assert "earlier_hub" in result.error
    assert [path.name for path in (tmp_path / "rows").iterdir() if not path.name.startswith(".")] == ["r1"]


def test_late_ends_of_the_stages_of_a_pipeline_name_what_each_lost(address, tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MISSED_S", 0.2)
    model = make_model(stages=2)
    hellos = [make_hello(boot=f"killed-{pp}", rank=Rank(pp, 0, 0), model=model) for pp in range(2)]
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(Hub(address, tmp_path))
        for pp, hello in enumerate(hellos):
            link = stack.enter_context(worker_link(address, hello))
            made = make_frame([("r1", 4, 0, 4)], [Site(pp, "post_block")], boot=hello.boot, rank=hello.rank, seq=1)
            assert link.send(made.header, made.payload) is None
            eventually(lambda link=link: link.acked == 1)
        first.kill()
        first.wait(20)
    kept = configure("filesystem", hub_options(tmp_path, "packed"), load_plugins())
    with running_hub(address, kept) as hub, Client(str(address)) as client:
        eventually(lambda: hub.lanes[0].results)  # for as much as came of it
        assert hub.lanes[0].results == {"partial_error": 1}
        with raw_peer(address) as one, raw_peer(address) as other:
            for pp, (worker, hello) in enumerate(zip((one, other), hellos, strict=True)):
                worker.send(message.encode(hello))
                worker.recv()
                dropped = (Dropped(5, "queue_full"),)
                died = make_finished("r1", 4, 6 + pp, rows=6 + pp, status="error", dropped=dropped)  # 4 came of each
                over = make_frame([], finished=[died], boot=hello.boot, rank=hello.rank, seq=2)
                worker.send_multipart(over.encode())
            (result,) = client.results(["r1"], timeout=20)["r1"].values()
    assert result.status == "partial_error"
    assert {each.reason: each.rows for each in result.dropped} == {"queue_full": 10, "earlier_hub": 5}


def test_an_end_that_comes_while_the_consumer_stores_what_came_is_in_its_result(tmp_path):
    later = Later()
    with MemoryHub(configured(later, "spill", spool_dir=tmp_path)) as hub:
        engine = hub.engine("a", boot="killed")
        engine.step([("r1", 4, 0, 4)])
        engine.settle()
        engine.lose()
        eventually(lambda: "r1" in later.futures)
        again = hub.engine("a", boot="killed", seq=1)
        again.promise("r1", 4, 0, 4)
        again.promise("r1", 4, 4, 2)
        again.finish("r1", status="error")
        again.settle()
        eventually(lambda: hub.hub.snapshot().rows_lost)  # the consumer's lane has read the end
        later.futures["r1"].set_result(CaptureResult("ok", payload={"rows": later.rows["r1"]}))
        result = hub.result("r1")
    lost = 2 * len(again.sites)
    assert (result.status, result.payload) == ("partial_error", {"rows": later.rows["r1"]})
    assert [(each.reason, each.rows) for each in result.dropped] == [("earlier_hub", lost)]
    assert f"{lost} rows lost: earlier_hub" in result.error
    assert "did not end" in result.error


def test_the_next_hub_on_a_machine_names_what_died_with_the_last_without_an_engine(address, tmp_path):
    root = tmp_path / "state" / "capflow" / "spool"
    promised = killed_together(address, tmp_path, stopped=True, root=root)
    assert list(root.glob("engine-1-*"))
    options = ",".join(f"{name}={value}" for name, value in hub_options(tmp_path, "packed").items())
    command = [sys.executable, "-m", "capflow", "run", "--address", str(address), "--consumer", f"filesystem:{options}"]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    hub = subprocess.Popen([*command, "--until-eof"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    rows = tmp_path / "rows"
    try:
        eventually(lambda: len(capflow.open(rows).requests()) == len(promised), 60)
        eventually(lambda: not list(root.glob("engine-1-*")), 60)
    finally:
        _, log = hub.communicate(timeout=60)
    accounted = Counter()
    for capture in capflow.open(rows):
        accounted[capture.id] += capture.sidecar.rows + sum(count for count, _ in capture.sidecar.dropped)
    assert accounted == promised
    assert hub.returncode == 1
    assert b"rows lost: earlier_hub" in log


class TestLeftBehind:
    HUB = "ipc:///run/mine"

    def left(self, root, hub):
        hello = make_hello(boot="killed")
        outbox = Outbox.of(root, hello, limits.SPOOL_BYTES_DEFAULT, hub)
        outbox.open()
        outbox.promise(1, frame_of("r1", 0))
        outbox._spool.close()  # as the kernel does when a worker is killed

    def test_promises_are_for_the_hub_that_they_were_made_to(self, tmp_path):
        self.left(tmp_path, "ipc:///run/other")
        assert left_behind(tmp_path, self.HUB) == []
        assert left_behind(tmp_path, self.HUB, only=True) == []
        (promises,) = left_behind(tmp_path, "ipc:///run/other", only=True)
        assert [one.id for one in promises.broken.running] == ["r1"]
        promises.close()

    def test_promises_to_a_hub_that_does_not_come_are_forgotten_with_a_word(self, tmp_path, monkeypatch, caplog):
        self.left(tmp_path, "ipc:///run/other")
        monkeypatch.setattr(limits, "PROMISES_KEPT_S", -1.0)
        assert left_behind(tmp_path, self.HUB, only=True) == []
        assert "for 1 requests are removed: their hub did not come back" in caplog.text
        assert list(tmp_path.iterdir()) == []


def test_a_worker_that_cannot_note_its_promises_works_without(address, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    outbox = Outbox.of(tmp_path / "file", make_hello(), limits.SPOOL_BYTES_DEFAULT)
    with running_hub(address, Recorder()) as hub, worker_link(address, outbox=outbox) as link:
        made = make_frame([("r1", 4, 0, 4)])
        assert link.send(made.header, made.payload) is None
        eventually(lambda: hub.counts.frames)
    assert "the promises of this worker are not stored" in caplog.text


def test_more_requests_than_a_frame_has_ends_are_ended_of_a_worker_that_is_gone(address, tmp_path):
    recorder, names = Recorder(), [f"r{number}" for number in range(2 * limits.FINISHED_PER_FRAME_MAX + 1)]
    outbox = Outbox.of(tmp_path, make_hello(), limits.SPOOL_BYTES_DEFAULT)
    outbox.open()
    for seq, name in enumerate(names, 1):
        outbox.promise(seq, frame_of(name, 0))
    outbox.close()
    with running_hub(address, configured(recorder)) as hub:
        former(address, tmp_path)
        eventually(lambda: set(recorder.done) == set(names))
        assert all(done.status == "error" and done.dropped for done in recorder.done.values())
        assert hub.counts.protocol_errors == 0
    assert not list(tmp_path.glob("engine-*"))
