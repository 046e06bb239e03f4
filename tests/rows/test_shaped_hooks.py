"""Rows and steering of hooks whose rows have a shape of their own, held against Transformers.

One engine is shared; it has few blocks, so that requests preempt each other, and its prompts come in chunks.
"""

import dataclasses

import numpy as np
import pytest

import capflow
from capflow.capture.site import DIVIDED_HOOKS, Site
from capflow.errors import UsageError
from capflow.probes.probe import Probe, save_vector
from capflow.transport.client import Client
from capflow_engine.compat import engine as compat
from tests.kit.children import Run, run
from tests.kit.engines import GREEDY, LAYERS, engine, prompts, relative_error, save_tiny
from tests.kit.entries import LLAMA_HOOKS, shape_of
from tests.kit.experts import ExpertReference, routed, taken
from tests.kit.rows import FLOAT32_BOUND
from tests.kit.selectors_model import meant
from tests.kit.steered import SteeredReference, vector
from tests.kit.watching import watch

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

CROWDED = {"block_size": 32, "num_gpu_blocks_override": 10, "max_model_len": 160, "sites": ["*:*"]}
EVERYTHING = {"hooks": dict.fromkeys(LLAMA_HOOKS, "all"), "positions": "all"}
DIVIDED = {"hooks": dict.fromkeys(DIVIDED_HOOKS, "all"), "positions": "all"}
ASKED = [
    (EVERYTHING, {}),
    ({"hooks": {"heads": [1], "k": [0]}, "positions": "last_prompt"}, {}),
    ({"hooks": {"neurons": "all", "q": [2, 3], "post_block": [3]}, "positions": "all_generated", "max_rows": 9}, {}),
    ({"hooks": {"v": [-1], "neurons": [0]}, "positions": [{"every": 3}, "last_prompt"], "dtype": "float16"}, {}),
    (None, {}),
    (
        {"hooks": {"heads": "all", "v": [2], "mlp_out": "all"}, "positions": "all"},
        {
            "steering_clamps": {"heads": {1: {"index": 0, "value": 0}}, "neurons": {2: {"index": [5, 90], "max": 0}}},
            "decode_steering_vectors": {"k": {0: vector(1, hook="k")}},
            "steering_patches": {"q": {3: {"positions": [4, -1], "vector": vector(2, hook="q")[:32], "index": 1}}},
        },
    ),
]
LENGTHS = (60, 97, 62, 33, 58, 59)


@pytest.fixture(scope="module")
def reference(tiny):
    return SteeredReference(tiny)


@pytest.fixture(scope="module")
def shared(tiny, tmp_path_factory):
    """An engine with a controller, which reads rows of the stream beside them, and the directory of its rows."""
    root = tmp_path_factory.mktemp("rows") / "rows"
    Probe.make(Site(1, "post_block"), vector(8)).save(root.parent / "probe.safetensors")
    save_vector(root.parent / "added.safetensors", Site(2, "mlp_out"), vector(9))
    gate = f"gate:probe={root.parent}/probe.safetensors,vector={root.parent}/added.safetensors,threshold=1e9,score=dot"
    consumers = [
        f"filesystem:root={root},capture=requests",
        f"{gate},positions=all_generated,requests=watched.*,mode=ordered",
    ]
    with engine(tiny, consumers=consumers, **CROWDED) as llm:
        yield llm, root


def hold(capture, spec, rows, tokens, prompt, bound=FLOAT32_BOUND):
    """Hold the rows of a request against the reference's, at every site and position that it asked for."""
    capture.verify()
    layers = {
        hook: range(LAYERS) if some == "all" else [n % LAYERS for n in some] for hook, some in spec["hooks"].items()
    }
    layers |= {"final": [LAYERS - 1]} if "final" in layers else {}
    assert set(capture.sites) == {Site(n, hook) for hook, some in layers.items() for n in some}
    positions = meant(spec["positions"], prompt, len(tokens), spec.get("max_rows"))
    dtype, bound = (np.float16, 2e-3) if spec.get("dtype") == "float16" else (np.float32, bound)
    for site in capture.sites:
        assert capture[site].positions.tolist() == positions, site
        assert capture[site].token_ids.tolist() == [tokens[n] for n in positions], site
        assert capture[site].shaped.shape == (len(positions), *shape_of(site.hook)), site
        assert capture[site].rows.dtype == dtype, site
        error = relative_error(capture[site].rows, rows[site][positions])
        assert error < bound, f"{site} is off by {error:.1e}"


