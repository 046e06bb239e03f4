"""Steering in real engines: hooks, tiers and operations in one batch, the prefix cache, and a small bank."""

import contextlib
import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from vllm.sampling_params import BeamSearchParams

import capflow
from capflow.steering.request import Steering
from tests.kit.engines import GREEDY, LAYERS, VOCABULARY, answers, engine, prompts, save_tiny
from tests.kit.poisonings import ABLATION, BOUND, ONE, OTHER, POISONINGS, PROMPT
from tests.kit.sources import KIT
from tests.kit.steered import LOGITS_MAX, RAW, SteeredReference, cases, lengths, logits, prove, vector

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def steered(model):
    return SteeredReference(model)


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_every_operation_on_the_transformers_backend(backend, eager):
    model, reference = backend
    with engine(model, sites=["*:*"], max_num_seqs=64, enforce_eager=eager, **RAW) as llm:
        assert "Transformers" in type(llm.llm_engine.model_executor.driver_worker.worker.get_model()).__name__
        prove(llm, reference)


@pytest.mark.long
def test_128_mixed_requests_are_each_as_if_alone(model, steered):
    """Each tier, operation and module, and plain requests, which vLLM without capflow answers with the same tokens."""
    modules = {
        "glad": {"steering_vectors": ONE, "decode_steering_vectors": OTHER, "steering_clamps": BOUND},
        "calm": {"prefill_steering_clamps": ABLATION, "steering_vectors": OTHER},
    }
    asked = [*cases().values()]
    asked += [{"steering_name": {"glad": 0.5 * n, "calm": 2.0 - n}} for n in range(1, 6)]
    asked += [{"steering_name": "calm", **fields} for fields in asked[:64:8]]
    asked += [{}] * (128 - len(asked))
    given = prompts([lengths()[n % len(lengths())] for n in range(128)], seed=11)
    plain = [n for n, fields in enumerate(asked) if not fields]
    assert len(asked) == 128
    assert len(plain) >= 8
    with engine(model, sites=["*:*"], max_num_seqs=128, max_num_batched_tokens=256, **RAW) as llm:
        for name, fields in modules.items():
            llm.steering.register(name, Steering.parse(fields))
        params = [capflow.sampling_params(**asks(**fields)) for fields in asked]
        together = llm.generate(given, params, use_tqdm=False)
        for fields, one, prompt, output in zip(asked, params, given, together, strict=True):
            if "steering_name" in fields:
                right(steered, output, fields, modules=modules)
            llm.reset_prefix_cache()
            (alone,) = llm.generate(prompt, one, use_tqdm=False)
            assert answers([alone]) == answers([output])
            assert logits(output) == pytest.approx(logits(alone), abs=LOGITS_MAX)
    with engine(model, capflow_on=False, max_num_seqs=128, max_num_batched_tokens=256, **RAW) as llm:
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
        {"tensor_parallel_size": 2, "enforce_eager": False},
        {"pipeline_parallel_size": 2, "enforce_eager": False},
    ],  # vLLM's stages need a warm-up
    ids=["tensor", "tensor compiled", "pipeline"],
)
def test_every_operation_in_two_processes(model, steered, arguments):
    with engine(model, sites=["*:*"], in_process=False, **arguments, **RAW) as llm:
        prove(llm, steered, ranks=arguments.get("tensor_parallel_size", 1))
        # Alone, so that a stage without the layer has nothing to steer in the step.
        for layer in range(LAYERS):
            fields = {"steering_patches": {"post_block": {layer: {"positions": [3], "vector": vector(7)}}}}
            given = prompts((8,), seed=layer)
            (output,) = llm.generate(given, [capflow.sampling_params(**asks(**fields))], use_tqdm=False)
            right(steered, output, fields)


