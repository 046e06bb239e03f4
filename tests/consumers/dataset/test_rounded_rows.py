"""A data set whose rows were rounded to 8 bits: every reader, other tools, kills, damage, and rows that stay exact."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import duckdb
import msgspec
import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open

import capflow
from capflow.capture.dtypes import DTYPES
from capflow.capture.frame import Frame
from capflow.capture.router import RouterForm
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow.errors import CapflowError, UsageError
from capflow.replay.dataset import entries_of
from capflow_consumers.dataset.layout import SHARD_PATTERN
from capflow_consumers.dataset.shards import file as shardfile
from capflow_consumers.dataset.shards import parquet
from capflow_consumers.dataset.shards.quantization import CODES, dequantised, quantised
from tests.kit import shaped
from tests.kit.captured import flip, run
from tests.kit.frames import make_frame, row_of, token_of
from tests.kit.sources import ROOT
from tests.kit.stored import done, opened

SITES = (Site(0, "post_block"), Site(1, "mlp_in"))
HIDDEN = 16
LENGTHS = {"a": 6, "b/ü": 40, "c": 3}
DOCUMENTED = dict(
    re.findall(r"^\| (DuckDB|Polars|NumPy).*? \| `(.+)` \|$", (ROOT / "docs/data.md").read_text(), re.MULTILINE)
)
"""The expressions that the documentation gives for rows as float32."""


@pytest.fixture(params=CODES)
def quantization(request):
    return request.param


@pytest.fixture(params=["in place", "gathered", "zstd"])
def options(request, quantization, monkeypatch):
    """Options for each way in which codes lie in a page."""
    if request.param == "in place":
        monkeypatch.setattr(shardfile, "ROUNDED_IN_PLACE_BYTES_MIN", 0)
    compression = "zstd" if request.param == "zstd" else "none"
    return {"layout": "sharded", "quantization": quantization, "compression": compression}


def write(root, lengths=LENGTHS, *, sites=SITES, dtype="bfloat16", hidden=HIDDEN, replaced=None, **options):
    """Write requests, and return the consumer, which is closed.

    replaced: by request, a row's index among all of its rows, and a number that its first one becomes.
    """
    consumer = opened(root, sites, **options)
    for seq, (request, length) in enumerate(lengths.items(), 1):
        frame = make_frame(
            [(request, 4, 0, length)], sorted(sites), dtype=dtype, hidden=hidden, seq=seq, boot=str(options)
        )
        if request in (replaced or {}):
            index, number = replaced[request]
            rows = np.frombuffer(frame.payload, DTYPES[dtype]).copy().reshape(-1, hidden)
            rows[index, 0] = number
            frame = Frame.seal(frame.header, rows.tobytes())
        consumer.on_frame(frame)
        result = consumer.on_request_done(done(request, computed_length=length, rows=length * len(sites)))
        assert result.status == "ok", result
    consumer.close()
    return consumer


def expected_of(request, site, positions, quantization, *, dtype="bfloat16", width=HIDDEN):
    """Return rows as they are read: rounded, float32."""
    rows = np.stack([row_of(request, site, position, width, dtype) for position in positions])
    return dequantised(*quantised(rows, quantization), quantization)


def assert_rounded(dataset, quantization, lengths=LENGTHS, *, dtype="bfloat16", hidden=HIDDEN):
    assert sorted(dataset.requests()) == sorted(lengths)
    dataset.verify()
    for request, length in lengths.items():
        capture = dataset[request]
        assert capture.sidecar.dtype == dtype
        for site in SITES:
            rows, positions, token_ids = capture[site]
            assert capture.quantization_of(site) == quantization
            assert rows.dtype == np.float32
            assert not rows.flags.writeable
            assert positions.tolist() == list(range(length))
            assert token_ids.tolist() == [token_of(request, position) for position in range(length)]
            expected = expected_of(request, site, range(length), quantization, dtype=dtype, width=hidden)
            assert np.array_equal(rows, expected)
            assert np.array_equal(np.concatenate([part.rows for part in capture.in_batches(site)]), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [HIDDEN, 7])
def test_rows_are_read_as_float32_of_their_codes_and_scales(tmp_path, options, quantization, dtype, hidden):
    write(tmp_path, dtype=dtype, hidden=hidden, **options)
    assert_rounded(capflow.open(tmp_path), quantization, dtype=dtype, hidden=hidden)
    entry = capflow.open(tmp_path)["c"].sidecar.sites[0]
    assert (entry.dtype, entry.bytes) == ("float32", 3 * (hidden + 4))


@pytest.mark.parametrize("hidden", [HIDDEN, 7])
def test_other_tools_multiply_vector_and_scale(tmp_path, options, quantization, hidden):
    write(tmp_path, hidden=hidden, **options)
    (path,) = tmp_path.glob(SHARD_PATTERN)
    columns = ["request", "layer", "hook", "position"]
    table = pq.ParquetFile(path, page_checksum_verification=True).read()
    assert table.schema.metadata[b"capflow.dtype"] == quantization.encode()
    leaf = pq.read_metadata(path).schema.column(len(table.schema) - 1)
    number = "Int(bitWidth=8, isSigned=true)" if quantization == "int8" else "None"
    assert str(leaf.logical_type) == number
    arrays = {"vector": np.stack(table["vector"].to_numpy()), "scale": table["scale"].to_numpy()}
    by_pyarrow = eval(DOCUMENTED["NumPy"], arrays)  # noqa: S307 - our own documentation
    rows = dict(zip(zip(*(table[name].to_pylist() for name in columns), strict=True), by_pyarrow, strict=True))
    assert len(rows) == 2 * sum(LENGTHS.values())
    by_duckdb = duckdb.sql(f"SELECT {', '.join(columns)}, {DOCUMENTED['DuckDB']} FROM '{path}'").fetchall()
    row = eval(DOCUMENTED["Polars"], {"pl": pl})  # noqa: S307 - our own documentation
    scanned = pl.scan_parquet(path).select(*columns, row=row).collect()
    for request in LENGTHS:
        for site in SITES:
            for position, expected in enumerate(capflow.open(tmp_path)[request][site].rows):
                assert np.array_equal(rows[request, *site, position], expected)
    for table in (by_duckdb, scanned.rows()):
        assert {tuple(row[:4]): np.array(row[4], np.float32).tobytes() for row in table} == {
            place: row.tobytes() for place, row in rows.items()
        }


def test_the_last_indices_of_a_page_are_filled_up_to_eight(quantization):
    pages = parquet.vector_pages(quantization, 7, 3, bytes(21), compressed=False)
    assert len(pages.parts[-1]) == len(parquet.vector_levels(quantization, 7, 3)) + 24


def test_a_byte_a_number_and_four_a_row_are_stored(tmp_path, quantization, monkeypatch):
    monkeypatch.setattr(shardfile, "IN_PLACE_BYTES_MIN", shardfile.ROUNDED_IN_PLACE_BYTES_MIN)
    hidden, length = 512, 400
    assert 2 * length * hidden > shardfile.ROUNDED_IN_PLACE_BYTES_MIN
    sizes = {}
    for option in ("none", quantization):
        root = tmp_path / option
        write(root, {"r": length}, hidden=hidden, layout="sharded", quantization=option)
        (path,) = root.glob(SHARD_PATTERN)
        sizes[option] = path.stat().st_size
    rows = 2 * length
    saved = rows * (hidden * 2 - hidden - 2 * 4)  # the scale is in the stream and in a Parquet column
    dictionary = 4 * (1 << 16)
    assert abs(sizes["none"] - sizes[quantization] - saved - dictionary) < 4096


def test_rows_of_several_widths(tmp_path, options, quantization):
    lengths = {"a": 9, "b": 6}
    shaped.store(tmp_path, lengths, frames={"dtype": "bfloat16"}, **options)
    dataset = capflow.open(tmp_path)
    dataset.verify()
    (path,) = tmp_path.glob(SHARD_PATTERN)
    query = f"SELECT request, layer, hook, position, {DOCUMENTED['DuckDB']} FROM '{path}'"
    rows = {tuple(row[:4]): np.array(row[4], np.float32) for row in duckdb.sql(query).fetchall()}
    for (request, length), site in itertools.product(lengths.items(), shaped.SITES):
        positions = shaped.positions_of(site, length)
        expected = expected_of(request, site, positions, quantization, width=shaped.width_of(site))
        assert np.array_equal(dataset[request][site].rows, expected)
        assert dataset[request][site].row_shape == shaped.SHAPES.get(site, (shaped.HIDDEN,))
        for position, row in zip(positions, expected, strict=True):
            assert np.array_equal(rows[request, *site, position], row)


def test_large_requests_lie_in_batches_that_take_no_more_memory_as_float32(tmp_path, quantization, monkeypatch):
    monkeypatch.setattr(shardfile, "BATCH_BYTES_MAX", 4 * 10 * HIDDEN)
    write(tmp_path, {"r": 45}, layout="sharded", quantization=quantization)
    capture = capflow.open(tmp_path)["r"]
    parts = list(capture.in_batches(SITES[0]))
    assert max(part.rows.nbytes for part in parts) <= shardfile.BATCH_BYTES_MAX
    assert len(parts) > 4
    assert_rounded(capflow.open(tmp_path), quantization, {"r": 45})


def test_rows_that_came_early_are_rounded_at_the_end(tmp_path, options, quantization):
    consumer = opened(tmp_path, SITES, buffer_bytes_max=100, **options)
    for seq, start in enumerate(range(0, 40, 5), 1):
        frame = make_frame([("r", 4, start, 5)], sorted(SITES), dtype="bfloat16", hidden=HIDDEN, seq=seq)
        consumer.on_frame(frame)
    consumer.on_request_done(done("r", computed_length=40, rows=80))
    consumer.close()
    assert consumer._context.counts["buffer_overflows"] > 0
    assert_rounded(capflow.open(tmp_path), quantization, {"r": 40})


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 2.0**127])
@pytest.mark.parametrize("index", [0, 11])
def test_a_request_with_a_row_that_cannot_be_rounded_is_stored_exactly(tmp_path, options, quantization, number, index):
    consumer = write(tmp_path, replaced={"a": (index, number)}, **options)
    assert consumer._context.counts == {"requests_not_rounded": 1}
    dataset = capflow.open(tmp_path)
    dataset.verify()
    exact = dataset["a"]
    sites = sorted(SITES)
    assert {exact.quantization_of(site) for site in sites} == {None}
    rows = np.stack([row_of("a", site, p, HIDDEN, "bfloat16") for site in sites for p in range(6)])
    rows[index, 0] = number
    stored = np.concatenate([exact[site].rows for site in sites])
    assert stored.dtype == np.float32
    assert np.array_equal(stored, rows.astype(np.float32), equal_nan=True)
    for request in ("b/ü", "c"):
        assert dataset[request].quantization_of(SITES[0]) == quantization
    # Batches of all requests have one dtype, and other tools read both kinds of shards at once.
    (batch,) = dataset.batches(SITES[0], 100)
    assert batch.rows.dtype == np.float32
    dequantise = DOCUMENTED["DuckDB"].replace("scale", "coalesce(scale, 1)")
    shards = f"read_parquet('{tmp_path}/*.parquet', union_by_name = true)"
    query = f"SELECT {dequantise} FROM {shards} WHERE layer = 0 AND hook = 'post_block' ORDER BY request, position"
    read = np.array([row for (row,) in duckdb.sql(query).fetchall()], np.float32)
    assert np.array_equal(read, batch.rows[np.argsort(batch.requests, kind="stable")], equal_nan=True)


def test_a_request_that_overflowed_before_is_stored_with_its_infinity(tmp_path, quantization):
    wanted = CaptureSpec({"post_block": [0]}, "all", dtype="float16").resolve([SITES[0]], num_layers=1)
    consumer = opened(tmp_path, SITES[:1], layout="sharded", quantization=quantization)
    frame = make_frame([("r", 4, 0, 4)], SITES[:1], dtype="float32", hidden=8)
    rows = np.frombuffer(frame.payload, np.float32).copy()
    rows[3] = 1e6
    frame = Frame.seal(frame.header, rows.tobytes())
    frame.wants = lambda _: wanted
    consumer.on_frame(frame)
    result = consumer.on_request_done(done("r"))
    consumer.close()
    assert "1 rows of post_block:0 have numbers beyond float16" in result.error
    capture = capflow.open(tmp_path)["r"]
    assert capture.quantization_of(SITES[0]) is None
    half = np.where(rows > 65504, np.float32(np.inf), rows).astype(np.float16)
    assert np.array_equal(capture[SITES[0]].rows.ravel(), half)


def test_a_request_without_rows_is_on_record(tmp_path, options):
    consumer = opened(tmp_path, SITES, **options)
    consumer.on_request_done(done("r", rows=0))
    consumer.close()
    dataset = capflow.open(tmp_path)
    dataset.verify()
    assert dataset["r"].sites == ()


SETTINGS = [
    {"layout": "packed"},
    {"layout": "sharded"},
    {"layout": "sharded", "compression": "zstd"},
    {"layout": "sharded", "quantization": "int8"},
    {"layout": "sharded", "quantization": "float8_e4m3", "compression": "zstd"},
]


def test_writers_of_other_settings_share_a_root(tmp_path):
    for number, settings in enumerate(SETTINGS):
        write(tmp_path, {f"r{number}": 5}, **settings)
    again = write(tmp_path, {"r3": 5}, layout="sharded", quantization="int8")  # the frames of r3, once more
    assert again._context.counts == {"requests_again": 1}
    dataset = capflow.open(tmp_path)
    dataset.verify()
    for number, settings in enumerate(SETTINGS):
        rows = dataset[f"r{number}"][SITES[0]].rows
        if rounding := settings.get("quantization"):
            assert np.array_equal(rows, expected_of(f"r{number}", SITES[0], range(5), rounding))
        else:
            assert rows.dtype == DTYPES["bfloat16"]
    assert sum(len(batch.rows) for batch in dataset.batches(SITES[0], 4)) == 5 * len(SETTINGS)


KILLED = """
import os, sys
from pathlib import Path
from tests.consumers.dataset.test_rounded_rows import HIDDEN, LENGTHS, SITES
from tests.kit.frames import make_frame
from tests.kit.stored import done, opened
options = {"layout": "sharded", "quantization": sys.argv[2], "compression": sys.argv[3]}
consumer = opened(Path(sys.argv[1]), SITES, **options)
for seq, (name, length) in enumerate([*LENGTHS.items(), ("lost", 5)], 1):
    consumer.on_frame(make_frame([(name, 4, 0, length)], sorted(SITES), dtype="bfloat16", hidden=HIDDEN, seq=seq))
    if name != "lost":
        consumer.on_request_done(done(name, computed_length=length, rows=2 * length))
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("head", ["whole", "damaged"])
def test_the_next_writer_seals_the_shard_of_a_killed_one(tmp_path, quantization, compression, head):
    script = [sys.executable, "-c", KILLED, str(tmp_path), quantization, compression]
    assert subprocess.run(script, cwd=ROOT, env=os.environ, check=False).returncode == -signal.SIGKILL
    (path,) = tmp_path.glob(f".partial-*/{SHARD_PATTERN}")
    if head == "damaged":
        flip(path, 40)
        capflow.open(tmp_path)["a"].verify()
    else:
        assert_rounded(capflow.open(tmp_path), quantization)
    opened(tmp_path, SITES, layout="packed").close()
    assert_rounded(capflow.open(tmp_path), quantization)
    (sealed,) = tmp_path.glob(SHARD_PATTERN)
    assert len(pq.ParquetFile(sealed, page_checksum_verification=True).read()) == 2 * sum(LENGTHS.values())


