"""Vectors in files: one for each layer, in the formats that tools write.

| file | what it holds | layers |
|---|---|---|
| `.safetensors` | `[hidden_size]` tensors | the number at the end of a name (`post_block.12`, `layer.12`, `12`), or the metadata's `site` for a single `vector` |
| `.pt`, `.pth`, `.bin` | a tensor, or a dict of tensors by layer or name; nothing else is unpickled | the same; rows of `[layers, hidden_size]` |
| `.gguf` | a control vector of llama.cpp: tensors `direction.N` | N is added as the stream leaves layer N |
| `.npy`, `.npz` | an array, or arrays by name | as for `.pt` |

Every vector comes as `[hidden_size]` float32.
"""

from __future__ import annotations

import contextlib
import os
import pickletools
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import ml_dtypes  # noqa: F401  # gives NumPy bfloat16
import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from capflow import limits
from capflow.capture.site import HOOK_DEFAULT, Site, hook_named
from capflow.errors import UsageError, explain
from capflow.steering import plain

Vector = npt.NDArray[np.float32]

_SINGLE = "vector"
_ARCHIVE = b"PK\3\4"  # how a file begins that torch.load takes for an archive, whatever is behind it
_PICKLES = 5  # in a row, in a file that is no archive, before the tensors' bytes
_GLOBAL_LENGTH_MAX = 1_000
_LAYER = re.compile(r"(?:^|[._\-:/])(\d{1,4})$")

Found = dict[str | int, Any]


def load_vectors(path: str | os.PathLike[str]) -> dict[int, Vector]:
    """Return the vectors in a file by layer, `[hidden_size]` float32, in the order of layers.

    Raises UsageError, with the file first, for a file that cannot be read as what its name says, for tensors whose layer is
    not told, for two of one layer, and for vectors that differ in width or hold NaN or infinity.
    """
    vectors: dict[int, Vector] = {}
    for site, vector in load_sites(path).items():
        if site.layer in vectors:
            got = f"two vectors for layer {site.layer}"
            raise UsageError(explain(os.fspath(path), got=got, expected="one for each layer"))
        vectors[site.layer] = vector
    return vectors


def load_sites(path: str | os.PathLike[str]) -> dict[Site, Vector]:
    """Return the vectors in a file by site, in order: the hook is what a name begins with, or else `post_block`.

    Raises UsageError as `load_vectors` does.
    """
    where = os.fspath(path)
    vectors: dict[Site, Vector] = {}
    for name, value in read(path).items():
        site = _site(name, where)
        if site is None:
            do = "load_vector reads a file of one vector"
            raise UsageError(explain(f"{where}: {name or 'the array'}", got="no layer", expected="NAME.LAYER", do=do))
        if site in vectors:
            raise UsageError(explain(f"{where}: {site}", got="two vectors", expected="one for each layer"))
        vectors[site] = _vector(value, f"{where}: {name}")
    widths = {vector.size for vector in vectors.values()}
    if len(widths) != 1:
        got = f"widths {', '.join(map(str, sorted(widths)))}" if widths else "no vectors"
        raise UsageError(explain(where, got=got, expected="vectors of one width"))
    return dict(sorted(vectors.items()))


def load_vector(path: str | os.PathLike[str], layer: int | None = None) -> Vector:
    """Return a vector, `[hidden_size]` float32: the only one in the file, or that of a layer.

    Raises UsageError as `load_vectors` does, and when the file has several and no layer is named, or not that layer.
    """
    where = os.fspath(path)
    if layer is not None:
        vectors = load_vectors(path)
        if layer not in vectors:
            expected = f"one of {', '.join(map(str, vectors))}"
            raise UsageError(explain(f"{where}: layer", got=layer, expected=expected))
        return vectors[layer]
    found = read(path)
    if len(found) != 1:
        raise UsageError(explain(where, got=f"{len(found)} vectors", expected="one", do="name its layer"))
    ((name, value),) = found.items()
    return _vector(value, f"{where}: {name or 'the array'}")


def read(path: str | os.PathLike[str]) -> Found:
    """Return the arrays in a file by name, as they are stored; "" is the name of an array without one.

    `capflow.probes.file.ProbeFile` reads the files that capflow writes, and refuses what it does not know; this function
    reads the files of other tools. Raises UsageError, with the file first, for a file that cannot be read.
    """
    where = os.fspath(path)
    suffix = Path(path).suffix.lower()
    if suffix not in _READERS:
        raise UsageError(explain(where, got=suffix or "no suffix", expected=f"one of {', '.join(_READERS)}"))
    if not Path(path).is_file():
        raise UsageError(explain(where, got="no such file", expected="a file of vectors"))
    try:
        return _READERS[suffix](where)
    except UsageError:
        raise
    except Exception as e:  # the readers raise whatever a damaged file leads them to
        got = f"{type(e).__name__}: {' '.join(str(e).split())}"
        raise UsageError(explain(where, got=got, expected=f"a {suffix} file of vectors")) from e


