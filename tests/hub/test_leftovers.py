"""The files that hubs leave: all frames that are not stored, and nothing else; the next hub removes those of a kill."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import pytest

import capflow
from capflow import limits
from capflow.buffers.spool import Files, Spool, heads
from capflow.cli.hub.running import HubRun
from capflow.errors import CapflowError
from capflow.hub.lanes import leftover
from capflow.hub.lanes.inbox import RequestDoneMark
from capflow.system import runtime
from capflow.transport.hub_process import HubProcess
from capflow_consumers.duckdb import port as sqlport
from tests.kit.captured import write
from tests.kit.frames import make_hello
from tests.kit.hubs import Later, Recorder, address, configured, running_hub, scheduler_link, worker_link
from tests.kit.sources import PROCESSES
from tests.kit.spills import ROWS, Sender
from tests.kit.waiting import eventually

__all__ = ["address"]

CHILD = PROCESSES / "leaving.py"


@pytest.fixture
def root(tmp_path):
    """Return where inboxes lie."""
    return tmp_path / "spool"


@pytest.fixture
def directory():
    """Return a directory for sockets that only this user can enter, with a short name."""
    with tempfile.TemporaryDirectory(prefix="cf") as name:
        yield Path(name)


def recorder_in(root, depth=1, kind=Recorder):
    """Return a consumer that spills below `root`; its inbox is another one for each depth."""
    recorder = kind()
    recorder.config = {"depth": depth}
    return configured(recorder, "spill", spool_dir=root)


def frames_are_gone(place):
    """Return whether an inbox, which its hub may be writing, has no frame and can be read whole."""
    try:
        return all(head is not None and head[:1] != b"F" for _, head in heads(place))
    except CapflowError:
        return False


def leave_inbox(address, root, *, over, depth=1, forgotten=False):
    """Have a hub that is killed leave an inbox with the frames of a request, which is over and stored or runs on;
    return its directory.

    forgotten: the frames are removed, and only a checkpoint is left.
    """
    made = recorder_in(root, depth)
    place = made.spill.root / made.spill.name
    with running_hub(address, made) as hub, worker_link(address) as link:
        worker = Sender(link)
        worker.rows("r1")
        if over:
            worker.end("r1")
            eventually(lambda: "r1" in made.consumer.done)
            eventually(lambda: not leftover.waits(place))
            eventually(lambda: not forgotten or frames_are_gone(place))
        else:
            eventually(lambda: worker.acknowledged)
        hub.lanes[0].inbox.spool.wait_synced(hub.lanes[0].inbox.spool.last, 5)
        shutil.copytree(place, root.parent / "as killed")
    shutil.rmtree(place, ignore_errors=True)
    (root.parent / "as killed").rename(place)
    return place


def make_old(place, seconds=2 * limits.MISSED_S):
    """Have an inbox look as if it was written so long ago."""
    then = time.time() - seconds
    for path in (*place.iterdir(), place):
        os.utime(path, (then, then))


def said(caplog, event):
    return [record for record in caplog.records if getattr(record, "event", None) == event]


# What ends leaves nothing.


@pytest.mark.parametrize("first", ["worker", "scheduler"])
def test_an_engine_that_leaves_takes_its_inbox_with_it(address, root, first):
    made = recorder_in(root)
    with running_hub(address, made) as hub, contextlib.ExitStack() as last:
        with contextlib.ExitStack() as early:
            (last if first == "worker" else early).enter_context(scheduler_link(address))
            link = (early if first == "worker" else last).enter_context(worker_link(address))
            worker = Sender(link)
            worker.rows("r1")
            worker.end("r1")
            eventually(lambda: "r1" in made.consumer.done)
        last.close()
        eventually(lambda: not hub.roster.peers)
        hub.stop()
        assert hub.lanes[0].left == (0, 0)
    assert list(root.iterdir()) == []


def test_results_that_come_when_the_consumer_closes_leave_nothing(address, root):
    made = recorder_in(root, kind=Later)
    with running_hub(address, made) as hub:
        with worker_link(address) as link:
            worker = Sender(link)
            worker.rows("r1")
            worker.end("r1")
            eventually(lambda: "r1" in made.consumer.done)
        eventually(lambda: not hub.roster.peers)
        hub.stop()
        assert hub.lanes[0].left == (0, 0)
    assert list(root.iterdir()) == []


def test_only_frames_are_said_to_wait(address, root):
    """Of a request that runs on its frames are in the inbox, given to the consumer: none of them waits."""
    made = recorder_in(root)
    with running_hub(address, made) as hub, worker_link(address) as link:
        worker = Sender(link)
        worker.rows("r1")
        eventually(lambda: made.consumer.rows["r1"] == ROWS)
        hub.stop(5)
        assert hub.lanes[0].left == (0, 1)
    assert len(list(root.iterdir())) == 1


def test_an_engine_that_only_an_earlier_hub_met_is_forgotten(address, root, monkeypatch):
    monkeypatch.setattr(limits, "MISSED_S", 0.3)
    place = leave_inbox(address, root, over=True, forgotten=True)
    with running_hub(address, recorder_in(root)) as hub:
        assert hub.lanes[0].inbox.engines == ["engine-1"]
        eventually(lambda: not hub.lanes[0].inbox.engines)
    assert not place.exists()


def test_a_replay_leaves_nothing_behind(directory, tmp_path):
    write(tmp_path / "rows", {"r1": (4, 9)}, layout="packed")
    state, temporary = tmp_path / "state", tmp_path / "tmp"
    for made in (state, temporary):
        made.mkdir()
    command = [sys.executable, "-m", "capflow", "replay", tmp_path / "rows", "--consumer", "filesystem:root=again"]
    environment = {
        **os.environ,
        "XDG_STATE_HOME": str(state),
        "XDG_RUNTIME_DIR": str(directory),
        "TMPDIR": str(temporary),
    }
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "wait" not in done.stderr.replace("waits", "")
    left = [path for place in (state, directory, temporary) for path in place.rglob("*") if not path.is_dir()]
    assert left == []
    assert list((state / "capflow/spool/hub").iterdir()) == []


def test_a_hub_for_one_process_leaves_nothing_behind(directory, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process = HubProcess([f"filesystem:root={tmp_path / 'rows'},layers=0"])  # of which the worker sends rows
    process.start(60)
    with worker_link(process.address, make_hello()) as link:
        worker = Sender(link)
        worker.rows("r1")
        worker.end("r1")
        eventually(lambda: worker.acknowledged)
    assert process.stop() == 0
    assert list((directory / "capflow").iterdir()) == []
    assert list((tmp_path / "state/capflow/spool/hub").iterdir()) == []
    assert not list(tmp_path.glob("capflow-hub-*"))


@pytest.mark.parametrize("leaves", [True, False])
def test_a_run_that_ends_waits_for_the_bye_of_its_engine_but_not_for_an_engine_that_stays(
    address, root, monkeypatch, leaves
):
    monkeypatch.setattr(limits, "BYE_S", 20.0 if leaves else 0.2)
    made = recorder_in(root)
    with worker_link(address, wait=False) as link:
        with HubRun(address, [made], ends=True):
            assert link.wait_welcome(20)
            worker = Sender(link)
            worker.rows("r1")
            worker.end("r1")
            eventually(lambda: "r1" in made.consumer.done)
            leaving = threading.Timer(0.3, link.close, (0.5,))
            if leaves:
                leaving.start()
        assert len(list(root.iterdir())) == (not leaves)


# What a kill left is collected, unless someone needs it.


def test_an_inbox_in_which_nothing_waits_is_removed_by_the_next_hub_and_told_once(address, root, caplog):
    place = leave_inbox(address, root, over=True)
    make_old(place)
    caplog.set_level("INFO")
    with running_hub(address, recorder_in(root, depth=2)):
        assert not place.exists()
    (removed,) = said(caplog, "inbox_removed")
    assert removed.directories == [str(place)]
    assert not said(caplog, "inbox_left")
    caplog.clear()
    with running_hub(address, recorder_in(root, depth=2)):
        assert not said(caplog, "inbox_removed")


def test_an_inbox_with_frames_that_are_not_stored_stays_and_is_named(address, root, caplog):
    place = leave_inbox(address, root, over=False)
    make_old(place)
    with running_hub(address, recorder_in(root, depth=2)):
        (left,) = said(caplog, "inbox_left")
        assert left.directory == str(place)
    recorder = recorder_in(root)
    with running_hub(address, recorder):
        eventually(lambda: recorder.consumer.rows["r1"] == ROWS)


def test_a_request_that_came_again_under_the_same_id_is_not_done(address, root):
    made = recorder_in(root)
    place = made.spill.root / made.spill.name
    with running_hub(address, made), worker_link(address) as link:
        worker = Sender(link)
        worker.rows("r1")
        worker.end("r1")
        eventually(lambda: "r1" in made.consumer.done)
        eventually(lambda: not leftover.waits(place))
        worker.sent.clear()
        worker.rows("r1")
        eventually(lambda: leftover.waits(place))


@pytest.mark.parametrize("jump_s", [-1e9, 1e9])
def test_a_clock_that_jumps_removes_nothing_that_waits(address, root, jump_s):
    for over in (False, True):
        place = leave_inbox(address, root, over=over, depth=over)
        make_old(place, jump_s)
        assert leftover.collect(root) == ([place] if over else [])


def test_an_inbox_written_a_moment_ago_stays(address, root):
    leave_inbox(address, root, over=True)
    assert leftover.collect(root) == []


def test_an_inbox_that_a_process_has_stays(address, root):
    place = leave_inbox(address, root, over=True)
    with Spool(place):
        make_old(place)
        assert leftover.collect(root) == []
    make_old(place)
    assert leftover.collect(root) == [place]


def test_what_cannot_be_read_stays(root):
    place = root / "filesystem-0123456789abcdef"
    with Spool(place) as spool:
        for request in "abc":
            spool.append(b"D" + msgspec.msgpack.encode(RequestDoneMark("engine-1", request)))
    (segment,) = place.glob("*.spool")
    data = bytearray(segment.read_bytes())
    for at in (60, len(data) // 2):  # in a head, and in what says where heads are
        segment.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        make_old(place)
        assert leftover.collect(root) == []
    segment.write_bytes(data)
    make_old(place)
    assert leftover.collect(root) == [place]


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_what_belongs_to_another_user_stays(address, root):
    place = leave_inbox(address, root, over=True)
    make_old(place)
    os.chown(place, 12345, 12345)
    assert leftover.collect(root) == []
    assert place.exists()


def test_directories_that_are_no_inboxes_stay(root):
    for name in ("notes", "filesystem-0123456789abcdef", "filesystem-0123456789abcdef.2/x"):
        (root / name).mkdir(parents=True)
        (root / name / "file").touch()
    (root / "log-0123456789abcdef").touch()
    (root / "nats-0123456789abcdef").symlink_to(root / "notes")
    for path in (*root.rglob("*"), root):
        os.utime(path, (0, 0), follow_symlinks=False)
    before = sorted(root.rglob("*"))
    assert leftover.collect(root) == []
    assert sorted(root.rglob("*")) == before


def test_a_directory_that_only_looks_like_an_inbox_stays(root):
    place = root / "cache-0123456789abcdef"
    place.mkdir(parents=True)
    for name in ("lock", "rows.bin"):
        (place / name).touch()
    make_old(place)
    assert leftover.collect(root) == []
    assert sorted(path.name for path in place.iterdir()) == ["lock", "rows.bin"]


def test_an_inbox_is_locked_until_its_last_file_is_removed(root):
    """Whoever has it without that lock would lose what it writes."""
    spool = Spool(root, bytes_max=limits.MIB)
    spool.open()
    spool.put(b"head", b"", 1)
    beside = []  # what lay there when another could first take the directory

    class Watching(Files):
        def remove(self, path, names):
            for name in names:
                (path / name).unlink(missing_ok=True)
                if not (path / "lock").exists():
                    beside.append(sorted(left.name for left in path.iterdir()))
            super().remove(path, names)

    spool._files = Watching()
    assert spool.remove()
    assert beside == [[]]


# Real kills.


@contextlib.contextmanager
def hub_process(address, directory, layers="0", point="-", after=0):
    command = [sys.executable, CHILD, address, directory, layers, point, str(after)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "started\n"
            yield process
        finally:
            process.kill()


def send_request(address, name):
    with worker_link(address, wait=False) as link:
        assert link.wait_welcome(30)
        worker = Sender(link)
        worker.rows(name)
        worker.end(name)
        eventually(lambda: worker.acknowledged)


@pytest.mark.parametrize(
    ("point", "after"),
    [("before-unlink", 0), ("before-unlink", 1), ("before-remove", 0), *(("during-remove", n) for n in range(4))],
)
def test_a_hub_killed_while_it_removes_its_inbox_leaves_nothing_to_be_given_again(address, tmp_path, point, after):
    with hub_process(address, tmp_path, point=point, after=after) as hub:
        send_request(address, "r1")
        hub.stdin.close()
        assert hub.wait(60) == -signal.SIGKILL
    (place,) = (tmp_path / "spool").iterdir()
    assert not place.exists() or not (place / "lock").exists() or not leftover.waits(place)
    before = {path: path.read_bytes() for path in (tmp_path / "rows-0").rglob("*") if path.is_file()}
    with hub_process(address, tmp_path) as hub:
        hub.stdin.close()
        assert hub.wait(60) == 0
    assert {path: path.read_bytes() for path in before} == before
    assert capflow.open(tmp_path / "rows-0").requests() == ["r1"]


def test_a_killed_hubs_socket_and_inbox_are_collected_by_a_hub_of_other_options(directory, tmp_path):
    private = f"ipc://{directory}/{runtime.private_name('hub')}.sock"
    with hub_process(private, tmp_path) as hub:
        send_request(private, "r1")
        (place,) = (tmp_path / "spool").iterdir()
        eventually(lambda: not leftover.waits(place))
        hub.kill()
        hub.wait()
    assert len(list(directory.iterdir())) == 2
    make_old(place)
    with hub_process(f"ipc://{directory}/h", tmp_path, layers="1") as hub:
        assert {path.name for path in directory.iterdir()} == {"h", "h.lock"}
        assert not place.exists()
        hub.stdin.close()
        assert hub.wait(60) == 0
    assert list(directory.iterdir()) == []
    assert list((tmp_path / "spool").iterdir()) == []


def test_hubs_that_start_at_once_share_a_root_that_is_collected(directory, root):
    """Each opens its inbox while others remove theirs and what was left: none fails, and nothing is left at the end."""
    failed = []  # what was removed while hubs had it, or raised

    def lives(number):
        try:
            for _ in range(8):
                made = recorder_in(root, depth=number % 2)
                with running_hub(f"ipc://{directory}/{runtime.private_name('hub')}.sock", made) as hub:
                    failed.extend(leftover.collect(root))
                    assert hub.lanes[0].inbox.directory.exists()
        except Exception as e:  # noqa: BLE001  whatever it is fails the test
            failed.append(e)

    threads = [threading.Thread(target=lives, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert list(root.iterdir()) == list(directory.iterdir()) == []


# The runtime directory.


def child_with(code, directory):
    """Run Python that makes a file in the runtime directory, prints it and waits; return the process and the output."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}; print(made, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "XDG_RUNTIME_DIR": str(directory)},
        text=True,
    )
    return process, Path(process.stdout.readline().strip())


