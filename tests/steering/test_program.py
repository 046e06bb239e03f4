"""Programs: what tiers, clamps, patches and modules come to, and when two of them do the same."""

import functools
import pickle
import weakref

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capflow import limits
from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.steering.clamp import parse_clamps
from capflow.steering.compiler import program_of, with_clamps, with_vectors
from capflow.steering.compose import fits, merged, owner_of, scaled, with_gate
from capflow.steering.patch import parse_patches
from capflow.steering.program import ADD, CLAMP, PATCH, RELATIVE, Op, SiteOps, SteeringProgram
from capflow.steering.request import Steering, Tier
from capflow.steering.vector import SteeringVector

WIDTH = 2
HERE = Site(3, "post_block")


def program(*parts):
    return program_of(WIDTH, [Steering.parse(part) for part in parts])


def at(**fields):
    """Return fields with each value at one site."""
    return {name: {HERE.hook: {HERE.layer: value}} for name, value in fields.items()}


def done(program, ops):
    """Return, by site, each operation with its row in the place of the row's number."""
    rows = program.array()
    return {
        str(Site(layer, hook)): [(op.kind, rows[op.row].tolist(), *op[2:5]) for op in each] for layer, hook, each in ops
    }


def applied(program, ops, stream):
    """Return `[hidden_size]` after the operations at one site, as the module docstring of `program` says them."""
    x, rows = np.asarray(stream, np.float64), program.array().astype(np.float64)
    for op in ops:
        row = rows[op.row]
        if op.kind == PATCH:
            x = x + op.amount * (row - x)
        elif op.kind == ADD:
            x = x + op.amount * row
        else:
            p = x @ row
            x = x + op.amount * (min(max(p, op.low), op.high) - p) * row
    return x.tolist()


INF = float("inf")


def add(*row):
    return (ADD, list(row), 1.0, -INF, INF)


def test_nothing_has_no_program():
    assert program() is None
    assert program({}) is None


def test_tiers_add_up_at_each_phase():
    made = program(
        at(steering_vectors=[1, 1]),
        at(steering_vectors=[2, 0], prefill_steering_vectors=[10, 0], decode_steering_vectors=[0, 100]),
    )
    assert done(made, made.prefill) == {"post_block:3": [add(13, 1)]}
    assert done(made, made.decode) == {"post_block:3": [add(3, 101)]}


def test_a_tier_of_one_phase_leaves_the_other_alone():
    made = program(at(prefill_steering_vectors=[1, 0]))
    assert done(made, made.prefill) == {"post_block:3": [add(1, 0)]}
    assert made.decode == ()
    made = program(at(decode_steering_clamps={"vector": [1, 0], "value": 0}))
    assert made.prefill == ()
    assert done(made, made.decode) == {"post_block:3": [(CLAMP, [1.0, 0.0], 1.0, 0.0, 0.0)]}


def test_vectors_are_added_before_clamps_and_these_hold_in_order():
    first, second = {"vector": [1, 0], "value": 1}, {"vector": [1, 1], "max": 0, "strength": 0.5}
    fields = at(steering_clamps=[first, second], steering_vectors=[5, 5])
    made = program(fields, at(decode_steering_clamps={"vector": [0, 1], "min": 2}))
    (prefill,), (decode,) = made.prefill, made.decode
    assert [op.kind for op in prefill.ops] == [ADD, CLAMP, CLAMP]
    assert [op.kind for op in decode.ops] == [ADD, CLAMP, CLAMP, CLAMP]
    assert applied(made, prefill.ops, [9, -5]) == pytest.approx([0.75, -0.25])
    assert applied(made, decode.ops, [9, -5]) == pytest.approx([0.75, 2.0])
    turned = program(at(steering_clamps=[second, first], steering_vectors=[5, 5]))
    assert turned.key(turned.prefill) != made.key(made.prefill)


@pytest.mark.parametrize(
    "parts",
    [
        [at(steering_vectors={"vector": [1, 2], "scale": 0})],
        [at(steering_vectors=[0, -0.0])],
        [at(steering_vectors=[1, 2]), at(steering_vectors={"vector": [-1, -2]})],
        [at(steering_vectors=[0.1, 0.2]), at(steering_vectors={"vector": [0.2, 0.4], "scale": -0.5})],
        [at(steering_clamps={"vector": [1, 2], "value": 0, "strength": 0})],
        [at(steering_patches={"positions": [0], "vector": [1, 2], "amount": 0})],
    ],
)
def test_what_comes_to_nothing_is_left_out(parts):
    assert program(*parts) is None


