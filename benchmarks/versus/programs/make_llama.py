"""Save a Llama of the demo model's size with random weights, for contenders that cannot run Gemma 3.

python make_llama.py DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(directory: Path) -> None:
    """Write it, unless it is there."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if (directory / "config.json").is_file():
        return
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        vocab_size=262_144,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        # Larger than usual, so that answers depend on every layer.
        initializer_range=0.05,
        bos_token_id=2,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
