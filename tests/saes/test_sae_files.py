"""Files of autoencoders that are refused, each in one line; and SAELens itself, where it is installed."""

import json
import pickle
import re
import zipfile

import numpy as np
import pytest
from safetensors.numpy import save_file

import capflow
from capflow.capture.site import Site
from capflow.errors import UsageError
from tests.kit.autoencoders import encoded, gemma_scope, saelens, sparsify, weights


def refused(path, message, site=None):
    with pytest.raises(UsageError) as caught:
        capflow.load_sae(path, site)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"architecture": "gated"}, {}, "architecture: got gated, expected one of standard, jumprelu, topk, transc"),
        ({"normalize_activations": "layer_norm"}, {}, "normalize_activations: got layer_norm, expected none; fold it"),
        ({"architecture": "topk", "k": 25}, {}, r"k: got 25, expected how many features are active at once, 1\.\.24"),
        ({"architecture": "topk", "k": -1}, {}, "k: got -1, expected how many"),
        ({"metadata": {}}, {}, r"hook_name: got nothing, expected blocks.LAYER.*; name the site: DIR@post_block:12"),
        ({"architecture": "transcoder"}, {}, "hook_name_out: got nothing, expected blocks.LAYER"),
        ({}, {"W_enc": np.ones(24, np.float32)}, r"W_enc: got shape \[24\], expected \[d_in, d_sae\]"),
        ({}, {"W_dec": np.ones((24, 8), np.float32)}, r"W_dec: got shape \[24, 8\], expected \[24, 16\]"),
        ({}, {"W_dec": np.ones((8, 16), np.float32)}, r"W_dec: got shape \[8, 16\], expected \[24, d_out\]"),
        ({}, {"b_enc": np.full(24, np.nan, np.float32)}, "b_enc: got NaN or infinity, expected finite numbers"),
        ({}, {"extra": np.ones(3, np.float32)}, "tensors: got .*extra"),
        (
            {"architecture": "topk", "k": 2, "rescale_acts_by_decoder_norm": True},
            {"W_dec": np.zeros((24, 16), np.float32)},
            "W_dec: got a row of zeros",
        ),
    ],
)
def test_what_saelens_directories_are_refused(tmp_path, config, tensors, message):
    refused(saelens(tmp_path / "sae", weights() | tensors, **config), message)


def test_what_reads_rows_without_the_norm_s_gain_must_be_given_its_site(tmp_path):
    """With the weights divided by the gain, activations are those of the rows without it."""
    rows, gain = np.random.default_rng(7).normal(size=(33, 16)).astype(np.float32), np.linspace(0.5, 3, 16)
    tensors = weights(jumps=True)
    expected = encoded(tensors, rows, centred=False)
    path = tmp_path / "gemma-scope-2b-pt-transcoders/layer_1/width_16k/average_l0_9"
    divided = {"W_enc": (tensors["W_enc"] / gain[:, None]).astype(np.float32)}
    gemma_scope(path, tensors | divided)
    right = "is right only if the encoder expects rows with the gain: divide W_enc's rows by it first$"
    refused(path, f"got a transcoder, whose rows lack the norm's gain, expected .*; PATH@mlp_in:1/mlp_out:1 {right}")
    sae = capflow.load_sae(f"{path}@mlp_in:1/mlp_out:1")
    np.testing.assert_allclose(sae.encode((rows * gain).astype(np.float32)), expected, rtol=1e-4, atol=1e-5)
    for norm, hook in (("ln1", "attn_in"), ("ln2", "mlp_in")):
        name = f"blocks.1.{norm}.hook_normalized"
        plain = saelens(tmp_path / norm, weights(), hook=name)
        got = f"hook_name: got {name}, whose rows lack the norm's gain, expected rows with the norm's gain"
        refused(plain, f"{got}, as captured; DIR@{hook}:1 {right}")
        assert capflow.load_sae(f"{plain}@{hook}:1").site == Site(1, hook)
        hooks = {"hook": name, "hook_out": "blocks.1.hook_mlp_out"}
        transcoder = saelens(tmp_path / f"{norm} transcoder", weights(), "transcoder", **hooks)
        refused(transcoder, f"{got}, as captured; DIR@{hook}:1/mlp_out:1 {right}")
    into = {"hook": "blocks.1.hook_resid_mid", "hook_out": "blocks.1.ln2.hook_normalized"}
    refused(
        saelens(tmp_path / "into", weights(), "transcoder", **into), f"hook_name_out: got .*; DIR@SITE/mlp_in:1 {right}"
    )


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("layers.1", {"activation": "groupmax"}, "activation: got groupmax, expected topk"),
        ("layers.1", {"signed": True}, "signed: got true, expected false"),
        ("layers.1", {"k": 0}, "k: got 0"),
        ("layers.1", {"k": None}, "cfg.json: got Expected `int`"),
        ("mine", {}, "mine: got no site, expected a directory called as its module, such as layers.12.mlp; name the s"),
        ("layers.1", {"transcode": True}, "got no site"),
        ("layers.1", {"skip_connection": True}, "skip_connection: got true without transcode, expected both; if it is"),
        (
            "layers.1.mlp",
            {"skip_connection": True, "transcode": True},
            "tensors: got W_dec, b_dec, encoder.bias, encoder.weight, expect",
        ),
    ],
)
def test_what_sparsify_directories_are_refused(tmp_path, name, config, message):
    refused(sparsify(tmp_path / name, weights(), **config), message)


