"""Steering vectors: what is added to the residual stream at a site, and how it travels.

A `SteeringVector` is `scale · vector`, added to the stream at one site in the model's dtype. On the
wire a vector is its dtype's name and its raw little-endian bytes; JSON lists of numbers are taken too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from capflow import limits
from capflow.errors import UsageError, explain
from capflow.frame import DTYPES
from capflow.site import HOOKS, Site

_DTYPES = {**DTYPES, "float64": np.dtype(np.float64)}


class SteeringVector(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One vector for one site. data: `[hidden_size]` in `dtype`; scale multiplies it."""

    layer: int
    hook: str
    data: bytes
    dtype: str = "float32"
    scale: float = 1.0

    @property
    def site(self) -> Site:
        """The site the vector is added at."""
        return Site(self.layer, self.hook)

    def array(self, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
        """Return `scale · vector`, `[hidden_size]`, computed in float64 and rounded once."""
        values = np.frombuffer(self.data, dtype=_DTYPES[self.dtype])
        if self.scale == 1.0:
            return values.astype(dtype, copy=False)
        return (values.astype(np.float64) * self.scale).astype(dtype)

    @classmethod
    def make(cls, site: Site, vector: Any, scale: float = 1.0, *, where: str = "steering") -> SteeringVector:
        """Return the vector made of an array, a tensor or a list of `hidden_size` numbers.

        Raises UsageError when it is not one-dimensional, is empty, or holds NaN or infinity.
        """
        field = f"{where}.{site.hook}.{site.layer}"
        if hasattr(vector, "detach"):  # a torch tensor, which numpy cannot read in bfloat16
            vector = vector.detach().float().cpu().numpy()
        try:
            values = np.asarray(vector, dtype=np.float32)
        except (TypeError, ValueError) as e:
            raise UsageError(explain(field, got=str(e), expected="a list of numbers")) from e
        if values.ndim != 1 or not 0 < values.size <= limits.HIDDEN_SIZE_MAX:
            raise UsageError(explain(field, got=f"shape {list(values.shape)}", expected="[hidden_size]"))
        if not np.isfinite(values).all():
            bad = int(np.flatnonzero(~np.isfinite(values))[0])
            raise UsageError(explain(field, got=f"{values[bad]} at index {bad}", expected="finite numbers"))
        if not np.isfinite(scale):
            raise UsageError(explain(f"{field}.scale", got=scale, expected="a finite number"))
        return cls(site.layer, site.hook, values.tobytes(), "float32", float(scale))

    def check(self, sites: Sequence[Site], hidden_size: int, *, where: str = "steering") -> None:
        """Raise UsageError unless the vector fits a model with these tapped sites and this width."""
        field = f"{where}.{self.hook}.{self.layer}"
        if self.dtype not in _DTYPES:
            raise UsageError(explain(f"{field}.dtype", got=self.dtype, expected=f"one of {', '.join(_DTYPES)}"))
        if self.site not in sites:
            do = f"start the engine with --sites {self.site} to tap it"
            raise UsageError(explain(field, got=f"no tap at {self.site}", expected="a tapped site", do=do))
        size = len(self.data) / _DTYPES[self.dtype].itemsize
        if size != hidden_size:
            raise UsageError(explain(field, got=f"{size:g} numbers", expected=f"{hidden_size}, the model's width"))
        if not np.isfinite(self.array()).all():
            raise UsageError(explain(field, got="NaN or infinity", expected="finite numbers"))


def parse_steering(value: Any, *, where: str = "steering") -> tuple[SteeringVector, ...]:
    """Return the vectors that a plain value describes: `{hook: {layer: vector or {vector, scale}}}`.

    Raises UsageError naming the field. Vectors already parsed are returned as they are.
    """
    if isinstance(value, Sequence) and all(isinstance(v, SteeringVector) for v in value):
        return tuple(value)
    if not isinstance(value, Mapping) or not value:
        raise UsageError(explain(where, got=value, expected='a mapping like {"post_block": {12: [0.1, …]}}'))
    vectors = []
    for hook, layers in value.items():
        if hook not in HOOKS:
            raise UsageError(explain(where, got=hook, expected=f"a hook, one of {', '.join(HOOKS)}"))
        if not isinstance(layers, Mapping) or not layers:
            raise UsageError(explain(f"{where}.{hook}", got=layers, expected="a mapping of layer to vector"))
        for layer, entry in layers.items():
            if not str(layer).isdigit():
                raise UsageError(explain(f"{where}.{hook}", got=layer, expected="a layer number"))
            site = Site(int(layer), hook)
            scale: Any = 1.0
            vector = entry
            if isinstance(entry, Mapping):
                unknown = set(entry) - {"vector", "scale"}
                if unknown or "vector" not in entry:
                    field = f"{where}.{hook}.{layer}"
                    raise UsageError(explain(field, got=f"keys {sorted(map(str, entry))}", expected="vector, scale"))
                vector, scale = entry["vector"], entry.get("scale", 1.0)
            if isinstance(scale, bool) or not isinstance(scale, int | float):
                raise UsageError(explain(f"{where}.{hook}.{layer}.scale", got=scale, expected="a number"))
            vectors.append(SteeringVector.make(site, vector, float(scale), where=where))
    return tuple(vectors)
