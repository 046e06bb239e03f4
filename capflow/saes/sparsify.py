"""Directories of EleutherAI's sparsify: `sae.safetensors` and `cfg.json`, as `SparseCoder.save_to_disk` writes them.

The activation is TopK. A transcoder (`transcode`) subtracts no `b_dec`. The directory's name is the name of the module
whose output is reconstructed, such as `layers.12` or `layers.12.mlp`; a transcoder reads that module's input.
https://github.com/EleutherAI/sparsify
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from capflow import limits
from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.files import read_regular
from capflow.probes.file import ProbeFile
from capflow.saes.sae import Sae
from capflow.saes.tensors import NAME_IT, Sites, sae_of
from capflow.text import jsontext

WEIGHTS_NAME = "sae.safetensors"
CONFIG_NAME = "cfg.json"

_MODULE = re.compile(r"(?:^|.*[._])(?:layers|h)[._](\d{1,4})(\.mlp)?$")
# Settings that would change activations in a way that is not computed here.
_UNREAD = ("signed", "embed_skip", "gram_lookup")


class _Config(msgspec.Struct):
    """The fields of `cfg.json` that matter here; files of earlier versions have no `activation`."""

    k: int
    activation: str = "topk"
    transcode: bool = False
    skip_connection: bool = False
    signed: bool = False
    embed_skip: bool = False
    gram_lookup: bool = False


def read_sparsify(directory: Path, sites: Sites | None = None) -> Sae:
    """Return the autoencoder or transcoder in a directory. Raises UsageError.

    sites: by default those that the directory's name says.
    """
    config = _config(directory / CONFIG_NAME)
    if sites is None:
        sites = _sites(directory, transcodes=config.transcode)
    sites = sites.checked(str(directory), transcodes=config.transcode)
    file = ProbeFile(directory / WEIGHTS_NAME)
    required = ["encoder.weight", "encoder.bias", "W_dec", "b_dec", *["W_skip"] * config.skip_connection]
    stored = file.expect(required)
    if stored["encoder.weight"].ndim != 2:
        raise file.wrong("encoder.weight", f"shape {list(stored['encoder.weight'].shape)}", "[num_latents, d_in]")
    tensors = {name: value for name, value in stored.items() if not name.startswith("encoder.")}
    tensors |= {"W_enc": stored["encoder.weight"].T, "b_enc": stored["encoder.bias"]}
    return sae_of(file, tensors, sites, centred=not config.transcode, k=config.k, where=str(directory))


def _config(path: Path) -> _Config:
    expected = "what sparsify writes"
    try:
        config = jsontext.decode(read_regular(path, limits.SIDECAR_BYTES_MAX), _Config)
    except OSError as e:
        got, expected = e.strerror or str(e), f"the file that sparsify writes beside {WEIGHTS_NAME}"
        raise UsageError(explain(str(path), got=got, expected=expected)) from e
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise UsageError(explain(str(path), got=str(e), expected=expected)) from e
    if config.activation != "topk":
        raise UsageError(explain(f"{path}: activation", got=config.activation, expected="topk"))
    for name in _UNREAD:
        if getattr(config, name):
            raise UsageError(explain(f"{path}: {name}", got="true", expected="false: it changes the activations"))
    if config.skip_connection and not config.transcode:
        # The file does not say then whether another site is reconstructed, and whether `b_dec` is subtracted.
        do = 'if it is a transcoder that subtracts no b_dec, add "transcode": true'
        raise UsageError(explain(f"{path}: skip_connection", got="true without transcode", expected="both", do=do))
    if config.k < 1:
        raise UsageError(explain(f"{path}: k", got=config.k, expected="how many features are active at once"))
    return config


def _sites(directory: Path, *, transcodes: bool) -> Sites:
    match = _MODULE.match(directory.absolute().name)
    mlp = match is not None and match[2] is not None
    if match is None or (transcodes and not mlp):
        expected = "a directory called as its module, such as layers.12.mlp"
        raise UsageError(explain(str(directory), got="no site", expected=expected, do=NAME_IT))
    layer = int(match[1])
    target = Site(layer, "mlp_out" if mlp else "post_block")
    return Sites(Site(layer, "mlp_in") if transcodes else target, target)
