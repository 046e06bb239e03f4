"""Actions for several engines of one hub: what who asked is answered, and what consumers learn of each engine."""

from __future__ import annotations

import pytest

from capflow import limits
from capflow.capture.frame import Rank
from capflow.protocol.message import Act, ActionOutcome, Bye
from capflow.steering.action import ActionApplied, Freeze, Gain, Rejected, Unfreeze, Unknown
from tests.kit.exchanges import Desk
from tests.kit.hubs import Recorder

LEFT = "action: the engine left before it answered"
GAIN = Gain("", "global", 0.5)


class Told(Recorder):
    def __init__(self):
        super().__init__()
        self.told = []

    def on_action(self, answered):
        self.told.append((answered.engine, answered.outcome, answered.step, answered.reason))


class Engines:
    """A hub with engines, of which only their schedulers are connected, and a client."""

    def __init__(self, *engines):
        self.consumer = Told()
        self.desk = Desk(self.consumer)
        self.peers = [f"s{number}".encode() for number in range(len(engines))]
        for peer, (engine, replica) in zip(self.peers, engines, strict=True):
            boot = f"{engine}-{replica}"
            self.desk.hello(peer, role="scheduler", boot=boot, engine=engine, rank=Rank(0, replica, 0))
        self.desk.hello(b"c", role="client", boot="c", engine="")
        self.asked = {}

    def ask(self, action):
        self.desk.say(b"c", Act("mine", action))
        self.asked = {peer: self.desk.sent[peer][-1].id for peer in self.peers}

    def applies(self, number, step):
        peer = self.peers[number]
        self.desk.say(peer, ActionOutcome(ActionApplied(self.asked[peer], step)))

    def rejects(self, number, reason):
        peer = self.peers[number]
        self.desk.say(peer, ActionOutcome(Rejected(self.asked[peer], reason)))

    def leaves(self, number):
        self.desk.say(self.peers[number], Bye())

    @property
    def answers(self):
        return [sent.outcome for sent in self.desk.sent[b"c"] if isinstance(sent, ActionOutcome)]

    @property
    def told(self):
        self.desk.handle_all()
        return sorted(self.consumer.told)


TWO = ("one@1", 0), ("two@2", 0)


@pytest.mark.parametrize("first", ["applies", "rejects"])
@pytest.mark.parametrize("action", [GAIN, Freeze(), Unfreeze()], ids=lambda action: type(action).__name__)
def test_an_action_that_holds_on_one_engine_is_applied_and_names_the_others(action, first):
    engines = Engines(*TWO)
    engines.ask(action)
    steps = [lambda: engines.applies(0, 7), lambda: engines.rejects(1, "frozen")]
    for step in steps if first == "applies" else reversed(steps):
        assert engines.answers == []
        step()
    assert engines.answers == [ActionApplied("mine", 7, reason="two: frozen")]
    assert engines.told == [("one@1", "applied", 7, ""), ("two@2", "rejected", None, "frozen")]


def test_an_action_that_all_engines_apply_has_no_reason():
    engines = Engines(*TWO)
    engines.ask(GAIN)
    engines.applies(0, 7)
    engines.applies(1, 9)
    assert engines.answers == [ActionApplied("mine", 9)]
    assert engines.told == [("one@1", "applied", 7, ""), ("two@2", "applied", 9, "")]


@pytest.mark.parametrize("first", ["applies", "leaves"])
def test_a_freeze_needs_no_answer_of_an_engine_that_is_gone(first):
    engines = Engines(*TWO)
    engines.ask(Freeze())
    steps = [lambda: engines.applies(0, 7), lambda: engines.leaves(1)]
    for step in steps if first == "applies" else reversed(steps):
        step()
    assert engines.answers == [ActionApplied("mine", 7)]
    assert engines.told == [("one@1", "applied", 7, ""), ("two@2", "rejected", None, LEFT)]


def test_another_action_names_an_engine_that_is_gone():
    engines = Engines(*TWO)
    engines.ask(GAIN)
    engines.leaves(1)
    engines.applies(0, 7)
    assert engines.answers == [ActionApplied("mine", 7, reason=f"two: {LEFT}")]


def test_an_action_that_no_engine_applies_is_rejected_with_the_reason_of_each():
    engines = Engines(*TWO)
    engines.ask(Freeze())
    engines.leaves(1)
    engines.rejects(0, "busy")
    assert engines.answers == [Rejected("mine", f"two: {LEFT}; one: busy")]
    assert engines.told == [("one@1", "rejected", None, "busy"), ("two@2", "rejected", None, LEFT)]


@pytest.mark.parametrize("applied", [True, False])
def test_of_an_engine_that_never_answers_nothing_is_claimed(applied, monkeypatch):
    engines = Engines(*TWO)
    engines.ask(Freeze())
    if applied:
        engines.applies(0, 7)
    else:
        engines.rejects(0, "busy")
    assert engines.told == [("one@1", "applied", 7, "") if applied else ("one@1", "rejected", None, "busy")]
    assert engines.answers == []
    monkeypatch.setattr(limits, "ACTION_ANSWER_S_MAX", -limits.ACTION_S_MAX)
    now = engines.desk.exchange._effects.now
    engines.desk.dispatch.do(engines.desk.exchange.tick(now, {*engines.peers, b"c"}))
    (answer,) = engines.answers
    assert isinstance(answer, ActionApplied if applied else Unknown)
    assert "two: action: the engine did not answer in 30 s" in answer.reason
    assert [engine for engine, outcome, *_ in engines.told if outcome == "unknown"] == ["two@2"]


def test_the_replicas_of_an_engine_are_one_engine_for_consumers():
    engines = Engines(("one@1", 0), ("one@1", 1))
    engines.ask(Freeze())
    engines.applies(0, 7)
    assert engines.told == []
    engines.leaves(1)
    assert engines.answers == [ActionApplied("mine", 7)]
    assert engines.told == [("one@1", "applied", 7, "")]


def test_an_action_that_was_sent_again_is_told_once():
    engines = Engines(*TWO)
    engines.desk.say(b"c", Act("mine", GAIN, sender="s", number=1))
    engines.asked = {peer: engines.desk.sent[peer][-1].id for peer in engines.peers}
    engines.desk.say(b"c", Act("again", GAIN, sender="s", number=1))
    engines.applies(0, 7)
    engines.rejects(1, "frozen")
    engines.desk.say(b"c", Act("later", GAIN, sender="s", number=1))
    assert sorted(answer.id for answer in engines.answers) == ["again", "later", "mine"]
    assert {answer.reason for answer in engines.answers} == {"two: frozen"}
    assert len(engines.told) == 2
