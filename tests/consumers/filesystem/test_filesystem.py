from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import capflow
from capflow.capture.dtypes import DTYPES
from capflow.capture.frame import Dropped, Frame
from capflow.capture.positions import Positions
from capflow.capture.result import CaptureResult
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec, Want
from capflow.errors import CapflowError, UsageError
from capflow.plugins import configure
from capflow.testing import MemoryHub
from capflow_consumers.dataset import layout
from capflow_consumers.dataset.names import LENGTH_MAX, slug
from capflow_consumers.dataset.rows import RowBuffer
from capflow_consumers.filesystem.consumer import FilesystemConfig, FilesystemConsumer
from tests.kit.checked import checked
from tests.kit.frames import make_frame, row_of, token_of
from tests.kit.hubs import configured
from tests.kit.selectors_model import budgets, forms, meant
from tests.kit.sources import ROOT
from tests.kit.stored import SITES, Counts, assert_is_whole, assert_site_has, done, names, opened

# One request, start to end.


def test_a_request_becomes_a_directory_of_safetensors_and_a_sidecar(tmp_path):
    consumer = opened(tmp_path, SITES)
    consumer.on_frame(make_frame([("r1", 4, 0, 4)], SITES, texts=True))
    consumer.on_frame(make_frame([("r1", 4, 4, 1)], SITES, texts=True, seq=2))
    assert names(tmp_path) == []
    result = consumer.on_request_done(done(computed_length=5, rows=15))
    consumer.close()

    files = sorted(path.name for path in (tmp_path / "r1").iterdir())
    assert files == [
        "mlp_in.001.safetensors",
        "post_block.000.safetensors",
        "post_block.001.safetensors",
        "request.json",
    ]
    size = sum((tmp_path / "r1" / name).stat().st_size for name in files[:3])
    assert result == CaptureResult("ok", None, {"path": str(tmp_path / "r1"), "rows": 15, "bytes": size, "files": 3})
    sidecar = json.loads((tmp_path / "r1" / "request.json").read_bytes())
    assert sidecar["request"] == "r1"
    assert sidecar["model"] == "test-model"
    assert sidecar["capture_status"] == "ok"
    assert sidecar["texts"] == [{"start": 0, "texts": [f" {token_of('r1', p)}" for p in range(5)]}]
    assert_is_whole(capflow.open(tmp_path)["r1"], "r1", SITES, 5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rows_are_kept_bit_for_bit_and_other_tools_read_them(tmp_path, dtype):
    consumer = opened(tmp_path, SITES)
    consumer.on_frame(make_frame([("r1", 3, 0, 3)], SITES, dtype=dtype))
    consumer.on_request_done(done(prompt_length=3, computed_length=3, rows=9))
    tensors = load_file(tmp_path / "r1" / "post_block.001.safetensors")
    expected = np.stack([row_of("r1", SITES[1], p, dtype=dtype) for p in range(3)])
    assert tensors["rows"].tobytes() == expected.tobytes()
    assert tensors["rows"].dtype == DTYPES[dtype]
    assert tensors["positions"].tolist() == [0, 1, 2]
    assert tensors["positions"].dtype == np.int64
    assert tensors["token_ids"].dtype == np.int32


def test_sites_of_different_pipeline_stages_join_in_one_request(tmp_path):
    consumer = opened(tmp_path, SITES)
    for sites in (SITES[:1], SITES[1:]):
        for start, length in ((0, 3), (3, 2), (5, 1)):
            consumer.on_frame(make_frame([("r1", 5, start, length)], sites))
    assert consumer.on_request_done(done(prompt_length=5, computed_length=6, rows=18)).status == "ok"
    assert_is_whole(capflow.open(tmp_path)["r1"], "r1", SITES, 6)


def test_sites_that_want_different_positions_have_different_rows(tmp_path):
    consumer = opened(tmp_path)
    sets = (Positions.ALL, Positions.ALL_GENERATED, Positions.LAST_PROMPT)
    wanted = dict(zip(SITES, map(Want, sets), strict=True))
    for start, length in ((0, 3), (3, 1), (4, 1), (5, 1)):
        consumer.on_frame(make_frame([("r1", 4, start, length)], SITES).narrowed(lambda _: wanted))
    result = consumer.on_request_done(done(computed_length=6, rows=6 + 2 + 1))
    assert result.error is None
    capture = capflow.open(tmp_path)["r1"]
    assert capture[SITES[0]].positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert capture[SITES[1]].positions.tolist() == [4, 5]
    assert capture[SITES[2]].positions.tolist() == [3]


@pytest.mark.parametrize("model", sorted(DTYPES))
@pytest.mark.parametrize("stored", ["model", "float32", "float16"])
@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_rows_are_stored_in_the_dtype_that_each_site_asked_for(tmp_path, model, stored, limit):
    consumer = opened(tmp_path, buffer_bytes_max=limit)
    wanted = {SITES[0]: Want(Positions.ALL, stored), SITES[1]: Want(Positions.parse({"every": 2}))}
    for start, length in ((0, 3), (3, 1), (4, 2)):
        frame = make_frame([("r1", 4, start, length)], SITES[:2], dtype=model)
        consumer.on_frame(frame.narrowed(lambda _: wanted))
    result = consumer.on_request_done(done(computed_length=6, rows=9))
    assert (result.status, result.error) == ("ok", None)
    capture = capflow.open(tmp_path)["r1"]
    capture.verify()
    kept = model if stored == "model" else stored
    assert_site_has(capture, "r1", SITES[0], [0, 1, 2, 3, 4, 5], dtype=model, stored=kept)
    assert_site_has(capture, "r1", SITES[1], [0, 2, 4], dtype=model)
    assert load_file(capture.path / "post_block.000.safetensors")["positions"].tolist() == [0, 1, 2, 3, 4, 5]


def test_numbers_that_float16_cannot_hold_are_reported(tmp_path):
    consumer = opened(tmp_path)
    frame = make_frame([("r1", 4, 0, 4)], SITES[:2])
    rows = np.frombuffer(frame.payload, np.float32).reshape(2, 4, 8).copy()
    rows[0, 1, 3], rows[0, 3, 0], rows[1, 2, 2] = 1e5, -7e4, np.inf  # the last was infinite before
    large = Frame.seal(frame.header, rows.reshape(-1).view(np.uint8))
    consumer.on_frame(large.narrowed(lambda _: dict.fromkeys(SITES[:2], Want(Positions.ALL, "float16"))))
    result = consumer.on_request_done(done(rows=8))
    assert result.status == "partial_error"
    assert result.error == ("2 rows of post_block:0 have numbers beyond float16's 65504, which are stored as infinite")
    capture = capflow.open(tmp_path)["r1"]
    assert [entry.rows_overflowed for entry in capture.sidecar.sites] == [2, 0]
    assert np.isinf(capture[SITES[0]].rows).sum() == 2


def test_a_budget_that_was_reached_is_in_the_sidecar(tmp_path):
    for request, reached in (("whole", False), ("cut", True)):
        consumer = opened(tmp_path)
        consumer.on_frame(make_frame([(request, 4, 0, 4)]))
        consumer.on_request_done(msgspec.structs.replace(done(request), budget_reached=reached))
        assert capflow.open(tmp_path)[request].budget_reached == reached


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_interleaving_of_requests_and_steps_gives_each_request_exactly_its_rows(data, tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    dtype = data.draw(st.sampled_from(sorted(DTYPES)))
    limit = data.draw(st.sampled_from([0, 500, 3_000, 1 << 20]), label="buffer_bytes_max")
    consumer = opened(root, SITES, buffer_bytes_max=limit)
    ids = [f"r{n}" for n in range(data.draw(st.integers(1, 4)))]
    length = {i: (data.draw(st.integers(1, 12)), data.draw(st.integers(1, 20))) for i in ids}  # of prompt, computed
    chosen = {i: {site: (data.draw(forms), data.draw(budgets)) for site in SITES} for i in ids}
    wanted = {
        i: {site: Want(Positions.parse(form, max_rows=rows)) for site, (form, rows) in sets.items()}
        for i, sets in chosen.items()
    }
    stages = {0: SITES[:2], 1: SITES[2:]}
    at = {(i, stage): 0 for i in ids for stage in stages}
    while at:
        stage = data.draw(st.sampled_from(sorted({stage for _, stage in at})))
        asked = []
        for i in data.draw(st.lists(st.sampled_from(sorted(i for i, s in at if s == stage)), unique=True, min_size=1)):
            count = data.draw(st.integers(1, length[i][1] - at[i, stage]))
            asked.append((i, length[i][0], at[i, stage], count))
            at[i, stage] += count
            if at[i, stage] == length[i][1]:
                del at[i, stage]
        frame = make_frame(asked, stages[stage], dtype=dtype)
        consumer.on_frame(Frame.decode(*frame.encode()).narrowed(lambda request: wanted[request.id]))
        for i, *_ in asked:
            if (i, 0) not in at and (i, 1) not in at:
                expected = {site: meant(form, *length[i], rows) for site, (form, rows) in chosen[i].items()}
                result = consumer.on_request_done(done(i, *length[i], rows=sum(map(len, expected.values()))))
                assert (result.status, result.error) == ("ok", None)
                capture = capflow.open(root)[i]
                assert len(capture.sites) == sum(map(bool, expected.values()))
                for site in capture.sites:
                    assert_site_has(capture, i, site, expected[site], dtype=dtype)
    assert consumer._buffered_bytes == 0
    consumer.close()
    assert set(names(root)) == set(ids)


def test_memory_stays_within_the_bound_while_files_grow(tmp_path):
    consumer = opened(tmp_path, SITES, buffer_bytes_max=4096)
    for start in range(200):
        consumer.on_frame(make_frame([("long", 1, start, 1), ("other", 1, start, 1)], SITES))
        assert consumer._buffered_bytes <= 4096
        assert consumer._buffered_bytes == sum(r.buffer.nbytes for r in consumer._requests.values())
    assert consumer._context.counts["buffer_overflows"] > 0
    for request in ("long", "other"):
        assert consumer.on_request_done(done(request, 1, 200, rows=600)).status == "ok"
        assert_is_whole(capflow.open(tmp_path)[request], request, SITES, 200)


def test_rows_do_not_keep_the_frames_alive_that_they_came_in(tmp_path):
    consumer = opened(tmp_path)
    payload = bytearray(make_frame([("r1", 4, 0, 4)]).payload)
    frame = make_frame([("r1", 4, 0, 4)])
    consumer.on_frame(Frame(frame.header, payload))
    payload[:] = b"\xff" * len(payload)
    payload.clear()  # BufferError while a view of it exists
    consumer.on_request_done(done())
    assert_is_whole(capflow.open(tmp_path)["r1"], "r1", SITES[:1], 4)


# Missing rows are reported.


def test_fewer_rows_than_promised_is_a_partial_error_with_the_difference(tmp_path):
    consumer = opened(tmp_path)
    consumer.on_frame(make_frame([("r1", 4, 0, 3)]))
    result = consumer.on_request_done(done(rows=4))
    assert result.status == "partial_error"
    assert (
        result.error
        == "rows written: got 3, expected 4 as delivered; positions of post_block:0: got 0..3, expected 0..4"
    )
    sidecar = capflow.open(tmp_path)["r1"].sidecar
    assert (sidecar.capture_status, sidecar.error) == ("partial_error", result.error)


def test_a_site_without_its_positions_is_named(tmp_path):
    consumer = opened(tmp_path)
    wanted = dict.fromkeys(SITES[:2], Want(Positions.ALL))
    consumer.on_frame(make_frame([("r1", 4, 0, 4)], SITES[:2]).narrowed(lambda _: wanted))
    consumer.on_frame(make_frame([("r1", 4, 4, 1)], SITES[:1]).narrowed(lambda _: wanted))
    result = consumer.on_request_done(done(computed_length=5, rows=9))
    assert result.status == "partial_error"
    assert result.error == "positions of post_block:1: got 0..4, expected 0..5"
    counts = {entry.site: (entry.rows, entry.rows_expected) for entry in capflow.open(tmp_path)["r1"].sidecar.sites}
    assert counts == {SITES[0]: (5, 5), SITES[1]: (4, 5)}


def test_what_its_own_spec_and_the_requests_ask_for_is_expected_when_the_frame_is_not_narrowed(tmp_path):
    consumer = opened(tmp_path, SITES, hooks=["post_block"], layers="0+1")
    asked = {"r1": CaptureSpec({"mlp_in": [1]}, "all_generated")}
    consumer.on_frame(make_frame([("r1", 4, 0, 5)], SITES[:1], captures=asked))
    result = consumer.on_request_done(done(computed_length=5))
    assert result.error == (
        "positions of mlp_in:1: got none, expected 4..5; positions of post_block:1: got none, expected 0..5"
    )


def test_a_request_that_did_not_end_is_not_called_whole(tmp_path):
    consumer = opened(tmp_path)
    consumer.on_frame(make_frame())
    result = consumer.on_request_done(done(computed_length=0, rows=4, status="error"))
    assert (result.status, result.error) == ("partial_error", "the request did not end")


def test_rows_delivered_twice_are_a_partial_error(tmp_path):
    consumer = opened(tmp_path)
    for _ in range(2):
        consumer.on_frame(make_frame().narrowed(lambda _: {Site(0, "post_block"): Want(Positions.ALL)}))
    result = consumer.on_request_done(done(rows=8))
    assert result.error == "positions of post_block:0: got 0..4 0..4, expected 0..4"


def test_dropped_rows_are_named_with_their_reason(tmp_path):
    consumer = opened(tmp_path)
    consumer.on_frame(make_frame())
    result = consumer.on_request_done(done(dropped=(Dropped(7, "queue_full"),)))
    assert (result.status, result.error) == ("partial_error", "7 rows lost: queue_full")
    assert capflow.open(tmp_path)["r1"].sidecar.dropped == [(7, "queue_full")]


def test_a_request_all_of_whose_rows_were_lost_is_an_error_on_record(tmp_path):
    consumer = opened(tmp_path)
    result = consumer.on_request_done(done(rows=0, dropped=(Dropped(4, "queue_full"),)))
    assert result.status == "error"
    assert capflow.open(tmp_path)["r1"].error == "4 rows lost: queue_full"


def test_a_request_that_computed_nothing_is_whole(tmp_path):
    consumer = opened(tmp_path)
    assert consumer.on_request_done(done(computed_length=0, status="abort")).status == "ok"
    assert capflow.open(tmp_path)["r1"].sites == ()


# Names.


NASTY = [
    "", ".", "..", "...", "../x", "a/b", "/etc/passwd", "a\\b", "A", "a", "a ", "a.", ".a", "-a", "~", "a~",
    "a\0b", "a\nb", "é", "e\u0301", "ﬀ", "ff", "\ud800", "CON", "x" * 512, "x" * 511, "X" * 512, ".partial-x", ".lock",
    "request.json",
]  # fmt: skip


@pytest.mark.parametrize("request_id", [i for i in NASTY if "\ud800" not in i], ids=repr)
def test_any_request_id_is_captured_inside_the_root_and_found_again(tmp_path, request_id):
    root = tmp_path / "root"
    consumer = opened(root)
    consumer.on_frame(make_frame([(request_id, 4, 0, 4)]))
    assert consumer.on_request_done(done(request_id)).status == "ok"
    consumer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    assert len(names(root)) == 1
    assert capflow.open(root).requests() == [request_id]
    assert capflow.open(root)[request_id].id == request_id


def test_nasty_ids_do_not_share_a_directory():
    assert len({slug(i).lower() for i in NASTY}) == len(NASTY)


@settings(max_examples=500)
@given(first=st.text(st.characters(), max_size=130), second=st.text("aA./~-2é", max_size=8))
def test_slugs_are_plain_names_and_differ_when_ids_do(first, second):
    for text in (first, second, slug(first), slug(second)):
        assert re.fullmatch(r"[a-z0-9][a-z0-9._~-]*", slug(text))
        assert len(slug(text)) <= LENGTH_MAX
    texts = {first, second, slug(first), slug(second), first.upper(), first.lower(), f"{slug(second)}~2"}
    assert len({slug(text).lower() for text in texts}) == len(texts)


def test_a_plain_id_is_its_own_slug():
    assert slug("cmpl-0a1b2c-0") == "cmpl-0a1b2c-0"


# Collisions.


def captured_twice(root: Path, on_collision: str) -> CaptureResult:
    for length in (4, 5):
        consumer = opened(root, on_collision=on_collision)
        consumer.on_frame(make_frame([("r1", 4, 0, length)], seq=length))
        result = consumer.on_request_done(done(computed_length=length))
        consumer.close()
    return result


def test_a_taken_name_is_an_error_and_the_old_capture_stays(tmp_path):
    result = captured_twice(tmp_path, "error")
    assert result.status == "error"
    expected = f"{tmp_path}/r1 exists already; set on_collision to suffix or overwrite, or use another root"
    assert result.error == expected
    assert len(capflow.open(tmp_path)["r1"][0, "post_block"].rows) == 4


def test_a_taken_name_can_be_overwritten(tmp_path):
    assert captured_twice(tmp_path, "overwrite").status == "ok"
    assert names(tmp_path) == ["r1"]
    assert len(capflow.open(tmp_path)["r1"][0, "post_block"].rows) == 5


def test_a_taken_name_can_get_a_suffix(tmp_path):
    assert captured_twice(tmp_path, "suffix").payload["path"] == f"{tmp_path}/r1~2"
    dataset = capflow.open(tmp_path)
    assert dataset.requests() == ["r1"]
    assert [len(capture[0, "post_block"].rows) for capture in dataset.captures("r1")] == [4, 5]
    assert len(dataset["r1"]["post_block:0"].rows) == 5


# Repeated frames.


def test_a_request_that_is_given_again_is_known_and_not_written_again(tmp_path):
    def give(boot="b", first=3):
        consumer = opened(tmp_path, on_collision="suffix")
        for step in range(3):
            consumer.on_frame(make_frame([("r1", 4, step * 4, 4)], seq=first + step, boot=boot))
        result = consumer.on_request_done(done(computed_length=12))
        consumer.close()
        return result, consumer._context.counts

    result, counts = give()
    assert result.status == "ok"
    assert not counts
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "r1").iterdir()}
    again, counts = give()
    assert again == result
    assert counts == {"requests_again": 1}
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "r1").iterdir()} == written
    assert names(tmp_path) == ["r1"]
    assert give(first=6)[0].payload["path"].endswith("r1~2")  # the same id later
    assert give(boot="c")[0].payload["path"].endswith("r1~3")  # and of another worker
    assert (
        give(first=8)[0].payload["path"].endswith("r1~2")
    )  # only its last frame is in r1~2, from which on it comes again


