"""A lens file: the translators of a tuned lens or of a Jacobian lens, as safetensors.

Tensors are named by the site whose rows they translate, such as `post_block.012.weight` `[hidden_size, hidden_size]`
and, in a tuned lens, `post_block.012.bias` `[hidden_size]`. The header's `__metadata__` is a `LensOrigin`. Numbers are
float32, float16 or bfloat16.

A `tuned` translator gives `h + weight · h + bias`; the published ones have their sites at `pre_attn`. A `jacobian`
translator gives `weight · h`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from capflow import limits
from capflow.capture.site import Site, hook_named
from capflow.errors import UsageError, explain
from capflow.files import whole_file
from capflow.lenses.origin import LENS_KINDS, LensOrigin
from capflow.lenses.readout import Doubles

_NAME = re.compile(r"(?P<hook>\w+)\.(?P<layer>\d{3,4})\.(?P<part>weight|bias)")
_DTYPES = ("F32", "F16", "BF16")
_HOOKS = ("pre_attn", "post_block")


class LensFile:
    """The translators of a file. Opening reads the header; a translator is read as it is used.

    origin: the model that it is for, and how it was made.
    blocks: for each translator, how many blocks its rows have passed. `pre_attn` of a layer is `post_block` of the
        layer before it.

    Raises UsageError for a file that is missing, damaged, or no lens.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.where = os.fspath(path)
        self.stem = Path(path).stem
        if not Path(path).is_file():
            got = "a directory" if Path(path).is_dir() else "no such file"
            do = "`capflow lens import tuned` converts one of tuned-lens" if Path(path).is_dir() else ""
            raise UsageError(explain(self.where, got=got, expected="a lens file", do=do))
        try:
            # The file stays mapped, also if it is replaced or removed.
            file: Any = safe_open(path, "numpy")
            metadata: Mapping[str, str] = file.metadata() or {}
            self._shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as e:
            got = " ".join(str(e).split())
            raise UsageError(explain(self.where, got=got, expected="a whole safetensors file of a lens")) from e
        self._file = file
        self.origin = self._read_origin(metadata)
        # The first part of each translator's tensors' names, by the blocks that its rows have passed.
        self._names: dict[int, str] = {}
        for name, shape in self._shapes.items():
            self._add(name, shape)
        if not self._names:
            raise self.wrong("tensors", "none", "a translator or more")

    @property
    def blocks(self) -> frozenset[int]:
        """How many blocks the rows of each translator have passed."""
        return frozenset(self._names)

    @property
    def sites(self) -> list[Site]:
        """The sites that the tensors name, in the order of the forward pass."""
        prefixes = [prefix.split(".") for prefix in self._names.values()]
        return sorted((Site(int(layer), hook) for hook, layer in prefixes), key=lambda site: site.depth)

    @property
    def title(self) -> str:
        """The kind, for people."""
        return "Jacobian lens" if self.origin.kind == "jacobian" else "Tuned lens"

    def translated(self, rows: npt.NDArray[Any], blocks: int) -> Doubles:
        """Return rows as after the last block, `[n, hidden_size]` float64.

        rows: `[n, hidden_size]`, after so many blocks.

        The weight is read in tiles of `limits.LENS_TILE_BYTES`. Raises UsageError for numbers that are not finite.
        """
        stream = rows.astype(np.float64)
        name = self._names[blocks]
        size = self.origin.hidden_size
        result: Doubles = np.zeros_like(stream)
        step = max(1, limits.LENS_TILE_BYTES // (8 * size))
        weight = self._tensor(f"{name}.weight")
        with np.errstate(invalid="ignore", over="ignore"):
            for first in range(0, size, step):
                tile = self._finite(f"{name}.weight", weight[first : min(first + step, size)])
                result[:, first : first + step] = stream @ tile.T
            if self.origin.kind == "tuned":
                result += stream
        if f"{name}.bias" in self._shapes:
            result += self._finite(f"{name}.bias", self._tensor(f"{name}.bias")[:])
        return result

    def _tensor(self, name: str) -> Any:
        tensor = self._file.get_slice(name)
        if tensor.get_dtype() not in _DTYPES:
            raise self.wrong(name, f"dtype {tensor.get_dtype()}", f"one of {', '.join(_DTYPES)}")
        return tensor

    def _finite(self, name: str, part: npt.NDArray[Any]) -> Doubles:
        values: Doubles = part.astype(np.float64)
        if not np.isfinite(values).all():
            raise self.wrong(name, "NaN or infinity", "finite numbers")
        return values

    def _read_origin(self, metadata: Mapping[str, str]) -> LensOrigin:
        if metadata.get("kind") not in LENS_KINDS:
            got = metadata.get("kind", "none")
            do = "`capflow lens import` reads published lenses"
            raise UsageError(
                explain(f"{self.where}: metadata kind", got=got, expected=f"one of {', '.join(LENS_KINDS)}", do=do)
            )
        try:
            origin = msgspec.convert(dict(metadata), LensOrigin, strict=False)
        except msgspec.ValidationError as e:
            raise self.wrong("metadata", str(e), "the origin of a lens") from e
        for field, low, high in (
            ("num_layers", 1, limits.LAYERS_MAX),
            ("hidden_size", 1, limits.HIDDEN_SIZE_MAX),
        ):
            if not low <= getattr(origin, field) <= high:
                raise self.wrong(f"metadata {field}", str(getattr(origin, field)), f"{low}..{high}")
        return origin

    def _add(self, name: str, shape: list[int]) -> None:
        """Note a tensor. Raises UsageError for one that has no meaning here."""
        match = _NAME.fullmatch(name)
        hook = None if match is None else hook_named(match["hook"])
        if match is None or hook not in _HOOKS or (match["part"] == "bias" and self.origin.kind != "tuned"):
            raise self.wrong("tensors", name, "names like post_block.012.weight")
        layer, size = int(match["layer"]), self.origin.hidden_size
        if layer >= self.origin.num_layers:
            raise self.wrong(name, f"layer {layer}", f"0..{self.origin.num_layers - 1}")
        wanted = [size, size] if match["part"] == "weight" else [size]
        if shape != wanted:
            raise self.wrong(name, f"shape {shape}", str(wanted))
        prefix = name.rpartition(".")[0]
        if f"{prefix}.weight" not in self._shapes:
            raise self.wrong(name, "no weight beside it", f"{prefix}.weight")
        blocks = blocks_before(Site(layer, hook or ""))
        if self._names.setdefault(blocks, prefix) != prefix:
            raise self.wrong("tensors", f"{self._names[blocks]} and {prefix}", "one translator for the same rows")

    def wrong(self, field: str, got: str, expected: str) -> UsageError:
        """Return the error for a wrong field of the file."""
        return UsageError(explain(f"{self.where}: {field}", got=got, expected=expected))


def blocks_before(site: Site) -> int:
    """Return how many blocks the rows of a site have passed.

    Raises UsageError for a site whose rows are not the stream between two blocks.
    """
    if site.hook not in _HOOKS:
        expected = "the stream between two blocks: post_block, or pre_attn of the next layer"
        raise UsageError(explain("lens: rows", got=str(site), expected=expected))
    return site.layer + (site.hook == "post_block")


def save_lens(
    path: str | os.PathLike[str], origin: LensOrigin, tensors: Mapping[tuple[Site, str], npt.NDArray[Any]]
) -> None:
    """Write a lens file whole or not at all, in the place of an existing one.

    tensors: by site and `weight` or `bias`.

    Raises UsageError for tensors that do not make a lens; an existing file stays then. Raises CapflowError if the file
    cannot be written.
    """
    named = {
        f"{site.hook}.{site.layer:03d}.{part}": np.ascontiguousarray(value) for (site, part), value in tensors.items()
    }
    with whole_file(Path(path)) as stream:
        save_file(named, stream.name, origin.metadata())
        try:
            lens = LensFile(stream.name)
            for name, value in named.items():
                if not np.isfinite(value.astype(np.float32)).all():
                    raise lens.wrong(name, "NaN or infinity", "finite numbers")
        except UsageError as e:
            raise UsageError(str(e).replace(stream.name, os.fspath(path))) from e
