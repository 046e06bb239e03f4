"""Actions on their way: each is answered once, and one that was not applied takes no effect afterwards."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid

import msgspec
import pytest
import zmq

from capflow import limits
from capflow.cli.hub.dashboard import HubAside
from capflow.protocol import message
from capflow.protocol.message import Act, ActionOutcome, Hello, Welcome
from capflow.protocol.session import PeerSession
from capflow.steering.action import Abort, ActionApplied, Freeze, Gain, Rejected, SetGate, Steer, Unfreeze, Unknown
from capflow.transport.client import Client
from tests.kit.asking import ask, asking, came
from tests.kit.frames import make_frame, make_hello
from tests.kit.hubs import Recorder, address, answer, configured, raw_peer, running_hub, scheduler_link, worker_link
from tests.kit.waiting import eventually

__all__ = ["address"]


@pytest.fixture
def running():
    """The incarnations of the requests that a scheduler says it runs, by id."""
    return {"r1": "first"}


@pytest.fixture
def link(address, running):
    """Return the link of a scheduler that idles, to a hub that runs."""
    with running_hub(address, Recorder()), scheduler_link(address, running=running.get) as link:
        yield link


def test_an_engine_that_idles_answers_for_a_request_that_does_not_run(address, link):
    began = time.monotonic()
    with Client(address) as client:
        outcome = client.act(Abort("r2"), 25)
    assert isinstance(outcome, Rejected)
    assert "r2" in outcome.reason
    assert time.monotonic() - began < 20
    assert link.actions() == []


@pytest.mark.parametrize(
    ("actions", "asked"),
    [((Unfreeze(), Freeze()), "Unfreeze Unfreeze Freeze"), ((Gain("", "request", 0.5), Freeze()), "Gain Freeze Gain")],
)
def test_actions_on_an_engine_keep_their_order_but_a_freeze_passes_gains(address, actions, asked):
    """The engine answers what comes first only when it is asked a second time."""
    kinds = []

    def at_once(act):
        kinds.append(type(act.action).__name__)
        return None if len(kinds) == 1 else ActionApplied(act.id, 1)

    with running_hub(address, Recorder()), scheduler_link(address, at_once=at_once), Client(address) as client:
        client.act(list(actions), 20)
    assert " ".join(kinds) == asked


def test_a_freeze_of_a_dashboard_beside_a_hub_waits_for_no_other_action(address):
    """No step takes the first action; the freeze is answered though."""
    with (
        running_hub(address, Recorder()),
        scheduler_link(address, running=lambda _: "first", at_once=lambda act: ActionApplied(act.id, 1)) as link,
        HubAside(address, key=None, insecure=True) as aside,
    ):
        answers = []
        aside.act(Steer("r1", ()), lambda answered: answers.append(answered.kind))
        came(link)
        aside.act(Freeze(), lambda answered: answers.append(answered.kind))
        eventually(lambda: answers, 10)
        assert answers == ["freeze"]


def test_an_action_that_expired_is_rejected_and_never_taken(address, link, monkeypatch):
    monkeypatch.setattr(limits, "ACTION_S_MAX", 0.3)
    with Client(address) as client:
        outcome = client.act(Abort("r1"), 20)
    assert isinstance(outcome, Rejected)
    assert "took no step in time" in outcome.reason
    assert link.actions() == []


def test_an_action_is_for_the_request_that_ran_when_it_came(address, link, running):
    with asking(address, Steer("r1", ())) as outcomes:
        came(link)
        running["r1"] = "second"
        eventually(lambda: outcomes)
    assert isinstance(outcomes[0], Rejected)
    assert link.actions() == []


def test_an_action_that_names_another_incarnation_is_rejected_by_that_field(address, link):
    with Client(address) as client:
        outcome = client.act(Abort("r1", incarnation="before"), 20)
    assert isinstance(outcome, Rejected)
    assert outcome.reason == "incarnation: got before, expected first, that of the request r1 that is running"
    assert link.actions() == []


NAN, INF = float("nan"), float("inf")


def test_numbers_that_cannot_be_are_refused_by_their_field(address):
    """The hub refuses them, also without an engine."""
    bad = [
        *[("set_gate.threshold", SetGate("r1", "g", threshold=value)) for value in (NAN, INF, -INF)],
        *[("set_gate.sharpness", SetGate("r1", "g", sharpness=value)) for value in (NAN, 0.0, -1.0)],
        *[("gain.scale", Gain("r1", "request", value)) for value in (NAN, INF)],
        *[("steer.gain", Steer("r1", (), gain=value)) for value in (NAN, -INF)],
    ]
    for value in (NAN, INF, -INF, 0.0, -1.0):
        bad += [
            ("steer.lease_s", Steer("r1", (), lease_s=value)),
            ("gain.lease_s", Gain("r1", "request", 1.0, lease_s=value)),
            ("set_gate.lease_s", SetGate("r1", "g", threshold=1.0, lease_s=value)),
        ]
    with running_hub(address, Recorder()), Client(address) as client:
        outcomes = client.act([action for _, action in bad], 20)
    for (field, action), outcome in zip(bad, outcomes, strict=True):
        assert isinstance(outcome, Rejected)
        assert outcome.reason.startswith(f"{field}: got "), (action, outcome.reason)


@pytest.mark.parametrize("kind", [lambda act_id: ActionApplied(act_id, 3), lambda act_id: Rejected(act_id, "no")])
def test_an_outcome_names_the_incarnation_of_its_request(address, link, kind):
    with asking(address, Steer("r1", ())) as outcomes:
        came(link)
        link.outcome(kind(link.actions()[0].id))
        eventually(lambda: outcomes)
    assert outcomes[0].incarnation == "first"


def test_an_action_that_is_taken_is_answered_by_who_took_it(address, link):
    with asking(address, Abort("r1")) as outcomes:
        came(link)
        (act,) = link.actions()
        assert act.action == Abort("r1", incarnation="first")
        assert link.actions() == []
        link.outcome(ActionApplied(act.id, 3))
    assert outcomes[0].step == 3


def test_what_a_hub_that_is_gone_asked_for_is_not_done_for_the_next(address, running):
    with scheduler_link(address, wait=False, running=running.get) as link:
        with running_hub(address, Recorder(), drain_s=1.0):
            assert link.wait_welcome(20)
            first = link.welcome.hub
            asked = threading.Thread(target=ask, args=(address, Abort("r1"), []))
            asked.start()
            came(link)
        asked.join(30)
        with running_hub(address, Recorder()):
            eventually(lambda: link.connected and link.welcome.hub != first)
            assert link.actions() == []


def said_by(peer):
    return message.decode(peer.recv())


def test_a_scheduler_that_comes_back_is_asked_again_under_the_same_id(address):
    hello = message.encode(make_hello(role="scheduler", boot="s"))
    with running_hub(address, Recorder()), raw_peer(address) as peer:
        peer.send(hello)
        assert isinstance(said_by(peer), Welcome)
        with asking(address, Abort("r1")) as outcomes:
            first = said_by(peer)
            with raw_peer(address) as again:
                again.send(hello)
                assert isinstance(said_by(again), Welcome)
                assert said_by(again) == first
                again.send(message.encode(ActionOutcome(ActionApplied(first.id, 4))))
                eventually(lambda: outcomes)
    assert outcomes[0].step == 4


def test_of_a_scheduler_that_never_answers_nothing_is_claimed(address, monkeypatch):
    monkeypatch.setattr(limits, "ACTION_S_MAX", 0.2)
    monkeypatch.setattr(limits, "ACTION_ANSWER_S_MAX", 0.2)
    with running_hub(address, Recorder()) as hub, raw_peer(address) as peer, Client(address) as client:
        peer.send(message.encode(make_hello(role="scheduler", boot="s")))
        assert isinstance(said_by(peer), Welcome)
        outcome = client.act(Abort("r1"), 20)
        assert isinstance(outcome, Unknown)
        assert "not known" in outcome.reason
        assert hub.status()["actions"] == {"applied": 0, "rejected": 0, "unknown": 1, "waiting": 0}


@contextlib.contextmanager
def scripted_hub(address):
    """Bind a hub that says what a test has it say."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.set(zmq.LINGER, 0)
    socket.bind(str(address))
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def outcome_from(hub):
    while True:
        _, part = hub.recv_multipart()
        if isinstance(text := message.decode(part), ActionOutcome):
            return text.outcome


