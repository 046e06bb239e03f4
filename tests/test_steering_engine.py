"""Steering in real engines: every hook, tier and operation in one batch, the prefix cache, and a bank that is too small."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from engines import GREEDY, VOCABULARY, answers, engine, prompts, save_tiny
from steered import LOGITS_MAX, RAW, SteeredReference, cases, lengths, logits, program, prove, vector
from vllm.sampling_params import BeamSearchParams

import capflow
from capflow.errors import UsageError
from capflow.steering import Steering
from capflow_engine import compat
from capflow_engine.hubs import hubs_at
from capflow_engine.settings import Settings

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def steered(model):
    return SteeredReference(model)


def test_every_operation_in_one_batch_eager(model, steered):
    with engine(model, sites=["*:*"], max_num_seqs=64, max_num_batched_tokens=128, **RAW) as llm:
        outputs = prove(llm, steered)
        # The plain one is what it is without its mates, and what vLLM without capflow says.
        alone = llm.generate(prompts(lengths(), seed=3)[0], capflow.sampling_params(**asks()), use_tqdm=False)
        assert logits(outputs[0]) == pytest.approx(logits(alone[0]), abs=1e-6)
    with engine(model, capflow_on=False, **RAW) as llm:
        from vllm import SamplingParams

        bare = llm.generate(prompts(lengths(), seed=3)[0], SamplingParams(**asks()), use_tqdm=False)
    assert answers(bare) == answers(outputs[:1])
    assert logits(outputs[0]) == pytest.approx(logits(bare[0]), abs=1e-6)


def test_64_mixed_requests_are_each_as_if_alone(model):
    """Each tier, operation and module, and plain ones; vLLM without capflow answers the plain ones token for token alike."""
    modules = [
        {"steering_vectors": ONE, "decode_steering_vectors": OTHER},
        {"prefill_steering_clamps": ABLATION, "steering_vectors": OTHER},
    ]
    asked = [*cases().values()]
    asked += [{"steering_name": {"glad": 0.5 * n, "calm": 2.0 - n}} for n in range(1, 6)]
    asked += [{"steering_name": "calm", **fields} for fields in asked[:64:8]]
    asked += [{}] * (64 - len(asked))
    given = prompts([lengths()[n % len(lengths())] for n in range(64)], seed=11)
    plain = [n for n, fields in enumerate(asked) if not fields]
    assert len(asked) == 64
    assert len(plain) >= 8
    with engine(model, sites=["*:*"], max_num_seqs=64, max_num_batched_tokens=256, **RAW) as llm:
        for name, fields in zip(("glad", "calm"), modules, strict=True):
            llm.steering.register(name, Steering.parse(fields))
        params = [capflow.sampling_params(**asks(**fields)) for fields in asked]
        together = llm.generate(given, params, use_tqdm=False)
        for one, prompt, output in zip(params, given, together, strict=True):
            llm.reset_prefix_cache()
            (alone,) = llm.generate(prompt, one, use_tqdm=False)
            assert answers([alone]) == answers([output])
            assert logits(output) == pytest.approx(logits(alone), abs=LOGITS_MAX)
    with engine(model, capflow_on=False, max_num_seqs=64, max_num_batched_tokens=256, **RAW) as llm:
        from vllm import SamplingParams

        bare = llm.generate([given[n] for n in plain], SamplingParams(**asks()), use_tqdm=False)
    assert answers(bare) == answers([together[n] for n in plain])
    for n, output in zip(plain, bare, strict=True):
        assert logits(together[n]) == pytest.approx(logits(output), abs=1e-5)


def asks(**more):
    return {"max_tokens": 5, "logprobs": VOCABULARY, **GREEDY, **more}


def test_every_operation_in_one_batch_compiled(model, steered):
    with engine(model, sites=["*:*"], enforce_eager=False, **RAW) as llm:
        prove(llm, steered)


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2, "enforce_eager": False},
    ],  # vLLM's stages need a warm-up
    ids=["tensor", "pipeline"],
)
def test_every_operation_in_two_processes(model, steered, arguments):
    with engine(model, sites=["*:*"], in_process=False, **arguments, **RAW) as llm:
        prove(llm, steered)


@pytest.mark.long
def test_every_operation_on_the_v2_runner(model):
    paths = [str(HERE / "triton_cpu"), str(HERE), os.environ.get("PYTHONPATH", "")]
    variables = {
        **os.environ,
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    command = [sys.executable, str(HERE / "steered.py"), model]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split()[-2:] == ["proved", str(len(lengths()))]


# --- the prefix cache ---

PROMPT = prompts((100,), seed=5)[0]
ONE = {"post_block": {1: vector(1)}}
OTHER = {"post_block": {1: vector(2)}}
ABLATION = {"post_block": {1: {"vector": vector(1), "value": 0}}}


@pytest.fixture(scope="module")
def cached(model):
    """An engine that has a prefix cache of small blocks."""
    with engine(model, sites=["*:*"], block_size=32, num_gpu_blocks_override=100, **RAW) as llm:
        yield llm


@pytest.fixture(scope="module")
def worded(tiny_with_words):
    with engine(tiny_with_words, skip_tokenizer_init=False) as llm:
        yield llm


def ask(llm, fields, prompt=PROMPT):
    """Return a request's output; the prefix cache is as those before left it."""
    (output,) = llm.generate(prompt, capflow.sampling_params(**asks(**fields)), use_tqdm=False)
    return output


