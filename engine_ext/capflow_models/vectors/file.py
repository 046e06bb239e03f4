"""Writes vectors to files that `capflow_engine.steering.files` reads; that module also reads files of other tools."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from capflow.capture.site import HOOK_DEFAULT
from capflow.errors import UsageError, explain
from capflow.files import whole_file
from capflow.steering import plain
from capflow_engine.steering.files import load_sites, load_vector, load_vectors
from capflow_models.spec import site_of

__all__ = ["load_sites", "load_vector", "load_vectors", "save_vectors"]


def save_vectors(path: str | os.PathLike[str], vectors: Mapping[int, Any], *, hook: str = HOOK_DEFAULT) -> None:
    """Write a safetensors file that `load_vectors` reads: tensors `HOOK.LAYER`, `[hidden_size]` float32.

    The file appears once it is whole. Raises UsageError for invalid vectors, CapflowError when it cannot be written.

    vectors: by layer.
    """
    tensors = {
        f"{hook}.{site_of(n, hook).layer}": plain.vector(v, f"vectors.{n}").astype(np.float32)
        for n, v in vectors.items()
    }
    if not tensors:
        raise UsageError(explain("vectors", got="none", expected="a vector for one layer or more"))
    with whole_file(Path(path)) as file:
        file.write(save(tensors, {"hook": hook}))
