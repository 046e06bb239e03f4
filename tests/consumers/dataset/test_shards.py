"""Shards as other tools read them, and the recovery of torn ones."""

from __future__ import annotations

import itertools
import os
import shutil
import threading

import duckdb
import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

import capflow
from capflow.capture.site import Site
from capflow.errors import CapflowError
from capflow_consumers.dataset import layout
from capflow_consumers.dataset.layout import SHARD_PATTERN
from capflow_consumers.dataset.shards import file as shardfile
from capflow_consumers.dataset.shards import reader as shardset
from capflow_consumers.dataset.shards import seal as shardseal
from tests.kit.captured import flip
from tests.kit.frames import make_frame, row_of, token_of
from tests.kit.stored import done, opened

SITES = (Site(1, "mlp_in"), Site(0, "post_block"))  # in the order in which they lie
HIDDEN = 64
LENGTHS = {"a": 6, "b/ü": 40, "c": 3}
NUMPY = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32}


def write(root, dtype, **options):
    consumer = opened(root, SITES, layout="sharded", **options)
    for seq, (request, length) in enumerate(LENGTHS.items(), 1):
        consumer.on_frame(make_frame([(request, 4, 0, length)], sorted(SITES), dtype=dtype, hidden=HIDDEN, seq=seq))
        result = consumer.on_request_done(done(request, computed_length=length, rows=2 * length))
        assert result.status == "ok"
    consumer.close()
    (path,) = root.glob(SHARD_PATTERN)
    return path


def test_a_shard_of_another_format_says_so_whatever_else_its_index_has(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(shardseal, "Index", lambda *_: [9, "of another shape"])
        path = write(tmp_path, "float32")
    (message,) = capflow.open(tmp_path).damaged()
    assert message.startswith(
        f"{path} format: got 9, expected {shardseal.FORMAT}; read it with the capflow that wrote it"
    )


def test_writers_may_come_and_go_while_it_is_opened(tmp_path):
    write(tmp_path, "float32")
    over = threading.Event()

    def come_and_go():
        for number in itertools.count():
            if over.is_set():
                return
            directory = tmp_path / f"{layout.PARTIAL_PREFIX}{number}"
            directory.mkdir()
            directory.rmdir()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(300):
            dataset = capflow.open(tmp_path)
            assert list(dataset.running()) == []
            assert sorted(dataset.requests()) == sorted(LENGTHS)
    finally:
        over.set()
        thread.join()


def expected(dtype):
    """Return the rows of a shard as (request, layer, hook, position, token_id, phase, bytes)."""
    return [
        (
            request,
            site.layer,
            site.hook,
            position,
            token_of(request, position),
            "prompt" if position < 4 else "generated",
            row_of(request, site, position, HIDDEN, dtype).tobytes(),
        )
        for request, length in LENGTHS.items()
        for site in sorted(SITES)
        for position in range(length)
    ]


COLUMNS = ["request", "layer", "hook", "position", "token_id", "phase"]


def rows_of(columns, vectors, dtype):
    """Return the rows that a tool read, in the form of `expected`."""
    values = [np.asarray(vector).astype(NUMPY[dtype]).tobytes() for vector in vectors]
    return list(zip(*columns, values, strict=True))


@pytest.fixture(params=["in place", "gathered", "zstd", "zstd large"])
def options(request, monkeypatch):
    """Options for each way in which vectors lie in a page, with a dictionary and without."""
    if request.param in {"in place", "zstd large"}:
        monkeypatch.setattr(shardfile, "IN_PLACE_BYTES_MIN", 0)
    if request.param == "zstd large":
        monkeypatch.setattr("capflow_consumers.dataset.shards.parquet._DICTIONARY_WORTH_BYTES", 0)
    return {"compression": "zstd"} if request.param.startswith("zstd") else {}


@pytest.mark.parametrize("dtype", NUMPY)
def test_pyarrow_reads_a_shard_and_finds_every_checksum_right(tmp_path, dtype, options):
    path = write(tmp_path, dtype, **options)
    table = pq.ParquetFile(path, page_checksum_verification=True).read()
    vectors = table["vector"].combine_chunks()
    assert pa.types.is_fixed_size_list(vectors.type)
    assert table.schema.metadata[b"capflow.dtype"] == dtype.encode()
    got = rows_of([table[name].to_pylist() for name in COLUMNS], vectors.to_pylist(), dtype)
    assert got == expected(dtype)
    assert table["xxh3"].to_pylist() == [xxhash.xxh3_64_intdigest(row[-1]) for row in got]
    assert set(table["model"].to_pylist()) == {"test-model"}
    for request, length in LENGTHS.items():
        for site in SITES:
            rows = capflow.open(tmp_path)[request][site].rows
            assert rows.tobytes() == b"".join(row[-1] for row in got if row[:3] == (request, *site))
            assert len(rows) == length


@pytest.mark.parametrize("dtype", NUMPY)
def test_duckdb_opens_a_shard_as_it_is(tmp_path, dtype, options):
    path = write(tmp_path, dtype, **options)
    records = duckdb.sql(f"select {', '.join(COLUMNS)}, vector from '{path}'").fetchall()
    assert rows_of(list(zip(*records, strict=True))[:-1], [row[-1] for row in records], dtype) == expected(dtype)
    (one,) = duckdb.sql(
        f"select token_id from '{path}' where request = 'b/ü' and hook = 'mlp_in' and position = 39"
    ).fetchall()
    assert one == (token_of("b/ü", 39),)


@pytest.mark.parametrize("dtype", NUMPY)
def test_polars_opens_a_shard_as_it_is(tmp_path, dtype, options):
    import polars as pl

    path = write(tmp_path, dtype, **options)
    table = pl.read_parquet(path)
    assert rows_of([table[name].to_list() for name in COLUMNS], table["vector"].to_list(), dtype) == expected(dtype)
    assert pl.scan_parquet(path).filter(pl.col("request") == "b/ü").collect().height == 80


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])  # Daft does not know Parquet's float16
def test_daft_opens_a_shard_as_it_is(tmp_path, dtype, options):
    import daft

    table = daft.read_parquet(str(write(tmp_path, dtype, **options))).to_arrow()
    vectors = table["vector"].to_pylist()
    assert rows_of([table[name].to_pylist() for name in COLUMNS], vectors, dtype) == expected(dtype)


