"""LoRA adapters as PEFT writes them, and what Transformers computes with their matrices added to the weights."""

import json
from pathlib import Path

import safetensors.torch
import torch

from tests.kit.engines import Reference

RANK, ALPHA = 4, 8
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PREFIX = "base_model.model."


def save_adapter(model, directory, seed):
    """Save a random adapter of every linear layer; return its directory."""
    generator = torch.Generator().manual_seed(seed)
    matrices = {}
    for name, module in Reference(model).model.named_modules():
        if name.rpartition(".")[2] in TARGETS:
            inner, outer = (RANK, module.in_features), (module.out_features, RANK)
            matrices[f"{_PREFIX}{name}.lora_A.weight"] = 0.1 * torch.randn(inner, generator=generator)
            matrices[f"{_PREFIX}{name}.lora_B.weight"] = 0.1 * torch.randn(outer, generator=generator)
    directory = Path(directory)
    directory.mkdir()
    safetensors.torch.save_file(matrices, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0}
    config |= {"target_modules": list(TARGETS), "bias": "none", "base_model_name_or_path": str(model)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return str(directory)


class AdaptedReference(Reference):
    """Transformers with `W + ALPHA / RANK * B @ A` in place of each weight `W`: PEFT's definition of an adapter."""

    def __init__(self, model, adapter):
        super().__init__(model)
        matrices = safetensors.torch.load_file(Path(adapter) / "adapter_model.safetensors")
        weights = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, inner in matrices.items():
                if ".lora_A." in name:
                    outer = matrices[name.replace(".lora_A.", ".lora_B.")]
                    weight = weights[name.removeprefix(_PREFIX).replace(".lora_A.", ".")]
                    weight.add_(ALPHA / RANK * outer @ inner)
