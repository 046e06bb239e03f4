"""Steering from pages: who may, how much, for how long, and what takes it back."""

from __future__ import annotations

import json
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed

from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.probes.probe import save_vector
from capflow.steering.action import (
    FROZEN_TROUBLE,
    Abort,
    ActionApplied,
    Answered,
    Freeze,
    Gain,
    Rejected,
    Steer,
    Unfreeze,
    Unknown,
    Unsteer,
    check_action,
)
from capflow_dashboard import limits, wire
from capflow_dashboard.consumer import Dashboard, DashboardConfig
from capflow_dashboard.steering import PageAction, SteeringDesk, Target, load_vectors
from tests.kit.dashboards import Pageless, open_dashboard
from tests.kit.frames import make_frame, make_model
from tests.kit.waiting import eventually

SITE = Site(2, "post_block")
SITES = tuple(Site(layer, "post_block") for layer in range(4))


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def vectors(tmp_path):
    path = tmp_path / "calm.safetensors"
    save_vector(path, SITE, np.arange(8))
    return (f"calm={path}",)


class Desk:
    """A desk with requests that a test starts and ends, and the actions that it sent."""

    def __init__(self, vectors, *, allowed=True):
        self.clock, self.sent, self.targets = Clock(), [], {}
        self.desk = SteeringDesk(
            load_vectors(vectors, "vectors"),
            ("glad",),
            allowed=allowed,
            send=self.sent.append,
            find=self.targets.get,
            running=lambda: list(self.targets.values()),
            clock=self.clock,
        )
        self.page = self.desk.enter("page")
        self.number = 0

    def start(self, *keys):
        for key in keys:
            self.targets[key] = Target(key, "engine-1", f"r{key}", f"i{key}")

    def act(self, kind, page=None, **fields):
        """Act; return the actions that were sent."""
        self.number += 1
        before = len(self.sent)
        self.desk.take(page or self.page, PageAction(self.number, kind, **fields))
        return self.sent[before:]

    def acks(self, page=None):
        return self.desk.news(page or self.page).get("acks", [])

    def pass_s(self, seconds, *alive):
        """Let time pass in small steps, with these pages alive; return the actions that were sent."""
        before = len(self.sent)
        for _ in range(math.ceil(seconds / limits.LEASES_S)):
            self.clock.now += limits.LEASES_S
            for page in alive:
                self.desk.renew(page)
            self.desk.tick()
        return self.sent[before:]

    def answer(self, action, outcome):
        self.desk.note(Answered.of(action, outcome, engine="engine-1", asked_by="dashboard"))


@pytest.fixture
def desk(vectors):
    return Desk(vectors)


def test_a_vector_is_added_relative_to_the_stream_with_a_lease_and_a_label(desk):
    desk.start(1)
    (steer,) = desk.act("steer", request=1, name="calm", ratio=0.25)
    check_action(steer)
    assert (steer.request, steer.incarnation, steer.engine) == ("r1", "i1", "engine-1")
    (vector,) = steer.vectors
    assert (vector.site, vector.scale, vector.relative) == (SITE, 0.25, True)
    assert np.frombuffer(vector.data, np.float32).tolist() == list(range(8))
    assert (steer.lease_s, steer.lease_positions) == (limits.LEASE_S, limits.LEASE_POSITIONS)
    assert steer.label == "calm +0.25 by page page #1"
    assert desk.acks() == []
    desk.answer(steer, ActionApplied("", 7, 12))
    assert desk.acks() == [{"id": 1, "state": "applied", "step": 7, "position": 12, "reason": ""}]
    (removed,) = desk.act("steer", request=1, name="calm", mode="remove", ratio=1.0)
    assert removed.vectors == ()
    (clamp,) = removed.clamps
    assert (clamp.site, clamp.low, clamp.high, clamp.strength) == (SITE, 0.0, 0.0, 1.0)
    (gain,) = desk.act("gain", request=1, name="glad", ratio=0.5)
    assert (gain.owner, gain.scale, gain.lease_s) == ("module glad", 0.5, limits.LEASE_S)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kind": "steer", "name": "calm", "ratio": 0.51}, "ratio: got 0.51, expected -0.5..0.5"),
        ({"kind": "steer", "name": "calm", "ratio": -0.6}, "ratio: got -0.6, expected -0.5..0.5"),
        ({"kind": "steer", "name": "calm", "ratio": math.nan}, "ratio: got nan"),
        ({"kind": "steer", "name": "calm", "mode": "remove", "ratio": 1.1}, "ratio: got 1.1, expected 0..1"),
        ({"kind": "steer", "name": "calm", "mode": "remove", "ratio": -0.1}, "ratio: got -0.1, expected 0..1"),
        ({"kind": "steer", "name": "angry", "ratio": 0.1}, "vector: got angry, expected one of calm"),
        ({"kind": "steer", "name": "glad", "ratio": 0.1}, "vector: got glad, expected one of calm"),
        ({"kind": "gain", "name": "glad", "ratio": 1.5}, "ratio: got 1.5, expected 0..1"),
        ({"kind": "gain", "name": "global", "ratio": 0.5}, "module: got global, expected one of glad"),
        ({"kind": "steer", "request": 9, "name": "calm", "ratio": 0.1}, "request: got one that is over"),
        ({"kind": "abort", "request": 9}, "request: got one that is over"),
        ({"kind": "abort", "request": 0}, "abort: got no request"),
    ],
)
def test_what_is_beyond_a_bound_is_refused_and_nothing_is_sent(desk, fields, reason):
    desk.start(1)
    assert desk.act(**({"request": 1} | fields)) == []
    (ack,) = desk.acks()
    assert ack["state"] == "rejected"
    assert ack["reason"].startswith(reason)
    assert desk.pass_s(10, desk.page) == []


