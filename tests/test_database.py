"""The duckdb consumer on a disk that fills up, and when its file is taken away."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from disks import mounted
from frames import make_frame
from test_duckdb import SITES, done, opened, query

from capflow.action import Abort, Answered, Applied
from capflow.errors import CapflowError

HIDDEN = 4096  # numbers in a row, of which `vectors` writes four bytes each
COUNTS = "SELECT request_id, count(*) FROM vectors GROUP BY ALL ORDER BY ALL"


def vectors(tmp_path):
    """Return a consumer that writes 16 KiB for each token."""
    return opened(tmp_path, site="post_block:1", vectors=True)


def give(consumer, request, length=4):
    """Give a request, whole; return its result."""
    consumer.on_frame(make_frame([(request, length, 0, length)], SITES[1:2], hidden=HIDDEN))
    return consumer.on_request_done(done(request, length, length, rows=length))


def filled(tmp_path, little_room, room):
    """Give a request for which there is no room between others, and then one for which room was made; return all results."""
    consumer = vectors(tmp_path)
    little_room()
    results = [give(consumer, "first"), give(consumer, "big", 400), give(consumer, "small")]
    room()
    results.append(give(consumer, "again", 400))
    consumer.close()
    return [(result.status, result.error) for result in results]


def check_filled(tmp_path, results, error):
    path = tmp_path / "scores.duckdb"
    expected = f'{path} cannot be written: got Could not write file "scores.duckdb.wal": {error}'
    assert results == [("ok", None), ("error", expected), ("ok", None), ("ok", None)]
    assert query(tmp_path, COUNTS) == [("again", 400), ("first", 4), ("small", 4)]
    assert query(tmp_path, "SELECT request_id FROM requests ORDER BY ALL") == [("again",), ("first",), ("small",)]


def test_a_full_disk_is_the_requests_error_those_before_stay_and_room_is_used(tmp_path):
    def room():
        subprocess.run(["mount", "-o", "remount,size=64m", tmp_path], check=True)

    with mounted(tmp_path, "2m"):
        results = filled(tmp_path, lambda: None, room)
        check_filled(tmp_path, results, "No space left on device; make room on its disk")


def test_a_file_that_may_not_grow_is_the_requests_error_until_it_may(tmp_path):
    script = """
import json, resource, sys
from pathlib import Path
from test_database import filled
limit = lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))
print(json.dumps(filled(Path(sys.argv[1]), lambda: limit(1_000_000), lambda: limit(resource.RLIM_INFINITY))))
"""
    run = [sys.executable, "-c", script, tmp_path]
    child = subprocess.run(run, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True, check=True)
    results = [tuple(result) for result in json.loads(child.stdout)]
    check_filled(tmp_path, results, "File too large; let files be larger (ulimit -f)")


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
    said = (
        r"scores\.duckdb cannot be written: got .*No such file or directory; put the file back where it was, or start"
    )
    for request in ("r2", "r3"):
        result = give(consumer, request)
        assert result.status == "error"
        assert re.search(said, result.error)
    action = Answered.of(Abort("r1"), Applied("x", 7), engine="engine-1", asked_by="client")
    with pytest.raises(CapflowError, match=said):
        consumer.on_action(action)
    with pytest.raises(CapflowError, match=said):
        consumer.close()


def test_a_file_that_is_put_back_is_written_again(tmp_path):
    consumer = vectors(tmp_path)
    path, aside = tmp_path / "scores.duckdb", tmp_path / "aside"
    assert give(consumer, "r1").status == "ok"
    path.rename(aside)
    assert give(consumer, "r2").status == "error"
    aside.rename(path)
    assert give(consumer, "r3").status == "ok"
    consumer.close()
    assert {("r1", 4), ("r3", 4)} <= set(query(tmp_path, COUNTS))


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
