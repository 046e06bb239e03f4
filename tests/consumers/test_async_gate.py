"""The async gate: it acts from the hub, once for each change of its decision."""

import numpy as np
import pytest

from capflow.capture.frame import Frame
from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.probes.probe import Probe, save_vector
from capflow.steering.action import ActionApplied, Answered, Freeze, Rejected, Steer, Unfreeze, Unknown, Unsteer
from capflow_consumers.async_gate import RETRY_S, AsyncGate, AsyncGateConfig
from tests.kit.frames import make_frame, make_model

SITE = Site(1, "post_block")
WIDTH = 4


class Context:
    """Keeps the actions."""

    def __init__(self):
        self.actions = []

    def act(self, action):
        self.actions.append(action)

    def count(self, name, amount=1):
        pass


@pytest.fixture
def files(tmp_path):
    Probe.make(SITE, np.ones(WIDTH) / WIDTH, threshold=2.0).save(tmp_path / "probe.safetensors")
    save_vector(tmp_path / "vector.safetensors", Site(2, "post_block"), np.arange(WIDTH))
    return {"probe": str(tmp_path / "probe.safetensors"), "vector": str(tmp_path / "vector.safetensors")}


class Clock:
    """Stands still until a test moves it."""

    now = 0.0

    def __call__(self):
        return self.now


def opened(files, clock=None, **options):
    gate = AsyncGate(AsyncGateConfig(**files, **options), clock or Clock())
    gate.check()
    context = Context()
    gate.open(context)
    return gate, context.actions


def give(gate, request, start, *values):
    """Give the gate rows that score these values."""
    frame = make_frame([(request, 2, start, len(values))], [SITE], hidden=WIDTH)
    rows = np.repeat(np.asarray(values, np.float32)[:, None], WIDTH, axis=1)
    gate.on_frame(Frame.seal(frame.header, rows.reshape(-1).view(np.uint8)))


def kinds(actions):
    return [(type(action), action.request) for action in actions]


def test_it_steers_once_when_a_row_reaches_the_threshold(files):
    gate, actions = opened(files)
    give(gate, "a", 0, 0.0, 1.9)
    assert actions == []
    give(gate, "a", 2, 2.0)
    give(gate, "a", 3, 5.0)
    give(gate, "a", 4, 0.0)
    assert kinds(actions) == [(Steer, "a")]
    assert actions[0].vectors[0].array().tolist() == [0, 1, 2, 3]


def test_with_a_release_it_unsteers_and_steers_again(files):
    gate, actions = opened(files, release=1.0)
    for start, value in enumerate([3.0, 1.5, 0.5, 0.4, 2.5]):
        give(gate, "a", start, value)
    assert kinds(actions) == [(Steer, "a"), (Unsteer, "a"), (Steer, "a")]


def test_the_latest_row_of_a_frame_decides(files):
    gate, actions = opened(files, release=1.0)
    give(gate, "a", 0, 3.0, 0.0)
    assert actions == []
    give(gate, "a", 2, 0.0, 3.0)
    assert kinds(actions) == [(Steer, "a")]


def test_it_sees_only_requests_whose_id_matches(files):
    gate, actions = opened(files, requests="mine.*")
    give(gate, "other.1", 0, 9.0)
    give(gate, "mine.1", 0, 9.0)
    assert kinds(actions) == [(Steer, "mine.1")]


def test_a_later_request_of_the_same_id_is_decided_anew(files):
    gate, actions = opened(files)
    give(gate, "a", 0, 9.0)
    header = make_frame([("a", 2, 0, 1)], [SITE], hidden=WIDTH).header
    gate.on_engine_gone(header.engine)
    give(gate, "a", 0, 9.0)
    assert kinds(actions) == [(Steer, "a")] * 2


def answer(gate, action, outcome, asked_by="async_gate"):
    gate.on_action(Answered.of(action, outcome, engine="engine-1", asked_by=asked_by))


def test_it_acts_again_after_a_rejection_and_not_for_every_row(files):
    clock = Clock()
    gate, actions = opened(files, clock)
    for start in range(20):
        give(gate, "a", start, 3.0)
        if len(actions) == 1 and start == 3:
            answer(gate, actions[0], Rejected("i", "engine: got frozen"))
        if start in (9, 14):
            clock.now += RETRY_S
        if len(actions) == 2 and start == 12:
            answer(gate, actions[1], ActionApplied("i", 7, start + 1))
    assert kinds(actions) == [(Steer, "a")] * 2