def test_a_lease_is_renewed_while_its_page_is_alive_and_then_left_to_end(desk):
    desk.start(1)
    (steer,) = desk.act("steer", request=1, name="calm", ratio=0.25)
    renewed = desk.pass_s(20, desk.page)
    assert {action.request for action in renewed} == {"r1"}
    assert len(renewed) == pytest.approx(20 / limits.RENEW_S, abs=1)
    assert set(renewed) == {steer}
    desk.desk.renew(desk.page)
    silent = desk.pass_s(30)
    assert len(silent) <= limits.PAGE_ALIVE_S / limits.RENEW_S + 1
    assert desk.desk.news(desk.page)["steering"]["holds"] == []
    assert desk.pass_s(30, desk.page) == []  # a page that comes back later starts nothing by itself


def test_a_request_that_is_over_is_let_go(desk):
    desk.start(1)
    desk.act("steer", request=1, name="calm", ratio=0.25)
    del desk.targets[1]
    assert desk.pass_s(10, desk.page) == []
    assert desk.desk.news(desk.page)["steering"]["holds"] == []


def test_all_requests_are_those_that_run_and_those_that_come(desk):
    (waiting,) = [desk.act("steer", name="calm", ratio=0.25)]
    assert waiting == []
    assert [ack["state"] for ack in desk.acks()] == ["waiting"]
    desk.start(1, 2)
    assert sorted(action.request for action in desk.pass_s(limits.LEASES_S, desk.page)) == ["r1", "r2"]
    desk.start(3)
    assert [action.request for action in desk.pass_s(limits.LEASES_S, desk.page)] == ["r3"]
    (own,) = desk.act("steer", request=2, name="calm", ratio=-0.1)
    renewed = desk.pass_s(limits.RENEW_S, desk.page)
    assert {a.vectors[0].scale for a in renewed if a.request == "r2"} <= {-0.1}  # its own goes before
    assert {a.vectors[0].scale for a in renewed if a.request != "r2"} == {0.25}
    stopped = desk.act("unsteer")
    assert sorted((type(a), a.request) for a in stopped) == sorted([(Unsteer, "r1"), (Unsteer, "r3")])
    desk.start(4)
    assert {a.request for a in desk.pass_s(10, desk.page)} == {"r2"}
    assert [type(a) for a in desk.act("unsteer", request=2)] == [Unsteer]
    assert desk.pass_s(10, desk.page) == []
    assert own.vectors


def test_unsteer_takes_back_vectors_and_modules(desk):
    desk.start(1)
    desk.act("steer", request=1, name="calm", ratio=0.25)
    desk.act("gain", request=1, name="glad", ratio=0.0)
    unsteer, gain = desk.act("unsteer", request=1)
    assert isinstance(unsteer, Unsteer)
    assert (gain.owner, gain.scale) == ("module glad", 1.0)
    assert desk.desk.news(desk.page)["steering"]["holds"] == []


