"""What Transformers computes inside attention and the MLP: the references of `q`, `k`, `v`, `heads` and others.

Modules are found by Transformers' names. Queries, keys and values are what its attention interface is given.
"""

from unittest import mock

import torch
from torch import nn
from transformers.modeling_utils import AttentionInterface

_OUTPUT = ("o_proj", "out_proj", "dense", "c_proj", "dense_layer", "wo")
"""The names of the projection after attention."""
_DOWN = ("down_proj", "c_proj", "dense_4h_to_h", "fc2", "fc_out", "output_linear", "w2", "proj_2")
"""The names of the projection that ends an MLP."""
_GATE = ("gate", "router", "router.layer")
"""The names of what makes the logits of experts."""
_MLP = ("mlp", "feed_forward", "block_sparse_moe", "ffn", "moe", "")
"""The names of the MLP; some layers are their own."""

WITHOUT_REFERENCE = dict.fromkeys(("bloom", "falcon", "gptj", "codegen"), ("q", "k", "v"))
"""The hooks that cannot be compared, by model type: this attention does not use Transformers' interface."""


SCALED = ("blip-2", "opt")
"""Transformers multiplies these queries by attention's scale; here the product is undone, as vLLM scales later."""

EVENS_FIRST = ("llama4", "llama4_text")
"""vLLM changes the order of these queries' and keys' dimensions as it loads weights: the even ones first."""


def watch(stack, seen, number, layer, mixers, model_type):
    """Keep what a layer computes inside, by layer and hook, while it runs.

    stack: ends it.
    seen: gets the rows, `{(layer, hook): [tokens, width]}`.
    mixers: the layer's modules that mix tokens.
    """
    mixers = [each for each in mixers if "attention" in type(each).__name__.lower()] or mixers
    if len(mixers) == 1:
        if output := _first(mixers[0], _OUTPUT):
            _given(stack, seen, (number, "heads"), output)
        _queries(stack, seen, number, mixers[0], model_type)
    for name in _MLP:
        mlp = getattr(layer, name, None) if name else layer
        if mlp is None:
            continue
        gate = _first(mlp, _GATE)
        down = _first(mlp, _DOWN)
        if gate is not None and hasattr(mlp, "experts"):
            _logits(stack, seen, (number, "router"), gate)
        elif down is not None:
            _given(stack, seen, (number, "neurons"), down)
        return


def _first(module, names):
    """Return the first submodule of some names that there is."""
    modules = dict(module.named_modules())
    return next((modules[name] for name in names if name in modules), None)


def _keep(seen, site, rows):
    seen[site] = rows.detach().float().numpy().copy()


def _given(stack, seen, site, module):
    """Keep what a module is given."""

    def given(module, args):
        _keep(seen, site, args[0].reshape(-1, args[0].shape[-1]))

    stack.callback(module.register_forward_pre_hook(given).remove)


def _logits(stack, seen, site, gate):
    """Keep the product of what a gate is given and its weight: gates return probabilities, choices and more."""

    def given(module, args):
        linear = module if isinstance(getattr(module, "weight", None), torch.Tensor) else _linear(module)
        rows = args[0].reshape(-1, args[0].shape[-1]).float()
        bias = getattr(linear, "bias", None)
        _keep(seen, site, nn.functional.linear(rows, linear.weight, bias))

    stack.callback(gate.register_forward_pre_hook(given).remove)


def _linear(module):
    return next(each for each in module.modules() if isinstance(each, nn.Linear))


def _queries(stack, seen, number, mixer, model_type):
    """Keep the queries, keys and values that Transformers' attention function is given, after their rotation."""
    whole = AttentionInterface.get_interface
    inside = set(mixer.modules())

    def get_interface(interface, *args, **kwargs):
        function = whole(interface, *args, **kwargs)

        def attend(module, query, key, value, *rest, **options):
            if module in inside:
                for hook, heads in zip("qkv", (query, key, value), strict=True):
                    _keep(seen, (number, hook), _as_in_vllm(hook, heads[0].transpose(0, 1), model_type).flatten(1))
            return function(module, query, key, value, *rest, **options)

        return attend

    stack.enter_context(mock.patch.object(AttentionInterface, "get_interface", get_interface))


def _as_in_vllm(hook, heads, model_type):
    """Return queries, keys or values, `[tokens, heads, dim]`, in vLLM's scale and order."""
    if hook == "q" and model_type in SCALED:
        heads = heads * heads.shape[-1] ** 0.5
    if hook != "v" and model_type in EVENS_FIRST:
        heads = torch.cat((heads[..., ::2], heads[..., 1::2]), dim=-1)
    return heads
