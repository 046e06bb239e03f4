"""Transformers with hooks at every hook point of capflow, to keep the rows of a prompt, or to replace some of them."""

import contextlib
import itertools
import sys

import torch

from capflow.capture.site import HOOKS, STREAM_HOOKS


def placed(layer, hook):
    """Return the module of a layer that a hook point is at, and whether it lies before that; None without a module."""
    return {
        "pre_attn": (layer, True),
        "attn_in": (layer.input_layernorm, False),
        "attn_out": (layer.self_attn, False),
        "post_attn": (layer.post_attention_layernorm, True),
        "mlp_in": (layer.post_attention_layernorm, False),
        "mlp_out": (layer.mlp, False),
        "post_block": (layer, False),
        "heads": (layer.self_attn.o_proj, True),
        "neurons": (getattr(layer.mlp, "down_proj", None), True),
    }.get(hook, (None, False))


class Hooked:
    """A Llama-like model of Transformers, with eager attention. Hook points without a place in it have no rows."""

    def __init__(self, model, hooks=STREAM_HOOKS):
        self.model, self.layers, self.hooks = model, model.model.layers, hooks

    def run(self, tokens, *patches):
        """Return the logits of the next token, and the rows `[tokens, width]` by layer and hook.

        patches: each a layer, a hook, a position or a list, the new rows, and optionally the slice of a row they fill.
        """
        rows = {}

        def visit(place, tensor):
            rows[place] = tensor[0].clone()
            for layer, hook, position, row, *part in patches:
                if place == (layer, hook):
                    tensor[0, position, part[0] if part else slice(None)] = row

        with contextlib.ExitStack() as stack:
            for number, hook in itertools.product(range(len(self.layers)), HOOKS):
                at, (module, before) = (number, hook), placed(self.layers[number], hook)
                if hook == "final":
                    at, module = (len(self.layers) - 1, hook), self.model.model.norm
                if hook not in self.hooks or module is None:
                    continue
                if before:
                    handle = module.register_forward_pre_hook(lambda _, args, at=at: visit(at, args[0]))
                else:
                    handle = module.register_forward_hook(
                        lambda _, __, output, at=at: visit(at, output[0] if isinstance(output, tuple) else output)
                    )
                stack.callback(handle.remove)
            stack.enter_context(self._attention(visit))
            stack.enter_context(self._routers(visit))
            with torch.no_grad():
                return self.model(torch.tensor([tokens]), use_cache=False).logits[0, -1], rows

    @contextlib.contextmanager
    def _attention(self, visit):
        """Visit queries, keys and values, which eager attention is called with: `[1, heads, tokens, head_dim]`."""
        inside = sys.modules[type(self.layers[0].self_attn).__module__]
        attend = inside.eager_attention_forward

        def visited(module, query, key, value, *args, **kwargs):
            new = []
            for hook, tensor in (("q", query), ("k", key), ("v", value)):
                rows = tensor.transpose(1, 2).flatten(2).clone()
                visit((module.layer_idx, hook), rows)
                new.append(rows.unflatten(2, (tensor.shape[1], -1)).transpose(1, 2))
            return attend(module, *new, *args, **kwargs)

        if not {"q", "k", "v"} & set(self.hooks):
            yield
            return
        inside.eager_attention_forward = visited
        try:
            yield
        finally:
            inside.eager_attention_forward = attend

    @contextlib.contextmanager
    def _routers(self, visit):
        """Visit the logits of experts: the product with the weight of a layer's gate."""
        linear, layers = torch.nn.functional.linear, {}
        if "router" in self.hooks:
            layers = {
                id(gate.weight): number
                for number, layer in enumerate(self.layers)
                if (gate := getattr(layer.mlp, "gate", None)) is not None
            }
        if not layers:
            yield
            return

        def visited(values, weight, bias=None):
            output = linear(values, weight, bias)
            if id(weight) in layers:
                visit((layers[id(weight)], "router"), output[None] if output.dim() == 2 else output)
            return output

        torch.nn.functional.linear = visited
        try:
            yield
        finally:
            torch.nn.functional.linear = linear
