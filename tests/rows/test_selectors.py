"""Selectors through the whole system: real vLLM, the hub, the files; and through its parts, against a model of sets."""

import numpy as np
import pytest

import capflow
from capflow.capture.site import Site
from tests.kit.engines import GREEDY, LAYERS, answers, engine, prompts, relative_error
from tests.kit.rows import FLOAT32_BOUND
from tests.kit.selectors_model import meant

pytestmark = pytest.mark.engine

GENERATED = 20


def asked(name, positions, hooks=None, **more):
    capture = {"hooks": hooks or {"post_block": [1]}, "positions": positions, **more}
    return capflow.sampling_params(id=name, capture=capture, max_tokens=GENERATED, **GREEDY)


def check(data, name, output, reference, positions, layers=(1,), bound=FLOAT32_BOUND):
    """Hold a request's rows against the reference: these positions at these layers, and nothing else."""
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    assert name in data or not positions
    if not positions:
        return
    expected = reference.post_block(tokens)
    capture = data[name]
    capture.verify()
    assert sorted(capture.sites) == [Site(layer, "post_block") for layer in layers]
    for layer in layers:
        got = capture[layer, "post_block"]
        assert got.positions.tolist() == positions, name
        assert got.token_ids.tolist() == [tokens[p] for p in positions]
        assert relative_error(got.rows.astype(np.float32), expected[layer, positions]) < bound, name


FORMS = [
    "last_prompt",
    "all_prompt",
    "all_generated",
    "all",
    [0, 7, -1, 150],
    [-3, 500],
    {"last": 16},
    {"last": 200},
    {"generated": [3, 9]},
    {"generated": [5, None]},
    {"every": 8},
    ["last_prompt", {"every": 5}, {"generated": [0, 2]}, 33],
]


def test_every_form_delivers_its_positions_and_no_others(tiny, reference, tmp_path):
    """Prompts of several chunks among short ones, decoded together."""
    cases = [(form, length, max_rows) for form in FORMS for length, max_rows in ((9, None), (130, None), (70, 4))]
    consumer = f"filesystem:root={tmp_path / 'rows'},capture=requests"
    with engine(tiny, consumers=[consumer], enable_prefix_caching=False) as llm:
        params = [asked(f"r{n}", form, max_rows=rows) for n, (form, _, rows) in enumerate(cases)]
        outputs = llm.generate(prompts([length for _, length, _ in cases]), params, use_tqdm=False)
        data = capflow.open(tmp_path / "rows")
        for n, ((form, length, rows), output) in enumerate(zip(cases, outputs, strict=True)):
            computed = length + GENERATED - 1
            positions = meant(form, length, computed, rows)
            result = output.capture_results["filesystem"]
            assert (result.status, result.error) == ("ok", None), (form, length, rows)
            assert result.budget_reached == (len(meant(form, length, computed)) > len(positions))
            check(data, f"r{n}", output, reference, positions)


def test_layers_are_chosen_in_every_form(tiny, reference, tmp_path):
    forms = {"all": range(LAYERS), "1-2": [1, 2], "2-": [2, 3], "0-3:3": [0, 3]}
    lists = [([-1], [3]), ([0, "2-3"], [0, 2, 3])]
    cases = [*forms.items(), *lists]
    consumer = f"filesystem:root={tmp_path / 'rows'},capture=requests"
    with engine(tiny, consumers=[consumer]) as llm:
        params = [asked(f"r{n}", "all", {"post_block": layers}) for n, (layers, _) in enumerate(cases)]
        outputs = llm.generate(prompts([11] * len(cases)), params, use_tqdm=False)
        data = capflow.open(tmp_path / "rows")
        for n, ((_, layers), output) in enumerate(zip(cases, outputs, strict=True)):
            check(data, f"r{n}", output, reference, list(range(11 + GENERATED - 1)), layers)


CACHED = [
    ("last_prompt", 96),
    ("all_generated", 96),
    ({"generated": [0, 2]}, 96),
    ([-1, 105], 96),
    ([96], 96),
    ([95], 64),
    ({"last": 10}, 64),
    (["last_prompt", 70], 64),
    ([64, -1], 64),
    ([63], 32),
    (list(range(40, 64)), 32),
    ([31], 0),
    ([0], 0),
    ({"every": 50}, 0),
    ("all_prompt", 0),
    ("all", 0),
]


