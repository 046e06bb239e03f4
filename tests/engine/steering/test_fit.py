"""What fits an engine: modules, the global state, and the refusals that name the field, the limit and the remedy."""

import re

import numpy as np
import pytest

from capflow import limits
from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.steering.program import ADD, Op, SiteOps, SteeringProgram
from capflow.steering.request import NOTHING, Steering
from capflow_engine.steering.budget import Size
from capflow_engine.steering.fit import Fit
from capflow_engine.steering.store import SteeringStore

WIDTH = 16
INFO = ModelInfo("tiny", 4, WIDTH, "float32", tuple(Site(layer, "post_block") for layer in range(3)))
FIT = Fit(INFO, Size.of(3 * 4 * WIDTH, WIDTH, 4))
GOOD = Steering.parse({"steering_vectors": {"post_block": {1: [0.5] * WIDTH}}})


@pytest.fixture(params=["in memory", "in files"])
def store(request, tmp_path):
    return SteeringStore(tmp_path if request.param == "in files" else None, FIT.check)


WRONG = {
    "a vector of one number": ({"post_block": {1: [2.0]}}, r".post_block.1: got 1 numbers, expected 16"),
    "a vector of half the width": ({"post_block": {1: [2.0] * 8}}, r".post_block.1: got 8 numbers, expected 16"),
    "one to be removed": ({"post_block": {1: {"vector": [2.0], "scale": 0.0}}}, r".post_block.1: got 1 numbers"),
    "a layer that is none": ({"post_block": {4: [2.0] * WIDTH}}, r".post_block.4: got layer 4, expected 0..3"),
    "a site without a tap": ({"mlp_out": {1: [2.0] * WIDTH}}, r".mlp_out.1: got no tap"),
    "more than the bank": ({"post_block": {n: [n + 1.0] * WIDTH for n in range(3)}}, r": got 4 different vectors"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("field", ["steering_vectors", "decode_steering_vectors"])
def test_what_does_not_fit_is_neither_registered_nor_set(store, case, field):
    vectors, words = WRONG[case]
    fields = {field: vectors}
    if "bank" in case:
        fields["prefill_steering_vectors"] = {"post_block": {0: [9.0] * WIDTH}}
    steering = Steering.parse(fields)
    store.set_global(GOOD)
    for change in (lambda: store.register("wrong", steering), lambda: store.set_global(steering, replace=True)):
        with pytest.raises(UsageError, match=f"^{field}{words}"):
            change()
    assert store.names == ()
    assert store.global_state == GOOD


def test_what_outgrows_the_bank_beside_what_is_there_is_named_by_what_was_said(store):
    for layer in range(3):
        store.set_global(Steering.parse({"steering_vectors": {"post_block": {layer: [layer + 1.0] * WIDTH}}}))
    before = store.global_state
    one = Steering.parse({"decode_steering_clamps": {"post_block": {0: {"vector": [1.0] * WIDTH, "value": 0}}}})
    with pytest.raises(UsageError, match=r"^decode_steering_clamps: got 4 different vectors, expected at most 3"):
        store.set_global(one)
    assert store.global_state == before


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"decode_steering_vectors": {"post_block": {1: [3e38] * WIDTH}}, "steering_name": "large"},
         "decode_steering_vectors.post_block.1"),
        ({"steering_vectors": {"post_block": {0: [1.0] * WIDTH}}, "steering_name": {"large": 2.0}}, "steering_name"),
        ({"steering_name": {"clamped": 3e38}}, "steering_name"),
    ],
)  # fmt: skip
def test_what_is_beyond_float32_is_named_by_the_field_that_brings_it(store, fields, named):
    store.register("large", Steering.parse({"steering_vectors": {"post_block": {1: [3e38] * WIDTH}}}))
    clamp = {"vector": [1.0] * WIDTH, "value": 0, "strength": 10.0}
    store.register("clamped", Steering.parse({"steering_clamps": {"post_block": {2: clamp}}}))
    with pytest.raises(UsageError, match=rf"^{named}: got .*, expected at most 3.4e\+38; make .* smaller$"):
        FIT.program(Steering.parse(fields), store)


MOST = limits.CLAMPS_AT_SITE_MAX


