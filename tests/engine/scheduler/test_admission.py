"""Streaming input, whose cache blocks a request keeps to itself, and the reaction to ranks that differ."""

from types import SimpleNamespace

import numpy as np
import pytest

from capflow.steering.action import Freeze, Rejected, Unfreeze
from capflow.steering.compiler import program_of
from capflow.steering.request import Steering
from capflow_engine.hubs import HubLinks, hubs_at
from capflow_engine.request.options import RequestOptions
from capflow_engine.scheduler.admission import Admission
from capflow_engine.scheduler.orders import Divergence
from tests.kit.asking import asking, came
from tests.kit.frames import make_hello
from tests.kit.hubs import Recorder, address, running_hub

__all__ = ["address"]

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


def test_a_freeze_for_ranks_that_differ_is_not_ended_by_an_unfreeze_that_waited_before_it(address):
    """The engine steps, so that changes of it wait for the next step."""
    froze = []
    with running_hub(address, Recorder()):
        links = HubLinks(
            hubs_at([address], None, insecure=True), make_hello(role="scheduler", boot="scheduler"), lambda _: ""
        )
        links.wait_welcomes(20)
        admission = SimpleNamespace(
            decisions=SimpleNamespace(take_diverged=lambda: Divergence(7, ("0.1",), ())),
            settings=SimpleNamespace(on_divergence="freeze"),
            links=links,
            actions=SimpleNamespace(at_once=lambda act, step, idle: froze.append(act.action)),
            step=9,
        )
        with asking(address, Unfreeze()) as outcomes:
            came(links)
            Admission.react(admission, None)
        left = links.actions(lambda _: True)
        links.close()
    assert [type(action) for action in froze] == [Freeze]
    assert isinstance(outcomes[0], Rejected)
    assert "froze, for ranks steer differently since step 7; send it again" in outcomes[0].reason
    assert left == []
