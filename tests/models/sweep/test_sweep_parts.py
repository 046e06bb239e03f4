"""Sweeps over heads, queries, keys, values, neurons and experts, against Transformers with hooks, one run at a time."""

import itertools
import json
import re
from types import SimpleNamespace

import duckdb
import msgspec
import numpy as np
import pytest
import torch

import capflow
from capflow.capture.site import SHAPED_HOOKS, Site
from capflow.errors import UsageError
from capflow_models import SweepResult
from capflow_models.sweep import program
from capflow_models.sweep.parts import Chosen, RowPart
from capflow_models.sweep.patch import PatchOptions, computed, plan_of
from capflow_models.sweep.plan import ABLATIONS, DIRECTIONS
from capflow_models.sweep.program import SweepJob
from capflow_models.sweep.results import heatmap
from capflow_models.sweep.results.heatmap import figure_of
from capflow_models.sweep.results.result import strongest_table
from tests.kit.engines import SHAPE, Reference, environment, in_this_process, save_tiny
from tests.kit.hooked import Hooked

BOUND = 1e-4
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "enable_prefix_caching": True,
    "max_model_len": 128,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 136,
    "kv_cache_memory_bytes": 64 << 20,
}
AT = [1, 3]
"""The layers of the sweep."""

HEADS, HEAD = SHAPE["num_attention_heads"], 32
COUNTS = {"heads": HEADS, "q": HEADS, "k": 1, "v": 1, "neurons": 3}
"""How many parts each hook has; 40 neurons are a group, so the last one of 96 has 16."""

UNITS = {"heads": HEAD, "q": HEAD, "k": HEAD, "v": HEAD, "neurons": 1, "router": 1}


@pytest.fixture(scope="module")
def pairs():
    """A short pair, and one whose prompts have more tokens than a block of the cache, which is 32."""
    rng = np.random.default_rng(3)
    begin, end = rng.integers(50, 290, 33).tolist(), rng.integers(50, 290, 5).tolist()
    return [
        {"id": "short", "clean": [7, 60, 8, 9], "corrupted": [7, 70, 8, 9], "answer": 30, "wrong_answer": 31},
        {"id": "long", "clean": [*begin, 60, *end], "corrupted": [*begin, 70, *end], "answer": 40, "wrong_answer": 41},
    ]


def every(**options):
    """Options that patch and ablate in one sweep."""
    return PatchOptions(engine=ENGINE, direction="all", allowed=(*DIRECTIONS, *ABLATIONS), **options)


@pytest.fixture(scope="module")
def swept(tiny_with_words, pairs, tmp_path_factory):
    """A sweep of every hook with parts, its plan, its directory, and the cached tokens of each request."""
    out, cached, lengths = tmp_path_factory.mktemp("parts") / "out", [], []
    options = every(
        hooks=SHAPED_HOOKS[:5], layers=AT, positions="changed,together", group=40, metrics=("logit_diff", "kl")
    )
    plan = plan_of(tiny_with_words, pairs, options)
    generate = capflow.LLM.generate

    def counted(self, *args, **kwargs):
        outputs = generate(self, *args, **kwargs)
        cached.extend(output.num_cached_tokens for output in outputs)
        lengths.append(sum(len(output.prompt_token_ids) for output in outputs))
        return outputs

    with pytest.MonkeyPatch.context() as patched, in_this_process():
        patched.setattr(capflow.LLM, "generate", counted)
        result = computed(plan, options, out)
    return result, plan, out, cached


def expected_runs(hooked, pairs):
    """Return a function that gives the new rows of a direction, and the prompt that it changes."""
    runs = {name: [hooked.run(pair[name]) for pair in pairs] for name in ("clean", "corrupted")}
    rows = [rows for some in runs.values() for _, rows in some]

    def given(number, direction, at, positions):
        base = "corrupted" if direction == "denoise" else "clean"
        width = rows[0][at].shape[1]
        if direction == "zero":
            new = torch.zeros(width)
        elif direction == "mean":
            new = torch.cat([each[at][1:] for each in rows]).mean(0)
        else:
            new = runs["clean" if direction == "denoise" else "corrupted"][number][1][at][positions]
        return pairs[number][base], new

    return given, runs


