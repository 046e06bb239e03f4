"""What steers a request, as people write it: every form is read, and what is wrong is named by its field."""

import base64
import math

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capflow import limits
from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.steering import packed as packed_module
from capflow.steering.clamp import Clamp
from capflow.steering.compiler import program_of
from capflow.steering.packed import Packed
from capflow.steering.patch import Patch
from capflow.steering.plain import finite
from capflow.steering.request import NOTHING, STEERING_FIELDS, ModuleUse, Steering, Tier
from capflow.steering.vector import SteeringVector

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
INFO = ModelInfo("tiny", 8, 2, "float32", tuple(Site(layer, "post_block") for layer in range(7)))
FLOAT64_LARGE = np.array([[1.0, 1e300]]).tobytes()


def packed(rows, layers=None, dtype="float32", *, raw=False, **more):
    """Return rows `[n, hidden]` packed; without layers as one vector or rows of a patch."""
    array = np.asarray(rows, DTYPES[dtype])
    data = array.tobytes()
    block = {"dtype": dtype, "shape": list(array.shape), "data": data if raw else base64.b64encode(data).decode()}
    return block | ({} if layers is None else {"layer_indices": layers}) | more


def vectors(layers, tier=""):
    return {f"{tier}steering_vectors": {"post_block": layers}}


def clamps(layers):
    return {"steering_clamps": {"post_block": layers}}


def patches(entry):
    return {"steering_patches": {"post_block": {3: entry}}}


def program(fields, hidden_size=2):
    return program_of(hidden_size, [Steering.parse(fields)])


def message_of(fields):
    with pytest.raises(UsageError) as error:
        Steering.parse(fields)
    return str(error.value)


def test_nothing_is_nothing():
    assert Steering.parse({}) == NOTHING
    assert Steering.parse({}).empty


def test_what_is_parsed_already_is_returned_as_it_is():
    made = Steering.parse(vectors({3: [1, 2]}))
    assert Steering.parse(made) is made
    assert Steering.parse({"steering_vectors": made.base.vectors}) == made


def test_every_field_has_its_place():
    clamp = {"post_block": {1: {"vector": [1, 0], "value": 0}}}
    steering = Steering.parse(
        {
            "steering_vectors": {"post_block": {1: [1, 2]}},
            "prefill_steering_vectors": {"mlp_in": {"2": [3, 4]}},
            "decode_steering_vectors": {"mlp_out": {3: {"vector": [5, 6], "scale": 0.5}}},
            "steering_clamps": clamp,
            "prefill_steering_clamps": clamp,
            "decode_steering_clamps": clamp,
            "steering_patches": {"pre_attn": {4: {"positions": [0], "vector": [7, 8]}}},
            "steering_name": "calm",
            "steering_scale": 2,
        }
    )
    sites = [[v.site for v in tier.vectors] for tier in (steering.base, steering.prefill, steering.decode)]
    assert sites == [[Site(1, "post_block")], [Site(2, "mlp_in")], [Site(3, "mlp_out")]]
    assert steering.decode.vectors[0].array().tolist() == [2.5, 3.0]
    expected = (Clamp(1, "post_block", np.array([1, 0], np.float32).tobytes(), 0.0, 0.0),)
    assert steering.base.clamps == steering.prefill.clamps == steering.decode.clamps == expected
    assert steering.patches == (Patch(4, "pre_attn", (0,), np.array([7, 8], np.float32).tobytes()),)
    assert steering.modules == (ModuleUse("calm", 2.0),)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(steering), type=Steering) == steering
    assert msgspec.convert(msgspec.to_builtins(steering, builtin_types=(bytes,)), Steering) == steering


