"""A tiny model whose linear layers have 8-bit weights, in the format of compressed-tensors."""

import json
import shutil
from pathlib import Path

import safetensors.torch
import torch


def save_int8(model, directory):
    """Save a copy of a model with int8 weights, one scale a channel, and int8 inputs, one scale a token."""
    directory = Path(shutil.copytree(model, directory))
    weights = {}
    for name, weight in safetensors.torch.load_file(directory / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = weight.abs().amax(1, keepdim=True) / 127
            weights[name] = torch.round(weight / scale).to(torch.int8)
            weights[name.replace("weight", "weight_scale")] = scale
        else:
            weights[name] = weight
    safetensors.torch.save_file(weights, directory / "model.safetensors", {"format": "pt"})
    kind = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**kind, "strategy": "channel", "dynamic": False},
        "input_activations": {**kind, "strategy": "token", "dynamic": True},
    }
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)