def test_the_kill_switch_takes_back_everything_and_latches(desk):
    desk.start(*range(1, 65))
    desk.act("steer", name="calm", ratio=0.25)
    desk.act("steer", request=3, name="calm", ratio=0.1)
    other = desk.desk.enter("other")
    assert [type(action) for action in desk.act("kill", page=other)] == [Freeze]
    assert desk.desk.news(desk.page)["steering"] == {"frozen": True, "holds": []}
    assert desk.desk.news(other)["steering"]["frozen"] is True
    assert desk.pass_s(30, desk.page, other) == []
    assert desk.act("steer", request=1, name="calm", ratio=0.1) == []
    assert "frozen by the kill switch" in desk.acks()[-1]["reason"]
    assert [type(action) for action in desk.act("abort", request=1)] == [Abort]
    (unfreeze,) = desk.act("release")
    assert isinstance(unfreeze, Unfreeze)
    assert desk.act("steer", request=1, name="calm", ratio=0.1) == []  # not before the engine says so
    desk.answer(unfreeze, ActionApplied("", 9))
    assert [type(action) for action in desk.act("steer", request=1, name="calm", ratio=0.1)] == [Steer]


def test_the_kill_switch_has_no_bound_on_its_rate(desk):
    desk.start(1)
    for _ in range(limits.ACTIONS_PER_S_MAX):
        assert desk.act("steer", request=1, name="calm", ratio=0.1)
    assert desk.act("steer", request=1, name="calm", ratio=0.1) == []
    assert "at most 10 a second" in desk.acks()[-1]["reason"]
    assert [type(action) for action in desk.act("kill")] == [Freeze]
    desk.clock.now += 1.1
    assert [type(action) for action in desk.act("release")] == [Unfreeze]


@pytest.mark.parametrize("kind", ["kill", "release", "abort", "unsteer"])
def test_a_label_holds_no_text_of_the_pages_own(desk, kind):
    """An engine takes no label that is too long, and a kill switch with such a label would do nothing."""
    desk.start(1)
    for action in desk.act(kind, request=1, name="x" * 512, ratio=7.0):
        assert "x" not in action.label
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(action), type=type(action)) == action


def test_a_freeze_by_anyone_is_seen_and_so_is_one_from_before(desk):
    desk.answer(Freeze(label="by hand"), ActionApplied("", 3))
    assert desk.desk.news(desk.page)["steering"]["frozen"]
    desk.answer(Unfreeze(), ActionApplied("", 4))
    assert not desk.desk.news(desk.page)["steering"]["frozen"]
    status = {"problems": [f"engine e is {FROZEN_TROUBLE}"]}
    desk.desk.check_frozen(status)  # the counters may be older than the answer
    assert desk.desk.news(desk.page) == {}
    desk.clock.now += limits.FROZEN_CHECK_S + 1
    desk.desk.check_frozen(status)
    assert desk.desk.news(desk.page)["steering"]["frozen"]


@pytest.mark.parametrize("outcome", [Rejected("", "no"), Unknown("", "no answer")], ids=["rejected", "unknown"])
def test_a_freeze_that_no_engine_took_is_shown_only_until_the_next_counters(desk, outcome):
    (freeze,) = desk.act("kill")
    desk.desk.check_frozen({"problems": []})  # they may be older than the press
    assert desk.desk.news(desk.page)["steering"]["frozen"]
    desk.answer(freeze, outcome)
    desk.desk.check_frozen({"problems": []})
    assert not desk.desk.news(desk.page)["steering"]["frozen"]


def test_the_same_number_is_the_same_action(desk):
    desk.start(1)
    (steer,) = desk.act("steer", request=1, name="calm", ratio=0.25)
    desk.answer(steer, ActionApplied("", 7, 12))
    first = desk.acks()
    desk.number -= 1
    assert desk.act("steer", request=1, name="calm", ratio=0.25) == []
    assert desk.acks() == first