@pytest.mark.long
def test_every_operation_on_the_v2_runner(model):
    paths = [str(KIT / "triton_cpu"), os.environ.get("PYTHONPATH", "")]
    variables = {
        **os.environ,
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    command = [sys.executable, str(KIT / "steered.py"), model]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split()[-2:] == ["proved", str(len(lengths()))]


# --- the prefix cache ---


CACHED = {"sites": ["*:*"], "block_size": 32, "num_gpu_blocks_override": 100, **RAW}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Where the engines below keep what requests capture."""
    return tmp_path_factory.mktemp("kept") / "rows"


@pytest.fixture(scope="module")
def cached(model, root):
    """An engine that has a prefix cache of small blocks."""
    with engine(model, consumers=[f"filesystem:root={root},capture=requests"], **CACHED) as llm:
        yield llm


@pytest.fixture(scope="module")
def uncached(model, root):
    """The same without a prefix cache."""
    consumers = [f"filesystem:root={root},capture=requests"]
    with engine(model, consumers=consumers, enable_prefix_caching=False, **CACHED) as llm:
        yield llm


@pytest.fixture(scope="module")
def worded(tiny_with_words):
    with engine(tiny_with_words, skip_tokenizer_init=False) as llm:
        yield llm


def ask(llm, fields, prompt=PROMPT):
    """Return a request's output; the prefix cache is as those before left it."""
    (output,) = llm.generate(prompt, capflow.sampling_params(**asks(**fields)), use_tqdm=False)
    return output


def right(steered, output, fields, **more):
    """Hold an output against the reference; more: what `SteeredReference.run` takes besides."""
    prompt = output.prompt_token_ids
    tokens = [*prompt, *output.outputs[0].token_ids[:-1]]
    expected = steered.logits(tokens, len(prompt), fields, **more)[len(prompt) - 1 :]
    error = np.abs(logits(output) - expected).max()
    assert error < LOGITS_MAX, f"logits are off by {error:.1e}"


@pytest.mark.parametrize("name", POISONINGS)
def test_a_cached_block_is_read_only_by_what_is_steered_alike(cached, steered, name):
    """cached: how many tokens of the prompt the second request may read, which are those that the two compute alike."""
    first, second, tokens = POISONINGS[name]
    cached.reset_prefix_cache()
    right(steered, ask(cached, first), first)
    output = ask(cached, second)
    assert output.num_cached_tokens == tokens
    right(steered, output, second)


CAPTURED = {"hooks": {"post_block": "all", "mlp_out": "all"}, "positions": [{"last": 20}, "all_generated"]}


@pytest.mark.parametrize("name", POISONINGS)
def test_tokens_and_rows_are_those_of_an_engine_without_a_cache(cached, uncached, root, name):
    """The second request captures the end of its prompt and its answer, so that it may read blocks of the first."""
    first, second, tokens = POISONINGS[name]
    pairs = []
    cached.reset_prefix_cache()
    for place, llm in (("cached", cached), ("uncached", uncached)):
        ask(llm, first)
        output = ask(llm, {**second, "id": f"{name} {place}", "capture": CAPTURED})
        assert output.capture_results["filesystem"].status == "ok"
        capture = capflow.open(root)[f"{name} {place}"]
        pairs.append((output, {site: np.asarray(capture[site].rows) for site in capture.sites}))
    (with_cache, rows), (without, expected) = pairs
    assert (with_cache.num_cached_tokens, without.num_cached_tokens) == (min(tokens, 64), 0)
    assert answers([with_cache]) == answers([without])
    assert set(rows) == set(expected)
    assert len(rows) == 8
    for site, mine in rows.items():
        assert mine.shape == (20 + 4, 64)
        assert mine == pytest.approx(expected[site], abs=1e-5)


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


def test_a_module_that_changes_under_its_name_forks_the_cache(cached, steered):
    cached.reset_prefix_cache()
    for vectors in (ONE, OTHER):
        cached.steering.register("calm", Steering.parse({"steering_vectors": vectors}))
        fields = {"steering_name": "calm", "steering_scale": 2.0}
        output = ask(cached, fields)
        right(steered, output, fields, modules={"calm": {"steering_vectors": vectors}})
        assert output.num_cached_tokens == 0
    cached.steering.unregister("calm")
    with pytest.raises(capflow.UsageError, match="steering_name: got calm"):
        ask(cached, {"steering_name": "calm"})


def test_the_global_state_steers_what_comes_later_and_forks_the_cache(cached, steered):
    cached.reset_prefix_cache()
    for prefill, tokens in ((ONE, 0), (OTHER, 0), (ONE, 96)):
        everywhere = {"prefill_steering_vectors": prefill, "steering_clamps": ABLATION}
        cached.steering.set_global(Steering.parse(everywhere), replace=True)
        fields = {"decode_steering_vectors": ONE, "prefill_steering_vectors": OTHER}
        output = ask(cached, fields)
        right(steered, output, fields, everywhere=everywhere)
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


@pytest.mark.parametrize(
    ("positions", "latch"), [("all", False), ("generated", True), ("prompt", True), ("last_prompt", True)]
)
def test_gates_score_and_latch_in_beams_as_in_answers(worded, positions, latch):
    """Each token of a beam is a request of its own, whose prompt ends with the beam's answer so far."""
    batch, probe = prompts([7, 40]), vector(5)

    def gated(threshold):
        gate = {"layer": 0, "vector": probe, "threshold": threshold, "positions": positions, "latch": latch}
        return {
            "steering_gates": {"g": gate},
            "steering_vectors": {"post_block": {1: {"vector": 3 * vector(1), "gate": "g"}}},
        }

    def greedy(threshold):
        params = capflow.sampling_params(**gated(threshold), **GREEDY, max_tokens=6)
        return [list(each.outputs[0].token_ids) for each in worded.generate(batch, params, use_tqdm=False)]

    shut, opened, seen = greedy(1e9), greedy(-1e9), 0
    assert shut != opened
    for threshold in (-1e9, -1.0, -0.3, 0.0, 0.3, 1.0):
        expected = greedy(threshold)
        beams = worded.beam_search(batch, BeamSearchParams(1, 6, ignore_eos=True), steering=gated(threshold))
        for prompt, beam, answer in zip(batch, beams, expected, strict=True):
            assert beam.sequences[0].tokens == [*prompt["prompt_token_ids"], *answer]
        seen += expected not in (shut, opened)
    assert seen or positions == "last_prompt"


def test_a_patch_behind_the_prompt_is_a_beams_too(worded):
    """Ten tokens of the prompt, so that the third of the answer is patched."""
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


REACHES = [(-11, 6, "-10 or later"), (12, 3, "below 12"), (10, 1, "below 10"), (255, None, "below 255")]
"""Positions that a prompt of ten tokens does not reach with so many of the answer: an engine of 256 in all."""


def far(position, tokens):
    patches = {"post_block": {1: {"positions": [2, position], "vector": vector(6)}}}
    return capflow.sampling_params(steering_patches=patches, **{**GREEDY, "max_tokens": tokens})


@pytest.mark.parametrize(("position", "tokens", "expected"), REACHES)
def test_a_patch_out_of_a_request_s_reach_is_refused_and_nothing_of_its_batch_runs(worded, position, tokens, expected):
    batch = prompts([10, 10])
    params = [capflow.sampling_params(max_tokens=4, **GREEDY), far(position, tokens)]
    words = f"^steering_patches.post_block.1.positions: got {position}, expected {expected}"
    for ask in (worded.generate, worded.enqueue):
        with pytest.raises(capflow.UsageError, match=words):
            ask(batch, params, use_tqdm=False)
        assert not worded.llm_engine.has_unfinished_requests()
    last = {-11: -10, 12: 11, 10: 9, 255: 254}[position]
    (output,) = worded.generate(batch[0], far(last, tokens), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"


def test_beams_are_refused_a_patch_before_their_prompt(worded):
    patches = {"steering_patches": {"post_block": {1: {"positions": [-11], "vector": vector(6)}}}}
    with pytest.raises(
        capflow.UsageError, match=r"^steering_patches.post_block.1.positions: got -11, expected -10 or later"
    ):
        worded.beam_search(prompts([10]), BeamSearchParams(2, 3, ignore_eos=True), steering=patches)


def test_the_scheduler_ends_a_request_that_nobody_refused(worded, monkeypatch):
    monkeypatch.delattr(worded.llm_engine.output_processor, "add_request")  # the one of vLLM's class is there then
    (output,) = worded.generate(prompts([10]), far(12, 3), use_tqdm=False)
    assert output.outputs[0].finish_reason == "abort"


# --- reports and enqueued requests ---

WRONG = {
    "a vector of one number": ({"post_block": {1: [3.0]}}, "post_block.1: got 1 numbers, expected 64"),
    "a vector of eight": ({"post_block": {1: [3.0] * 8}}, "post_block.1: got 8 numbers, expected 64"),
    "a layer that is none": ({"post_block": {4: [3.0] * 64}}, r"post_block.4: got layer 4, expected 0\.\.3"),
    "a site without a tap": ({"mlp_out": {1: [3.0] * 64}}, "mlp_out.1: got no tap at mlp_out:1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_the_model_is_neither_registered_nor_set(worded, case):
    vectors, words = WRONG[case]
    steering = Steering.parse({"steering_vectors": vectors})
    for change in (lambda: worded.steering.register("wrong", steering), lambda: worded.steering.set_global(steering)):
        with pytest.raises(capflow.UsageError, match=f"^steering_vectors.{words}"):
            change()
    assert worded.steering.names == ()
    assert worded.steering.global_state.empty


def test_outputs_say_what_steered_them(worded):
    fields = [
        {},
        {"steering_vectors": ONE},
        {"decode_steering_vectors": ONE},
        {"decode_steering_vectors": ONE, "n": 2, "temperature": 1.0},
    ]
    tokens = [4, 4, 1, 4]
    params = [
        capflow.sampling_params(max_tokens=most, **{**GREEDY, **asked})
        for most, asked in zip(tokens, fields, strict=True)
    ]
    plain, everywhere, one_token, decoded = (
        output.steering_applied for output in worded.generate(prompts([9] * 4), params, use_tqdm=False)
    )
    assert plain is None
    assert everywhere.prefill == everywhere.decode == {"post_block:1": 1}
    assert (one_token.prefill, one_token.decode) == ({}, {}), "the one token of an answer is computed from the prompt"
    assert (decoded.prefill, decoded.decode) == ({}, {"post_block:1": 1})
    assert one_token.key == decoded.key != everywhere.key
    worded.steering.set_global(Steering.parse({"steering_vectors": ONE}))
    try:
        (output,) = worded.chat([{"role": "user", "content": "w5 w9"}], params[0], use_tqdm=False, chat_template=CHAT)
        assert output.steering_applied == msgspec.structs.replace(everywhere, everywhere=True)
    finally:
        worded.steering.clear_global()


CHAT = "{% for message in messages %}{{ message.content }} {% endfor %}"


@contextlib.contextmanager
def calm_and_everyone(llm):
    """Have a module, and a global state, for as long as a block runs."""
    llm.steering.register("calm", Steering.parse({"steering_vectors": ONE}))
    llm.steering.set_global(Steering.parse({"steering_vectors": {"post_block": {2: vector(3)}}}))
    try:
        yield
    finally:
        llm.steering.unregister("calm")
        llm.steering.clear_global()


@pytest.mark.parametrize("kind", ["prompts", "chats"])
def test_what_is_enqueued_is_steered_as_what_is_generated(worded, kind):
    ask, enqueue, several, more = {
        "prompts": (worded.generate, worded.enqueue, prompts([7, 40]), {}),
        "chats": (
            worded.chat,
            worded.enqueue_chat,
            [[{"role": "user", "content": f"w5 w{n}"}] for n in (6, 7)],
            {"chat_template": CHAT},
        ),
    }[kind]
    more["use_tqdm"] = False
    plain = capflow.sampling_params(max_tokens=5, **GREEDY)
    params = [capflow.sampling_params(max_tokens=5, steering_name="calm", **GREEDY), plain]
    bare = ask(several, plain, **more)
    with calm_and_everyone(worded):
        expected = ask(several, params, **more)
        enqueue(several[0], params[0], **more)
        enqueue(several[1:], params[1:], **more)
    got = worded.wait_for_completion(use_tqdm=False)
    assert answers(got) == answers(expected)
    assert all(one != other for one, other in zip(answers(got), answers(bare), strict=True))
    assert [output.steering_applied for output in got] == [output.steering_applied for output in expected]
    assert [output.steering_applied.modules for output in got] == [{"calm": 1.0}, {}]
    with pytest.raises(capflow.UsageError, match=r"^steering_name: got calm"):
        enqueue(several, params, **more)


def test_what_was_enqueued_comes_with_what_is_generated_next_each_with_its_own_report(worded):
    batch = prompts([7, 9])
    plain = capflow.sampling_params(max_tokens=3, **GREEDY)
    with calm_and_everyone(worded):
        worded.enqueue(batch[0], plain, use_tqdm=False)
    first, second = worded.generate(batch[1], plain, use_tqdm=False)
    assert (first.steering_applied.everywhere, second.steering_applied) == (True, None)
    assert answers([second]) == answers(worded.generate(batch[1], plain, use_tqdm=False))


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
        scheduler, most = llm.llm_engine.engine_core.engine_core.scheduler, [0]
        schedule = scheduler.schedule

        def watched(*args, **kwargs):
            made = schedule(*args, **kwargs)
            most[0] = max(most[0], len(made.num_scheduled_tokens))
            return made

        scheduler.schedule = watched
        outputs = llm.generate(given, params, use_tqdm=False)
        assert most == [256]  # in one step
        for output, each in list(zip(outputs, fields, strict=True))[::4]:
            right(steered, output, each)
        assert len({tuple(logits(output)[-1]) for output in outputs}) == 256


# --- streams that a model scales ---


@pytest.mark.parametrize(
    ("model_type", "dtype", "error"),
    [
        ("granite", "float32", 1e-4),
        pytest.param("minicpm3", "float32", 1e-4, marks=pytest.mark.long),
        pytest.param("deepseek_v2", "float16", 0.02, marks=pytest.mark.long),
    ],
)
def test_a_vector_adds_to_a_scaled_stream_what_it_says(model_type, dtype, error, tmp_path):
    """The next layer gets Transformers' stream at the site plus the vector; the same for a clamp and a patch."""
    from tests.architectures import table as architectures

    model = tmp_path / "model"
    made = architectures.make(model_type, str(model), dtype)
    consumers = [f"filesystem:root={tmp_path / 'rows'},capture=requests"]
    own = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}} if model_type in architectures.HEADED else {}
    arguments = {"dtype": dtype, "consumers": consumers, "enable_prefix_caching": False, **own, **RAW}
    with engine(str(model), sites=["*:*"], **arguments) as llm:
        (prompt,) = prompts([9], seed=13)
        given = np.random.default_rng(4).standard_normal(llm.capflow_model.hidden_size).astype(np.float32)
        unit = given / np.linalg.norm(given)
        asked = {
            "sum": ({"steering_vectors": {"post_block": {0: given}}}, lambda rows: rows + given),
            "ablation": (
                {"steering_clamps": {"post_block": {0: {"vector": given, "value": 0}}}},
                lambda rows: rows - np.outer(rows @ unit, unit),
            ),
            "relative": (
                {"steering_vectors": {"post_block": {0: {"vector": given, "scale": 0.5, "relative": True}}}},
                lambda rows: rows + 0.5 * np.linalg.norm(rows, axis=1, keepdims=True) * unit,
            ),
            "patch": (
                {"steering_patches": {"post_block": {0: {"positions": list(range(9)), "vector": given}}}},
                lambda rows: np.broadcast_to(given, rows.shape),
            ),
        }
        for name, (fields, expected) in asked.items():
            capture = {"hooks": {"post_block": [0], "pre_attn": [1]}, "positions": "all_prompt"}
            params = capflow.sampling_params(id=name, capture=capture, max_tokens=1, **GREEDY, **fields)
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            assert output.capture_results["filesystem"].status == "ok"
            rows = capflow.open(tmp_path / "rows")[name]
            before, after = (np.asarray(rows[site].rows, np.float64) for site in ((0, "post_block"), (1, "pre_attn")))
            (reference,) = architectures.expected(model_type, made, [prompt["prompt_token_ids"]])
            assert before == pytest.approx(reference[0, "post_block"], abs=error)
            assert after == pytest.approx(expected(before), abs=error)