@pytest.mark.parametrize("dtype", NUMPY)
def test_datasets_opens_a_shard_as_it_is(tmp_path, dtype, options, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    path = write(tmp_path / "root", dtype, **options)
    table = datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert table.features["vector"].length == HIDDEN
    assert rows_of([table[name] for name in COLUMNS], table["vector"], dtype) == expected(dtype)


def test_bfloat16_is_made_of_uint16_again_without_loss(tmp_path):
    path = write(tmp_path, "bfloat16")
    vectors = pq.read_table(path)["vector"].combine_chunks().values.to_numpy()
    rows = vectors.view(ml_dtypes.bfloat16).reshape(-1, HIDDEN)
    assert rows[0].tobytes() == row_of("a", min(SITES), 0, HIDDEN, "bfloat16").tobytes()


@pytest.mark.parametrize("hidden", [1, 3, 8])
def test_rows_of_any_width(tmp_path, hidden, options):
    consumer = opened(tmp_path, SITES, layout="sharded", **options)
    consumer.on_frame(make_frame([("a", 4, 0, 5)], SITES, dtype="bfloat16", hidden=hidden))
    consumer.on_request_done(done("a", computed_length=5, rows=10))
    consumer.close()
    (path,) = tmp_path.glob(SHARD_PATTERN)
    vectors = pq.ParquetFile(path, page_checksum_verification=True).read()["vector"].to_pylist()
    rows = np.concatenate([capflow.open(tmp_path)["a"][site].rows for site in sorted(SITES)])
    assert np.array(vectors, np.uint16).tobytes() == rows.tobytes()
    assert np.array_equal(rows[0], row_of("a", min(SITES), 0, hidden, "bfloat16"))


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_batches_are_cut_where_sites_end_and_within_one_that_is_larger(tmp_path, monkeypatch, compression):
    monkeypatch.setattr(shardfile, "BATCH_BYTES_MAX", 7 * HIDDEN * 4)
    monkeypatch.setattr(shardfile, "COMPRESSED_BATCH_BYTES_MAX", 7 * HIDDEN * 4)
    path = write(tmp_path, "float32", compression=compression)
    dataset = capflow.open(tmp_path)
    sizes = {name: [len(batch.positions) for batch in dataset[name]._decoded()] for name in LENGTHS}
    assert sizes == {"a": [6, 6], "b/ü": [7, 7, 7, 7, 7, 5] * 2, "c": [6]}
    assert [len(part.rows) for part in dataset["b/ü"].in_batches("mlp_in:1")] == [7, 7, 7, 7, 7, 5]
    assert [len(batch.rows) for batch in dataset.batches("mlp_in:1", 10)] == [10, 10, 10, 10, 9]
    dataset.verify()
    rows, positions, token_ids = dataset["b/ü"]["mlp_in:1"]
    assert positions.tolist() == list(range(40))
    assert token_ids.tolist() == [token_of("b/ü", p) for p in range(40)]
    assert rows.tobytes() == b"".join(row_of("b/ü", Site(1, "mlp_in"), p, HIDDEN).tobytes() for p in range(40))
    assert pq.read_metadata(path).num_rows == 2 * sum(LENGTHS.values())


@pytest.fixture
def torn(tmp_path):
    """The shard of a dead writer, with five requests in it."""
    consumer = opened(tmp_path / "living", SITES, layout="sharded")
    for seq in range(5):
        consumer.on_frame(make_frame([(f"r{seq}", 4, 0, 10)], SITES, hidden=HIDDEN, seq=seq + 1, boot="b"))
        consumer.on_request_done(done(f"r{seq}", computed_length=10, rows=20))
    shutil.copytree(tmp_path / "living", tmp_path / "root")
    consumer.close()
    (path,) = (tmp_path / "root").glob(f".partial-*/{SHARD_PATTERN}")
    return path


@pytest.mark.parametrize(("left", "whole"), [(1.0, 5), (0.999, 4), (0.5, 2), (0.1, 0), (0.01, 0), (0.0, 0)])
def test_a_torn_shard_keeps_its_whole_requests(torn, left, whole):
    root = torn.parent.parent
    os.truncate(torn, int(torn.stat().st_size * left))
    names = [f"r{number}" for number in range(whole)]
    assert capflow.open(root).requests() == names  # as it lies
    opened(root, SITES, layout="packed").close()  # any next writer seals it
    dataset = capflow.open(root)
    assert dataset.requests() == names
    dataset.verify()
    assert not list(root.glob(".partial-*"))
    assert sum(pq.read_metadata(path).num_rows for path in root.glob(SHARD_PATTERN)) == 20 * whole
    for name in names:
        rows = dataset[name][SITES[0]].rows
        assert rows.tobytes() == b"".join(row_of(name, SITES[0], p, HIDDEN).tobytes() for p in range(10))


def test_a_torn_shard_is_an_arrow_stream_of_whole_batches(torn):
    with pa.memory_map(str(torn)) as file:
        file.seek(8)
        stream = pa.ipc.open_stream(file)
        batches = [stream.read_next_batch() for _ in range(10)]
    assert [len(batch) for batch in batches] == [20, 1] * 5
    assert batches[0]["position"].to_pylist() == [*range(10)] * 2


def test_a_request_whose_rows_a_power_cut_spoiled_is_not_kept(torn):
    root = torn.parent.parent
    shard = capflow.open(root)["r2"]
    begin = shard.entry.batches[0]
    with torn.open("r+b") as file:
        file.seek(begin + 2000)
        file.write(bytes(512))
    opened(root, SITES, layout="sharded").close()
    dataset = capflow.open(root)
    assert dataset.requests() == ["r0", "r1", "r3", "r4"]
    dataset.verify()
    assert not [row for row in pq.read_table(next(root.glob(SHARD_PATTERN)))["request"].to_pylist() if row == "r2"]


def test_each_batch_is_decompressed_once_for_all_of_its_sites(tmp_path, monkeypatch):
    sites = tuple(Site(layer, "post_block") for layer in range(18))
    consumer = opened(tmp_path, sites, layout="sharded", compression="zstd")
    consumer.on_frame(make_frame([("r", 4, 0, 5)], sites, hidden=HIDDEN))
    consumer.on_request_done(done("r", computed_length=5, rows=90))
    consumer.close()
    calls = []
    whole = shardset.rows_of
    monkeypatch.setattr(shardset, "rows_of", lambda batch, kind: calls.append(batch.end) or whole(batch, kind))
    capture = capflow.open(tmp_path)["r"]
    for site in sites:
        assert capture[site].rows.tobytes() == b"".join(row_of("r", site, p, HIDDEN).tobytes() for p in range(5))
    assert len(calls) == 1


def place_in(shard, request, part):
    """Return the place of a part of a request's first batch in a shard.

    part: the metadata of its message, its rows, its commit, or the shard's head.
    """
    entry = capflow.open(shard.parent.parent)[request].entry
    return {
        "metadata": entry.batches[0] + 60,
        "length of the metadata": entry.batches[0] + 4,
        "rows": entry.batches[0] + 2000,
        "commit": entry.batches[-1] + 60,
        "sidecar": shard.read_bytes().index(b'"request":"' + request.encode()),
        "magic": 1,
        "schema": 40,
        "dtype in the schema": shard.read_bytes().index(b"float32"),
    }[part]


@pytest.mark.parametrize(
    ("part", "request_id"),
    [
        *itertools.product(("metadata", "length of the metadata", "rows", "commit", "sidecar"), ("r0", "r1", "r4")),
        *itertools.product(("magic", "schema", "dtype in the schema"), (None,)),
    ],
)
def test_one_damaged_byte_in_a_dead_writers_shard_costs_its_request_and_the_file_is_kept(
    torn, part, request_id, caplog
):
    root = torn.parent.parent
    flip(torn, place_in(torn, request_id or "r0", part))
    damaged = torn.read_bytes()
    whole = [name for name in ("r0", "r1", "r2", "r3", "r4") if name != request_id]
    if part != "rows":  # reading does not check their hashes
        assert capflow.open(root).requests() == whole
    opened(root, SITES, layout="packed").close()
    dataset = capflow.open(root)
    assert dataset.requests() == whole
    dataset.verify()
    for name in whole:
        rows = dataset[name][SITES[0]].rows
        assert rows.tobytes() == b"".join(row_of(name, SITES[0], p, HIDDEN).tobytes() for p in range(10))
    assert not list(root.glob(".partial-*"))
    (kept,) = root.glob(".damaged-*")
    assert kept.name == f".damaged-{torn.name}"
    assert kept.read_bytes() == damaged
    assert f"is damaged, and kept as {kept}" in caplog.text
    assert pq.read_table(root / torn.name)["request"].unique().to_pylist() == whole


def test_a_dead_writers_shard_of_which_nothing_can_be_read_is_kept(torn):
    root = torn.parent.parent
    # Only sidecars are left.
    torn.write_bytes(bytes(600) + torn.read_bytes()[600:].replace(b"\xff\xff\xff\xff", b"\xff\xff\xff\xfe"))
    opened(root, SITES, layout="packed").close()
    assert capflow.open(root).requests() == []
    assert [path.name for path in root.iterdir() if path.name != ".lock"] == [f".damaged-{torn.name}"]


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("length", [0, 3, 8, 60, 900, 1500])
def test_a_torn_end_is_no_damage(torn, batch, length):
    root = torn.parent.parent
    begin = capflow.open(root)["r3"].entry.batches[batch]
    os.truncate(torn, begin + length)
    assert capflow.open(root).damaged() == []
    assert capflow.open(root).requests() == ["r0", "r1", "r2"]
    opened(root, SITES, layout="packed").close()
    assert not list(root.glob(".damaged-*"))


def test_a_writer_that_dies_while_it_copies_from_a_damaged_shard_leaves_that_to_the_next(torn, monkeypatch):
    root = torn.parent.parent
    flip(torn, place_in(torn, "r1", "metadata"))

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(shardfile.ShardFile, "commit", fail)
        with pytest.raises(CapflowError):
            opened(root, SITES, layout="packed")
    opened(root, SITES, layout="packed").close()
    assert capflow.open(root).requests() == ["r0", "r2", "r3", "r4"]
    assert len(list(root.glob(".damaged-*"))) == 1


def test_every_byte_of_a_shard_is_checked(tmp_path):
    path = write(tmp_path, "bfloat16")
    whole = path.read_bytes()
    unnoticed = []
    for place in [*range(0, len(whole), 487), *range(len(whole) - 700, len(whole), 7)]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            capflow.open(tmp_path).verify()
        except CapflowError:
            continue
        unnoticed.append(place)
    assert unnoticed == []


def test_a_row_that_was_changed_is_named(tmp_path):
    path = write(tmp_path, "float32")
    whole = bytearray(path.read_bytes())
    place = whole.index(row_of("c", SITES[0], 1, HIDDEN).tobytes())
    whole[place] ^= 1
    path.write_bytes(whole)
    with pytest.raises(CapflowError, match=r"a wrong checksum of row \d of batch 0 of c"):
        capflow.open(tmp_path)["c"].verify()
    capflow.open(tmp_path)["a"].verify()


def test_capture_numbers_tell_captures_of_one_id_apart(tmp_path):
    for boot in ("b", "c"):
        consumer = opened(tmp_path, layout="sharded", on_collision="suffix")
        consumer.on_frame(make_frame([("r1", 4, 0, 4)], boot=boot))
        consumer.on_request_done(done())
        consumer.close()
    numbers = duckdb.sql(f"select distinct request, capture from '{tmp_path}/*.parquet' order by 2").fetchall()
    assert numbers == [("r1", 1), ("r1", 2)]


def test_two_hubs_write_shards_to_one_root(tmp_path):
    consumers = [opened(tmp_path, layout="sharded") for _ in range(2)]
    for number, consumer in enumerate(consumers):
        consumer.on_frame(make_frame([(f"r{number}", 4, 0, 4)]))
        consumer.on_request_done(done(f"r{number}"))
    dataset = capflow.open(tmp_path)
    assert sorted(dataset.requests()) == ["r0", "r1"]
    for consumer in consumers:
        consumer.close()
    assert sorted(dataset.requests()) == ["r0", "r1"]