HOLDING = (
    "import capflow.transport.address as a; made = a.private_address('hub')[6:]; "
    "held = a.held('ipc://' + made); held.__enter__(); "
    "import socket as s; bound = s.socket(s.AF_UNIX); bound.bind(made)"
)
DIRECTORY = "import capflow.system.runtime as r; made = r.private_directory('steering')"


@pytest.mark.parametrize("code", [HOLDING, DIRECTORY])
def test_what_a_process_has_is_collected_when_it_is_killed_and_not_before(directory, code):
    process, made = child_with(code, directory)
    with process:
        assert runtime.collect(made.parent) == []
        assert made.exists()
        process.kill()
        process.wait()
        assert runtime.collect(made.parent) == [made]
    assert list(made.parent.iterdir()) == []


def test_a_number_that_a_live_process_has_again_keeps_nothing(directory):
    path = directory / f"hub-{os.getpid()}-abcdef.sock"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
    path.with_name(path.name + ".lock").touch()
    assert runtime.collect(directory) == [path]
    assert list(directory.iterdir()) == []


def test_what_has_no_private_name_stays(directory):
    names = ["hub.sock", "hub.sock.lock", "hub-1-abcdef.sock.new", "hub-x-abcdef.sock", "steering-abcdefgh"]
    for name in names:
        (directory / name).touch()
    assert runtime.collect(directory) == []
    assert sorted(path.name for path in directory.iterdir()) == sorted(names)


