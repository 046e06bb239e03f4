"""The decoder layers of vLLM's models: those of a loaded model, and those that a configuration describes.

Verified with vLLM 0.32.0.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from capflow.capture.attention import AttentionForm
from capflow.capture.model import ModelInfo
from capflow.capture.router import RouterForm
from capflow.capture.site import HOOKS, Site
from capflow.errors import CapflowError, UsageError, explain
from capflow_engine.compat import child, connectors, launch
from capflow_engine.compat import engine as compat
from capflow_engine.layer.inside import ATTENTION_HOOKS
from capflow_engine.layer.parts import Core, Experts, Linear, Mixer, Part
from capflow_engine.layer.passage import final_place, returned_places
from capflow_engine.layer.structure import HookPlace, Structure, UnclearError, large_on_meta, resolve
from capflow_engine.settings import Tapped, taps_info


def check_model(engine_args: Any, patterns: Iterable[str], steered: Sequence[str] | None = None) -> Tapped:
    """Return the tapped sites of a model, from its configuration alone, before anything starts.

    Raises UsageError for a model that is not found or has an unknown structure, for sites that it lacks, and for
    arguments that `compat.check_arguments` or `connectors.check_arguments` refuses.

    patterns: the sites to tap, as in `--sites`.
    steered: those of them that can be steered, as in `--steer-sites`.
    """
    compat.check_arguments(engine_args)
    connectors.check_arguments(engine_args)
    return Tapped.of(patterns, structures(engine_args), steered)


def tapped_by(model: str, arguments: Mapping[str, Any], patterns: Iterable[str]) -> Tapped:
    """Return the tapped sites of a model that `capflow.LLM` would start with these arguments, as `check_model` does.

    model: a directory, or a name of the hub.
    arguments: those of `capflow.LLM`; its own are left out.
    patterns: the sites to tap, as in `--sites`.
    """
    from vllm.engine.arg_utils import EngineArgs

    names = compat.argument_names()
    with explaining(model):
        engine_args = EngineArgs(model=model, **{name: each for name, each in arguments.items() if name in names})
    return check_model(engine_args, patterns)


def info_of(engine_args: Any, tapped: Tapped) -> ModelInfo:
    """Return the description of a model that has not started, from its configuration alone; the dtype is left empty.

    Raises UsageError if vLLM refuses the configuration.
    """
    with explaining(engine_args.model):
        width = engine_args.create_model_config().get_hidden_size()
    taps = taps_info(tapped, engine_args.tensor_parallel_size)
    return ModelInfo(engine_args.model, tapped.num_layers, width, "", **taps)


def structures(engine_args: Any) -> tuple[Structure, ...]:
    """Return the structure of each decoder layer of a model, from its configuration alone.

    A child process makes the model without weights, because that changes classes and caches of vLLM and Transformers.

    Raises UsageError for a model that is not found or has an unknown structure, and CapflowError if the child fails.
    """
    work = functools.partial(_structures_alone, engine_args)
    return child.result_of(work, f"model {engine_args.model}: reading its structure")


def _structures_alone(engine_args: Any, report: child.Report) -> tuple[Structure, ...]:
    import torch

    logging.disable(logging.WARNING)  # the engine logs the same again
    for name in [name for name in os.environ if name.startswith("VLLM_DP_")]:
        del os.environ[name]  # the replica of a script's process
    torch._C.set_num_threads(1)  # a fork has none of OpenMP's other threads; vLLM disables the public function
    return _structures(engine_args, report)


def _structures(engine_args: Any, report: child.Report) -> tuple[Structure, ...]:
    import torch

    single = launch.in_one_process(engine_args)
    single.speculative_config = None
    single.worker_cls, single.scheduler_cls = "auto", None
    single.enforce_eager = True
    report("reading its configuration")
    with explaining(engine_args.model):
        config = single.create_engine_config()
    model_config = config.model_config
    compat.check_kind(model_config)
    num_layers = model_config.get_total_num_hidden_layers()
    report("making it without weights")
    try:
        # Compiled parts of a model run as Python: a fork has no threads of a compiler that its parent used.
        with torch.compiler.set_stance("force_eager"), _skeleton(config) as model:
            modules, layers = dict(decoder_layers(model, num_layers)), []
            for number, layer in modules.items():
                report(f"reading layer {number} of {num_layers}")
                layers.append(structure_of(layer, model_config.dtype))
            find_final(model, modules, dict(enumerate(layers)), model_config.dtype)
            return in_one_scale(tuple(layers))
    except CapflowError as e:
        raise UsageError(str(e)) from e
    except Exception as e:  # vLLM's models raise anything when they cannot be made
        got = f"{type(e).__name__}: {_first_line(e)}"
        raise UsageError(explain(f"model {engine_args.model}: vLLM cannot make it here", got=got)) from e


@contextlib.contextmanager
def explaining(model: str) -> Iterator[None]:
    """Replace the errors of other libraries by a UsageError that says what is wrong with a model's name or files."""
    try:
        yield
    except UsageError:
        raise
    except (OSError, ValueError, AttributeError, KeyError) as e:
        raise UsageError(_diagnosis(str(model), _first_line(e))) from e


