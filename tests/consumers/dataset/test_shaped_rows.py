"""Data sets of rows that have a shape of their own, in every layout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import duckdb
import ml_dtypes
import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

import capflow
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow.errors import CapflowError, UsageError
from capflow_consumers.dataset.layout import SHARD_PATTERN, write_sidecar
from capflow_consumers.dataset.shards import file as shardfile
from capflow_consumers.export.command import export
from capflow_consumers.inspect.command import inspect
from tests.kit.captured import flip
from tests.kit.frames import make_frame, row_of
from tests.kit.shaped import (
    HIDDEN,
    SHAPES,
    SITES,
    assert_site,
    frame_of,
    positions_of,
    rows_total,
    shaped_model,
    store,
    width_of,
)
from tests.kit.sources import ROOT
from tests.kit.stored import done, opened
from tests.kit.stored_layouts import LAYOUTS

LENGTHS = {"a": 7, "b/ü": 5, "c": 6}


@pytest.fixture(params=LAYOUTS)
def options(request):
    return LAYOUTS[request.param]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rows_are_read_as_they_were_captured(tmp_path, options, dtype):
    store(tmp_path, LENGTHS, frames={"dtype": dtype}, **options)
    data = capflow.open(tmp_path)
    data.verify()
    assert sorted(data.requests()) == sorted(LENGTHS)
    for name, length in LENGTHS.items():
        assert data[name].sites == tuple(sorted(SITES))
        assert sum(capture.sidecar.rows for capture in data.captures(name)) == rows_total(length)
        for site in SITES:
            assert_site(data[name], name, site, length, dtype=dtype)


def test_rows_that_came_early_are_in_their_place(tmp_path, options):
    store(tmp_path, LENGTHS, buffer_bytes_max=0, **options)
    for name, length in LENGTHS.items():
        for site in SITES:
            assert_site(capflow.open(tmp_path)[name], name, site, length)


def test_many_rows_make_pages_of_their_own(tmp_path, options, monkeypatch):
    """A batch has rows of one width, and so has a row group, in place or gathered."""
    monkeypatch.setattr(shardfile, "IN_PLACE_BYTES_MIN", 256)
    monkeypatch.setattr(shardfile, "BATCH_BYTES_MAX", 700)
    monkeypatch.setattr(shardfile, "COMPRESSED_BATCH_BYTES_MAX", 700)
    lengths = {"a": 50, "b": 5}
    store(tmp_path, lengths, frames={"dtype": "bfloat16"}, **options)
    data = capflow.open(tmp_path)
    data.verify()
    for name, length in lengths.items():
        for site in SITES:
            assert_site(data[name], name, site, length, dtype="bfloat16")
    if options["layout"] == "sharded":
        (path,) = tmp_path.glob(SHARD_PATTERN)
        assert pq.ParquetFile(path).num_row_groups >= len(set(map(width_of, SITES)))
        assert_parquet(path, lengths, "bfloat16")


def test_large_batches_of_every_width_are_in_the_file_once(tmp_path, monkeypatch):
    monkeypatch.setattr(shardfile, "IN_PLACE_BYTES_MIN", 0)
    store(tmp_path, {"a": 9}, layout="sharded")
    (path,) = tmp_path.glob(SHARD_PATTERN)
    content = path.read_bytes()
    capture = capflow.open(tmp_path)["a"]
    assert {content.count(capture[site].rows.tobytes()) for site in SITES} == {1}
    assert_parquet(path, {"a": 9}, "float32")


def test_sites_in_different_dtypes(tmp_path, options):
    consumer = opened(tmp_path, SITES, capture="requests", **options)
    model = shaped_model()
    consumer.on_session("engine-1", model)
    specs = [
        CaptureSpec({"heads": "all"}, "all", dtype="float16"),
        CaptureSpec({site.hook: [site.layer] for site in SITES if site.hook != "heads"}, "all"),
    ]
    wanted = {}
    for spec in specs:
        wanted |= spec.resolve(model.sites, num_layers=4)
    sites = tuple(wanted)
    frame = frame_of([("a", 4, 0, 5)], sites)
    frame.wants = lambda _: wanted
    consumer._files(*("float32", HIDDEN), wanted)
    consumer.on_frame(frame)
    rows = sum(len(positions_of(site, 5)) for site in sites)
    consumer.on_request_done(done("a", computed_length=5, rows=rows))
    consumer.close()
    capture = capflow.open(tmp_path)["a"]
    capture.verify_rows()
    for site in sites:
        half = site.hook == "heads"
        mixed = options["layout"] == "sharded"  # a shard has one dtype, which holds every number
        values = [row_of("a", site, p, width_of(site)) for p in positions_of(site, 5)]
        expected = np.stack(values).astype(np.float16 if half else np.float32)
        assert capture[site].rows.dtype == (np.float16 if half and not mixed else np.float32)
        assert np.array_equal(capture[site].rows, expected)
        assert capture[site].row_shape == SHAPES.get(site, (HIDDEN,))


def test_rows_of_one_width_alone_are_a_shard_of_fixed_vectors(tmp_path):
    sites = (Site(0, "heads"),)
    store(tmp_path, LENGTHS, sites, layout="sharded")
    (path,) = tmp_path.glob(SHARD_PATTERN)
    assert str(pq.read_schema(path).field("vector").type).startswith("fixed_size_list")
    assert pq.read_schema(path).field("vector").type.list_size == 12
    assert_site(capflow.open(tmp_path)["a"], "a", sites[0], 7)


def test_files_are_plain_safetensors_in_the_rows_own_shape(tmp_path):
    store(tmp_path / "packed", {"a": 6}, layout="packed")
    store(tmp_path / "per_file", {"a": 6}, layout="per_file")
    packed = load_file(tmp_path / "packed" / "a" / "rows.safetensors")
    for site in SITES:
        rows = load_file(tmp_path / "per_file" / "a" / f"{site.hook}.{site.layer:03d}.safetensors")["rows"]
        shape = (len(positions_of(site, 6)), *SHAPES.get(site, (HIDDEN,)))
        assert rows.shape == shape
        assert packed[f"{site.hook}.{site.layer:03d}.rows"].tobytes() == rows.tobytes()
        assert packed[f"{site.hook}.{site.layer:03d}.rows"].shape == shape


def assert_parquet(path: Path, lengths: dict[str, int], dtype: str) -> None:
    """Assert that other readers find every row in a shard, as long as it is."""
    about = pq.read_schema(path).metadata
    assert json.loads(about[b"capflow.shapes"]) == {str(site): list(shape) for site, shape in SHAPES.items()}
    table = pq.read_table(path, page_checksum_verification=True)
    columns = ("request", "layer", "hook", "position", "vector")
    rows = list(zip(*(table.column(name).to_pylist() for name in columns), strict=True))
    other = duckdb.sql(f"SELECT request, layer, hook, position, vector FROM '{path}'").fetchall()
    assert sorted(map(repr, rows)) == sorted(map(repr, other))
    assert len(rows) == sum(map(rows_total, lengths.values()))
    for request, layer, hook, position, vector in rows:
        site = Site(layer, hook)
        expected = row_of(request, site, position, width_of(site), dtype)
        stored = np.array(vector, np.uint16).view(ml_dtypes.bfloat16) if dtype == "bfloat16" else vector
        assert np.array_equal(np.asarray(stored, np.float32), expected.astype(np.float32)), (request, site, position)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_other_tools_read_a_shard(tmp_path, dtype, compression):
    store(tmp_path, LENGTHS, layout="sharded", compression=compression, frames={"dtype": dtype})
    (path,) = tmp_path.glob(SHARD_PATTERN)
    assert_parquet(path, LENGTHS, dtype)


def test_a_capture_of_the_stream_alone_has_no_shape_in_it(tmp_path, options):
    """Its files are those that every version before wrote."""
    store(tmp_path, {"a": 5}, SITES[:3], **options)
    (capture,) = capflow.open(tmp_path)
    assert b"shape" not in write_sidecar(capture.sidecar)
    assert capture.sidecar.format == 1
    assert capture.shape_of(SITES[0]) == (HIDDEN,)
    assert all(b"shapes" not in path.read_bytes() for path in tmp_path.glob(SHARD_PATTERN))
    store(tmp_path / "heads", {"a": 5}, SITES, **options)
    assert capflow.open(tmp_path / "heads")["a"].sidecar.format == 2


def test_running_captures_have_their_shape(tmp_path):
    consumer = opened(tmp_path, SITES, capture="requests", tail_s=0.001)
    consumer.on_frame(frame_of([("a", 4, 0, 4)]))
    consumer._tailed_at = -1e9
    consumer.on_idle()
    consumer.on_frame(frame_of([("a", 4, 4, 1)], seq=2))
    consumer._tailed_at = -1e9
    consumer.on_idle()
    (running,) = capflow.open(tmp_path).running()
    assert set(running.sites) == set(SITES)
    for site in SITES:
        expected = np.stack([row_of("a", site, p, width_of(site)) for p in positions_of(site, 5)])
        assert running[site].rows.tobytes() == expected.tobytes()
        assert running[site].shaped.shape == (len(expected), *SHAPES.get(site, (HIDDEN,)))
    consumer.close()


KILLED = """
import os, sys
from pathlib import Path
from tests.kit.shaped import *
from tests.kit.stored import done, opened
consumer = opened(Path(sys.argv[1]), SITES, capture="requests", layout="sharded", compression=sys.argv[2])
for seq, name in enumerate("ab", 1):
    consumer.on_frame(frame_of([(name, 4, 0, 6)], seq=seq))
    consumer.on_request_done(done(name, computed_length=6, rows=rows_total(6)))