def test_files_beside_a_hubs_socket_that_are_named_like_private_ones_stay(address):
    directory = Path(address.removeprefix("ipc://")).parent
    names = ["backup-20241122-174500", "job-7-abcdef.sock", "run-1-abcdef.sock", "run-1-abcdef.sock.lock"]
    for name in names:
        (directory / name).write_text("kept")
    with running_hub(address, Recorder()):
        pass
    assert {path.name: path.read_text() for path in directory.iterdir()} == dict.fromkeys(names, "kept")


def test_a_stopped_hub_leaves_no_socket(address):
    path = Path(address.removeprefix("ipc://"))
    with running_hub(address, Recorder()):
        assert path.is_socket()
    assert list(path.parent.iterdir()) == []


def test_sockets_of_databases_whose_hub_is_gone_are_removed(directory, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    kept, left = (runtime.runtime_directory() / f"sql-{name}.sock" for name in ("new", "old"))
    for path in (kept, left):
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    os.utime(left, (0, 0))
    port = sqlport.SqlPort(tmp_path / "x.duckdb", lambda _: None)
    port.open()
    assert {path.name for path in kept.parent.iterdir()} == {kept.name, port.path.name}
    port.close()


def test_names_are_private(directory):
    assert re.fullmatch(rf"hub-{os.getpid()}-[0-9a-f]{{6}}", runtime.private_name("hub"))