EXPERTS = {"hooks": {"router": "all", "heads": [1], "post_block": "all"}, "positions": "all"}
FORCED = {"steering_clamps": {"router": {1: {"index": 3, "value": 1e4}, 2: {"index": [0, 2], "value": -1e4}}}}


def hold_experts(made, expected):
    """Assert that experts are those expected, with their weights within 1e-5; any may have the weight 0."""
    ids, weights = expected
    assert np.array_equal(made.ids[weights > 0], ids[weights > 0])
    assert np.abs(made.weights - weights).max() < 1e-5


def test_router_logits_are_captured_and_steered(tmp_path):
    """The first test: vLLM makes no model with experts beside a running engine of another in one process."""
    model, root = save_tiny(tmp_path / "mixtral", "mixtral"), tmp_path / "rows"
    reference = ExpertReference(model)
    asked = [
        {},
        FORCED,
        {"steering_vectors": {"router": {0: vector(3, hook="router")}}},
        {"steering_patches": {"router": {3: {"positions": [2], "vector": [9.0], "index": 1}}}},
    ]
    with engine(model, consumers=[f"filesystem:root={root},capture=requests"], **CROWDED) as llm:
        assert {site.hook for site in llm.capflow_model.sites} >= {"router", "heads", "q"}
        params = [
            capflow.sampling_params(id=f"r{n}", capture=EXPERTS, max_tokens=4, **GREEDY, **fields)
            for n, fields in enumerate(asked)
        ]
        with routed(llm) as steps:
            outputs = llm.generate(prompts((9, 70, 12, 5)), params, use_tqdm=False)
        forms = [llm.capflow_model.router_of(layer) for layer in range(LAYERS)]
    assert forms == [capflow.RouterForm(2, renormalised=True)] * LAYERS
    for layer, form in enumerate(forms):  # by the logits that vLLM's routers are given, steered or not
        for given, *chosen in steps[layer]:
            hold_experts(capflow.chosen_experts(given, form), chosen)
    data = capflow.open(root)
    for n, (output, fields) in enumerate(zip(outputs, asked, strict=True)):
        prompt, answer = output.prompt_token_ids, list(output.outputs[0].token_ids)
        tokens = [*prompt, *answer[:-1]]
        with taken(reference.layers) as experts:
            logits, rows = reference.run(tokens, len(prompt), fields)
        hold(data[f"r{n}"], EXPERTS, rows, tokens, len(prompt))
        for layer, form in enumerate(forms):
            if any(layer in layers for one in fields.values() for layers in one.values()):
                # The rows are those before steering; what the model takes is chosen by what they become.
                clamp = fields.get("steering_clamps", {}).get("router", {}).get(layer)
                if clamp is not None:
                    steered = data[f"r{n}"][layer, "router"].rows.copy()
                    steered[:, clamp["index"]] = clamp["value"]
                    hold_experts(capflow.chosen_experts(steered, form), experts[layer][0])
                    assert not np.array_equal(data[f"r{n}"].experts(layer).ids, experts[layer][0][0])
            else:
                hold_experts(data[f"r{n}"].experts(layer), experts[layer][0])
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == answer
        plain = reference.run(tokens, len(prompt), {})[0]
        assert (np.abs(logits - plain).max() > 1e-3) == bool(fields)


