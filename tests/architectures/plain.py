"""Architectures that Transformers cannot check on a CPU, against plain forward hooks in vLLM itself.

vLLM runs without capflow, eager, in the model's own dtype, one prompt at a time; hooks on modules that are named here
keep what they are given and return. capflow captures the same prompts, and every row must have the same bits.
"""

import contextlib
import tempfile
import time

import numpy as np

TYPES = ("minicpmv4_6", "minicpmv4_7", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""On a CPU, vLLM runs their linear attention only in bfloat16, which is too coarse to compare with Transformers."""

DTYPE = "bfloat16"
_ATTENTION = ("linear_attn", "self_attn")


def check(model_type, hub, root, lengths, tokens, hooks):
    """Return the result of one architecture, in the form of `run.check`, with the share of wrong bits as errors.

    lengths: of the prompts.
    tokens: the length of the answers.
    hooks: all hooks, in order.
    """
    import capflow
    from capflow_engine.compat import model as compat_model
    from tests.architectures import table as architectures
    from tests.kit import engines

    arguments = {"dtype": DTYPE, "max_num_batched_tokens": 64}
    if model_type in architectures.MULTIMODAL:
        arguments["language_model_only"] = True
    prompts = engines.prompts(lengths, seed=3)
    with tempfile.TemporaryDirectory() as directory:
        model = architectures.make(model_type, directory, DTYPE)
        count = model.config.get_text_config().num_hidden_layers
        with engines.engine(directory, capflow_on=False, **arguments) as llm:
            loaded = llm.llm_engine.model_executor.driver_worker.worker.get_model()
            references = [_rows(llm, loaded, count, prompt, tokens) for prompt in prompts]
        with engines.engine(directory, hub=hub, sites=["*:*"], **arguments) as llm:
            sites = llm.capflow_model.sites
            wanted = {hook: "all" for hook in hooks if any(site.hook == hook for site in sites)}
            name = f"{model_type}-{time.time_ns()}"
            for number, prompt in enumerate(prompts):
                params = capflow.sampling_params(
                    id=f"{name}-{number}", capture={"hooks": wanted}, max_tokens=tokens, **engines.GREEDY
                )
                (output,) = llm.generate([prompt], params, use_tqdm=False)
                assert list(output.outputs[0].token_ids) == references[number][0], "capflow changed the answer"
            loaded = llm.llm_engine.model_executor.driver_worker.worker.get_model()
            missing = {}
            for _, layer in compat_model.decoder_layers(loaded, count):
                missing |= compat_model.structure_of(layer, llm.llm_engine.model_config.dtype).missing
    data = capflow.open(root)
    errors, unproved = {}, set()
    for site in sites:
        for number, (_, reference) in enumerate(references):
            if tuple(site) not in reference:
                unproved.add(site.hook)
                continue
            rows = np.asarray(data[f"{name}-{number}"][tuple(site)].rows)
            wrong = _wrong_bits(rows.reshape(len(rows), -1).view(np.uint16), reference[tuple(site)])
            errors[site.hook] = max(errors.get(site.hook, 0.0), wrong)
    return {
        "architecture": type(loaded).__name__, "missing": missing, "errors": errors, "unproved": sorted(unproved),
        "sites": {hook: sum(site.hook == hook for site in sites) for hook in hooks}, "layers": count, "plain": True,
    }  # fmt: skip


def _wrong_bits(rows, reference):
    """Return the share of the numbers that are not the reference's."""
    return 1.0 if rows.shape != reference.shape else float((rows != reference).mean())


def _rows(llm, model, count, prompt, tokens):
    """Return the answer to a prompt, and what plain hooks see at each site, `{(layer, hook): uint16 [tokens, width]}`.

    model: vLLM's, loaded.
    count: the number of its layers.
    """
    from vllm import SamplingParams

    from tests.kit import engines

    seen = {}
    with contextlib.ExitStack() as stack:
        for number, layer in enumerate(_layers(model, count)):
            _watch(stack, seen, number, layer)
        norm = next(m for name, m in model.named_modules() if name.endswith("model.norm"))
        keep = _keeper(seen, count - 1, "final")
        stack.callback(norm.register_forward_hook(lambda m, a, output: keep(_first(output))).remove)
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=tokens, **engines.GREEDY), use_tqdm=False)
    return list(output.outputs[0].token_ids), {site: np.concatenate(parts) for site, parts in seen.items()}


def _layers(model, count):
    from torch import nn

    (layers,) = (
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and name.endswith("layers") and "vis" not in name
    )
    return layers


def _watch(stack, seen, number, layer):
    """Keep what the modules of a layer are given and return. The stream comes as one tensor, or as two."""

    def given(hook):
        keep = _keeper(seen, number, hook)

        def take(module, args, kwargs):
            values = [v for v in (*args, kwargs.get("hidden_states"), kwargs.get("residual")) if _is_stream(v)]
            keep(values[0] if len(values) == 1 else values[0] + values[1])

        return take

    def returned(hook, parts=1):
        keep = _keeper(seen, number, hook)

        def take(module, args, output):
            values = output[:parts] if isinstance(output, tuple) else (output,)
            keep(values[0] if len(values) == 1 else values[0] + values[1])

        return take

    attention = next(getattr(layer, name) for name in _ATTENTION if hasattr(layer, name))
    _watch_inside(stack, seen, number, attention, layer.mlp)
    for handle in (
        layer.register_forward_pre_hook(given("pre_attn"), with_kwargs=True),
        layer.input_layernorm.register_forward_hook(returned("attn_in")),
        attention.register_forward_hook(returned("attn_out")),
        layer.post_attention_layernorm.register_forward_pre_hook(given("post_attn"), with_kwargs=True),
        layer.post_attention_layernorm.register_forward_hook(returned("mlp_in")),
        layer.mlp.register_forward_hook(returned("mlp_out")),
        layer.register_forward_hook(returned("post_block", parts=2)),
    ):
        stack.callback(handle.remove)


def _watch_inside(stack, seen, number, attention, mlp):
    """Keep what attention's core, both last projections and the experts' gate are given or return."""

    def given(*hooks):
        keeps = [_keeper(seen, number, hook) for hook in hooks]

        def take(module, args):
            for keep, value in zip(keeps, args, strict=False):
                keep(value)

        return take

    if hasattr(attention, "attn"):  # linear attention has no such core
        stack.callback(attention.attn.register_forward_pre_hook(given("q", "k", "v")).remove)
        stack.callback(attention.o_proj.register_forward_pre_hook(given("heads")).remove)
    if hasattr(mlp, "down_proj"):
        stack.callback(mlp.down_proj.register_forward_pre_hook(given("neurons")).remove)
    if hasattr(mlp, "gate"):
        keep = _keeper(seen, number, "router")
        stack.callback(mlp.gate.register_forward_hook(lambda m, a, output: keep(_first(output))).remove)


def _is_stream(value):
    """Return whether a value is the stream or half of it: positions are whole numbers."""
    return value is not None and getattr(value, "is_floating_point", lambda: False)()


def _keeper(seen, number, hook):
    import torch

    def keep(value):
        rows = value.detach().bfloat16().flatten(1).contiguous()
        seen.setdefault((number, hook), []).append(rows.view(torch.uint16).numpy().copy())

    return keep


def _first(output):
    return output[0] if isinstance(output, tuple) else output
