"""What the duckdb consumer makes of probes of every kind and pool, and of the rows themselves."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from capflow.errors import UsageError
from capflow.probes.kinds import load_probe
from capflow.probes.probe import POOLS, Probe, as_float32
from capflow_consumers.duckdb import scoring as rowstage
from tests.kit.databases import SITES, done, opened, probe_file, query
from tests.kit.frames import make_frame, row_of

SITE = SITES[1]


@pytest.fixture(autouse=True)
def small_stages(monkeypatch):
    """Have rows scored in several products."""
    monkeypatch.setattr(rowstage, "_STAGE_BYTES", 5 * 8 * 4)


def pooled_files(directory):
    """Write a probe file for each pool, `token` to `last`, with two probes each."""
    probes = {}
    for number, pool in enumerate(POOLS):
        rng = np.random.default_rng(number)
        probes[pool] = Probe.make(SITE, rng.normal(size=(2, 8)), names=(f"{pool}.a", f"{pool}.b"), pool=pool)
        probes[pool].save(directory / f"{pool}.safetensors")
    return probes


def scores_of(probe, request, length, dtype="float32"):
    return probe.scores(np.stack([row_of(request, SITE, p, dtype=dtype) for p in range(length)])).astype(np.float64)


def pooled(pool, scores):
    return {"mean": scores.mean(axis=0), "max": scores.max(axis=0), "last": scores[-1], "token": None}[pool]


@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_a_request_has_one_score_of_each_pooled_probe_however_its_rows_came(data, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("data")
    probes = pooled_files(tmp_path)
    consumer = opened(tmp_path, *POOLS, batch_rows=data.draw(st.sampled_from([1, 20, 50_000])))
    lengths = {f"r{n}": data.draw(st.integers(1, 12)) for n in range(data.draw(st.integers(1, 3)))}
    at = dict.fromkeys(lengths, 0)
    for seq in itertools.count(1):
        left = [name for name in lengths if at[name] < lengths[name]]
        if not left:
            break
        chosen = data.draw(st.lists(st.sampled_from(left), unique=True, min_size=1))
        counts = {name: data.draw(st.integers(1, lengths[name] - at[name])) for name in chosen}
        consumer.on_frame(make_frame([(n, 2, at[n], counts[n]) for n in chosen], SITES[:2], seq=seq, dtype="bfloat16"))
        for name in chosen:
            at[name] += counts[name]
    for name, length in lengths.items():
        result = consumer.on_request_done(done(name, 2, length, rows=2 * length))
        assert (result.status, result.payload["scores"]) == ("ok", 8 * length)
    consumer.close()
    stored = query(tmp_path, "SELECT request_id, probe, rows, mean, highest, last, score, pool FROM request_scores")
    assert len(stored) == 8 * len(lengths)
    for request, name, rows, mean, highest, last, score, pool in stored:
        scores = scores_of(probes[pool], request, lengths[request], "bfloat16")[:, probes[pool].names.index(name), None]
        assert rows == lengths[request]
        expected = [pooled(p, scores)[0] for p in ("mean", "max", "last")]
        assert (mean, highest, last) == pytest.approx(expected, rel=1e-4, abs=1e-4)
        assert score == (None if pool == "token" else pytest.approx(pooled(pool, scores)[0], rel=1e-4, abs=1e-4))
    assert query(tmp_path, "SELECT count(*), count(DISTINCT probe) FROM scores") == [(2 * sum(lengths.values()), 2)]


def test_pooled_scores_and_vectors_have_every_row_once_after_a_kill(tmp_path):
    probes = pooled_files(tmp_path)
    steps = [make_frame([("r1", 4, step * 4, 4)], SITES[:2], seq=step + 1) for step in range(4)]
    killed = opened(tmp_path, *POOLS, vectors=True, batch_rows=1)
    killed.on_frame(steps[0])
    killed.on_frame(steps[1])
    killed._port.close()
    killed._database.close()
    consumer = opened(tmp_path, *POOLS, vectors=True)
    for step in steps:
        consumer.on_frame(step)
    assert consumer.on_request_done(done("r1", 4, 16, rows=32)).status == "ok"
    consumer.close()
    for pool in ("mean", "max", "last"):
        expected = pooled(pool, scores_of(probes[pool], "r1", 16))
        (stored,) = query(tmp_path, f"SELECT list(score ORDER BY probe) FROM request_scores WHERE pool = '{pool}'")
        np.testing.assert_allclose(stored[0], expected, rtol=1e-4)
    vectors = query(tmp_path, "SELECT position, layer, hook, vector FROM vectors ORDER BY position")
    assert [row[:3] for row in vectors] == [(p, 1, "post_block") for p in range(16)]
    np.testing.assert_array_equal([row[3] for row in vectors], [row_of("r1", SITE, p) for p in range(16)])


def test_vectors_are_kept_exactly_and_only_when_asked_for(tmp_path):
    for vectors in (False, True):
        consumer = opened(tmp_path, site=str(SITES[0]), vectors=vectors)
        consumer.on_frame(make_frame([("r1", 4, 0, 7)], SITES, dtype="bfloat16", boot=f"b{vectors}"))
        consumer.on_request_done(done(computed_length=7, rows=21))
        consumer.close()
        stored = query(tmp_path, "SELECT layer, hook, vector FROM vectors ORDER BY position")
        assert len(stored) == 7 * vectors
    expected = [row_of("r1", SITES[0], p, dtype="bfloat16").astype(np.float32) for p in range(7)]
    assert {row[:2] for row in stored} == {(0, "post_block")}
    np.testing.assert_array_equal([row[2] for row in stored], expected)


def test_networks_and_features_are_scored_beside_linear_probes(tmp_path):
    rng = np.random.default_rng(0)
    probe_file(tmp_path, "plain")
    net = {"weight.0": rng.normal(size=(3, 8)), "weight.1": rng.normal(size=(1, 3))}
    save_file(net, tmp_path / "net.safetensors", {"site": str(SITE), "kind": "mlp", "activation": "tanh"})
    sae = {"W_enc": rng.normal(size=(8, 20)), "b_enc": rng.normal(size=20)}
    metadata = {"site": str(SITE), "kind": "sae", "activation": "topk", "k": "4", "features": "3,11", "pool": "max"}
    save_file(sae, tmp_path / "sae.safetensors", metadata)
    consumer = opened(tmp_path, "plain", "net", "sae")
    consumer.on_frame(make_frame([("r1", 4, 0, 9)], SITES))
    result = consumer.on_request_done(done(computed_length=9, rows=27))
    assert (result.status, result.payload["scores"]) == ("ok", 9 * 5)
    consumer.close()
    for name in ("plain", "net"):
        expected = scores_of(load_probe(tmp_path / f"{name}.safetensors"), "r1", 9)
        stored = query(tmp_path, f"SELECT score FROM scores WHERE probe LIKE '{name}%' ORDER BY position, probe")
        np.testing.assert_allclose(np.ravel(stored), expected.ravel(), rtol=1e-4, atol=1e-4)
    expected = scores_of(load_probe(tmp_path / "sae.safetensors"), "r1", 9).max(axis=0)
    stored = query(
        tmp_path, "SELECT score FROM request_scores WHERE probe IN ('sae.3', 'sae.11') ORDER BY probe = 'sae.11'"
    )
    np.testing.assert_allclose(np.ravel(stored), expected, rtol=1e-4, atol=1e-4)
    kinds = query(tmp_path, "SELECT kind, pool, count(*) FROM probes GROUP BY ALL ORDER BY ALL")
    assert kinds == [("linear", "token", 2), ("mlp", "token", 1), ("sae", "max", 2)]


def test_a_known_probe_with_another_pool_is_refused(tmp_path):
    probe = probe_file(tmp_path, "p")
    opened(tmp_path, "p").close()
    Probe.make(probe.site, probe.weight, probe.bias, names=probe.names, pool="mean").save(tmp_path / "p.safetensors")
    with pytest.raises(UsageError, match=r"scores of another probe p\.a: got .* pool mean, expected .* pool token"):
        opened(tmp_path, "p")


def test_the_views_answer_the_common_questions(tmp_path):
    probe = probe_file(tmp_path, "p")
    consumer = opened(tmp_path, "p")
    lengths = {"r1": 80, "r2": 40}
    for seq, (name, length) in enumerate({**lengths, "running": 30}.items(), 1):
        consumer.on_frame(make_frame([(name, 30, 0, length)], SITES, texts=True, seq=seq))
    for name, length in lengths.items():
        consumer.on_request_done(done(name, 30, length, rows=3 * length))
    consumer.close()
    scores = {name: scores_of(probe, name, length) for name, length in lengths.items()}
    ranked = sorted(((-s[p, 0], n, p) for n, s in scores.items() for p in range(len(s))))[:100]
    top = query(tmp_path, "SELECT request_id, position FROM top_tokens WHERE probe = 'p.a' ORDER BY rank")
    values = [scores[name][position, 0] for name, position in top]
    assert len(top) == len(set(top)) == 100
    np.testing.assert_allclose(values, [-score for score, _, _ in ranked], rtol=1e-5, atol=1e-5)
    layers = query(tmp_path, "SELECT layer, hook, probe, phase, tokens, mean, deviation, highest FROM layer_scores")
    for (layer, hook, name, phase, tokens, *figures), (index, start, stop) in zip(
        layers, [(0, 30, 90), (0, 0, 30), (1, 30, 90), (1, 0, 30)], strict=True
    ):
        part = np.concatenate([s[start:stop, index] for s in scores.values()])
        assert (layer, hook, name, phase) == (1, "post_block", probe.names[index], "generated" if start else "prompt")
        assert tokens == len(part)
        np.testing.assert_allclose(figures, [part.mean(), part.std(), part.max()], rtol=1e-4, atol=1e-4)
    means = query(tmp_path, "SELECT request_id, mean FROM request_scores WHERE probe = 'p.b' ORDER BY 1")
    assert means == [(name, pytest.approx(s[:, 1].mean(), rel=1e-4)) for name, s in scores.items()]


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_rows_become_float32_exactly(dtype):
    every = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
    rows = every[np.isfinite(every) & (np.abs(every) < 6e4)].astype(dtype).reshape(1, -1)[:, ::3]
    assert rows.size > 10_000
    got = as_float32(np.ascontiguousarray(rows))
    assert got.tobytes() == rows.astype(np.float32).tobytes()
