"""Gates in real engines, against a float64 reference: every mode and operation, however steps are cut."""

import numpy as np
import pytest

from capflow.capture.site import DIVIDED_HOOKS, Site
from tests.kit.engines import engine, relative_error, save_tiny
from tests.kit.gated import (
    ALL_MODES,
    MUTANTS,
    GatedReference,
    GatedRun,
    cases,
    params_of,
    prove,
    run_child,
    score_of,
    steered_of,
)
from tests.kit.steered import RAW
from tests.kit.waiting import eventually
from tests.kit.watching import watch

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]

LENGTHS = (5, 17, 70, 9, 33, 12)
TOKENS = 9


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(model):
    return GatedReference(model)


@pytest.fixture(scope="module")
def modes(reference):
    return cases(reference, ALL_MODES, LENGTHS, TOKENS)


def consumer(tmp_path):
    return {"consumers": [f"filesystem:root={tmp_path / 'rows'},capture=requests"], "sites": ["*:*"], **RAW}


def test_every_mode_in_one_batch_and_in_chunks(model, reference, modes, tmp_path):
    assert sum(case.flips for case in modes) > 100
    assert all(case.opened + case.shut for case in modes)
    with engine(model, max_num_seqs=64, **consumer(tmp_path)) as llm:
        counts = watch(llm)
        prove(llm, tmp_path / "rows", reference, modes, TOKENS)
        assert counts["chunks"] > 1


def test_each_kind_of_score_and_positions_compiled(model, reference, modes, tmp_path):
    """Every mode compiled is in the test of two ranks."""
    with engine(model, enforce_eager=False, max_num_seqs=64, **consumer(tmp_path)) as llm:
        prove(llm, tmp_path / "rows", reference, modes[::3], TOKENS)


@pytest.mark.long
@pytest.mark.parametrize("ahead", [1, 2], ids=["two deep", "three deep"])
def test_every_mode_with_async_scheduling(model, modes, tmp_path, ahead):
    job = GatedRun(model, str(tmp_path / "rows"), modes, TOKENS, {"max_num_seqs": 64}, ahead=ahead)
    counts = run_child(job, tmp_path / "job.json")
    assert counts["ahead"] == ahead


@pytest.mark.long
def test_every_mode_on_the_v2_runner(model, modes, tmp_path):
    job = GatedRun(model, str(tmp_path / "rows"), modes[1::3], TOKENS, {"max_num_seqs": 64}, v2=True)
    counts = run_child(job, tmp_path / "job.json")
    assert counts["runner"] == "vllm.v1.worker.cpu.model_runner"


@pytest.mark.long
def test_gates_of_one_stage_gate_the_next_on_the_v2_runner(model, modes, tmp_path):
    arguments = {"max_num_seqs": 64, "pipeline_parallel_size": 2}
    job = GatedRun(model, str(tmp_path / "rows"), modes[::7], TOKENS, arguments, v2=True)
    assert run_child(job, tmp_path / "job.json")["v2"] is True


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "enforce_eager": False}],
    ids=["eager", "compiled"],
)
def test_every_mode_on_two_tensor_parallel_ranks(model, reference, tmp_path, arguments):
    given = cases(reference, ALL_MODES, LENGTHS, TOKENS, divided=True)
    assert any(hook in DIVIDED_HOOKS for case in given for some in case.fields.values() for hook in some)
    with engine(model, in_process=False, max_num_seqs=64, **arguments, **consumer(tmp_path)) as llm:
        prove(llm, tmp_path / "rows", reference, given, TOKENS)


@pytest.mark.long
def test_a_gate_of_one_pipeline_stage_gates_operations_of_the_next(model, reference, modes, tmp_path):
    """Each probe is at layer 1, on the first stage; nearly all operations are at layers 2 and 3, on the second."""
    assert sum(case.flips for case in modes) > 100
    arguments = {"pipeline_parallel_size": 2, "in_process": False, "enforce_eager": False}
    with engine(model, max_num_seqs=64, **arguments, **consumer(tmp_path)) as llm:
        prove(llm, tmp_path / "rows", reference, modes, TOKENS)
        for number, case in enumerate(modes[1:6]):  # alone, so that batches are in flight at different steps
            prove(llm, tmp_path / "rows", reference, [case], TOKENS, prefix=f"alone{number} ")