def _diagnosis(model: str, error: str) -> str:
    """Return why a model cannot be read.

    error: the message of the library that tried.
    """
    name, path = f"model {model}", Path(model).expanduser()
    expected = "a directory with a config.json, or the name of a model that can be downloaded"
    config = path / "config.json"
    if not model.strip():
        return explain("model", got=model, expected=expected)
    if path.is_file():
        return explain(name, got="a file", expected=expected)
    if path.is_dir():
        if not config.is_file():
            return explain(name, got="a directory without config.json", expected=expected)
        try:
            fields = json.loads(config.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as e:
            return explain(str(config), got=f"{type(e).__name__}: {e}", expected="a JSON object")
        if not isinstance(fields, dict):
            return explain(str(config), got=fields, expected="a JSON object")
        return explain(f"{name}: vLLM refuses it: {error}")
    if not _NAME.fullmatch(model):
        return explain(name, got="no such directory", expected=expected)
    offline = any(
        os.environ.get(variable, "0") not in ("", "0") for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
    do = "HF_HUB_OFFLINE is set: unset it, or use a model that is in the cache" if offline else ""
    return explain(name, got=error, expected=expected, do=do)


_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
"""A model's name on a hub: `owner/name`, or `name`."""

_ERROR_LENGTH_MAX = 300


def _first_line(e: Exception) -> str:
    """Return the first line of an exception's message; for pydantic, of its first error."""
    errors = getattr(e, "errors", None)
    text = str(errors()[0].get("msg", e)) if callable(errors) and errors() else str(e)
    line = next((line.strip() for line in text.splitlines() if line.strip()), type(e).__name__)
    return line.removeprefix("Value error, ")[:_ERROR_LENGTH_MAX]


@contextlib.contextmanager
def _skeleton(vllm_config: Any) -> Iterator[Any]:
    """Yield the model of a configuration without its weights, on the meta device."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.network_utils import get_open_port
    from vllm.utils.torch_utils import set_default_torch_dtype

    alone = not torch.distributed.is_initialized()
    shared = rotary_embedding._ROPE_DICT  # all models of a process share these; none may come from this model
    before = dict(shared)
    try:
        shared.clear()
        with set_current_vllm_config(vllm_config):
            if alone:
                init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
                ensure_model_parallel_initialized(1, 1)
            with set_default_torch_dtype(vllm_config.model_config.dtype):
                try:
                    with torch.device("meta"):
                        model = initialize_model(vllm_config)
                except NotImplementedError as e:
                    if "meta tensor" not in str(e):
                        raise
                    # The model's constructor reads the value of a tensor, so tensors must have memory.
                    vllm_config.compilation_config.static_forward_context.clear()
                    shared.clear()
                    with large_on_meta():
                        model = initialize_model(vllm_config)
            yield model
    finally:
        shared.clear()
        shared.update(before)
        if alone:
            destroy_model_parallel()
            destroy_distributed_environment()


def decoder_layers(model: Any, num_layers: int) -> list[tuple[int, Any]]:
    """Return the decoder layers that this worker owns, with their numbers in the whole model.

    Raises CapflowError unless the model has exactly one list of `num_layers` layers that mix tokens.
    """
    from torch import nn
    from vllm.model_executor.models.utils import PPMissingLayer

    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    if len(lists) > 1:  # encoders of images and sound have layers too, but no cache
        lists = [(name, module) for name, module in lists if any(map(mixes_tokens, module.modules()))]
    if len(lists) > 1:  # a slice of a list is another list of the same layers
        lists = list({tuple(map(id, module)): (name, module) for name, module in reversed(lists)}.values())
    if len(lists) != 1:
        got = f"lists of {num_layers} layers: {', '.join(name for name, _ in lists) or 'none'}"
        error = f"{type(model).__name__}: cannot find the decoder layers"
        raise CapflowError(explain(error, got=got, expected="exactly one"))
    return [(n, layer) for n, layer in enumerate(lists[0][1]) if not isinstance(layer, PPMissingLayer)]


def mixes_tokens(module: Any) -> bool:
    """Return whether a module is the core of attention or of a state-space layer, which has a cache."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    return isinstance(module, AttentionLayerBase)


def divided_by(module: Any) -> float:
    """Return the factor by which a module divides its output in float16, but not in float32.

    vLLM multiplies the output of routed experts by a factor. In float16, it divides the output of shared experts by
    that factor instead; the decoder layer must divide the rest of the stream.
    """
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    runners = [part for part in module.modules() if isinstance(part, MoERunner)]
    return float(next((r.routed_scaling_factor for r in runners if r.shared_experts is not None), 1.0))


def part_of(module: Any) -> Part | None:
    """Return what a module of vLLM is in its layer: a projection, attention's core, experts; None for all else."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.layers.linear import LinearBase

    module = getattr(module, "base_layer", module)  # what an adapter wraps
    if isinstance(module, LinearBase):
        return _linear(module)
    if mixes_tokens(module):
        return _core(module)
    if isinstance(module, MoERunner):
        merged = module.gate is not None and module.shared_expert_gate is not None
        return Experts(module.gate, "one product computes the router's logits and the gate of shared experts" * merged)
    return None


def _linear(module: Any) -> Linear:
    from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear

    divided = isinstance(module, ColumnParallelLinear) and not module.gather_output
    return Linear(
        inputs=module.input_size,
        outputs=module.output_size_per_partition if divided else module.output_size,
        down=isinstance(module, RowParallelLinear),
        pair=module.return_bias,
        kv_heads=module.total_num_kv_heads if isinstance(module, QKVParallelLinear) else None,
        dtype=getattr(module, "out_dtype", None),
    )


def _core(module: Any) -> Core | Mixer:
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.v1.attention.backend import AttentionType

    if isinstance(module, MLAAttention):
        lacks = dict.fromkeys(("q", "k", "v"), "attention keeps one compressed vector instead of keys and values")
        return Core(module.num_heads, module.num_heads, module.qk_head_dim, module.v_head_dim, lacks)
    if not isinstance(module, Attention):
        return Mixer()
    lacks = {}
    if module.kv_sharing_target_layer_name is not None:
        lacks = dict.fromkeys(("k", "v"), "attention reads the keys and values of another layer")
    if module.attn_type != AttentionType.DECODER:
        lacks = dict.fromkeys(ATTENTION_HOOKS, "attention reads an encoder's output")
    return Core(module.num_heads, module.num_kv_heads, module.head_size, module.head_size_v, lacks)


def structure_of(layer: Any, dtype: Any) -> Structure:
    """Return the structure of a decoder layer; raise CapflowError, which names its class, if it cannot be followed."""
    import torch

    try:
        with _native_operations(), _given_tensors(layer):
            divisor = divided_by if dtype == torch.float16 else lambda _: 1.0
            structure = resolve(layer, dtype, mixes_tokens, divisor, part_of)
    except UnclearError as e:
        raise CapflowError(explain(f"{type(layer).__name__}: unknown structure of a decoder layer", got=str(e))) from e
    if {"q", "k"} <= structure.places.keys():
        structure = replace(structure, attention=_form(layer.get_submodule(structure.places["q"].module)))
    if "router" in structure.places:
        gate = layer.get_submodule(structure.places["router"].module)
        made = getattr(gate, "out_dtype", None) or getattr(gate, "params_dtype", None) or dtype
        form = _router_form(layer, structure.shapes["router"][-1])
        form = msgspec.structs.replace(form, rounded=made.itemsize > dtype.itemsize)
        structure = replace(structure, router=form)
    return structure


def _form(module: Any) -> AttentionForm:
    """Return how a module of attention makes its weights."""
    from vllm.model_executor.layers.attention.attention import Attention

    module = getattr(module, "base_layer", module)
    # A backend with a second one for causal masks makes both alike, and has few of their attributes itself.
    made = getattr(module.impl, "general_impl", module.impl)
    # Backends without a soft cap, or that keep none as 0, have no bound.
    soft_cap = getattr(made, "logits_soft_cap", None) or None
    lacks = ""
    if type(module) is not Attention:  # each of its subclasses lets a query see other keys
        lacks = f"the mask of {type(module).__name__}"
    elif getattr(made, "chunk_lookback", -1) > -1:
        lacks = "attention to chunks of the context"
    elif getattr(made, "alibi_slopes", None) is not None:
        lacks = "a bias of each distance (ALiBi)"
    sinks = bool(getattr(module, "has_sink", False)) or getattr(made, "sinks", None) is not None
    return AttentionForm(float(made.scale), module.sliding_window, soft_cap and float(soft_cap), sinks, lacks)


def _router_form(layer: Any, count: int) -> RouterForm:
    """Return how a layer's router chooses among `count` experts."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    runners = [module for module in layer.modules() if isinstance(module, MoERunner)]
    if len(runners) != 1:
        return RouterForm(1, lacks="the layer has several mixtures of experts")
    (runner,) = runners
    try:
        choice = router_choice(runner.router, count)
        if "lacks" in choice:
            return RouterForm(1, **choice)
        scale = choice.pop("scale", 1.0) * float(runner.routed_scaling_factor)
        more = {"renormalised": bool(runner.router.renormalize), "scale": scale}
        on_input = bool(runner.routed_experts.apply_router_weight_on_input)
        return RouterForm(runner.router.top_k, **choice, **more, on_input=on_input)
    except AttributeError as e:
        return RouterForm(1, lacks=f"a router of this version of vLLM, without {e.name}")


def router_choice(router: Any, count: int) -> dict[str, Any]:
    """Return the fields of a router's form that its class decides, or `lacks` alone."""
    kind = type(router).__name__
    if kind == "CPURouter":  # one class for several others
        own = router.custom_routing_function is not None and router.scoring_func != "sqrtsoftplus"
        kind = _GROUPED if router.use_grouped_topk else _OWN if own else _PLAIN
    if kind == _OWN:
        function = router.custom_routing_function
        name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"
        return {"scores": "sigmoid"} if name in _SIGMOIDS else {"lacks": f"the choice of {name}"}
    if kind not in (_GROUPED, _BIASED, _PLAIN):
        return {"lacks": f"the choice of a {kind}"}
    if router.scoring_func not in ("softmax", "sigmoid"):
        return {"lacks": f"scores by {router.scoring_func}"}
    choice = {"scores": router.scoring_func}
    if kind == _PLAIN:
        return choice
    choice |= {"biased": router.e_score_correction_bias is not None, "scale": float(router.routed_scaling_factor)}
    if kind == _GROUPED:
        groups = router.num_expert_group
        if groups > 1 and (count % groups or count == groups):
            return {"lacks": f"{groups} groups of {count} experts"}
        return choice | {"n_group": groups, "topk_group": router.topk_group}
    if router._hash_indices_table is not None or router.bias_vl is not None:
        return {"lacks": "a choice by the tokens' ids"}
    return choice


_GROUPED, _BIASED, _PLAIN = "GroupedTopKRouter", "FusedTopKBiasRouter", "FusedTopKRouter"
_OWN = "CustomRoutingRouter"

_SIGMOIDS = (
    "vllm.model_executor.models.llama4.Llama4MoE.custom_routing_function",
    "vllm.model_executor.models.cohere2_moe.token_choice_with_bias",
)
"""The functions of models that take the sigmoid of the highest logits."""


def give_tensor(projection: Any) -> None:
    """Have a projection be given a tensor: some models quantise what an MLP's last one reads, if it takes that."""
    projection.requires_unquantized_input = True


@contextlib.contextmanager
def _given_tensors(layer: Any) -> Iterator[None]:
    """Have all projections of a layer be given tensors."""
    from vllm.model_executor.layers.linear import LinearBase

    projections = [module for module in layer.modules() if isinstance(module, LinearBase)]
    changed = [module for module in projections if not getattr(module, "requires_unquantized_input", False)]
    try:
        for module in changed:
            give_tensor(module)
        yield
    finally:
        for module in changed:
            del module.requires_unquantized_input


@contextlib.contextmanager
def _native_operations() -> Iterator[None]:
    """Have vLLM's own operations run as PyTorch while norms are tried on the CPU.

    An engine for a GPU that does not compile prefers CUDA kernels, which a tensor of the CPU cannot have.
    """
    from vllm import ir

    with contextlib.ExitStack() as stack:
        for operation in vars(ir.ops).values():
            if hasattr(operation, "set_priority"):
                stack.enter_context(operation.set_priority(["native"]))
        yield


def find_final(model: Any, layers: Mapping[int, Any], structures: Mapping[int, Structure], dtype: Any) -> Any:
    """Add the place of `final` to the structure of the last layer, or the reason why the model has none.

    layers: those that this worker owns, the last one of the model included.

    Returns the module that the place is in; None if there is none.
    """
    structure = structures[max(structures)]
    try:
        with _native_operations():
            owner, structure.places["final"] = final_place(model, layers, structures, dtype)
    except UnclearError as e:
        structure.missing["final"] = str(e)
        return None
    return owner


def in_one_scale(layers: tuple[Structure, ...]) -> tuple[Structure, ...]:
    """Return a model's layers; each takes the stream times the factor with which the layer before returns it.

    The first layer takes the stream itself. Raises CapflowError otherwise: a layer's factor is then unknown.
    """
    scale = 1.0
    for number, layer in enumerate(layers):
        if not math.isclose(layer.taken, scale, rel_tol=1e-6):
            got, expected = f"{layer.taken:g} times the stream", f"{scale:g} times it, as the layer before returns it"
            raise CapflowError(explain(f"layer {number}: its part of the stream", got=got, expected=expected))
        scale = layer.given
    return layers


def owned_sites(model: Any, info: ModelInfo, dtype: Any) -> Iterator[tuple[Site, Any, HookPlace]]:
    """Yield each tapped site that this worker owns, with a module and the site's place in it.

    The module is the site's layer, or what holds the norm that returns the value of a site that is not steered.
    Raises CapflowError for a site that the loaded model lacks.
    """
    tapped, fixed = set(info.sites), set(info.fixed)
    layers = dict(decoder_layers(model, info.num_layers))
    described = {number: structure_of(layer, dtype) for number, layer in layers.items()}
    with _native_operations():
        returned = returned_places(model, layers, described, dtype) if fixed else {}
    last = info.num_layers - 1
    owner = find_final(model, layers, described, dtype) if Site(last, "final") in tapped and last in layers else None
    for number, layer in layers.items():
        structure = described[number]
        for hook in HOOKS:
            if (site := Site(number, hook)) not in tapped:
                continue
            if hook not in structure.places:
                got = structure.why_not(hook)
                raise CapflowError(explain(f"site {site}", got=got, expected="a site of the loaded model"))
            # A site before the norm that is steered would change what the norm returns.
            between = hook == "post_block" and Site(number + 1, "pre_attn") in tapped - fixed
            place = None if between or site not in fixed else returned.get(site)
            own = structure.places[hook]
            yield site, *(place or (owner if own.outside else layer, own))
