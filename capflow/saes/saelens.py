"""Directories of SAELens: `sae_weights.safetensors` and `cfg.json`, as `SAE.save_inference_model` writes them.

Read are the architectures `standard`, `jumprelu` and `topk`, and the transcoders `transcoder`, `skip_transcoder` and
`jumprelu_transcoder`. With `rescale_acts_by_decoder_norm` an activation counts in lengths of the decoder's row; the
encoder and the decoder are scaled to that. https://decoderesearch.github.io/SAELens/
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from capflow.probes.file import ProbeFile
from capflow.probes.saelens import CONFIG_NAME, WEIGHTS_NAME, read_config, site_named
from capflow.saes.sae import Sae
from capflow.saes.tensors import NAME_IT, Sites, sae_of

TRANSCODERS = {
    "transcoder": "relu",
    "skip_transcoder": "relu",
    "jumprelu_transcoder": "jumprelu",
}
"""The architectures of transcoders, and their activations."""


def read_saelens(directory: Path, sites: Sites | None = None) -> Sae:
    """Return the autoencoder or transcoder in a directory. Raises UsageError.

    sites: by default those that `cfg.json` names, unless it is one whose rows lack the norm's gain.
    """
    path = directory / CONFIG_NAME
    config = read_config(path, TRANSCODERS)
    transcodes = config.architecture in TRANSCODERS
    if sites is None:
        target = site_named(path, "hook_name_out", config.hook_out, NAME_IT, "DIR@SITE/{}") if transcodes else None
        option = "DIR@{}" if target is None else f"DIR@{{}}/{target}"
        site = site_named(path, "hook_name", config.hook, NAME_IT, option)
        sites = Sites(site, target or site)
    sites = sites.checked(str(directory), transcodes=transcodes)
    jumping = "jumprelu" in config.architecture
    file = ProbeFile(directory / WEIGHTS_NAME)
    required = ["W_enc", "b_enc", "W_dec", *["threshold"] * jumping]
    required += ["W_skip"] * (config.architecture == "skip_transcoder")
    tensors = file.expect(required, ["b_dec"])
    if config.rescale_acts_by_decoder_norm:
        norms = np.linalg.norm(tensors["W_dec"], axis=1)
        if not norms.all():
            raise file.wrong("W_dec", "a row of zeros", "rows with a length, as activations count in lengths")
        tensors["W_enc"], tensors["b_enc"] = tensors["W_enc"] * norms, tensors["b_enc"] * norms
        tensors["W_dec"] = tensors["W_dec"] / norms[:, None]
    centred = config.apply_b_dec_to_input and not transcodes
    k = config.k or 0 if config.architecture == "topk" else 0
    return sae_of(file, tensors, sites, centred=centred, k=k, where=str(directory))
