"""`capflow features`: the file that it writes, and what it refuses."""

import numpy as np
import pytest
from pyarrow import parquet

import capflow
from tests.kit.autoencoders import encoded, saelens, weights
from tests.kit.captured import IDS, REQUESTS, SITES, STORED, run, write


@pytest.mark.parametrize("stored", STORED, ids=IDS)
def test_every_captured_token_has_its_most_active_features(tmp_path, stored, monkeypatch):
    monkeypatch.setattr("capflow_consumers.features.file._GROUP_ROWS", 100)
    root = write(tmp_path / "rows", **stored)
    tensors = weights(width=8)
    sae = saelens(tmp_path / "mood", tensors)
    given = ("--sae", f"{sae}@{SITES[1]}", "--sae", f"other={sae}@{SITES[2]}")
    done = run("features", root, *given, "--top", 5, "--out", tmp_path / "f.parquet")
    assert done.returncode == 0, done.stderr
    lines = parquet.read_table(tmp_path / "f.parquet").to_pylist()
    assert parquet.ParquetFile(tmp_path / "f.parquet").num_row_groups > 1
    assert done.stdout.startswith(f"{tmp_path / 'f.parquet'}: {len(lines)} features of 324 rows, ")
    for name, site in (("mood", SITES[1]), ("other", SITES[2])):
        for capture in capflow.open(root):
            rows = capture[site]
            expected = encoded(tensors, np.asarray(rows.rows).astype(np.float32))
            for index, (position, token) in enumerate(zip(rows.positions, rows.token_ids, strict=True)):
                place = (name, capture.id, position)
                mine = [line for line in lines if (line["sae"], line["request"], line["position"]) == place]
                best = [n for n in np.argsort(-expected[index], kind="stable") if expected[index][n] > 0][:5]
                assert [line["feature"] for line in mine] == best
                np.testing.assert_allclose([line["activation"] for line in mine], expected[index][best], rtol=1e-4)
                phase = "prompt" if position < REQUESTS[capture.id][0] else "generated"
                rest = {(line["token_id"], line["phase"], line["layer"], line["hook"]) for line in mine}
                assert rest <= {(token, phase, *site)}


def test_what_is_refused(tmp_path):
    root = write(tmp_path / "rows", {"a": (4, 9)})
    sae, wide = saelens(tmp_path / "sae", weights(width=8)), saelens(tmp_path / "wide", weights(width=16))

    def refused(message, *given, out=tmp_path / "f.parquet"):
        done = run("features", root, *given, "--out", out)
        assert done.returncode == 2
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert not (tmp_path / "f.parquet").exists()

    refused("rows: got none, expected rows at post_block:1; name the site with @SITE", "--sae", sae)
    refused("wide: got rows of width 8 in request a, expected 16, the encoder's", "--sae", f"{wide}@post_block:2")
    refused("--sae: got sae twice, expected each name once", "--sae", sae, "--sae", sae)
    refused("nowhere: got no such directory", "--sae", tmp_path / "nowhere")
    refused("--out: got ", "--sae", sae, out=tmp_path)
    refused("--out: got ", "--sae", sae, out=tmp_path / "none" / "f.parquet")
    refused("--top", "--sae", sae, "--top", 0)
