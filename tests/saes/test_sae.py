"""What autoencoders and transcoders compute, in the files of three tools."""

import ml_dtypes
import numpy as np
import pytest

import capflow
from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.saes import sae as module
from capflow.saes.named import load_saes
from tests.kit.autoencoders import COUNT, WIDTH, decoded, encoded, gemma_scope, saelens, sparsify, weights

ROWS = np.random.default_rng(7).normal(size=(33, WIDTH)).astype(np.float32)
MLP = {"hook": "blocks.1.hook_resid_mid", "hook_out": "blocks.1.hook_mlp_out"}
GAINED = "mlp_in:1/mlp_out:1"


def made(kind, root):
    """Return a loaded one of a kind, its tensors, and how it encodes."""
    if kind == "gemma_scope":
        tensors = weights(jumps=True)
        path = root / "models--google--gemma-scope-2b-pt-res/snapshots/1/layer_1/width_16k/average_l0_82"
        return capflow.load_sae(gemma_scope(path, tensors)), tensors, {"centred": False}
    if kind == "gemma_scope transcoder":
        tensors = weights(jumps=True)
        path = root / "gemma-scope-2b-pt-transcoders/layer_1/width_16k/average_l0_9"
        return capflow.load_sae(gemma_scope(path, tensors) / "params.npz", GAINED), tensors, {"centred": False}
    if kind.startswith("sparsify"):
        transcode, name = "transcoder" in kind, "layers.1.mlp" if "transcoder" in kind else "layers.1"
        tensors = weights()
        return (
            capflow.load_sae(sparsify(root / name, tensors, transcode=transcode)),
            tensors,
            {"centred": not transcode, "k": 4},
        )
    tensors = weights(jumps="jumprelu" in kind)
    transcode = "transcoder" in kind
    config = (MLP if transcode else {}) | ({"k": 5} if kind == "topk" else {})
    if kind == "skip_transcoder":
        tensors["W_skip"] = np.random.default_rng(1).normal(size=(WIDTH, WIDTH)).astype(np.float32)
    loaded = capflow.load_sae(saelens(root / "sae", tensors, kind, **config))
    return loaded, tensors, {"centred": not transcode, "k": 5 if kind == "topk" else 0}


KINDS = (
    "standard", "jumprelu", "topk", "transcoder", "jumprelu_transcoder", "skip_transcoder", "sparsify",
    "sparsify transcoder", "gemma_scope", "gemma_scope transcoder",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_it_encodes_and_decodes(tmp_path, kind, monkeypatch):
    sae, tensors, how = made(kind, tmp_path)
    transcodes = "transcoder" in kind
    source = Site(1, "post_attn" if sae.where.endswith("sae") else "mlp_in")
    sites = (source, Site(1, "mlp_out")) if transcodes else (Site(1, "post_block"),) * 2
    assert (sae.site, sae.target, sae.transcodes) == (*sites, transcodes)
    assert (sae.features, sae.width) == (COUNT, WIDTH)
    expected = encoded(tensors, ROWS, **how)
    assert 0 < np.count_nonzero(expected) < expected.size
    np.testing.assert_allclose(sae.encode(ROWS), expected, rtol=1e-5, atol=1e-5)
    again = decoded(tensors, expected) + (ROWS.astype(np.float64) @ tensors["W_skip"].T if sae.skip is not None else 0)
    np.testing.assert_allclose(sae.reconstruct(ROWS), again, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 4 * COUNT * 5)
    np.testing.assert_allclose(sae.encode(ROWS), expected, rtol=1e-5, atol=1e-5)
    low = ROWS.astype(ml_dtypes.bfloat16)
    np.testing.assert_allclose(sae.encode(low), encoded(tensors, low.astype(np.float32), **how), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 7, 40])
def test_top_features_are_the_highest_activations(tmp_path, kind, k, monkeypatch):
    sae, tensors, how = made(kind, tmp_path)
    expected = encoded(tensors, ROWS, **how)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 4 * COUNT * 7)
    ids, activations = sae.top(ROWS, k)
    assert (ids.shape, ids.dtype, activations.dtype) == ((33, k), np.int32, np.float32)
    for row, mine, values in zip(expected, ids, activations, strict=True):
        best = [i for i in np.argsort(-row, kind="stable") if row[i] > 0][:k]
        assert mine.tolist() == best + [-1] * (k - len(best))
        np.testing.assert_allclose(values[: len(best)], row[best], rtol=1e-5, atol=1e-5)
        assert not values[len(best) :].any()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "topk" and "sparsify" not in kind])
def test_a_feature_has_what_its_activation_is_computed_from(tmp_path, kind):
    sae, tensors, how = made(kind, tmp_path)
    expected = encoded(tensors, ROWS, **how)
    for number in (0, 5, 23):
        encoder, bias, threshold, direction = sae.feature(number)
        values = ROWS.astype(np.float64) @ encoder + bias
        np.testing.assert_allclose(np.where(values > threshold, values, 0), expected[:, number], rtol=1e-5, atol=1e-5)
        assert direction.tobytes() == tensors["W_dec"][number].tobytes()


