"""LoRA adapters that PEFT writes, and the hidden states of PEFT's own model with one."""

import peft
import torch

from tests.kit.engines import Reference

# One scales its matrices by alpha / rank, and the other one by alpha / sqrt(rank).
KINDS = (
    {"r": 4, "lora_alpha": 8},
    {"r": 8, "lora_alpha": 4, "use_rslora": True},
)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def save_adapter(model, directory, seed):
    """Save a random adapter of every linear layer, of a kind that the seed chooses; return its directory."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=TARGETS, **KINDS[(seed - 1) % len(KINDS)])
    adapted = peft.get_peft_model(Reference(model).model, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, matrix in adapted.named_parameters():
            if ".lora_" in name:
                matrix.copy_(0.1 * torch.randn(matrix.shape, generator=generator))
    adapted.save_pretrained(directory)
    return str(directory)


class AdaptedReference(Reference):
    """PEFT's model with an adapter: each linear layer adds what its two matrices compute; no weight is changed."""

    def __init__(self, model, adapter):
        super().__init__(model)
        self.model = peft.PeftModel.from_pretrained(self.model, adapter).eval()
        assert not any(module.merged for module in self.model.modules() if isinstance(module, peft.tuners.lora.Linear))