UNPICKLED = []


class Harmful:
    def __reduce__(self):
        return (UNPICKLED.append, (1,))


def one_line_at_most(path):
    try:
        capflow.load_sae(path, "post_block:1")
    except UsageError as e:
        return "\n" not in str(e)
    return True


def npy(shape, data=b"", dtype="<f4", version=(1, 0)):
    """Return the bytes of an npy file with any header."""
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY" + bytes(version) + len(header).to_bytes(2 if version == (1, 0) else 4, "little") + header + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            npy((10**9, 10**6), bytes(64)),
            r"b_enc: got 64 bytes of shape \[1000000000, 1000000\], float32, expected 4,0",
        ),
        (npy((-1, -16), bytes(64)), r"b_enc: got 64 bytes of shape \[-1, -16\]"),
        (npy((24,), bytes(92)), r"b_enc: got 92 bytes of shape \[24\], float32, expected 96"),
        (npy((24,), bytes(96), version=(2, 0)), r"b_enc: got npy version 2.0, expected 1.0"),
        (npy((24,), bytes(96), dtype="|O"), "b_enc: got dtype object, expected floating-point numbers"),
        (npy("24, 'x'", bytes(96)), "params.npz: got .*, expected an npz file of arrays"),
        (b"no", "params.npz: got .*, expected an npz file of arrays"),
    ],
)
def test_a_header_that_lies_allocates_nothing(tmp_path, content, message):
    tensors = weights(jumps=True)
    with zipfile.ZipFile(tmp_path / "params.npz", "w") as archive:
        for name, tensor in tensors.items():
            with archive.open(f"{name}.npy", "w") as file:
                file.write(content) if name == "b_enc" else np.lib.format.write_array(file, tensor)
    refused(tmp_path / "params.npz", message, "post_block:1")


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_damaged_or_encrypted_member_is_one_line(tmp_path, method):
    path, tensors = tmp_path / "params.npz", weights(jumps=True)
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, tensor in tensors.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, tensor)
    assert capflow.load_sae(path, "post_block:1").features == 24
    whole = path.read_bytes()
    for place in range(40, len(whole), 97):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        assert one_line_at_most(path)
    # The first bit of the flags of a member, in its own header and in the directory.
    encrypted = bytearray(whole)
    for start, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        encrypted[whole.index(start) + offset] |= 1
    path.write_bytes(encrypted)
    refused(path, "params.npz: W_enc: got an encrypted array, expected a plain one", "post_block:1")


def test_a_file_that_memory_has_no_room_for_is_one_line(tmp_path, monkeypatch):
    path = gemma_scope(tmp_path / "sae", weights(jumps=True))

    def no_room(*_, **__):
        raise MemoryError

    monkeypatch.setattr(np.lib.format, "read_array", no_room)
    refused(path, r"params.npz: the arrays: got 3,\d+ bytes, expected as much free memory", "post_block:1")