def test_activations_that_count_in_lengths_of_the_decoder(tmp_path):
    tensors = weights()
    config = {"architecture": "topk", "k": 4, "rescale_acts_by_decoder_norm": True}
    sae = capflow.load_sae(saelens(tmp_path / "sae", tensors, **config))
    norms = np.linalg.norm(tensors["W_dec"].astype(np.float64), axis=1)
    expected = encoded(tensors | {"W_enc": tensors["W_enc"] * norms, "b_enc": tensors["b_enc"] * norms}, ROWS, k=4)
    np.testing.assert_allclose(sae.encode(ROWS), expected, rtol=1e-4, atol=1e-4)
    again = (expected / norms) @ tensors["W_dec"].astype(np.float64) + tensors["b_dec"]
    np.testing.assert_allclose(sae.reconstruct(ROWS), again, rtol=1e-4, atol=1e-4)


def test_a_transcoder_subtracts_nothing_whatever_its_settings_leave_out(tmp_path):
    tensors = weights()
    sae = capflow.load_sae(saelens(tmp_path / "sae", tensors, "transcoder", **MLP, apply_b_dec_to_input=True))
    np.testing.assert_allclose(sae.encode(ROWS), encoded(tensors, ROWS, centred=False), rtol=1e-5, atol=1e-5)


def test_the_user_names_the_site(tmp_path):
    path = gemma_scope(tmp_path / "mine", weights(jumps=True))
    assert capflow.load_sae(f"{path}@post_block:7").site == Site(7, "post_block")
    assert capflow.load_sae(path, "mlp_in:7/mlp_out:8").target == Site(8, "mlp_out")
    transcoder = saelens(tmp_path / "a@b", weights(), "transcoder", **MLP)
    assert capflow.load_sae(transcoder).target == Site(1, "mlp_out")
    assert capflow.load_sae(f"{transcoder}@mlp_in:3").target == Site(3, "mlp_out")


def test_it_fits_a_model(tmp_path):
    sae = capflow.load_sae(f"{saelens(tmp_path / 'sae', weights())}@post_block:5")
    sites = (Site(5, "post_block"),)

    def refused(message, sites=sites, layers=8, width=WIDTH):
        with pytest.raises(UsageError) as caught:
            sae.check_reads(ModelInfo("m", layers, width, "float32", sites))
        assert message in str(caught.value)

    sae.check_reads(ModelInfo("m", 8, WIDTH, "float32", sites))
    sae.check_writes(ModelInfo("m", 8, WIDTH, "float32", sites))
    transcoder = capflow.load_sae(f"{saelens(tmp_path / 'trans', weights(), 'transcoder', **MLP)}@mlp_in:5/mlp_out:5")
    transcoder.check_reads(ModelInfo("m", 8, WIDTH, "float32", (Site(5, "mlp_in"),)))
    with pytest.raises(UsageError, match="no tap at mlp_out:5"):
        transcoder.check_writes(ModelInfo("m", 8, WIDTH, "float32", (Site(5, "mlp_in"),)))
    refused("encoder: got 16 numbers a row, expected 32, the model's width", width=32)
    refused("site: got post_block:5, expected a layer of the model, 0..3", layers=4)
    refused("no tap at post_block:5, expected a tapped site; start the engine with --sites post_block:5", sites=())
    for call in (sae.encode, sae.top):
        with pytest.raises(UsageError, match=r"rows: got shape \[3, 8\], expected \[n, 16\]"):
            call(np.ones((3, 8), np.float32))
    for k in (0, -1, 1025, True, 2.0):
        with pytest.raises(UsageError, match=r"k: got .*, expected 1..1024 features of each token"):
            sae.top(ROWS, k)
    for number in (-1, 24):
        with pytest.raises(UsageError, match=f"feature: got {number}, expected a feature of .*sae, 0..23"):
            sae.feature(number)


def test_no_rows_have_no_features(tmp_path):
    sae = capflow.load_sae(saelens(tmp_path / "sae", weights()))
    none = np.empty((0, WIDTH), np.float32)
    assert sae.encode(none).shape == (0, COUNT)
    assert sae.top(none, 3)[0].shape == (0, 3)


def test_a_site_beside_the_stream_is_refused_by_name(tmp_path):
    path = saelens(tmp_path / "sae", weights())
    with pytest.raises(UsageError, match=r"site: got heads:3, expected a site of the residual stream$"):
        load_saes(f"{path}@heads:3", "--sae")
    sae = capflow.load_sae(f"{path}@heads:3")
    with pytest.raises(UsageError, match=r"site: got heads:3, expected a site of the residual stream$"):
        sae.check_reads(ModelInfo("m", 8, WIDTH, "float32", (Site(3, "heads"),)))
