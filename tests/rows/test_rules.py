"""The rules that rows obey, each against real vLLM and Transformers; the rule for drafts is in `test_speculative`.

Rule 1: every row is the row of its request and position, delivered once. Rule 4: requests that ask for nothing are
neither slowed nor changed.
"""

import pytest

import capflow
from tests.kit.driver import Driver
from tests.kit.engines import GREEDY, answers, engine, prompts, vector
from tests.kit.rows import ALL
from tests.kit.steered import SteeredReference
from tests.kit.watching import watch

pytestmark = pytest.mark.engine


def test_rule_1_rows_are_their_requests_whatever_comes_and_goes_beside_them(tiny, reference, keeper):
    """Prompts of many chunks, late arrivals, prefix-cache hits, an abort during prefill and one during decode."""
    long, short, shared, doomed, last = (p["prompt_token_ids"] for p in prompts((200, 7, 70, 90, 40)))
    small = {"max_num_batched_tokens": 24, "long_prefill_token_threshold": 8, "max_num_seqs": 8, "block_size": 32}
    with engine(tiny, hub=keeper.address, enable_prefix_caching=True, **small) as llm:
        counts = watch(llm)
        driver = Driver(llm)
        driver.add("long", long, 9)
        driver.steps(2)
        driver.add("short", short, 12)
        driver.add("doomed", doomed, 9)
        driver.steps(3)
        driver.engine.abort_request(["doomed"])  # in the middle of its prompt
        driver.add("shared", shared, 5)
        driver.steps(9)
        driver.add("again", [*shared, 17, 18], 5)  # begins with blocks that are cached
        driver.add("stopped", last, 200)
        driver.steps(12)
        driver.engine.abort_request(["stopped"])  # while it decodes
        driver.run()
        assert counts["chunks"] > 10
        names = ("long", "short", "shared", "again", "stopped", "doomed")
        assert set(driver.results(*names).values()) <= {"ok"}
        for name in ("long", "short", "shared", "again"):
            keeper.hold(name, driver.tokens[name], reference)
        for name in ("stopped", "doomed"):
            done = keeper.done[name]
            assert done.status == "abort"
            tokens = driver.tokens.get(name, doomed)
            keeper.hold(name, tokens, reference, positions=list(range(done.computed_length)))
        assert 0 < keeper.done["doomed"].computed_length < len(doomed)
        assert keeper.done["stopped"].computed_length > len(last)


def test_rule_1_each_of_n_samples_has_rows_of_its_own(tiny, reference, keeper):
    (prompt,) = prompts((20,), seed=9)
    with engine(tiny, hub=keeper.address) as llm:
        params = capflow.sampling_params(
            id="dice", capture=ALL, max_tokens=9, n=3, temperature=1.0, seed=7, ignore_eos=True, detokenize=False
        )
        unnamed = capflow.sampling_params(capture=ALL, max_tokens=3, n=2, temperature=1.0, detokenize=False)
        output, other = llm.generate([prompt, prompt], [params, unnamed], use_tqdm=False)
        assert output.capture_results["keeper"].status == "ok"
        assert other.capture_results["keeper"].status == "ok"
        samples = [tuple(sample.token_ids) for sample in output.outputs]
        assert len(set(samples)) == 3
        for sample in output.outputs:
            assert sample.capture_results["keeper"].status == "ok"
            keeper.hold(f"dice#{sample.index}", [*prompt["prompt_token_ids"], *sample.token_ids], reference)
        assert len(keeper.rows) == 5