def test_each_hook_may_have_another_form():
    fields = {"post_block": {1: [1, 2]}, "mlp_in": packed([[3, 4]], [2], "float16")}
    made = Steering.parse({"steering_vectors": fields}).base.vectors
    assert [(str(v.site), v.dtype, v.array().tolist()) for v in made] == [
        ("post_block:1", "float32", [1.0, 2.0]),
        ("mlp_in:2", "float16", [3.0, 4.0]),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_packed_bytes_are_kept_as_they_came(dtype, kind):
    block = packed([[1.5, -2], [0.25, 4]], [3, 1], dtype, raw=True, scales=[1, -2])
    made = Steering.parse(vectors(block | {"data": kind(block["data"])})).base.vectors
    assert [(v.layer, v.dtype, v.scale) for v in made] == [(3, dtype, 1.0), (1, dtype, -2.0)]
    assert b"".join(v.data for v in made) == block["data"]


def test_torch_tensors_and_arrays_are_taken():
    torch = pytest.importorskip("torch")
    expected = program(vectors({3: [1.5, -2]}))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert program(vectors({3: torch.tensor([1.5, -2], dtype=dtype)})) == expected
    assert program(vectors({3: torch.nn.Parameter(torch.tensor([1.5, -2]))})) == expected
    for dtype in DTYPES.values():
        assert program(vectors({np.int64(3): np.array([1.5, -2], dtype)})) == expected
    assert program(vectors({3: [np.float32(1.5), np.int8(-2)]})) == expected
    assert program(vectors({3: [1.5, -2]})) == program(vectors({"3": (1.5, -2)}))


halves = st.floats(width=16, allow_nan=False, allow_infinity=False)
short = halves.map(lambda x: float(np.float32(x).astype(ml_dtypes.bfloat16))).filter(
    lambda x: abs(x) < 65504 and float(np.float16(x)) == x
)
"""Numbers that every dtype holds."""


@given(
    rows=st.integers(1, 5).flatmap(
        lambda width: st.lists(st.lists(short, min_size=width, max_size=width), min_size=1, max_size=4)
    ),
    scale=st.sampled_from([1.0, 0.5, -3.0, 0.0]),
    form=st.sampled_from(["steering_vectors", "prefill_steering_vectors", "decode_steering_vectors"]),
)
def test_equal_vectors_in_different_forms_give_equal_programs(rows, scale, form):
    width, layers = len(rows[0]), list(range(len(rows)))
    plain = {str(n): {"vector": row, "scale": scale} for n, row in enumerate(rows)}
    expected = program({form: {"post_block": plain}}, width)
    for dtype in DTYPES:
        for raw in (False, True):
            for scales in (scale, [scale] * len(rows)):
                block = packed(rows, layers, dtype, raw=raw, scales=scales)
                assert program({form: {"post_block": block}}, width) == expected


@given(rows=st.lists(st.lists(short, min_size=3, max_size=3).filter(any), min_size=1, max_size=4))
def test_equal_clamps_in_different_forms_give_equal_programs(rows):
    plain = [{"vector": row, "min": -1, "max": 2, "strength": 0.5} for row in rows]
    expected = program(clamps({4: plain}), 3)
    for dtype in DTYPES:
        block = packed(rows, [4] * len(rows), dtype, min=-1, max=[2] * len(rows), strength=0.5)
        assert program(clamps(block), 3) == expected


@given(rows=st.lists(st.lists(short, min_size=2, max_size=2), min_size=1, max_size=4), each=st.booleans())
def test_equal_patches_in_different_forms_give_equal_programs(rows, each):
    positions = list(range(-2, len(rows) - 2))
    plain = rows if each else rows[0]
    expected = program(patches({"positions": positions, "vector": plain}))
    for dtype, kind in DTYPES.items():
        one = {"positions": positions, "vector": packed(plain, dtype=dtype), "amount": 1}
        assert program(patches([one])) == expected
        assert program(patches({"positions": np.array(positions), "vector": np.array(plain, kind)})) == expected


class TestClamps:
    @pytest.mark.parametrize(
        "vector", [[3, 4], [3e-30, 4e-30], [3e-200, 4e-200], [3e37, 4e37], np.array([3, 4], np.float16)]
    )
    def test_directions_come_to_unit_length(self, vector):
        (clamp,) = Steering.parse(clamps({2: {"vector": vector, "max": 5}})).base.clamps
        np.testing.assert_array_equal(np.frombuffer(clamp.data, np.float32), np.array([0.6, 0.8], np.float32))
        assert (clamp.low, clamp.high, clamp.strength) == (-math.inf, 5.0, 1.0)

    def test_a_negative_zero_is_a_zero(self):
        one, two = ({"vector": [zero, 2], "value": 0} for zero in (0.0, -0.0))
        assert program(clamps({2: one})) == program(clamps({2: two}))

    def test_a_site_may_have_several(self):
        made = Steering.parse(clamps({2: [{"vector": [1, 0], "value": 1}, {"vector": [0, -2], "min": 0}]})).base.clamps
        assert [(c.low, c.high) for c in made] == [(1.0, 1.0), (0.0, math.inf)]
        assert np.frombuffer(made[1].data, np.float32).tolist() == [0.0, -1.0]

    def test_packed_bounds_are_for_all_or_each(self):
        made = Steering.parse(clamps(packed([[1, 0], [0, 1]], [2, 2], value=[1, 2], strength=0.5))).base.clamps
        assert [(c.layer, c.low, c.high, c.strength) for c in made] == [(2, 1.0, 1.0, 0.5), (2, 2.0, 2.0, 0.5)]


class TestModules:
    @pytest.mark.parametrize(
        ("fields", "uses"),
        [
            ({"steering_name": "a"}, [("a", 1.0)]),
            ({"steering_name": "a", "steering_scale": -2}, [("a", -2.0)]),
            ({"steering_name": ["a", "b"], "steering_scale": 3}, [("a", 3.0), ("b", 3.0)]),
            ({"steering_name": {"b": 0.5, "a": 2}}, [("b", 0.5), ("a", 2.0)]),
            ({"steering_module_ref": ("a", -2)}, [("a", -2.0)]),
            ({"steering_module_ref": ["a", 0.5]}, [("a", 0.5)]),
        ],
    )
    def test_are_named_with_scales(self, fields, uses):
        assert [(use.name, use.scale) for use in Steering.parse(fields).modules] == uses


V, C, P = "steering_vectors.post_block", "steering_clamps.post_block", "steering_patches.post_block.3"
NUMBERS = "finite numbers of float32's range"

WRONG = [
    # what is asked for
    (3, "steering: got 3, expected a mapping"),
    ({"steering": {}}, "steering: unknown: expected one of steering_vectors, "),
    ({"steering_vectors": {}}, "steering_vectors: got {}, expected a mapping like"),
    ({"steering_vectors": [1]}, "steering_vectors: got [1], expected a mapping like"),
    ({"steering_vectors": {"nope": {}}}, "steering_vectors: got nope, expected a hook, one of pre_attn, "),
    ({"prefill_steering_clamps": {"nope": {}}}, "prefill_steering_clamps: got nope, expected a hook"),
    # layers
    (vectors([1]), f"{V}: got [1], expected a mapping of layer to vector, or packed"),
    (vectors({}), f"{V}: got {{}}, expected a mapping of layer"),
    (vectors({-1: [1]}), f"{V}: got -1, expected a layer number, 0..1023"),
    (vectors({"-1": [1]}), f"{V}: got '-1', expected a layer number"),
    (vectors({True: [1]}), f"{V}: got True, expected a layer number"),
    (vectors({"²": [1]}), f"{V}: got '²', expected a layer number"),
    (vectors({1.0: [1]}), f"{V}: got 1.0, expected a layer number"),
    (vectors({1024: [1]}), f"{V}: got 1024, expected a layer number"),
    (vectors({"9" * 5000: [1]}), f"{V}: got '9999"),
    (vectors({3: [1], "3": [1]}), f"{V}.3: got the layer twice, expected each layer once"),
    # vectors
    (vectors({3: []}), f"{V}.3: got shape [0], expected [hidden_size]"),
    (vectors({3: 1.0}), f"{V}.3: got shape [], expected [hidden_size]"),
    (vectors({3: None}), f"{V}.3: got None, expected a list of numbers"),
    (vectors({3: "1, 2"}), f"{V}.3: got '1, 2', expected a list of numbers"),
    (vectors({3: [1, "2"]}), f"{V}.3: got '2' at index 1, expected a number"),
    (vectors({3: [1, True]}), f"{V}.3: got True at index 1, expected a number"),
    (vectors({3: [1, None]}), f"{V}.3: got None at index 1, expected a number"),
    (vectors({3: [[1, 2]]}), f"{V}.3: got [1, 2] at index 0, expected a number"),
    (vectors({3: np.array([True])}), f"{V}.3: got an array of bool, expected a list of numbers"),
    (vectors({3: np.array([1j])}), f"{V}.3: got an array of complex128"),
    (vectors({3: np.ones((1, 2))}), f"{V}.3: got shape [1, 2]"),
    (vectors({3: [1, 2, math.nan]}), f"{V}.3: got nan at index 2, expected {NUMBERS}"),
    (vectors({3: [1, -math.inf]}), f"{V}.3: got -inf at index 1, expected {NUMBERS}"),
    (vectors({3: [1, 1e300]}), f"{V}.3: got 1e+300 at index 1, expected {NUMBERS}"),
    (vectors({3: [1, 10**400]}), f"{V}.3: got 1000"),
    (vectors({3: {"vector": [1], "scale": "2"}}, "prefill_"), "prefill_steering_vectors.post_block.3.scale: got '2'"),
    (vectors({3: {"vector": [1], "scale": True}}), f"{V}.3.scale: got True, expected a number"),
    (vectors({3: {"vector": [1], "scale": math.nan}}), f"{V}.3.scale: got nan, expected a finite number"),
    (vectors({3: {"vector": [1], "gain": 2}}), f"{V}.3.gain: unknown: expected one of vector, scale"),
    (vectors({3: {"scale": 2}}), f"{V}.3.vector: missing: expected all of vector"),
    (vectors({3: [1, 2], 4: [1]}), f"{V}.4: got 1 numbers, expected 2, as in {V}.3"),
    (
        vectors({3: [1, 2]}) | patches({"positions": [0, 1], "vector": [1]}),
        f"{P}: got 1 numbers, expected 2, as in {V}.3",
    ),
    # packed
    (vectors(packed([[1, 2]], [3]) | {"dtype": "int8"}), f"{V}.dtype: got 'int8', expected one of bfloat16, float16"),
    (vectors(packed([[1, 2]], [3]) | {"dtype": ["float16"]}), f"{V}.dtype: got ['float16'], expected one of"),
    (vectors(packed([[1, 2]], [3]) | {"shape": [2]}), f"{V}.shape: got [2], expected [n, hidden_size]"),
    (vectors(packed([[1, 2]], [3]) | {"shape": 2}), f"{V}.shape: got 2, expected [n, hidden_size]"),
    (vectors(packed([[1, 2]], [3]) | {"shape": [0, 2]}), f"{V}.shape: got 0, expected a number of rows, 1.."),
    (vectors(packed([[1, 2]], [3]) | {"shape": [1, 2.0]}), f"{V}.shape: got 2.0, expected a width, 1..65536"),
    (vectors(packed([[1, 2]], [3]) | {"shape": [1, True]}), f"{V}.shape: got True, expected a width"),
    (
        vectors(packed([[1, 2]], [3]) | {"shape": [1, 3]}),
        f"{V}.data: got 8 bytes, expected 12, float32 of shape [1, 3]",
    ),
    (vectors(packed([[1, 2]], [3]) | {"data": "AAA"}), f"{V}.data: got 'AAA', expected base64 text, padded"),
    (vectors(packed([[1, 2]], [3]) | {"data": "AA\nA="}), f"{V}.data: got 'AA"),
    (vectors(packed([[1, 2]], [3]) | {"data": "é==="}), f"{V}.data: got 'é===', expected base64"),
    (vectors(packed([[1, 2]], [3]) | {"data": [1, 2]}), f"{V}.data: got [1, 2], expected base64"),
    (vectors(packed([[1, 2]], [3, 4])), f"{V}.layer_indices: got [3, 4], expected a list of 1 layers"),
    (vectors(packed([[1, 2]], "3")), f"{V}.layer_indices: got '3', expected a list of 1"),
    (vectors(packed([[1, 2]], [-3])), f"{V}.layer_indices: got -3, expected a layer number"),
    (vectors(packed([[1, 2]], [True])), f"{V}.layer_indices: got True, expected a layer number"),
    (vectors(packed([[1, 2]] * 2, [3, 3])), f"{V}.layer_indices: got 3 twice, expected each layer once"),
    (vectors(packed([[1, 2]], [3], scales="2")), f"{V}.scales: got '2', expected a number"),
    (vectors(packed([[1, 2]], [3], scales=[1, 2])), f"{V}.scales: got 2 numbers, expected one number, or 1"),
    (vectors(packed([[1, 2]] * 2, [3, 4], scales=[1, False])), f"{V}.scales: got False at index 1, expected a number"),
    (vectors(packed([[1, 2]], [3], scale=2)), f"{V}.scale: unknown: expected one of dtype, shape, layer_indices, data"),
    (vectors({"data": "AAAA"}), f"{V}.dtype: missing: expected all of dtype, shape, layer_indices, data"),
    *(
        (vectors(packed([[1, 2], [3, bad]], [3, 4], dtype)), f"{V}.data: got {bad} at index [1, 1], expected {NUMBERS}")
        for dtype in DTYPES
        for bad in (math.nan, math.inf, -math.inf)
    ),
    (
        vectors(packed([[1, 2]], [3], "float64") | {"data": FLOAT64_LARGE}),
        f"{V}.data: got 1e+300 at index [0, 1], expected {NUMBERS}",
    ),
    # clamps
    (clamps({3: 1}), f"{C}.3: got 1, expected a clamp, a mapping"),
    (clamps({3: []}), f"{C}.3: got [], expected a clamp, or a list of them"),
    (clamps({3: [1]}), f"{C}.3.0: got 1, expected a clamp, a mapping"),
    (clamps({3: {"min": 1}}), f"{C}.3.vector: missing"),
    (clamps({3: {"vector": [1]}}), f"{C}.3: no bound: expected min, max or both, or value"),
    (clamps({3: {"vector": [1], "min": None}}), f"{C}.3.min: got None, expected a number"),
    (clamps({3: {"vector": [1], "max": math.inf}}), f"{C}.3.max: got inf, expected a finite number"),
    (clamps({3: {"vector": [1], "min": 2, "max": 1}}), f"{C}.3.min: got 2.0, expected at most max, 1.0"),
    (clamps({3: {"vector": [1], "value": 2, "max": 1}}), f"{C}.3.value: given beside a bound: expected value, or"),
    (clamps({3: {"vector": [1], "value": 2, "strength": True}}), f"{C}.3.strength: got True"),
    (clamps({3: {"vector": [1], "value": 2, "scale": 1}}), f"{C}.3.scale: unknown: expected one of vector, min, max"),
    (clamps({3: [{"vector": [1], "min": 0}, {"vector": [0], "min": 0}]}), f"{C}.3.1.vector: got a zero vector"),
    (clamps({3: {"vector": [1, math.nan], "min": 0}}), f"{C}.3.vector: got nan at index 1"),
    (clamps(packed([[1, 0], [0, 0]], [3, 3], min=0)), f"{C}.data: got a zero vector in row 1, expected a direction"),
    (clamps(packed([[1, 2]], [3])), f"{C}: no bound"),
    (clamps(packed([[1, 2]], [3], value=0, min=0)), f"{C}.value: given beside a bound"),
    (clamps(packed([[1, 2]] * 2, [3, 3], min=[0, 2], max=1)), f"{C}.min: got 2.0 in row 1, expected at most max, 1.0"),
    (clamps(packed([[1, 2]], [3], min="x")), f"{C}.min: got 'x', expected a number"),
    (clamps(packed([[1, 2]], [3], min=[0], scales=1)), f"{C}.scales: unknown"),
    # patches
    (
        {"steering_patches": {"post_block": packed([[1]], [3])}},
        "steering_patches.post_block: got 'dtype', expected a layer",
    ),
    (patches(3), f"{P}: got 3, expected a patch, a mapping"),
    (patches({"vector": [1]}), f"{P}.positions: missing: expected all of positions, vector"),
    (patches({"positions": [1]}), f"{P}.vector: missing"),
    (patches({"positions": [1], "vector": [1], "scale": 1}), f"{P}.scale: unknown: expected one of positions, "),
    (patches({"positions": [], "vector": [1]}), f"{P}.positions: got 0 positions, expected a list of 1..1024"),
    (patches({"positions": 3, "vector": [1]}), f"{P}.positions: got 3, expected a list of 1..1024 positions"),
    (
        patches({"positions": list(range(limits.POSITIONS_LISTED_MAX + 1)), "vector": [1]}),
        f"{P}.positions: got 1025 positions, expected a list of 1..1024",
    ),
    (
        patches([{"positions": list(range(n, n + 1000)), "vector": [1]} for n in (0, 1000)]),
        f"{P}.1.positions: got 2000 positions, expected at most 1024 at a site",
    ),
    (patches({"positions": [1, True], "vector": [1]}), f"{P}.positions: got True, expected a position"),
    (patches({"positions": [1, 2.0], "vector": [1]}), f"{P}.positions: got 2.0, expected a position"),
    (patches({"positions": [2**31], "vector": [1]}), f"{P}.positions: got 2147483648, expected a position"),
    (patches({"positions": [1, 1], "vector": [1]}), f"{P}.positions: got 1 twice, expected each position of a site"),
    (patches([{"positions": [1], "vector": [1]}] * 2), f"{P}.1.positions: got 1 twice"),
    (patches({"positions": [1], "vector": []}), f"{P}.vector: got shape [0]"),
    (
        patches({"positions": [1], "vector": [[1], [2]]}),
        f"{P}.vector: got shape [2, 1], expected [hidden_size] or [1, ",
    ),
    (
        patches({"positions": [1, 2], "vector": [[1, 2], [2]]}),
        f"{P}.vector.1: got 1 numbers, expected 2, as in the first",
    ),
    (patches({"positions": [1, 2], "vector": [[1], [True]]}), f"{P}.vector.1: got True at index 0, expected a number"),
    (patches({"positions": [1], "vector": np.ones((1, 1, 2))}), f"{P}.vector: got shape [1, 1, 2]"),
    (patches({"positions": [1], "vector": np.ones((1, 0))}), f"{P}.vector: got shape [1, 0]"),
    (patches({"positions": [1], "vector": np.array([[1, np.nan]])}), f"{P}.vector: got nan at index [0, 1]"),
    (patches({"positions": [1], "vector": {"dtype": "float16"}}), f"{P}.vector.shape: missing"),
    (patches({"positions": [1], "vector": packed([1, 2], [3])}), f"{P}.vector.layer_indices: unknown"),
    (
        patches({"positions": [1], "vector": packed([[[1]]])}),
        f"{P}.vector.shape: got [1, 1, 1], expected [hidden_size] or [n, hidden_size]",
    ),
    (patches({"positions": [1], "vector": [1], "amount": "1"}), f"{P}.amount: got '1', expected a number"),
    # modules
    ({"steering_scale": 1.0}, "steering_scale: given without a name: expected steering_name beside it"),
    ({"steering_name": {"a": 1}, "steering_scale": 1.0}, "steering_scale: given beside scales by name"),
    ({"steering_name": "a", "steering_scale": True}, "steering_scale: got True, expected a number"),
    ({"steering_name": ""}, "steering_name: got '', expected a name of 1..256 characters"),
    ({"steering_name": 3}, "steering_name: got 3, expected a name, a list of names or a mapping"),
    ({"steering_name": []}, "steering_name: got [], expected a name, a list"),
    ({"steering_name": ["a", "a"]}, "steering_name: got a twice, expected each name once"),
    ({"steering_name": {"a": "1"}}, "steering_name.a: got '1', expected a number"),
    ({"steering_name": ["a", 1]}, "steering_name: got 1, expected a name of"),
    (
        {"steering_module_ref": ["a", 1], "steering_name": "a"},
        "steering_module_ref: given beside steering_name: expected one or the other",
    ),
    (
        {"steering_module_ref": ["a", 1], "steering_scale": 1},
        "steering_module_ref: given beside steering_scale: expected one or the other",
    ),
    ({"steering_module_ref": "ab"}, "steering_module_ref: got 'ab', expected a pair of name and scale"),
    ({"steering_module_ref": ["a"]}, "steering_module_ref: got ['a'], expected a pair of name and scale"),
    ({"steering_module_ref": [1, "a"]}, "steering_module_ref: got 1, expected a name of 1..256 characters"),
    ({"steering_module_ref": ["a", True]}, "steering_module_ref: got True, expected a number"),
    (
        {"steering_vectors": {"post_mlp": {3: [1, 2]}, "post_block": {4: [1, 2]}}},
        "steering_vectors: got post_block under two names (post_mlp and post_block), expected each hook once",
    ),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_what_is_wrong_is_named_by_its_field(fields, message):
    assert message_of(fields).startswith(message)


def test_the_path_begins_with_what_holds_the_fields():
    with pytest.raises(UsageError, match=r"^modules\.calm\.steering_vectors\.post_block\.3: got shape"):
        Steering.parse(vectors({3: []}), where="modules.calm")
    with pytest.raises(UsageError, match=r"^modules\.calm\.steering_vectors\.post_block\.3: got 1 numbers"):
        Steering.parse(vectors({3: [1]})).check(INFO, where="modules.calm")


def test_the_fields_are_what_a_request_may_have():
    assert STEERING_FIELDS == (
        "steering_vectors",
        "prefill_steering_vectors",
        "decode_steering_vectors",
        "steering_clamps",
        "prefill_steering_clamps",
        "decode_steering_clamps",
        "steering_features",
        "prefill_steering_features",
        "decode_steering_features",
        "steering_patches",
        "steering_gates",
        "steering_name",
        "steering_scale",
        "steering_module_ref",
    )


def test_vectors_already_parsed_are_one_for_a_site():
    vector = SteeringVector.make(Site(3, "post_block"), [1, 2])
    assert message_of({"steering_vectors": [vector, vector]}).startswith(f"{V}.3: got the site twice")
    other = msgspec.structs.replace(vector, dtype="int8")
    assert message_of({"steering_vectors": [other]}).startswith(f"{V}.3.dtype: got int8")


FLOAT32S = {name: np.array(row, np.float32).tobytes() for name, row in {"unit": [1, 0], "long": [2, 0]}.items()}


class TestCheck:
    def test_accepts_what_fits(self):
        Steering.parse(
            {
                "steering_vectors": {"post_block": {6: [1, 2]}},
                "decode_steering_clamps": {"post_block": {0: {"vector": [1, 2], "max": 1}}},
                "steering_patches": {"post_block": {3: {"positions": [-1], "vector": [1, 2]}}},
                "steering_name": "unknown",
            }
        ).check(INFO)

    @pytest.mark.parametrize("tier", ["", "prefill_", "decode_"])
    @pytest.mark.parametrize(
        ("kind", "entry"), [("vectors", [1, 2]), ("clamps", {"vector": [1, 2], "value": 0})], ids=["vectors", "clamps"]
    )
    @pytest.mark.parametrize(
        ("layer", "hook", "message"),
        [
            (8, "post_block", "got layer 8, expected 0..7"),
            (
                7,
                "post_block",
                "got no tap at post_block:7, expected a tapped site; start the engine with --sites post_bl",
            ),
            (
                1,
                "mlp_in",
                "got no tap at mlp_in:1, expected a tapped site; start the engine with --sites mlp_in:1 to tap it",
            ),
        ],
    )
    def test_names_the_field_of_the_tier(self, tier, kind, entry, layer, hook, message):
        steering = Steering.parse({f"{tier}steering_{kind}": {hook: {layer: entry}}})
        with pytest.raises(UsageError) as error:
            steering.check(INFO)
        assert str(error.value).startswith(f"{tier}steering_{kind}.{hook}.{layer}: {message}")

    @pytest.mark.parametrize(
        ("fields", "path"),
        [
            (vectors({3: [1]}), f"{V}.3"),
            (clamps({3: {"vector": [1], "value": 0}}), f"{C}.3"),
            (patches({"positions": [1, 2], "vector": [1]}), P),
        ],
    )
    def test_refuses_another_width(self, fields, path):
        with pytest.raises(UsageError) as error:
            Steering.parse(fields).check(INFO)
        assert str(error.value) == f"{path}: got 1 numbers, expected 2, the model's width"

    @pytest.mark.parametrize(
        ("part", "message"),
        [
            (SteeringVector(3, "post_block", FLOAT32S["unit"], "float32", math.nan), f"{V}.3: got NaN or infinity"),
            (SteeringVector(3, "post_block", FLOAT32S["long"], "float32", 3e38), f"{V}.3: got NaN or infinity"),
            (SteeringVector(3, "post_block", FLOAT64_LARGE, "float64"), f"{V}.3: got NaN or infinity"),
            (SteeringVector(3, "post_block", b"", "int8"), f"{V}.3.dtype: got int8"),
            (SteeringVector(-1, "post_block", b""), f"{V}.-1: got layer -1"),
            (Clamp(3, "post_block", FLOAT32S["long"]), f"{C}.3: got a direction of length 2, expected a unit vector"),
            (Clamp(3, "post_block", FLOAT32S["unit"], 2.0, 1.0), f"{C}.3: got bounds 2.0..1.0"),
            (Clamp(3, "post_block", FLOAT32S["unit"], strength=math.nan), f"{C}.3: got bounds -inf..inf, strength nan"),
            (Patch(3, "post_block", (1, 1), FLOAT32S["unit"] * 2), f"{P}.positions: got 1 twice"),
            (Patch(3, "post_block", (), b""), f"{P}.positions: got 0 positions"),
            (Patch(3, "post_block", (1,), b"\xff" * 8), f"{P}: got nan at index 0"),
            (Patch(3, "post_block", (1,), FLOAT32S["unit"], math.inf), f"{P}.amount: got inf"),
        ],
    )
    def test_holds_what_others_made_to_the_same(self, part, message):
        tier = Tier((part,) if isinstance(part, SteeringVector) else (), (part,) if isinstance(part, Clamp) else ())
        with pytest.raises(UsageError) as error:
            Steering(base=tier, patches=(part,) if isinstance(part, Patch) else ()).check(INFO)
        assert str(error.value).startswith(message)


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_is_what_numpy_says(dtype):
    """Of every float16 and bfloat16 there is, and of the edges of the larger ones."""
    if DTYPES[dtype] in (np.float32, np.float64):
        top = float(np.finfo(np.float32).max)
        values = np.array([0, -0.0, 1e-45, top, -top, math.inf, -math.inf, math.nan], DTYPES[dtype])
    else:
        values = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype])
    with np.errstate(invalid="ignore"):
        expected = np.isfinite(values.astype(np.float32))
    assert [finite(value) for value in values.reshape(-1, 1)] == expected.tolist()


