"""The duckdb consumer on a disk that fills up, and when its file is taken away."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from capflow.errors import CapflowError, FatalError, RetryError
from capflow.plugins.configure import configure, load_plugins
from capflow.steering.action import Abort, ActionApplied, Answered
from capflow.transport.client import Client
from tests.kit.databases import SITES, Counts, done, query
from tests.kit.disks import mounted
from tests.kit.frames import make_finished, make_frame, make_hello, make_model
from tests.kit.full_database import HIDDEN, filled, give, vectors
from tests.kit.hubs import address, running_hub, worker_link
from tests.kit.sources import ROOT
from tests.kit.waiting import eventually

__all__ = ["address"]

COUNTS = "SELECT request_id, count(*) FROM vectors GROUP BY ALL ORDER BY ALL"


def check_filled(tmp_path, results, error):
    path = tmp_path / "scores.duckdb"
    expected = f'{path} cannot be written: got Could not write file "scores.duckdb.wal": {error}'
    assert tuple(results) == ([expected] * 3, "ok")
    assert query(tmp_path, COUNTS) == [("big", 400), ("first", 4)]
    assert query(tmp_path, "SELECT request_id FROM requests ORDER BY ALL") == [("big",), ("first",)]


def test_what_a_full_disk_refuses_waits_for_room(tmp_path):
    def room():
        subprocess.run(["mount", "-o", "remount,size=64m", tmp_path], check=True)

    with mounted(tmp_path, "2m"):
        results = filled(tmp_path, lambda: None, room)
        check_filled(tmp_path, results, "No space left on device; make room on its disk")


def test_what_a_file_that_may_not_grow_refuses_waits_until_it_may(tmp_path):
    script = """
import json, resource, sys
from pathlib import Path
from tests.kit.full_database import filled
limit = lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))
print(json.dumps(filled(Path(sys.argv[1]), lambda: limit(1_000_000), lambda: limit(resource.RLIM_INFINITY))))
"""
    run = [sys.executable, "-c", script, tmp_path]
    child = subprocess.run(run, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    check_filled(tmp_path, json.loads(child.stdout), "File too large; allow larger files (ulimit -f)")


def remove_directory(path):
    shutil.rmtree(path.parent)


def put_another_there(path):
    path.with_name("other").touch()
    path.with_name("other").replace(path)


@pytest.mark.parametrize("take_away", [remove_directory, Path.unlink, put_another_there])
def test_a_file_that_somebody_took_away_is_an_error_from_then_on(tmp_path, take_away):
    root = tmp_path / "root"
    root.mkdir()
    consumer = vectors(root)
    assert give(consumer, "r1").status == "ok"
    take_away(root / "scores.duckdb")
    message = (
        r"scores\.duckdb cannot be written: got .*No such file or directory; put the file back where it was, or start"
    )
    for request in ("r2", "r3"):
        with pytest.raises(RetryError, match=message):
            give(consumer, request)
    action = Answered.of(Abort("r1"), ActionApplied("x", 7), engine="engine-1", asked_by="client")
    with pytest.raises(RetryError, match=message):
        consumer.on_action(action)
    with pytest.raises(CapflowError, match=message):
        consumer.close()


def test_a_file_that_is_put_back_is_written_again(tmp_path):
    consumer = vectors(tmp_path)
    path, aside = tmp_path / "scores.duckdb", tmp_path / "aside"
    assert give(consumer, "r1").status == "ok"
    path.rename(aside)
    with pytest.raises(RetryError):
        give(consumer, "r2")
    aside.rename(path)
    assert consumer.on_request_done(done("r2", rows=4)).status == "ok"
    consumer.close()
    assert query(tmp_path, COUNTS) == [("r1", 4), ("r2", 4)]


def test_a_file_that_is_taken_away_while_it_is_written_is_opened_again(tmp_path):
    consumer = vectors(tmp_path)
    path = tmp_path / "scores.duckdb"
    insert = consumer._database._insert

    def taken_away(tables, adopted):
        insert(tables, adopted)
        path.unlink()

    consumer._database._insert = taken_away
    with pytest.raises(FatalError, match="cannot be written: got No such file"):
        give(consumer, "r1")
    with pytest.raises(CapflowError):
        consumer.close()
    consumer.open(Counts())
    assert give(consumer, "r1").status == "ok"
    consumer.close()
    assert query(tmp_path, COUNTS) == [("r1", 4)]


def test_what_was_committed_outlives_a_kill_though_the_log_was_removed(tmp_path):
    consumer = vectors(tmp_path)
    assert give(consumer, "r1").status == "ok"
    (tmp_path / "scores.duckdb.wal").unlink()
    assert give(consumer, "r2").status == "ok"
    left = tmp_path / "left"
    left.mkdir()
    for file in tmp_path.glob("scores.duckdb*"):
        shutil.copy(file, left)
    consumer.close()
    assert query(left, COUNTS) == [("r1", 4), ("r2", 4)]


def test_rows_that_waited_for_room_are_all_there_after_a_restart_while_their_request_runs(address, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    options = {"path": str(disk / "scores.duckdb"), "site": "post_block:1", "vectors": True, "batch_rows": 50}
    options["spool_dir"] = str(tmp_path / "spool")
    hello = make_hello(model=make_model(hidden=HIDDEN))
    with mounted(disk, "2m"), worker_link(address, hello, wait=False) as link:

        def send(numbers):
            assert link.wait_welcome(20)
            for number in numbers:
                span, ends = ("r1", 20, 20 * number, 20), [make_finished("r1", 20, 640)] if number == 31 else []
                frame = make_frame([span], SITES[1:2], hidden=HIDDEN, step=number, finished=ends)
                assert link.send(frame.header, frame.payload) is None

        with running_hub(address, configure("duckdb", options, load_plugins())) as hub:
            send(range(16))
            eventually(lambda: hub.lanes[0].status()["retrying"])
            send(range(16, 24))
            subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
            eventually(lambda: not hub.lanes[0].status()["retrying"] and not hub.lanes[0].inbox.unread)
        with running_hub(address, configure("duckdb", options, load_plugins())) as hub, Client(address) as client:
            send(range(24, 32))
            (result,) = client.results(["r1"], timeout=30)["r1"].values()
        assert (result.status, result.error) == ("ok", None)
        assert query(disk, COUNTS) == [("r1", 640)]
        assert query(disk, "SELECT count(DISTINCT position) FROM vectors") == [(640,)]