def test_rule_1_streaming_input_goes_on_where_its_rows_ended(tiny, reference, keeper):
    """A request whose prompt grows: what was generated becomes prompt, but for the token that each part stopped at."""
    first, second, third = (p["prompt_token_ids"] for p in prompts((20, 30, 7), seed=4))
    with engine(tiny, hub=keeper.address, max_num_batched_tokens=16) as llm:
        driver = Driver(llm)
        beside = prompts((33,), seed=5)[0]["prompt_token_ids"]
        driver.add("beside", beside, 60)
        params = capflow.sampling_params(id="talk", capture=ALL, max_tokens=6, **GREEDY)
        generated = [driver.talk("talk", part, params) for part in (first, second, third)]
        driver.say("talk", [0], params, more=False)
        driver.run()
        assert driver.results("talk", "beside") == {"talk": "ok", "beside": "ok"}
        one, two, three = generated
        tokens = [*first, *one[:-1], *second, *two[:-1], *third, *three]
        keeper.hold("talk", tokens, reference)
        keeper.hold("beside", driver.tokens["beside"], reference)
        assert keeper.done["talk"].status == "stop"
        assert keeper.done["talk"].prompt_length == len(tokens) - 6


def test_input_that_goes_on_is_steered_in_its_phases(tiny):
    first, second = (p["prompt_token_ids"] for p in prompts((40, 30), seed=6))
    before, after = ({"post_block": {1: vector(n)}} for n in (1, 2))
    phases = {"prefill_steering_vectors": before, "decode_steering_vectors": after}
    with engine(tiny, enable_prefix_caching=True, block_size=32) as llm:
        driver = Driver(llm)
        params = capflow.sampling_params(max_tokens=6, **phases, **GREEDY)
        one = driver.talk("talk", first, params)
        talking = driver.engine.engine_core.engine_core.scheduler.requests["talk"]
        before_it_went_on = talking.capflow_forks[-1]
        two = driver.talk("talk", second, params)
        assert not talking.sampling_params.extra_args, "workers get the options with the orders, once"
        assert talking.capflow_forks[-1] != before_it_went_on, "its blocks are nobody else's from there on"
        driver.say("talk", [0], params, more=False)
        driver.run()
    tokens = [*first, *one[:-1], *second, *two]
    ends = range(len(first), len(first) + 5), range(len(tokens) - 6, len(tokens))
    generated = {position for end in ends for position in end}
    likeliest = SteeredReference(tiny).logits(tokens, len(tokens), phases, generated=generated).argmax(axis=-1)
    assert likeliest[len(first) - 1 : len(first) + 5].tolist() == one
    assert likeliest[len(tokens) - 7 : -1].tolist() == two


def schedules(llm):
    """Return the tokens that each step schedules, in order, as it happens."""
    seen = []
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule

    def watched(*args, **kwargs):
        output = schedule(*args, **kwargs)
        if output.num_scheduled_tokens:
            seen.append([(key.partition("-")[0], n) for key, n in output.num_scheduled_tokens.items()])
        return output

    scheduler.schedule = watched
    return seen


def test_rule_4_what_others_ask_for_changes_neither_batches_nor_tokens(tiny, keeper):
    """Half of the requests capture and are steered; the other half has the same batches and tokens as in plain vLLM."""
    from vllm import SamplingParams

    asked = prompts((5, 40, 3, 90, 17, 65, 1, 30))
    nothing = SamplingParams(max_tokens=12, **GREEDY)
    with engine(tiny, capflow_on=False) as llm:
        plain_steps = schedules(llm)
        plain = answers(llm.generate(asked, nothing, use_tqdm=False))
    with engine(tiny, hub=keeper.address) as llm:
        steps = schedules(llm)
        steering = {"post_block": {1: vector(1)}}
        params = [
            nothing
            if n % 2
            else capflow.sampling_params(id=f"r{n}", capture=ALL, steering_vectors=steering, max_tokens=12, **GREEDY)
            for n in range(len(asked))
        ]
        got = answers(llm.generate(asked, params, use_tqdm=False))
        assert [got[n] for n in range(1, len(asked), 2)] == [plain[n] for n in range(1, len(asked), 2)]
        assert steps == plain_steps
        assert sorted(keeper.rows) == ["r0", "r2", "r4", "r6"]
