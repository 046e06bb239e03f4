"""What SAELens saved as a probe file; and SAELens itself, where it is installed, on what capflow exports."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from capflow.capture.site import HOOKS, Site
from capflow.errors import UsageError
from capflow.probes.kinds import load_probe
from capflow.probes.saelens import read_saelens
from tests.kit.captured import SITES, run, write
from tests.kit.exports import export, rows_at
from tests.kit.networks import ROWS, activations, encoder

HOOK = "blocks.12.hook_resid_post"


def saved(directory, tensors, **config):
    """Write a directory as SAELens does."""
    directory.mkdir()
    save_file(tensors, directory / "sae_weights.safetensors")
    whole = {"architecture": "standard", "d_in": 16, "metadata": {"hook_name": HOOK, "sae_lens_version": "6"}} | config
    (directory / "cfg.json").write_text(json.dumps(whole))
    return directory


def with_decoder(**others):
    return encoder(**others) | {"W_dec": np.random.default_rng(3).normal(size=(24, 16)).astype(np.float32)}


def test_every_hook_has_transformer_lens_name():
    names = {hook: Site(5, hook).transformer_lens_name for hook in HOOKS}
    assert names == {
        "pre_attn": "blocks.5.hook_resid_pre",
        "post_attn": "blocks.5.hook_resid_mid",
        "post_block": "blocks.5.hook_resid_post",
        "mlp_in": "blocks.5.ln2.hook_normalized",
        "mlp_out": "blocks.5.hook_mlp_out",
        "attn_in": "blocks.5.ln1.hook_normalized",
        "attn_out": "blocks.5.hook_attn_out",
        "final": "ln_final.hook_normalized",
        "heads": "blocks.5.attn.hook_z",
        "q": "blocks.5.attn.hook_rot_q",
        "k": "blocks.5.attn.hook_rot_k",
        "v": "blocks.5.attn.hook_v",
        "neurons": "blocks.5.mlp.hook_post",
        "router": "blocks.5.mlp.gate.hook_out",
    }
    for hook, name in names.items():
        assert Site.of_transformer_lens(name) == (None if hook == "final" else Site(5, hook))
    for other in ("", "blocks", "blocks.5", "blocks.x.hook_resid_pre", "blocks.5.attn.hook_q", "hook_embed"):
        assert Site.of_transformer_lens(other) is None


@pytest.mark.parametrize("features", [None, [5, 0, 23]])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(("architecture", "k"), [("standard", None), ("jumprelu", None), ("topk", 3)])
def test_a_score_is_the_feature_s_activation(tmp_path, architecture, k, centred, features):
    tensors = with_decoder()
    if architecture == "jumprelu":
        tensors["threshold"] = np.linspace(0, 3, 24).astype(np.float32)
    config = {"architecture": architecture, "apply_b_dec_to_input": centred} | ({"k": k} if k else {})
    saved(tmp_path / "sae", tensors, **config)
    numbers = () if features is None else ("--features", ",".join(map(str, features)))
    done = run("probe", "sae", tmp_path / "sae", "--out", tmp_path / "mood.safetensors", "--pool", "max", *numbers)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{len(features or range(24))} features at post_block:12: ")
    probe = load_probe(tmp_path / "mood.safetensors")
    wanted = list(range(24)) if features is None else features
    assert (probe.site, probe.pool) == (Site(12, "post_block"), "max")
    assert probe.names == tuple(f"mood.{number}" for number in wanted)
    activation = {"standard": "relu"}.get(architecture, architecture)
    computed = {name: value for name, value in tensors.items() if centred or name != "b_dec"}
    np.testing.assert_allclose(
        probe.scores(ROWS), activations(computed, activation, k)[:, wanted], rtol=1e-4, atol=1e-4
    )


def test_activations_that_count_in_lengths_of_the_decoder(tmp_path):
    tensors = with_decoder()
    saved(tmp_path / "sae", tensors, architecture="topk", k=4, rescale_acts_by_decoder_norm=True)
    assert run("probe", "sae", tmp_path / "sae", "--out", tmp_path / "p.safetensors").returncode == 0
    norms = np.linalg.norm(tensors["W_dec"].astype(np.float64), axis=1)
    longer = tensors | {"W_enc": tensors["W_enc"] * norms, "b_enc": tensors["b_enc"] * norms}
    scores = load_probe(tmp_path / "p.safetensors").scores(ROWS)
    np.testing.assert_allclose(scores, activations(longer, "topk", 4), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"architecture": "gated"}, {}, "cfg.json: architecture: got gated, expected one of standard, jumprelu, topk"),
        ({"architecture": 3}, {}, "cfg.json: got Expected `str`, got `int`"),
        ({"normalize_activations": "layer_norm"}, {}, "normalize_activations: got layer_norm, expected none; fold it"),
        ({"reshape_activations": "hook_z"}, {}, "reshape_activations: got hook_z, expected none"),
        ({"architecture": "topk"}, {}, "cfg.json: k: got nothing, expected how many features are active"),
        ({"architecture": "jumprelu"}, {}, "tensors: got W_dec, W_enc, b_dec, b_enc, expected W_enc, b_enc, threshold"),
        (
            {"metadata": {"hook_name": "blocks.3.attn.hook_q"}},
            {},
            "hook_name: got blocks.3.attn.hook_q, expected blocks.LAY",
        ),
        (
            {"metadata": {"hook_name": "blocks.3.ln2.hook_normalized"}},
            {},
            "rows lack the norm's gain, expected rows with the norm's gain, as captured; --site mlp_in:3 is right only",
        ),
        ({"metadata": {}}, {}, "hook_name: got nothing, expected blocks.LAYER.HOOK with HOOK one of hook_resid_pre"),
        (
            {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": 3}},
            {},
            "activation_fn_str: got topk, expected relu with standard",
        ),
        (
            {"activation_fn": "tanh-relu"},
            {},
            "activation_fn: got tanh-relu, expected relu with standard; load it with a",
        ),
        ({"metadata": {"hook_name": f"blocks.{'9' * 5000}.hook_mlp_out"}}, {}, "hook_name: got blocks.999"),
        ({}, {"features": [24]}, "features: got 24, expected some of 0..23"),
        ({}, {"features": []}, "features: got none, expected some of 0..23"),
    ],
)
def test_what_would_give_other_scores_is_refused(tmp_path, config, options, message):
    saved(tmp_path / "sae", with_decoder(), **config)
    with pytest.raises(UsageError) as caught:
        read_saelens(tmp_path / "sae", "p", **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"W_enc": np.ones(24, np.float32)}, {}, "W_enc: got shape [24], expected [d_in, d_sae]"),
        ({"b_enc": np.float32(1)}, {}, "b_enc: got shape [], expected [24]"),
        ({"b_enc": np.ones(20, np.float32)}, {}, "b_enc: got shape [20], expected [24]"),
        ({"b_dec": np.ones(3, np.float32)}, {}, "b_dec: got shape [3], expected [16]"),
        (
            {"threshold": np.ones(8, np.float32)},
            {"architecture": "jumprelu"},
            "threshold: got shape [8], expected [24]",
        ),
        (
            {"W_dec": np.ones(16, np.float32)},
            {"rescale_acts_by_decoder_norm": True},
            "W_dec: got shape [16], expected [24, 16]",
        ),
        ({"W_dec": np.ones((20, 16), np.float32)}, {"rescale_acts_by_decoder_norm": True}, "W_dec: got shape [20, 16]"),
    ],
)
def test_weights_that_do_not_fit_each_other_are_refused(tmp_path, tensors, config, message):
    saved(tmp_path / "sae", with_decoder() | {name: np.asarray(value) for name, value in tensors.items()}, **config)
    with pytest.raises(UsageError) as caught:
        read_saelens(tmp_path / "sae", "p")
    assert message in str(caught.value)


def test_a_threshold_below_zero_is_as_behind_a_relu(tmp_path):
    tensors = with_decoder(threshold=np.full(24, -5, np.float32))
    saved(tmp_path / "sae", tensors, architecture="jumprelu")
    assert run("probe", "sae", tmp_path / "sae", "--out", tmp_path / "p.safetensors").returncode == 0
    np.testing.assert_allclose(
        load_probe(tmp_path / "p.safetensors").scores(ROWS), activations(tensors, "relu"), rtol=1e-4, atol=1e-4
    )


def test_a_file_that_is_there_stays_when_the_next_would_be_none(tmp_path):
    there, out = saved(tmp_path / "sae", with_decoder()), tmp_path / "p.safetensors"
    wrong = saved(tmp_path / "wrong", with_decoder(), architecture="topk", k=25)
    assert run("probe", "sae", there, "--out", out, "--features", "3").returncode == 0
    before = out.read_bytes()
    for arguments, message in (
        ((there, "--out", out, "--features", "3,3"), f"{out}: names: got p.3,p.3, expected 2 different names"),
        ((wrong, "--out", out), f"{out}: metadata k: got 25, expected how many features are active at once, 1..24"),
    ):
        done = run("probe", "sae", *arguments)
        assert done.returncode == 2
        assert message in done.stderr
        assert out.read_bytes() == before
    assert run("probe", "sae", there, "--out", tmp_path / "a,b.safetensors", "--features", "3").returncode == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.safetensors", "sae", "wrong"]


def test_a_site_may_be_said_and_an_older_file_names_it_elsewhere(tmp_path):
    saved(tmp_path / "sae", with_decoder(), metadata={}, hook_name="blocks.7.hook_mlp_out")
    assert read_saelens(tmp_path / "sae", "p")[1]["site"] == "mlp_out:7"
    assert read_saelens(tmp_path / "sae", "p", site=Site(1, "mlp_in"))[1]["site"] == "mlp_in:1"


def test_a_careless_command_leaves_no_file(tmp_path):
    def refused(directory, message, *options, out="p.safetensors"):
        done = run("probe", "sae", directory, "--out", tmp_path / out, *options)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr
        assert not (tmp_path / out).exists()

    there = saved(tmp_path / "sae", with_decoder())
    many = saved(tmp_path / "many", with_decoder(count=5000))
    refused(
        tmp_path, "cfg.json: got No such file or directory, expected the file that SAELens writes beside sae_weights"
    )
    refused(many, "features: got 5000, expected at most 4096; say which with --features")
    refused(there, "--features: got 1;2, expected numbers of features, comma separated", "--features", "1;2")
    refused(there, "--out: got ", out="p.bin")
    refused(there, "site: got x, expected HOOK:LAYER", "--site", "x")
    (there / "sae_weights.safetensors").write_bytes(b"no")
    refused(there, "sae_weights.safetensors: got ")


@pytest.mark.long
def test_sae_lens_trains_on_an_export_and_its_autoencoders_score_alike(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets
    import sae_lens
    import torch
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    hook, context = SITES[0].transformer_lens_name, 8
    requests = {"r1": (3, 40), "r2": (5, 70), "r3": (1, 52)}
    root = write(tmp_path / "rows", requests, SITES)
    assert export(root, tmp_path / "out", "saelens", "--context-size", context, "--site", SITES[0]).returncode == 0
    model = HookedTransformer(
        HookedTransformerConfig(n_layers=3, d_model=8, n_ctx=8, d_head=4, n_heads=2, d_vocab=100, act_fn="relu")
    )

    def runner(sae, out):
        config = sae_lens.LanguageModelSAERunnerConfig(
            sae=sae,
            model_name="none",
            hook_name=hook,
            dataset_path="",
            use_cached_activations=True,
            cached_activations_path=str(tmp_path / "out" / hook),
            context_size=context,
            training_tokens=1024,
            train_batch_size_tokens=64,
            store_batch_size_prompts=4,
            n_batches_in_buffer=32,
            exclude_special_tokens=False,
            prepend_bos=False,
            logger=sae_lens.LoggingConfig(log_to_wandb=False),
            device="cpu",
            output_path=str(out),
            checkpoint_path=None,
            activations_mixing_fraction=0.0,
        )
        tokens = datasets.Dataset.from_dict({"tokens": [[1] * context] * context})
        return sae_lens.LanguageModelSAETrainingRunner(config, override_model=model, override_dataset=tokens)

    store = runner(sae_lens.StandardTrainingSAEConfig(d_in=8, d_sae=16), tmp_path / "none").activations_store
    rows, _ = rows_at(SITES[0], requests=requests)
    given = np.concatenate([store.get_filtered_llm_batch().numpy() for _ in range(3)])
    assert given.tobytes() == rows[: len(given)].astype(np.float32).tobytes()
    for number, kind in enumerate(
        (
            sae_lens.StandardTrainingSAEConfig(d_in=8, d_sae=16),
            sae_lens.StandardTrainingSAEConfig(d_in=8, d_sae=16, apply_b_dec_to_input=False),
            sae_lens.JumpReLUTrainingSAEConfig(d_in=8, d_sae=16),
            sae_lens.TopKTrainingSAEConfig(d_in=8, d_sae=16, k=3, rescale_acts_by_decoder_norm=True),
            sae_lens.BatchTopKTrainingSAEConfig(d_in=8, d_sae=16, k=3),
        )
    ):
        out = tmp_path / str(number)
        runner(kind, out).run()
        assert "W_dec" in load_file(out / "sae_weights.safetensors")
        done = run("probe", "sae", out, "--out", tmp_path / "p.safetensors", "--features", "3,0,15")
        assert done.returncode == 0, done.stderr
        probe = load_probe(tmp_path / "p.safetensors")
        assert probe.site == SITES[0]
        with torch.no_grad():
            expected = sae_lens.SAE.load_from_disk(str(out)).encode(torch.from_numpy(given))
        assert expected.count_nonzero() > 0
        expected = expected.to_dense().numpy()[:, [3, 0, 15]]
        np.testing.assert_allclose(probe.scores(given), expected, rtol=1e-4, atol=1e-4)