@pytest.fixture
def torn(tmp_path, quantization):
    """The shard of a dead writer."""
    consumer = opened(tmp_path / "living", SITES, layout="sharded", quantization=quantization)
    for seq, (request, length) in enumerate(LENGTHS.items(), 1):
        frame = make_frame([(request, 4, 0, length)], sorted(SITES), dtype="bfloat16", hidden=HIDDEN, seq=seq)
        consumer.on_frame(frame)
        consumer.on_request_done(done(request, computed_length=length, rows=2 * length))
    shutil.copytree(tmp_path / "living", tmp_path / "root")
    consumer.close()
    (path,) = (tmp_path / "root").glob(f".partial-*/{SHARD_PATTERN}")
    return path


@pytest.mark.parametrize(("left", "count"), [(1.0, 3), (0.999, 2), (0.7, 1), (0.05, 0)])
def test_a_torn_shard_keeps_its_whole_requests(torn, quantization, left, count):
    root = torn.parent.parent
    begins = [capture.entry.batches[0] for capture in map(capflow.open(root).__getitem__, LENGTHS)]
    ends = [*begins[1:], torn.stat().st_size]
    size = int(ends[-1] * left)
    os.truncate(torn, size)
    whole = {name: LENGTHS[name] for name, end in zip(LENGTHS, ends, strict=True) if end <= size}
    assert len(whole) == count
    assert_rounded(capflow.open(root), quantization, whole)
    opened(root, SITES, layout="sharded").close()
    assert_rounded(capflow.open(root), quantization, whole)
    assert not list(root.glob(".partial-*"))


