"""Vectors in files: one per layer, in the formats that tools write.

| file | content | layer of a vector |
|---|---|---|
| `.safetensors` | `[hidden_size]` tensors | the number that ends its name (`post_block.12`, `layer.12`, `12`) |
| `.pt`, `.pth`, `.bin` | a tensor, or a dict of tensors; nothing else is unpickled | the same, or its key in the dict |
| `.gguf` | a control vector of llama.cpp: tensors `direction.N` | N: added as the stream leaves layer N |
| `.npy`, `.npz` | an array, or arrays by name | as for `.pt` |

The layer of a single safetensors tensor `vector` is in the metadata's `site`. The rows of a `[layers, hidden_size]`
tensor (`.pt`) or array (`.npy`) are the vectors of layers 0, 1, …

Every vector is returned as `[hidden_size]` float32.
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
_ARCHIVE = b"PK\3\4"  # torch.load reads every file with these first bytes as an archive
_PICKLES = 5  # a torch file that is no archive begins with this many pickles, before the tensors' bytes
_GLOBAL_LENGTH_MAX = 1_000
_LAYER = re.compile(r"(?:^|[._\-:/])(\d{1,4})$")

Arrays = dict[str | int, Any]
"""Arrays by name; the name is "" for an array without one."""


def load_vectors(path: str | os.PathLike[str]) -> dict[int, Vector]:
    """Return the vectors in a file by layer, `[hidden_size]` float32, in the order of layers.

    Raises UsageError, which begins with the file, if the file is not in the format of its suffix, a tensor's name has
    no layer, two tensors are of one layer, or vectors differ in width or contain NaN or infinity.
    """
    vectors: dict[int, Vector] = {}
    for site, vector in load_sites(path).items():
        if site.layer in vectors:
            got = f"two vectors for layer {site.layer}"
            raise UsageError(explain(os.fspath(path), got=got, expected="one per layer"))
        vectors[site.layer] = vector
    return vectors


def load_sites(path: str | os.PathLike[str]) -> dict[Site, Vector]:
    """Return the vectors in a file by site, in order; a name without a hook before the layer means `post_block`.

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
            raise UsageError(explain(f"{where}: {site}", got="two vectors", expected="one per layer"))
        vectors[site] = _vector(value, f"{where}: {name}")
    widths = {vector.size for vector in vectors.values()}
    if len(widths) != 1:
        got = f"widths {', '.join(map(str, sorted(widths)))}" if widths else "no vectors"
        raise UsageError(explain(where, got=got, expected="vectors of one width"))
    return dict(sorted(vectors.items()))


def load_vector(path: str | os.PathLike[str], layer: int | None = None) -> Vector:
    """Return one vector, `[hidden_size]` float32: that of `layer`, or the only one in the file.

    Raises UsageError as `load_vectors` does, if the file lacks the layer, and if it has several vectors and `layer` is
    None.
    """
    where = os.fspath(path)
    if layer is not None:
        vectors = load_vectors(path)
        if layer not in vectors:
            expected = f"one of {', '.join(map(str, vectors))}"
            raise UsageError(explain(f"{where}: layer", got=layer, expected=expected))
        return vectors[layer]
    arrays = read(path)
    if len(arrays) != 1:
        raise UsageError(explain(where, got=f"{len(arrays)} vectors", expected="one", do="name its layer"))
    ((name, value),) = arrays.items()
    return _vector(value, f"{where}: {name or 'the array'}")


def read(path: str | os.PathLike[str]) -> Arrays:
    """Return the arrays in a file, as they are stored.

    `capflow.probes.file.ProbeFile` reads the files that capflow writes, and refuses other content; this function reads
    the files of other tools. Raises UsageError, which begins with the file, for a file that cannot be read.
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
    except Exception as e:  # a damaged file can make the readers raise anything
        got = f"{type(e).__name__}: {' '.join(str(e).split())}"
        raise UsageError(explain(where, got=got, expected=f"a {suffix} file of vectors")) from e


def _safetensors(where: str) -> Arrays:
    with safe_open(where, "numpy") as file:
        arrays: Arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        site = (file.metadata() or {}).get("site")
    if site is not None and set(arrays) == {_SINGLE}:
        layer, hook = Site.parse(site)
        return {f"{hook}.{layer}": arrays[_SINGLE]}
    return arrays


def _check_archive(where: str) -> None:
    """Raise UsageError if a file is an archive whose entries expand to more than `limits.VECTORS_BYTES_MAX`."""
    if zipfile.is_zipfile(where):
        with zipfile.ZipFile(where) as archive:
            nbytes = sum(entry.file_size for entry in archive.infolist())
        if nbytes > limits.VECTORS_BYTES_MAX:
            got, expected = f"{nbytes:,} bytes after decompression", f"at most {limits.VECTORS_BYTES_MAX:,}"
            raise UsageError(explain(where, got=got, expected=expected))


def _check_globals(where: str) -> None:
    """Raise UsageError if a pickle has a very long class name: torch.load's error for it takes quadratic time."""
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
    """Return the length of the longest class name in the next pickle; raise ValueError if there is no pickle."""
    operations = pickletools.genops(pickled)
    return max((len(str(argument)) for opcode, argument, _ in operations if opcode.name == "GLOBAL"), default=0)


def _torch(where: str) -> Arrays:
    import torch

    _check_archive(where)
    _check_globals(where)
    return _by_name(torch.load(where, map_location="cpu", weights_only=True), where)


def _numpy(where: str) -> Arrays:
    _check_archive(where)
    content = np.load(where, allow_pickle=False)
    return _by_name(content if isinstance(content, np.ndarray) else dict(content), where)


def _gguf(where: str) -> Arrays:
    import gguf

    reader = gguf.GGUFReader(where)
    tensors = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    for name in tensors:
        if not re.fullmatch(r"direction\.\d{1,4}", name):
            raise UsageError(explain(f"{where}: {name}", expected="a control vector: tensors direction.N alone"))
    return dict(tensors)


def _by_name(content: Any, where: str) -> Arrays:
    """Return arrays by name; the rows of a matrix by their index."""
    if isinstance(content, Mapping):
        return dict(content)
    if getattr(content, "ndim", 0) == 2 and len(content) <= limits.LAYERS_MAX:
        return dict(enumerate(content))
    if getattr(content, "ndim", 0) == 1:
        return {"": content}
    got = f"shape {list(content.shape)}" if hasattr(content, "shape") else type(content).__name__
    raise UsageError(explain(where, got=got, expected="[hidden_size], [layers, hidden_size] or vectors by layer"))


_READERS: dict[str, Callable[[str], Arrays]] = {
    ".safetensors": _safetensors,
    ".pt": _torch,
    ".pth": _torch,
    ".bin": _torch,
    ".gguf": _gguf,
    ".npy": _numpy,
    ".npz": _numpy,
}

SUFFIXES = tuple(_READERS)
"""The suffixes of the file formats that are read."""


def _site(name: str | int, where: str) -> Site | None:
    """Return the site that a name contains; None if it has no layer."""
    match = _LAYER.search(str(name))
    if match is None:
        return None
    hook = hook_named(str(name)[: match.start()])
    return Site(plain.layer_number(match[1], f"{where}: {name}"), hook or HOOK_DEFAULT)


def _vector(value: Any, where: str) -> Vector:
    return plain.vector(value, where).astype(np.float32)
