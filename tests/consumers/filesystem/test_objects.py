"""A sharded data set in an object store, on a real S3 server: whole, each request once, and nothing lost."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import duckdb
import msgspec
import numpy as np
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import capflow
from capflow.cli import cli
from capflow.errors import RetryError, UsageError
from capflow_consumers.dataset.layout import SHARD_PATTERN
from capflow_consumers.dataset.shards import file as shardfile
from capflow_consumers.filesystem.consumer import FilesystemConfig, FilesystemConsumer
from tests.kit import shaped
from tests.kit.frames import make_frame, make_model, row_of
from tests.kit.processes.files import REQUESTS, rows_of
from tests.kit.refusing import Refusing
from tests.kit.s3d import READER, S3d, keys, s3d
from tests.kit.sources import PROCESSES
from tests.kit.stored import SITES, Counts, done, opened
from tests.kit.waiting import eventually

SHARD_BYTES = 1 << 20
HIDDEN = 1024


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3d(tmp_path_factory.mktemp("s3"), "rows") as server:
        yield server


@pytest.fixture(autouse=True)
def _environment(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name, value in keys().items():
        monkeypatch.setenv(name, value)


def writer(url, staging, **options):
    return opened(url, SITES, layout="sharded", shard_bytes=SHARD_BYTES, staging=str(staging), **options)


def give(consumer, number, *, seq=None, engine="engine-1"):
    """Give a consumer a request and its end; return what it answers."""
    rows = rows_of(number)
    request = f"r{number}"
    frame = make_frame([(request, 2, 0, rows)], SITES, hidden=HIDDEN, seq=seq or number + 1, boot="b", engine=engine)
    consumer.on_frame(frame)
    end = msgspec.structs.replace(done(request, 2, rows, rows=3 * rows), engine=engine)
    return consumer.on_request_done(end)


def assert_has(url, numbers):
    """Assert that a data set has exactly these requests, each once and whole."""
    dataset = capflow.open(url)
    assert sorted(dataset.requests()) == sorted(f"r{number}" for number in numbers)
    for number in numbers:
        (capture,) = dataset.captures(f"r{number}", look=False)
        assert capture.status == "ok"
        for site in SITES:
            rows, positions, _ = capture[site]
            expected = np.stack([row_of(capture.id, site, p, HIDDEN) for p in range(rows_of(number))])
            assert positions.tolist() == list(range(rows_of(number)))
            assert rows.tobytes() == expected.tobytes()
    dataset.verify()
    return dataset


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_data_set_in_a_bucket_is_as_one_in_a_directory(server, tmp_path, compression):
    prefix = f"rows/a b+=ü,(1)/{compression}"
    url = server.url(prefix)
    consumer = writer(url, tmp_path / "staging", compression=compression)
    local = [give(consumer, number) for number in range(20)]
    assert {result.payload["stored"] for result in local} <= {"local", "bucket"}
    assert local[-1].payload["stored"] == "local"
    assert local[-1].payload["local"] == str(tmp_path / "staging")
    consumer.close()
    assert not list((tmp_path / "staging").glob("*.parquet"))
    dataset = assert_has(url, range(20))
    shards = server.names(prefix)
    assert len(shards) == (1 if compression == "zstd" else 3)
    assert {str(capture.path) for capture in dataset} == {f"s3://{prefix}/{name}" for name in shards}
    assert dataset.nbytes == sum(server.client().get_file_info(f"{prefix}/{name}").size for name in shards)
    batches = list(dataset.batches("post_block:1", 64))
    assert sum(len(batch.positions) for batch in batches) == sum(map(rows_of, range(20)))
    # Another hub, on another machine, knows what the bucket has.
    other = writer(url, tmp_path / "other", compression=compression)
    again = give(other, 3)
    assert again.payload["stored"] == "bucket"
    assert again.payload["path"].rpartition("/")[2] in shards
    refused = give(other, 4, seq=1000)
    assert refused.status == "error"
    assert "has a capture of r4 already" in refused.error
    assert give(other, 20).status == "ok"
    other.close()
    assert_has(url, range(21))
    numbers = [int(name[6:12]) for name in server.names(prefix)]
    assert numbers == list(range(1, len(shards) + 2))


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("quantization", ["int8", "float8_e4m3"])
def test_rounded_rows_in_a_bucket_are_those_in_a_directory(server, tmp_path, quantization, compression):
    url, options = server.url(f"rows/{quantization}-{compression}"), {"compression": compression}
    consumer = writer(url, tmp_path / "staging", quantization=quantization, **options)
    beside = opened(tmp_path / "rows", SITES, layout="sharded", quantization=quantization)
    for number in range(4):
        assert give(consumer, number).status == give(beside, number).status == "ok"
    consumer.close()
    beside.close()
    bucket, directory = capflow.open(url), capflow.open(tmp_path / "rows")
    bucket.verify()
    for number, site in itertools.product(range(4), SITES):
        ours, theirs = bucket[f"r{number}"], directory[f"r{number}"]
        assert ours.quantization_of(site) == quantization
        assert ours[site].rows.dtype == np.float32
        assert np.array_equal(ours[site].rows, theirs[site].rows)


def test_other_programs_read_a_bucket(server, tmp_path):
    url = server.url("rows/read")
    consumer = writer(url, tmp_path / "staging")
    for number in range(12):
        give(consumer, number)
    consumer.close()
    client = server.client(READER)
    database = duckdb.connect()
    database.register("rows", pads.dataset("rows/read", filesystem=client, format="parquet"))
    sql = "select count(*), count(distinct request), max(len(vector)) from rows where layer = 1 and hook = 'mlp_in'"
    assert database.sql(sql).fetchall() == [(sum(map(rows_of, range(12))), 12, HIDDEN)]
    run = CliRunner()
    shown = json.loads(run.invoke(cli, ["inspect", "--json", url], catch_exceptions=False).stdout)
    assert (shown["captures"], shown["rows"], shown["damaged"]) == (12, 3 * sum(map(rows_of, range(12))), [])
    exported = run.invoke(cli, ["export", url, str(tmp_path / "out"), "--to", "safetensors"])
    assert exported.exit_code == 0, exported.output
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 12
    target = f"filesystem:layout=sharded,hooks=post_block+mlp_in,root={server.url('rows/copied')}"
    copied = run.invoke(cli, ["replay", url, "--consumer", target])
    assert copied.exit_code == 0, copied.output
    assert_has(server.url("rows/copied"), range(12))
    with client.open_input_stream(f"rows/read/{server.names('rows/read')[0]}") as stream:
        data = bytearray(stream.read())
    data[len(data) // 3] ^= 1
    with server.client().open_output_stream("rows/hurt/shard~000001-00.parquet") as stream:
        stream.write(data)
    assert run.invoke(cli, ["inspect", server.url("rows/hurt")]).exit_code == 1


@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}], ids=["none", "zstd"])
def test_rows_of_several_widths_are_read_from_a_bucket(server, tmp_path, monkeypatch, options):
    """Some batches lie in place, others are gathered."""
    monkeypatch.setattr(shardfile, "IN_PLACE_BYTES_MIN", 200)
    url = server.url(f"rows/shaped-{len(options)}")
    lengths = {"a": 12, "b": 5}
    shaped.store(url, lengths, layout="sharded", staging=str(tmp_path / "staging"), **options)
    dataset = capflow.open(url)
    for name, length in lengths.items():
        for site in shaped.SITES:
            shaped.assert_site(dataset[name], name, site, length)
    dataset.verify()
    run = CliRunner()
    survey = json.loads(run.invoke(cli, ["inspect", "--json", url], catch_exceptions=False).stdout)
    assert {site["site"]: site["shapes"][0] for site in survey["sites"]} == {
        str(site): list(shaped.SHAPES.get(site, (shaped.HIDDEN,))) for site in shaped.SITES
    }
    rows = pads.dataset(url.removeprefix("s3://").split("?")[0], filesystem=server.client(READER)).to_table()
    assert set(map(len, rows["vector"].to_pylist())) == set(map(shaped.width_of, shaped.SITES))


def command_of(url, staging, call):
    options = {"layout": "sharded", "shard_bytes": SHARD_BYTES, "staging": str(staging)}
    return [sys.executable, PROCESSES / "files.py", url, str(call), json.dumps(options)]


def live(url, staging, call):
    """Run a writer until its end or its death; return whether it died."""
    run = subprocess.run(command_of(url, staging, call), capture_output=True, text=True, check=False)
    assert run.returncode in {0, -signal.SIGKILL}, run.stderr
    return run.returncode != 0


def killed_at(server, staging, call):
    """Kill a writer at a call to its disk, let the next one end, and check the bucket; return whether it died."""
    prefix = f"rows/killed-{str(call).replace(':', '-')}"
    died = live(server.url(prefix), staging, call)
    assert not live(server.url(prefix), staging, 0)
    assert not list(staging.glob(SHARD_PATTERN))
    assert not list(staging.glob(".partial-*"))
    assert_has(server.url(prefix), range(REQUESTS))
    client = server.client()
    shards = [pq.read_metadata(client.open_input_file(f"{prefix}/{name}")) for name in server.names(prefix)]
    assert sum(shard.num_rows for shard in shards) == sum(len(SITES) * rows_of(number) for number in range(REQUESTS))
    return died


@pytest.mark.parametrize("call", ["rename:1", "unlink:1"], ids=["sealed", "uploaded"])
def test_a_writer_killed_around_an_upload_loses_and_repeats_nothing(server, tmp_path, call):
    """Before a sealed shard has its name, and before an uploaded one is removed."""
    assert killed_at(server, tmp_path / "staging", call)


def test_a_writer_killed_in_the_middle_of_an_upload_loses_and_repeats_nothing(server, tmp_path):
    with Refusing(server.port, b"shard~") as proxy:
        url = f"s3://rows/middle?endpoint={proxy.endpoint}"
        proxy.full_later.set()
        with subprocess.Popen(command_of(url, tmp_path, 0), stdout=subprocess.DEVNULL) as killed:
            # The upload is begun, and its first part does not get through.
            assert proxy.refused.wait(60)
            killed.kill()
        assert server.names("rows/middle") == []
        assert list(tmp_path.glob(SHARD_PATTERN))
        proxy.full_later.clear()
        assert not live(url, tmp_path, 0)
    assert not list(tmp_path.glob(SHARD_PATTERN))
    assert_has(server.url("rows/middle"), range(REQUESTS))


@pytest.mark.long
def test_a_writer_killed_at_every_third_call_loses_and_repeats_nothing(server, tmp_path):
    call = 1
    while killed_at(server, tmp_path / str(call), call):
        call += 3
    assert call > 40


def test_a_store_that_goes_away_or_is_full_costs_nothing(server, tmp_path):
    prefix = "rows/full"
    with Refusing(server.port) as proxy:
        url = f"s3://{prefix}?endpoint={proxy.endpoint}"
        config = FilesystemConfig(
            root=url,
            hooks=sorted({site.hook for site in SITES}),
            layout="sharded",
            fsync=False,
            shard_bytes=SHARD_BYTES,
            staging=str(tmp_path),
            staging_bytes_max=SHARD_BYTES,
        )
        consumer = FilesystemConsumer(config)
        consumer.check()
        consumer.open(Counts())
        consumer.on_session("engine-1", msgspec.structs.replace(make_model(), sites=SITES))
        proxy.full_later.set()
        results = []
        refusals = set()

        def is_full():
            try:
                results.append(give(consumer, len(results)))
            except RetryError as e:
                refusals.add(re.sub(r"\d+", "N", str(e)))
            return any("QuotaExceeded" in refusal for refusal in refusals)

        eventually(is_full)
        assert any(
            "N shards of N bytes that wait to be uploaded, expected at most N; rows wait; the last upload" in refusal
            for refusal in refusals
        )
        backlog = consumer.backlog()
        assert backlog.items
        assert backlog.nbytes > SHARD_BYTES
        assert backlog.trouble == "uploads fail and are tried again: QuotaExceeded"
        assert server.names(prefix) == []
        proxy.full.set()
        proxy.full_later.clear()
        proxy.full.clear()
        count = len(results)
        eventually(lambda: all(result.done() for result in results))
        assert {result.result().status for result in results} == {"ok"}
        eventually(lambda: consumer.backlog() == (0, 0, ""))
        results.append(give(consumer, count))
        consumer.close()
    assert_has(server.url(prefix), range(count + 1))


def test_shards_that_cannot_be_uploaded_at_the_end_are_named_and_kept(server, tmp_path):
    with Refusing(server.port) as proxy:
        url = f"s3://rows/left?endpoint={proxy.endpoint}"
        consumer = writer(url, tmp_path)
        for number in range(6):
            give(consumer, number)
        proxy.full.set()
        expected = rf"got 1 shards of \d+ bytes that are not uploaded; they are kept in {tmp_path}, and the next hub"
        with pytest.raises(capflow.CapflowError, match=expected):
            consumer.close()
        assert len(list(tmp_path.glob(SHARD_PATTERN))) == 1
        proxy.full.clear()
        writer(url, tmp_path).close()
    assert_has(server.url("rows/left"), range(6))


@pytest.mark.parametrize(
    ("environment", "url", "expected"),
    [
        (keys(READER), "rows/a", "ACCESS_DENIED"),
        (keys("nobody"), "rows/a", "INVALID_ACCESS_KEY_ID"),
        (keys() | {"AWS_SECRET_ACCESS_KEY": "another-secret"}, "rows/a", "SIGNATURE_DOES_NOT_MATCH"),
        (keys(), "absent/a", "NO_SUCH_BUCKET"),
        (keys(), "s3://rows/a?endpoint=http://127.0.0.1:9", "NETWORK_CONNECTION"),
    ],
    ids=["rights", "key", "secret", "bucket", "endpoint"],
)
def test_a_store_that_takes_nothing_is_refused_by_name(server, tmp_path, monkeypatch, environment, url, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=rf"^consumers.filesystem.root: s3://\w+/a.*: got {expected} from") as refused:
        writer(url if "://" in url else server.url(url), tmp_path)
    assert environment["AWS_SECRET_ACCESS_KEY"] not in str(refused.value)
    assert not list(Path(tmp_path).glob("*.parquet"))


@pytest.mark.long
def test_a_server_that_is_killed_and_comes_back_costs_nothing(tmp_path):
    server = S3d(tmp_path)
    server.start("rows")
    try:
        url = server.url("rows/outage")
        consumer = writer(url, tmp_path / "staging")
        number = 0
        for _ in range(5):
            for _ in range(40):
                assert give(consumer, number).status == "ok"
                number += 1
            server.kill()
            for _ in range(40):
                assert give(consumer, number).status == "ok"
                number += 1
            eventually(lambda: consumer.backlog().trouble)
            server.start()
        consumer.close()
        assert_has(url, range(number))
        assert sum(
            pq.read_metadata(server.client().open_input_file(f"rows/outage/{name}")).num_rows
            for name in server.names("rows/outage")
        ) == sum(len(SITES) * rows_of(each) for each in range(number))
    finally:
        server.kill()