def test_what_archives_are_refused(tmp_path, monkeypatch):
    def archive(name, **tensors):
        return f"{gemma_scope(tmp_path / name, weights(jumps=True) | tensors)}@post_block:1"

    refused(archive("more", extra=np.ones(1, np.float32)), "arrays: got .*extra")
    refused(
        archive("object", b_enc=np.array([Harmful()], object)),
        "b_enc: got dtype object, expected floating-point numbers",
    )
    refused(archive("ints", b_enc=np.ones(24, np.int64)), "b_enc: got dtype int64, expected floating-point numbers")
    refused(archive("inf", b_enc=np.full(24, np.inf)), "b_enc: got NaN or infinity, expected finite numbers")
    refused(archive("large", b_enc=np.full(24, 1e300)), "b_enc: got NaN or infinity, expected finite numbers")
    refused(archive("shape", threshold=np.ones(3, np.float32)), r"threshold: got shape \[3\], expected \[24\]")
    unnamed = gemma_scope(tmp_path / "unnamed", weights(jumps=True))
    refused(unnamed, "params.npz: got no site, expected a path such as gemma-scope-2b-pt-res/layer_12/.*; name the si")
    whole = (unnamed / "params.npz").read_bytes()
    for end in (0, 10, len(whole) // 2, len(whole) - 1):
        (unnamed / "params.npz").write_bytes(whole[:end])
        refused(unnamed, "params.npz: got .*, expected an npz file of arrays", "post_block:1")
    for place in range(0, len(whole), 211):
        damaged = bytearray(whole)
        damaged[place] ^= 0xFF
        (unnamed / "params.npz").write_bytes(damaged)
        assert one_line_at_most(unnamed)
    (unnamed / "params.npz").write_bytes(pickle.dumps(Harmful()))
    refused(unnamed, "params.npz: got .*, expected an npz file of arrays", "post_block:1")
    assert not UNPICKLED
    monkeypatch.setattr("capflow.limits.SAE_BYTES_MAX", 100)
    refused(archive("huge"), r"the arrays: got [\d,]+ bytes, expected at most 100")


def test_what_else_is_refused(tmp_path):
    refused(tmp_path / "none", "none: got no such directory, expected one with sae_weights.safetensors, sae.safete")
    refused(tmp_path, "got no autoencoder, expected a directory with one of sae_weights.safetensors")
    there = saelens(tmp_path / "sae", weights())
    refused(f"{there}@post_block", "sae: site: got post_block, expected HOOK:LAYER with HOOK one of")
    refused(there, "site: got mlp_in:1/mlp_out:1, expected one site, as it is no transcoder", "mlp_in:1/mlp_out:1")
    other = saelens(tmp_path / "other", weights(), "transcoder")
    refused(other, "site: got mlp_out:1, expected two sites, as it is a transcoder; name both: DIR@mlp_in", "mlp_out:1")
    (there / "sae_weights.safetensors").write_bytes((there / "sae_weights.safetensors").read_bytes()[:-9])
    refused(there, "sae_weights.safetensors: got .*, expected a safetensors file")
    (there / "cfg.json").unlink()
    refused(there, "cfg.json: got No such file or directory, expected the file that SAELens writes beside sae_weights")


@pytest.mark.long
def test_activations_are_those_of_sae_lens(tmp_path):
    import sae_lens
    import torch

    rows = np.random.default_rng(7).normal(size=(33, 16)).astype(np.float32)
    transcoder = {"d_out": 16, "apply_b_dec_to_input": False}
    hooks = {"hook_name": "blocks.1.hook_resid_mid", "hook_name_out": "blocks.1.hook_mlp_out"}
    for number, (architecture, config) in enumerate(
        (
            ("standard", {}),
            ("standard", {"apply_b_dec_to_input": False}),
            ("jumprelu", {}),
            ("topk", {"k": 5}),
            ("topk", {"k": 5, "rescale_acts_by_decoder_norm": True}),
            ("transcoder", transcoder),
            ("skip_transcoder", transcoder),
            ("jumprelu_transcoder", transcoder),
        )
    ):
        names = hooks if config is transcoder else {"hook_name": "blocks.1.hook_resid_post"}
        whole = {"architecture": architecture, "d_in": 16, "d_sae": 24, "metadata": names, **config}
        theirs = sae_lens.SAE.from_dict(whole)
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
        directory = tmp_path / str(number)
        directory.mkdir()
        save_file({k: v.numpy() for k, v in theirs.state_dict().items()}, directory / "sae_weights.safetensors")
        (directory / "cfg.json").write_text(json.dumps(theirs.cfg.to_dict()))
        sae = capflow.load_sae(directory)
        with torch.no_grad():
            theirs = theirs.load_from_disk(str(directory))
            expected = theirs.encode(torch.from_numpy(rows)).to_dense().numpy()
            again = theirs(torch.from_numpy(rows)).numpy()
        assert 0 < np.count_nonzero(expected) < expected.size
        np.testing.assert_allclose(sae.encode(rows), expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(sae.reconstruct(rows), again, rtol=1e-4, atol=1e-3)