def test_clamps_beyond_the_limit_are_named_where_they_are_set_or_where_they_meet(store):
    def refused(count, field, work):
        with pytest.raises(
            UsageError, match=rf"^{field}: got {count:,} clamps, expected at most {MOST} at one position"
        ):
            work()

    fit = Fit(INFO, Size.of(1 << 20, WIDTH, 4))
    at = r"steering_clamps.post_block.1"
    refused(1000, at, lambda: fit.program(clamps(1000), SteeringStore()))
    refused(MOST + 1, at, lambda: store.register("many", clamps(MOST + 1)))
    refused(MOST + 1, at, lambda: store.set_global(clamps(MOST + 1)))
    store = SteeringStore(check=fit.check)
    for name in ("one", "two"):
        store.register(name, clamps(MOST))
    assert fit.program(Steering.parse({"steering_name": "one"}), store) is not None
    refused(2 * MOST, "steering_name", lambda: fit.program(Steering.parse({"steering_name": ["one", "two"]}), store))
    own = Steering.parse({"steering_name": "one"} | {"decode_steering_clamps": {"post_block": {1: CLAMP}}})
    refused(MOST + 1, f"decode_{at}", lambda: fit.program(own, store))
    store.set_global(clamps(1))
    refused(MOST + 1, "steering_name", lambda: fit.program(Steering.parse({"steering_name": "one"}), store))


CLAMP = {"vector": [1.0] * WIDTH, "value": 0}


def patches(rows):
    """Return patches of as many positions as there are rows, and a vector beside them."""
    patch = {"positions": list(range(len(rows))), "vector": rows.astype(np.float32)}
    vectors = {"post_block": {0: rows[0]}}
    return Steering.parse({"steering_patches": {"post_block": {1: patch}}, "steering_vectors": vectors})


def clamps(count):
    """Return `count` clamps with one direction."""
    each = [{"vector": [1.0] * WIDTH, "max": float(n)} for n in range(count)]
    return Steering.parse({"steering_clamps": {"post_block": {1: each}}})


BYTES = 4 * WIDTH
LIMITS = {
    "rows that more memory holds": (
        Size.of(10 * BYTES, WIDTH, 4), patches(1.0 + np.arange(20 * WIDTH).reshape(20, WIDTH)),
        f"steering_patches: got 20 different vectors, expected at most 10, .*-bank-bytes {20 * BYTES} or more",
    ),
    "operations": (
        Size(10, 20, 100), clamps(21),
        f"steering_clamps: got 21 operations, expected at most 20, .*--steering-bank-bytes {6 * BYTES} or more",
    ),
    "configurations": (
        Size.of(1 << 20, WIDTH, 4), patches(1.0 + np.arange(1024 * WIDTH).reshape(1024, WIDTH)),
        r"steering_patches: got 1,025 positions .* differently, expected at most 1,024, .*--max-num-seqs 257",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LIMITS)
def test_the_refusal_of_what_no_empty_bank_holds_names_the_limit_and_what_raises_it(case):
    size, steering, words = LIMITS[case]
    with pytest.raises(UsageError, match=words) as refused:
        Fit(INFO, size).program(steering, SteeringStore())
    named = set(re.findall(r"--[\w-]+", str(refused.value)))
    assert len(named) == 1
    assert "expected" in str(refused.value)


def test_the_refusal_of_what_no_bank_holds_recommends_no_larger_one():
    count = 65_537
    ops = tuple(Op(ADD, row) for row in range(count))
    digests = tuple(row.to_bytes(16, "little") for row in range(count))
    program = SteeringProgram(WIDTH, b"", digests, (SiteOps(1, "post_block", ops),))
    with pytest.raises(
        UsageError, match=r"got 65,537 different vectors, .* no larger bank would hold it; use fewer vectors$"
    ):
        Size(65_536, 1 << 20, 1 << 10).check(program)


def test_nothing_fits_everywhere():
    assert FIT.program(None, SteeringStore()) is None
    assert FIT.program(NOTHING, SteeringStore()) is None


@pytest.mark.parametrize(("extra", "samples"), [(0, 2), (1, 1)])
def test_a_name_that_no_hub_takes_is_refused(extra, samples):
    """It may be the engine's own for the request, or be too long only with the number of a sample."""
    pytest.importorskip("vllm")
    from capflow_engine.request.params import Prepared, sampling_params

    name = "x" * (limits.REQUEST_ID_LENGTH_MAX + extra)
    with pytest.raises(UsageError, match=r"^id: got x.*with the number of the choice"):
        Prepared.of(sampling_params(n=samples), FIT, SteeringStore(None, FIT.check), name)
    Prepared.of(sampling_params(), FIT, SteeringStore(None, FIT.check), name[:-1])