def right(steered, output, fields):
    prompt = output.prompt_token_ids
    tokens = [*prompt, *output.outputs[0].token_ids[:-1]]
    expected = steered.logits(tokens, len(prompt), program(fields))[len(prompt) - 1 :]
    error = np.abs(logits(output) - expected).max()
    assert error < LOGITS_MAX, f"logits are off by {error:.1e}"


POISONINGS = {
    "steered, then plain": ({"steering_vectors": ONE}, {}, 0),
    "plain, then steered": ({}, {"steering_vectors": ONE}, 0),
    "one vector, then another": ({"steering_vectors": ONE}, {"steering_vectors": OTHER}, 0),
    "a vector, then a clamp of it": ({"steering_vectors": ONE}, {"steering_clamps": ABLATION}, 0),
    "everywhere, then the prompt alone": ({"steering_vectors": ONE}, {"prefill_steering_vectors": ONE}, 96),
    "decode alone, then plain": ({"decode_steering_vectors": ONE}, {}, 96),
    "plain, then decode alone": ({}, {"decode_steering_vectors": ONE}, 96),
    "equal vectors, in different forms": (
        {"steering_vectors": ONE},
        {"steering_vectors": {"post_block": {1: {"vector": (vector(1) / 2).tolist(), "scale": 2.0}}}},
        96,
    ),
    "a patch, then plain": (
        {"steering_patches": {"post_block": {1: {"positions": [40], "vector": vector(3)}}}}, {}, 32,
    ),
    "plain, then a patch": (
        {}, {"steering_patches": {"post_block": {1: {"positions": [40], "vector": vector(3)}}}}, 32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", POISONINGS)
def test_a_cached_block_is_read_only_by_what_is_steered_alike(cached, steered, name):
    """cached: how many tokens of the prompt the second request may read, which are those that the two compute alike."""
    first, second, tokens = POISONINGS[name]
    cached.reset_prefix_cache()
    right(steered, ask(cached, first), first)
    output = ask(cached, second)
    assert output.num_cached_tokens == tokens
    right(steered, output, second)


def test_what_was_generated_is_read_only_by_what_is_steered_alike(cached, steered):
    """A prompt that goes on from an answer finds the answer's blocks only where they were computed as it would."""
    continued = {}
    for name, fields in {
        "base": {"steering_vectors": ONE},
        "prefill": {"prefill_steering_vectors": ONE},
        "decode": {"decode_steering_vectors": ONE},
    }.items():
        cached.reset_prefix_cache()
        output = ask(cached, {**fields, "max_tokens": 40})
        more = {"prompt_token_ids": [*PROMPT["prompt_token_ids"], *output.outputs[0].token_ids]}
        again = ask(cached, fields, more)
        right(steered, again, fields)
        continued[name] = again.num_cached_tokens
    assert continued["base"] == 128  # prompt and answer were computed alike
    assert continued["prefill"] == continued["decode"] == 96


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("kv_transfer_config", {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}),
        ("kv_offloading_size", 1.0),
    ],
)
def test_a_connector_that_would_bring_steered_blocks_to_others_is_refused_before_anything_runs(model, argument, value):
    """vLLM's example knows blocks by their tokens: behind a request that is steered, it gives a plain one what that computed."""
    flag = f"--{argument.replace('_', '-')} is not supported"
    with pytest.raises(UsageError, match=flag), engine(model, **{argument: value}):
        pass


def test_a_connector_is_refused_by_the_engine_too_however_it_came(model):
    from vllm.config import KVTransferConfig, VllmConfig

    settings = Settings(engine="e", hubs=hubs_at([], None, insecure=False), sites=(), user={})
    connector = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    with pytest.raises(UsageError, match="a KV connector is not supported"):
        compat.check_config(VllmConfig(additional_config=settings, kv_transfer_config=connector))


def test_a_module_that_changes_under_its_name_forks_the_cache(cached, steered):
    cached.reset_prefix_cache()
    for vectors in (ONE, OTHER):
        cached.steering.register("calm", Steering.parse({"steering_vectors": vectors}))
        output = ask(cached, {"steering_name": "calm", "steering_scale": 2.0})
        (((layer, value),),) = (layers.items() for layers in vectors.values())
        right(steered, output, {"steering_vectors": {"post_block": {layer: {"vector": value, "scale": 2.0}}}})
        assert output.num_cached_tokens == 0
    cached.steering.unregister("calm")
    with pytest.raises(capflow.UsageError, match="steering_name: got calm"):
        ask(cached, {"steering_name": "calm"})