def test_a_page_that_connects_again_holds_what_it_held(desk):
    desk.start(1)
    (steer,) = desk.act("steer", request=1, name="calm", ratio=0.25)
    desk.answer(steer, ActionApplied("", 7, 12))
    again = desk.desk.enter("page")
    assert len(desk.desk.news(again)["steering"]["holds"]) == 1
    for number in range(3 * limits.PAGES_KNOWN_MAX):
        desk.desk.enter(f"other{number}")
        desk.clock.now += 0.001
    assert len(desk.desk._pages) <= limits.PAGES_KNOWN_MAX + 1
    assert desk.pass_s(2 * limits.LEASE_S, again)
    desk.number -= 1
    assert desk.act("steer", desk.desk.enter("page"), request=1, name="calm", ratio=0.25) == []


def test_what_a_page_is_told_goes_to_its_last_connection(desk):
    """The one before may be dead, and not have ended yet."""
    desk.start(1)
    (steer,) = desk.act("steer", request=1, name="calm", ratio=0.25)
    before, now = desk.page, desk.desk.enter("page")
    desk.answer(steer, ActionApplied("", 7, 12))
    assert desk.acks(before) == []
    (ack,) = desk.acks(now)
    assert ack["state"] == "applied"
    desk.act("kill", desk.desk.enter("other"))
    desk.desk.news(before)
    assert desk.desk.news(now)["steering"]["frozen"]


