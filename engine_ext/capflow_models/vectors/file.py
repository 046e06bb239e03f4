"""Writes vectors to files that `capflow_engine.steering.files` reads; that module also reads files of other tools."""

from __future__ import annotations

import hashlib
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
from capflow.version import __version__
from capflow_engine.steering.files import load_sites, load_vector, load_vectors
from capflow_models.spec import site_of

__all__ = ["check_out", "load_sites", "load_vector", "load_vectors", "origin_of", "save_vectors"]


def save_vectors(
    path: str | os.PathLike[str],
    vectors: Mapping[int, Any],
    *,
    hook: str = HOOK_DEFAULT,
    origin: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file that `load_vectors` reads: tensors `HOOK.LAYER`, `[hidden_size]` float32.

    The file appears once it is whole. Raises UsageError for invalid vectors, CapflowError when it cannot be written.

    vectors: by layer.
    origin: how the vectors were made; it becomes part of the file's metadata.
    """
    tensors = {
        f"{hook}.{site_of(n, hook).layer}": plain.vector(v, f"vectors.{n}").astype(np.float32)
        for n, v in vectors.items()
    }
    if not tensors:
        raise UsageError(explain("vectors", got="none", expected="a vector for one layer or more"))
    with whole_file(Path(path)) as file:
        file.write(save(tensors, {**(origin or {}), "hook": hook}))


def check_out(path: str | os.PathLike[str]) -> None:
    """Raise UsageError unless a path is a .safetensors file of a directory that exists."""
    if Path(path).suffix != ".safetensors" or not Path(path).absolute().parent.is_dir():
        expected = "a .safetensors file in a directory that exists"
        raise UsageError(explain("--out", got=os.fspath(path), expected=expected))


def origin_of(source: str | os.PathLike[str], **fields: str) -> dict[str, str]:
    """Return the metadata that says how vectors were made: the version, the source, its SHA-256, and further fields.

    source: a file; a directory has no digest.
    """
    path = Path(source)
    digest = {"source_sha256": hashlib.sha256(path.read_bytes()).hexdigest()} if path.is_file() else {}
    return {"made_by": f"capflow {__version__}", "source": path.name, **digest, **fields}
