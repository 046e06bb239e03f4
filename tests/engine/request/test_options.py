"""The options of a request: what workers read is what the scheduler wrote."""

import pickle

import msgspec
import pytest

pytest.importorskip("vllm")

from capflow.steering.compiler import program_of
from capflow_engine.request.options import RequestOptions

VECTOR, OTHER = [1.0, -2.0], [0.5, 4.0]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"id": "a", "capture": {"hooks": {"post_block": [0, 1]}, "positions": {"every": 2}}},
        {"capture": {"filesystem": {"hooks": {"mlp_in": "all"}}}},
        {"steering_vectors": {"post_block": {1: VECTOR}}, "decode_steering_vectors": {"mlp_out": {0: OTHER}}},
        {"steering_clamps": {"post_block": {1: [{"vector": VECTOR, "min": 0.0}]}}},
        {"steering_patches": {"post_block": {1: [{"positions": [0, -1], "vector": [VECTOR, OTHER]}]}}},
    ],
)
def test_pickled_options_are_the_same_and_have_the_same_keys(values):
    asked = RequestOptions.make(**values)
    program = None if asked.steering is None else program_of(len(VECTOR), [asked.steering])
    for options in (asked, msgspec.structs.replace(asked, steering=None, program=program)):
        read = pickle.loads(pickle.dumps(options))  # noqa: S301  written just now
        assert read == options
        assert type(read) is RequestOptions
        if program is not None and options.program is not None:
            assert read.program.key(read.program.decode) == program.key(program.decode)
