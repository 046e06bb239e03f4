"""A data set in every layout: `per_file`, `packed` and `sharded`."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

import capflow
from capflow.capture.frame import Frame, Rank
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow.errors import CapflowError, RetryError, UsageError
from capflow.plugins import configure
from capflow_consumers.dataset import disk
from capflow_consumers.dataset.layout import SHARD_PATTERN
from capflow_consumers.dataset.shards import file as shardfile
from capflow_consumers.filesystem.consumer import FilesystemConsumer
from tests.kit.disks import mounted
from tests.kit.frames import make_frame, row_of, token_of
from tests.kit.sources import ROOT
from tests.kit.stored import SITES, assert_is_whole, assert_site_has, done, names, opened
from tests.kit.stored_layouts import LAYOUTS


@pytest.fixture(params=LAYOUTS)
def options(request):
    return LAYOUTS[request.param]


def files_under(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and path.name != ".lock")


def capture(root, request, options, *, length=5, sites=SITES, seq=1, boot="b", **more):
    consumer = opened(root, sites, **options, **more)
    consumer.on_frame(make_frame([(request, 4, 0, length)], sites, texts=True, seq=seq, boot=boot))
    result = consumer.on_request_done(done(request, computed_length=length, rows=length * len(sites)))
    consumer.close()
    return result


def test_a_request_is_read_as_it_was_captured(tmp_path, options):
    assert capture(tmp_path, "r1", options).status == "ok"
    dataset = capflow.open(tmp_path)
    assert_is_whole(dataset["r1"], "r1", SITES, 5)
    assert dataset["r1"].texts == {p: f" {token_of('r1', p)}" for p in range(5)}
    assert not dataset["r1"][SITES[0]].rows.flags.writeable
    assert dataset.requests() == ["r1"]
    assert [capture.id for capture in dataset] == ["r1"]
    dataset.verify()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rows_are_bit_for_bit_those_of_the_model(tmp_path, options, dtype):
    consumer = opened(tmp_path, SITES, **options)
    consumer.on_frame(make_frame([("r1", 3, 0, 3)], SITES, dtype=dtype))
    consumer.on_request_done(done(prompt_length=3, computed_length=3, rows=9))
    consumer.close()
    for site in SITES:
        assert_site_has(capflow.open(tmp_path)["r1"], "r1", site, [0, 1, 2], dtype=dtype)


def test_how_many_files_a_request_is(tmp_path):
    counts = {}
    for name, options in LAYOUTS.items():
        for request in ("a", "b"):
            capture(tmp_path / name, request, options)
        counts[name] = len(files_under(tmp_path / name))
    assert counts == {
        "per_file": 2 * (len(SITES) + 1),
        "packed": 2 * 2,
        "sharded": 2,
        "zstd": 2,
    }  # a shard for each hub


def test_a_packed_file_is_plain_safetensors(tmp_path):
    capture(tmp_path, "r1", LAYOUTS["packed"])
    tensors = load_file(tmp_path / "r1" / "rows.safetensors")
    assert len(tensors) == 3 * len(SITES)
    expected = np.stack([row_of("r1", SITES[2], p) for p in range(5)])
    assert tensors["mlp_in.001.rows"].tobytes() == expected.tobytes()
    assert tensors["mlp_in.001.positions"].tolist() == list(range(5))


def test_rows_that_came_early_are_in_their_place(tmp_path, options):
    consumer = opened(tmp_path, SITES, buffer_bytes_max=0, **options)
    for step, start in enumerate((0, 4, 5), 1):
        length = 4 if start == 0 else 1
        consumer.on_frame(make_frame([("r1", 4, start, length), ("r2", 4, start, length)], SITES, seq=step))
    for request in ("r1", "r2"):
        assert consumer.on_request_done(done(request, computed_length=6, rows=18)).status == "ok"
    consumer.close()
    for request in ("r1", "r2"):
        assert_is_whole(capflow.open(tmp_path)[request], request, SITES, 6)


def test_sites_in_different_dtypes(tmp_path, options):
    consumer = opened(tmp_path, SITES, capture="requests", **options)
    spec = CaptureSpec.parse({"hooks": {"post_block": [0, 1]}, "dtype": "float32"})
    mixed = msgspec.structs.replace(spec)
    consumer.on_frame(make_frame([("r1", 3, 0, 3)], SITES[:2], dtype="bfloat16", captures={"r1": mixed}))
    result = consumer.on_request_done(done(prompt_length=3, computed_length=3, rows=6))
    consumer.close()
    assert result.status == "ok", result.error
    for site in SITES[:2]:
        assert_site_has(capflow.open(tmp_path)["r1"], "r1", site, [0, 1, 2], dtype="bfloat16", stored="float32")


def test_a_request_without_rows_is_on_record(tmp_path, options):
    consumer = opened(tmp_path, **options)
    assert consumer.on_request_done(done(computed_length=0, rows=0, status="abort")).status == "ok"
    consumer.close()
    capture = capflow.open(tmp_path)["r1"]
    assert (capture.sites, capture.sidecar.status) == ((), "abort")
    capture.verify()


def test_a_request_that_is_given_again_is_known(tmp_path, options):
    first = capture(tmp_path, "r1", options, on_collision="suffix", seq=3)
    before = {path: (tmp_path / path).stat().st_mtime_ns for path in files_under(tmp_path)}
    consumer = opened(tmp_path, SITES, on_collision="suffix", **options)
    consumer.on_frame(make_frame([("r1", 4, 0, 5)], SITES, seq=3, boot="b"))
    assert consumer.on_request_done(done(computed_length=5, rows=15)) == first
    assert consumer._context.counts == {"requests_again": 1}
    consumer.on_frame(make_frame([("r1", 4, 0, 4)], SITES, seq=4, boot="b"))  # the same id, later
    assert consumer.on_request_done(done(rows=12)).status == "ok"
    consumer.on_frame(make_frame([("r1", 4, 0, 4)], SITES, seq=4, boot="b"))  # in the same hub
    consumer.on_request_done(done(rows=12))
    assert consumer._context.counts == {"requests_again": 2}
    consumer.close()
    assert {path: (tmp_path / path).stat().st_mtime_ns for path in before} == before
    dataset = capflow.open(tmp_path)
    assert [len(c[SITES[0]].rows) for c in dataset.captures("r1")] == [5, 4]
    assert len(dataset["r1"][SITES[0]].rows) == 4


def test_a_request_that_was_captured_in_another_layout_is_known(tmp_path, options):
    for before in ("packed", "sharded"):
        root = tmp_path / before
        capture(root, "r1", LAYOUTS[before], seq=3)
        consumer = opened(root, SITES, **options)
        consumer.on_frame(make_frame([("r1", 4, 0, 5)], SITES, seq=3, boot="b"))
        assert consumer.on_request_done(done(computed_length=5, rows=15)).status == "ok"
        assert consumer._context.counts == {"requests_again": 1}
        consumer.close()
        assert len(capflow.open(root)) == 1


def test_a_taken_id_is_an_error_and_the_old_capture_stays(tmp_path, options):
    capture(tmp_path, "r1", options)
    result = capture(tmp_path, "r1", options, length=4, boot="c")
    assert result.status == "error"
    assert "set on_collision to suffix" in result.error
    assert_is_whole(capflow.open(tmp_path)["r1"], "r1", SITES, 5)
    assert len(capflow.open(tmp_path)) == 1


# Parts of one request.


def test_the_late_rest_of_a_request_is_read_as_one_with_its_beginning(tmp_path, options):
    consumer = opened(tmp_path, **options)
    for seq, status in ((1, "error"), (2, "stop")):
        consumer.on_frame(make_frame([("r1", 4, seq * 4 - 4, 4)], seq=seq, texts=True))
        assert consumer.on_request_done(done(computed_length=8, rows=4, status=status)).status == "partial_error"
    consumer.close()
    dataset = capflow.open(tmp_path)
    assert [c.sidecar.status for c in dataset.captures("r1")] == ["error", "stop"]
    whole = dataset["r1"]
    assert_is_whole(whole, "r1", SITES[:1], 8)
    assert (whole.status, whole.error, whole.sidecar.rows, list(whole.texts)) == ("ok", None, 8, list(range(8)))
    (batch,) = dataset.batches(SITES[0], 100)
    assert batch.positions.tolist() == list(range(8))
    assert [c.id for c in dataset] == ["r1"]
    dataset.verify()


def test_parts_of_a_request_are_read_one_after_another(tmp_path, options):
    """Parts with consecutive positions are read one at a time, uncopied; others are put in order."""
    consumer = opened(tmp_path, **options)
    spans = {"behind": [(0, 4), (4, 8)], "between": [(0, 2), (6, 8), (2, 6)]}
    seq = itertools.count(1)
    for request, runs in spans.items():
        for part, status in zip((runs[:-1], runs[-1:]), ("error", "stop"), strict=True):
            for start, stop in part:
                consumer.on_frame(make_frame([(request, 4, start, stop - start)], seq=next(seq)))
            rows = sum(stop - start for start, stop in part)
            consumer.on_request_done(done(request, computed_length=8, rows=rows, status=status))
    consumer.close()
    dataset = capflow.open(tmp_path)
    for request in spans:
        assert_is_whole(dataset[request], request, SITES[:1], 8)
        assert dataset[request].positions(SITES[0]).tolist() == list(range(8))
    parts = list(dataset["behind"].in_batches(SITES[0]))
    assert [part.positions.tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    if options.get("compression") != "zstd":
        assert [part.rows.flags.owndata or part.rows.flags.writeable for part in parts] == [False, False]
    (joined,) = dataset["between"].in_batches(SITES[0])
    assert joined.positions.tolist() == list(range(8))


def test_a_request_that_ran_again_after_it_failed_is_not_joined_with_it(tmp_path, options):
    consumer = opened(tmp_path, on_collision="suffix", **options)
    for boot, status, length in (("b", "error", 4), ("c", "stop", 8)):
        consumer.on_frame(make_frame([("r1", 4, 0, length)], boot=boot))
        consumer.on_request_done(done(computed_length=8, rows=length, status=status))
    consumer.close()
    dataset = capflow.open(tmp_path)
    assert [len(c[SITES[0]].rows) for c in dataset] == [4, 8]
    assert_is_whole(dataset["r1"], "r1", SITES[:1], 8)


def test_pipeline_stages_that_came_to_different_hubs_are_read_as_one_request(tmp_path, options):
    for stage, sites in enumerate((SITES[:1], SITES[1:])):
        consumer = opened(tmp_path, SITES, on_collision="suffix", **options)
        consumer.on_frame(make_frame([("r1", 4, 0, 5)], sites, rank=Rank(stage, 0, 0), boot=f"b{stage}"))
        consumer.on_request_done(done(computed_length=5, rows=5 * len(sites)))
        consumer.close()
    dataset = capflow.open(tmp_path)
    assert_is_whole(dataset["r1"], "r1", SITES, 5)
    assert len(dataset) == 1


# Reading in batches, and while requests run.


def test_batches_hold_each_row_of_a_site_once(tmp_path, options):
    consumer = opened(tmp_path, SITES, **options)
    for request, length in (("a", 5), ("b", 1), ("c", 9)):
        consumer.on_frame(make_frame([(request, 4, 0, length)], SITES))
        consumer.on_request_done(done(request, computed_length=length, rows=3 * length))
    consumer.close()
    batches = list(capflow.open(tmp_path).batches(SITES[1], 4))
    assert [len(batch.rows) for batch in batches] == [4, 4, 4, 3]
    keys = [key for batch in batches for key in zip(batch.requests, batch.positions.tolist(), strict=True)]
    assert keys == [(r, p) for r, n in (("a", 5), ("b", 1), ("c", 9)) for p in range(n)]
    expected = np.stack([row_of(request, SITES[1], position) for request, position in keys])
    assert np.concatenate([batch.rows for batch in batches]).tobytes() == expected.tobytes()
    with pytest.raises(UsageError, match="rows_max: got 0, expected 1 or more"):
        next(capflow.open(tmp_path).batches(SITES[1], 0))


def test_rows_of_a_running_request_can_be_read_and_are_no_finished_request(tmp_path):
    consumer = opened(tmp_path, SITES, layout="per_file", tail_s=1e-9)
    dataset = capflow.open(tmp_path)
    for step, start in enumerate((0, 4, 5)):
        length = 1 if start else 4
        consumer.on_frame(make_frame([("r1", 4, start, length)], SITES, seq=step + 1))
        assert step or dataset.running() == []
        consumer.on_idle()
        (running,) = dataset.running()
        assert (running.id, running.about.prompt_length, set(running.sites)) == ("r1", 4, set(SITES))
        for site in SITES:
            rows, positions, token_ids = running[site]
            assert positions.tolist() == list(range(start + length))
            assert token_ids.tolist() == [token_of("r1", p) for p in positions]
            assert rows.tobytes() == np.stack([row_of("r1", site, p) for p in positions]).tobytes()
        assert "r1" not in dataset
        assert dataset.requests() == []
    (running,) = dataset.running()
    assert consumer.on_request_done(done(computed_length=6, rows=18)).status == "ok"
    assert dataset.running() == []
    assert_is_whole(dataset["r1"], "r1", SITES, 6)
    with pytest.raises(UsageError, match="look for the request in the data set if it has ended"):
        running[SITES[0]]
    consumer.close()


def test_half_a_row_of_a_running_request_is_not_read(tmp_path):
    consumer = opened(tmp_path, SITES, layout="per_file", tail_s=1e-9)
    consumer.on_frame(make_frame([("r1", 4, 0, 4)], SITES))
    consumer.on_idle()
    (file,) = tmp_path.glob(".partial-*/*/post_block.000.safetensors")
    with file.open("ab") as writing:
        writing.write(b"half")  # of the next row; its line is not written yet
    log = file.parent / "running.jsonl"
    log.write_bytes(log.read_bytes() + b'{"sites": ["post_block:0"], "spans": [[4, 5')
    (running,) = capflow.open(tmp_path).running()
    assert running[SITES[0]].positions.tolist() == [0, 1, 2, 3]
    os.truncate(file, file.stat().st_size - 4 - 8)  # a network mount that shows the log before the rows
    assert running[SITES[0]].rows.shape == (3, 8)
    consumer.close()


def test_what_a_dead_writer_had_under_way_does_not_run(tmp_path):
    script = """
