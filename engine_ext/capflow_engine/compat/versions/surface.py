"""The surface table: each name of vLLM that capflow imports, overrides or replaces, and what needs it.

A test compares the table with the source: it fails for a name that is not here, and for an entry that nothing uses.
`contract` compares it with a vLLM, without importing that.
"""

from __future__ import annotations

from typing import NamedTuple

CORE = "core"
"""Without these names no row is right: such a vLLM is refused."""

OPTIONAL = "optional"
"""capflow works without these names."""

HTTP = "the HTTP server"
V2_RUNNER = "the V2 model runner"
ASYNC_LLM = "capflow.AsyncLLM"
BEAM_SEARCH = "beam search"
FORCED_TOKENS = "forced tokens of experiments"
KV_OFFLOADING = "KV offloading"
GRPC = "the gRPC server"
PARALLEL = "tensor and pipeline parallelism"

FEATURES = (HTTP, ASYNC_LLM, V2_RUNNER, BEAM_SEARCH, FORCED_TOKENS, KV_OFFLOADING, GRPC, PARALLEL)
"""What is refused by name where a name of vLLM is missing; all else works."""


class Symbol(NamedTuple):
    """A name that is imported.

    instead: another module that has the name, in other versions.
    """

    module: str
    name: str
    need: str = CORE
    instead: str = ""


class Override(NamedTuple):
    """A method of ours before one of vLLM's. Both are `module:Class.method`."""

    ours: str
    theirs: str
    need: str = CORE


class Replaced(NamedTuple):
    """An attribute of a vLLM class or object that is set.

    theirs: `module:Class.attribute`.
    by: the function that sets it, `module:function`.
    """

    theirs: str
    by: str
    need: str = CORE


_SERVE = "vllm.entrypoints"
_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"
_OPENAI = f"{_SERVE}.openai"

