"""The duckdb consumer with autoencoders: the most active features of each token, and no rows."""

import re

import numpy as np
import pytest

import capflow
from capflow.errors import UsageError
from capflow_consumers.duckdb.consumer import DuckdbConfig, DuckdbConsumer
from tests.kit.autoencoders import encoded, saelens, weights
from tests.kit.checked import checked
from tests.kit.databases import SITES, Clock, Counts, done, opened, probe_file, query
from tests.kit.frames import make_frame, make_model, row_of
from tests.kit.sources import ROOT


def written(root, name, hook="blocks.1.hook_resid_post", seed=0, width=8):
    return saelens(root / name, weights(width=width, count=24, seed=seed), hook=hook)


def expected_of(tensors, request, positions, site, k):
    """Return the lines of `features`: position, feature, activation."""
    rows = np.stack([row_of(request, site, position) for position in positions])
    lines = []
    for position, values in zip(positions, encoded(tensors, rows), strict=True):
        best = [n for n in np.argsort(-values, kind="stable") if values[n] > 0][:k]
        lines += [(position, int(n), values[n]) for n in best]
    return lines


@pytest.mark.parametrize("batch_rows", [1, 50_000])
def test_every_token_has_its_most_active_features(tmp_path, batch_rows):
    probe_file(tmp_path, "happy")
    first, second = written(tmp_path, "first"), written(tmp_path, "second", "blocks.0.hook_resid_post", seed=5)
    saes = [str(first), f"other={second}"]
    consumer = opened(tmp_path, "happy", saes=saes, top_features=5, batch_rows=batch_rows)
    consumer.on_frame(make_frame([("r1", 4, 0, 4), ("r2", 3, 0, 3)], SITES, texts=True))
    consumer.on_frame(make_frame([("r1", 4, 4, 1)], SITES, texts=True, seq=2))
    assert consumer.on_request_done(done(computed_length=5, rows=15)).status == "ok"
    assert consumer.on_request_done(done("r2", 3, 3, rows=9)).status == "ok"
    consumer.close()
    for name, site, seed in (("first", SITES[1], 0), ("other", SITES[0], 5)):
        tensors = weights(width=8, count=24, seed=seed)
        for request, length in (("r1", 5), ("r2", 3)):
            where = f"sae = '{name}' AND request_id = '{request}'"
            lines = query(
                tmp_path,
                f"SELECT position, feature, activation, layer, hook FROM features WHERE {where} ORDER BY position, "
                "activation DESC",
            )
            expected = expected_of(tensors, request, range(length), site, 5)
            assert [line[:2] for line in lines] == [line[:2] for line in expected]
            np.testing.assert_allclose([line[2] for line in lines], [line[2] for line in expected], rtol=1e-4)
            assert {line[3:] for line in lines} == {(site.layer, site.hook)}
    (sql,) = re.findall(r"```sql\n(.*?)```", (ROOT / "docs" / "saes.md").read_text(), re.DOTALL)
    assert query(tmp_path, sql.replace("my-sae", "first"))
    assert query(tmp_path, "SELECT count(*) FROM scores") == [(16,)]
    assert query(tmp_path, "SELECT count(*) FROM vectors") == [(0,)]
    listed = query(tmp_path, "SELECT name, site_layer, site_hook, features, k FROM saes ORDER BY name")
    assert listed == [("first", 1, "post_block", 24, 0), ("other", 0, "post_block", 24, 0)]
    (total,), *_ = query(tmp_path, "SELECT sum(tokens) FROM active_features WHERE sae = 'first'")
    assert query(tmp_path, "SELECT count(*) FROM features WHERE sae = 'first'") == [(total,)]


def test_rows_and_features_of_one_site_stand_beside_each_other(tmp_path):
    consumer = opened(tmp_path, saes=[str(written(tmp_path, "first"))], vectors=True)
    consumer.on_frame(make_frame([("r1", 4, 0, 4)], SITES))
    consumer.on_request_done(done(rows=12))
    consumer.close()
    assert query(tmp_path, "SELECT count(*), min(layer) FROM vectors") == [(4, 1)]
    assert query(tmp_path, "SELECT count(DISTINCT position) FROM features") == [(4,)]


def tried(tmp_path, act, options):
    consumer = DuckdbConsumer(DuckdbConfig(str(tmp_path / "scores.duckdb"), **options), Clock())
    checked(consumer)
    act(consumer)


def refused(tmp_path, message, act=lambda consumer: consumer.spec(), **options):
    with pytest.raises(UsageError) as caught:
        tried(tmp_path, act, options)
    assert message in str(caught.value)


def test_what_autoencoders_are_refused(tmp_path):
    first = str(written(tmp_path, "first"))
    other = str(written(tmp_path / "deeper", "first", seed=9))
    wide = str(written(tmp_path, "wide", width=16))
    far = f"far={first}@post_block:99"
    refused(tmp_path, "consumers.duckdb.saes: got first twice, expected each name once; give", saes=[first, other])
    refused(tmp_path, "consumers.duckdb.saes: got =x, expected NAME=PATH, or PATH", saes=["=x"])
    refused(tmp_path, "nowhere: got no such directory", saes=[str(tmp_path / "nowhere")])
    refused(tmp_path, "consumers.duckdb.top_features: got 0, expected 1..1024 features of each", top_features=0)

    def joins(consumer):
        consumer.open(Counts())
        try:
            consumer.on_session("engine-1", make_model())
        finally:
            consumer.close()

    refused(tmp_path, "wide: encoder: got 16 numbers a row, expected 8, the model's width", joins, saes=[wide])
    refused(tmp_path, "first: site: got post_block:99, expected a layer of the model, 0..", joins, saes=[far])
    consumer = opened(tmp_path, saes=[f"first={first}"])
    consumer.close()
    refused(
        tmp_path, "the database has features of another autoencoder first: got post_block:1, 24", joins, saes=[other]
    )
    opened(tmp_path, saes=[first]).close()
    assert capflow.load_sae(first).digest != capflow.load_sae(other).digest