def test_the_rest_of_a_request_whose_worker_was_taken_to_be_gone_lies_beside_its_beginning(tmp_path):
    consumer = opened(tmp_path)
    for seq, status in ((1, "error"), (2, "stop")):
        consumer.on_frame(make_frame([("r1", 4, seq * 4 - 4, 4)], seq=seq))
        consumer.on_request_done(done(computed_length=8, rows=4, status=status))
    captures = capflow.open(tmp_path).captures("r1")
    assert [capture.sidecar.status for capture in captures] == ["error", "stop"]
    assert [p for capture in captures for p in capture[0, "post_block"].positions.tolist()] == list(range(8))
    consumer.close()


# Abnormal ends.


WRITER = """
import sys
from tests.kit.frames import make_frame, make_model
from tests.kit.stored import SITES, done, opened
consumer = opened(sys.argv[1], SITES, buffer_bytes_max=2000, fsync=True)
consumer.on_frame(make_frame([("whole", 4, 0, 4)], SITES))
print(consumer.on_request_done(done("whole", rows=12)).status, flush=True)
start = 0
while True:
    n = start % 50
    consumer.on_frame(make_frame([(f"r{start // 50}", 1, n, 1), ("endless", 1, start, 1)], SITES))
    if n == 49:
        consumer.on_request_done(done(f"r{start // 50}", 1, 50, rows=150))
        print(start, flush=True)
    start += 1
"""