def test_after_a_rejected_end_it_ends_the_steering_again(files):
    clock = Clock()
    gate, actions = opened(files, clock, release=1.0)
    give(gate, "a", 0, 3.0)
    give(gate, "a", 1, 0.0)
    answer(gate, actions[1], Rejected("i", "steering bank: no room"))
    clock.now += RETRY_S
    give(gate, "a", 2, 0.0)
    assert kinds(actions) == [(Steer, "a"), (Unsteer, "a"), (Unsteer, "a")]


@pytest.mark.parametrize(("value", "kind"), [(3.0, Steer), (0.0, Unsteer)])
def test_after_an_unknown_outcome_any_decision_is_sent(files, value, kind):
    gate, actions = opened(files, release=1.0)
    give(gate, "a", 0, 3.0)
    answer(gate, actions[0], Unknown("i", "no answer"))
    give(gate, "a", 1, value)
    assert kinds(actions) == [(Steer, "a"), (kind, "a")]


def test_it_is_still_while_the_engine_is_frozen_and_acts_again_afterwards(files):
    gate, actions = opened(files)
    give(gate, "a", 0, 3.0)
    answer(gate, Freeze(), ActionApplied("i", 7), "client")
    give(gate, "a", 1, 3.0)
    give(gate, "b", 0, 3.0)
    answer(gate, Unfreeze(), Rejected("i", "busy"), "client")
    give(gate, "a", 2, 3.0)
    assert kinds(actions) == [(Steer, "a")]
    answer(gate, Unfreeze(), ActionApplied("i", 9), "client")
    give(gate, "a", 3, 3.0)
    give(gate, "b", 1, 3.0)
    assert kinds(actions) == [(Steer, "a"), (Steer, "a"), (Steer, "b")]


def test_it_acts_again_after_a_freeze_that_only_the_worker_reports(files):
    """A freeze over HTTP goes by no hub; each request has an event of it."""
    gate, actions = opened(files)
    give(gate, "a", 0, 3.0)
    gate.on_action(Answered("i", "engine-1", "a", "freeze", (), "engine", 1, 7, "", 1))
    give(gate, "a", 1, 3.0)
    assert kinds(actions) == [(Steer, "a")] * 2


def test_outcomes_of_others_and_of_other_requests_change_nothing(files):
    gate, actions = opened(files)
    give(gate, "a", 0, 3.0)
    answer(gate, Steer("a", ()), Rejected("i", "no"), "client")
    answer(gate, Steer("a", (), "another"), Rejected("i", "no"))
    answer(gate, Steer("b", ()), Rejected("i", "no"))
    give(gate, "a", 1, 3.0)
    assert kinds(actions) == [(Steer, "a")]


def test_it_captures_every_request_or_what_requests_ask_for(files):
    gate, _ = opened(files, positions="last_prompt")
    assert gate.spec().hooks == {"post_block": [1]}
    assert opened(files, capture="requests")[0].spec() is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threshold": float("nan")}, "threshold: got nan, expected a finite number"),
        ({"release": 3.0}, "release: got 3.0, expected at most the threshold, 2.0"),
    ],
)
def test_wrong_options_are_refused(files, options, words):
    with pytest.raises(UsageError, match=words):
        opened(files, **options)


def test_a_vector_of_another_width_than_the_probe_is_refused(files, tmp_path):
    save_vector(tmp_path / "wide.safetensors", SITE, np.ones(5))
    with pytest.raises(UsageError, match="got 5 numbers, expected 4, the probe's width"):
        opened(files | {"vector": str(tmp_path / "wide.safetensors")})


def test_a_probe_may_be_at_a_site_of_another_shape_and_a_vector_may_not(files, tmp_path):
    heads = Site(1, "heads")
    Probe.make(heads, np.ones(12) / 12, threshold=2.0).save(tmp_path / "probe.safetensors")
    gate, actions = opened(files)
    gate.on_session("engine-1", make_model(hidden=WIDTH, shapes={"heads": (3, 4)}))
    with pytest.raises(UsageError, match=r"weight: got 12 numbers, expected 8, the width of heads:1"):
        gate.on_session("engine-1", make_model(hidden=WIDTH, shapes={"heads": (2, 4)}))
    frame = make_frame([("a", 2, 0, 2)], [heads], hidden=WIDTH, shape=(3, 4))
    rows = np.repeat(np.array([1, 3], np.float32)[:, None], 12, axis=1)
    gate.on_frame(Frame.seal(frame.header, rows.reshape(-1).view(np.uint8)))
    assert [type(action) for action in actions] == [Steer]
    save_vector(tmp_path / "vector.safetensors", heads, np.arange(12))
    with pytest.raises(UsageError, match=r"site: got heads:1, expected a site of the residual stream$"):
        opened(files)
