"""The recipe for sharded data sets on many machines, by Daft alone and by Daft on Ray."""

import os
import re
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from pyarrow import fs
from safetensors.numpy import save_file

from capflow.capture import dtypes
from capflow.capture.frame import Frame
from capflow.capture.result import RequestDone
from capflow.capture.site import Site
from capflow.probes.probe import Probe
from capflow_consumers.filesystem.consumer import FilesystemConfig, FilesystemConsumer
from tests.kit.frames import make_frame, make_model
from tests.kit.networks import network
from tests.kit.s3d import READER, keys, s3d
from tests.kit.sources import ROOT

SCRIPT = ROOT / "examples" / "cluster.py"
HIDDEN, LAYERS, POSITIONS = 32, 4, 25
QUIET = {
    "DO_NOT_TRACK": "true",
    "DAFT_ANALYTICS_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "DAFT_PROGRESS_BAR": "0",
}
DTYPES = ("bfloat16", "float32")


def write_shards(root, dtype, count=3):
    """Write shards of four requests with the filesystem consumer; return the rows as float32, by request and layer."""
    random = np.random.default_rng(0)
    sites = tuple(Site(layer, "post_block") for layer in range(LAYERS))
    rows = {}
    for shard in range(count):
        consumer = FilesystemConsumer(FilesystemConfig(str(root), layout="sharded", fsync=False))
        consumer.open(None)
        consumer.on_session("engine-1", make_model(LAYERS, HIDDEN))
        for number in range(4):
            request = f"r{shard}-{number}"
            span = (request, 7, 0, POSITIONS)
            header = make_frame([span], sites, hidden=HIDDEN, dtype=dtype, seq=4 * shard + number + 1).header
            values = random.standard_normal((LAYERS, POSITIONS, HIDDEN)).astype(dtypes.DTYPES[dtype])
            consumer.on_frame(Frame.seal(header, values.reshape(-1).view(np.uint8)))
            whole = LAYERS * POSITIONS
            consumer.on_request_done(RequestDone("engine-1", request, "stop", 7, POSITIONS, whole, whole, ()))
            rows |= {(request, layer): values[layer].astype(np.float32) for layer in range(LAYERS)}
        consumer.close()
    return rows


@pytest.fixture
def probe(tmp_path):
    probe = Probe.make(Site(2, "post_block"), np.random.default_rng(1).standard_normal((2, HIDDEN)), names=("a", "b"))
    probe.save(tmp_path / "mood.safetensors")
    return probe


def run(*arguments, timeout=120):
    """Run the script."""
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    environment = os.environ | QUIET
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


def said(*arguments, timeout=120):
    """Return the rows of the tables that the script prints."""
    done = run(*arguments, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in re.split("[│┆]", line)[1:-1]] for line in lines]


def check(tables, rows, probe, count):
    """Hold the two tables against what numpy computes."""
    norms = [row for row in tables if row[0] == "post_block"]
    assert [int(row[1]) for row in norms] == list(range(LAYERS))
    for _, layer, number, norm in norms:
        lengths = np.concatenate([np.linalg.norm(v, axis=1) for (_, at), v in rows.items() if at == int(layer)])
        assert int(number) == len(lengths)
        assert float(norm) == pytest.approx(lengths.mean(), rel=1e-5)
    for index, name in enumerate(probe.names):
        scores = sorted(
            (
                (float(score), request, position)
                for (request, layer), values in rows.items()
                if layer == probe.site.layer
                for position, score in enumerate(probe.scores(values)[:, index])
            ),
            reverse=True,
        )
        lines = [line for line in tables if line[0] == name]
        expected = [(request, position) for _, request, position in scores[:count]]
        assert [(line[1], int(line[2])) for line in lines] == expected
        assert [float(line[4]) for line in lines] == pytest.approx([score for score, *_ in scores[:count]], rel=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_top_positions_are_what_numpy_computes(tmp_path, probe, dtype):
    rows = write_shards(tmp_path / "rows", dtype)
    page = (ROOT / "docs" / "cluster.md").read_text()
    command = re.search(r"^\$ python examples/cluster.py (.*)$", page, re.MULTILINE)[1].split()
    command[command.index("/mnt/nas/rows")] = tmp_path / "rows"
    command[command.index("examples/code.safetensors")] = tmp_path / "mood.safetensors"
    check(said(*command, "--top", 5), rows, probe, 5)


def check_refused(done, message):
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("cluster.py: ")
    assert message in done.stderr


def test_probes_that_do_not_fit_are_refused(tmp_path):
    write_shards(tmp_path / "rows", "bfloat16", 1)
    path = tmp_path / "p.safetensors"
    Probe.make(Site(2, "post_block"), np.ones(8)).save(path)
    check_refused(
        run(tmp_path / "rows", "--probe", path), "weight: got 8 numbers, expected 32, the width of the rows\n"
    )
    save_file(network((HIDDEN, 5, 1)), path, {"site": "post_block:2", "kind": "mlp"})
    check_refused(run(tmp_path / "rows", "--probe", path), "metadata kind: got mlp, expected one of linear\n")


def test_a_root_without_shards_that_daft_reads_is_refused(tmp_path):
    check_refused(
        run(tmp_path), "got no *.parquet, expected a sharded data set; name the root of a data set of filesystem:lay"
    )
    write_shards(tmp_path / "half", "float16", 1)
    expected = "expected shards of bfloat16 or float32; Daft does not know float16: capture with dtype=float32, or"
    check_refused(run(tmp_path / "half"), expected)
    pyarrow.parquet.write_table(pa.table({"vector": [1, 2]}), tmp_path / "other.parquet")
    check_refused(run(tmp_path), "got vectors of Int64, expected shards of bfloat16 or float32\n")


def test_a_bucket_is_read_with_the_keys_of_the_environment(tmp_path, probe, monkeypatch):
    rows = write_shards(tmp_path / "rows", "bfloat16")
    options = ("--probe", tmp_path / "mood.safetensors", "--top", 5)
    for name, value in keys(READER).items():
        monkeypatch.setenv(name, value)
    with s3d(tmp_path, "rows") as server:
        fs.copy_files(
            str(tmp_path / "rows"),
            "rows/run",
            source_filesystem=fs.LocalFileSystem(),
            destination_filesystem=server.client(),
        )
        check(said(server.url("rows/run"), *options), rows, probe, 5)
        check_refused(run(f"{server.url('rows/run')}&zone=a"), "URL: got zone, expected endpoint or region\n")
        check_refused(run(server.url("rows/none")), "got no *.parquet, expected a sharded data set; name the root")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint)
        check(said("s3://rows/run", *options), rows, probe, 5)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
        check_refused(run("s3://rows/run"), "SignatureDoesNotMatch")


@pytest.mark.long
def test_ray_says_the_same(tmp_path, probe):
    rows = write_shards(tmp_path / "rows", "bfloat16")
    arguments = (tmp_path / "rows", "--probe", tmp_path / "mood.safetensors", "--top", 5, "--ray", "local")
    check(said(*arguments, timeout=500), rows, probe, 5)