@pytest.mark.parametrize("requests_before", [0, 3])
def test_a_killed_writer_leaves_no_directory_that_looks_whole(tmp_path, requests_before):
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as writer:
        assert writer.stdout.readline() == "ok\n"
        for _ in range(requests_before):
            writer.stdout.readline()
        while not list(tmp_path.glob(".partial-*/*/*.safetensors")):  # in the middle of writing
            assert writer.poll() is None
        writer.send_signal(signal.SIGKILL)
    dataset = capflow.open(tmp_path)
    assert "endless" not in dataset.requests()
    assert len(dataset) >= 1 + requests_before
    for capture in dataset:
        assert_is_whole(capture, capture.id, SITES, 4 if capture.id == "whole" else 50)
    assert list(tmp_path.glob(".partial-*"))
    opened(tmp_path, SITES).close()
    assert not list(tmp_path.glob(".partial-*"))


def test_a_living_writers_work_is_left_alone(tmp_path):
    first = opened(tmp_path)
    first.on_frame(make_frame())
    opened(tmp_path).close()
    assert first.on_request_done(done()).status == "ok"


def test_what_a_dead_writer_was_replacing_is_put_back(tmp_path):
    (tmp_path / ".partial-dead" / "replaced" / "r1").mkdir(parents=True)
    (tmp_path / ".partial-dead" / "replaced" / "r1" / "file").write_text("old")
    opened(tmp_path).close()
    assert (tmp_path / "r1" / "file").read_text() == "old"
    assert not list(tmp_path.glob(".partial-*"))