def test_equal_rows_are_held_once():
    made = program({"steering_vectors": {"post_block": {n: [1, 2] for n in range(4)}}})
    assert made.array().tolist() == [[1.0, 2.0]]
    assert len(made.sites) == 4


class TestPatches:
    FIELDS = at(
        steering_patches=[
            {"positions": [2, -1], "vector": [[1, 2], [3, 4]]},
            {"positions": [7], "vector": [5, 6], "amount": 0.5},
        ],
        prefill_steering_vectors=[1, 0],
        decode_steering_vectors=[0, 1],
    )

    def test_come_before_what_the_phase_does(self):
        made = program(self.FIELDS)
        patched = made.patches(5)
        assert {position: done(made, ops)["post_block:3"] for position, ops in patched.items()} == {
            2: [(PATCH, [1.0, 2.0], 1.0, -INF, INF), add(1, 0)],
            4: [(PATCH, [3.0, 4.0], 1.0, -INF, INF), add(1, 0)],
            7: [(PATCH, [5.0, 6.0], 0.5, -INF, INF), add(0, 1)],
        }
        assert made.first_patched(5) == 2

    def test_count_from_the_end_of_the_prompt_where_they_are_negative(self):
        made = program(at(steering_patches={"positions": [-1, -4], "vector": [1, 2]}))
        assert list(made.patches(6)) == [2, 5]
        assert list(made.patches(3)) == [2]  # the prompt has no fourth token from its end
        assert made.first_patched(3) == 2
        assert made.patched_key(3) != made.patched_key(6)

    def test_of_one_position_are_done_in_the_order_written(self):
        made = program(
            at(
                steering_patches=[
                    {"positions": [-1], "vector": [4, 0]},
                    {"positions": [2], "vector": [0, 4], "amount": 0.5},
                ]
            )
        )
        ((_, ops),) = made.patches(3).items()
        assert applied(made, ops[0].ops, [9, 9]) == [2.0, 2.0]

    def test_at_other_sites_leave_what_the_phase_does_there(self):
        made = program(
            {
                "steering_patches": {"mlp_in": {1: {"positions": [0], "vector": [1, 2]}}},
                **at(steering_vectors=[1, 0]),
            }
        )
        assert list(done(made, made.patches(1)[0])) == ["mlp_in:1", "post_block:3"]


class TestKeys:
    @given(data=st.data())
    def test_are_equal_for_the_same_steering_in_another_form(self, data):
        layers = {n: [float(n + 1), 1.0] for n in range(4)}
        order = data.draw(st.permutations(list(layers)))
        split = data.draw(st.integers(0, 4))
        one = program({"steering_vectors": {"post_block": layers}})
        two = program(
            {"steering_vectors": {"post_block": {str(n): layers[n] for n in order[:split]}}} if split else {},
            {"steering_vectors": {"post_block": {n: layers[n] for n in order[split:]}}} if split < 4 else {},
        )
        assert one.key(one.prefill) == two.key(two.prefill)
        assert one.key(one.decode) == two.key(two.decode)

    def test_do_not_tell_how_a_sum_was_made(self):
        one = program(at(steering_vectors=[3, 1]))
        two = program(
            at(prefill_steering_vectors={"vector": [1, 0.5], "scale": 2}), at(prefill_steering_vectors=[1, 0])
        )
        assert one.key(one.prefill) == two.key(two.prefill)
        assert one.key(one.decode) != two.key(two.decode)

    @pytest.mark.parametrize(
        "other",
        [
            at(steering_vectors=[1, 3]),
            {"steering_vectors": {"post_block": {4: [1, 2]}}},
            {"steering_vectors": {"mlp_in": {3: [1, 2]}}},
            at(steering_clamps={"vector": [1, 2], "value": 0}),
        ],
    )
    def test_differ_where_something_else_is_done(self, other):
        one, two = program(at(steering_vectors=[1, 2])), program(other)
        assert one.key(one.prefill) != two.key(two.prefill)

    @pytest.mark.parametrize("change", [{"min": -1}, {"max": 3}, {"strength": 0.5}, {"vector": [2, 1]}])
    def test_hold_what_a_clamp_does(self, change):
        clamp = {"vector": [1, 2], "min": 0, "max": 2}
        one, two = program(at(steering_clamps=clamp)), program(at(steering_clamps=clamp | change))
        assert one.key(one.prefill) != two.key(two.prefill)
        longer = program(at(steering_clamps=clamp | {"vector": [2, 4]}))
        assert one == longer