def _safetensors(where: str) -> Found:
    with safe_open(where, "numpy") as file:
        found: Found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        site = (file.metadata() or {}).get("site")
    if site is not None and set(found) == {_SINGLE}:
        layer, hook = Site.parse(site)
        return {f"{hook}.{layer}": found[_SINGLE]}
    return found


def _check_archive(where: str) -> None:
    """Raise UsageError when a file is an archive whose entries expand to more than `limits.VECTORS_BYTES_MAX`."""
    if zipfile.is_zipfile(where):
        with zipfile.ZipFile(where) as archive:
            nbytes = sum(entry.file_size for entry in archive.infolist())
        if nbytes > limits.VECTORS_BYTES_MAX:
            got, expected = f"{nbytes:,} bytes once they are expanded", f"at most {limits.VECTORS_BYTES_MAX:,}"
            raise UsageError(explain(where, got=got, expected=expected))


def _check_globals(where: str) -> None:
    """Raise UsageError when a pickle names a class at length: torch.load takes quadratic time over the message that refuses it."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(Path(where).open("rb"))
        pickles: list[IO[bytes]] = [file] * _PICKLES
        if file.read(len(_ARCHIVE)) == _ARCHIVE:
            archive = stack.enter_context(zipfile.ZipFile(file))
            pickles = [stack.enter_context(archive.open(name)) for name in archive.namelist() if name.endswith(".pkl")]
        else:
            file.seek(0)
        length = max(map(_global_length, pickles), default=0)
    if length > _GLOBAL_LENGTH_MAX:
        raise UsageError(explain(where, got=f"a class with a name of {length:,} characters", expected="tensors alone"))


def _global_length(pickled: IO[bytes]) -> int:
    """Return how long the longest name of a class is in the next pickle. Raises ValueError when it is none."""
    found = pickletools.genops(pickled)
    return max((len(str(argument)) for opcode, argument, _ in found if opcode.name == "GLOBAL"), default=0)


def _torch(where: str) -> Found:
    import torch

    _check_archive(where)
    _check_globals(where)
    found = torch.load(where, map_location="cpu", weights_only=True)
    return _by_name(found, where)


def _numpy(where: str) -> Found:
    _check_archive(where)
    found = np.load(where, allow_pickle=False)
    return _by_name(found if isinstance(found, np.ndarray) else dict(found), where)


def _gguf(where: str) -> Found:
    import gguf

    reader = gguf.GGUFReader(where)
    tensors = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    for name in tensors:
        if not re.fullmatch(r"direction\.\d{1,4}", name):
            raise UsageError(explain(f"{where}: {name}", expected="a control vector: tensors direction.N alone"))
    return dict(tensors)


def _by_name(found: Any, where: str) -> Found:
    """Return arrays by name, the rows of a matrix by their number."""
    if isinstance(found, Mapping):
        return dict(found)
    if getattr(found, "ndim", 0) == 2 and len(found) <= limits.LAYERS_MAX:
        return dict(enumerate(found))
    if getattr(found, "ndim", 0) == 1:
        return {"": found}
    got = f"shape {list(found.shape)}" if hasattr(found, "shape") else type(found).__name__
    raise UsageError(explain(where, got=got, expected="[hidden_size], [layers, hidden_size] or vectors by layer"))


_READERS: dict[str, Callable[[str], Found]] = {
    ".safetensors": _safetensors,
    ".pt": _torch,
    ".pth": _torch,
    ".bin": _torch,
    ".gguf": _gguf,
    ".npy": _numpy,
    ".npz": _numpy,
}

SUFFIXES = tuple(_READERS)
"""How the names of these files end."""


def _site(name: str | int, where: str) -> Site | None:
    """Return the site that a name tells, None when it tells no layer."""
    found = _LAYER.search(str(name))
    if found is None:
        return None
    hook = hook_named(str(name)[: found.start()])
    return Site(plain.layer_number(found[1], f"{where}: {name}"), hook or HOOK_DEFAULT)


def _vector(value: Any, where: str) -> Vector:
    return plain.vector(value, where).astype(np.float32)
