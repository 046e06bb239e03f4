"""A file of a direction, a probe or an autoencoder: safetensors with a JSON header that describes it.

The header's `__metadata__` maps text to text. `ProbeFile` reads it and the tensors; its errors name the file and the
field. `write_file` writes such a file. `capflow.probes.probe` and `capflow.probes.kinds` define the meaning of the
fields.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from capflow.capture.dtypes import SAFETENSORS_DTYPES
from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.files import whole_file

Float32s = npt.NDArray[np.float32]

_SHOWN_MAX = 8


class ProbeFile:
    """A file's metadata, and those of its tensors that are expected.

    Raises UsageError if the file is missing or not safetensors.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.where = os.fspath(path)
        self.stem = Path(path).stem
        if not Path(path).is_file():
            raise UsageError(explain(self.where, got="no such file", expected="a safetensors file"))
        try:
            with safe_open(path, "numpy") as file:
                self.metadata: Mapping[str, str] = file.metadata() or {}
                self.tensors = frozenset(file.keys())
        except (SafetensorError, OSError) as e:
            raise self._none(e) from e

    def _tensor(self, file: Any, name: str) -> Float32s:
        dtype = file.get_slice(name).get_dtype()
        if dtype not in SAFETENSORS_DTYPES.values():
            raise self.wrong(name, f"dtype {dtype}", f"one of {', '.join(SAFETENSORS_DTYPES.values())}")
        # A number too large for float32 becomes infinite, and is refused below.
        with np.errstate(over="ignore"):
            values = np.asarray(file.get_tensor(name)).astype(np.float32)
        if not np.isfinite(values).all():
            raise self.wrong(name, "NaN or infinity", "finite numbers")
        return values

    def expect(
        self, required: Collection[str], optional: Collection[str] = (), unread: Collection[str] = ()
    ) -> dict[str, Float32s]:
        """Return tensors of the file as float32: all the required ones, and the optional ones that it has.

        unread: tensors that the file may have and that are not read.

        Raises UsageError for a missing tensor, for a tensor that is not listed, since it would be ignored silently, and
        for numbers that are not finite.
        """
        if not set(required) <= self.tensors or self.tensors - {*required, *optional, *unread}:
            raise self.wrong_tensors(" and maybe ".join(", ".join(part) for part in (required, optional) if part))
        try:
            with safe_open(self.where, "numpy") as file:
                return {name: self._tensor(file, name) for name in sorted(self.tensors & {*required, *optional})}
        except (SafetensorError, OSError) as e:
            raise self._none(e) from e

    def expect_shapes(self, tensors: Mapping[str, Float32s], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise UsageError if one of these tensors is there with another shape."""
        for name, shape in shapes.items():
            if name in tensors and tensors[name].shape != shape:
                raise self.wrong(name, f"shape {list(tensors[name].shape)}", str(list(shape)))

    def _none(self, error: Exception) -> UsageError:
        return UsageError(explain(self.where, got=str(error), expected="a safetensors file"))

    def expect_fields(self, *fields: str) -> None:
        """Raise UsageError for a metadata field without a meaning here, since it would be ignored silently."""
        # safetensors.torch.save_file writes format=pt.
        unknown = sorted(set(self.metadata) - {"site", "format", *fields})
        if unknown:
            raise self.wrong("metadata", unknown[0], f"only site, {', '.join(fields)}")

    def site(self) -> Site:
        """Return the site that the metadata names."""
        try:
            return Site.parse(self.metadata.get("site", "nothing"))
        except UsageError as e:
            do = 'give save_file metadata like {"site": "post_block:12"}'
            raise UsageError(f"{self.where}: metadata {explain(str(e), do=do)}") from e

    def choice(self, field: str, values: Collection[str], default: str) -> str:
        """Return a metadata field that must be one of these values."""
        value = self.metadata.get(field, default)
        if value not in values:
            raise self.wrong(f"metadata {field}", value, f"one of {', '.join(values)}")
        return value

    def numbers(self, field: str, default: str = "0") -> tuple[float, ...]:
        """Return a metadata field as finite numbers; they are separated by commas."""
        text = self.metadata.get(field, default)
        try:
            numbers = tuple(float(part) for part in text.split(","))
        except ValueError:
            numbers = (math.nan,)
        if not all(math.isfinite(number) for number in numbers):
            raise self.wrong(f"metadata {field}", text, "finite numbers, comma separated")
        return numbers

    def thresholds(self, count: int) -> tuple[float, ...]:
        """Return a threshold for each of `count` probes."""
        numbers = self.numbers("threshold")
        return numbers * count if len(numbers) == 1 else numbers

    def names(self, default: tuple[str, ...]) -> tuple[str, ...]:
        """Return the probes' names."""
        names = self.metadata.get("names")
        return default if names is None else tuple(name.strip() for name in names.split(","))

    def wrong_tensors(self, expected: str) -> UsageError:
        """Return the error for a file with other tensors than expected."""
        return self.wrong("tensors", ", ".join(sorted(self.tensors)[:_SHOWN_MAX]) or "none", expected)

    def wrong(self, field: str, got: str, expected: str) -> UsageError:
        """Return the error for a wrong field of the file."""
        return UsageError(explain(f"{self.where}: {field}", got=got, expected=expected))


def write_file(
    path: str | os.PathLike[str],
    tensors: Mapping[str, npt.NDArray[Any]],
    metadata: Mapping[str, str],
    check: Callable[[str], object] | None = None,
) -> None:
    """Write a file whole or not at all, in the place of an existing one. Raises CapflowError if it cannot be written.

    check: reads the file under a temporary name before it gets its own. Its UsageError is raised, and an existing file
        stays.
    """
    whole = save(dict(tensors), dict(metadata))
    with whole_file(Path(path)) as stream:
        stream.write(whole)
        if check is not None:
            stream.flush()
            try:
                check(stream.name)
            except UsageError as e:
                raise UsageError(str(e).replace(stream.name, os.fspath(path))) from e