@pytest.mark.long
def test_rows_of_each_pipeline_stage_are_marked_by_gates_of_the_last(model, reference, tmp_path):
    """Each probe is at layer 2, on the second stage."""
    given = cases(reference, ALL_MODES[::3], LENGTHS, TOKENS, layer=2)
    given += cases(reference, [("dot", None, False, "all")], LENGTHS, TOKENS, opening="never", layer=2)
    arguments = {"pipeline_parallel_size": 2, "in_process": False, "enforce_eager": False}
    with engine(model, max_num_seqs=64, **arguments, **consumer(tmp_path)) as llm:
        prove(llm, tmp_path / "rows", reference, given, TOKENS)


HALF_MODES = [
    ("dot", None, False, "all"),
    ("cosine", None, False, "generated"),
    ("cast", 2.0, False, "all"),
    ("dot", None, True, "generated"),
    ("cosine", 2.0, True, "all"),
    ("cast", None, False, "prompt"),
]


class Decided(GatedReference):
    """The reference with the scores of given rows of the probe's site, as the engine has them.

    margins: what these scores are above the threshold; -inf where nothing is scored.
    """

    def __init__(self, model):
        super().__init__(model)
        self.rows = self.margins = None

    def _value(self, gate, margins):
        scores = score_of(gate["score"], np.asarray(gate["vector"], np.float64), self.rows)
        self.margins = np.where(margins > -np.inf, scores - gate["threshold"], -np.inf)
        return GatedReference._value(gate, self.margins)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.long)])
def test_gates_open_by_the_rows_of_a_half_precision_engine(model, reference, keeper, dtype):
    """Rounding may open a gate that float64 leaves shut, so scores are those of the captured rows."""
    some = cases(reference, HALF_MODES, LENGTHS, TOKENS, seed=70)
    decided = Decided(model)
    with engine(model, hub=keeper.address, sites=["*:*"], max_num_seqs=64, dtype=dtype, **RAW) as llm:
        params = [params_of(case, f"half{n}", TOKENS) for n, case in enumerate(some)]
        outputs = llm.generate([{"prompt_token_ids": case.prompt} for case in some], params, use_tqdm=False)
        eventually(lambda: len(keeper.done) == len(some))
    changed = 0
    for number, (case, output) in enumerate(zip(some, outputs, strict=True)):
        gate = case.fields["steering_gates"]["g"]
        kept = keeper.rows[f"half{number}"]
        tokens = [*case.prompt, *output.outputs[0].token_ids[:-1]]
        rows = {site: np.stack([at[p][1] for p in range(len(tokens))]).astype(np.float64) for site, at in kept.items()}
        decided.rows = rows[Site(gate["layer"], gate["hook"])]
        seen = decided.run(tokens, len(case.prompt), case.fields)[1]
        shut = {**case.fields, "steering_gates": {"g": {**gate, "threshold": 1e9}}}
        plain = reference.run(tokens, len(case.prompt), shut)[1]
        changed += max(relative_error(plain[site], seen[site]) for site in seen) > 0.1
        for site, expected in seen.items():
            error = relative_error(rows[site], expected)
            assert error < HALF[dtype], f"{case.name}: rows at {site} are off by {error:.1e}"
        shown = steered_of(case, decided.margins)
        marks = keeper.steered[f"half{number}"]
        assert [marks[position] for position in range(len(tokens))] == shown.tolist(), case.name
    assert changed >= 4