SYMBOLS = (
    Symbol("vllm", "LLM"),
    Symbol("vllm", "LLMEngine"),
    Symbol("vllm", "RequestOutput"),
    Symbol("vllm", "SamplingParams"),
    Symbol("vllm", "AsyncLLMEngine", ASYNC_LLM),
    Symbol("vllm", "envs", HTTP),
    Symbol("vllm", "ir"),
    Symbol("vllm.config", "ParallelConfig"),
    Symbol("vllm.config", "set_current_vllm_config"),
    Symbol("vllm.distributed", "destroy_distributed_environment"),
    Symbol("vllm.distributed", "destroy_model_parallel"),
    Symbol("vllm.distributed", "ensure_model_parallel_initialized"),
    Symbol("vllm.distributed", "get_pp_group"),
    Symbol("vllm.distributed", "get_tensor_model_parallel_rank", FORCED_TOKENS),
    Symbol("vllm.distributed", "get_tp_group"),
    Symbol("vllm.distributed", "init_distributed_environment"),
    Symbol(_OFFLOADING, "OffloadingConnector", KV_OFFLOADING),
    Symbol("vllm.engine.arg_utils", "AsyncEngineArgs", ASYNC_LLM),
    Symbol("vllm.engine.arg_utils", "EngineArgs"),
    Symbol(f"{_SERVE}.anthropic.api_router", "create_messages", HTTP),
    Symbol(f"{_SERVE}.anthropic.protocol", "AnthropicMessagesRequest", HTTP),
    Symbol(f"{_SERVE}.cli.serve", "ServeSubcommand", HTTP),
    Symbol(f"{_OPENAI}.chat_completion.api_router", "create_batch_chat_completion", HTTP),
    Symbol(f"{_OPENAI}.chat_completion.api_router", "create_chat_completion", HTTP),
    Symbol(f"{_OPENAI}.chat_completion.protocol", "BatchChatCompletionRequest", HTTP),
    Symbol(f"{_OPENAI}.chat_completion.protocol", "ChatCompletionRequest", HTTP),
    Symbol(f"{_OPENAI}.completion.api_router", "create_completion", HTTP),
    Symbol(f"{_OPENAI}.completion.protocol", "CompletionRequest", HTTP),
    Symbol(f"{_OPENAI}.responses.api_router", "create_responses", HTTP),
    Symbol(f"{_OPENAI}.responses.protocol", "ResponsesRequest", HTTP),
    Symbol(f"{_SERVE}.serve.engine.protocol", "ErrorInfo", HTTP, instead=f"{_OPENAI}.engine.protocol"),
    Symbol(f"{_SERVE}.serve.engine.protocol", "ErrorResponse", HTTP, instead=f"{_OPENAI}.engine.protocol"),
    Symbol(f"{_SERVE}.serve.utils.api_utils", "validate_json_request", HTTP),
    Symbol(f"{_SERVE}.serve.utils.api_utils", "with_cancellation", HTTP),
    Symbol("vllm.exceptions", "VLLMValidationError"),
    Symbol("vllm.model_executor.layers", "rotary_embedding"),
    Symbol("vllm.model_executor.layers.attention_layer_base", "AttentionLayerBase"),
    Symbol("vllm.model_executor.layers.fused_moe.runner.moe_runner", "MoERunner"),
    Symbol("vllm.model_executor.model_loader.utils", "initialize_model"),
    Symbol("vllm.model_executor.models.utils", "PPMissingLayer"),
    Symbol("vllm.platforms", "current_platform"),
    Symbol("vllm.sequence", "IntermediateTensors"),
    Symbol("vllm.tokenizers", "cached_tokenizer_from_config"),
    Symbol("vllm.utils", "random_uuid", HTTP),
    Symbol("vllm.utils.argparse_utils", "FlexibleArgumentParser", HTTP),
    Symbol("vllm.utils.network_utils", "get_open_port"),
    Symbol("vllm.utils.torch_utils", "direct_register_custom_op"),
    Symbol("vllm.utils.torch_utils", "set_default_torch_dtype"),
    Symbol("vllm.v1.core.sched.async_scheduler", "AsyncScheduler"),
    Symbol("vllm.v1.core.sched.scheduler", "Scheduler"),
    Symbol("vllm.v1.engine", "EngineCoreOutput"),
    Symbol("vllm.v1.engine", "EngineCoreOutputs"),
    Symbol("vllm.v1.engine", "EngineCoreRequest", ASYNC_LLM),
    Symbol("vllm.v1.engine.core", "EngineCore"),
    Symbol("vllm.v1.engine.detokenizer", "IncrementalDetokenizer"),
    Symbol("vllm.v1.outputs", "AsyncModelRunnerOutput"),
    Symbol("vllm.v1.outputs", "ModelRunnerOutput"),
    Symbol("vllm.v1.request", "RequestStatus"),
    Symbol("vllm.v1.sample.logits_processor", "BatchUpdate", FORCED_TOKENS),
    Symbol("vllm.v1.sample.logits_processor", "LogitsProcessor", FORCED_TOKENS),
    Symbol("vllm.v1.sample.logits_processor.builtin", "process_dict_updates", FORCED_TOKENS),
    Symbol("vllm.v1.worker.cpu_worker", "CPUWorker"),
    Symbol("vllm.v1.worker.gpu_worker", "Worker"),
    Symbol("vllm.v1.worker.xpu_worker", "XPUWorker", OPTIONAL),
)


def _overrides(ours: str, theirs: str, names: str, need: str = CORE) -> tuple[Override, ...]:
    return tuple(Override(f"{ours}.{name}", f"{theirs}.{name}", need) for name in names.split())


_BODIES = "capflow_engine.serve.http.bodies:Fields"

