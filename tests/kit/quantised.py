"""A tiny model whose linear layers are quantised, in the formats of checkpoints that vLLM runs on a CPU."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch

from tests.kit.engines import Reference

GROUP = 32


class Format(NamedTuple):
    """A format of checkpoints.

    pack: of a weight, the tensors of the checkpoint by name, and the weight that they stand for.
    config: the `quantization_config`.
    dtype: what vLLM computes in.
    rounded: what the format makes of a layer's inputs.
    """

    pack: Callable
    config: dict
    dtype: str = "float16"
    rounded: Callable | None = None


def save_quantised(model, directory, kind):
    """Save a copy of a model in the format that `FORMATS` has under a name."""
    directory = Path(shutil.copytree(model, directory))
    weights = {}
    for name, weight in safetensors.torch.load_file(directory / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors, _ = FORMATS[kind].pack(weight)
            weights |= {name.replace("weight", part): tensor.contiguous() for part, tensor in tensors.items()}
        else:
            weights[name] = weight
    safetensors.torch.save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = FORMATS[kind].config
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


class QuantisedReference(Reference):
    """Transformers with the weights that a quantised copy of a model stands for, in the copy's dtype."""

    def __init__(self, model, kind):
        pack, _, dtype, rounded = FORMATS[kind]
        super().__init__(model, getattr(torch, dtype))
        whole = safetensors.torch.load_file(Path(model) / "model.safetensors")
        for name, module in self.model.named_modules():
            if name.endswith("_proj"):
                module.weight.data = pack(whole[f"{name}.weight"])[1].to(module.weight.dtype)
                if rounded:
                    module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))


def _int8(weight):
    """One scale a row."""
    scale = weight.abs().amax(-1, keepdim=True) / 127
    values = torch.round(weight / scale).to(torch.int8)
    return {"weight": values, "weight_scale": scale}, values * scale


def _fp8(weight):
    """One scale a row."""
    scale = weight.abs().amax(-1, keepdim=True) / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def _symmetric(weight):
    """Return numbers from 1 to 15, of which 8 is zero, and one scale for each group of a row."""
    scales = weight.unflatten(1, (-1, GROUP)).abs().amax(2) / 7
    wide = scales.repeat_interleave(GROUP, 1)
    numbers = torch.round(weight / wide) + 8
    return numbers, scales, (numbers - 8) * wide


def _packed(numbers, order=range(8)):
    """Pack eight 4-bit numbers of a row into each int32; `order` is that of the eight, from the lowest bits."""
    words = sum(numbers[:, place::8].to(torch.int64) << 4 * n for n, place in enumerate(order))
    return torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32)


def _w4a16(weight):
    numbers, scales, meant = _symmetric(weight)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": _packed(numbers), "weight_scale": scales, "weight_shape": shape}, meant


def _gptq(weight):
    """The inputs come first, and GPTQ stores a zero point less one."""
    numbers, scales, meant = _symmetric(weight)
    groups = (torch.arange(weight.shape[1]) // GROUP).to(torch.int32)
    zeros = _packed(torch.full(scales.T.shape, 7))
    return {"qweight": _packed(numbers).T, "scales": scales.T, "qzeros": zeros, "g_idx": groups}, meant


def _awq(weight):
    """The inputs come first, eight outputs share a word in an order of their own, and each group has a zero point."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(2), groups.amax(2)
    scales = (high - low) / 15
    zeros = torch.round(-low / scales).clamp(0, 15)
    wide, zero = scales.repeat_interleave(GROUP, 1), zeros.repeat_interleave(GROUP, 1)
    numbers = (torch.round(weight / wide) + zero).clamp(0, 15)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": _packed(numbers.T, order), "scales": scales.T, "qzeros": _packed(zeros.T, order)}
    return tensors, (numbers - zero) * wide


def _compressed(format_, weights, inputs=None):
    """Return a configuration of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {**weights, "symmetric": True, "dynamic": False}}
    group["input_activations"] = inputs and {**inputs, "strategy": "token", "symmetric": True, "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


_INT8, _FP8 = {"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "float"}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
_FOUR = {"bits": 4, "group_size": GROUP}
FORMATS = {
    "int8": Format(
        _int8,
        _compressed("int-quantized", {**_INT8, "strategy": "channel"}, _INT8),
        "float32",
        lambda inputs: _int8(inputs)[1],
    ),
    "fp8": Format(
        _fp8,
        _compressed("float-quantized", {**_FP8, "strategy": "channel"}, _FP8),
        "float32",
        lambda inputs: _fp8(inputs)[1],
    ),
    "w4a16": Format(_w4a16, _compressed("pack-quantized", _INT4)),
    "gptq": Format(_gptq, {"quant_method": "gptq", "desc_act": False, "sym": True, "lm_head": False, **_FOUR}),
    "awq": Format(_awq, {"quant_method": "awq", "zero_point": True, "version": "gemm", **_FOUR}),
}