consumer.on_frame(frame_of([("lost", 4, 0, 6)], seq=3))
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("head", ["whole", "damaged"])
def test_the_next_writer_seals_the_shard_of_a_killed_one(tmp_path, compression, head):
    script = [sys.executable, "-c", KILLED, str(tmp_path), compression]
    assert subprocess.run(script, cwd=ROOT, env=os.environ, check=False).returncode == -signal.SIGKILL
    (path,) = tmp_path.glob(f".partial-*/{SHARD_PATTERN}")
    if head == "damaged":
        flip(path, 40)
    before = capflow.open(tmp_path)
    assert sorted(before.requests()) == ["a", "b"]
    assert_site(before["b"], "b", SITES[3], 6)
    opened(tmp_path, SITES, capture="requests", layout="sharded").close()
    data = capflow.open(tmp_path)
    (sealed,) = tmp_path.glob(SHARD_PATTERN)
    assert data.damaged() == []
    data.verify()
    for name in "ab":
        for site in SITES:
            assert_site(data[name], name, site, 6)
    assert_parquet(sealed, {"a": 6, "b": 6}, "float32")


def test_rows_whose_shape_changes_fail_their_request_alone(tmp_path, options):
    consumer = opened(tmp_path, SITES[:1], capture="requests", **options)
    for seq, shape in enumerate(((2, 6), (4, 3)), 1):
        consumer.on_frame(make_frame([("a", 4, seq, 1)], [Site(0, "heads")], seq=seq, shape=shape))
    consumer.on_frame(make_frame([("b", 4, 0, 4)], [Site(0, "heads")], seq=3, shape=(4, 3)))
    failed = consumer.on_request_done(done("a", computed_length=3, rows=2))
    assert failed.status == "error"
    assert failed.error == "rows of another shape at heads:0: got [4, 3], expected [2, 6], as the first"
    assert consumer.on_request_done(done("b", rows=4)).status == "ok"
    consumer.close()
    assert capflow.open(tmp_path).requests() == ["b"]


