"""What is run with each version: the tests of each check of the record, by their names for pytest."""

_RUNNERS = "tests/engine/worker/test_runners.py"
_DRAFTS_AHEAD = "tests/rows/test_drafts_ahead.py"
_OFFLOADING = "tests/rows/test_offloading.py"
_ROWS = "tests/rows/test_engine.py"
_STEERING = "tests/rows/test_steering_engine.py"
_HOOKS = "tests/rows/test_architectures.py::test_every_hook_at_every_layer_is_what_transformers_computes"
_BY_ROW = f"{_ROWS}::test_captured_rows_equal_transformers_row_by_row"

TESTS = {
    # Chunked, preempted, cached and batched; each position; beside requests that ask for nothing.
    "rows": (
        f"{_BY_ROW}[eager-llama]",
        f"{_BY_ROW}[eager-gemma3]",
        f"{_ROWS}::test_each_positions_name_delivers_its_positions_and_no_others",
        f"{_ROWS}::test_batch_mates_that_ask_for_nothing_answer_as_plain_vllm_does",
        f"{_ROWS}::test_steered_cache_blocks_are_nobody_elses",
        f"{_ROWS}::test_prompt_captures_compute_the_prompt_and_other_captures_keep_the_cache",
        f"{_ROWS}::test_a_preempted_request_delivers_each_row_once",
    ),
    "compiled": (f"{_BY_ROW}[compiled-llama]", f"{_BY_ROW}[compiled-gemma3]"),
    "every hook": (f"{_HOOKS}[llama]", f"{_HOOKS}[gemma3_text]", f"{_HOOKS}[olmoe]"),
    "steering": (
        f"{_STEERING}::test_every_operation_in_one_batch_eager",
        f"{_STEERING}::test_every_operation_in_one_batch_compiled",
        f"{_STEERING}::test_what_was_generated_is_read_only_by_what_is_steered_alike",
        f"{_STEERING}::test_the_global_state_steers_what_comes_later_and_forks_the_cache",
    ),
    "steering while running": (
        "tests/rows/test_actions_engine.py::test_leases_gains_and_clamps_hold_at_their_positions[async]",
        "tests/rows/test_actions_engine.py::test_a_freeze_takes_everything_back_and_holds_until_it_ends[async]",
        "tests/rows/test_in_graph_engine.py::test_two_gates_of_a_hub_steer_as_if_each_request_asked_for_them",
        "tests/rows/test_ending_gates.py::test_the_last_token_is_that_of_the_row_that_fired[async abort]",
        f"{_ROWS}::test_the_gate_steers_from_the_step_after_its_probe_fired",
    ),
    "new weights": ("tests/rows/test_weights.py",),
    "two ranks": (
        f"{_ROWS}::test_two_tensor_parallel_ranks_capture_and_steer_as_one_does",
        "tests/rows/test_parallel.py::test_two_pipeline_stages_each_tell_of_their_layers",
    ),
    "replicas": ("tests/rows/test_parallel.py::test_two_replicas_each_deliver_their_own_requests_once",),
    # Of n-grams, and of a model with async scheduling.
    "drafts": (
        "tests/rows/test_speculative.py::test_rule_3_rejected_drafts_are_never_delivered_and_accepted_ones_once",
        f"{_DRAFTS_AHEAD}::test_every_row_is_right_though_its_position_was_uncertain_when_it_was_planned[11-30]",
    ),
    "LoRA": ("tests/rows/test_adapters.py",),
    "V2 runner": (
        f"{_RUNNERS}::test_the_v2_runner_preempts_and_resumes_without_losing_or_repeating_a_row",
        f"{_STEERING}::test_every_operation_on_the_v2_runner",
    ),
    "HTTP": ("tests/engine/serve/test_http.py",),
    "gRPC": ("tests/engine/serve/test_rpc.py",),
    "AsyncLLM": ("tests/engine/llm/test_async_llm.py",),
    "beam search": (f"{_STEERING}::test_beams_are_steered_in_their_phases",),
    "KV offloading": (
        f"{_OFFLOADING}::test_a_block_is_brought_only_to_what_is_steered_alike_and_never_where_a_row_is_wanted",
    ),
}
