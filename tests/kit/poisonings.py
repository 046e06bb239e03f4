"""Pairs of requests with one prompt: what the second may read of the blocks that the first computed."""

from tests.kit.engines import prompts
from tests.kit.steered import vector

PROMPT = prompts((100,), seed=5)[0]
ONE = {"post_block": {1: vector(1)}}
OTHER = {"post_block": {1: vector(2)}}
ABLATION = {"post_block": {1: {"vector": vector(1), "value": 0}}}
BOUND = {"post_block": {1: {"vector": vector(2), "max": 0.5}}}

POISONINGS = {
    "steered, then plain": ({"steering_vectors": ONE}, {}, 0),
    "plain, then steered": ({}, {"steering_vectors": ONE}, 0),
    "one vector, then another": ({"steering_vectors": ONE}, {"steering_vectors": OTHER}, 0),
    "a vector, then a clamp of it": ({"steering_vectors": ONE}, {"steering_clamps": ABLATION}, 0),
    "everywhere, then the prompt alone": ({"steering_vectors": ONE}, {"prefill_steering_vectors": ONE}, 96),
    "decode alone, then plain": ({"decode_steering_vectors": ONE}, {}, 96),
    "plain, then decode alone": ({}, {"decode_steering_vectors": ONE}, 96),
    "equal vectors, in different forms": (
        {"steering_vectors": ONE},
        {"steering_vectors": {"post_block": {1: {"vector": (vector(1) / 2).tolist(), "scale": 2.0}}}},
        96,
    ),
    "a patch, then plain": (
        {"steering_patches": {"post_block": {1: {"positions": [40], "vector": vector(3)}}}}, {}, 32,
    ),
    "plain, then a patch": (
        {}, {"steering_patches": {"post_block": {1: {"positions": [40], "vector": vector(3)}}}}, 32,
    ),
}  # fmt: skip
"""The fields of the first request and of the second, and how many tokens of the prompt the second may read."""