@pytest.mark.parametrize("part", ["scale", "code"])
def test_a_flipped_bit_in_a_scale_or_a_code_costs_its_request(torn, quantization, part):
    root = torn.parent.parent
    rows = np.stack([row_of("b/ü", site, p, HIDDEN, "bfloat16") for site in sorted(SITES) for p in range(40)])
    codes, scales = quantised(rows, quantization)
    whole = torn.read_bytes()
    flip(torn, whole.index((scales if part == "scale" else codes).tobytes()) + 5)
    for name in ("a", "c"):
        capflow.open(root)[name].verify()
    with pytest.raises(CapflowError, match="a wrong checksum of "):
        capflow.open(root)["b/ü"].verify()
    opened(root, SITES, layout="packed").close()
    assert_rounded(capflow.open(root), quantization, {"a": 6, "c": 3})
    assert len(list(root.glob(".damaged-*"))) == 1


def test_every_byte_of_a_shard_is_checked(tmp_path, options):
    write(tmp_path, **options)
    (path,) = tmp_path.glob(SHARD_PATTERN)
    whole = path.read_bytes()
    unnoticed = []
    for place in [*range(0, len(whole), 61), *range(len(whole) - 700, len(whole), 7)]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            capflow.open(tmp_path).verify()
        except CapflowError:
            continue
        unnoticed.append(place)
    assert unnoticed == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"layout": "packed"}, "got int8, expected none with packed; set layout=sharded, or remove it"),
        ({"layout": "per_file"}, "got int8, expected none with per_file; set layout=sharded, or remove it"),
        (
            {"layout": "sharded", "dtype": "float16"},
            r"dtype: got float16, expected model with quantization=int8; remove it; rounded rows are read as float32",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, wrong, words):
    with pytest.raises(UsageError, match=words):
        opened(tmp_path, quantization="int8", **wrong)
    assert not list(tmp_path.iterdir())


