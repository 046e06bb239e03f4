"""Specifications on disk: a directory with `steering.json` and `steering.safetensors`.

The JSON names the model and lists the sites with their settings. The safetensors file has the vectors, `[hidden_size]`
float32, as `HOOK:LAYER.vector`, `HOOK:LAYER.projection_cap` and `HOOK:LAYER.ablation`. Model weights are not saved.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from capflow.capture.site import Site
from capflow.errors import CapflowError, UsageError, explain
from capflow.files import make_directory, write_whole
from capflow.text import jsontext
from capflow_models.spec import AblationSpec, LayerSteeringSpec, ProjectionCapSpec, SteeringSpec, Vector

SETTINGS, VECTORS = "steering.json", "steering.safetensors"
_FORMAT = 1
_SETTINGS_BYTES_MAX = 1 << 24


class _Cap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cap_below: float | None
    cap_above: float | None


class _Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of one site; a field that is None does nothing.

    scale: the vector's scale.
    ablation: the ablation's scale.
    """

    site: str
    scale: float | None
    projection_cap: _Cap | None
    ablation: float | None
    relative: bool = False


class _Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    model: str
    layers: list[_Layer]


def save_spec(directory: str | os.PathLike[str], model: str, spec: SteeringSpec) -> None:
    """Write a specification and its model's name to a directory. Raises CapflowError when that fails."""
    vectors: dict[str, Vector] = {}
    layers = []
    for site, layer in spec.sites():
        cap, ablation = layer.projection_cap, layer.ablation
        parts = {"vector": layer, "projection_cap": cap, "ablation": ablation}
        vectors |= {f"{site}.{n}": p.vector for n, p in parts.items() if p is not None and p.vector is not None}
        layers.append(
            _Layer(
                str(site),
                None if layer.vector is None else layer.scale,
                None if cap is None else _Cap(cap.cap_below, cap.cap_above),
                None if ablation is None else ablation.scale,
                layer.relative,
            )
        )
    settings = msgspec.json.format(msgspec.json.encode(_Settings(_FORMAT, model, layers)), indent=2)
    try:
        make_directory(Path(directory))
        for name, content in ((VECTORS, save_tensors(vectors)), (SETTINGS, settings)):
            write_whole(Path(directory, name), content)
    except OSError as e:
        raise CapflowError(explain(f"save_pretrained {os.fspath(directory)}", got=e.strerror or str(e))) from e


def load_spec(directory: str | os.PathLike[str]) -> tuple[str, SteeringSpec]:
    """Return the model's name and the specification of `save_spec`. Raises UsageError for any other directory."""
    where = os.fspath(directory)
    settings_file, vectors_file = Path(directory, SETTINGS), Path(directory, VECTORS)
    if not settings_file.is_file() or not vectors_file.is_file():
        expected = f"a directory with {SETTINGS} and {VECTORS}"
        raise UsageError(explain(where, got="no saved specification", expected=expected))
    if settings_file.stat().st_size > _SETTINGS_BYTES_MAX:
        raise UsageError(explain(str(settings_file), got="a larger file", expected=f"{_SETTINGS_BYTES_MAX} bytes"))
    try:
        settings = jsontext.decode(settings_file.read_bytes(), _Settings)
        vectors = load_tensors(vectors_file.read_bytes())
    except (msgspec.MsgspecError, SafetensorError, OSError, UnicodeDecodeError) as e:
        raise UsageError(explain(where, got=str(e), expected="files of save_pretrained")) from e
    if settings.format != _FORMAT:
        raise UsageError(explain(f"{settings_file}: format", got=settings.format, expected=str(_FORMAT)))
    layers: dict[int | Site, LayerSteeringSpec] = {}
    wanted: set[str] = set()

    def take(name: str) -> Vector:
        wanted.add(name)
        if name not in vectors:
            raise UsageError(explain(f"{vectors_file}: {name}", got="no such tensor", expected="[hidden_size]"))
        return np.asarray(vectors[name], np.float32)

    for layer in settings.layers:
        site = Site.parse(layer.site)
        if site in layers:
            raise UsageError(explain(f"{settings_file}: {site}", got="the site twice", expected="each site once"))
        cap = layer.projection_cap
        layers[site] = LayerSteeringSpec(
            None if layer.scale is None else take(f"{site}.vector"),
            1.0 if layer.scale is None else layer.scale,
            None if cap is None else ProjectionCapSpec(take(f"{site}.projection_cap"), cap.cap_below, cap.cap_above),
            None if layer.ablation is None else AblationSpec(take(f"{site}.ablation"), layer.ablation),
            layer.relative,
        )
    if set(vectors) != wanted:
        unknown = ", ".join(sorted(set(vectors) - wanted))
        raise UsageError(explain(f"{vectors_file}: unknown tensors", got=unknown, expected=f"those of {SETTINGS}"))
    return settings.model, SteeringSpec(layers)