def test_requests_for_different_hooks_and_positions_in_one_batch(shared, reference):
    """They are chunked and preempted."""
    llm, root = shared
    counts = watch(llm)
    params = [
        capflow.sampling_params(id=f"r{n}", capture=spec, max_tokens=60, **GREEDY, **fields)
        for n, (spec, fields) in enumerate(ASKED)
    ]
    outputs = llm.generate(prompts(LENGTHS), params, use_tqdm=False)
    data = capflow.open(root)
    for n, (output, (spec, fields)) in enumerate(zip(outputs, ASKED, strict=True)):
        prompt, answer = output.prompt_token_ids, list(output.outputs[0].token_ids)
        assert len(answer) == 60
        if spec is None:
            assert f"r{n}" not in data
            continue
        tokens = [*prompt, *answer[:-1]]
        hold(data[f"r{n}"], spec, reference.run(tokens, len(prompt), fields)[1], tokens, len(prompt))
    assert counts["preempted"] > 0
    assert counts["chunks"] > 1


@pytest.mark.parametrize(
    ("positions", "cached"), [("all_generated", 96), ([{"last": 20}], 64), ([40, "last_prompt"], 32), ("all", 0)]
)
def test_captured_positions_of_a_cached_prompt_are_computed_again(shared, reference, positions, cached):
    llm, root = shared
    (prompt,) = prompts((98,), seed=6)
    llm.generate([prompt], capflow.sampling_params(max_tokens=1, **GREEDY), use_tqdm=False)
    spec, name = {**DIVIDED, "positions": positions}, f"cached {cached}"
    (output,) = llm.generate(
        [prompt], capflow.sampling_params(id=name, capture=spec, max_tokens=3, **GREEDY), use_tqdm=False
    )
    assert output.num_cached_tokens == cached
    tokens = [*prompt["prompt_token_ids"], *list(output.outputs[0].token_ids)[:-1]]
    hold(capflow.open(root)[name], spec, reference.run(tokens, 98, {})[1], tokens, 98)


def test_rows_beside_those_that_a_controller_scores(shared, reference):
    """Rows of `k`, of half the stream's width, leave the step's rows no whole number of the stream's."""
    llm, root = shared
    spec = {"hooks": {"k": [0]}, "positions": [70, 72, 74]}
    params = capflow.sampling_params(id="watched.1", capture=spec, max_tokens=8, **GREEDY)
    (output,) = llm.generate(prompts((70,), seed=8), params, use_tqdm=False)
    tokens = [*output.prompt_token_ids, *list(output.outputs[0].token_ids)[:-1]]
    hold(capflow.open(root)["watched.1"], spec, reference.run(tokens, 70, {})[1], tokens, 70)


def test_many_requests_that_set_different_entries_are_done_together(shared, reference):
    llm, root = shared
    spec = {"hooks": {"attn_out": [1], "post_block": [3]}, "positions": "all"}
    asked = [{"steering_clamps": {"heads": {1: {"index": n % 2, "value": 0.1 * n}}}} for n in range(9)]
    params = [
        capflow.sampling_params(id=f"set{n}", capture=spec, max_tokens=4, **GREEDY, **fields)
        for n, fields in enumerate(asked)
    ]
    outputs = llm.generate(prompts([5] * 9, seed=12), params, use_tqdm=False)
    data = capflow.open(root)
    for n, (output, fields) in enumerate(zip(outputs, asked, strict=True)):
        tokens = [*output.prompt_token_ids, *list(output.outputs[0].token_ids)[:-1]]
        hold(data[f"set{n}"], spec, reference.run(tokens, 5, fields)[1], tokens, 5)


@pytest.mark.parametrize(("probed", "steered"), [("q", "k"), ("q", "v"), ("k", "v")])
def test_a_gate_acts_on_what_attention_is_given_beside_what_it_scores(shared, reference, probed, steered):
    """The gate opens at some of the tokens whose keys or values are then set, in the same call of attention."""
    llm, root = shared
    name, probe, value = f"{probed} {steered}", vector(13, hook=probed), 0.5
    gate = {"hook": probed, "layer": 1, "vector": probe, "threshold": 0.0}
    set_there = {steered: {1: {"index": 0, "value": value, "gate": "g"}}}
    spec = {"hooks": {probed: [1], steered: [1], "heads": [1], "post_block": [3]}, "positions": "all"}
    params = capflow.sampling_params(
        id=name, capture=spec, max_tokens=4, steering_gates={"g": gate}, steering_clamps=set_there, **GREEDY
    )
    (output,) = llm.generate(prompts([40], seed=14), params, use_tqdm=False)
    tokens = [*output.prompt_token_ids, *list(output.outputs[0].token_ids)[:-1]]
    seen, opened = {}, []

    def steer(site, rows):
        seen[site] = rows[0].numpy().copy()
        if site == Site(1, probed):
            opened.extend((seen[site] @ probe >= 0).tolist())
        if site == Site(1, steered):
            rows[0, opened] = value

    reference._forward(tokens, steer)
    assert 5 < sum(opened) < 35
    hold(capflow.open(root)[name], spec, seen, tokens, 40)