def test_a_sidecar_with_another_shape_than_its_rows_is_refused(tmp_path, options):
    """The rows have the length that the shape says; only the file's own header tells them apart."""
    store(tmp_path, {"a": 6}, (Site(0, "heads"), Site(0, "post_block")), **options)
    (capture,) = capflow.open(tmp_path)
    entries = [
        msgspec.structs.replace(entry, shape=(3, 5)) if entry.hook == "heads" else entry
        for entry in capture.sidecar.sites
    ]
    wrong = msgspec.structs.replace(capture.sidecar, sites=entries)
    if options["layout"] != "sharded":
        (capture.path / "request.json").write_bytes(write_sidecar(wrong))
        (capture,) = capflow.open(tmp_path)
    else:
        capture._entries = {entry.site: entry for entry in entries}
    with pytest.raises(
        CapflowError, match=r"expected (\d+ bytes and the header|15, as its sidecar says)|other offsets"
    ):
        capture["heads:0"]


@pytest.mark.parametrize("shape", [[0], [-1, 4], [1, 2, 3], [70_000], "x"])
def test_a_shape_out_of_bounds_is_no_sidecar(tmp_path, shape):
    store(tmp_path, {"a": 6}, (Site(0, "heads"),), layout="packed")
    file = tmp_path / "a" / "request.json"
    text = file.read_bytes()
    from tests.kit.stored import hashed

    file.write_bytes(hashed(text.replace(b'"shape":[2,6]', f'"shape":{json.dumps(shape)}'.encode())))
    (message,) = capflow.open(tmp_path).damaged()
    assert "shape" in message
    assert "\n" not in message


