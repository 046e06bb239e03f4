"""The recipe for sharded data sets on many machines, by Daft alone and by Daft on Ray."""

import os
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from sources import ROOT

from capflow.probe import Probe
from capflow.site import Site

SCRIPT = ROOT / "examples" / "cluster.py"
HIDDEN, LAYERS, POSITIONS = 32, 4, 25
QUIET = {
    "DO_NOT_TRACK": "true",
    "DAFT_ANALYTICS_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "DAFT_PROGRESS_BAR": "0",
}
STORED = {"bfloat16": (ml_dtypes.bfloat16, np.uint16), "float32": (np.float32, np.float32)}


def write_shards(root, dtype, count=3):
    """Write shards, a row for each request, layer and position; return the rows as float32, by request and layer."""
    random = np.random.default_rng(0)
    rows = {}
    root.mkdir()
    for shard in range(count):
        keys = [(f"r{shard}-{request}", layer) for request in range(4) for layer in range(LAYERS)]
        values = random.standard_normal((len(keys), POSITIONS, HIDDEN)).astype(STORED[dtype][0])
        rows |= dict(zip(keys, values.astype(np.float32), strict=True))
        numbers = pa.array(values.view(STORED[dtype][1]).reshape(-1))
        whole = len(keys) * POSITIONS
        table = pa.table(
            {
                "request": np.repeat([request for request, _ in keys], POSITIONS),
                "model": ["tiny"] * whole,
                "phase": ["prefill"] * whole,
                "layer": np.repeat(np.array([layer for _, layer in keys], np.int32), POSITIONS),
                "hook": ["post_block"] * whole,
                "position": np.tile(np.arange(POSITIONS, dtype=np.int32), len(keys)),
                "token_id": np.arange(whole, dtype=np.int32),
                "vector": pa.FixedSizeListArray.from_arrays(numbers, HIDDEN),
            }
        )
        pyarrow.parquet.write_table(table, root / f"shard~{shard:06}-abc.parquet", row_group_size=50)
    return rows


@pytest.fixture
def probe(tmp_path):
    probe = Probe.make(Site(2, "post_block"), np.random.default_rng(1).standard_normal((2, HIDDEN)), names=("a", "b"))
    probe.save(tmp_path / "mood.safetensors")
    return probe


def said(*arguments, timeout=120):
    """Return the rows of the tables that the script prints."""
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    environment = os.environ | QUIET
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
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
        found = [row for row in tables if row[0] == name]
        expected = [(request, position) for _, request, position in scores[:count]]
        assert [(row[1], int(row[2])) for row in found] == expected
        assert [float(row[4]) for row in found] == pytest.approx([score for score, *_ in scores[:count]], rel=1e-4)


@pytest.mark.parametrize("dtype", STORED)
def test_norms_and_top_positions_are_what_numpy_computes(tmp_path, probe, dtype):
    rows = write_shards(tmp_path / "rows", dtype)
    page = (ROOT / "docs" / "cluster.md").read_text()
    command = re.search(r"^\$ python examples/cluster.py (.*)$", page, re.MULTILINE)[1].split()
    command[command.index("/mnt/nas/rows")] = tmp_path / "rows"
    command[command.index("examples/code.safetensors")] = tmp_path / "mood.safetensors"
    check(said(*command, "--top", 5), rows, probe, 5)


@pytest.mark.long
def test_ray_says_the_same(tmp_path, probe):
    rows = write_shards(tmp_path / "rows", "bfloat16")
    arguments = (tmp_path / "rows", "--probe", tmp_path / "mood.safetensors", "--top", 5, "--ray", "local")
    check(said(*arguments, timeout=500), rows, probe, 5)
