"""Steering of rows that tensor-parallel ranks divide: heads, queries, keys, values and neurons."""

import numpy as np
import pytest

import capflow
from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.steering.action import ActionApplied, Rejected, Steer
from capflow.steering.request import Steering
from capflow.transport.client import Client
from tests.kit.acted import act
from tests.kit.engines import GREEDY, LAYERS, VOCABULARY, answers, engine, prompts, relative_error, save_tiny
from tests.kit.entries import LLAMA_HOOKS
from tests.kit.steered import LOGITS_MAX, RAW, SteeredReference, logits

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(500)]

_EVERY_HOOK = {"hooks": dict.fromkeys(LLAMA_HOOKS, "all")}
_SITES = [Site(n, hook) for n in range(LAYERS) for hook in LLAMA_HOOKS if hook != "final" or n == LAYERS - 1]


def _shift(kv_heads):
    """Return the fields of a module."""
    return {"decode_steering_vectors": {"v": {1: np.linspace(-2, 2, 32 * kv_heads)}, "neurons": {2: [0.5] * 96}}}


def _steered(kv_heads):
    """Return what the requests of a batch ask for, with the length of each prompt: some nothing, some of each hook."""
    draw = np.random.default_rng(7)
    rows = dict.fromkeys(("heads", "q"), 64) | dict.fromkeys("kv", 32 * kv_heads) | {"neurons": 96}
    vector = {hook: lambda width=width: draw.standard_normal(width).tolist() for hook, width in rows.items()}
    last = kv_heads - 1
    one_head = [0.0] * 32 * last + draw.standard_normal(32).tolist()
    patches = {
        hook: {2: [{"positions": [2, -1], "vector": vector[hook]()}]} for hook in rows
    } | {
        "heads": {0: {"positions": [1, 4], "index": 1, "vector": vector["heads"]()[:32], "amount": 0.5}},
        "v": {3: [{"positions": [0, 33], "index": last, "vector": vector["v"]()[:32]}]},
    }  # fmt: skip
    return [
        (9, {}),
        (97, {
            "steering_vectors": {"heads": {1: {"vector": vector["heads"](), "scale": -0.5}}, "k": {0: vector["k"]()}},
            "decode_steering_vectors": {"q": {2: vector["q"]()}, "neurons": {0: vector["neurons"]()}},
        }),
        (97, {}),
        (70, {
            "steering_clamps": {
                "heads": {1: {"index": 1, "value": 0}, 3: {"index": [1, 0], "value": vector["heads"]()}},
                "q": {0: {"index": 0, "value": 0.5, "strength": 0.5}},
                "k": {2: {"index": last, "value": vector["k"]()[:32]}},
                "neurons": {3: {"index": [5, 90, 40], "min": -0.1, "max": 0.2}, 1: {"index": [95, 0], "value": 3}},
            },
            "prefill_steering_clamps": {
                "heads": {2: {"vector": [0.0] * 32 + vector["heads"]()[:32], "value": 1.0}},
                "v": {1: {"vector": one_head, "min": 0.5}},
            },
        }),
        (33, {"steering_patches": patches}),
        (17, {"steering_name": "shift", "steering_vectors": {"heads": {3: vector["heads"]()}}}),
        (3, {}),
    ]  # fmt: skip


def _rows_and_logits(llm, root, asked, turn, positions):
    """Run a batch; return the cached tokens, the answer, the logits and the rows of each request."""
    params = [
        capflow.sampling_params(
            id=f"{turn}-{n}", capture={**_EVERY_HOOK, "positions": positions}, max_tokens=5, logprobs=VOCABULARY,
            **GREEDY, **fields,
        )
        for n, (_, fields) in enumerate(asked)
    ]  # fmt: skip
    outputs = llm.generate(prompts([length for length, _ in asked], seed=5), params, use_tqdm=False)
    data = capflow.open(root)
    return [
        (output.num_cached_tokens, answer, logits(output), {s: data[f"{turn}-{n}"][s].rows for s in _SITES})
        for n, (output, answer) in enumerate(zip(outputs, answers(outputs), strict=True))
    ]


def _turns(model, root, asked, ranks, modules):
    """Run a batch unsteered, steered, and steered with cached prompts; return the results of each turn."""
    arguments = {"tensor_parallel_size": ranks, "in_process": ranks == 1, "block_size": 32, **RAW}
    consumers = [f"filesystem:root={root},capture=requests"]
    with engine(model, sites=["*:*"], consumers=consumers, **arguments) as llm:
        assert llm.capflow_model.fixed == ()
        for name, fields in modules.items():
            llm.steering.register(name, Steering.parse(fields))
        plain = _rows_and_logits(llm, root, [(length, {}) for length, _ in asked], "plain", "all")
        steered = _rows_and_logits(llm, root, asked, "steered", "all")
        cached = _rows_and_logits(llm, root, asked, "cached", ["last_prompt", "all_generated"])
        if ranks > 1:
            _act(llm, root, model)
            _refused(llm)
    return plain, steered, cached