def test_the_global_state_steers_what_comes_later_and_forks_the_cache(cached, steered):
    cached.reset_prefix_cache()
    for prefill, tokens in ((ONE, 0), (OTHER, 0), (ONE, 96)):
        cached.steering.set_global(Steering.parse({"prefill_steering_vectors": prefill}), replace=True)
        output = ask(cached, {"decode_steering_vectors": ONE})
        right(steered, output, {"prefill_steering_vectors": prefill, "decode_steering_vectors": ONE})
        assert output.num_cached_tokens == tokens
    cached.steering.clear_global()
    output = ask(cached, {})
    right(steered, output, {})
    assert output.num_cached_tokens == 0


# --- beams ---


@pytest.mark.parametrize("tier", ["steering_vectors", "prefill_steering_vectors", "decode_steering_vectors"])
def test_beams_are_steered_in_their_phases(worded, tier):
    """The best of one beam is what greedy decoding finds."""
    steering = {tier: ONE, "steering_clamps": {"post_block": {0: {"vector": vector(3), "max": 0.0}}}}
    batch = prompts([7, 40])
    greedy = worded.generate(batch, capflow.sampling_params(**steering, **GREEDY, max_tokens=6), use_tqdm=False)
    one, several = (
        worded.beam_search(batch, BeamSearchParams(width, 6, ignore_eos=True), steering=steering) for width in (1, 3)
    )
    plain = worded.beam_search(batch, BeamSearchParams(1, 6, ignore_eos=True))
    for prompt, output, beam, beams, other in zip(batch, greedy, one, several, plain, strict=True):
        expected = [*prompt["prompt_token_ids"], *output.outputs[0].token_ids]
        assert beam.sequences[0].tokens == expected != other.sequences[0].tokens
        assert len(beams.sequences) == 3
        assert beams.sequences[0].cum_logprob >= beam.sequences[0].cum_logprob - 1e-5


def test_a_patch_behind_the_prompt_is_a_beams_too(worded):
    """Ten tokens of the prompt, so that the third of the answer is patched; one that is never computed ends its request."""
    (prompt,) = prompts([10])
    patches = {"steering_patches": {"post_block": {1: {"positions": [12], "vector": 20 * vector(6)}}}}
    options = {**GREEDY, "max_tokens": 6}
    (greedy,) = worded.generate(prompt, capflow.sampling_params(**patches, **options), use_tqdm=False)
    (plain,) = worded.generate(prompt, capflow.sampling_params(**options), use_tqdm=False)
    (beam,) = worded.beam_search([prompt], BeamSearchParams(1, 6, ignore_eos=True), steering=patches)
    answer = list(greedy.outputs[0].token_ids)
    assert beam.sequences[0].tokens == [*prompt["prompt_token_ids"], *answer]
    assert answer[:3] == list(plain.outputs[0].token_ids)[:3]
    assert answer != list(plain.outputs[0].token_ids)
    (never,) = worded.generate(
        prompt, capflow.sampling_params(**patches, **{**options, "max_tokens": 3}), use_tqdm=False
    )
    assert never.outputs[0].finish_reason == "abort"


def test_beams_are_refused_what_does_not_fit(worded):
    for steering, named in (
        ({"steering_vectors": {"post_block": {0: [1.0]}}}, "post_block"),
        ({"capture": {}}, "capture"),
    ):
        with pytest.raises(capflow.UsageError, match=named):
            worded.beam_search([{"prompt_token_ids": [1, 2]}], BeamSearchParams(1, 2), steering=steering)


# --- the bank ---


def test_requests_wait_for_room_in_the_bank_and_all_are_right(model, steered):
    """Twelve configurations, with room for three at a time."""
    fields = [{"steering_vectors": {"post_block": {1: vector(n)}}} for n in range(12)]
    with engine(model, sites=["*:*"], steering_bank_bytes=3 * 64 * 4, **RAW) as llm:
        given = prompts([9 + n for n in range(13)], seed=7)
        params = [capflow.sampling_params(**asks(**each)) for each in [*fields, {}]]
        outputs = llm.generate(given, params, use_tqdm=False)
        for output, each in zip(outputs, [*fields, {}], strict=True):
            right(steered, output, each)
        with pytest.raises(capflow.UsageError, match="--steering-bank-bytes"):
            llm.generate(given[0], capflow.sampling_params(**asks(**big())), use_tqdm=False)


def big():
    return {"steering_vectors": {"post_block": {n: vector(n) for n in range(4)}}}


def test_256_configurations_run_in_one_batch(model, steered):
    fields = [{"decode_steering_vectors": {"post_block": {n % 4: vector(n)}}} for n in range(256)]
    with engine(model, sites=["*:*"], max_num_seqs=256, max_num_batched_tokens=512, max_model_len=64, **RAW) as llm:
        given = prompts([4] * 256, seed=9)
        params = [capflow.sampling_params(**asks(**each, max_tokens=4)) for each in fields]
        outputs = llm.generate(given, params, use_tqdm=False)
        for output, each in list(zip(outputs, fields, strict=True))[::16]:
            right(steered, output, each)
        assert len({tuple(logits(output)[-1]) for output in outputs}) == 256