def test_closing_removes_what_is_unfinished_and_counts_it(tmp_path):
    consumer = opened(tmp_path, buffer_bytes_max=0)
    consumer.on_frame(make_frame())
    consumer.close()
    assert consumer._context.counts["requests_unfinished"] == 1
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_failed_write_is_that_requests_error_and_no_others(tmp_path):
    consumer = opened(tmp_path, SITES, buffer_bytes_max=1 << 20)
    consumer.on_frame(make_frame([("big", 4, 0, 4)], SITES))
    blocker = consumer._requests["engine-1", "big"].files.path
    blocker.write_text("a file where the directory would be")
    consumer.config = msgspec.structs.replace(consumer.config, buffer_bytes_max=0)
    consumer.on_frame(make_frame([("small", 4, 0, 1)], SITES))
    consumer.on_frame(make_frame([("big", 4, 4, 1)], SITES))
    assert consumer.on_request_done(done("small", computed_length=1, rows=3)).status == "ok"
    result = consumer.on_request_done(done("big", computed_length=5, rows=15))
    assert result.status == "error"
    assert "cannot be written: got File exists" in result.error
    assert names(tmp_path) == ["small"]
    assert consumer._context.counts["requests_failed"] == 1


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path):
    script = f"""
import resource, signal
from tests.kit.frames import make_frame
from tests.kit.stored import SITES, done, opened
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
consumer = opened({str(tmp_path)!r})
consumer.on_frame(make_frame([("r1", 40, 0, 40)], SITES))
result = consumer.on_request_done(done("r1", 40, 40, rows=120))
print(result.status, result.error)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout.startswith("error ")
    assert "File too large" in run.stdout
    assert names(tmp_path) == []


def test_rows_of_another_width_fail_their_request(tmp_path):
    consumer = opened(tmp_path)
    consumer.on_frame(make_frame())
    consumer.on_frame(make_frame([("r1", 4, 4, 1)], hidden=16, seq=2))
    result = consumer.on_request_done(done(computed_length=5))
    assert (
        result.error == "rows of another model: got float32 rows of 16, expected float32 of 8, as the request's first"
    )
    assert names(tmp_path) == []


# Options.


def test_every_layer_of_post_block_is_captured_unless_told_otherwise(tmp_path):
    spec = FilesystemConsumer(FilesystemConfig(root=str(tmp_path))).spec()
    assert (spec.hooks, spec.positions) == ({"post_block": "all"}, "all")


@pytest.mark.parametrize("layers", ["0+5+12", [12, 0, 5]])
def test_hooks_and_layers_are_options(tmp_path, layers):
    config = FilesystemConfig(str(tmp_path), hooks=["mlp_in", "mlp_out"], layers=layers, positions="last_prompt")
    spec = FilesystemConsumer(config).spec()
    assert (spec.hooks, spec.positions) == ({"mlp_in": [0, 5, 12], "mlp_out": [0, 5, 12]}, "last_prompt")


@pytest.mark.parametrize(("text", "layers"), [("0+5", [0, 5]), ("5", [5]), ("all", "all")])
def test_options_are_what_the_command_line_says(tmp_path, text, layers):
    name, options = configure.parse(f"filesystem:root={tmp_path},hooks=mlp_in+mlp_out,layers={text},fsync=false")
    configured = configure.configure(name, options, {"filesystem": FilesystemConsumer})
    assert configured.consumer.spec().hooks == {"mlp_in": layers, "mlp_out": layers}
    assert configured.consumer.config.fsync is False


def test_capture_requests_captures_nothing_of_its_own(tmp_path):
    assert FilesystemConsumer(FilesystemConfig(str(tmp_path), capture="requests")).spec() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hooks": ["nose"]}, "consumers.filesystem.hooks: got nose, expected a hook, one of"),
        ({"layers": "0+x"}, 'consumers.filesystem.layers: got 0+x, expected "all", layer numbers'),
        ({"positions": "some"}, "consumers.filesystem.positions: got some, expected one of"),
        ({"positions": "last:0"}, "consumers.filesystem.positions.last: got 0, expected"),
        ({"max_rows": -1}, "consumers.filesystem.max_rows: got -1, expected"),
        ({"buffer_bytes_max": -1}, "consumers.filesystem.buffer_bytes_max: got -1, expected 0 or more"),
    ],
)
def test_a_wrong_option_is_named_before_anything_is_opened(tmp_path, options, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        checked(FilesystemConsumer(FilesystemConfig(root=str(tmp_path), **options)))


def test_a_root_that_cannot_be_written_stops_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    for root in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/capflow")):
        consumer = FilesystemConsumer(FilesystemConfig(root=str(root)))
        with pytest.raises(UsageError, match=r"consumers\.filesystem\.root: got /.* expected a directory"):
            consumer.check()
        with pytest.raises(CapflowError, match=r"consumers\.filesystem\.root"):
            consumer.open(Counts())


def test_a_header_always_fits_its_place():
    for site, shape in ((Site(1023, "post_block"), (65_536,)), (Site(1023, "neurons"), (32_768, 32_768))):
        header = layout.header(layout.SitePart(site, "bfloat16", 10**12, shape))
        assert len(header) == layout.HEADER_BYTES


def test_memory_that_runs_out_while_a_frame_is_copied_costs_no_row(tmp_path, monkeypatch):
    add, calls = RowBuffer.add, Counter()

    def short(self, *args):
        calls["add"] += 1
        if calls["add"] == 2:
            raise MemoryError
        return add(self, *args)

    monkeypatch.setattr(RowBuffer, "add", short)
    consumer = FilesystemConsumer(FilesystemConfig(root=str(tmp_path / "rows")))
    with MemoryHub(configured(consumer, "spill", spool_dir=tmp_path / "spool")) as hub:
        engine = hub.engine()
        engine.step([("r1", 4, 0, 4), ("r2", 4, 0, 4)])
        for request in ("r1", "r2"):
            engine.finish(request)
        assert {request: hub.result(request).status for request in ("r1", "r2")} == {"r1": "ok", "r2": "ok"}
        assert hub.lanes[0].restarts == 1
    assert [len(capture[SITES[0]].rows) for capture in capflow.open(tmp_path / "rows")] == [4, 4]