def test_an_action_that_comes_twice_is_done_once_and_answered_alike(address, running):
    with scripted_hub(address) as hub, scheduler_link(address, wait=False, running=running.get) as link:
        peer, _ = hub.recv_multipart()
        hub.send_multipart([peer, message.encode(Welcome("h", 0, clock_s=50.0))])
        act = message.encode(Act("7", Abort("r1"), until_s=80.0))
        hub.send_multipart([peer, act])
        hub.send_multipart([peer, act])
        taken = []
        eventually(lambda: taken.extend(link.actions()) or taken)
        link.outcome(ActionApplied("7", 9))
        assert outcome_from(hub) == ActionApplied("7", 9, incarnation="first")
        hub.send_multipart([peer, act])
        assert outcome_from(hub) == ActionApplied("7", 9, incarnation="first")
        assert link.actions() == []
        assert len(taken) == 1


@contextlib.contextmanager
def client_peer(address):
    """A raw client whose Hello is answered."""
    with raw_peer(address) as peer:
        peer.send(message.encode(Hello(role="client", engine="", boot=uuid.uuid4().hex)))
        assert isinstance(message.decode(answer(peer)[0]), Welcome)
        yield peer


@pytest.mark.parametrize("answered", [True, False])
def test_an_action_that_is_sent_again_over_another_connection_is_done_once(address, link, answered):
    """The connection is lost after the scheduler took the action, before or after it was answered."""
    taken = []
    with client_peer(address) as first:
        first.send(message.encode(Act("a", Abort("r1"), sender="s", number=1)))
        eventually(lambda: taken.extend(link.actions()) or taken)
        if answered:
            link.outcome(ActionApplied(taken[0].id, 3, 8))
            assert message.decode(answer(first)[0]).outcome == ActionApplied("a", 3, 8, "first")
    with client_peer(address) as again:
        again.send(message.encode(Act("b", Abort("r1"), sender="s", number=1)))
        if not answered:
            again.send(message.encode(Act("other", Abort("r1"), sender="s", number=2)))
            eventually(lambda: taken.extend(link.actions()) or len(taken) == 2)
            link.outcome(ActionApplied(taken[0].id, 3, 8))
        assert message.decode(answer(again)[0]).outcome == ActionApplied("b", 3, 8, "first")
    assert link.actions() == []
    assert [act.number for act in taken] == ([1] if answered else [1, 2])


