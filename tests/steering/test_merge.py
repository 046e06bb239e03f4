"""Two programs become one: it does what both do, in the order of kinds, and each keeps its gates and its owner."""

import pytest

from capflow import limits
from capflow.errors import UsageError
from capflow.steering.compiler import controller_owner, program_of
from capflow.steering.compose import gate_owner, merged, own, scaled, without_controllers
from capflow.steering.request import Steering

OWNER = controller_owner("gate@rude")


def asked(layer, seed, **more):
    """Return steering of every kind, with a gate at a layer."""
    gate = {"layer": layer, "vector": [seed, 1], "threshold": 0.5, "positions": "last_prompt", "latch": True}
    return Steering.parse(
        {
            "steering_gates": {"g": gate, "h": {"layer": layer, "vector": [1, seed]}},
            "steering_vectors": {
                "post_block": {
                    3: [{"vector": [seed, 2]}, {"vector": [seed, 4], "gate": "g"}, {"vector": [3, 3], "gate": "h"}],
                    4: {"vector": [seed, 1], "scale": 0.5, "relative": True},
                }
            },
            "prefill_steering_vectors": {"post_block": {4: {"vector": [5, seed], "gate": "g"}}},
            "decode_steering_clamps": {"post_block": {3: {"vector": [1, seed], "value": 0, "gate": "g"}}},
            **more,
        }
    )


PATCHES = {"steering_patches": {"post_block": {3: {"positions": [-1, 0], "vector": [3, 4]}}}}


def test_a_merged_program_is_the_one_that_is_compiled_of_both():
    first, second = asked(0, 7, **PATCHES), asked(1, 8)
    both = program_of(2, [first, second], ["request", OWNER])
    made = merged(program_of(2, [first]), program_of(2, [second], [OWNER]))
    assert made.key(made.prefill) == both.key(both.prefill)
    assert made.key(made.decode) == both.key(both.decode)
    assert made.patched_key(9) == both.patched_key(9)
    assert sorted(made.digests) == sorted(both.digests)
    assert len(made.rows) == len(both.rows)
    assert sorted(made.gates) == sorted(both.gates)
    assert made.owners == ("request", OWNER)


def test_a_request_that_brings_nothing_has_the_other_program():
    program = program_of(2, [asked(1, 8)], [OWNER])
    assert merged(None, program) is program


def test_each_owner_can_be_scaled_or_taken_back():
    alone = program_of(2, [asked(0, 7)])
    made = merged(alone, program_of(2, [asked(1, 8)], [OWNER]))
    for kept in (own(made), without_controllers(made)):
        assert kept.key(kept.prefill) == alone.key(alone.prefill)
        assert kept.key(kept.decode) == alone.key(alone.decode)
    quiet = scaled(made, {OWNER: 0.0})
    assert quiet.effect_key(quiet.decode, "generated") == alone.effect_key(alone.decode, "generated")
    assert without_controllers(program_of(2, [asked(1, 8)], [OWNER])) is None
    assert {gate_owner(gate) for gate in made.gates} == {"gate g", "gate h", OWNER}


def test_more_gates_than_fit_are_refused():
    def gates(count):
        return {f"g{n}": {"layer": 0, "vector": [n, 1]} for n in range(count)}

    def program(count, owner):
        fields = {"steering_gates": gates(count), "steering_vectors": {"post_block": {1: {"vector": [1, 1]}}}}
        return program_of(2, [Steering.parse(fields)], [owner])

    full = merged(program(limits.GATES_MAX - 1, "request"), program(1, OWNER))
    assert len(full.gates) == limits.GATES_MAX
    with pytest.raises(UsageError, match=r"^steering_gates: got 9 gates, with 8 of the request"):
        merged(full, program(1, controller_owner("gate@sad")))


def test_more_clamps_than_fit_are_refused_also_in_the_prompt():
    def program(count, owner):
        clamps = [{"vector": [n, 1], "value": 0} for n in range(count)]
        return program_of(2, [Steering.parse({"prefill_steering_clamps": {"post_block": {1: clamps}}})], [owner])

    most = limits.CLAMPS_AT_SITE_MAX
    merged(program(most - 1, "request"), program(1, OWNER))
    with pytest.raises(UsageError, match="too many operations at one site"):
        merged(program(most, "request"), program(1, OWNER))


def test_scores_of_the_last_prompt_position_count_when_programs_become_one():
    gates = {"g": {"layer": 1, "vector": [1, 0], "positions": "last_prompt"}}
    brought = program_of(2, [Steering.parse({"steering_gates": gates})], [OWNER])
    patch = {"post_block": {1: {"positions": [0, -1], "vector": [3, 4]}}}
    parts = [Steering.parse({"steering_vectors": {"post_block": {1: [n, 1]}}}) for n in range(limits.SITE_OPS_MAX - 2)]
    owners = [f"module {n}" for n in range(len(parts))]
    patches = Steering.parse({"steering_patches": patch})

    def program(count):
        return program_of(2, [*parts[:count], patches], [*owners[:count], "request"])

    merged(program(len(parts) - 1), brought)
    with pytest.raises(UsageError, match="too many operations at one site"):
        merged(program(len(parts)), brought)
