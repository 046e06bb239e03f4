"""Files of Gemma Scope: `params.npz` with `W_enc`, `W_dec`, `b_enc`, `b_dec` and `threshold` (arXiv:2408.05147).

The activation is JumpReLU, and no `b_dec` is subtracted. The site is in the path, as Hugging Face stores it:
`gemma-scope-2b-pt-res/layer_12/width_16k/average_l0_82/params.npz`, with `res`, `mlp` or `transcoders`. The
transcoders read rows without the gain of the norm before the MLP. Arrays of Python objects are never unpickled.
"""

from __future__ import annotations

import lzma
import math
import re
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from capflow import limits
from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.probes.file import Float32s
from capflow.probes.saelens import WITH_GAIN, WITHOUT_GAIN, if_gained
from capflow.saes.sae import Sae
from capflow.saes.tensors import NAME_IT, Sites, sae_of

FILE_NAME = "params.npz"

_ARRAYS = ("W_enc", "W_dec", "b_enc", "b_dec", "threshold")
_LAYER = re.compile(r"layer_(\d{1,4})")
_KIND = re.compile(r"gemma-scope-.*-(res|mlp|transcoders)$")
# The types of its functions are not declared.
_NPY: Any = np.lib.format

# What reading an archive raises.
_DAMAGED = (
    *(OSError, ValueError, EOFError, KeyError, RuntimeError, SyntaxError, tokenize.TokenError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError),
)


class _Archive:
    """The arrays in an npz file, as float32."""

    def __init__(self, path: Path) -> None:
        self.where, nbytes = str(path), 0
        try:
            with zipfile.ZipFile(path) as archive:
                entries = {entry.filename: entry for entry in archive.infolist()}
                nbytes = sum(entry.file_size for entry in entries.values())
                if nbytes > limits.SAE_BYTES_MAX:
                    raise self.wrong("the arrays", f"{nbytes:,} bytes", f"at most {limits.SAE_BYTES_MAX:,}")
                self._check_names(set(entries))
                self.tensors = {name: self._float32(name, archive, entries[f"{name}.npy"]) for name in _ARRAYS}
        except UsageError:
            raise
        except MemoryError as e:
            raise self.wrong("the arrays", f"{nbytes:,} bytes", "as much free memory") from e
        except _DAMAGED as e:
            got = e.strerror or str(e) if isinstance(e, OSError) else str(e)
            raise UsageError(explain(self.where, got=got or type(e).__name__, expected="an npz file of arrays")) from e

    def wrong(self, field: str, got: str, expected: str) -> UsageError:
        """Return the error for a wrong array of the file."""
        return UsageError(explain(f"{self.where}: {field}", got=got, expected=expected))

    def _check_names(self, names: set[str]) -> None:
        if names != {f"{name}.npy" for name in _ARRAYS}:
            got = ", ".join(sorted(name.removesuffix(".npy") for name in names)[:8])
            raise self.wrong("arrays", got or "none", ", ".join(_ARRAYS))

    def _float32(self, name: str, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Float32s:
        if entry.flag_bits & 1:
            raise self.wrong(name, "an encrypted array", "a plain one")
        with archive.open(entry) as file:
            version = _NPY.read_magic(file)
            # Of later versions are arrays with fields; their headers may be of any length.
            if version != (1, 0):
                raise self.wrong(name, f"npy version {version[0]}.{version[1]}", "1.0")
            shape, _, dtype = _NPY.read_array_header_1_0(file)
            if dtype.kind != "f":
                raise self.wrong(name, f"dtype {dtype}", "floating-point numbers")
            nbytes, rest = math.prod(shape) * dtype.itemsize, entry.file_size - file.tell()
            if min(shape, default=0) < 0 or nbytes != rest:
                raise self.wrong(name, f"{rest:,} bytes of shape {list(shape)}, {dtype}", f"{nbytes:,}")
        with archive.open(entry) as file:
            array = _NPY.read_array(file, allow_pickle=False)
        with np.errstate(over="ignore"):
            values: Float32s = array.astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise self.wrong(name, "NaN or infinity", "finite numbers")
        return values


def read_gemma_scope(path: Path, sites: Sites | None = None) -> Sae:
    """Return the autoencoder or transcoder in an npz file. Raises UsageError.

    sites: by default those that the path names; a transcoder must be given them.
    """
    if sites is None:
        sites = _sites(path)
    archive = _Archive(path)
    return sae_of(archive, archive.tensors, sites, centred=False, where=str(path))


def _sites(path: Path) -> Sites:
    parts = path.absolute().parts
    layers = [match for part in parts if (match := _LAYER.fullmatch(part))]
    # Hugging Face's cache calls it models--google--gemma-scope-2b-pt-res.
    kinds = [match for part in parts if (match := _KIND.search(part))]
    if len(layers) != 1 or len(kinds) != 1:
        expected = "a path such as gemma-scope-2b-pt-res/layer_12/width_16k/average_l0_82"
        raise UsageError(explain(str(path), got="no site", expected=expected, do=NAME_IT))
    layer, kind = int(layers[0][1]), kinds[0][1]
    if kind == "transcoders":
        option = f"PATH@{Site(layer, 'mlp_in')}/{Site(layer, 'mlp_out')}"
        got = f"a transcoder, {WITHOUT_GAIN}"
        raise UsageError(explain(str(path), got=got, expected=WITH_GAIN, do=if_gained(option)))
    site = Site(layer, "post_block" if kind == "res" else "mlp_out")
    return Sites(site, site)