def test_another_kind_of_rounding_is_refused(tmp_path):
    ran = run("replay", tmp_path, "--consumer", f"filesystem:root={tmp_path},layout=sharded,quantization=int4")
    assert ran.returncode != 0
    assert "quantization: got int4, expected float8_e4m3 or int8 or none" in ran.stderr


def test_inspect_and_exports_say_that_rows_were_rounded(tmp_path, options, quantization):
    root = tmp_path / "rows"
    write(root, **options)
    assert f"float32 ({quantization})" in run("inspect", root).stdout
    survey = json.loads(run("inspect", root, "--json").stdout)
    for site in survey["sites"]:
        assert (site["dtypes"], site["quantizations"]) == (["float32"], [quantization])
        assert site["bytes"] == sum(LENGTHS.values()) * (HIDDEN + 4)
    assert run("export", root, tmp_path / "out", "--to", "safetensors").returncode == 0
    with safe_open(tmp_path / "out" / "c.safetensors", "numpy") as exported:
        assert exported.metadata()[f"{SITES[0]}.quantization"] == quantization
        rows = exported.get_tensor("post_block.000.rows")
    assert np.array_equal(rows, expected_of("c", SITES[0], range(3), quantization))


def test_torch_takes_rounded_rows_as_float32(tmp_path, options, quantization):
    write(tmp_path, {"c": 3}, **options)
    (batch,) = capflow.TorchRows(tmp_path, [SITES[0]], shuffle_rows=0)
    assert batch.rows.dtype == torch.float32
    assert np.array_equal(batch.rows.numpy(), expected_of("c", SITES[0], range(3), quantization))


