"""Lens files: each damage and each foreign file is refused in one line that names it."""

from __future__ import annotations

import re

import numpy as np
import pytest

from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.lenses.file import LensFile, blocks_before, save_lens
from capflow.lenses.origin import LensOrigin

SQUARE = np.eye(8, dtype=np.float32)
ORIGIN = LensOrigin("jacobian", 4, 8, model="org/model", texts=3, texts_sha256="ab", definition="d")


def save(path, tensors, **metadata):
    """Save any safetensors file."""
    from safetensors.numpy import save_file

    save_file(tensors, path, {"kind": "jacobian", "num_layers": "4", "hidden_size": "8"} | metadata)


def test_a_file_has_its_origin_and_its_translators(tmp_path):
    path = tmp_path / "j.safetensors"
    save_lens(path, ORIGIN, {(Site(0, "post_block"), "weight"): SQUARE, (Site(2, "post_block"), "weight"): 2 * SQUARE})
    lens = LensFile(path)
    assert lens.origin == ORIGIN
    assert lens.blocks == {1, 3}
    rows = np.arange(16, dtype=np.float32).reshape(2, 8)
    np.testing.assert_array_equal(lens.translated(rows, 3), 2.0 * rows)
    # It stays readable when another one takes its place.
    save_lens(path, ORIGIN, {(Site(2, "post_block"), "weight"): 3 * SQUARE})
    np.testing.assert_array_equal(lens.translated(rows, 3), 2.0 * rows)
    np.testing.assert_array_equal(LensFile(path).translated(rows, 3), 3.0 * rows)
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_stream_between_two_blocks_has_two_names():
    assert blocks_before(Site(3, "post_block")) == blocks_before(Site(4, "pre_attn")) == 4
    assert blocks_before(Site(0, "pre_attn")) == 0


@pytest.mark.parametrize("length", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(tmp_path, length):
    path = tmp_path / "j.safetensors"
    save_lens(path, ORIGIN, {(Site(0, "post_block"), "weight"): SQUARE})
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(UsageError, match=rf"^{re.escape(str(path))}: got .*, expected a whole safetensors file of a l"):
        LensFile(path)


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"post_block.000.weight": SQUARE}, {"kind": "sae"}, "metadata kind: got sae, expected one of tuned, jacobian"),
        ({"post_block.000.weight": SQUARE}, {"num_layers": "0"}, "metadata num_layers: got 0, expected 1..1024"),
        ({"post_block.000.weight": SQUARE}, {"num_layers": "x"}, "metadata: got Expected `int`"),
        ({"post_block.000.weight": SQUARE}, {"colour": "red"}, "metadata: got Object contains unknown field `colour`"),
        ({"post_block.000.weight": SQUARE[:4]}, {}, "post_block.000.weight: got shape [4, 8], expected [8, 8]"),
        ({"post_block.004.weight": SQUARE}, {}, "post_block.004.weight: got layer 4, expected 0..3"),
        ({"mlp_out.000.weight": SQUARE}, {}, "tensors: got mlp_out.000.weight, expected names like"),
        ({"0.weight": SQUARE}, {}, "tensors: got 0.weight, expected names like"),
        ({"post_block.000.bias": SQUARE[0]}, {}, "tensors: got post_block.000.bias"),
        ({"post_block.000.bias": SQUARE[0]}, {"kind": "tuned"}, "post_block.000.bias: got no weight beside it"),
        (
            {"post_block.000.weight": SQUARE, "pre_attn.001.weight": SQUARE},
            {},
            "tensors: got post_block.000 and pre_attn.001, expected one translator for the same rows",
        ),
        ({}, {}, "tensors: got none, expected a translator or more"),
    ],
)
def test_a_file_that_is_no_lens_is_refused(tmp_path, tensors, metadata, message):
    path = tmp_path / "j.safetensors"
    save(path, tensors, **metadata)
    with pytest.raises(UsageError) as error:
        LensFile(path)
    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)


def test_numbers_that_cannot_be_used_are_refused(tmp_path):
    path = tmp_path / "j.safetensors"
    broken = SQUARE.copy()
    broken[7, 7] = np.inf
    save(path, {"post_block.000.weight": broken, "post_block.001.weight": SQUARE.astype(np.int8)})
    lens = LensFile(path)
    with pytest.raises(UsageError, match=r"post_block\.000\.weight: got NaN or infinity, expected finite numbers"):
        lens.translated(SQUARE, 1)
    with pytest.raises(UsageError, match=r"post_block\.001\.weight: got dtype I8, expected one of F32, F16, BF16"):
        lens.translated(SQUARE, 2)
    with pytest.raises(UsageError, match=r"j2\.safetensors: post_block\.000\.weight: got NaN or infinity"):
        save_lens(tmp_path / "j2.safetensors", ORIGIN, {(Site(0, "post_block"), "weight"): broken})
    assert not (tmp_path / "j2.safetensors").exists()


def test_no_file_and_other_files_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"none: got no such file, expected a lens file"):
        LensFile(tmp_path / "none")
    with pytest.raises(UsageError, match="got a directory, expected a lens file; `capflow lens import tuned` converts"):
        LensFile(tmp_path)
