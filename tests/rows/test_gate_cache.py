"""The prefix cache of requests with gates, in real engines: what they share, and what they compute anew."""

import numpy as np
import pytest

import capflow
from capflow.steering.program import SteeringProgram
from capflow_engine.compat import cache as compat_cache
from tests.kit.engines import GREEDY, VOCABULARY, engine, prompts, save_tiny
from tests.kit.steered import LOGITS_MAX, RAW, logits, vector

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

PROMPT = prompts([104], seed=8)[0]
SMALL = {"block_size": 32, "max_num_batched_tokens": 64, "max_num_seqs": 4, "sites": ["post_block:*"], **RAW}
CAPTURE = {"hooks": {"post_block": "all"}, "positions": [{"last": 20}, "all_generated"]}
ROWS_MAX = 1e-5


def gate(seed=5, layer=0, **more):
    return {"rude": {"layer": layer, "vector": vector(seed), **more}}


def at(layer=1, seed=1):
    return {"post_block": {layer: {"vector": vector(seed), "gate": "rude"}}}


def gated(field="steering_vectors", seed=5, part=None, **more):
    return {"steering_gates": gate(seed, **more), field: part or at()}


LAST = {"positions": "last_prompt", "latch": True}
DECODE = "decode_steering_vectors"
# The first request, the second, and how many tokens of the prompt the second one reads from the cache.
PAIRS = {
    "the same": (gated(), gated(), 96),
    "the same under other names": (
        gated(),
        {"steering_gates": {"x": gate()["rude"]},
         "steering_vectors": {"post_block": {1: {"vector": vector(1) / 2, "scale": 2.0, "gate": "x"}}}}, 96,
    ),
    "another probe": (gated(), gated(seed=6), 0),
    "another threshold": (gated(), gated(threshold=0.5), 0),
    "another bias": (gated(), gated(bias=0.5), 0),
    "another sharpness": (gated(sharpness=1.0), gated(sharpness=2.0), 0),
    "hard, then soft": (gated(), gated(sharpness=2.0), 0),
    "another score": (gated(score="cosine"), gated(score="cast"), 0),
    "another layer of the probe": (gated(layer=0), gated(layer=1), 0),
    "other positions": (gated(positions="prompt"), gated(), 0),
    "plain, then gated": ({}, gated(), 0),
    "gated, then plain": (gated(), {}, 0),
    "always, then gated": ({"steering_vectors": {"post_block": {1: vector(1)}}}, gated(), 0),
    "a monitor, then plain": ({"steering_gates": gate()}, {}, 96),
    "plain, then a monitor": ({}, {"steering_gates": gate()}, 96),
    "plain, then gated answers": ({}, gated(DECODE), 96),
    "gated answers by another threshold": (gated(DECODE), gated(DECODE, threshold=1.0), 96),
    "plain, then answers gated by the last prompt": ({}, gated(DECODE, **LAST), 96),
    "plain, then everything gated by the last prompt": ({}, gated(**LAST), 96),
    "plain, then the last position by itself": ({}, gated("prefill_steering_vectors", positions="last_prompt"), 96),
    "a latch over the prompt": (gated(latch=True), gated(latch=True), 0),
    "answers latched by the prompt": (gated(DECODE, latch=True), gated(DECODE, latch=True), 0),
    "answers latched by answers": (
        gated(DECODE, latch=True, positions="generated"), gated(DECODE, latch=True, positions="generated"), 96,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("kept") / "rows"


@pytest.fixture(scope="module")
def engines(tmp_path_factory, root):
    """An engine with a prefix cache, and one without."""
    model, consumers = save_tiny(tmp_path_factory.mktemp("llama")), [f"filesystem:root={root},capture=requests"]
    with (
        engine(model, consumers=consumers, enable_prefix_caching=True, **SMALL) as cached,
        engine(model, consumers=consumers, enable_prefix_caching=False, **SMALL) as uncached,
    ):
        yield cached, uncached


def ask(llm, fields, **more):
    params = capflow.sampling_params(max_tokens=5, logprobs=VOCABULARY, **GREEDY, **fields, **more)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    return output


def hold(engines, root, name, attempt=""):
    """Ask both engines for a pair's requests; the second's answers and rows must be equal, and as many cached."""
    first, second, tokens = PAIRS[name]
    results = []
    for place, llm in zip(("cached", "uncached"), engines, strict=True):
        llm.reset_prefix_cache()
        ask(llm, first)
        plain = ask(llm, second)
        key = f"{name} {place} {attempt}"
        output = ask(llm, second, id=key, capture=CAPTURE)
        assert output.capture_results["filesystem"].status == "ok"
        capture = capflow.open(root)[key]
        rows = {site: np.asarray(capture[site].rows, np.float64) for site in capture.sites}
        results.append((plain, logits(plain), rows))
    (with_cache, actual, rows), (without, expected, others) = results
    assert (with_cache.num_cached_tokens, without.num_cached_tokens) == (tokens, 0)
    assert np.abs(actual - expected).max() < LOGITS_MAX
    for site, each in others.items():
        assert np.abs(rows[site] - each).max() / np.abs(each).max() < ROWS_MAX, site


@pytest.mark.parametrize("name", PAIRS)
def test_gates_share_only_blocks_that_they_compute_alike(engines, root, name):
    hold(engines, root, name)


def test_the_pairs_steer_and_gates_open_at_some_positions_only(engines):
    """So that a wrongly shared block would show."""
    _, uncached = engines
    plain = logits(ask(uncached, {}))
    always = logits(ask(uncached, {"steering_vectors": {"post_block": {1: vector(1)}}}))
    some = logits(ask(uncached, gated()))
    assert np.abs(plain - some).max() > 100 * LOGITS_MAX
    assert np.abs(always - some).max() > 100 * LOGITS_MAX


def _without_gates(monkeypatch):
    effect = SteeringProgram.effect_key

    def key(self, ops, phase):
        plain = [site._replace(ops=tuple(op._replace(gate=-1) for op in site.ops)) for site in ops]
        return effect(self, plain, phase)

    monkeypatch.setattr(SteeringProgram, "effect_key", key)


def _with_scores(monkeypatch):
    monkeypatch.setattr(SteeringProgram, "effect_key", lambda self, ops, _: self.key(ops) if ops else "")


def _latched_from_cache(monkeypatch):
    monkeypatch.setattr(compat_cache, "compute_from", lambda *_: None)


MUTANTS = {
    "keys without the parameters of gates": (_without_gates, "another threshold"),
    "scores alone fork": (_with_scores, "a monitor, then plain"),
    "positions of a latch read from the cache": (_latched_from_cache, "answers latched by the prompt"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_caught(engines, root, mutant, monkeypatch):
    change, name = MUTANTS[mutant]
    change(monkeypatch)
    with pytest.raises(AssertionError):
        hold(engines, root, name, mutant)


def test_samples_of_a_gated_request_share_its_prompt(engines):
    cached, _ = engines
    cached.reset_prefix_cache()
    params = capflow.sampling_params(n=3, max_tokens=5, temperature=1.0, ignore_eos=True, **gated(DECODE, **LAST))
    (output,) = cached.generate(PROMPT, params, use_tqdm=False)
    assert [len(sample.token_ids) for sample in output.outputs] == [5, 5, 5]
    again = ask(cached, gated(DECODE, **LAST))
    assert again.num_cached_tokens == 96
