"""Reads lenses that other tools publish: those of `tuned-lens`, and of Anthropic's `jacobian-lens`.

`tuned-lens` writes a directory: `config.json` with the model and its sizes, and `params.pt` with `N.weight`
`[hidden_size, hidden_size]` and `N.bias` `[hidden_size]`. Translator N reads the stream that enters layer N, which is
`pre_attn:N`; it gives `h + weight · h + bias` (Belrose et al. 2023, arXiv:2303.08112).

`jacobian-lens` writes a file: `J`, with the matrix of each layer, `n_prompts`, `d_model` and `source_layers`. Matrix N
reads the stream that leaves layer N, which is `post_block:N`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from capflow.capture.site import Site
from capflow.errors import UsageError, explain
from capflow.lenses.model_files import read_json
from capflow.lenses.origin import LensOrigin
from capflow.lenses.unembedding import Unembedding

Tensors = dict[tuple[Site, str], npt.NDArray[Any]]
"""Translators by site, and `weight` or `bias`."""

# As NumPy prints a large matrix, it shows so many rows and columns at each end.
_EDGE = 3
_SUMMARISED = 40


class TunedConfig(msgspec.Struct, frozen=True):
    """The `config.json` of a tuned lens; other fields are not read."""

    d_model: int
    num_hidden_layers: int
    base_model_name_or_path: str = ""
    base_model_revision: str | None = None
    bias: bool = True
    unembed_hash: str | None = None
    lens_type: str = "linear_tuned_lens"


def read_tuned_config(directory: Path) -> TunedConfig:
    """Return the configuration of a tuned lens. Raises UsageError for a directory without one, or of another kind."""
    path = directory / "config.json"
    try:
        config = msgspec.json.decode(read_json(path), type=TunedConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise UsageError(explain(str(path), got=str(e), expected="the configuration of a tuned lens")) from e
    if config.lens_type != "linear_tuned_lens":
        raise UsageError(explain(f"{path}: lens_type", got=config.lens_type, expected="linear_tuned_lens"))
    return config


def read_tuned(
    directory: Path, model: str, unembedding: Unembedding, *, other_weights: bool
) -> tuple[LensOrigin, Tensors]:
    """Return a tuned lens for a model.

    other_weights: accept a lens of another unembedding.

    Raises UsageError if the files are no tuned lens, or one of another model.
    """
    config = read_tuned_config(directory)
    where = str(directory)
    _check_sizes(where, unembedding, config.num_hidden_layers, config.d_model)
    own = unembedding_hash(unembedding)
    if config.unembed_hash and config.unembed_hash != own and not other_weights:
        got = f"{config.unembed_hash[:12]}…, the unembedding of {config.base_model_name_or_path}"
        do = "--other-weights accepts it"
        raise UsageError(explain(f"{where}: unembed_hash", got=got, expected=f"{own[:12]}…, as {model}", do=do))
    state = _load(directory / "params.pt")
    size, parts = config.d_model, ("weight", "bias") if config.bias else ("weight",)
    names = {f"{layer}.{part}": (layer, part) for layer in range(config.num_hidden_layers) for part in parts}
    if set(state) != set(names):
        got = ", ".join(sorted(map(str, state))[:6]) or "no tensors"
        expected = f"{', '.join(list(names)[:2])} … for {config.num_hidden_layers} layers"
        raise UsageError(explain(f"{where}/params.pt", got=got, expected=expected))
    tensors: Tensors = {}
    for name, (layer, part) in names.items():
        shape = [size, size] if part == "weight" else [size]
        tensors[Site(layer, "pre_attn"), part] = _array(f"{where}/params.pt: {name}", state[name], shape)
    revision = config.base_model_revision or ""
    source = config.base_model_name_or_path or where
    proven = config.unembed_hash == own
    return _origin("tuned", model, unembedding, proven=proven, source=source, revision=revision), tensors


def read_jacobian(path: Path, model: str, unembedding: Unembedding) -> tuple[LensOrigin, Tensors]:
    """Return a Jacobian lens for a model. Raises UsageError if the file is none, or one of another model."""
    state = _load(path)
    matrices = state.get("J")
    if not isinstance(matrices, Mapping) or not matrices:
        got = ", ".join(sorted(map(str, state))[:6]) or "nothing"
        raise UsageError(explain(str(path), got=got, expected="J, the matrix of each layer"))
    size = unembedding.hidden_size
    _check_sizes(str(path), unembedding, None, state.get("d_model", size))
    tensors: Tensors = {}
    for layer, matrix in matrices.items():
        if type(layer) is not int or not 0 <= layer < unembedding.num_layers:
            expected = f"0..{unembedding.num_layers - 1}, as {model}"
            raise UsageError(explain(f"{path}: layer", got=layer, expected=expected))
        tensors[Site(layer, "post_block"), "weight"] = _array(f"{path}: J[{layer}]", matrix, [size, size])
    texts = state.get("n_prompts", 0)
    texts = texts if type(texts) is int else 0
    return _origin("jacobian", model, unembedding, proven=False, source=path.name, texts=texts), tensors


def unembedding_hash(unembedding: Unembedding) -> str:
    """Return the hash by which `tuned-lens` names an unembedding: of the matrix as NumPy prints it.

    NumPy shows the corners of a large matrix, so only these are read.
    """
    count, width = unembedding.vocabulary_size, unembedding.hidden_size
    if count * width <= 1000:
        corners = unembedding.matrix_rows(0, count)
    else:
        ends = [unembedding.matrix_rows(0, min(_EDGE, count)), unembedding.matrix_rows(max(0, count - _EDGE), count)]
        corners = np.zeros((_SUMMARISED, _SUMMARISED), np.float32)
        for rows, at in zip(ends, (slice(0, _EDGE), slice(-_EDGE, None)), strict=True):
            corners[at, :_EDGE], corners[at, -_EDGE:] = rows[:, :_EDGE], rows[:, -_EDGE:]
    return hashlib.sha256(np.array_str(corners, precision=1).encode()).hexdigest()


def _origin(kind: Any, model: str, unembedding: Unembedding, *, proven: bool, **fields: Any) -> LensOrigin:
    """Return the origin of an imported lens.

    proven: whether the file says of which unembedding it is. Otherwise no reader takes its weights for known.
    """
    return LensOrigin(
        kind,
        num_layers=unembedding.num_layers,
        hidden_size=unembedding.hidden_size,
        vocabulary_size=unembedding.vocabulary_size,
        model=model,
        fingerprint=unembedding.fingerprint if proven else "",
        **fields,
    )


def _check_sizes(where: str, unembedding: Unembedding, layers: int | None, width: Any) -> None:
    for field, got, expected in (
        ("layers", layers, unembedding.num_layers),
        ("width", width, unembedding.hidden_size),
    ):
        if got is not None and got != expected:
            raise UsageError(explain(f"{where}: {field}", got=got, expected=f"{expected}, as the model"))


def _load(path: Path) -> Mapping[Any, Any]:
    """Return the content of a file of plain tensors. Raises UsageError for anything else."""
    if not path.is_file():
        raise UsageError(explain(str(path), got="no such file", expected="a lens"))
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    # torch raises errors of many kinds for a damaged file.
    except Exception as e:
        got = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
        raise UsageError(explain(str(path), got=got, expected="a whole file of plain tensors")) from e
    if not isinstance(state, Mapping):
        raise UsageError(explain(str(path), got=f"a {type(state).__name__}", expected="tensors by name"))
    return state


def _array(where: str, tensor: Any, shape: list[int]) -> npt.NDArray[np.float32]:
    if not isinstance(tensor, torch.Tensor) or list(tensor.shape) != shape or not tensor.is_floating_point():
        got = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise UsageError(explain(where, got=got, expected=f"numbers of shape {shape}"))
    array: npt.NDArray[np.float32] = tensor.float().numpy()
    return array
