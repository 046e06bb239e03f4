"""The spool on real files: order, bounds, restarts, damage, and disks that fail."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import random
import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capflow import limits
from capflow.buffers.spool import Files, FullError, Lost, Record, Spool, files, items
from capflow.buffers.spool.report import in_use
from capflow.buffers.spool.survey import ENDLESS, Segment, stops, survey
from capflow.errors import CapflowError
from tests.kit.disks import DIRECTORY, Disk, mounted
from tests.kit.stepped_spool import SteppedSpool
from tests.kit.waiting import eventually

LIMIT_S = 20


def body_of(number, length=1000):
    return random.Random(number).randbytes(length)


def fill(spool, count, length=1000):
    """Append records and wait until they are durable."""
    for _ in range(count):
        number = spool.last + 1
        assert spool.append(b"%d" % number, body_of(number, length)) == number
    assert spool.wait_synced(spool.last, LIMIT_S)


def drain(spool):
    """Return the entries that are left, each record checked."""
    entries = []
    while (entry := spool.read()) is not None:
        if isinstance(entry, Record):
            assert (entry.head, bytes(entry.body)) == (b"%d" % entry.id, body_of(entry.id, len(entry.body)))
        entries.append(entry)
    return entries


def numbers(entries):
    assert all(isinstance(entry, Record) for entry in entries), entries
    return [entry.id for entry in entries]


def test_records_come_back_in_order_and_outlive_a_restart(tmp_path):
    with Spool(tmp_path / "a" / "b", segment_bytes=5000) as spool:
        fill(spool, 20)
        assert [spool.read().id for _ in range(7)] == list(range(1, 8))
        spool.acknowledge(5)
    with Spool(tmp_path / "a" / "b", segment_bytes=5000) as spool:
        assert numbers(drain(spool)) == list(range(6, 21))
        fill(spool, 3)
        assert numbers(drain(spool)) == [21, 22, 23]
        spool.acknowledge(23)
    with Spool(tmp_path / "a" / "b") as spool:
        assert (spool.read(), len(spool), spool.last) == (None, 0, 23)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700


def test_what_is_read_need_not_be_durable_and_is_gone_once_acknowledged(tmp_path):
    with Spool(tmp_path, segment_bytes=3000) as spool:
        for number in range(1, 100):
            spool.append(b"%d" % number, body_of(number))
            assert spool.read().id == number
            spool.acknowledge(number)
        assert spool.wait_acknowledged(99, LIMIT_S)
        eventually(lambda: len(list(tmp_path.glob("*.spool"))) == 1)
        assert spool.nbytes < 3000 + 2000


def test_many_bytes_are_synced_without_a_pause_and_few_after_it(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "SYNC_PAUSE_S", 3600.0)
    monkeypatch.setattr(limits, "SYNC_BYTES", 10_000)
    with Spool(tmp_path) as spool:
        spool.append(b"1", body_of(1))
        assert not spool.wait_synced(1, 0.3)
        spool.append(b"2", body_of(2, 10_000))
        assert spool.wait_synced(2, LIMIT_S)
        spool.append(b"3", body_of(3))
        assert not spool.wait_synced(3, 0.3)
    with Spool(tmp_path) as spool:
        assert numbers(drain(spool)) == [1, 2, 3]  # and the end waited for no pause


def test_a_full_spool_says_so_until_there_is_room(tmp_path):
    with Spool(tmp_path, bytes_max=10_000, segment_bytes=2500) as spool:
        with pytest.raises(FullError, match="is full") as full:
            fill(spool, 11)
        assert (full.value.reason, spool.last) == ("spool_full", 9)
        with pytest.raises(FullError):
            spool.put(b"", bytes(20_000), timeout_s=0.01)
        assert numbers(drain(spool)) == list(range(1, 10))
        putting = threading.Thread(target=spool.put, args=(b"10", body_of(10)))
        putting.start()
        spool.acknowledge(9)
        putting.join(LIMIT_S)
        assert numbers(drain(spool)) == [10]
        eventually(lambda: not spool._due())
        assert max(spool.nbytes, sum(path.stat().st_size for path in tmp_path.glob("*.spool"))) <= 10_000


def test_a_full_spool_of_one_segment_empties(tmp_path):
    with Spool(tmp_path, bytes_max=3000, segment_bytes=100_000) as spool:
        for number in range(1, 30):
            spool.put(b"%d" % number, body_of(number), timeout_s=LIMIT_S)
            assert spool.read().id == number
            spool.acknowledge(number)


def test_one_process_writes(tmp_path):
    with Spool(tmp_path):
        with pytest.raises(CapflowError, match="is in use; stop the process that writes it"):
            Spool(tmp_path).open()
        held = "import sys; from capflow.buffers.spool import Spool\nSpool(sys.argv[1]).open()"
        other = subprocess.run([sys.executable, "-c", held, tmp_path], capture_output=True, text=True, check=False)
        assert "is in use" in other.stderr
    with Spool(tmp_path):
        pass


def test_who_looks_whether_a_spool_is_in_use_keeps_nobody_from_it(tmp_path, monkeypatch):
    with Spool(tmp_path):
        assert in_use(tmp_path)
    with (tmp_path / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # as who looks does
        assert not in_use(tmp_path)
        tried = []

        def look_until_the_second_try(pause_s):
            tried.append(pause_s)
            if len(tried) == 2:
                fcntl.flock(lock, fcntl.LOCK_UN)

        monkeypatch.setattr(files, "time", SimpleNamespace(sleep=look_until_the_second_try))
        with Spool(tmp_path):
            assert in_use(tmp_path)
        assert len(tried) == 2


def test_a_directory_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CapflowError, match=r"spool .*file/spool cannot be used: got File exists"):
        Spool(tmp_path / "file" / "spool").open()


def test_threads_pass_everything_through_once(tmp_path):
    ids = []

    def take(spool):
        while (record := spool.read(timeout_s=LIMIT_S)) is not None:
            assert bytes(record.body) == body_of(record.id, 3000)
            ids.append(record.id)
            spool.acknowledge(record.id)

    with Spool(tmp_path, bytes_max=100_000, segment_bytes=9000, unsynced_bytes_max=20_000) as spool:
        taker = threading.Thread(target=take, args=(spool,))
        taker.start()
        for number in range(1, 501):
            spool.put(b"", body_of(number, 3000), timeout_s=LIMIT_S)
        assert spool.wait_acknowledged(500, LIMIT_S)
        assert spool.unsynced_bytes <= 20_000
    taker.join(LIMIT_S)
    assert ids == list(range(1, 501))


# Damage, on a disk in memory that does what it is told.


def written(*, clean, count=3):
    """Return a disk with records, each synced by itself, of a writer that was closed or killed."""
    disk = Disk()
    spool = SteppedSpool(DIRECTORY, files=disk)
    spool.open()
    for number in range(1, count + 1):
        spool.append(b"%d" % number, body_of(number, 150))
        spool._work()
    if clean:
        spool._closing = True
        spool._work()
    spool._release()
    disk.locked = False
    return disk


def segment_of(disk):
    name = max((name for name in disk.now if name.endswith(".spool")), key=lambda name: len(disk.now[name].current))
    return disk.now[name].current


def items_of(disk):
    (segment,) = survey(disk, DIRECTORY).segments
    fd = disk.open(segment.path)
    return list(items.scan(disk, fd, segment.size, segment.salt))


def reopened(disk):
    spool = SteppedSpool(DIRECTORY, files=disk)
    spool.open()
    return spool


def lost_of(entries):
    """Return which records were lost; every one came or was, in order."""
    came, lost = [], []
    for entry in entries:
        (came if isinstance(entry, Record) else lost).extend(range(getattr(entry, "first", entry.id), entry.id + 1))
    assert sorted(came + lost) == list(range(1, 4))
    assert [entry.id for entry in entries] == sorted(entry.id for entry in entries)
    return lost


LENGTH = len(segment_of(written(clean=True)))


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_a_segment_truncated_anywhere_loses_what_was_cut_off_and_says_so(clean):
    whole = items_of(written(clean=clean))
    records = [item for item in whole if item.header.kind == items.RECORD]
    assert len(records) == 3
    for length in range(LENGTH):
        disk = written(clean=clean)
        del segment_of(disk)[length:]
        left = sum(item.end <= length for item in records)
        last = (
            3
            if clean
            else max((i.header.id for i in whole if i.header.kind == items.MARK and i.end <= length), default=0)
        )
        spool = reopened(disk)
        entries = drain(spool)
        assert [entry for entry in entries if isinstance(entry, Record)] == entries[:left]
        assert (
            sum(entry.last - entry.first + 1 for entry in entries[left:])
            == max(left, last) - left
            == spool.records_lost
        )
        end = max((item.end for item in whole if item.end <= length), default=0)
        assert spool.bytes_cut == length - end
        assert spool.last == max(left, last)
        spool.append(b"4", b"")
        assert spool.read().head == b"4"


def test_flipped_bits_lose_the_record_they_hit_and_no_other():
    choose = random.Random(5)
    extents = [item for item in items_of(written(clean=True)) if item.header.kind == items.RECORD]
    hits = 0
    for _ in range(1000):
        disk = written(clean=choose.random() < 0.9)
        files = [inode.current for name, inode in disk.now.items() if inode.current]
        target = choose.choice(files) if choose.random() < 0.1 else segment_of(disk)
        bit = choose.randrange(len(target) * 8)
        target[bit // 8] ^= 1 << bit % 8
        in_segment = target is segment_of(disk)
        hit = [item.header.id for item in extents if in_segment and item.offset <= bit // 8 < item.end]
        spool = reopened(disk)
        entries = drain(spool)
        assert lost_of(entries) == hit
        assert spool.records_lost == len(hit)
        assert all(entry.head in (None, b"%d" % entry.first) for entry in entries if isinstance(entry, Lost))
        hits += len(hit)
        spool.acknowledge(3)
        spool._work()
        assert sum(name.endswith(".bad") for name in disk.now) == len(hit)
        spool._closing = True
        spool._work()
        spool._release()
        disk.locked = False
        assert drain(reopened(disk)) == []
    assert hits > 500


@given(data=st.binary(max_size=3000), salt=st.integers(0, 2**64 - 1))
def test_anything_at_all_in_a_segment_is_looked_through_once(data, salt):
    disk = Disk()
    fd = disk.create(DIRECTORY / "x")
    header = items.pack(items.RECORD, 7, b"head", b"body", salt)
    disk.write(fd, [data, header, b"headbody", data], 0)
    entries = list(items.scan(disk, fd, disk.size(fd), salt))
    assert [entry.offset for entry in entries[1:]] == [entry.end for entry in entries[:-1]]
    assert [entry.header.id for entry in entries if isinstance(entry, items.Item)] == [7]


def test_a_record_that_holds_a_spool_is_not_read_as_one():
    inner = bytes(segment_of(written(clean=True)))
    disk = Disk()
    spool = reopened(disk)
    for body in (inner, inner):
        spool.append(b"", body)
        spool._work()
    segment_of(disk)[items.HEADER_BYTES - 1] ^= 1
    lost, record = spool.read(), spool.read()
    assert (lost, bytes(record.body)) == (Lost(1, 1, "damaged"), inner)


# Disks that fail.


def test_after_a_failed_sync_nothing_is_durable_until_it_was_written_again():
    disk = Disk()
    spool = reopened(disk)
    spool.append(b"1", body_of(1))
    spool._work()
    for number in (2, 3):
        spool.append(b"%d" % number, body_of(number))
    disk.fail_sync = errno.EIO
    spool._work()
    assert (spool.synced_through, spool.failures) == (1, 1)
    spool._work()
    assert spool.synced_through == 3
    left = disk.crash(lambda n: 0)  # nothing that was not synced
    assert numbers(drain(reopened(left))) == [1, 2, 3]


def test_what_comes_while_the_disk_fails_has_no_more_room_than_else():
    disk = Disk()
    spool = SteppedSpool(DIRECTORY, files=disk, bytes_max=8000, segment_bytes=1000)
    spool.open()
    spool.append(b"1", body_of(1))
    disk.fail_sync = errno.EIO
    spool._work()
    number = 1
    with contextlib.suppress(FullError):
        for number in range(2, 200):
            spool.append(b"%d" % number, body_of(number))
    with pytest.raises(FullError) as full:
        spool.append(b"more", body_of(number))
    assert full.value.reason == "spool_full"
    spool._work()
    assert spool.synced_through == spool.last
    assert spool.nbytes <= 8000


def test_a_disk_that_fails_for_long_leaves_a_bounded_queue_in_memory():
    class Broken(Disk):
        broken = False

        def fdatasync(self, fd):
            self.fail_sync = errno.EIO if self.broken else None
            super().fdatasync(fd)

    disk, synced = Broken(), []
    spool = SteppedSpool(DIRECTORY, files=disk, unsynced_bytes_max=4000, on_synced=synced.append)
    spool.open()
    spool.append(b"1", body_of(1))
    disk.broken = True
    spool._work()
    for number in (2, 3):
        spool.append(b"%d" % number, body_of(number))
    with pytest.raises(FullError, match="Input/output error") as full:
        spool.append(b"4", body_of(4))
    assert full.value.reason == "disk_failed"
    assert [spool.read().id for _ in range(3)] == [1, 2, 3]
    for _ in range(5):
        spool._work()
    assert (synced, len([n for n in disk.now if n.endswith(".spool")])) == ([], 1)
    disk.broken = False
    spool._work()
    assert synced == [3]
    spool.append(b"4", body_of(4))
    spool._work()
    assert numbers(drain(reopened(disk.crash(lambda n: 0)))) == [1, 2, 3, 4]


def test_a_segment_ends_where_any_newer_one_begins():
    segments = [Segment(DIRECTORY / str(n), n, first, 0) for n, first in enumerate((1, 8, 4, 6))]
    assert stops(segments) == [4, 4, 6, ENDLESS]


def test_what_was_read_and_removed_is_not_kept_open(tmp_path):
    """A full disk would have no room in it, and what waits for room is what comes next."""
    with Spool(tmp_path) as spool:
        fill(spool, 3)
        assert numbers(drain(spool)) == [1, 2, 3]
        with spool._changed:
            spool._begin_segment()
        spool.acknowledge(3)
        eventually(lambda: len(list(tmp_path.glob("*.spool"))) == 1)
        assert spool.read() is None
        held = [entry.resolve() for entry in pathlib.Path("/proc/self/fd").iterdir()]
        assert not [path for path in held if path.parent == tmp_path and "(deleted)" in path.name]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.ESTALE])
def test_what_the_disk_does_not_give_once_is_read_later_and_not_lost(code, caplog):
    disk = written(clean=True)
    spool = reopened(disk)
    disk.fail_read = code
    assert spool.read() is None
    assert (spool.records_lost, spool.status()["failures"], spool.unread) == (0, 1, 3)
    assert spool.trouble == os.strerror(code)
    disk.fail_read = code
    assert spool.read() is None  # it is not asked all the time
    assert spool.status()["failures"] == 1
    assert numbers([spool.read(LIMIT_S)]) == [1]
    assert (spool.status()["failures"], spool.trouble) == (2, None)
    assert numbers(drain(spool)) == [2, 3]
    assert spool.records_lost == 0
    spool.acknowledge(3)
    spool._work()
    assert not [name for name in disk.now if name.endswith(".bad")]
    events = [(record.event, record.getMessage()) for record in caplog.records]
    assert [event for event, _ in events] == ["spool_failed", "spool_works"]
    assert events[0][1] == f"spool /spool: record 1 cannot be read: {os.strerror(code)}; trying again"


def test_a_segment_that_someone_took_away_is_missing_and_nothing_waits_for_it(tmp_path):
    with Spool(tmp_path, segment_bytes=2500) as spool:
        fill(spool, 6)
        sorted(tmp_path.glob("*.spool"))[1].unlink()
        entries = [spool.read(LIMIT_S) for _ in range(5)]
        assert [entry.id for entry in entries] == [1, 2, 4, 5, 6]
        assert entries[2] == Lost(3, 4, "missing")
        spool.acknowledge(6)
        assert spool.wait_acknowledged(6, LIMIT_S)
        eventually(lambda: not spool._due() or spool.failures)
        assert (spool.failures, spool.trouble) == (0, None)


def test_a_directory_that_is_not_there_for_a_while_loses_nothing(tmp_path):
    with Spool(tmp_path / "s", segment_bytes=2500) as spool:
        fill(spool, 6)
        (tmp_path / "s").rename(tmp_path / "away")
        assert spool.read(0.2) is None
        assert spool.status()["failures"] > 1
        (tmp_path / "away").rename(tmp_path / "s")
        assert spool.read(LIMIT_S).id == 1
        assert numbers(drain(spool)) == list(range(2, 7))


def test_what_an_earlier_process_left_and_the_disk_does_not_give_is_an_error_that_says_so():
    disk = written(clean=True)
    spool = reopened(disk)
    disk.fail_read = errno.EIO
    with pytest.raises(
        CapflowError, match=r"spool /spool cannot be read: got Input/output error, expected a readable disk"
    ):
        list(spool.heads())


def test_what_a_crash_cut_stays_cut_when_the_disk_fails_next():
    disk = Disk()
    spool = reopened(disk)
    for head in (b"1", b"old", b"old"):
        spool.append(head, b"")
    disk = disk.crash(lambda n: 1)
    # The second record was never durable, so the third is void.
    segment_of(disk)[items.HEADER_BYTES + 10] ^= 1
    spool = reopened(disk)
    assert spool.last == 1
    spool.append(b"2", b"")
    spool.append(b"3", b"")
    assert [spool.read().head, spool.read().head] == [b"1", b"2"]
    spool.acknowledge(2)
    disk.fail_sync = errno.EIO
    spool._work()
    assert (spool.synced_through, spool.acknowledged_through) == (1, 2)
    spool = reopened(disk.crash(lambda n: 1))
    assert [entry.head for entry in drain_any(spool)] in ([], [b"3"])


def drain_any(spool):
    entries = []
    while (entry := spool.read()) is not None:
        entries.append(entry)
    return entries


def test_a_full_disk_says_so_and_takes_records_again_when_it_has_room(tmp_path):
    with mounted(tmp_path, "4m"), Spool(tmp_path / "s", segment_bytes=500_000) as spool:
        with pytest.raises(FullError, match="No space left on device") as full:
            fill(spool, 100, 100_000)
        assert full.value.reason == "disk_full"
        last = spool.last
        assert 30 < last < 42
        assert spool.wait_synced(last, LIMIT_S)
        for number in range(1, 21):
            assert bytes(spool.read().body) == body_of(number, 100_000)
        spool.acknowledge(20)
        assert spool.wait_acknowledged(20, LIMIT_S)
        spool.put(b"%d" % (last + 1), body_of(last + 1, 100_000), timeout_s=LIMIT_S)
        assert spool.wait_synced(last + 1, LIMIT_S)
        assert numbers(drain(spool)) == list(range(21, last + 2))
        assert spool.records_lost == 0


def test_a_disk_that_turns_read_only_says_so_and_is_read_on(tmp_path):
    with mounted(tmp_path, "4m"):
        with Spool(tmp_path / "s", segment_bytes=5000) as spool:
            fill(spool, 10)
            subprocess.run(
                ["mount", "-o", "remount,ro", tmp_path], check=False, capture_output=True
            )  # busy: it is open
        subprocess.run(["mount", "-o", "remount,ro", tmp_path], check=True)
        with pytest.raises(CapflowError, match="cannot be used: got Read-only file system"):
            Spool(tmp_path / "s").open()


def test_a_file_that_may_not_grow_is_a_full_disk(tmp_path):
    child = textwrap.dedent("""
        import resource, sys
        from capflow.buffers.spool import FullError, Spool
        with Spool(sys.argv[1]) as spool:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
            try:
                while True:
                    spool.append(b"", bytes(1000))
            except FullError as e:
                assert e.reason == "disk_full", e
            assert spool.wait_synced(spool.last, 20)
            print(spool.last)
    """)
    done = subprocess.run([sys.executable, "-c", child, tmp_path], capture_output=True, text=True, check=True)
    with Spool(tmp_path) as spool:
        count = int(done.stdout)
        assert 40 < count <= 50
        for _ in range(count):
            assert bytes(spool.read().body) == bytes(1000)
        assert spool.read() is None


def test_a_write_that_fails_takes_nothing(tmp_path):
    class Failing(Files):
        fails = 0

        def write(self, fd, parts, offset):
            if self.fails:
                self.fails -= 1
                super().write(fd, [b"".join(parts)[:30]], offset)
                raise OSError(errno.EIO, "no")
            super().write(fd, parts, offset)

    files = Failing()
    with Spool(tmp_path, files=files) as spool:
        fill(spool, 2)
        spool.acknowledge(0)
        eventually(lambda: not spool._due())
        files.fails = 1
        with pytest.raises(FullError) as full:
            spool.append(b"3", b"x")
        assert full.value.reason == "disk_failed"
        fill(spool, 2)
    with Spool(tmp_path) as spool:
        assert numbers(drain(spool)) == [1, 2, 3, 4]