def test_the_array_of_a_block_is_a_view():
    block = packed([[1, 2]], raw=True)
    array = Packed.read(block, "x").array()
    assert np.shares_memory(array, np.frombuffer(block["data"], np.uint8))


# --- many rows at once ---

ROWS = np.random.default_rng(3).standard_normal((11, 4096))


def unit(direction):
    """Return a direction at length 1, by itself."""
    values = direction.astype(np.float64)
    square = np.square(values).sum()
    if square < 1e-200:
        values /= np.abs(values).max()
        square = np.square(values).sum()
    return ((values / np.sqrt(square)).astype(np.float32) + np.float32(0)).tobytes()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("width", [1, 3, 640, 4096])
def test_directions_of_a_block_are_those_that_each_has_by_itself(dtype, width):
    rows = ROWS[:, :width].astype(dtype)
    rows[2] = -rows[2] if width > 1 else rows[2]
    if dtype == "float64":
        rows[4] *= 1e-150
    rows[5, 0] = -0.0 if width > 1 else 1.0
    made = Steering.parse(clamps(packed(rows, [2] * len(rows), dtype, max=1.0))).base.clamps
    assert [clamp.data for clamp in made] == [unit(row) for row in rows]


def test_a_zero_direction_is_refused_by_its_row_behind_others():
    rows = ROWS.copy()
    rows[9] = 0.0
    with pytest.raises(UsageError, match="data: got a zero vector in row 9, expected a direction"):
        Steering.parse(clamps(packed(rows, [2] * len(rows), "float64", max=1.0)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_block_is_added_as_it_is_without_negative_zeros(dtype):
    rows = ROWS[:, :8].astype(DTYPES[dtype])
    rows[1, :4] = -0.0
    expected = rows.astype(np.float32) + np.float32(0)
    alike = program(vectors(packed(rows, list(range(11)), dtype)), 8)
    other = program(vectors(packed(rows, list(range(11)), dtype, scales=[*[1.0] * 10, 2.0])), 8)
    assert alike.array().tobytes() == expected.tobytes()
    assert other.array()[:10].tobytes() == expected[:10].tobytes()
    assert not np.signbit(alike.array()[1, :4]).any()


def test_a_number_that_is_not_finite_is_refused_by_its_layer():
    rows = np.ones((3, 2), np.float16)
    rows[1, 1] = np.inf
    vectors = [SteeringVector(n, "post_block", row.tobytes(), "float16") for n, row in enumerate(rows)]
    steering = Steering(Tier(tuple(vectors)))
    with pytest.raises(UsageError, match=r"^steering_vectors.post_block.1: got NaN or infinity"):
        steering.check(INFO)
    Steering(Tier(tuple(vectors[::2]))).check(INFO)


BASE64 = [
    "",
    "AA",
    "AAA",
    "AAAA",
    "AAA=",
    "AA==",
    "A===",
    "====",
    "AAAA\n",
    " AAAA",
    "AA-_",
    "AAéA",
    "AAAA=",
    "AA=A",
    "AB==",
]


@pytest.mark.parametrize("text", BASE64)
def test_both_decoders_of_base64_accept_the_same_texts(text, monkeypatch):
    pytest.importorskip("pybase64")

    def read():
        try:
            return packed_module._bytes(text, "data")
        except UsageError as e:
            return str(e)

    fast = read()
    monkeypatch.setattr(packed_module, "b64decode", None)
    assert fast == read()