class TestWithVectors:
    VECTOR = SteeringVector.make(HERE, [1, 2])

    def test_adds_at_generated_positions_after_other_vectors_and_before_clamps(self):
        old = program(at(steering_vectors=[5, 6], steering_clamps={"vector": [1, 0], "value": 0}))
        new = with_vectors(old, WIDTH, [self.VECTOR])
        assert done(new, new.prefill) == done(old, old.prefill)
        clamp = (CLAMP, [1.0, 0.0], 1.0, 0.0, 0.0)
        assert done(new, new.decode) == {"post_block:3": [add(5, 6), add(1, 2), clamp]}

    def test_makes_a_program_where_there_was_none(self):
        new = with_vectors(None, WIDTH, [self.VECTOR])
        assert new.prefill == ()
        assert done(new, new.decode) == {"post_block:3": [add(1, 2)]}

    def test_of_nothing_changes_nothing(self):
        old = program(at(steering_vectors=[5, 6]))
        assert with_vectors(old, WIDTH, []) is old
        assert with_vectors(None, WIDTH, [SteeringVector.make(HERE, [0, 0])]) is None

    def test_keeps_patches(self):
        old = program(at(steering_patches={"positions": [0, 4], "vector": [3, 4]}))
        new = with_vectors(old, WIDTH, [self.VECTOR])
        assert done(new, new.patches(2)[0]) == done(old, old.patches(2)[0])
        assert done(new, new.patches(2)[4])["post_block:3"][-1] == add(1, 2)


@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("kind", ["steering_vectors", "steering_clamps", "steering_patches"])
def test_a_part_of_another_width_is_refused(kind, width):
    """One number would be added to all of a row, if nobody looked."""
    entries = {
        "steering_vectors": {"vector": [1.0] * width},
        "steering_clamps": {"vector": [1.0] * width, "value": 0},
        "steering_patches": {"vector": [1.0] * width, "positions": [0]},
    }
    steering = Steering.parse({kind: {"post_block": {1: entries[kind]}}})
    with pytest.raises(UsageError, match=f"^{kind}.post_block.1: got {width} numbers, expected 4, the model's width$"):
        program_of(4, [steering])


def test_an_operation_on_no_row_is_refused():
    ops = (SiteOps(1, "post_block", (Op(ADD, 1),)),)
    info = ModelInfo("m", 3, 2, "float32", (Site(1, "post_block"),))
    with pytest.raises(
        UsageError, match=r"^steering: got an operation on no row, expected rows of 0..0; make the program"
    ):
        SteeringProgram(2, bytes(8), (b"0" * 16,), ops).check(info)


def test_a_sum_beyond_float32_is_refused():
    huge = SteeringVector.make(Site(1, "post_block"), np.full(4, 3e38, np.float32))
    with pytest.raises(
        UsageError, match=r"^steering_vectors.post_block.1: got a sum beyond float32, expected at most 3.4e\+38; make"
    ):
        program_of(4, [Steering(base=Tier((huge,))), Steering(decode=Tier((huge,)))])


def relative(vector, scale=1.0):
    return {"vector": vector, "scale": scale, "relative": True}


def test_relative_vectors_add_up_as_units_and_come_before_what_else_is_added():
    made = program(
        at(steering_vectors=relative([30, 0], 0.5), decode_steering_vectors=[7, 7]),
        at(steering_vectors=[1, 2], steering_clamps={"vector": [1, 0], "value": 0}),
        at(prefill_steering_vectors=relative([0, 1e-30], -2)),
    )
    clamp = (CLAMP, [1.0, 0.0], 1.0, 0.0, 0.0)
    units = (RELATIVE, [0.5, -2.0], 1.0, -INF, INF)
    assert done(made, made.prefill) == {"post_block:3": [units, add(1, 2), clamp]}
    assert done(made, made.decode) == {"post_block:3": [(RELATIVE, [0.5, 0.0], 1.0, -INF, INF), add(8, 9), clamp]}


def test_what_is_relative_is_another_program_and_what_cancels_out_is_none():
    plain, other = program(at(steering_vectors=[1, 0])), program(at(steering_vectors=relative([1, 0])))
    assert plain.key(plain.prefill) != other.key(other.prefill)
    assert program(at(steering_vectors=relative([1, 2], 0))) is None
    assert program(at(steering_vectors=relative([1, 2])), at(steering_vectors=relative([-2, -4]))) is None