def test_batches_of_all_requests(tmp_path, options):
    store(tmp_path, LENGTHS, **options)
    data = capflow.open(tmp_path)
    for rows_max in (1, 2, 100):
        batches = list(data.batches("heads:1", rows_max))
        assert sum(len(batch.rows) for batch in batches) == 3 * len(LENGTHS)
        for batch in batches:
            assert batch.shaped.shape == (len(batch.rows), 4, 3)
            rows, requests, positions, _ = batch
            for row, request, position in zip(rows, requests, positions, strict=True):
                assert np.array_equal(row, row_of(request, Site(1, "heads"), int(position), 12))


def test_inspect_shows_the_shape_of_each_site(tmp_path, options):
    store(tmp_path, LENGTHS, **options)
    shown = CliRunner().invoke(inspect, [str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    lines = {line.split()[0]: line for line in shown.output.splitlines() if line.strip()}
    assert "[18, 8]" in lines["post_block:0"]
    assert "[9, 4, 3]" in lines["heads:1"]
    assert "[8, 5]" in lines["router:2"]
    survey = json.loads(CliRunner().invoke(inspect, [str(tmp_path), "--json"]).output)
    assert {site["site"]: site["shapes"] for site in survey["sites"]} == {
        str(site): [list(SHAPES.get(site, (HIDDEN,)))] for site in SITES
    }
    expected = np.median([np.linalg.norm(row_of(r, SITES[4], p, 12)) for r in LENGTHS for p in (1, 2, 3)])
    (heads,) = (site for site in survey["sites"] if site["site"] == "heads:1")
    assert abs(heads["norm_median"] / expected - 1) < 0.02


def test_torch_takes_sites_of_one_width(tmp_path, options):
    pytest.importorskip("torch")
    store(tmp_path, LENGTHS, **options)
    with pytest.raises(UsageError) as caught:
        capflow.TorchRows(tmp_path)
    got = "post_block:0 of 8, heads:0 of 12, heads:2 of 24, k:1 of 6 and 2 more"
    assert str(caught.value) == f"sites: got {got}, expected rows of one width; choose sites of one width"
    rows = capflow.TorchRows(tmp_path, ["heads:1"], batch_rows=4, shuffle_rows=0)
    assert (rows.hidden_size, rows.row_shape) == (12, (4, 3))
    batches = list(rows)
    assert sum(len(batch.rows) for batch in batches) == 9
    for batch in batches:
        assert batch.rows.unflatten(1, rows.row_shape).shape == (len(batch.rows), 4, 3)
    # Of one width, and of several shapes.
    both = capflow.TorchRows(tmp_path, ["heads:0", "heads:1"])
    assert both.row_shape == (12,)
    assert sum(len(batch.rows) for batch in both) == 18


def test_exports_have_the_rows_own_shape(tmp_path):
    store(tmp_path / "rows", LENGTHS, layout="sharded")
    shown = CliRunner().invoke(export, [str(tmp_path / "rows"), str(tmp_path / "files"), "--to", "safetensors"])
    assert shown.exit_code == 0, shown.output
    tensors = load_file(tmp_path / "files" / "a.safetensors")
    for site in SITES:
        expected = np.stack([row_of("a", site, p, width_of(site)) for p in positions_of(site, 7)])
        rows = tensors[f"{site.hook}.{site.layer:03d}.rows"]
        assert rows.shape == (len(expected), *SHAPES.get(site, (HIDDEN,)))
        assert rows.tobytes() == expected.tobytes()


def test_activations_for_sae_lens_are_flat_and_each_site_has_its_width(tmp_path):
    datasets = pytest.importorskip("datasets")
    store(tmp_path / "rows", LENGTHS, layout="packed")
    words = [str(tmp_path / "rows"), str(tmp_path / "out"), "--to", "saelens", "--context-size", "2"]
    shown = CliRunner().invoke(export, [*words, "--site", "heads:1", "--site", "post_block:0"])
    assert shown.exit_code == 0, shown.output
    assert "hook_name=blocks.1.attn.hook_z context_size=2 d_in=12" in shown.output
    heads = datasets.load_from_disk(str(tmp_path / "out" / "blocks.1.attn.hook_z"))
    assert np.array(heads[0]["blocks.1.attn.hook_z"]).shape == (2, 12)
    assert len(heads) == 4
