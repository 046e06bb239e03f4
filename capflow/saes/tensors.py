"""The tensors of an autoencoder's file, in the shapes and names that `Sae` has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

from capflow import limits
from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.probes.file import Float32s
from capflow.saes.sae import Sae

NAME_IT = "name the site: DIR@post_block:12"
NAME_BOTH = "name both: DIR@mlp_in:12/mlp_out:12"


class Sites(NamedTuple):
    """The site that is read, and the one that is reconstructed."""

    site: Site
    target: Site

    def checked(self, where: str, *, transcodes: bool) -> Sites:
        """Return the sites of a transcoder or of an autoencoder; raise UsageError if they cannot be its sites.

        A transcoder that is given `mlp_in` alone reconstructs `mlp_out` of the same layer.

        where: the file or directory.
        """
        if transcodes and self.site == self.target and self.site.hook == "mlp_in":
            return Sites(self.site, Site(self.site.layer, "mlp_out"))
        if transcodes and self.site == self.target:
            expected = "two sites, as it is a transcoder"
            raise UsageError(explain(f"{where}: site", got=str(self.site), expected=expected, do=NAME_BOTH))
        if not transcodes and self.site != self.target:
            got = f"{self.site}/{self.target}"
            raise UsageError(explain(f"{where}: site", got=got, expected="one site, as it is no transcoder"))
        return self


class TensorFile(Protocol):
    """A file of tensors: names the file in errors."""

    where: str

    def wrong(self, field: str, got: str, expected: str) -> UsageError:
        """Return the error for a wrong field of the file."""


def sae_of(
    file: TensorFile, tensors: Mapping[str, Float32s], sites: Sites, *, centred: bool, k: int = 0, where: str
) -> Sae:
    """Return the autoencoder of these tensors; raise UsageError unless their shapes fit each other.

    tensors: `W_enc` `[width, features]`, `b_enc`, `W_dec` `[features, width of the target]`; maybe `b_dec`,
        `threshold`, and `W_skip` `[width of the target, width]`.
    centred: whether `b_dec` is subtracted from a row first.
    where: the file or directory.
    """
    encoder, decoder = tensors["W_enc"], tensors["W_dec"]
    if encoder.ndim != 2 or not encoder.size or encoder.shape[0] > limits.HIDDEN_SIZE_MAX:
        raise file.wrong("W_enc", f"shape {list(encoder.shape)}", "[d_in, d_sae]")
    width, count = encoder.shape
    if decoder.ndim != 2 or len(decoder) != count or not 0 < decoder.shape[1] <= limits.HIDDEN_SIZE_MAX:
        raise file.wrong("W_dec", f"shape {list(decoder.shape)}", f"[{count}, d_out]")
    out = decoder.shape[1]
    if (centred or sites.site == sites.target) and out != width:
        raise file.wrong("W_dec", f"shape {list(decoder.shape)}", f"[{count}, {width}]")
    shapes = {"b_enc": (count,), "threshold": (count,), "b_dec": (out,), "W_skip": (out, width)}
    for name, shape in shapes.items():
        if name in tensors and tensors[name].shape != shape:
            raise file.wrong(name, f"shape {list(tensors[name].shape)}", str(list(shape)))
    if not 0 <= k <= count:
        raise file.wrong("k", str(k), f"how many features are active at once, 1..{count}")
    zeros = np.zeros(out, np.float32)
    bias = tensors.get("b_dec", zeros)
    return Sae(
        *sites,
        encoder=np.ascontiguousarray(encoder.T),
        bias=tensors["b_enc"],
        # The jump comes after a ReLU.
        thresholds=np.maximum(tensors.get("threshold", np.zeros(count, np.float32)), 0),
        centre=bias if centred else np.zeros(width, np.float32),
        decoder=np.ascontiguousarray(decoder),
        decoder_bias=bias,
        k=k,
        skip=tensors.get("W_skip"),
        where=where,
    )
