"""Files of Gemma Scope: `params.npz` with `W_enc`, `W_dec`, `b_enc`, `b_dec` and `threshold` (arXiv:2408.05147).

The activation is JumpReLU, and no `b_dec` is subtracted. The site is in the path, as Hugging Face stores it:
`gemma-scope-2b-pt-res/layer_12/width_16k/average_l0_82/params.npz`, with `res`, `mlp` or `transcoders`. The
transcoders read rows without the gain of the norm before the MLP. Arrays of Python objects are never unpickled.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from pathlib import Path

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


class _Archive:
    """The arrays in an npz file, as float32."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        try:
            with zipfile.ZipFile(path) as archive:
                nbytes = sum(entry.file_size for entry in archive.infolist())
            if nbytes > limits.SAE_BYTES_MAX:
                raise self.wrong("the arrays", f"{nbytes:,} bytes", f"at most {limits.SAE_BYTES_MAX:,}")
            with np.load(path, allow_pickle=False) as arrays:
                self._check_names(set(arrays.files))
                self.tensors = {name: self._float32(name, arrays[name]) for name in _ARRAYS}
        except UsageError:
            raise
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError) as e:
            got = e.strerror or str(e) if isinstance(e, OSError) else str(e)
            raise UsageError(explain(self.where, got=got or type(e).__name__, expected="an npz file of arrays")) from e

    def wrong(self, field: str, got: str, expected: str) -> UsageError:
        """Return the error for a wrong array of the file."""
        return UsageError(explain(f"{self.where}: {field}", got=got, expected=expected))

    def _check_names(self, names: set[str]) -> None:
        if names != set(_ARRAYS):
            raise self.wrong("arrays", ", ".join(sorted(names)[:8]) or "none", ", ".join(_ARRAYS))

    def _float32(self, name: str, array: np.ndarray) -> Float32s:
        if array.dtype.kind != "f":
            raise self.wrong(name, f"dtype {array.dtype}", "floating-point numbers")
        with np.errstate(over="ignore"):
            values = array.astype(np.float32, copy=False)
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