def test_a_relative_vector_of_an_action_is_of_the_stream_before_anything_is_added():
    old = program(at(steering_vectors=[5, 6]), at(steering_vectors=relative([1, 0])))
    new = with_vectors(old, WIDTH, [SteeringVector.make(HERE, [0, 9], 0.5, relative=True), TestWithVectors.VECTOR])
    units = (RELATIVE, [1.0, 0.5], 1.0, -INF, INF)
    assert done(new, new.decode) == {"post_block:3": [units, add(5, 6), add(1, 2)]}
    assert done(new, new.prefill) == done(old, old.prefill)


def clamped(count, **more):
    return at(steering_clamps=[{"vector": [1, n + 1], "value": 0} | more for n in range(count)])


@pytest.mark.parametrize("tier", ["", "prefill_", "decode_"])
def test_more_clamps_at_one_position_than_the_limit_are_refused_whatever_brings_them(tier):
    most = limits.CLAMPS_AT_SITE_MAX
    some = {f"{tier}steering_clamps": clamped(most - 1)["steering_clamps"]}
    made = program(clamped(1), some)
    assert max(len(ops) for phase in (made.prefill, made.decode) for _, _, ops in phase) == most
    expected = f"expected at most {most} at one position, with those of modules and of the global state; clamp fewer"
    with pytest.raises(UsageError, match=f"^steering_clamps.post_block.3: got {most + 1} clamps, {expected}"):
        program(clamped(2), some)


def test_clamps_of_other_phases_or_sites_and_those_without_strength_do_not_count():
    most = limits.CLAMPS_AT_SITE_MAX
    apart = {f"{tier}_steering_clamps": clamped(most)["steering_clamps"] for tier in ("prefill", "decode")}
    elsewhere = {"steering_clamps": {"post_block": {4: clamped(most)["steering_clamps"]["post_block"][3]}}}
    assert program(apart, elsewhere, clamped(most, strength=0)) is not None


def test_a_position_that_is_patched_twice_is_refused():
    patch = parse_patches({"post_block": {3: {"positions": [4, 5], "vector": [1, 2]}}})
    with pytest.raises(
        UsageError, match=r"^steering_patches.post_block.3.positions: got 4 twice, expected each position"
    ):
        program_of(WIDTH, [Steering(patches=patch * 2)])


def test_a_program_with_a_longer_chain_than_the_limit_is_refused():
    most = limits.SITE_OPS_MAX
    ops = (SiteOps(1, "post_block", (Op(ADD, 0),) * (most + 1)),)
    info = ModelInfo("m", 3, 2, "float32", (Site(1, "post_block"),))
    with pytest.raises(UsageError, match=f"^steering: got {most + 1} operations, expected at most {most} at one site"):
        SteeringProgram(2, bytes(8), (b"0" * 16,), ops).check(info)


@pytest.mark.parametrize("positions", [(-1,), (0,), (0, -1)])
def test_operations_of_a_patched_position_count_with_those_of_its_phase(positions):
    site, most = Site(1, "post_block"), limits.SITE_OPS_MAX
    info = ModelInfo("m", 3, 2, "float32", (site,))

    def chain(count):
        ops, patch = (SiteOps(*site, (Op(ADD, 0),) * count),), (SiteOps(*site, (Op(PATCH, 0),)),)
        patched = tuple((position, patch) for position in positions)
        return SteeringProgram(2, bytes(8), (b"0" * 16,), ops, patched=patched)

    full, over = chain(most - len(positions)), chain(most - len(positions) + 1)
    assert max(len(each.ops) for ops in full.patches(1).values() for each in ops) == full.longest == most
    full.check(info)
    assert fits(full)
    with pytest.raises(UsageError, match=f"^steering: got {most + 1} operations, expected at most {most} at one site"):
        over.check(info)
    assert not fits(over)


def test_a_patch_at_a_generated_position_counts_with_what_actions_add_there():
    made = program({"steering_patches": {"post_block": {3: {"positions": [9], "vector": [1, 2]}}}})
    most, vector = limits.SITE_OPS_MAX, SteeringVector.make(HERE, np.ones(WIDTH, np.float32))
    for _ in range(most - 1):
        made = with_vectors(made, WIDTH, [vector])
    assert fits(made)
    assert not fits(with_vectors(made, WIDTH, [vector]))


