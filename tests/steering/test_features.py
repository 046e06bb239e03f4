"""Features of autoencoders that a request names: what is parsed, what is refused, and what they compile to."""

import math

import msgspec
import numpy as np
import pytest

import capflow
from capflow import limits
from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.saes import resolve
from capflow.saes.resolve import check_steers, resolved
from capflow.steering.compiler import SiteError, program_of, with_vectors
from capflow.steering.compose import merged, own, scaled
from capflow.steering.feature import FeatureUse, parse_features
from capflow.steering.program import ADD, CLAMP, ENCODE, SET, Op, SiteOps, SteeringProgram
from capflow.steering.request import Steering
from capflow.steering.vector import SteeringVector
from tests.kit.autoencoders import gemma_scope, saelens, weights

FIELD = "steering_features"
INFO = ModelInfo("m", 4, 16, "float32", (Site(1, "post_block"), Site(1, "mlp_out"), Site(1, "mlp_in")))


@pytest.fixture(scope="module")
def saes(tmp_path_factory):
    root = tmp_path_factory.mktemp("saes")
    hooks = {"hook": "blocks.1.ln2.hook_normalized", "hook_out": "blocks.1.hook_mlp_out"}
    made = {
        "mood": capflow.load_sae(f"{gemma_scope(root / 'mood', weights(jumps=True))}@post_block:1"),
        "plain": capflow.load_sae(saelens(root / "plain", weights(seed=1))),
        "topk": capflow.load_sae(saelens(root / "topk", weights(), "topk", k=3)),
        "trans": capflow.load_sae(saelens(root / "trans", weights(), "transcoder", **hooks), "mlp_in:1/mlp_out:1"),
    }
    check_steers(made, INFO)
    return made


def features(**how):
    return {"sae": "mood", "features": {name[1:]: value for name, value in how.items()}}


def test_every_form_says_the_same():
    expected = (FeatureUse("mood", 123, 4.0, where=f"{FIELD}.features.123"),)
    for value in ({"123": 4.0}, {123: 4}, {"123": {"add": 4.0}}, {np.int64(123): np.float32(4)}):
        assert Steering.parse({FIELD: {"sae": "mood", "features": value}}).features == expected
    (one,) = Steering.parse({FIELD: [{"sae": "mood", "features": {"123": 4.0}}]}).features
    assert msgspec.structs.replace(one, where="") == msgspec.structs.replace(expected[0], where="")
    uses = Steering.parse({f"decode_{FIELD}": features(f7={"set": 0}, f8={"set": 2, "strength": 0.5})}).features
    assert [(use.number, use.value, use.sets, use.strength, use.tier) for use in uses] == [
        (7, 0.0, True, 1.0, "decode"),
        (8, 2.0, True, 0.5, "decode"),
    ]
    assert Steering.parse({f"decode_{FIELD}": uses}).features == uses
    for field in (FIELD, f"prefill_{FIELD}"):
        with pytest.raises(
            UsageError, match=f"^{field}: got feature 7 of the tier decode, expected features of the tier"
        ):
            Steering.parse({field: uses})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("mood", "steering_features: got 'mood', expected a mapping like {\"sae\""),
        ([], "steering_features: got [], expected features of an autoencoder, or a list of them"),
        ([3], "steering_features.0: got 3, expected features of an autoencoder, a mapping"),
        ({"features": {"1": 2}}, "steering_features.sae: missing: expected all of"),
        ({"sae": "mood"}, "steering_features.features: missing"),
        ({"sae": "mood", "features": {"1": 2}, "k": 3}, "steering_features.k: unknown"),
        ({"sae": "", "features": {"1": 2}}, "steering_features.sae: got '', expected the name of an autoencoder"),
        ({"sae": "mood", "features": {}}, "steering_features.features: got 0 features, expected a mapping"),
        ({"sae": "mood", "features": [1]}, "steering_features.features: got [1], expected a mapping of feature"),
        (features(fx=1), "steering_features.features: got 'x', expected the number of a feature, 0..999999999"),
        ({"sae": "mood", "features": {-1: 1}}, "steering_features.features: got -1, expected the number of a"),
        ({"sae": "mood", "features": {True: 1}}, "steering_features.features: got True, expected the number"),
        ({"sae": "mood", "features": {"7": 1, 7: 2}}, "features.7: got feature 7 twice, expected each feature once"),
        ([features(f1=1), features(f1={"set": 2})], "1.features.1: got feature 1 twice, expected each feature once"),
        (features(f1=math.nan), "steering_features.features.1: got nan, expected a finite number of float32's"),
        (features(f1=math.inf), "steering_features.features.1: got inf, expected a finite number of float32's"),
        (features(f1={"set": math.inf}), "steering_features.features.1.set: got inf, expected a finite number"),
        (features(f1={"set": 1, "strength": math.nan}), "features.1.strength: got nan, expected a finite"),
        (features(f1="4"), "steering_features.features.1: got '4', expected a number"),
        (features(f1=True), "steering_features.features.1: got True, expected a number"),
        (features(f1={}), "steering_features.features.1: got {}, expected a coefficient, or one of add and set"),
        (features(f1={"add": 1, "set": 2}), "expected a coefficient, or one of add and set"),
        (features(f1={"add": 1, "strength": 2}), "features.1.strength: got given beside add, expected set beside"),
        (features(f1={"sett": 1}), "steering_features.features.1.sett: unknown"),
        (features(f1={"set": 1, "gate": "g"}), "features.1.gate: got g, expected one of steering_gates beside it"),
    ],
)
def test_what_is_wrong_is_named(value, message):
    with pytest.raises(UsageError) as caught:
        Steering.parse({FIELD: value})
    assert message in str(caught.value)


