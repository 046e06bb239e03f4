"""Conversion of a SAELens autoencoder to a probe file.

`sae_weights.safetensors` and `cfg.json` lie in one directory, as `SAE.save_inference_model` writes them. The settings
of `cfg.json` that change activations are applied to the tensors or kept in the header, so that a score equals the
activation that `SAE.encode` returns. `apply_b_dec_to_input: false` leaves out `b_dec`. `rescale_acts_by_decoder_norm`
multiplies the encoder's columns by the norms of the decoder's rows. An architecture or a normalisation that
`capflow.probes.kinds` does not compute is refused. https://decoderesearch.github.io/SAELens/
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from capflow import limits
from capflow.capture.site import TRANSFORMER_LENS_NAMES, Site
from capflow.errors import UsageError, explain
from capflow.files import read_regular
from capflow.probes.file import Float32s, ProbeFile
from capflow.text import jsontext

WEIGHTS_NAME = "sae_weights.safetensors"
CONFIG_NAME = "cfg.json"

WITHOUT_GAIN, WITH_GAIN = "whose rows lack the norm's gain", "rows with the norm's gain, as captured"

_ACTIVATIONS = {"standard": "relu", "jumprelu": "jumprelu", "topk": "topk"}
_NONE = {None, "none"}


class _Metadata(msgspec.Struct):
    hook_name: str | None = None
    hook_name_out: str | None = None


class SaelensConfig(msgspec.Struct):
    """The fields of `cfg.json` that matter here.

    Older files have `hook_name` at the top level, and may name another activation under architecture `standard`.
    """

    architecture: str = "standard"
    apply_b_dec_to_input: bool = True
    normalize_activations: str | None = None
    reshape_activations: str | None = None
    rescale_acts_by_decoder_norm: bool = False
    k: int | None = None
    activation_fn_str: str | None = None
    activation_fn: str | None = None
    hook_name: str | None = None
    hook_name_out: str | None = None
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)

    @property
    def hook(self) -> str:
        """The name of the site that is read; empty without one."""
        return self.metadata.hook_name or self.hook_name or ""

    @property
    def hook_out(self) -> str:
        """The name of the site that a transcoder reconstructs; empty without one."""
        return self.metadata.hook_name_out or self.hook_name_out or ""


def read_saelens(
    directory: str | os.PathLike[str], stem: str, *, features: Sequence[int] | None = None, site: Site | None = None
) -> tuple[dict[str, Float32s], dict[str, str]]:
    """Return the tensors and the metadata of a probe file of kind `sae`.

    stem: the beginning of the probes' names.
    features: the recorded features; all by default.
    site: the site of the rows; by default the one in `cfg.json`.

    Raises UsageError.
    """
    where = Path(directory)
    config = read_config(where / CONFIG_NAME)
    activation = _ACTIVATIONS[config.architecture]
    jumping, rescaled = activation == "jumprelu", config.rescale_acts_by_decoder_norm
    file = ProbeFile(where / WEIGHTS_NAME)
    required = ["W_enc", "b_enc", *["threshold"] * jumping, *["W_dec"] * rescaled]
    tensors = file.expect(required, ["b_dec"] if config.apply_b_dec_to_input else [], unread=["b_dec", "W_dec"])
    count = _check_shapes(file, tensors)
    # SAELens applies the jump after a ReLU.
    if jumping:
        tensors["threshold"] = np.maximum(tensors["threshold"], 0)
    if rescaled:
        norms = np.linalg.norm(tensors.pop("W_dec"), axis=1)
        tensors["W_enc"], tensors["b_enc"] = tensors["W_enc"] * norms, tensors["b_enc"] * norms
    wanted = list(range(count)) if features is None else list(features)
    if not wanted or not all(0 <= number < count for number in wanted):
        raise UsageError(
            explain("features", got=", ".join(map(str, wanted)) or "none", expected=f"some of 0..{count - 1}")
        )
    if len(wanted) > limits.PROBES_PER_FILE_MAX:
        do = "say which with --features"
        raise UsageError(explain("features", got=len(wanted), expected=f"at most {limits.PROBES_PER_FILE_MAX}", do=do))
    metadata = {
        "site": str(site or site_named(where / CONFIG_NAME, "hook_name", config.hook)),
        "kind": "sae",
        "activation": activation,
        "names": ",".join(f"{stem}.{number}" for number in wanted),
    }
    # All features decide which are the k highest, so all stay.
    if activation == "topk":
        return tensors, metadata | {"k": str(config.k), "features": ",".join(map(str, wanted))}
    chosen = {
        name: np.ascontiguousarray(tensors[name][..., wanted])
        for name in {"W_enc", "b_enc", "threshold"} & set(tensors)
    }
    return tensors | chosen, metadata


def _check_shapes(file: ProbeFile, tensors: Mapping[str, Float32s]) -> int:
    """Return d_sae; raise UsageError unless the tensors fit each other."""
    encoder = tensors["W_enc"]
    if encoder.ndim != 2 or not encoder.size:
        raise file.wrong("W_enc", f"shape {list(encoder.shape)}", "[d_in, d_sae]")
    width, count = encoder.shape
    file.expect_shapes(tensors, {"b_enc": (count,), "threshold": (count,), "b_dec": (width,), "W_dec": (count, width)})
    return int(count)


def read_config(path: Path, more: Collection[str] = ()) -> SaelensConfig:
    """Return the settings in a `cfg.json`. Raises UsageError for those that change activations in an unknown way.

    more: further architectures that are accepted.
    """
    try:
        config = jsontext.decode(read_regular(path, limits.SIDECAR_BYTES_MAX), SaelensConfig)
    except OSError as e:
        got, expected = e.strerror or str(e), f"the file that SAELens writes beside {WEIGHTS_NAME}"
        raise UsageError(explain(str(path), got=got, expected=expected)) from e
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise UsageError(explain(str(path), got=str(e), expected="what SAELens writes")) from e
    accepted = (*_ACTIVATIONS, *more)
    if config.architecture not in accepted:
        raise _wrong(path, "architecture", config.architecture, f"one of {', '.join(accepted)}")
    for name in ("normalize_activations", "reshape_activations"):
        if (got := getattr(config, name)) not in _NONE:
            do = "fold it into the weights, as SAELens' fold_activation_norm_scaling_factor does, and save again"
            raise _wrong(path, name, got, "none", do)
    if config.architecture == "topk" and config.k is None:
        raise _wrong(path, "k", "nothing", "how many features are active at once")
    for name in ("activation_fn_str", "activation_fn") if config.architecture != "topk" else ():
        if (got := getattr(config, name)) not in {None, "relu"}:
            do = "load it with a newer SAELens and save it again, with its true architecture"
            raise _wrong(path, name, got, f"relu with {config.architecture}", do)
    return config


def site_named(path: Path, field: str, name: str, do: str = "say which with --site", option: str = "--site {}") -> Site:
    """Return the site with a name of TransformerLens; raise UsageError if no site has its rows.

    The rows of `hook_normalized` lack the norm's weight and bias, which those of `attn_in` and `mlp_in` have.

    path, field: where the name stands.
    do: what to do about a name that no site has.
    option: how a user names the site in its place.
    """
    site = Site.of_transformer_lens(name)
    if site is None:
        expected = f"blocks.LAYER.HOOK with HOOK one of {', '.join(TRANSFORMER_LENS_NAMES.values())}"
        raise _wrong(path, field, name or "nothing", expected, do)
    if name.endswith(".hook_normalized"):
        raise _wrong(path, field, f"{name}, {WITHOUT_GAIN}", WITH_GAIN, if_gained(option.format(site)))
    return site


def if_gained(option: str) -> str:
    """Return what to do about an encoder of rows without the norm's gain.

    option: how a user names the site.
    """
    return f"{option} is right only if the encoder expects rows with the gain: divide W_enc's rows by it first"


def _wrong(path: Path, field: str, got: Any, expected: str, do: str = "") -> UsageError:
    return UsageError(explain(f"{path}: {field}", got=got, expected=expected, do=do))