def test_a_page_that_only_watched_for_long_steers_and_is_answered(desk):
    desk.start(1)
    for number in range(2 * limits.PAGES_KNOWN_MAX):
        desk.clock.now += 1
        desk.desk.enter(f"other{number}")
    (steer,) = desk.act("steer", request=1, name="calm", ratio=0.25)
    desk.pass_s(limits.LEASES_S)
    desk.answer(steer, ActionApplied("", 7, 12))
    assert [ack["state"] for ack in desk.acks()] == ["applied"]
    assert desk.pass_s(2 * limits.LEASE_S, desk.page)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_whatever_pages_say_without_the_right_nothing_is_sent(data):
    desk = Desk((), allowed=False)
    desk.start(1, 2)
    kinds = st.sampled_from(["steer", "gain", "unsteer", "abort", "kill", "release"])
    for number in range(data.draw(st.integers(1, 20))):
        asked = PageAction(
            number,
            data.draw(kinds),
            data.draw(st.integers(0, 3)),
            data.draw(st.text(max_size=8)),
            data.draw(st.sampled_from(["add", "remove"])),
            data.draw(st.floats()),
        )
        desk.desk.take(desk.page, asked)
    desk.pass_s(5, desk.page)
    assert desk.sent == []
    assert {ack["state"] for ack in desk.acks()} == {"rejected"}
    assert "steering" not in desk.desk.news(desk.page)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_whatever_pages_say_with_the_right_stays_within_its_bounds(data, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "calm.safetensors"
    save_vector(path, SITE, np.arange(8))
    desk = Desk((f"calm={path}",))
    desk.start(1, 2)
    kinds = st.sampled_from(["steer", "gain", "unsteer", "abort", "kill", "release"])
    names = st.sampled_from(["calm", "glad", "global", "", "../x"])
    ratios = st.floats(-2, 2) | st.sampled_from([math.nan, math.inf, -math.inf])
    for number in range(data.draw(st.integers(1, 30))):
        mode = data.draw(st.sampled_from(["add", "remove"]))
        asked = PageAction(
            number, data.draw(kinds), data.draw(st.integers(0, 3)), data.draw(names), mode, data.draw(ratios)
        )
        desk.desk.take(desk.page, asked)
        desk.pass_s(data.draw(st.sampled_from([0, 0.3, 2.5])), desk.page)
    for action in desk.sent:
        check_action(action)
        match action:
            case Steer():
                assert all(vector.relative and abs(vector.scale) <= limits.RATIO_MAX for vector in action.vectors)
                assert all(0 <= clamp.strength <= 1 for clamp in action.clamps)
                assert 0 < action.lease_s <= limits.LEASE_S
            case Gain():
                assert 0 <= action.scale <= 1
                assert action.owner == "module glad"
                assert action.lease_s == limits.LEASE_S


def test_options_of_steering_are_checked(tmp_path, vectors):
    for options, message in (
        ({"vectors": vectors}, "allow_steering: got false, with vectors, expected true"),
        ({"modules": ("glad",)}, "allow_steering: got false, with modules, expected true"),
        ({"allow_steering": True, "vectors": ("calm",)}, "vectors: got calm, expected NAME=FILE"),
        ({"allow_steering": True, "vectors": ("calm=nowhere",)}, "nowhere"),
        ({"allow_steering": True, "vectors": vectors * 2}, "vectors: got calm twice, expected different names"),
    ):
        with pytest.raises(UsageError) as raised:
            Dashboard(DashboardConfig(port=0, **options)).check()
        assert message in str(raised.value)


# Through the live socket.


class Acting:
    """Keeps the actions that the dashboard sends to its hub."""

    def __init__(self, consumer):
        self.actions = []
        consumer.context.act = self.actions.append


def test_a_page_acts_through_its_socket_and_hears_what_came_of_it(vectors):
    with open_dashboard(allow_steering=True, vectors=vectors) as consumer, Pageless(consumer) as page:
        acting = Acting(consumer)
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(make_frame([("r1", 4, 0, 4)], SITES, incarnation="i1"))
        page.until(lambda p: p.requests)
        assert page.hello["rights"] == ["watch", "steer"]
        assert page.hello["steering"]["vectors"] == [{"name": "calm", "site": "post_block:2"}]
        page.send(alive="abcd")
        page.send(act={"id": 1, "kind": "steer", "request": 1, "name": "calm", "ratio": 0.25})
        eventually(lambda: acting.actions)
        (steer,) = acting.actions
        assert (steer.request, steer.incarnation) == ("r1", "i1")
        page.until(lambda p: p.steering and p.steering["holds"])
        consumer.on_action(Answered.of(steer, ActionApplied("", 7, 5), engine="engine-1", asked_by="dashboard"))
        page.until(lambda p: p.acks)
        assert page.acks == [{"id": 1, "state": "applied", "step": 7, "position": 5, "reason": ""}]
        page.select(1)
        page.until(lambda p: p.events)
        assert page.events[0]["label"] == "calm +0.25 by page abcd #1"
        with Pageless(consumer) as other:
            other.send(alive="efgh")
            other.send(act={"id": 1, "kind": "kill"})
            page.until(lambda p: p.steering["frozen"])
        assert isinstance(acting.actions[-1], Freeze)


def test_a_page_without_the_right_is_refused_by_the_server():
    with open_dashboard() as consumer, Pageless(consumer) as page:
        acting = Acting(consumer)
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(make_frame([("r1", 4, 0, 4)], SITES))
        page.until(lambda p: p.requests)
        assert page.hello["rights"] == ["watch"]
        assert page.hello["steering"] is None
        for number, kind in enumerate(("steer", "gain", "unsteer", "abort", "kill", "release")):
            page.send(act={"id": number, "kind": kind, "request": 1, "name": "calm", "ratio": 0.1})
        page.until(lambda p: len(p.acks) == 6)
        assert {ack["state"] for ack in page.acks} == {"rejected"}
        assert acting.actions == []


@pytest.mark.parametrize(
    "message",
    [
        '{"act": {"id": 1}}',
        '{"act": {"id": 1, "kind": "freeze"}}',
        '{"act": {"id": 1, "kind": "steer", "vector": [1, 2]}}',
        '{"act": {"id": 1, "kind": "steer", "ratio": NaN}}',
        '{"act": {"id": 1, "kind": "steer", "ratio": "0.5"}}',
        '{"alive": "A page"}',
        '{"alive": "abcd", "act": {"id": 1, "kind": "kill"}}',
    ],
)
def test_an_action_of_another_form_cuts_the_page_off(vectors, message):
    with open_dashboard(allow_steering=True, vectors=vectors) as consumer, Pageless(consumer) as page:
        acting = Acting(consumer)
        page.socket.send(message)
        with pytest.raises(ConnectionClosed) as raised:
            page.drain(10)
        assert raised.value.rcvd.code == 1008
        assert acting.actions == []


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda e: (
            st.lists(e, max_size=3)
            | st.dictionaries(
                st.sampled_from(["id", "kind", "request", "name", "ratio", "mode", "act", "alive", "seen"]),
                e,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
@settings(max_examples=300, deadline=None)
def test_a_message_is_read_or_refused_and_never_fails_otherwise(value):
    try:
        read = wire.decode(json.dumps(value))
    except wire.RemoteProtocolError:
        return
    assert isinstance(read, wire.PageMessage)
    assert msgspec.to_builtins(read)