HALF = {"bfloat16": 4e-2, "float16": 5e-3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
# Room for about four requests of 160 tokens, so six that grow to it preempt each other.
CROWDED = {"block_size": 32, "num_gpu_blocks_override": 22, "max_model_len": 192}
LATCHED = [  # the last ones are preempted first; a latch over a prompt computes it anew
    ("dot", None, True, "prompt"),
    ("cosine", None, True, "all"),
    ("dot", 20.0, True, "all"),
    ("dot", None, True, "generated"),
    ("cast", 20.0, True, "generated"),
    ("cosine", None, True, "generated"),
]


@pytest.fixture(scope="module")
def crowd(reference):
    """Cases whose gates open early, and whose answers are long."""
    return cases(reference, LATCHED, (60, 61, 62, 63, 58, 59), 100, seed=40, opening="early")


def crowded(model, crowd, root, *, cached, mutant="", **more):
    # With so few, the first blocks of some prompts outlive the preemption.
    blocks = {"num_gpu_blocks_override": 20} if more.get("v2") else {}
    arguments = {**CROWDED, **blocks, "enable_prefix_caching": cached}
    return GatedRun(model, str(root), crowd, 100, arguments, mutant=mutant, answers=cached, **more)


@pytest.mark.long
@pytest.mark.parametrize("more", [{}, {"ahead": 2}, {"ahead": 1, "v2": True}], ids=["sync", "three deep", "v2"])
@pytest.mark.parametrize("cached", [False, True], ids=["computed anew", "resumed from cached blocks"])
def test_a_latch_is_worked_out_again_after_a_preemption(model, crowd, tmp_path, cached, more):
    assert all(case.opened for case in crowd)
    counts = run_child(crowded(model, crowd, tmp_path / "rows", cached=cached, **more), tmp_path / "job.json")
    # The gates have opened by then.
    assert counts["preempted late"] > 0
    assert bool(counts["resumed from cache"]) == cached


@pytest.fixture(scope="module")
def drafted(reference):
    """Cases whose answers repeat themselves, so that drafts are accepted now and then."""
    each = [("dot", None, False, "all"), ("dot", 4.0, False, "generated")]
    never = cases(reference, [("dot", None, True, "generated")] * 4, (30, 9), 50, 90, opening="never")
    return [*cases(reference, [*LATCHED, *each], (30, 9), 50, 80), *never]


def drafting(model, drafted, root, mutant=""):
    return GatedRun(model, str(root), drafted, 50, {"speculative_config": NGRAM}, mutant=mutant)


@pytest.mark.long
def test_scores_of_rejected_drafts_open_no_gate(model, drafted, tmp_path):
    assert sum(case.flips for case in drafted) > 20
    counts = run_child(drafting(model, drafted, tmp_path / "rows"), tmp_path / "job.json")
    assert counts["accepted"] > 10
    assert counts["rejected"] > 10


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_computes_a_wrong_row(model, modes, crowd, drafted, tmp_path, mutant):
    root = tmp_path / "rows"
    job = {
        "drafts are not cut": lambda: drafting(model, drafted, root, mutant),
        "no reset where a request starts again": lambda: crowded(model, crowd, root, cached=False, mutant=mutant),
    }.get(mutant, lambda: GatedRun(model, str(root), modes, TOKENS, {"max_num_seqs": 64}, mutant=mutant))()
    run_child(job, tmp_path / "job.json")


def crossings(reference, case):
    """Return where a case's gate opens and closes: position, score, and whether it is open from there on."""
    fields = case.fields
    _, _, margins, values = reference.run([*case.prompt, *case.tokens[:-1]], len(case.prompt), fields)
    gate, state, made = fields["steering_gates"]["g"], False, []
    for position in np.flatnonzero(margins["g"] > -np.inf):
        margin = margins["g"][position]
        if state != (margin >= 0) and not (state and gate["latch"]):
            state = bool(margin >= 0)
            made.append((int(position), float(margin) + gate["threshold"]))
    return made, values["g"]


@pytest.mark.parametrize("more", [{}, {"async_scheduling": False, "max_num_batched_tokens": 512}], ids=["cut", "whole"])
def test_consumers_hear_where_gates_open_and_close_and_which_rows_they_steered(model, reference, modes, keeper, more):
    some = modes[:24]
    with engine(model, hub=keeper.address, sites=["*:*"], max_num_seqs=64, **RAW, **more) as llm:
        params = [params_of(case, f"r{n}", TOKENS) for n, case in enumerate(some)]
        llm.generate([{"prompt_token_ids": case.prompt} for case in some], params, use_tqdm=False)
        eventually(lambda: len(keeper.done) == len(some))
    events = 0
    for number, case in enumerate(some):
        expected, values = crossings(reference, case)
        gate = case.fields["steering_gates"]["g"]
        mine = [event for event in keeper.events_of(f"r{number}") if event.kind == "gate"]
        assert [event.position for event in mine] == [position for position, _ in expected], case.name
        assert [event.score for event in mine] == pytest.approx([score for _, score in expected], abs=1e-4)
        assert {event.threshold for event in mine} <= {gate["threshold"]}
        events += len(mine)
        kept = keeper.steered[f"r{number}"]
        if "steering_patches" in case.fields or len(case.fields) > 2:  # they steer some positions, or do so ungated
            continue
        assert [kept[position] for position in sorted(kept)] == (values > 0).tolist(), case.name
    assert events > 50