def test_a_site_that_can_only_be_captured_is_refused():
    info = ModelInfo("m", 3, 4, "float32", (Site(1, "mlp_in"),), fixed=(Site(1, "mlp_in"),))
    asked = Steering.parse({"steering_vectors": {"mlp_in": {1: [1.0] * 4}}})
    with pytest.raises(UsageError, match=r"^steering_vectors.mlp_in.1: .*only be captured"):
        asked.check(info)
    with pytest.raises(UsageError, match="only be captured"):
        program_of(4, [asked]).check(info)


# --- on the way to another process ---

VECTORS = {"post_block": {3: [1.0, 2.0]}}
PARTS = [
    {"steering_vectors": VECTORS},
    {
        "decode_steering_vectors": VECTORS,
        "steering_patches": {"post_block": {2: {"positions": [0, -1], "vector": [1, 1]}}},
    },
    {
        "steering_gates": {"g": {"layer": 1, "vector": [1, 0]}},
        "steering_vectors": {"post_block": {3: {"vector": [1, 1], "gate": "g"}}},
    },
]


@pytest.mark.parametrize("part", PARTS)
def test_what_another_process_reads_is_the_same_and_is_there_once_while_it_is_used(part):
    made = program(part)
    read = SteeringProgram.unpack(made.head, made.rows)
    assert read == made
    assert read.content_key == made.content_key
    assert read.id == made.id
    assert (read.alike, read.phase_keys, read.phase_effects) == (made.alike, made.phase_keys, made.phase_effects)
    head = bytes(bytearray(made.head))
    assert SteeringProgram.unpack(head, bytes(bytearray(made.rows))) is read
    one, two = pickle.loads(pickle.dumps([made, made]))  # noqa: S301  written just now
    assert one is two is read
    address = weakref.ref(read)
    del read, one, two
    assert address() is None


def test_rows_that_are_not_those_of_the_head_are_not_taken_from_another_program():
    made = program({"steering_vectors": {"post_block": {3: [1.0, 2.0]}}})
    read = SteeringProgram.unpack(made.head, made.rows)
    other = SteeringProgram.unpack(made.head, np.array([5.0, 6.0], np.float32).tobytes())
    assert other is not read
    assert other.array().tolist() == [[5.0, 6.0]]
    assert read.array().tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("head", [b"", b"\x00", b"\xc1", msgspec.msgpack.encode([1, True])])
def test_a_head_that_is_none_is_refused(head):
    with pytest.raises(msgspec.MsgspecError):
        SteeringProgram.unpack(head, b"")


def test_a_program_that_fits_one_model_is_checked_against_another():
    made = program({"steering_vectors": {"post_block": {3: [1.0, 2.0]}}})
    fits = ModelInfo("m", 8, 2, "float32", (HERE,))
    made.check(fits)
    made.check(fits)
    with pytest.raises(UsageError, match="no tap at post_block:3"):
        made.check(ModelInfo("m", 8, 2, "float32", (Site(1, "post_block"),)))


KEPT = [name for name, value in vars(SteeringProgram).items() if isinstance(value, functools.cached_property)]


def keys(program):
    """Everything that a program keeps once it is computed."""
    return {name: getattr(program, name) for name in KEPT}


def anew(program):
    """An equal program for which nothing was computed."""
    fields = {name: getattr(program, name) for name in SteeringProgram.__struct_fields__}
    return SteeringProgram(**fields)


CLAMPED = {"post_block": {3: {"vector": [1.0, 0.0], "max": 2.0}}}
CHANGES = {
    "gain": lambda made: scaled(made, {owner_of(made, op): 2.0 for site in made.decode for op in site.ops}),
    "gate": lambda made: with_gate(made, "g", enabled=False) or made,
    "vectors": lambda made: with_vectors(made, WIDTH, [SteeringVector.make(HERE, [5.0, 6.0])]),
    "clamps": lambda made: with_clamps(made, WIDTH, parse_clamps(CLAMPED)),
    "program": lambda made: merged(made, program({"steering_clamps": CLAMPED})),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_program_that_is_made_of_another_keeps_nothing_of_what_was_computed_of_that(part, change):
    made = program(part)
    keys(made)
    changed = CHANGES[change](made)
    assert keys(changed) == keys(anew(changed))
    assert keys(made) == keys(anew(made))
