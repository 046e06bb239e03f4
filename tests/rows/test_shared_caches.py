"""Layers that read keys and values of another layer, against Transformers: their hooks, and steering."""

import sys

import numpy as np
import pytest
import torch
import transformers

import capflow
from capflow.capture.site import Site
from capflow.errors import UsageError
from tests.kit.engines import GREEDY, SHAPE, engine, prompts, relative_error
from tests.kit.rows import FLOAT32_BOUND

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300), pytest.mark.long]

SLIDING, FULL = "sliding_attention", "full_attention"
READS = {4: 2, 5: 3}
"""The layer whose cache a layer reads: the last one of its kind that has a cache."""
CHANGED = np.random.default_rng(4).standard_normal((2, 32)).astype(np.float32)


CONFIG = SHAPE | {
    "num_hidden_layers": 6,
    "tie_word_embeddings": True,
    "head_dim": 32,
    "global_head_dim": 32,
    "sliding_window": 64,
    "layer_types": [SLIDING, FULL] * 3,
    "num_kv_shared_layers": len(READS),
}
PER_LAYER = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": SHAPE["vocab_size"]}


def save(directory, config):
    """Save a random model; return it."""
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.15 if "emb" in name else 0.09)
            elif name.endswith("q_norm.weight"):
                weight.mul_(0.3)
    model.save_pretrained(directory)
    return model


def rows_of(model, tokens, monkeypatch, changes):
    """Return what Transformers computes at each `post_block`, `[layers, tokens, hidden]`.

    changes: by layer, a function that changes keys and values, `[1, heads, tokens, head_dim]`.
    """
    module = sys.modules[type(model).__module__]
    attend = module.eager_attention_forward

    def changed(attention, query, key, value, *rest, **more):
        change = changes.get(attention.layer_idx, lambda *both: both)
        return attend(attention, query, *change(key.clone(), value.clone()), *rest, **more)

    seen = []
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(module, "eager_attention_forward", changed)
        hooks = [
            layer.register_forward_hook(lambda m, a, output: seen.append(output[0].numpy().copy()))
            for layer in model.model.layers
        ]
        model(torch.tensor([tokens]), use_cache=False)
        for hook in hooks:
            hook.remove()
    return np.stack(seen).reshape(len(seen), len(tokens), -1)


def moved(key, value):
    return key, value + torch.from_numpy(CHANGED[0])


def patched(key, value):
    key[0, 0, 2] = torch.from_numpy(CHANGED[1])
    return key, value


@pytest.mark.parametrize(
    ("config", "own_class"),
    [
        (transformers.Gemma4TextConfig(**CONFIG, **PER_LAYER), True),
        (transformers.Gemma4UnifiedTextConfig(**CONFIG), False),
    ],
    ids=["own class", "backend"],
)
def test_all_layers_that_read_a_cache_see_what_steers_it(tmp_path, monkeypatch, config, own_class):
    """On vLLM's Transformers backend, a layer that reads a cache has no hooks inside attention and the MLP."""
    model, root = save(tmp_path / "model", config), tmp_path / "rows"
    fields = {
        "steering_vectors": {"v": {2: CHANGED[0].tolist()}},
        "steering_patches": {"k": {3: {"positions": [2], "vector": CHANGED[1].tolist()}}},
    }
    consumers = [f"filesystem:root={root},capture=requests"]
    with engine(str(tmp_path / "model"), sites=["*:*"], consumers=consumers, in_process=own_class) as llm:
        assert {site.layer for site in llm.capflow_model.sites if site.hook in "kv"} == {0, 1, 2, 3}
        assert {site.layer for site in llm.capflow_model.sites if site.hook == "q"} == set(range(6 if own_class else 4))
        params = [
            capflow.sampling_params(id=name, capture={"hooks": {"post_block": "all"}}, max_tokens=4, **GREEDY, **more)
            for name, more in (("plain", {}), ("steered", fields))
        ]
        outputs = llm.generate([prompts((70,))[0]] * 2, params, use_tqdm=False)
    own = {2: moved, 3: patched}
    everywhere = own | {reader: own[read] for reader, read in READS.items()}
    for output, name, changes in zip(outputs, ("plain", "steered"), ({}, everywhere), strict=True):
        tokens = [*output.prompt_token_ids, *list(output.outputs[0].token_ids)[:-1]]
        expected = rows_of(model, tokens, monkeypatch, changes)
        capture = capflow.open(root)[name]
        for layer in range(6):
            assert relative_error(capture[Site(layer, "post_block")].rows, expected[layer]) < FLOAT32_BOUND, layer
    # What steers a cache in its own layer alone gives other rows, from the first layer on that reads it.
    alone = rows_of(model, tokens, monkeypatch, own)
    differ = [relative_error(alone[layer], expected[layer]) > 1e-3 for layer in range(6)]
    assert differ == [False] * 4 + [True] * 2


def test_a_layer_without_keys_refuses_a_tap_of_them_by_name(tmp_path):
    save(tmp_path, transformers.Gemma4TextConfig(**CONFIG, **PER_LAYER))
    reason = "attention reads the keys and values of another layer"
    with pytest.raises(UsageError, match=f"k:4.*{reason}"), engine(str(tmp_path), sites=["k:4"]):
        raise AssertionError("it started")
