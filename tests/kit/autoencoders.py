"""Autoencoders and transcoders in the files of three tools, and what they compute, in float64."""

from __future__ import annotations

import json

import numpy as np
from safetensors.numpy import save_file

WIDTH, COUNT = 16, 24


def weights(*, jumps=False, width=WIDTH, out=None, count=COUNT, seed=0):
    """Return the tensors of one, with the names of SAELens."""
    rng = np.random.default_rng(seed)
    out = out or width
    shapes = {"W_enc": (width, count), "b_enc": (count,), "b_dec": (out,), "W_dec": (count, out)}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    if jumps:
        tensors["threshold"] = np.linspace(0, 3, count).astype(np.float32)
    return tensors


def saelens(directory, tensors, architecture="standard", hook="blocks.1.hook_resid_post", hook_out=None, **config):
    """Write a directory as SAELens does."""
    directory.mkdir(parents=True)
    save_file(tensors, directory / "sae_weights.safetensors")
    metadata = {"hook_name": hook} | ({"hook_name_out": hook_out} if hook_out else {})
    whole = {"architecture": architecture, "metadata": metadata, "apply_b_dec_to_input": "trans" not in architecture}
    (directory / "cfg.json").write_text(json.dumps(whole | config))
    return directory


def sparsify(directory, tensors, **config):
    """Write a directory as sparsify does."""
    directory.mkdir(parents=True)
    renamed = {name: value for name, value in tensors.items() if name not in ("W_enc", "b_enc")}
    renamed |= {"encoder.weight": np.ascontiguousarray(tensors["W_enc"].T), "encoder.bias": tensors["b_enc"]}
    save_file(renamed, directory / "sae.safetensors")
    whole = {"activation": "topk", "expansion_factor": 32, "k": 4, "d_in": len(tensors["W_enc"]), "transcode": False}
    (directory / "cfg.json").write_text(json.dumps(whole | config))
    return directory


def gemma_scope(directory, tensors):
    """Write a directory as those of Gemma Scope are."""
    directory.mkdir(parents=True)
    np.savez(directory / "params.npz", **tensors)
    return directory


def encoded(tensors, rows, *, centred=True, k=0):
    """Return the activations `[n, features]` in float64."""
    wide = {name: value.astype(np.float64) for name, value in tensors.items()}
    values = (rows.astype(np.float64) - (wide["b_dec"] if centred else 0)) @ wide["W_enc"] + wide["b_enc"]
    if k:
        kept = np.zeros_like(values, dtype=bool)
        np.put_along_axis(kept, np.argsort(-values, axis=1)[:, :k], True, 1)
        values = np.where(kept, values, 0)
    return np.where(values > np.maximum(wide.get("threshold", 0), 0), values, 0)


def decoded(tensors, activations):
    """Return the rows of activations, in float64."""
    return activations @ tensors["W_dec"].astype(np.float64) + tensors["b_dec"].astype(np.float64)