def test_a_feature_is_set_once():
    fields = {FIELD: features(f1={"set": 1}), f"decode_{FIELD}": features(f1={"set": 2})}
    with pytest.raises(UsageError, match="got feature 1, expected a feature that steering_features does not set"):
        Steering.parse(fields)
    Steering.parse({f"prefill_{FIELD}": features(f1={"set": 1}), f"decode_{FIELD}": features(f1={"set": 2})})
    Steering.parse({FIELD: features(f1=1), f"decode_{FIELD}": features(f1=2)})


def compiled(saes, *each):
    return program_of(16, [resolved(Steering.parse(fields), saes) for fields in each])


def kinds(ops):
    return {f"{hook}:{layer}": [op.kind for op in each] for layer, hook, each in ops}


def test_they_compile_to_vectors_and_pairs(saes):
    fields = {FIELD: [features(f3=2.0, f4={"set": 1.5}, f5={"set": 0}), {"sae": "trans", "features": {1: -1}}]}
    clamp = {"vector": np.ones(16), "value": 0}
    program = compiled(saes, fields | {"steering_clamps": {"post_block": {1: clamp}}})
    assert kinds(program.prefill) == {"post_block:1": [ADD, ENCODE, ENCODE, SET, SET, CLAMP], "mlp_out:1": [ADD]}
    program.check(INFO)
    rows = program.array()
    (_, first), (_, stream) = ((site.hook, site.ops) for site in program.prefill)
    np.testing.assert_array_equal(rows[first[0].row], -saes["trans"].decoder[1])
    np.testing.assert_array_equal(rows[stream[0].row], 2 * saes["mood"].decoder[3])
    for encode, sets, number, value in zip(stream[1:3], stream[3:5], (4, 5), (1.5, 0.0), strict=True):
        np.testing.assert_array_equal(rows[encode.row], saes["mood"].encoder[number])
        np.testing.assert_array_equal(rows[sets.row], saes["mood"].decoder[number])
        assert (encode.low, encode.high) == (saes["mood"].bias[number], saes["mood"].thresholds[number])
        assert (sets.low, sets.amount) == (value, 1.0)


