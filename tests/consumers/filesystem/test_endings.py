"""Requests on their way to the disk: in order, together where that saves a sync, and each with a result of its own."""

from __future__ import annotations

import ctypes
import errno
import threading
from collections import Counter

import msgspec
import numpy as np
import pytest

import capflow
from capflow.capture.site import Site
from capflow.errors import RetryError
from capflow_consumers.dataset import disk
from capflow_consumers.dataset.rows import RowBuffer
from capflow_consumers.dataset.shards import file as shardfile
from capflow_consumers.filesystem.consumer import FilesystemConfig, FilesystemConsumer
from capflow_consumers.filesystem.writing import Endings
from tests.kit.frames import make_frame, make_model
from tests.kit.stored import Counts, done, names
from tests.kit.waiting import eventually

SITES = (Site(0, "post_block"), Site(1, "post_block"))
LAYOUTS = ("per_file", "packed", "sharded")


@pytest.fixture
def held(monkeypatch):
    """Return an event that every sync waits for, and the number of syncs begun of each kind."""
    go, begun = threading.Event(), Counter()

    def hold(module, name):
        call = getattr(module, name)

        def held(*args):
            begun[name] += 1
            assert go.wait(60)
            return call(*args)

        monkeypatch.setattr(module, name, held)

    hold(disk, "sync_trees")
    hold(shardfile.os, "fdatasync")
    return go, begun


def opened(root, layout, **options):
    consumer = FilesystemConsumer(FilesystemConfig(str(root), layout=layout, hooks=["post_block"], **options))
    consumer.check()
    consumer.open(Counts())
    consumer.on_session("engine-1", msgspec.structs.replace(make_model(), sites=SITES))
    return consumer


def give(consumer, request, seq, rows=5):
    consumer.on_frame(make_frame([(request, 4, 0, rows)], SITES, seq=seq, boot="b"))
    return consumer.on_request_done(done(request, computed_length=rows, rows=len(SITES) * rows))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_requests_that_end_during_a_sync_share_the_next(tmp_path, layout, held):
    go, begun = held
    consumer = opened(tmp_path, layout)
    futures = [give(consumer, "r0", 1)]
    eventually(lambda: begun.total() == 1)
    futures += [give(consumer, f"r{n}", 1 + n) for n in range(1, 20)]
    assert not any(future.done() for future in futures)
    assert names(tmp_path) == []  # nothing is seen that is not on the disk
    go.set()
    consumer.close()
    assert {future.result(0).status for future in futures} == {"ok"}
    assert begun.total() == 2
    assert sorted(capflow.open(tmp_path).requests()) == sorted(f"r{n}" for n in range(20))
    capflow.open(tmp_path).verify()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_after_a_sync_that_fails_its_requests_are_written_again(tmp_path, layout, monkeypatch, held):
    go, begun = held
    go.set()
    consumer = opened(tmp_path, layout)
    assert give(consumer, "before", 1).result(20).status == "ok"
    go.clear()
    count = begun.total()
    first = give(consumer, "first", 2)
    eventually(lambda: begun.total() == count + 1)
    late = [give(consumer, f"late{n}", 3 + n) for n in range(3)]
    module, name = (shardfile.os, "fdatasync") if layout == "sharded" else (disk, "sync_trees")
    whole = getattr(module, name)

    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module, name, broken)
    go.set()
    assert first.result(20).status == "ok"
    eventually(lambda: consumer._parts.endings.trouble)
    for call in (consumer.on_idle, lambda: consumer.on_frame(make_frame([("r1", 4, 0, 5)], SITES, seq=9, boot="b"))):
        with pytest.raises(RetryError, match="cannot be written: got Input/output error"):
            call()
    assert not any(future.done() for future in late)
    monkeypatch.setattr(module, name, whole)
    assert [future.result(20).status for future in late] == ["ok"] * 3
    consumer.on_idle()
    consumer.close()
    dataset = capflow.open(tmp_path)
    assert sorted(dataset.requests()) == ["before", "first", "late0", "late1", "late2"]
    dataset.verify()


def test_a_sync_that_fails_says_why(tmp_path, monkeypatch):
    def syncfs(_):
        ctypes.set_errno(errno.EIO)
        return -1

    monkeypatch.setattr(disk, "_syncfs", syncfs)
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}'"):
        disk.sync_trees([tmp_path])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_id_that_comes_again_waits_for_the_first(tmp_path, layout, held):
    go, begun = held
    consumer = opened(tmp_path, layout, on_collision="suffix")
    first = give(consumer, "r1", 1, rows=4)
    eventually(lambda: begun.total() == 1)
    threading.Timer(0.2, go.set).start()
    second = give(consumer, "r1", 2, rows=6)
    assert first.done()
    consumer.close()
    assert first.result().status == second.result().status == "ok"
    captures = capflow.open(tmp_path).captures("r1")
    assert [len(capture[SITES[0]].rows) for capture in captures] == [4, 6]


def test_memory_is_bounded_while_the_disk_is_slow(tmp_path, held):
    go, begun = held
    consumer = opened(tmp_path, "packed", buffer_bytes_max=500_000)
    frame = make_frame([("r0", 4, 0, 50)], SITES, hidden=1024)
    assert 500_000 > frame.nbytes > 500_000 / 2
    consumer.on_frame(frame)
    future = consumer.on_request_done(done("r0", computed_length=50, rows=100))
    eventually(lambda: begun.total() == 1)
    threading.Timer(0.2, go.set).start()
    consumer.on_frame(make_frame([("r1", 4, 0, 50)], SITES, hidden=1024, seq=2))
    assert future.done()  # the next frame waited for it
    consumer.close()


@pytest.mark.parametrize("which", ["write", "publish"])
def test_what_neither_expects_is_the_results(which):
    def failing(_):
        raise ZeroDivisionError(which)

    def write(request):
        return request if which == "publish" else failing(request)

    def publish(group):
        return failing(group)

    endings = Endings(write, publish)
    endings.open()
    futures = [endings.put(n, str(n), 10) for n in range(3)]
    endings.close()
    assert [type(future.exception(0)) for future in futures] == [ZeroDivisionError] * 3
    assert endings.nbytes == 0


def test_rows_stay_in_a_frame_that_is_mostly_theirs():
    frame = np.arange(2 * 100 * 8, dtype=np.float32).reshape(2, 100, 8)
    buffer = RowBuffer()
    assert buffer.add(SITES, 0, frame[:, :90], frame.nbytes) == frame.nbytes
    assert buffer.add(SITES, 90, frame[:, 90:], frame.nbytes) < frame.nbytes  # too few to be worth it: copied
    pieces = buffer.take()
    assert buffer.nbytes == 0
    for number, site in enumerate(SITES):
        assert b"".join(piece.rows.tobytes() for piece in pieces[site]) == frame[number].tobytes()
        assert [np.shares_memory(piece.rows, frame) for piece in pieces[site]] == [True, False]