def test_each_of_n_samples_has_rows_of_its_own(shared, reference):
    llm, root = shared
    (prompt,) = prompts((20,), seed=9)
    dice = {"temperature": 1.0, "seed": 7, "ignore_eos": True, "detokenize": False}
    params = capflow.sampling_params(id="dice", capture=DIVIDED, max_tokens=5, n=2, **dice)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    one, two = output.outputs
    assert list(one.token_ids) != list(two.token_ids)
    for sample in output.outputs:
        tokens = [*prompt["prompt_token_ids"], *list(sample.token_ids)[:-1]]
        rows = reference.run(tokens, 20, {})[1]
        hold(capflow.open(root)[f"dice#{sample.index}"], DIVIDED, rows, tokens, 20)


def test_an_aborted_request_has_the_rows_that_were_computed(shared, reference):
    llm, root = shared
    core = llm.llm_engine
    (prompt,) = prompts((70,), seed=5)
    core.add_request("cut", prompt, capflow.sampling_params(id="cut", capture=DIVIDED, max_tokens=50, **GREEDY))
    answer = []
    for _ in range(6):
        for output in core.step():
            answer = list(output.outputs[0].token_ids)
    core.abort_request(["cut"])
    compat.flush(core)
    with Client(llm.capflow_settings.hubs[0].address) as client:
        results = client.results(["cut"], wait=True, timeout=20)["cut"]
    assert results["filesystem"].status == "ok"
    capture = capflow.open(root)["cut"]
    assert 70 < capture.computed_length <= 70 + len(answer)
    tokens = [*prompt["prompt_token_ids"], *answer][: capture.computed_length]
    hold(capture, DIVIDED, reference.run(tokens, 70, {})[1], tokens, 70)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"capture": {"hooks": {"router": [1]}}}, "router"),
        ({"capture": {"hooks": {"heads": [4]}}}, "4"),
        ({"steering_vectors": {"heads": {1: [1.0] * 96}}}, "heads.1: got 96 numbers, expected 64, 2 heads of 32"),
        ({"steering_vectors": {"neurons": {1: [1.0] * 64}}}, "neurons.1: got 64 numbers, expected 96"),
        (
            {"steering_clamps": {"heads": {1: {"index": 2, "value": 0}}}},
            "heads.1.index: got 2, expected a head of 0..1",
        ),
        (
            {"steering_gates": {"g": {"hook": "k", "layer": 1, "vector": [1.0] * 64, "threshold": 0.0}}},
            "steering_gates.g.vector: got 64 numbers, expected 32, 1 heads of 32",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_it_runs(shared, fields, words):
    llm, _ = shared
    with pytest.raises(UsageError) as refused:
        llm.generate(prompts((4,)), capflow.sampling_params(max_tokens=2, **fields), use_tqdm=False)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


# --- other engines ---


COMPILED = {"enforce_eager": False}


@pytest.mark.parametrize(
    ("own_class", "more", "bound"),
    [
        pytest.param(False, {}, FLOAT32_BOUND, id="backend"),
        pytest.param(False, COMPILED, FLOAT32_BOUND, id="backend, compiled", marks=pytest.mark.long),
        pytest.param(True, COMPILED, FLOAT32_BOUND, id="compiled", marks=pytest.mark.long),
        pytest.param(True, COMPILED | {"dtype": "bfloat16"}, 0.05, id="compiled in bfloat16", marks=pytest.mark.long),
    ],
)
def test_rows_in_another_engine(tiny, reference, backend, tmp_path, own_class, more, bound):
    model, reference = (tiny, reference) if own_class else backend
    root, arguments = tmp_path / "rows", CROWDED | more
    asked = [each for each in ASKED if each[0] is not None and "dtype" not in each[0]]
    with engine(model, consumers=[f"filesystem:root={root},capture=requests"], **arguments) as llm:
        params = [
            capflow.sampling_params(id=f"r{n}", capture={**spec, "dtype": "float32"}, max_tokens=20, **GREEDY, **fields)
            for n, (spec, fields) in enumerate(asked)
        ]
        outputs = llm.generate(prompts(LENGTHS[: len(asked)]), params, use_tqdm=False)
    data = capflow.open(root)
    for n, (output, (spec, fields)) in enumerate(zip(outputs, asked, strict=True)):
        prompt = output.prompt_token_ids
        tokens = [*prompt, *list(output.outputs[0].token_ids)[:-1]]
        hold(data[f"r{n}"], spec, reference.run(tokens, len(prompt), fields)[1], tokens, len(prompt), bound)


@pytest.mark.long
def test_neurons_where_the_model_would_quantise_them_for_its_projection(tiny, reference, tmp_path, monkeypatch):
    """As with checkpoints in FP8 on a GPU: what quantises is not called where neurons are tapped, nor by a dry run."""
    from vllm.model_executor.layers.fusion import fused_act_quant
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

    def fused(x, linear):
        raise AssertionError

    key = fused_act_quant.SiluAndMul, kFp8StaticTensorSym
    monkeypatch.setitem(fused_act_quant._FUSED_ACT_QUANT, key, fused)
    monkeypatch.setattr(LinearBase, "_input_quant_key", kFp8StaticTensorSym, raising=False)
    root = tmp_path / "rows"
    with engine(tiny, consumers=[f"filesystem:root={root},capture=requests"], sites=["neurons:*", "heads:*"]) as llm:
        spec = {"hooks": {"neurons": "all", "heads": "all"}, "positions": "all"}
        params = capflow.sampling_params(id="r", capture=spec, max_tokens=3, **GREEDY)
        (output,) = llm.generate(prompts((9,)), params, use_tqdm=False)
    tokens = [*output.prompt_token_ids, *list(output.outputs[0].token_ids)[:-1]]
    hold(capflow.open(root)["r"], spec, reference.run(tokens, 9, {})[1], tokens, 9)


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.mark.long
@pytest.mark.parametrize(
    ("engine_arguments", "v2"), [({"speculative_config": NGRAM}, False), ({}, True)], ids=["drafts", "v2"]
)
def test_rows_in_a_process_of_their_own(tiny, reference, tmp_path, engine_arguments, v2):
    """Rows of rejected drafts never come, those of accepted ones once; and the V2 runner has the same rows."""
    tokens = (60, 33, 48, 61) if not v2 else (5, 9, 4, 6)
    asked = [
        {"id": f"r{n}", "prompt": prompt["prompt_token_ids"], "capture": EVERYTHING, "max_tokens": most}
        for n, (prompt, most) in enumerate(zip(prompts((30, 5, 70, 17)), tokens, strict=True))
    ]
    job = Run(tiny, str(tmp_path / "rows"), asked, engine={"sites": ["*:*"], **engine_arguments}, v2=v2)
    answers, report = run(dataclasses.replace(job))
    if v2:
        assert report["runner"] == "vllm.v1.worker.cpu.model_runner"
    else:
        assert report["counts"]["accepted"] > 10
        assert report["counts"]["rejected"] > 10
    data = capflow.open(job.root)
    for answer in answers:
        assert answer.status == "ok"
        tokens = [*answer.prompt, *answer.tokens[:-1]]
        rows = reference.run(tokens, len(answer.prompt), {})[1]
        hold(data[answer.id], EVERYTHING, rows, tokens, len(answer.prompt))