def test_a_client_whose_hub_is_lost_gets_the_first_answer_from_the_next(address, running):
    taken = []
    with scheduler_link(address, wait=False, running=running.get) as link:
        with running_hub(address, Recorder(), drain_s=1.0):
            assert link.wait_welcome(20)
            first = link.welcome.hub
            outcomes = []
            asked = threading.Thread(target=ask, args=(address, Abort("r1"), outcomes))
            asked.start()
            eventually(lambda: taken.extend(link.actions()) or taken)
        with running_hub(address, Recorder()) as hub:
            eventually(lambda: link.connected and link.welcome.hub != first)
            link.outcome(ActionApplied(taken[0].id, 9))
            asked.join(30)
            assert [outcome.step for outcome in outcomes] == [9]
            assert link.actions() == []
            assert hub.status()["actions"]["applied"] == 1


def test_an_action_that_was_long_under_way_has_expired(address, running):
    """The hub's clock is another one; by it, the action came a second after it expired."""
    with scripted_hub(address) as hub, scheduler_link(address, wait=False, running=running.get) as link:
        peer, _ = hub.recv_multipart()
        hub.send_multipart([peer, message.encode(Welcome("h", 0, clock_s=1e6))])
        hub.send_multipart([peer, message.encode(Act("7", Abort("r1"), until_s=1e6 - 1))])
        assert isinstance(outcome_from(hub), Rejected)
        assert link.actions() == []


def test_a_deadline_is_never_later_than_on_the_hub_s_clock():
    session = PeerSession(make_hello(role="scheduler"))
    session.connected(10.0)  # the hub reads its clock between the Hello and the Welcome, at 500
    session.receive([message.encode(Welcome("h", 0, clock_s=500.0))], 12.0)
    assert session.deadline(505.0) == 15.0


class Acting(Recorder):
    """Asks for an action on each request that it is given rows of."""

    def on_frame(self, frame):
        for part in frame.header.requests:
            self.context.act(Abort(part.id))


@pytest.mark.parametrize("policy", ["block", "spill"])
@pytest.mark.parametrize("runs", ["first", "second"])
def test_an_action_of_a_consumer_is_for_the_request_whose_rows_it_has(address, policy, runs, tmp_path):
    consumer = Acting("acting")
    options = {"spool_dir": tmp_path} if policy == "spill" else {}
    frame = make_frame([("r1", 1, 0, 1)])
    named = tuple(msgspec.structs.replace(part, incarnation="first") for part in frame.header.requests)
    with (
        running_hub(address, configured(consumer, policy, **options)) as hub,
        scheduler_link(address, running={"r1": runs}.get) as link,
        worker_link(address) as worker,
    ):
        worker.send(msgspec.structs.replace(frame.header, requests=named), frame.payload)
        if runs == "first":
            came(link)
        else:
            eventually(lambda: hub.lanes[0].counts["actions_rejected"] == 1)
            assert link.actions() == []


def test_looking_for_what_expired_costs_nothing_for_what_has_not(address, running):
    """A thousand actions a second are known for half a minute, and each message is followed by a look."""

    class Asked(dict):
        items_seen = 0

        def items(self):
            for item in super().items():
                self.items_seen += 1
                yield item

    with scripted_hub(address) as hub, scheduler_link(address, wait=False, running=running.get) as link:
        peer, _ = hub.recv_multipart()
        link._pending = pending = Asked()
        hub.send_multipart([peer, message.encode(Welcome("h", 0, clock_s=0.0))])
        for number in range(100):
            hub.send_multipart([peer, message.encode(Act(f"{number}", Abort("stranger"), until_s=30.0))])
            outcome_from(hub)
        assert len(pending) == 100
        assert pending.items_seen <= 1000