def test_an_add_is_the_vector_that_it_stands_for(saes):
    vector = {"post_block": {1: {"vector": saes["mood"].decoder[3], "scale": 2.0}}}
    by_hand = program_of(16, [Steering.parse({"steering_vectors": vector})])
    assert compiled(saes, {FIELD: features(f3=2.0)}).id == by_hand.id


def test_the_features_that_a_tier_adds_at_a_site_are_one_vector_a_gate(saes, monkeypatch):
    monkeypatch.setattr(resolve, "_ROWS", 2)
    gate = {"hook": "mlp_in", "layer": 1, "vector": np.ones(16), "threshold": 0}
    mood = {f"f{n}": 0.25 * n - 1 for n in range(24)}
    gated = {"sae": "plain", "features": {2: 1, 3: {"add": 2}}, "gate": "g"}
    fields = {
        "steering_gates": {"g": gate},
        "steering_vectors": {"post_block": {1: np.arange(16)}, "mlp_in": {1: np.ones(16)}},
        FIELD: [
            features(**mood),
            {"sae": "plain", "features": {5: -3, 6: 0.1}},
            gated,
            {"sae": "trans", "features": {1: 2}},
        ],
        f"decode_{FIELD}": features(f3=1, f4=2),
    }
    steering = resolved(Steering.parse(fields), saes)
    mine, plain, trans = (saes[name].decoder.astype(np.float64) for name in ("mood", "plain", "trans"))
    expected = {
        ("mlp_in:1", ""): np.ones(16),
        ("post_block:1", ""): np.array(list(mood.values())) @ mine - 3 * plain[5] + 0.1 * plain[6] + np.arange(16),
        ("post_block:1", "g"): plain[2] + 2 * plain[3],
        ("mlp_out:1", ""): 2 * trans[1],
    }
    vectors = {(str(vector.site), vector.gate): vector.array(np.float64) for vector in steering.base.vectors}
    assert len(steering.base.vectors) == len(vectors)
    assert vectors.keys() == expected.keys()
    for key, vector in vectors.items():
        np.testing.assert_allclose(vector, expected[key], rtol=1e-13, atol=1e-13)
    (decode,) = steering.decode.vectors
    np.testing.assert_allclose(decode.array(np.float64), mine[3] + 2 * mine[4], rtol=1e-13)
    assert steering.prefill.vectors == ()


def test_a_sum_of_nothing_has_the_scale_that_removes_a_vector(saes):
    (vector,) = resolved(Steering.parse({FIELD: features(f3=0, f4=0)}), saes).base.vectors
    assert vector.scale == 0.0
    assert compiled(saes, {FIELD: features(f3=0, f4=0)}) is None


def test_the_features_of_a_request_are_counted_over_all_entries_and_tiers(saes):
    half = limits.FEATURES_STEERED_MAX // 2
    lower, upper = ({"sae": "mood", "features": dict.fromkeys(range(first, first + half), 1.0)} for first in (0, half))
    one = {"sae": "plain", "features": {0: 1}}
    Steering.parse({FIELD: [lower, upper]})
    expected = "got 4,097 features, expected at most 4,096, with those of all autoencoders and of all tiers"
    for fields, field in (
        ({FIELD: [lower, upper, one]}, FIELD),
        ({FIELD: [lower, upper], f"decode_{FIELD}": one}, f"decode_{FIELD}"),
    ):
        with pytest.raises(UsageError, match=f"^{field}: {expected}"):
            Steering.parse(fields)
    with pytest.raises(UsageError, match=f"^{FIELD}: {expected}"):
        parse_features([lower, upper, one])
    uses = tuple(FeatureUse("mood", 0, 1.0) for _ in range(2 * half + 1))
    for refused in (lambda: Steering.parse({FIELD: uses}), lambda: resolved(Steering(features=uses), saes)):
        with pytest.raises(UsageError, match=f"^{FIELD}: {expected}"):
            refused()


