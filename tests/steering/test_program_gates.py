"""A program's gates: their place in a chain, their part of its keys, and what is refused."""

import math

import msgspec
import numpy as np
import pytest

from capflow import limits
from capflow.capture.model import ModelInfo
from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.steering.compiler import program_of
from capflow.steering.program import ADD, PATCH, SCORE_DOT, UNGATED, Op, ProgramGate, SiteOps, SteeringProgram, digest
from capflow.steering.request import Steering

ROWS = np.array([[1, 0], [0, 1]], np.float32)
INFO = ModelInfo("m", 3, 2, "float32", (Site(1, "post_block"),))
GATE = ProgramGate("rude", threshold=0.5, layer=1, hook="post_block")


SCORE, GATED = Op(SCORE_DOT, 0, -0.5, gate=0), Op(ADD, 1, gate=0)


def gated(*gates, score=SCORE, add=GATED, patched=()):
    ops = (SiteOps(1, "post_block", (score, add)),)
    return SteeringProgram(2, ROWS.tobytes(), tuple(digest(row.tobytes()) for row in ROWS), ops, (), patched, gates)


def test_a_program_without_gates_has_the_keys_that_it_had_before_there_were_gates():
    fields = {
        "steering_vectors": {"post_block": {3: [1, 2]}},
        "decode_steering_clamps": {"post_block": {3: {"vector": [1, 0], "value": 0}}},
        "steering_patches": {"post_block": {1: {"positions": [-1], "vector": [3, 4]}}},
    }
    made = program_of(2, [Steering.parse(fields)])
    assert made.id == "5c3793ceb80ccecaaf07cdb74227aa13"
    assert made.key(made.prefill) == "dd4cf21bcde7711c52318a7cd7970106"
    assert made.key(made.decode) == "6fa21e427fa9aecfc58111276d6fda06"
    assert made.patched_key(5) == "e985590165370372d7266e3cabc21510"


@pytest.mark.parametrize(
    "other",
    [
        gated(GATE._replace(sharpness=4.0)),
        gated(GATE._replace(latched=True)),
        gated(GATE, score=Op(SCORE_DOT, 0, -0.25, gate=0)),
        gated(GATE, GATE, add=Op(ADD, 1, gate=1)),
        gated(GATE, add=Op(ADD, 1, gate=UNGATED)),
    ],
    ids=["sharpness", "latch", "threshold", "number", "no gate"],
)
def test_the_parameters_of_a_gate_are_part_of_every_key(other):
    made = gated(GATE)
    assert made.key(made.prefill) != other.key(other.prefill)
    assert made.id != other.id


def test_names_and_owners_are_no_part_of_a_key():
    made, other = gated(GATE), gated(GATE._replace(name="module m/rude", label="x"))
    other = msgspec.structs.replace(other, owners=("module m",))
    assert made.key(made.prefill) == other.key(other.prefill)
    assert made.id == other.id


def test_at_a_patched_position_scores_come_before_patches():
    patched = ((-1, (SiteOps(1, "post_block", (Op(PATCH, 1),)),)),)
    (ops,) = gated(GATE, patched=patched).patches(4)[3]
    assert [op.kind for op in ops.ops] == [SCORE_DOT, PATCH, ADD]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (gated(), "^steering: got an operation with gate 0, expected one of the 0 gates"),
        (gated(GATE, add=Op(ADD, 1, gate=1)), "^steering: got an operation with gate 1, expected one of the 1 gates"),
        (gated(GATE, score=Op(SCORE_DOT, 0)), "^steering: got an operation with gate -1"),
        (gated(*[GATE] * (limits.GATES_MAX + 1)), "^steering_gates: got 9 gates, expected at most 8 of one request"),
        (gated(GATE._replace(sharpness=0.0)), "^steering_gates.rude.sharpness: got 0.0, expected a number above 0"),
        (gated(GATE._replace(sharpness=math.nan)), "^steering_gates.rude.sharpness: got nan"),
        (gated(GATE._replace(threshold=math.inf)), "^steering_gates.rude.threshold: got inf, expected a finite"),
    ],
)
def test_a_program_with_wrong_gates_is_refused(wrong, error):
    with pytest.raises(UsageError, match=error):
        wrong.check(INFO)


def test_a_program_with_gates_travels():
    made = gated(GATE)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=SteeringProgram) == made
