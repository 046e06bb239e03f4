"""The surface table: each name of vLLM that capflow imports, overrides, replaces or reads, and what needs it.

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
REPLICAS = "data parallelism"
DRAFTS = "speculative decoding"
LORA = "LoRA adapters"

FEATURES = (
    HTTP,
    ASYNC_LLM,
    V2_RUNNER,
    BEAM_SEARCH,
    FORCED_TOKENS,
    KV_OFFLOADING,
    GRPC,
    PARALLEL,
    REPLICAS,
    DRAFTS,
    LORA,
)
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


class Read(NamedTuple):
    """Attributes that are read of objects of a vLLM class.

    cls: `module:Class`.
    unless: a member of the class; where a vLLM has it, none of `names` is read.
    """

    cls: str
    names: tuple[str, ...]
    need: str = CORE
    unless: str = ""


_LAYERS = "vllm.model_executor.layers"
_SERVE = "vllm.entrypoints"
_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"
_OPENAI = f"{_SERVE}.openai"

SYMBOLS = (
    Symbol("vllm", "LLM"),
    Symbol("vllm", "LLMEngine"),
    Symbol("vllm", "RequestOutput"),
    Symbol("vllm", "SamplingParams"),
    Symbol("vllm", "AsyncLLMEngine", ASYNC_LLM),
    Symbol("vllm", "envs"),
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
    Symbol("vllm.model_executor.layers.attention.attention", "Attention"),
    Symbol("vllm.model_executor.layers.attention.mla_attention", "MLAAttention"),
    Symbol("vllm.model_executor.layers.attention_layer_base", "AttentionLayerBase"),
    Symbol("vllm.model_executor.layers.fused_moe.runner.moe_runner", "MoERunner"),
    Symbol("vllm.model_executor.layers.linear", "ColumnParallelLinear"),
    Symbol("vllm.model_executor.layers.linear", "LinearBase"),
    Symbol("vllm.model_executor.layers.linear", "QKVParallelLinear"),
    Symbol("vllm.model_executor.layers.linear", "RowParallelLinear"),
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
    Symbol("vllm.v1.attention.backend", "AttentionType"),
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
        " _preempt_request _handle_stopped_request _update_request_as_session _free_request"
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
    *_overrides(
        "capflow_engine.compat.step:_deciding.Deciding",
        "vllm.v1.outputs:AsyncModelRunnerOutput",
        "get_kv_connector_output",
        OPTIONAL,
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
    Replaced(
        f"{_LAYERS}.linear:LinearBase.requires_unquantized_input", "capflow_engine.compat.model:give_tensor", OPTIONAL
    ),
    Replaced(f"{_CORE_OF}.collective_rpc", _WATCH),
    Replaced(f"{_CORE_OF}.set_weight_version", _WATCH, OPTIONAL),
    Replaced(f"{_CORE_OF}.sleep", _WATCH),
    Replaced(f"{_CORE_OF}.add_lora", _WATCH),
    Replaced(f"{_CORE_OF}.shutdown", "capflow_engine.compat.engine:call_before_kill"),
    Replaced(
        "vllm.v1.engine.output_processor:OutputProcessor.add_request", "capflow_engine.compat.engine:before_adding"
    ),
    Replaced(
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_request_with_output",
        "capflow_engine.scheduler.mixin:Captured.update_from_output",
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
    Replaced(f"{_LAYERS}.attention.attention:Attention.forward", "capflow_engine.taps.tap:install"),
)


def _read(cls: str, names: str, need: str = CORE, unless: str = "") -> Read:
    return Read(cls, tuple(names.split()), need, unless)


READS = (
    _read(
        "vllm.v1.core.sched.scheduler:Scheduler",
        "block_size connector finish_requests has_requests kv_cache_manager max_model_len",
    ),
    _read(
        "vllm.v1.core.sched.scheduler:Scheduler",
        "skipped_waiting waiting policy",
        unless="_handle_blocked_waiting_request",
    ),
    _read(
        "vllm.v1.core.sched.output:SchedulerOutput",
        "num_scheduled_tokens scheduled_new_reqs scheduled_spec_decode_tokens",
    ),
    _read("vllm.v1.core.sched.output:NewRequestData", "num_computed_tokens prompt_embeds req_id"),
    _read(
        "vllm.v1.core.sched.output:CachedRequestData",
        "new_token_ids num_computed_tokens num_output_tokens num_reqs req_ids",
    ),
    _read("vllm.v1.core.sched.request_queue:RequestQueue", "prepend_request remove_requests"),
    _read(
        "vllm.v1.request:Request",
        "client_index get_finished_reason is_finished kv_transfer_params num_computed_tokens num_output_tokens"
        " num_prompt_tokens prompt_embeds request_id resumable skip_reading_prefix_cache spec_token_ids stop_reason"
        " trace_headers update_block_hashes",
    ),
    _read("vllm.v1.request:Request", "num_stale_output_tokens", OPTIONAL),
    _read("vllm.v1.request:RequestStatus", "FINISHED_ABORTED FINISHED_STOPPED"),
    _read("vllm.v1.outputs:ModelRunnerOutput", "req_id_to_index req_ids sampled_token_ids"),
    _read("vllm.v1.engine:EngineCoreOutput", "finish_reason finished kv_transfer_params new_token_ids request_id"),
    _read("vllm.v1.engine:EngineCoreOutputs", "outputs"),
    _read("vllm.v1.engine:EngineCoreRequest", "prompt_embeds request_id"),
    _read("vllm.v1.engine.core:EngineCore", "async_scheduling model_executor scheduler vllm_config"),
    _read("vllm.v1.executor.abstract:Executor", "collective_rpc"),
    _read(
        "vllm.v1.engine.async_llm:AsyncLLM",
        "collective_rpc engine_core output_handler output_processor vllm_config",
        HTTP,
    ),
    _read(
        "vllm.v1.engine.llm_engine:LLMEngine",
        "abort_request engine_core from_engine_args has_unfinished_requests output_processor vllm_config",
    ),
    _read("vllm.v1.engine.output_processor:OutputProcessor", "request_states"),
    _read("vllm.v1.worker.gpu_worker:Worker", "get_model model_runner use_v2_model_runner vllm_config"),
    _read("vllm.v1.worker.gpu_model_runner:GPUModelRunner", "get_model input_batch input_ids vllm_config"),
    _read("vllm.v1.worker.gpu_input_batch:InputBatch", "num_computed_tokens_cpu num_reqs req_id_to_index req_ids"),
    _read("vllm.v1.worker.gpu.model_runner:GPUModelRunner", "get_model vllm_config", V2_RUNNER),
    _read(
        "vllm.v1.worker.gpu.input_batch:InputBatch",
        "input_ids num_computed_tokens_np num_reqs num_scheduled_tokens num_tokens_after_padding req_ids",
        V2_RUNNER,
    ),
    _read(
        "vllm.config:VllmConfig",
        "additional_config cache_config compilation_config kv_transfer_config parallel_config scheduler_config"
        " model_config speculative_config",
    ),
    _read(
        "vllm.config:ModelConfig",
        "enforce_eager get_hidden_size get_total_num_hidden_layers get_vocab_size hf_config max_model_len"
        " served_model_name skip_tokenizer_init tokenizer_mode tokenizer_revision trust_remote_code",
    ),
    _read(
        "vllm.config:ParallelConfig",
        "all2all_backend data_parallel_backend data_parallel_index data_parallel_size enable_dbo nnodes_within_dp"
        " pipeline_parallel_size tensor_parallel_size use_ray use_sequence_parallel_moe use_ubatching",
    ),
    _read("vllm.config:SchedulerConfig", "async_scheduling max_num_batched_tokens max_num_seqs"),
    _read("vllm.config:CacheConfig", "kv_sharing_fast_prefill"),
    _read("vllm.config:CompilationConfig", "pass_config static_forward_context"),
    _read("vllm.config:SpeculativeConfig", "num_speculative_tokens"),
    _read("vllm.config:KVTransferConfig", "kv_connector kv_connector_extra_config"),
    _read(
        "vllm.engine.arg_utils:EngineArgs",
        "additional_config create_engine_config create_model_config data_parallel_backend data_parallel_external_lb"
        " data_parallel_rank data_parallel_size data_parallel_size_local decode_context_parallel_size"
        " distributed_executor_backend enable_lora enforce_eager nnodes pipeline_parallel_size"
        " tensor_parallel_size",
    ),
    _read(f"{_LAYERS}.linear:LinearBase", "input_size output_size return_bias"),
    _read(f"{_LAYERS}.linear:ColumnParallelLinear", "gather_output output_size_per_partition"),
    _read(f"{_LAYERS}.linear:QKVParallelLinear", "total_num_kv_heads"),
    _read(
        f"{_LAYERS}.attention.attention:Attention",
        "attn_type head_size head_size_v kv_sharing_target_layer_name num_heads num_kv_heads",
    ),
    _read(f"{_LAYERS}.attention.mla_attention:MLAAttention", "num_heads qk_head_dim v_head_dim"),
    _read(
        f"{_LAYERS}.fused_moe.runner.moe_runner:MoERunner",
        "gate routed_scaling_factor shared_expert_gate shared_experts",
    ),
    _read(f"{_LAYERS}.fused_moe.runner.moe_runner:MoERunner", "routed_experts router", OPTIONAL),
    _read(f"{_LAYERS}.fused_moe.routed_experts:RoutedExperts", "apply_router_weight_on_input", OPTIONAL),
    _read(
        f"{_LAYERS}.fused_moe.router.cpu_router:CPURouter",
        "custom_routing_function e_score_correction_bias num_expert_group renormalize scoring_func top_k topk_group"
        " use_grouped_topk",
        OPTIONAL,
    ),
    _read(
        f"{_LAYERS}.fused_moe.router.fused_topk_bias_router:FusedTopKBiasRouter",
        "_hash_indices_table bias_vl",
        OPTIONAL,
    ),
    _read("vllm:LLM", "get_default_sampling_params llm_engine reset_prefix_cache"),
    _read("vllm:SamplingParams", "clone detokenize extra_args n prompt_logprobs"),
    _read("vllm.outputs:RequestOutput", "finished kv_transfer_params outputs request_id"),
    _read("vllm.lora.request:LoRARequest", "lora_name"),
    _read("vllm.model_executor.layers.attention.attention:Attention", "impl sliding_window"),
    _read(
        "vllm.distributed.parallel_state:GroupCoordinator",
        "broadcast_object cpu_group device_group rank_in_group world_size",
    ),
    _read(f"{_OFFLOADING}:OffloadingConnector", "_max_loadable_tokens", KV_OFFLOADING),
)