def check(result, pairs, reference, units=UNITS):
    """Assert that each value is that of Transformers; return the largest change of a recovery by hook."""
    hooked = Hooked(reference.model, tuple(units))
    given, runs = expected_runs(hooked, pairs)
    moved, rows, done = {}, result.patches.to_pylist(), {}
    for row in rows:
        number = [pair["id"] for pair in pairs].index(row["pair"])
        at, unit = (row["layer"], row["hook"]), units[row["hook"]]
        clean, corrupted = (runs[name][number][0] for name in ("clean", "corrupted"))
        positions = list(range(len(pairs[number]["clean"]))) if row["position"] is None else [row["position"]]
        tokens, new = given(number, row["direction"], at, positions)
        part = slice(row["index"] * unit, (row["index"] + row["entries"]) * unit)
        key = (number, row["direction"].replace("resample", "noise"), *at, row["position"], row["index"])
        if key not in done:
            done[key] = hooked.run(tokens, (*at, positions, new[..., part], part))[0]
        logits = done[key]

        def value(logits, row=row, pair=pairs[number], clean=clean):
            if row["metric"] == "logit_diff":
                return float(logits[pair["answer"]] - logits[pair["wrong_answer"]])
            reference, logprobs = clean.double().log_softmax(-1), logits.double().log_softmax(-1)
            return float((reference.exp() * (reference - logprobs)).sum())

        assert row["value"] == pytest.approx(value(logits), abs=BOUND), row
        assert row["clean"] == pytest.approx(value(clean), abs=BOUND)
        assert row["corrupted"] == pytest.approx(value(corrupted), abs=BOUND)
        if row["metric"] == "logit_diff":
            change = abs(row["value"] - (row["corrupted"] if row["direction"] == "denoise" else row["clean"]))
            moved[row["hook"]] = max(change, moved.get(row["hook"], 0.0))
    return moved


def test_every_part_equals_transformers_with_hooks(swept, pairs, reference):
    result, _, _, cached = swept
    rows = result.patches.num_rows
    assert rows == 2 * (5 * 2 * 2) * len(AT) * sum(COUNTS.values()), "directions, pairs, positions, layers and parts"
    moved = check(result, pairs, reference)
    assert min(moved.values()) > 0.02, moved
    assert max(cached) >= 32, "the prefix cache was on, and patched requests shared blocks"
    assert ENGINE["max_num_batched_tokens"] % 39, "some of the long prompts are computed in two steps"
    groups = {(row["index"], row["entries"]) for row in result.patches.to_pylist() if row["hook"] == "neurons"}
    assert groups == {(0, 40), (40, 40), (80, 16)}
    noise, resampled = (
        [row["value"] for row in result.patches.to_pylist() if row["direction"] == name]
        for name in ("noise", "resample")
    )
    assert noise == pytest.approx(resampled, abs=BOUND), "the corrupted prompt's rows in the clean run, both"


def test_tables_and_pictures_have_heads(swept, tmp_path, monkeypatch):
    result = swept[0]
    result.save(tmp_path)
    again = SweepResult.open(tmp_path)
    assert again.patches.equals(result.patches)
    with duckdb.connect(str(tmp_path / "sweep.duckdb")) as database:
        cells = database.execute(
            "SELECT layer, index, value FROM summary WHERE hook = 'heads' AND direction = 'zero' AND metric = 'kl' "
            "AND place = 'together' ORDER BY ALL"
        ).fetchall()
    assert [cell[:2] for cell in cells] == list(itertools.product(AT, range(HEADS)))
    figure = result.heatmap("kl", "zero")
    titles = {axes.get_title(loc="left"): axes for axes in figure.axes}
    grid = titles["heads, all positions together"].images[0].get_array()
    assert grid.shape == (len(AT), HEADS)
    recovery = {
        (row["layer"], row["index"]): row["recovery"] for row in result.summary.to_pylist()
        if (row["hook"], row["direction"], row["metric"], row["place"]) == ("heads", "zero", "kl", "together")
    }  # fmt: skip
    assert all(grid[AT.index(at[0]), at[1]] == pytest.approx(value) for at, value in recovery.items())
    neurons = titles["neurons, all positions together"]
    assert [label.get_text() for label in neurons.get_xticklabels()] == ["0-39", "40-79", "80-95"]
    assert len([title for title in titles if title]) == 2 * len(COUNTS) < heatmap.PANELS_MAX
    monkeypatch.setattr(heatmap, "PANELS_MAX", 7)
    assert len([axes for axes in result.heatmap("kl", "zero").axes if axes.get_title(loc="left")]) == 7
    assert "; mean over 2 pairs. 3 further places, where less changes" in figure_of(result.summary, "zero", "kl")[0]
    assert re.search(r"<td>(heads|q|k|v|neurons):\d\[\d", strongest_table(result.summary, "zero", "kl"))


