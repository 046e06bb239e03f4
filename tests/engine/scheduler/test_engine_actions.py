"""Actions in a scheduler: which owners may have a gain, what an answer lists, and whose positions must be certain."""

from types import SimpleNamespace

import numpy as np
import pytest

from capflow.protocol.message import Act
from capflow.steering.action import ActionApplied, Freeze, Gain, Rejected, Steer
from capflow.steering.vector import SteeringVector
from tests.kit.frames import make_model

MODEL = make_model()
ADDED = SteeringVector.make(MODEL.sites[0], np.ones(MODEL.hidden_size))


class Engine:
    """The actions of an engine with one running request, `k`, which has generated tokens."""

    def __init__(self):
        from capflow_engine.scheduler.actions import EngineActions, RunningRequest
        from capflow_engine.steering.budget import Holdings, Size

        self.noted, self.answers, self.certain = [], [], []
        self.actions = EngineActions(
            MODEL,
            Holdings(Size(64, 256, 64)),
            {},
            fork=lambda request, position: None,
            note=lambda key, action, position: self.noted.append((key, action, position)),
            answer=self.answers.append,
            certain=self.certain.append,
            controllers=lambda: ["controller gate@rude"],
        )
        self.request = SimpleNamespace(request_id="k", num_computed_tokens=12, num_tokens=10, num_prompt_tokens=4)
        self.running = RunningRequest(self.request, "r", None, 4, ("gate@rude",))

    def act(self, action):
        """Return why an action is rejected; None if the next step has it."""
        if action.request:
            return self.actions.apply(Act("0/a", action, owner="client"), "k", self.running)
        return self.actions.apply_to_all(Act("0/e", action, owner="client"), lambda: [("k", self.running)])

    def step(self):
        from capflow_engine.scheduler.orders import News

        return self.actions.take(News())


@pytest.fixture
def acting():
    return Engine()


@pytest.mark.parametrize("lease", [{}, {"lease_s": 1.0}, {"lease_positions": 4}], ids=["none", "seconds", "positions"])
@pytest.mark.parametrize("action", [Steer("r", (ADDED,)), Gain("r", "request", 0.5)], ids=["steer", "gain"])
def test_only_a_lease_in_positions_ends_the_drafts_of_its_request(acting, action, lease):
    from msgspec.structs import replace

    assert acting.act(replace(action, **lease)) is None
    assert acting.certain == ([acting.request] if "lease_positions" in lease else [])


def test_a_request_that_must_be_certain_has_no_drafts_in_the_very_next_step(acting):
    from capflow_engine.scheduler.admission import Admission

    ended = []
    acting.request.spec_token_ids = [-1, -1, -1]
    Admission._without_drafts(SimpleNamespace(drafting=SimpleNamespace(end=ended.append)), acting.request)
    assert (ended, acting.request.spec_token_ids) == (["k"], [])


def test_an_answer_lists_an_action_when_a_step_has_it(acting):
    steer = Steer("r", (ADDED,))
    assert acting.act(steer) is None
    assert acting.noted == []
    assert [tuple(each) for each in acting.step()] == [("0/a", "k", 12)]
    assert acting.noted == [("k", steer, 12)]


def test_an_answer_lists_no_action_that_a_freeze_or_the_end_of_its_request_rejects(acting):
    assert acting.act(Steer("r", (ADDED,))) is None
    assert acting.act(Freeze()) is None
    acting.step()
    assert acting.noted == []
    assert isinstance(acting.answers.pop(), Rejected)
    other = Engine()
    assert other.act(Steer("r", (ADDED,))) is None
    other.actions.end("k", "r")
    other.step()
    assert other.noted == []
    assert isinstance(other.answers.pop(), Rejected)


OWNERS = ("controller gate@rude", "client", "client KEY", "request")


@pytest.mark.parametrize("request_id", ["", "r"], ids=["engine", "request"])
def test_controllers_and_clients_are_muted_before_they_act(acting, request_id):
    for owner in OWNERS:
        assert acting.act(Gain(request_id, owner, 0.0)) is None, owner
    for owner in ("nobody", "controller gate@sad", "client ", "modul calm"):
        assert acting.act(Gain(request_id, owner, 0.0)).startswith(f"gain.owner: got {owner}"), owner


def test_an_idle_engine_takes_the_gain_of_a_controller_that_has_nothing_to_see_yet(acting):
    for owner in ("controller gate@rude", "client"):
        outcome = acting.actions.at_once(Act("0/a", Gain("", owner, 0.0), owner="client"), 3, idle=True)
        assert outcome == ActionApplied("0/a", 4), owner


@pytest.mark.parametrize(
    ("computed", "first"), [(12, 12), (10, 10), (9, 9)], ids=["three under way", "one under way", "none under way"]
)
def test_an_action_holds_behind_the_steps_under_way_of_a_preempted_request(acting, computed, first):
    from capflow_engine.scheduler.admission import Admission

    admission = SimpleNamespace(_preempted_at={})
    acting.request.num_computed_tokens = 0
    Admission.keep_reached(admission, acting.request, computed)
    assert acting.running._replace(preempted_at=admission._preempted_at["k"]).reached == first


def test_an_event_alone_is_recorded_in_a_frozen_engine():
    from capflow_engine.scheduler.decisions import Decisions
    from capflow_engine.scheduler.orders import Decided, News, StepAnswer

    decisions, request = Decisions(lambda request, first: None), SimpleNamespace(num_tokens=9, num_prompt_tokens=4)
    request.is_finished = lambda: False
    shadow, steer = Decided("k", 0, 0, None, 7), Decided("k", 0, 0, Steer("r", (ADDED,)), 7)
    output = SimpleNamespace(capflow_decisions=StepAnswer([shadow, steer]).encode())
    decisions.read(output, {"k": request}, frozen=True)
    decisions.apply(SimpleNamespace(requests={"k": request}), {})
    decisions.take(news := News())
    assert news.decided == [shadow]
