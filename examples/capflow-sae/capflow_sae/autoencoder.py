"""The sparse autoencoder: represents each row as a sum of at most k of many learnt directions.

The k largest of `relu(encoder (row - bias))` are kept (Makhzani and Frey 2013; Gao et al. 2024, "Scaling and evaluating
sparse autoencoders"), so sparsity is exact and has no weight to tune. Features that have been idle for long learn from
the residual of the others, as in the auxiliary loss of Gao et al. Rows are divided by `scale`, the root mean square of
the first batch's numbers about its mean row.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

_IDLE_STEPS = 100
_IDLE_WEIGHT = 1 / 32


class SparseAutoencoder(nn.Module):
    """The weights, all float32.

    encoder: `[features, hidden_size]`.
    decoder: `[features, hidden_size]`, each row of length 1.
    bias: `[hidden_size]`.
    active: how many features of a row are kept.
    """

    def __init__(self, hidden_size: int, features: int, active: int) -> None:
        super().__init__()
        directions = nn.functional.normalize(torch.randn(features, hidden_size), dim=-1)
        self.active = active
        self.decoder = nn.Parameter(directions)
        self.encoder = nn.Parameter(directions.clone())
        self.bias = nn.Parameter(torch.zeros(hidden_size))
        # 0 until `begin`.
        self.register_buffer("scale", torch.zeros(()))
        # Steps since each feature was active.
        self.register_buffer("idle", torch.zeros(features, dtype=torch.long))

    def begin(self, rows: torch.Tensor) -> None:
        """Set the bias and the scale from the first rows, `[n, hidden_size]`."""
        mean = rows.mean(0)
        self.scale.copy_((rows - mean).square().mean().sqrt().clamp_min(1e-12))
        with torch.no_grad():
            self.bias.copy_(mean / self.scale)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the activations `[n, features]` of scaled rows; at most `active` of each row are above 0."""
        return _largest(torch.relu((rows - self.bias) @ self.encoder.T), self.active)

    def loss(self, rows: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return the loss of rows `[n, hidden_size]`, and the share of their variance that is not explained."""
        rows = rows / self.scale
        before = torch.relu((rows - self.bias) @ self.encoder.T)
        activations = _largest(before, self.active)
        residual = rows - (activations @ self.decoder + self.bias)
        variance = (rows - rows.mean(0)).square().mean().clamp_min(1e-12)
        loss = residual.square().mean() / variance
        self.idle += 1
        self.idle[(activations > 0).any(0)] = 0
        idle = self.idle > _IDLE_STEPS
        total = loss
        if idle.any():
            helping = _largest(before * idle, 2 * self.active)
            total = total + _IDLE_WEIGHT * (residual.detach() - helping @ self.decoder).square().mean() / variance
        return total, float(loss.detach())

    def save(self, path: Path, about: dict[str, object]) -> None:
        """Write the weights to a safetensors file, which appears once it is whole."""
        names = ("encoder", "decoder", "bias", "scale")
        tensors = {name: getattr(self, name).detach().contiguous().clone() for name in names}
        metadata = {"sae": json.dumps({"active": self.active, **about})}
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        save_file(tensors, partial, metadata)
        partial.replace(path)


def _largest(activations: torch.Tensor, count: int) -> torch.Tensor:
    """Set all but the largest `count` activations of each row to 0."""
    values, places = activations.topk(min(count, activations.shape[-1]), dim=-1)
    return torch.zeros_like(activations).scatter_(-1, places, values)
