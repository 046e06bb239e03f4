"""Gates of a steering: parsed, refused by field, and compiled to scores and gated operations."""

import base64
import math

import msgspec
import numpy as np
import pytest

from capflow import limits
from capflow.capture.model import ModelInfo
from capflow.capture.site import HOOKS, Site
from capflow.errors import UsageError
from capflow.steering.compiler import program_of, with_vectors
from capflow.steering.compose import with_gate
from capflow.steering.gate import SteeringGate
from capflow.steering.program import (
    ADD,
    CLAMP,
    PATCH,
    RELATIVE,
    SCORE_CAST,
    SCORE_COSINE,
    SCORE_DOT,
    UNGATED,
)
from capflow.steering.request import Steering, Tier
from capflow.steering.vector import SteeringVector

WIDTH, LAYERS = 4, 4
INFO = ModelInfo(
    "m", LAYERS, WIDTH, "float32",
    tuple(Site(n, hook) for n in range(LAYERS) for hook in HOOKS if (n, hook) != (3, "mlp_in")),
    fixed=(Site(2, "mlp_in"),),
)  # fmt: skip
ROW = [1.0, 2.0, 0.0, -1.0]


def gate(**more):
    return {"layer": 1, "vector": ROW, "threshold": 0.5, **more}


def at(layer=2, hook="post_block", name="rude", **more):
    return {hook: {layer: {"vector": ROW, "gate": name, **more}}}


def fields(field="steering_vectors", part=None, **more):
    return {"steering_gates": {"rude": gate(**more)}, field: at() if part is None else part}


def patch(*positions):
    return {"post_block": {2: {"positions": positions, "vector": ROW, "gate": "rude"}}}


def test_a_gate_has_its_defaults_and_a_packed_vector_is_the_same():
    data = base64.b64encode(np.array(ROW, np.float16).tobytes()).decode()
    packed = {"layer": "1", "vector": {"dtype": "float16", "shape": [WIDTH], "data": data}, "sharpness": None}
    (made,) = Steering.parse({"steering_gates": {"rude": packed}}).gates
    assert made == SteeringGate("rude", 1, "post_block", np.array(ROW, np.float32).tobytes())
    assert Steering.parse({"steering_gates": (made,)}).gates == (made,)
    assert made.sharpness is None


