"""Streaming input: when a request keeps its cache blocks to itself."""

from types import SimpleNamespace

import numpy as np
import pytest

from capflow.steering.compiler import program_of
from capflow.steering.request import Steering
from capflow_engine.request.options import RequestOptions
from capflow_engine.scheduler.admission import Admission

VECTOR = {"post_block": {1: np.ones(2)}}


def patches(*positions):
    return {"steering_patches": {"post_block": {1: {"positions": positions, "vector": [1.0, 2.0]}}}}


@pytest.mark.parametrize(
    ("fields", "forks"),
    [
        ({"steering_vectors": VECTOR}, []),
        ({"steering_vectors": VECTOR, **patches(3)}, []),
        ({"prefill_steering_vectors": VECTOR}, [12]),
        (patches(-1), [12]),
        ({"steering_vectors": VECTOR, **patches(3, -2)}, [12]),
        ({"steering_gates": {"g": {"layer": 1, "vector": [1.0, 2.0], "positions": "last_prompt"}}}, [12]),
    ],
)
def test_more_input_forks_the_cache_of_what_the_prompts_end_changes(fields, forks):
    """The keys of the blocks name the position of the old end."""
    program, forked = program_of(2, [Steering.parse(fields)]), []
    admission = SimpleNamespace(
        _options={"r": RequestOptions(program=program)},
        _fork_for_itself=lambda request, position: forked.append((request.request_id, position)),
    )
    Admission.extend_prompt(admission, SimpleNamespace(request_id="r", sampling_params=None), 12)
    assert forked == [("r", position) for position in forks]
