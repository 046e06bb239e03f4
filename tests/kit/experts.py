"""The experts of Transformers' and vLLM's models: Mixtral with steered logits, and what routers of both choose."""

import contextlib
from unittest import mock

import numpy as np
import torch

from capflow.capture.site import Site
from tests.kit.steered import SteeredReference


class ExpertReference(SteeredReference):
    """The reference of a model with experts; `router` is a hook of it, `neurons` none."""

    @contextlib.contextmanager
    def _attending(self, steer):
        linear = torch.nn.functional.linear
        of = {id(layer.mlp.gate.weight): n for n, layer in enumerate(self.layers)}

        def steered(value, weight, bias=None):
            result = linear(value, weight, bias)
            number = of.get(id(weight))
            if number is not None:
                steer(Site(number, "router"), result.view(1, -1, result.shape[-1]))
            return result

        torch.nn.functional.linear = steered
        try:
            with super()._attending(steer):
                yield
        finally:
            torch.nn.functional.linear = linear


def by_weight(ids, weights):
    """Return experts and their weights, `[tokens, top_k]`, by weight, the largest first."""
    ids, weights = (np.asarray(each.detach().cpu()) for each in (ids, weights))
    order = np.argsort(-weights, axis=1, kind="stable")
    return np.take_along_axis(ids.astype(np.int64), order, 1), np.take_along_axis(weights, order, 1)


@contextlib.contextmanager
def taken(layers):
    """Yield what the experts of layers of Transformers are given while a block runs, `{layer: [(ids, weights)]}`."""
    seen, hooks = {}, []

    def given(number, module, args, kwargs):
        *_, ids, weights = [*args, *kwargs.values()]
        seen.setdefault(number, []).append(by_weight(ids, weights))

    def returned(number, module, args, output):  # of Llama 4, whose weights multiply the experts' input
        weights, ids = output[0].topk(module.top_k, dim=1)
        seen.setdefault(number, []).append(by_weight(ids, weights))

    for number, layer in enumerate(layers):
        for module in layer.modules():
            if type(module).__name__ == "Llama4Router":
                hooks.append(module.register_forward_hook(lambda *args, n=number: returned(n, *args)))
            elif type(module).__name__.endswith("Experts") and "Llama4" not in type(module).__name__:
                hook = module.register_forward_pre_hook(lambda *args, n=number: given(n, *args), with_kwargs=True)
                hooks.append(hook)
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def routed(llm):
    """Yield what routers of an engine in this process choose in a block, `{layer: [(logits, ids, weights)]}`."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    from capflow_engine.compat.model import decoder_layers

    model = llm.llm_engine.model_executor.driver_worker.worker.get_model()
    seen = {}
    with contextlib.ExitStack() as stack:
        for number, layer in decoder_layers(model, llm.capflow_model.num_layers):
            for runner in (module for module in layer.modules() if isinstance(module, MoERunner)):
                whole = runner.router.select_experts

                def select(*args, n=number, whole=whole, **kwargs):
                    weights, ids = whole(*args, **kwargs)
                    logits = kwargs["router_logits"].detach().cpu()
                    rows = logits.float().numpy().copy()
                    seen.setdefault(n, []).append((rows, *by_weight(ids.clone(), weights.clone())))
                    return weights, ids

                stack.enter_context(mock.patch.object(runner.router, "select_experts", select))
        yield seen