def test_a_stopped_sweep_of_heads_continues_and_another_group_is_another_run(swept, tiny_with_words, pairs, tmp_path):
    out = swept[2]
    (tmp_path / "out").mkdir()
    lines = (out / "runs.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "out" / "runs.jsonl").write_bytes(b"".join(lines[:-7]))
    (tmp_path / "out" / "settings.json").write_bytes((out / "settings.json").read_bytes())
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    job = SweepJob(
        tiny_with_words, str(tmp_path / "pairs.jsonl"), str(tmp_path / "out"), "heads,neurons", "1", "together",
        "resample", "kl", 512, 10, 0.9, engine=ENGINE, kind="ablate", group=40,
    )  # fmt: skip
    program.run(job)
    assert (tmp_path / "out" / "report.html").read_text().count("data:image/png;base64,") == 1
    lines = (tmp_path / "out" / "runs.jsonl").read_bytes().splitlines()
    assert {"heads:1[0]", "heads:1[1]", "neurons:1[80-95]"} <= {json.loads(line)["site"] for line in lines}
    with pytest.MonkeyPatch.context() as patched:
        shown = []
        patched.setattr(program, "show_plan", lambda plan, done: shown.append((plan.run_count, done)))
        program.run(msgspec.structs.replace(job, group=96, dry_run=True))
    assert shown == [(4 + 2 * 3, 4 + 2 * 2)], "the runs of heads are there, those of other neurons not"


@pytest.mark.long
def test_experts_equal_transformers_with_hooks(pairs, tmp_path):
    model = save_tiny(tmp_path / "mixtral", "mixtral")
    options = every(hooks="router,heads", positions="changed,last,together", metrics=("logit_diff", "kl"))
    plan = plan_of(model, pairs, options)
    with in_this_process():
        result = computed(plan, options, tmp_path / "out")
    moved = check(result, pairs, Reference(model), {"router": 1, "heads": HEAD})
    assert min(moved.values()) > 0.02, moved
    assert {row["index"] for row in result.patches.to_pylist() if row["hook"] == "router"} == set(range(4))


@pytest.mark.long
def test_parts_of_rows_that_two_ranks_divide(tiny, pairs, reference, tmp_path):
    options = PatchOptions(
        engine={**ENGINE, "tensor_parallel_size": 2},
        hooks=SHAPED_HOOKS[:5],
        layers=AT,
        positions="changed,together",
        index="all,whole",
        group=40,
        direction="noise",
        allowed=DIRECTIONS,
        metrics=("logit_diff", "kl"),
    )
    plan = plan_of(tiny, pairs, options)
    with environment(VLLM_CPU_OMP_THREADS_BIND="0|1", VLLM_LOGGING_LEVEL="ERROR"):
        result = computed(plan, options, tmp_path / "out")
    rows = result.patches.to_pylist()
    entries = result.patches.filter([row["index"] is not None for row in rows])
    assert {row["hook"] for row in rows if row["index"] is None} == set(COUNTS)
    assert entries.num_rows == 2 * 2 * 2 * len(AT) * sum(COUNTS.values()), "metrics, pairs, positions, layers and parts"
    moved = check(SimpleNamespace(patches=entries), pairs, reference)
    assert min(moved.values()) > 0.02, moved


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hooks": "heads", "index": 2}, r"index: got 2, expected 0\.\.1, as heads:0 has 2 heads"),
        ({"hooks": "q,k", "index": "0-1"}, r"index: got 1, expected 0\.\.0, as k:0 has 1 heads"),
        ({"hooks": "neurons", "index": [96]}, r"index: got 96, expected 0\.\.95, as neurons:0 has 96 neurons"),
        (
            {"hooks": "router"},
            r"hooks: got router:\*, expected a site of LlamaDecoderLayer \(the layer's MLP is no mix",
        ),
        (
            {"hooks": "heads,post_block", "index": 1},
            "index: got numbers with the hook post_block, whose rows are chang",
        ),
        ({"hooks": "heads", "index": "first"}, "index: got first, expected all, whole, numbers such as 3 or 2-5, or"),
        ({"hooks": "heads", "index": "3-1"}, "index: got 3-1, expected all, whole"),
        ({"hooks": "heads", "index": -1}, "index: got -1, expected all, whole"),
        ({"hooks": "neurons", "group": 0}, "group: got 0, expected 1 or more"),
        ({"hooks": "neurons", "group": 5000}, r"group: got 5000, expected 1\.\.4096"),
    ],
)
def test_a_wrong_part_is_named(tiny, pairs, options, message):
    with pytest.raises(UsageError, match=message):
        plan_of(tiny, pairs, PatchOptions(**{"engine": ENGINE, **options}))


def test_parts_are_named_and_grouped():
    sites, shapes = [Site(0, "neurons"), Site(1, "post_block")], {Site(0, "neurons"): (10,)}

    def parts(index, group=4):
        return [str(part) for part in Chosen.parse(index).parts(sites, shapes, group)]

    assert parts("all") == ["neurons:0[0-3]", "neurons:0[4-7]", "neurons:0[8-9]", "post_block:1"]
    assert parts("whole") == ["neurons:0", "post_block:1"]
    assert parts("1-3,7,9,8", 2) == ["neurons:0[1-2]", "neurons:0[3]", "neurons:0[7-8]", "neurons:0[9]", "post_block:1"]
    assert parts("whole,5") == ["neurons:0", "neurons:0[5]", "post_block:1"]
    for text in parts("whole,1-3"):
        assert str(RowPart.parse(text)) == text
    assert RowPart.parse("blocks.3.attn.hook_z[1]") == RowPart(Site(3, "heads"), 1, 1)
    for text in ("heads:3[2-1]", "heads:3[", "heads[1]", "heads:3[-1]"):
        with pytest.raises(UsageError, match="site: got heads"):
            RowPart.parse(text)
    rows = np.arange(12, dtype=np.float32).reshape(2, 6)
    assert RowPart(Site(0, "heads"), 1, 2).of(rows, (3, 2)).tolist() == [[2, 3, 4, 5], [8, 9, 10, 11]]
    assert RowPart(Site(0, "heads")).of(rows, (3, 2)) is rows