def _act(llm, root, model):
    """Add vectors to a request that runs, and set entries, through the hub; hold its rows against Transformers."""
    core, (prompt,) = llm.llm_engine, prompts((20,), seed=8)
    wide = llm.capflow_model.width_of(Site(1, "v"))
    fields = {
        "steering_vectors": {"heads": {2: [0.3] * 32 + [-0.5] * 32}, "v": {1: np.linspace(-1, 1, wide).tolist()}},
        "steering_clamps": {"neurons": {1: {"index": [90, 3], "value": 2}}, "heads": {0: {"index": 1, "value": 0}}},
    }
    tier, seen = Steering.parse(fields).base, []
    capture = {**_EVERY_HOOK, "positions": "all"}
    core.add_request("acted", prompt, capflow.sampling_params(id="acted", capture=capture, max_tokens=150, **GREEDY))
    while not seen or len(seen[-1].outputs[0].token_ids) < 5:
        seen.extend(core.step())
    with Client(llm.capflow_settings.hubs[0].address) as client:
        relative = Steering.parse({"steering_vectors": {"q": {1: {"vector": [1.0] * 64, "relative": True}}}}).base
        actions = [Steer("acted", relative.vectors), Steer("acted", tier.vectors, clamps=tier.clamps)]
        refused, outcome = act(core, client, actions, lambda: seen.extend(core.step()))
        assert isinstance(refused, Rejected), refused
        assert "steering_vectors.q.1: got a relative vector at q:1, whose rows 2 tensor-parallel" in refused.reason
        assert isinstance(outcome, ActionApplied), outcome
        while core.has_unfinished_requests():
            seen.extend(core.step())
        assert client.results(["acted"], wait=True, timeout=20)["acted"]["filesystem"].status == "ok"
    tokens = [*prompt["prompt_token_ids"], *seen[-1].outputs[0].token_ids][:-1]
    assert 20 < outcome.position < len(tokens)
    acted = {f"decode_{name}": value for name, value in fields.items()}
    _, rows = SteeredReference(model).run(tokens, 20, acted, generated=range(outcome.position, len(tokens)))
    got = capflow.open(root)["acted"]
    for site in _SITES:
        error = relative_error(got[site].rows, rows[site])
        assert error < 1e-5, f"{site} is off by {error:.1e}"


def _refused(llm):
    along = [1.0] * 64
    gates = {"g": {"layer": 1, "hook": "heads", "vector": along}}
    for fields, got in (
        (
            {"steering_vectors": {"heads": {1: {"vector": along, "relative": True}}}},
            "vectors.heads.1: got a relative ve",
        ),
        (
            {"steering_clamps": {"q": {1: {"vector": along, "value": 0}}}},
            "clamps.q.1: got a clamp along a direction at",
        ),
        (
            {"steering_gates": gates},
            "gates.g: got a gate's score at heads:1, whose rows 2 tensor-parallel ranks divide",
        ),
    ):
        with pytest.raises(UsageError) as refused:
            llm.generate(prompts((4,)), capflow.sampling_params(max_tokens=2, **fields), use_tqdm=False)
        assert f"steering_{got}" in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kv_heads", [1, 2], ids=["a KV head that both ranks have", "divided KV heads"])
def test_ranks_that_divide_rows_steer_as_one_rank_and_as_transformers(tmp_path, kv_heads):
    """In one batch with requests that nothing steers, whose rows are the same to the bit."""
    model = save_tiny(tmp_path / "model", num_key_value_heads=kv_heads)
    reference, asked = SteeredReference(model), _steered(kv_heads)
    modules = {"shift": _shift(kv_heads)}
    turns = {ranks: _turns(model, tmp_path / f"rows{ranks}", asked, ranks, modules) for ranks in (1, 2)}
    for one, two in zip(*turns.values(), strict=True):
        for number, ((cached, answer, expected, rows), other) in enumerate(zip(one, two, strict=True)):
            assert (cached, answer) == other[:2]
            assert np.abs(other[2] - expected).max() < LOGITS_MAX
            for site, of_one in rows.items():
                error = relative_error(other[3][site], of_one)
                assert error < 1e-5, f"{site} of request {number} is off by {error:.1e}"
    plain, steered, again = turns[2]
    assert max(cached for cached, *_ in again) >= 64
    given = prompts([length for length, _ in asked], seed=5)
    for number, (prompt, (_, fields)) in enumerate(zip(given, asked, strict=True)):
        (_, answer, got, rows), ids = steered[number], prompt["prompt_token_ids"]
        expected, right = reference.run([*ids, *answer[:-1]], len(ids), fields, modules=modules)
        assert np.abs(got - expected[len(ids) - 1 :]).max() < LOGITS_MAX
        for site in rows:
            error = relative_error(rows[site], right[site])
            assert error < 1e-5, f"{site} of request {number} is off by {error:.1e}"
        assert all(np.array_equal(rows[site], plain[number][3][site]) for site in rows) == (not fields)
        assert np.array_equal(got, plain[number][2]) == (not fields)
        assert np.abs(again[number][2] - got).max() < LOGITS_MAX