def test_rule_2_a_capture_reads_the_prefix_cache_up_to_its_first_prompt_position(tiny, reference, tmp_path):
    consumer = f"filesystem:root={tmp_path / 'rows'},capture=requests"
    prompt = prompts((100,), seed=6)
    with engine(tiny, consumers=[consumer], enable_prefix_caching=True, block_size=32) as llm:
        nothing = capflow.sampling_params(max_tokens=GENERATED, **GREEDY)
        cold, warm = (llm.generate(prompt, nothing, use_tqdm=False)[0] for _ in range(2))
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 96)
        for n, (form, cached) in enumerate(CACHED):
            (output,) = llm.generate(prompt, asked(f"r{n}", form), use_tqdm=False)
            assert output.num_cached_tokens == cached, form
            assert output.capture_results["filesystem"].status == "ok"
            assert answers([output]) == answers([cold])
            check(
                capflow.open(tmp_path / "rows"),
                f"r{n}",
                output,
                reference,
                meant(form, 100, 100 + GENERATED - 1),
                bound=1e-4,
            )
        assert llm.generate(prompt, nothing, use_tqdm=False)[0].num_cached_tokens == 96


def test_consumers_and_requests_that_want_different_things_each_get_theirs(tiny, reference, tmp_path):
    """One consumer's own spec in float32, one with tokens only; requests' own in float16, with a budget, or none."""
    import duckdb

    consumers = [
        f"filesystem:root={tmp_path / 'rows'},layers=0+2,positions=last_prompt+every:16,dtype=float32,max_rows=4",
        f"duckdb:path={tmp_path / 'scores.duckdb'},site=post_block:3,positions=generated:2:6",
    ]
    lengths = (9, 70, 33, 4)
    own = [
        None,
        {"hooks": {"post_block": [1, 2]}, "positions": {"last": 5}, "dtype": "float16"},
        {"hooks": {"post_block": [3]}, "positions": "all", "max_rows": 10, "dtype": "model"},
        {"hooks": {"post_block": [0]}, "positions": {"generated": [0, None]}},
    ]
    with engine(tiny, consumers=consumers) as llm:
        params = [
            capflow.sampling_params(id=f"r{n}", capture=capture, max_tokens=GENERATED, **GREEDY)
            for n, capture in enumerate(own)
        ]
        outputs = llm.generate(prompts(lengths), params, use_tqdm=False)
        for output in outputs:
            assert {name: r.status for name, r in output.capture_results.items()} == {
                "filesystem": "ok",
                "duckdb": "ok",
            }
    data = capflow.open(tmp_path / "rows")
    for n, (length, capture, output) in enumerate(zip(lengths, own, outputs, strict=True)):
        computed = length + GENERATED - 1
        common = set(meant(["last_prompt", {"every": 16}], length, computed, 4))
        wanted = {0: common, 2: common}
        dtypes = dict.fromkeys((0, 2), "float32")
        if capture is not None:
            mine = meant(capture["positions"], length, computed, capture.get("max_rows"))
            for layer in capture["hooks"]["post_block"]:
                dtypes[layer] = (
                    "float32" if layer in wanted else capture.get("dtype", "float32").replace("model", "float32")
                )
                wanted[layer] = wanted.get(layer, set()) | set(mine)
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        expected = reference.post_block(tokens)
        assert {site.layer for site in data[f"r{n}"].sites} == set(wanted)
        for layer, positions in wanted.items():
            got = data[f"r{n}"][layer, "post_block"]
            assert got.positions.tolist() == sorted(positions)
            assert got.rows.dtype == dtypes[layer]
            bound = 1e-3 if dtypes[layer] == "float16" else FLOAT32_BOUND
            assert relative_error(got.rows, expected[layer, sorted(positions)]) < bound
    with duckdb.connect(str(tmp_path / "scores.duckdb"), read_only=True) as database:
        counts = dict(database.sql("SELECT request_id, rows FROM requests").fetchall())
    # It reads requests' own, too: what it was given is the union of both.
    for n, (length, capture) in enumerate(zip(lengths, own, strict=True)):
        computed = length + GENERATED - 1
        wanted = {3: set(meant({"generated": [2, 6]}, length, computed))}
        if capture is not None:
            mine = meant(capture["positions"], length, computed, capture.get("max_rows"))
            for layer in capture["hooks"]["post_block"]:
                wanted[layer] = wanted.get(layer, set()) | set(mine)
        assert counts[f"r{n}"] == sum(map(len, wanted.values()))
