"""The scheduler's reports of requests that may be steered: who gets them, and that none is left behind."""

from types import SimpleNamespace

import numpy as np
import pytest

from capflow import limits

pytestmark = pytest.mark.engine

ACTION_AT = 7


@pytest.fixture
def reports():
    from capflow_engine.request.dynamic import Reports

    return Reports()


def told(reports, *keys, finish=None, stopped=()):
    """Return what a step's outputs of these requests tell the front end, by vLLM's id."""
    from capflow_engine.request.dynamic import taken

    outputs = [SimpleNamespace(request_id=key, finish_reason=finish, kv_transfer_params=None) for key in keys]
    reports.attach({0: SimpleNamespace(outputs=outputs)}, dict.fromkeys(stopped, 1))
    result = {output.request_id: taken(output) for output in outputs}
    assert all(output.kv_transfer_params is None for output in outputs)
    return {key: dynamic for key, dynamic in result.items() if dynamic is not None}


def steer(name):
    from capflow.capture.site import Site
    from capflow.steering.action import Steer
    from capflow.steering.vector import SteeringVector

    return Steer(name, (SteeringVector.make(Site(2, "post_block"), np.ones(8)),))


def test_of_a_plain_request_nothing_is_told(reports):
    reports.admit("k", "k", "r", [])
    assert told(reports, "k", finish="stop") == {}


def test_each_output_after_an_action_tells_of_it(reports):
    for key in ("k", "other"):
        reports.admit(key, key, f"name-{key}", [])
    assert told(reports, "k") == {}
    reports.act("k", steer("name-k"), ACTION_AT)
    result = told(reports, "k", "other")
    assert set(result) == {"k"}
    (change,) = result["k"].actions
    assert (change.request, change.kind, change.sites, change.position) == ("name-k", "steer", ("post_block:2",), 7)


def test_of_many_actions_the_first_are_told(reports):
    """Each output has them, and there may be an action a token."""
    reports.admit("k", "k", "r", [])
    for position in range(limits.ACTED_MAX + 10):
        reports.act("k", steer("r"), position)
    assert [change.position for change in told(reports, "k")["k"].actions] == list(range(limits.ACTED_MAX))


@pytest.mark.parametrize("how", ["finished", "stopped by a string"])
def test_controllers_are_told_with_the_last_output(reports, how):
    reports.admit("k", "k", "r", ["gate@rude"])
    assert told(reports, "k") == {}
    result = told(reports, "k", finish="stop") if how == "finished" else told(reports, "k", stopped=["k"])
    assert result["k"].controllers == ("gate@rude",)


def test_the_output_that_ends_a_request_still_tells_and_nothing_is_left(reports):
    reports.admit("k", "k", "r", [])
    reports.act("k", steer("r"), ACTION_AT)
    reports.end("k")
    assert "k" in told(reports, "k", finish="length")
    reports.admit("k", "k", "r", [])
    assert told(reports, "k", finish="length") == {}


def test_samples_of_a_request_tell_of_each_other(reports):
    """vLLM puts what its last sample said into an answer of several."""
    for number in range(2):
        reports.admit(f"{number}_k", "k", f"r#{number}", [])
    reports.act("0_k", steer("r#0"), ACTION_AT)
    reports.end("0_k")
    told(reports, "0_k", finish="length")
    reports.end("1_k")
    assert told(reports, "1_k", finish="length")["1_k"].actions[0].request == "r#0"
    reports.admit("2_k", "k", "r#2", [])
    assert told(reports, "2_k", finish="length") == {}
