"""Writing and syncing the files of a data set, and how errors of their file system are judged."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from capflow import limits
from capflow.errors import RetryError, kind_of
from capflow_consumers.dataset import disk
from tests.kit.frames import make_frame
from tests.kit.stored import SITES, done, opened

GONE = (errno.ENOENT, errno.EACCES, errno.ENOTCONN)


def kind(root, code):
    return kind_of(disk.judged(root, OSError(code, os.strerror(code))))


@pytest.mark.parametrize("code", [*GONE, errno.EROFS, errno.ENOSPC])
def test_an_error_while_the_root_is_away_is_tried_again(tmp_path, code):
    assert kind(tmp_path / "root", code) == "retry"


@pytest.mark.parametrize("code", GONE)
def test_an_error_below_a_root_that_is_there_has_the_data_set_opened_again(tmp_path, code):
    (tmp_path / disk.LOCK).touch()
    assert kind(tmp_path, code) == "fatal"


def test_an_error_of_one_request_is_that_requests(tmp_path):
    assert kind(tmp_path, errno.ENAMETOOLONG) == "poison"


def test_a_consumer_that_is_opened_again_makes_no_root_in_the_place_of_one_that_is_away(tmp_path):
    root = tmp_path / "root"
    consumer = opened(root)
    consumer.close()
    root.rename(tmp_path / "elsewhere")
    with pytest.raises(RetryError, match=r"root cannot be written: got No such file or directory, .*; mount it, or"):
        consumer.open(consumer._context)
    assert not root.exists()
    (tmp_path / "elsewhere").rename(root)
    consumer.open(consumer._context)
    consumer.close()


@pytest.fixture
def begun(monkeypatch):
    """Return the ranges that the disk was asked to begin with; the calls fail."""
    ranges = []

    def sync_file_range(_, offset, nbytes, flags):
        ranges.append((offset, nbytes, flags))
        return -1

    monkeypatch.setattr(disk, "_sync_file_range", sync_file_range)
    return ranges


@pytest.mark.parametrize("synced", [False, True])
def test_parts_of_any_length_lie_one_after_another(tmp_path, begun, synced):
    sizes = [0, 3, 19 * limits.MIB + 1, 5, 0, *[700] * 1500, 2 * limits.MIB, 1]
    parts = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    ahead = disk.Ahead(limits.MIB) if synced else None
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    assert disk.write(fd, parts, 7, ahead) == 7 + sum(sizes)
    os.close(fd)
    assert (tmp_path / "file").read_bytes() == bytes(7) + b"".join(parts)
    assert (len(begun) >= 3) == synced
    ends = [offset + nbytes for offset, nbytes, _ in begun]
    assert [offset for offset, _, _ in begun] == [0, *ends][: len(begun)]
    assert all(limits.MIB <= nbytes <= 16 * limits.MIB and flags == 2 for _, nbytes, flags in begun)


def test_few_bytes_wait_for_more(tmp_path, begun):
    ahead = disk.Ahead(1000)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    for number in range(5):
        disk.write(fd, [bytes(400)], 400 * number, ahead)
    os.close(fd)
    assert begun == [(0, 1200, 2)]


@pytest.mark.parametrize("fsync", [False, True])
@pytest.mark.parametrize("layout", ["per_file", "packed", "sharded"])
def test_the_disk_begins_with_the_rows_of_a_request_where_they_are_synced(tmp_path, begun, layout, fsync):
    consumer = opened(tmp_path, layout=layout, fsync=fsync)
    consumer.on_frame(make_frame([("r1", 4, 0, 5000)], SITES[:1], hidden=1024))
    assert consumer.on_request_done(done("r1", computed_length=5000, rows=5000)).status == "ok"
    consumer.close()
    assert bool(begun) == fsync


def test_an_error_since_the_descriptor_was_opened_is_seen(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(disk, "_syncfs", lambda fd: asked.append(fd) or 0)
    with (tmp_path / "file").open("w") as file:
        disk.sync_trees([tmp_path], file.fileno())
        assert asked == [file.fileno()]
        assert file.write("is open still") == 13


def test_a_consumer_syncs_with_a_descriptor_that_is_older_than_the_rows(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(disk, "_syncfs", lambda fd: asked.append(str(Path(f"/proc/self/fd/{fd}").readlink())) or 0)
    consumer = opened(tmp_path, layout="packed", fsync=True)
    consumer.on_frame(make_frame([("r1", 4, 0, 4)], SITES[:1]))
    consumer.on_request_done(done("r1", rows=4))
    (path,) = asked
    assert path.startswith(f"{tmp_path}/.partial-")
    assert path.endswith("/lock")
    consumer.close()