WRONG = [
    ("nan", fields(vector=[math.nan] * WIDTH), "steering_gates.rude.vector", "nan at index 0"),
    ("inf", fields(vector=[1.0, math.inf, 0, 0]), "steering_gates.rude.vector", "inf at index 1"),
    ("width", fields(vector=[1.0]), "steering_gates.rude.vector", "1 numbers, expected 4"),
    ("empty", fields(vector=[]), "steering_gates.rude.vector", "shape"),
    ("text", fields(vector="abc"), "steering_gates.rude.vector", "numbers"),
    ("zero cosine", fields(vector=[0.0] * WIDTH, score="cosine"), "steering_gates.rude.vector", "a direction"),
    ("zero cast", fields(vector=[0.0] * WIDTH, score="cast"), "steering_gates.rude.vector", "a direction"),
    ("sharpness 0", fields(sharpness=0), "steering_gates.rude.sharpness", "above 0"),
    ("sharpness < 0", fields(sharpness=-1.0), "steering_gates.rude.sharpness", "above 0"),
    ("sharpness inf", fields(sharpness=math.inf), "steering_gates.rude.sharpness", "finite"),
    ("threshold nan", fields(threshold=math.nan), "steering_gates.rude.threshold", "finite"),
    ("threshold inf", fields(threshold=math.inf), "steering_gates.rude.threshold", "finite"),
    ("threshold", fields(threshold=3e38, bias=-3e38), "steering_gates.rude.threshold", "difference"),
    ("bias", fields(bias=1.0, score="cosine"), "steering_gates.rude.bias", "the score is cosine"),
    ("score", fields(score="euclid"), "steering_gates.rude.score", "one of dot, cosine, cast"),
    ("score type", fields(score=1), "steering_gates.rude.score", "one of"),
    ("positions", fields(positions="some"), "steering_gates.rude.positions", "last_prompt"),
    ("latch", fields(latch=1), "steering_gates.rude.latch", "true or false"),
    ("label", fields(label="a\nb"), "steering_gates.rude.label", "printable"),
    ("label length", fields(label="x" * 257), "steering_gates.rude.label", "256"),
    ("unknown key", fields(slope=1), "steering_gates.rude.slope: unknown", "one of hook"),
    ("no layer", {"steering_gates": {"rude": {"vector": ROW}}}, "steering_gates.rude.layer: missing", "all of"),
    ("layer", {"steering_gates": {"rude": gate(layer=9)}}, "steering_gates.rude.layer", "0..3"),
    ("hook", fields(hook="nowhere"), "steering_gates.rude.hook", "one of pre_attn"),
    ("no mapping", {"steering_gates": [1]}, "steering_gates", "a mapping like"),
    ("no gate", {"steering_gates": {"rude": 1}}, "steering_gates.rude", "a mapping"),
    ("empty name", {"steering_gates": {"": gate()}}, "steering_gates", "1..64 printable"),
    ("long name", {"steering_gates": {"x" * 65: gate()}}, "steering_gates", "1..64 printable"),
    ("name with /", {"steering_gates": {"a/b": gate()}}, "steering_gates", "without /"),
    ("too many", {"steering_gates": {f"g{n}": gate() for n in range(9)}}, "steering_gates", "9 gates, expected at"),
    ("unknown gate", {"steering_vectors": at()}, "steering_vectors.post_block.2.gate", "there are none"),
    ("other gate", fields(part=at(name="kind")), "steering_vectors.post_block.2.gate", "got kind"),
    ("gate's name", fields(part=at(name=7)), "steering_vectors.post_block.2.gate", "the name of a gate"),
    ("untapped", fields(layer=3, hook="mlp_in", part=at(3)), "steering_gates.rude", "--sites mlp_in:3"),
    ("fixed", fields(layer=2, hook="mlp_in"), "steering_gates.rude", "only be captured"),
    ("later layer", fields(part=at(0)), "steering_vectors.post_block.0.gate", "at or before post_block:0"),
    ("later hook", fields(hook="mlp_in", part=at(1, "post_attn")), "steering_vectors.post_attn.1.gate", "at or before"),
    ("block before attention", fields(part=at(1, "pre_attn")), "steering_vectors.pre_attn.1.gate", "at or before"),
    ("latched at its site", fields(latch=True, part=at(1)), "steering_vectors.post_block.1.gate", "probe before"),
    ("clamp", fields("decode_steering_clamps", at(0, value=0)), "decode_steering_clamps.post_block.0.gate", "at or"),
    ("patch", fields("steering_patches", {"post_block": {0: patch(-1)["post_block"][2]}}),
     "steering_patches.post_block.0.gate", "at or before"),
    ("generated never", fields("decode_steering_vectors", positions="prompt"),
     "decode_steering_vectors.post_block.2.gate", "set steering_gates.rude.latch"),
    ("prompt never", fields("prefill_steering_vectors", positions="generated", latch=True),
     "prefill_steering_vectors.post_block.2.gate", "score the prompt"),
    ("last prompt", fields(positions="last_prompt"), "steering_vectors.post_block.2.gate",
     "set steering_gates.rude.latch, or use prefill_steering_vectors"),
    ("last prompt decode", fields("decode_steering_vectors", positions="last_prompt"),
     "decode_steering_vectors.post_block.2.gate", "set steering_gates.rude.latch"),
    ("patch never", fields("steering_patches", patch(-2), positions="last_prompt", latch=True),
     "steering_patches.post_block.2.gate", "positions that are patched"),
    ("patch of the prompt", fields("steering_patches", patch(-1), positions="generated"),
     "steering_patches.post_block.2.gate", "positions that are patched"),
    ("two vectors of a gate", fields(part={"post_block": {2: [{"vector": ROW, "gate": "rude"}] * 2}}),
     "steering_vectors.post_block.2", "gate rude twice"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "field", "words"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_a_wrong_gate_is_refused_by_its_field(given, field, words):
    with pytest.raises(UsageError) as caught:
        Steering.parse(given).check(INFO)
    message = str(caught.value)
    assert message.startswith((f"{field}:", f"{field} ")), message
    assert words in message


@pytest.mark.parametrize("changed", [{"sharpness": -1.0}, {"threshold": math.nan}, {"score": "x"}, {"hook": "x"}])
def test_a_gate_that_was_not_parsed_is_checked_too(changed):
    (made,) = Steering.parse({"steering_gates": {"rude": gate()}}).gates
    with pytest.raises(UsageError, match=r"^steering_gates\.rude\."):
        Steering(gates=(msgspec.structs.replace(made, **changed),)).check(INFO)


@pytest.mark.parametrize(
    "given",
    [
        fields(part=at(1)),
        fields(hook="pre_attn", part=at(1, "post_attn")),
        fields(hook="mlp_in", part=at(1, "mlp_out")),
        fields(hook="mlp_out", part=at(1, "post_block"), latch=True),
        fields(part=at(2, "pre_attn"), latch=True),
        fields(positions="last_prompt", latch=True),
        fields("prefill_steering_vectors", positions="last_prompt"),
        fields("steering_patches", patch(-1), positions="last_prompt", latch=True),
        {"steering_gates": {"monitor": gate()}},
    ],
)
def test_a_gate_acts_at_its_site_and_after_it(given):
    steering = Steering.parse(given)
    steering.check(INFO)
    program = program_of(WIDTH, [steering])
    program.check(INFO)
    assert len(program.gates) == 1


def made(*parts, owners=()):
    return program_of(WIDTH, [Steering.parse(part) for part in parts], owners)


def kinds(ops):
    return {str(Site(layer, hook)): [(op.kind, op.gate) for op in each] for layer, hook, each in ops}


def test_scores_come_first_and_gated_vectors_are_summed_apart_from_others():
    vectors = [{"vector": ROW}, {"vector": ROW, "gate": "b"}, {"vector": ROW, "gate": "b", "relative": True}]
    program = made({
        "steering_gates": {"b": gate(layer=2), "a": gate(layer=2, hook="pre_attn")},
        "steering_vectors": {"post_block": {2: vectors}},
        "decode_steering_vectors": {"post_block": {2: {"vector": ROW, "gate": "a"}}},
        "steering_clamps": {"post_block": {2: {"vector": ROW, "value": 0, "gate": "a"}}},
    })  # fmt: skip
    assert [each.name for each in program.gates] == ["a", "b"], "in the order of their sites"
    added = [(SCORE_DOT, 1), (RELATIVE, 1), (ADD, UNGATED)]
    probe = [(SCORE_DOT, 0)]
    assert kinds(program.prefill) == {"post_block:2": [*added, (ADD, 1), (CLAMP, 0)], "pre_attn:2": probe}
    assert kinds(program.decode) == {"post_block:2": [*added, (ADD, 0), (ADD, 1), (CLAMP, 0)], "pre_attn:2": probe}


def test_a_score_subtracts_the_threshold_and_only_directions_have_unit_length():
    program = made({"steering_gates": {
        "dot": gate(bias=2.0), "cosine": gate(score="cosine"), "cast": gate(score="cast", threshold=0.1),
    }})  # fmt: skip
    rows = program.array()
    ((_, _, ops),) = program.prefill
    assert [(op.kind, op.amount) for op in ops] == [(SCORE_DOT, 1.5), (SCORE_COSINE, -0.5), (SCORE_CAST, -0.1)]
    unit = np.array(ROW) / np.linalg.norm(ROW)
    np.testing.assert_allclose(rows[[op.row for op in ops]], [ROW, unit, unit], rtol=1e-6)


@pytest.mark.parametrize(
    ("positions", "prefill", "decode", "patched"),
    [("all", 1, 1, ()), ("prompt", 1, 0, ()), ("generated", 0, 1, ()), ("last_prompt", 0, 0, (-1,))],
)
def test_scores_stand_where_the_gate_scores(positions, prefill, decode, patched):
    program = made({"steering_gates": {"rude": gate(positions=positions)}})
    assert (len(program.prefill), len(program.decode)) == (prefill, decode)
    assert tuple(position for position, _ in program.patched) == patched


def test_a_last_prompt_score_is_made_at_a_patched_position_before_the_patch():
    last = {"positions": "last_prompt", "latch": True}
    program = made(fields("steering_patches", {"post_block": {1: {"positions": [-1], "vector": ROW}}}, **last))
    assert kinds(program.patches(5)[4]) == {"post_block:1": [(SCORE_DOT, 0), (PATCH, UNGATED)]}


def test_names_belong_to_their_steering_and_equal_gates_are_one():
    other = {**fields(threshold=9.0), "steering_vectors": at(3)}
    program = made(fields(), other, fields(), owners=("global", "module m", "module n"))
    assert [(each.name, each.threshold) for each in program.gates] == [("global/rude", 0.5), ("module m/rude", 9.0)]
    assert program.owners == ("global", "module m", "module n")
    sums = {(layer, op.gate, op.owner) for layer, _, ops in program.prefill for op in ops if op.kind == ADD}
    assert sums == {(2, 0, 0), (3, 1, 1), (2, 0, 2)}


@pytest.mark.parametrize("owners", [("global", "module m", "request"), ("request", "global", "module m")])
def test_a_gate_that_the_request_and_others_bring_has_the_requests_name(owners):
    own = {"steering_gates": {"mine": gate()}, "steering_vectors": at(name="mine")}
    parts = [own if owner == "request" else fields() for owner in owners]
    (one,) = made(*parts, owners=owners).gates
    assert one.name == "mine"
    (changed,) = with_gate(made(*parts, owners=owners), "mine", threshold=2.0).gates
    assert changed.threshold == 2.0


def test_the_order_and_the_names_of_gates_are_no_part_of_a_key():
    both = {"a": gate(), "b": gate(layer=0)}
    one = made({"steering_gates": both, "steering_vectors": at(name="a")})
    other = made({"steering_gates": {"y": both["b"], "x": both["a"]}, "steering_vectors": at(name="x")})
    assert one.id == other.id
    assert one.key(one.prefill) == other.key(other.prefill)


def test_more_gates_than_the_limit_are_refused_when_modules_are_added():
    def some(count, start):
        return {"steering_gates": {f"g{n}": gate(threshold=start + n) for n in range(count)}}

    most = limits.GATES_MAX
    made(some(most - 2, 0), some(2, 100), owners=("module m", "request"))
    made(some(most, 0), some(most, 0), owners=("module m", "request"))
    with pytest.raises(
        UsageError, match=f"^steering_gates: got {most + 1} gates, expected at most {most} of one request"
    ):
        made(some(most - 2, 0), some(3, 100), owners=("module m", "request"))
    with pytest.raises(UsageError, match=f"^steering_name: got {most + 1} gates"):
        made(some(most - 2, 0), some(3, 100), owners=("module m", "module n"))


def test_vectors_of_an_action_come_after_gated_ones_and_keep_the_gates():
    program = made(fields("decode_steering_vectors"))
    more = [
        SteeringVector.make(Site(2, "post_block"), ROW),
        SteeringVector.make(Site(1, "post_block"), ROW, relative=True),
    ]
    after = with_vectors(program, WIDTH, more)
    assert after.gates == program.gates
    assert kinds(after.prefill) == kinds(program.prefill)
    assert kinds(after.decode) == {
        "post_block:1": [(SCORE_DOT, 0), (RELATIVE, UNGATED)],
        "post_block:2": [(ADD, 0), (ADD, UNGATED)],
    }


def test_a_scaled_tier_keeps_its_gates():
    tier = Steering.parse(fields()).base
    assert tier.scaled(2.0) == Tier((msgspec.structs.replace(tier.vectors[0], scale=2.0),))
    assert tier.scaled(2.0).vectors[0].gate == "rude"


def test_scores_of_the_last_prompt_position_count_with_what_steers_the_prompt():
    """Two operations of the 128 are kept for patches: by a position's number from either end of the prompt."""
    clamps = [{"vector": [1, n, 0, 0], "max": 5.0} for n in range(limits.CLAMPS_AT_SITE_MAX)]
    gates = {f"g{n}": gate(layer=2, threshold=n, positions="last_prompt") for n in range(limits.GATES_MAX)}
    patch = {"post_block": {2: {"positions": [0, -1], "vector": ROW}}}
    own = {"steering_clamps": {"post_block": {2: clamps}}, "steering_gates": gates, "steering_patches": patch}
    modules = limits.SITE_OPS_MAX - 2 - len(clamps) - len(gates)

    def crowd(count, tier="steering_vectors"):
        each = {tier: {"post_block": {2: ROW}}}
        return made(*[each] * count, own, owners=(*[f"module m{n}" for n in range(count)], "request"))

    full = crowd(modules)
    assert max(len(each.ops) for ops in full.patches(1).values() for each in ops) == limits.SITE_OPS_MAX
    full.check(INFO)
    expected = "^steering_vectors.post_block.2: got 127 operations, expected at most 126 at one position"
    with pytest.raises(UsageError, match=expected):
        crowd(modules + 1)
    assert crowd(modules + len(gates), "decode_steering_vectors") is not None, "the answer has no such scores"