def test_a_replay_gives_rounded_rows_as_float32(tmp_path, options, quantization):
    write(tmp_path, {"c": 3}, **options)
    engine, *frames = entries_of(capflow.open(tmp_path))
    assert engine.model.dtype == "float32"
    chunks = [chunk for frame in frames for chunk in frame.chunks()]
    for number, site in enumerate(sorted(SITES)):
        rows = np.concatenate([chunk.rows[number] for chunk in chunks])
        assert np.array_equal(rows, expected_of("c", site, range(3), quantization))


@pytest.mark.parametrize("numbers", [(np.inf, 1.0), (1.0, np.inf)])
def test_parts_of_a_request_of_which_one_is_exact_are_joined(tmp_path, quantization, numbers):
    options = {"layout": "sharded", "quantization": quantization}
    consumer = opened(tmp_path, SITES[:1], **options)
    for seq, (start, status, number) in enumerate(zip((0, 3), ("error", "stop"), numbers, strict=True), 1):
        frame = make_frame([("r", 2, start, 3)], SITES[:1], hidden=HIDDEN, seq=seq)
        rows = np.frombuffer(frame.payload, np.float32).copy()
        rows[0] = number
        consumer.on_frame(Frame.seal(frame.header, rows.tobytes()))
        length = 0 if status == "error" else 6
        consumer.on_request_done(msgspec.structs.replace(done("r", 2, length, rows=3), status=status))
    consumer.close()
    capture = capflow.open(tmp_path)["r"]
    assert len(capture.parts) == 2
    assert capture.quantization_of(SITES[0]) == quantization
    assert capture[SITES[0]].rows.dtype == np.float32
    assert capture[SITES[0]].positions.tolist() == list(range(6))
    capture.verify()


def test_experts_are_not_chosen_by_rounded_logits(tmp_path, quantization):
    site = Site(0, "router")
    consumer = opened(tmp_path, (site,), capture="requests", layout="sharded", quantization=quantization)
    model = msgspec.structs.replace(shaped.shaped_model(), sites=(site,), shapes=(((8,), ((site.hook, (0,)),)),))
    consumer.on_session("engine-1", model)
    consumer.on_frame(make_frame([("r", 4, 0, 4)], (site,), shapes={site: (8,)}))
    consumer.on_request_done(done("r"))
    consumer.close()
    capture = capflow.open(tmp_path)["r"]
    entry = msgspec.structs.replace(capture.sidecar.sites[0], router=RouterForm(2))
    capture._entries[site] = entry
    words = rf"experts of layer 0: got logits rounded to {quantization}, expected exact ones; capture them without"
    with pytest.raises(UsageError, match=words):
        capture.experts(0)