OVERRIDES = (
    *_overrides(
        "capflow_engine.scheduler.mixin:Captured",
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
        "__init__ add_request schedule _update_after_schedule update_from_output"
        " _update_request_with_output _preempt_request _handle_stopped_request _update_request_as_session _free_request"
        " shutdown",
    ),
    *_overrides(
        "capflow_engine.compat.waiting:_Asked",
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
        "_handle_blocked_waiting_request",
        OPTIONAL,
    ),
    *_overrides(
        "capflow_engine.compat.waiting:_Withholding", "vllm.v1.core.sched.async_scheduler:AsyncScheduler", "schedule"
    ),
    *_overrides(
        "capflow_engine.compat.cache:_LimitedReads",
        "vllm.v1.core.kv_cache_manager:KVCacheManager",
        "get_computed_blocks",
    ),
    *_overrides(
        "capflow_engine.worker.worker:CaptureWorker",
        "vllm.v1.worker.gpu_worker:Worker",
        "load_model execute_model sample_tokens execute_dummy_batch shutdown",
    ),
    *_overrides(
        "capflow_engine.worker.runner:StepRunner",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
        "execute_model _prepare_inputs _model_forward",
    ),
    *_overrides(
        "capflow_engine.worker.runner:StepRunnerV2",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner",
        "execute_model prepare_inputs",
        V2_RUNNER,
    ),
    *_overrides(
        "capflow_engine.llm.llm:LLM",
        "vllm:LLM",
        "__init__ generate chat enqueue enqueue_chat wait_for_completion _render_and_run_requests",
    ),
    *_overrides("capflow_engine.llm.llm:LLM", "vllm:LLM", "beam_search _beam_search_step", BEAM_SEARCH),
    *_overrides(
        "capflow_engine.llm.async_llm:AsyncLLM", "vllm:AsyncLLMEngine", "generate add_request shutdown", ASYNC_LLM
    ),
    *_overrides(
        "capflow_engine.compat.step:_deciding.Deciding",
        "vllm.v1.outputs:AsyncModelRunnerOutput",
        "get_output",
    ),
    *_overrides(_BODIES, f"{_OPENAI}.completion.protocol:CompletionRequest", "to_sampling_params", HTTP),
    *_overrides(_BODIES, f"{_OPENAI}.chat_completion.protocol:ChatCompletionRequest", "to_sampling_params", HTTP),
    *_overrides(_BODIES, f"{_OPENAI}.responses.protocol:ResponsesRequest", "to_sampling_params", HTTP),
)

_CORE_OF = "vllm.v1.engine.core:EngineCore"
_WATCH = "capflow_engine.compat.weights:watch"
_END = "capflow_engine.compat.step:end_by_decision"
_DROP = "capflow_engine.scheduler.admission:_drop_options"
_REQUEST = "vllm.v1.request:Request"

REPLACED = (
    Replaced(f"{_CORE_OF}.collective_rpc", _WATCH),
    Replaced(f"{_CORE_OF}.set_weight_version", _WATCH, OPTIONAL),
    Replaced(f"{_CORE_OF}.sleep", _WATCH),
    Replaced(f"{_CORE_OF}.add_lora", _WATCH),
    Replaced(
        "vllm.v1.engine.output_processor:OutputProcessor.add_request", "capflow_engine.compat.engine:before_adding"
    ),
    Replaced(f"{_REQUEST}._block_hasher", "capflow_engine.compat.engine:fork_cache_from"),
    Replaced(f"{_REQUEST}.skip_reading_prefix_cache", "capflow_engine.compat.cache:compute"),
    Replaced(f"{_REQUEST}.skip_reading_prefix_cache", "capflow_engine.compat.cache:compute_from"),
    Replaced(f"{_REQUEST}.stop_reason", "capflow_engine.compat.engine:abort"),
    Replaced(f"{_REQUEST}.stop_reason", _END),
    Replaced(f"{_REQUEST}.status", _END),
    Replaced(f"{_REQUEST}.resumable", _END),
    Replaced(f"{_REQUEST}.spec_token_ids", "capflow_engine.scheduler.mixin:Captured._update_after_schedule"),
    Replaced(f"{_REQUEST}.spec_token_ids", "capflow_engine.scheduler.admission:Admission._without_drafts"),
    Replaced(f"{_REQUEST}.sampling_params", _DROP),
    Replaced("vllm.sampling_params:SamplingParams.extra_args", _DROP),
    Replaced("vllm.v1.engine.async_llm:AsyncLLM.output_handler", "capflow_engine.compat.engine:stop_outputs", HTTP),
    Replaced("vllm.v1.engine.async_llm:AsyncLLM.generate", "capflow_engine.serve.plugin:Plugin.init_state", HTTP),
    Replaced(
        f"{_OFFLOADING}:OffloadingConnector._max_loadable_tokens",
        "capflow_engine.compat.connectors:limit_loads",
        KV_OFFLOADING,
    ),
    Replaced("vllm.v1.core.sched.scheduler:Scheduler.kv_cache_manager", "capflow_engine.compat.cache:limit_reads"),
)