import os, sys
from tests.kit.frames import make_frame
from tests.kit.stored import SITES, opened
consumer = opened(sys.argv[1], SITES, tail_s=1e-9)
consumer.on_frame(make_frame([("r1", 4, 0, 4)], SITES))
consumer.on_idle()
os.kill(os.getpid(), 9)
"""
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, check=False)
    assert run.returncode == -signal.SIGKILL
    assert list(tmp_path.glob(".partial-*/*/running.jsonl"))
    assert capflow.open(tmp_path).running() == []


# Failures.


NASTY = [
    "..",
    ".",
    "/etc/passwd",
    "a/../../b",
    "-",
    "con",
    "A",
    "a",
    "é" * 20,
    "日本語",
    "x" * 10_240,
    "a\0b",
    "\n",
    "shard~1",
]


def test_any_id_is_captured_inside_the_root_and_found_again(tmp_path, options):
    root = tmp_path / "deep" / "root"
    consumer = opened(root, **options)
    for seq, request in enumerate(NASTY, 1):
        consumer.on_frame(make_frame([(request, 4, 0, 4)], seq=seq))
        assert consumer.on_request_done(done(request)).status == "ok"
    consumer.close()
    dataset = capflow.open(root)
    assert sorted(dataset.requests()) == sorted(NASTY)
    for request in NASTY:
        assert_is_whole(dataset[request], request, SITES[:1], 4)
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["root"]
    assert all(len(name.encode()) < 128 for name in names(root))


def test_a_request_without_room_on_the_disk_waits_for_it_and_those_behind_it_too(tmp_path, options):
    with mounted(tmp_path, "400k"):
        consumer = opened(tmp_path, hooks=["post_block"], **options)
        header = make_frame([("big", 4, 0, 4)], hidden=37_500, seq=2).header
        big = Frame.seal(header, np.random.default_rng(0).bytes(4 * 150_000))  # which no compression makes smaller
        for seq, request in ((1, "first"), (2, "big"), (3, "last")):
            consumer.on_frame(make_frame([(request, 4, 0, 4)], seq=seq) if request != "big" else big)
        assert consumer.on_request_done(done("first")).status == "ok"
        more = ["mount", "-o", "remount,size=4m", tmp_path]
        waiting = threading.Timer(0.5, subprocess.run, [more], {"check": True})
        waiting.start()
        assert consumer.on_request_done(done("big")).status == "ok"
        assert not waiting.is_alive()
        assert consumer.on_request_done(done("last")).status == "ok"
        consumer.close()
        dataset = capflow.open(tmp_path)
        assert sorted(dataset.requests()) == ["big", "first", "last"]
        dataset.verify()
        for request in ("first", "last"):
            assert_is_whole(dataset[request], request, SITES[:1], 4)


def test_requests_wait_for_a_root_that_vanishes_and_have_no_result_without_it(tmp_path, options):
    root = tmp_path / "root"
    consumer = opened(root, **options)
    consumer.on_frame(make_frame())
    assert consumer.on_request_done(done()).status == "ok"
    subprocess.run(["rm", "-rf", root], check=True)
    consumer.on_frame(make_frame([("r2", 4, 0, 4)], seq=2))
    result = FilesystemConsumer.on_request_done(consumer, done("r2"))
    kept_open = options["layout"] == "sharded"  # r1 is in a shard that is not sealed
    with pytest.raises(CapflowError, match="cannot be put back: got 1 requests") if kept_open else nullcontext():
        consumer.close()
    with pytest.raises(RetryError, match="No such file or directory"):
        result.result(timeout=10)
    assert not root.exists()


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.9, 0.99])
def test_one_flipped_bit_is_noticed(tmp_path, options, share):
    capture(tmp_path, "r1", options)
    file = max((path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[int(len(data) * share)] ^= 1
    file.write_bytes(data)
    with pytest.raises(CapflowError, match=file.name):
        capflow.open(tmp_path).verify()


@pytest.mark.parametrize("left", [0, 7, 100, 0.3, -1])
def test_a_truncated_file_is_noticed(tmp_path, options, left):
    capture(tmp_path, "r1", options)
    file = max((path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    size = file.stat().st_size
    os.truncate(file, int(size * left) if isinstance(left, float) else left % size)
    with pytest.raises(CapflowError):
        capflow.open(tmp_path).verify()
    if (left, options["layout"]) == (-1, "sharded"):  # the last byte is the footer's, and no request's
        assert_is_whole(capflow.open(tmp_path)["r1"], "r1", SITES, 5)
        return
    with pytest.raises(CapflowError):
        assert_is_whole(capflow.open(tmp_path)["r1"], "r1", SITES, 5)


def test_options_that_do_not_go_together_are_named(tmp_path):
    plugins = configure.load_plugins()
    for text, message in (
        ("compression=zstd", "filesystem.compression: got zstd, expected none with packed; set layout=sharded"),
        ("layout=sharded,on_collision=overwrite", "on_collision: got overwrite, expected error or suffix with sharded"),
        ("layout=tar", "filesystem.layout: got tar, expected"),
        ("fsync=maybe", "filesystem.fsync: got maybe, expected"),
        ("shard_bytes=1", "filesystem.shard_bytes: got 1, expected 1048576 or more"),
        ("tail_s=nan", "filesystem.tail_s: got nan"),
        ("threads=-1", "filesystem.threads: got -1, expected 0 or more"),
        ("fsync=seal", "filesystem.fsync: got seal, expected true or false with packed; set layout=sharded"),
        ("layout=per_file,fsync=seal", "filesystem.fsync: got seal, expected true or false with per_file"),
        ("threads=2", "filesystem.threads: got 2, expected 0 with packed; set layout=per_file, or remove it"),
        ("layout=sharded,threads=2", "filesystem.threads: got 2, expected 0 with sharded; set layout=per_file"),
        ("tail_s=2", "filesystem.tail_s: got 2.0, expected 1.0 with packed; set layout=per_file, or remove it"),
        ("shard_bytes=2097152", "filesystem.shard_bytes: got 2097152, expected 1073741824 with packed; set layout="),
        (
            "layout=per_file,shard_bytes=2097152",
            "filesystem.shard_bytes: got 2097152, expected 1073741824 with per_file",
        ),
    ):
        name, options = configure.parse(f"filesystem:root={tmp_path},{text}")
        with pytest.raises(UsageError) as error:
            configure.configure(name, options, plugins).consumer.check()
        assert message in str(error.value)


def test_an_empty_root_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, options = configure.parse("filesystem:root=")
    with pytest.raises(UsageError, match=r"filesystem\.root: got '', expected the path of a directory"):
        configure.configure(name, options, configure.load_plugins()).consumer.check()
    assert list(tmp_path.iterdir()) == []


def test_threads_write_the_same_bytes(tmp_path):
    for threads in (0, 2):
        assert capture(tmp_path / str(threads), "r1", LAYOUTS["per_file"], threads=threads).status == "ok"
    files = files_under(tmp_path / "0")
    assert len(files) == len(SITES) + 1
    assert files_under(tmp_path / "2") == files
    for file in files:
        assert (tmp_path / "2" / file).read_bytes() == (tmp_path / "0" / file).read_bytes()
    assert_is_whole(capflow.open(tmp_path / "2")["r1"], "r1", SITES, 5)


@pytest.mark.parametrize(("fsync", "requests", "seals"), [(True, 3, 1), ("seal", 0, 1), (False, 0, 0)])
def test_what_is_synced_is_what_fsync_says(tmp_path, monkeypatch, fsync, requests, seals):
    synced = []
    monkeypatch.setattr(shardfile.os, "fdatasync", synced.append)
    monkeypatch.setattr(disk, "sync", synced.append)
    consumer = opened(tmp_path, layout="sharded", fsync=fsync)
    synced.clear()
    for number in range(3):
        consumer.on_frame(make_frame([(f"r{number}", 4, 0, 4)], seq=number + 1))
        assert consumer.on_request_done(done(f"r{number}")).status == "ok"
    assert sum(isinstance(target, int) for target in synced) == requests
    synced.clear()
    consumer.close()
    assert [target.name for target in synced if target.suffix == ".parquet"] == [
        p.name for p in tmp_path.glob(SHARD_PATTERN)
    ] * seals
    assert len(capflow.open(tmp_path)) == 3


def test_shards_are_sealed_at_their_size(tmp_path):
    consumer = opened(tmp_path, layout="sharded", shard_bytes=1 << 20)
    for number in range(8):
        consumer.on_frame(make_frame([(f"r{number}", 4, 0, 100)], hidden=1024, seq=number + 1))
        consumer.on_request_done(done(f"r{number}", computed_length=100))
    assert len(list(tmp_path.glob(SHARD_PATTERN))) == 2
    dataset = capflow.open(tmp_path)
    assert len(dataset) == 8  # those in the open shard too
    consumer.close()
    assert len(list(tmp_path.glob(SHARD_PATTERN))) == 3
    assert len(dataset) == 8
    for number in range(8):
        rows = dataset[f"r{number}"][Site(0, "post_block")]
        assert rows.rows.tobytes() == np.stack([row_of(f"r{number}", SITES[0], p, 1024) for p in range(100)]).tobytes()
