"""Small networks and autoencoders as probes, and what torch computes with them."""

from __future__ import annotations

import itertools

import numpy as np
import torch

ROWS = np.random.default_rng(3).normal(size=(33, 16)).astype(np.float32)


def network(widths, seed=0):
    rng = np.random.default_rng(seed)
    tensors = {}
    for i, (into, out) in enumerate(itertools.pairwise(widths)):
        tensors[f"weight.{i}"] = rng.normal(size=(out, into)).astype(np.float32)
        tensors[f"bias.{i}"] = rng.normal(size=out).astype(np.float32)
    return tensors


def encoder(width=16, count=24, seed=0, **others):
    rng = np.random.default_rng(seed)
    made = {"W_enc": (width, count), "b_enc": (count,), "b_dec": (width,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in made.items()} | others


def activations(tensors, activation, k=None):
    """Return what an autoencoder's encoder computes, in float64."""
    values = torch.from_numpy(ROWS).double() - torch.from_numpy(tensors.get("b_dec", np.zeros(16))).double()
    values = values @ torch.from_numpy(tensors["W_enc"]).double() + torch.from_numpy(tensors["b_enc"]).double()
    if activation == "jumprelu":
        return torch.where(values > torch.from_numpy(tensors["threshold"]), values, 0).numpy()
    if activation == "topk":
        best = values.topk(k, dim=1)
        return torch.zeros_like(values).scatter(1, best.indices, best.values.relu()).numpy()
    return values.relu().numpy()