def test_everything_of_a_feature_is_part_of_the_key(saes):
    different = [
        {FIELD: features(f3={"set": 1.5})},
        {FIELD: features(f3={"set": 1.0})},
        {FIELD: features(f4={"set": 1.5})},
        {FIELD: features(f3={"set": 1.5, "strength": 0.5})},
        {FIELD: {"sae": "plain", "features": {3: {"set": 1.5}}}},
        {FIELD: features(f3={"set": 1.5}, f4={"set": 1.5})},
    ]
    programs = [compiled(saes, fields) for fields in different]
    assert len({program.effect_key(program.prefill, "prompt") for program in programs}) == len(different)
    assert len({program.key(program.prefill) for program in programs}) == len(different)
    decode = compiled(saes, {f"decode_{FIELD}": features(f3={"set": 1.5})})
    assert decode.effect_key(decode.prefill, "prompt") == ""


def test_programs_with_features_are_scaled_merged_and_added_to(saes):
    one, other = (compiled(saes, {FIELD: features(**how)}) for how in ({"f3": {"set": 1.0}}, {"f4": {"set": 2.0}}))
    both = merged(one, other)
    both.check(INFO)
    assert kinds(both.prefill) == {"post_block:1": [ENCODE, ENCODE, SET, SET]}
    for again in (one, compiled(saes, {f"decode_{FIELD}": features(f3={"set": 7.0, "strength": 0.5})})):
        with pytest.raises(
            UsageError, match=r"^steering_features.post_block.1: got a feature set twice, expected each"
        ):
            merged(both, again)
    assert both.prefill == merged(None, compiled(saes, {FIELD: features(f3={"set": 1.0}, f4={"set": 2.0})})).prefill
    (site,) = scaled(one, {"request": 0.5}).prefill
    assert [op.amount for op in site.ops] == [1.0, 0.5]
    assert scaled(one, {"request": 0.0}) is None
    assert own(one).prefill == one.prefill
    more = with_vectors(one, 16, [SteeringVector.make(Site(1, "post_block"), np.ones(16))])
    assert kinds(more.decode) == {"post_block:1": [ADD, ENCODE, SET]}


def test_what_cannot_be_set_is_refused(saes):
    with pytest.raises(SiteError, match="got a feature set twice, expected each feature once; set it in one place"):
        compiled(saes, {FIELD: features(f3={"set": 1})}, {FIELD: features(f3={"set": 2})})
    set_by_3 = resolved(Steering.parse({FIELD: features(f3={"set": 1, "strength": 3})}), saes)
    for scale in (3e38, -math.inf, math.nan):
        scaled_by = msgspec.structs.replace(set_by_3, base=set_by_3.base.scaled(scale))
        with pytest.raises(SiteError, match=r"post_block.1: got a strength of .*, expected at most 3.4e\+38"):
            program_of(16, [scaled_by])
    many = {f"f{n}": {"set": 0} for n in range(limits.FEATURES_SET_MAX + 1)}
    with pytest.raises(SiteError, match="got 17 features that are set, expected at most 16"):
        compiled(saes, {FIELD: features(**many)})
    with pytest.raises(UsageError, match="3: got a feature of autoencoder mood, expected one of an engine that knows"):
        program_of(16, [Steering.parse({FIELD: features(f3=1)})])
    with pytest.raises(
        UsageError, match=r"features.3: got 3e\+38, so that a sum of 2 features has .*, expected a sum of"
    ):
        compiled(saes, {FIELD: features(f3=3e38, f4=1)})
    for ops in ([Op(SET, 0)], [Op(ENCODE, 0)], [Op(SET, 0), Op(ENCODE, 0)], [Op(ENCODE, 0), Op(SET, 0, owner=1)]):
        program = SteeringProgram(16, bytes(64), (b"x" * 16,), (SiteOps(1, "post_block", tuple(ops)),))
        with pytest.raises(UsageError, match="got features that are not in pairs at post_block:1"):
            program.check(INFO)
    pair = (SiteOps(1, "post_block", (Op(ENCODE, 0), Op(SET, 0))),)
    with pytest.raises(UsageError, match="got a feature that is set at position 2 alone; make the program with"):
        SteeringProgram(16, bytes(64), (b"x" * 16,), patched=((2, pair),)).check(INFO)
