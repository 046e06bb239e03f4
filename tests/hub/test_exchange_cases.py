"""The exchange without a hub: one table of what peers and consumers send, and which effects come out."""

from __future__ import annotations

import msgspec
import pytest

from capflow import limits
from capflow.capture.result import CaptureResult
from capflow.capture.spec import CaptureSpec
from capflow.errors import UsageError
from capflow.hub import effects
from capflow.hub.exchange.exchange import Exchange
from capflow.hub.peers.budget import Budget
from capflow.hub.peers.guard import Guard
from capflow.hub.requests.index import Wish
from capflow.hub.requests.request import RequestName
from capflow.protocol import message
from capflow.protocol.message import (
    Ack,
    Act,
    ActionOutcome,
    Await,
    Beat,
    Bye,
    FollowSteering,
    HeldSteering,
    Hello,
    Refused,
    Results,
    SharedSteering,
    Status,
    Version,
    WatchRequest,
    Welcome,
)
from capflow.steering.action import Abort, ActionApplied, Rejected, Unknown
from tests.kit.frames import make_finished, make_frame, make_hello, make_model

EVERYTHING = CaptureSpec({"post_block": "all"})
START_S = 100.0
CLIENT = Hello("client", "", "c")


class Talk:
    """An exchange with two consumers, `all` and `durable`, of which each wants every row; time stands still."""

    def __init__(self, **kwargs):
        wishes = [
            Wish(name, EVERYTHING, reads_requests=False, durable=name == "durable") for name in ("all", "durable")
        ]
        options = {"guard": Guard(), "budget": Budget(limits.MEMORY_BYTES_MIN), "window_bytes": limits.MIB}
        options |= {"minds_actions": True, "hub_id": "hub-1"}
        self.exchange = Exchange(wishes, (), **(options | kwargs))
        self.now = START_S

    def say(self, peer, *messages):
        """Have a peer send messages; return the effects of the last."""
        out = []
        for each in messages:
            parts = each.encode() if hasattr(each, "payload") else [message.encode(each)]
            out = list(self.exchange.receive(peer, parts, self.now))
        return out

    def worker(self, **kwargs):
        """Let a worker in; return the effects."""
        return self.say(b"w", make_hello(**kwargs))

    def scheduler(self):
        """Let the scheduler of the same engine in."""
        return self.say(b"s", make_hello(role="scheduler", boot="s1"))

    def client(self):
        """Let a client in."""
        return self.say(b"c", CLIENT)


def seen(out):
    """Return effects in a short form: messages with their peer and type, other effects by their names; no log lines."""
    names = []
    for effect in out:
        match effect:
            case effects.Send(peer, parts) | effects.Refuse(peer, parts):
                kind = "Frame" if len(parts) > 1 else type(message.decode(parts[0])).__name__
                names.append(f"{kind} to {peer.decode()}")
            case effects.Log() | effects.LogLate():
                continue
            case _:
                names.append(type(effect).__name__)
    return names


def sent(out, kind):
    """Return the messages of a type among effects."""
    messages = [message.decode(each.parts[0]) for each in out if isinstance(each, effects.Send | effects.Refuse)]
    return [each for each in messages if isinstance(each, kind)]


def done(talk, frame=None):
    """Have a worker send a request that ends; return the effects of its frame."""
    return talk.say(b"w", frame or make_frame(finished=[make_finished("r1", rows=4)]))


def part(count, content=b"content"):
    """Return a version of a part of the steering that the front ends of an engine share."""
    return SharedSteering("e", "m", Version(count, "w"), content)


# what was there before, what arrives, which effects come out
CASES = {
    "a worker": ((), lambda t: t.worker(), ["Greet", "Greet", "Welcome to w"]),
    "a second connection of a worker": (
        ("worker",),
        lambda t: t.say(b"w2", make_hello()),
        ["Greet", "Welcome to w2"],
    ),
    "a scheduler": ((), lambda t: t.scheduler(), ["Greet", "Welcome to s"]),
    "a client": ((), lambda t: t.client(), ["Welcome to c"]),
    "a frame": (("worker",), lambda t: t.say(b"w", make_frame()), ["Give"]),
    "a frame that ends a request": (("worker",), done, ["Give", "End"]),
    "the same frame again": (("worker", "frame"), lambda t: t.say(b"w", make_frame()), ["Ack to w"]),
    "a frame of nobody": ((), lambda t: t.say(b"x", make_frame()), ["Bye to x"]),
    "a message of nobody": ((), lambda t: t.say(b"x", Beat()), ["Bye to x"]),
    "a frame of a client": (("client",), lambda t: t.say(b"c", make_frame()), ["Refused to c"]),
    "noise": ((), lambda t: list(t.exchange.receive(b"x", [b"noise"], t.now)), ["Refused to x"]),
    "noise of a worker": (
        ("worker", "frame"),
        lambda t: list(t.exchange.receive(b"w", [b"noise"], t.now)),
        ["Refused to w", "End", "Lose", "Lose"],
    ),
    "a beat": (("worker",), lambda t: t.say(b"w", Beat()), []),
    "a worker's Bye": (("worker", "frame"), lambda t: t.say(b"w", Bye()), ["End", "Lose", "Lose"]),
    "a client's Bye": (("client",), lambda t: t.say(b"c", Bye()), []),
    "a question for the status": (("client",), lambda t: t.say(b"c", Status()), ["SendStatus"]),
    "a question for results": (("client",), lambda t: t.say(b"c", Await(("r1",), wait=False)), ["Results to c"]),
    "a question that waits": (("client",), lambda t: t.say(b"c", Await(("r1",), wait=True)), []),
    "a watcher": (("worker", "client"), lambda t: t.say(b"c", WatchRequest(1000)), ["Watched to c"]),
    "a front end that follows": (("client",), lambda t: t.say(b"c", FollowSteering("e")), ["HeldSteering to c"]),
    "shared steering of the only front end": (
        ("client", "follow"),
        lambda t: t.say(b"c", part(1)),
        ["HeldSteering to c"],
    ),
    "a second front end": (
        ("client", "follow", "part"),
        lambda t: t.say(b"d", msgspec.structs.replace(CLIENT, boot="d"), FollowSteering("e")),
        ["SharedSteering to d"],
    ),
    "a front end that has all": (
        ("client", "follow", "part", "second"),
        lambda t: t.say(b"d", HeldSteering("e", "m", Version(1, "w"))),
        ["HeldSteering to d"],
    ),
    "a newer part": (
        ("client", "follow", "part", "second", "held"),
        lambda t: t.say(b"d", part(2)),
        ["SharedSteering to c"],
    ),
    "a part that the others have": (
        ("client", "follow", "part", "second", "held", "newer"),
        lambda t: t.say(b"c", HeldSteering("e", "m", Version(2, "w"))),
        ["HeldSteering to d"],
    ),
    "an older part": (
        ("client", "follow", "part", "second", "held", "newer"),
        lambda t: t.say(b"d", part(1)),
        ["SharedSteering to d"],
    ),
    "a front end that leaves before it has a part": (
        ("client", "follow", "part", "second", "held", "newer"),
        lambda t: t.say(b"c", Bye()),
        ["HeldSteering to d"],
    ),
    "shared steering of nobody who follows": (
        ("client",),
        lambda t: t.say(b"c", part(1)),
        ["HeldSteering to c"],
    ),
    "shared steering of a worker": (("worker",), lambda t: t.say(b"w", part(1)), ["Refused to w", "Lose", "Lose"]),
    "a frame with a watcher": (
        ("worker", "client", "watch"),
        lambda t: t.say(b"w", make_frame()),
        ["Give", "Frame to c"],
    ),
    "an action without an engine": (
        ("client",),
        lambda t: t.say(b"c", Act("1", Abort("r1"))),
        ["TellOutcome", "ActionOutcome to c"],
    ),
    "an action": (("scheduler", "client"), lambda t: t.say(b"c", Act("1", Abort("r1"))), ["Act to s"]),
    "a scheduler that is back": (
        ("scheduler", "client", "action"),
        lambda t: t.scheduler(),
        ["Greet", "Welcome to s", "Act to s"],
    ),
    "a scheduler's Bye": (
        ("scheduler", "client", "action"),
        lambda t: t.say(b"s", Bye()),
        ["TellOutcome", "ActionOutcome to c"],
    ),
    "an action of a consumer": (
        ("scheduler",),
        lambda t: t.exchange.act(0, "all", Abort("r1"), t.now),
        ["Act to s"],
    ),
    "an action of a consumer without an engine": (
        (),
        lambda t: t.exchange.act(0, "all", Abort("r1"), t.now),
        ["TellOutcome", "AnswerLane"],
    ),
    "too many messages": (("worker",), lambda t: t.exchange.overrun(b"w", t.now), ["Refused to w", "Lose", "Lose"]),
    "a peer that does not read": (("worker",), lambda t: t.exchange.give_up(b"w", t.now), ["Lose"]),
    "a failure": (("worker",), lambda t: t.exchange.fail(b"w", OSError(), t.now), ["Refused to w", "Lose", "Lose"]),
    "a tick": (("worker",), lambda t: t.exchange.tick(t.now), ["FindMissed"]),
    "the end of the hub": (("worker", "frame"), lambda t: t.exchange.drain(t.now), ["End"]),
    "a frame after that": (("worker", "drain"), lambda t: t.say(b"w", make_frame()), []),
    "a goodbye": (("worker", "client"), lambda t: t.exchange.goodbye(), ["Bye to w", "Bye to c"]),
}

BEFORE = {
    "worker": lambda t: t.worker(),
    "scheduler": lambda t: t.scheduler(),
    "client": lambda t: t.client(),
    "frame": lambda t: t.say(b"w", make_frame()),
    "watch": lambda t: t.say(b"c", WatchRequest(limits.MIB)),
    "action": lambda t: t.say(b"c", Act("1", Abort("r1"))),
    "drain": lambda t: t.exchange.drain(t.now),
    "follow": lambda t: t.say(b"c", FollowSteering("e")),
    "part": lambda t: t.say(b"c", part(1)),
    "second": lambda t: t.say(b"d", msgspec.structs.replace(CLIENT, boot="d"), FollowSteering("e")),
    "held": lambda t: t.say(b"d", HeldSteering("e", "m", Version(1, "w"))),
    "newer": lambda t: t.say(b"d", part(2)),
}


@pytest.mark.parametrize("case", CASES)
def test_what_arrives_and_what_comes_out(case):
    before, arrives, expected = CASES[case]
    talk = Talk()
    for each in before:
        BEFORE[each](talk)
    assert seen(arrives(talk)) == expected


class TestSharedSteering:
    def follow(self, talk, *peers, user=""):
        for peer in peers:
            hello = msgspec.structs.replace(CLIENT, boot=peer.decode())
            for each in (hello, FollowSteering("e")):
                list(talk.exchange.receive(peer, [message.encode(each)], talk.now, user))

    def test_its_memory_is_bounded_and_given_back(self):
        talk = Talk()
        state = talk.exchange.budget.state
        self.follow(talk, b"c", b"d")
        before = state.used
        for count in range(1, 4):
            talk.say(b"c", part(count, bytes(1000 * count)))
        assert 3000 < state.used - before < 6000
        (refused,) = sent(talk.say(b"c", part(9, bytes(20 * limits.MIB))), HeldSteering)
        assert refused.version == Version(9, "w")
        assert "shared steering" in refused.reason
        talk.say(b"c", Bye())
        assert state.used > before
        talk.say(b"d", Bye())
        assert state.used <= before
        assert len(talk.exchange.shared) == 0

    def test_one_part_at_a_time_is_on_the_way_to_a_follower_and_only_the_newest(self):
        talk = Talk()
        self.follow(talk, b"c", b"d")
        outs = [talk.say(b"c", part(count)) for count in range(1, 5)]
        assert [len(sent(out, SharedSteering)) for out in outs] == [1, 0, 0, 0]
        (second,) = sent(talk.say(b"d", HeldSteering("e", "m", Version(1, "w"))), SharedSteering)
        assert second.version == Version(4, "w")
        assert not sent(talk.say(b"d", HeldSteering("e", "m", Version(4, "w"))), SharedSteering)

    def test_the_bytes_on_the_way_to_all_are_bounded(self, monkeypatch):
        monkeypatch.setattr(limits, "SHARED_SENT_BYTES_MAX", 3 * limits.MIB)
        talk = Talk()
        peers = [b"d", b"e", b"f", b"g"]
        self.follow(talk, b"c", *peers)
        out = talk.say(b"c", part(1, bytes(limits.MIB)))
        assert seen(out) == ["SharedSteering to d", "SharedSteering to e"]
        out = talk.say(b"e", HeldSteering("e", "m", Version(1, "w")))
        assert seen(out) == ["SharedSteering to f"]
        assert "SharedSteering to g" in seen(talk.say(b"d", Bye()))

    def test_a_follower_that_does_not_answer_is_forgotten(self):
        talk = Talk()
        self.follow(talk, b"c", b"d")
        talk.say(b"c", part(1))
        talk.now += limits.SHARED_S_MAX
        (answer,) = sent(talk.exchange.tick(talk.now), HeldSteering)
        assert "no answer from 1 front ends" in answer.reason
        talk.now += limits.SHARED_S_MAX
        (left,) = sent(talk.exchange.tick(talk.now), HeldSteering)
        assert (left.version, "no answer" in left.reason) == (None, True)
        assert len(talk.exchange.shared) == 1
        assert not sent(talk.say(b"c", part(2)), SharedSteering)

    def test_engines_of_other_keys_share_nothing(self):
        talk = Talk()
        self.follow(talk, b"c", user="one")
        self.follow(talk, b"d", user="two")
        out = list(talk.exchange.receive(b"c", [message.encode(part(1))], talk.now, "one"))
        assert seen(out) == ["HeldSteering to c"]

    def test_nobody_shares_through_a_hub_without_keys_that_others_reach(self):
        talk = Talk(guard=Guard(local=False))
        self.follow(talk, b"c")
        (refused,) = sent(talk.say(b"c", part(1)), HeldSteering)
        assert "actions are off" in refused.reason


@pytest.mark.parametrize("case", CASES)
def test_the_same_calls_have_the_same_effects(case):
    before, arrives, _ = CASES[case]
    texts = []
    for _ in range(2):
        talk = Talk()
        for each in before:
            BEFORE[each](talk)
        texts.append([repr(effect) for effect in arrives(talk) if not isinstance(effect, effects.Give | effects.End)])
    without = [[text for text in each if "0x" not in text] for each in texts]
    assert without[0] == without[1]


class TestCredit:
    def test_is_given_back_when_the_last_who_holds_a_frame_releases_it(self):
        talk = Talk()
        talk.worker()
        (give,) = talk.say(b"w", make_frame())
        give.holds[0].left += 1
        assert talk.exchange.acknowledge(talk.now) == []
        talk.exchange.release(give.holds)
        (ack,) = sent(talk.exchange.acknowledge(talk.now), Ack)
        assert ack.seq == 1
        assert ack.credit_bytes > 0
        assert talk.exchange.acknowledge(talk.now) == []

    def test_is_in_the_welcome_of_a_worker_that_is_back(self):
        talk = Talk()
        (first,) = sent(talk.worker(), Welcome)
        talk.say(b"w", make_frame())
        (again,) = sent(talk.worker(), Welcome)
        assert (first.last_seq, again.last_seq) == (0, 1)
        assert again.credit_bytes == first.credit_bytes
        assert talk.exchange.acknowledge(talk.now) == []


class TestResults:
    def test_go_to_a_client_that_waits_when_every_consumer_gave_its_own(self):
        talk = Talk()
        talk.worker()
        talk.client()
        talk.say(b"c", Await(("r1",), wait=True))
        end = next(effect for effect in done(talk) if isinstance(effect, effects.End))
        assert end.lanes == [0, 1]
        out = talk.exchange.settle(end.request, 0, CaptureResult("ok"), talk.now)
        assert out == [effects.CountResult(0, "ok")]
        named = RequestName(end.request.engine, "r1")
        out = talk.exchange.settle(named, 1, CaptureResult("ok"), talk.now)
        assert seen(out) == ["CountResult", "Results to c"]
        (results,) = sent(out, Results)
        assert {name: result.status for name, result in results.results.items()} == {"all": "ok", "durable": "ok"}

    def test_count_once(self):
        talk = Talk()
        talk.worker()
        end = next(effect for effect in done(talk) if isinstance(effect, effects.End))
        talk.exchange.settle(end.request, 0, CaptureResult("ok"), talk.now)
        assert talk.exchange.settle(end.request, 0, CaptureResult("error"), talk.now) == []

    def test_of_a_durable_consumer_are_left_to_the_next_hub(self):
        talk = Talk()
        talk.worker()
        talk.say(b"w", make_frame())
        (end,) = talk.exchange.drain(talk.now)
        assert [result and result.status for result in end.request.results] == [None, "pending"]


class TestActions:
    def test_are_answered_once_by_whoever_did_them(self):
        talk = Talk()
        talk.scheduler()
        talk.client()
        (act,) = sent(talk.say(b"c", Act("mine", Abort("r1"))), Act)
        out = talk.say(b"s", ActionOutcome(ActionApplied(act.id, 3)))
        assert sent(out, ActionOutcome) == [ActionOutcome(ActionApplied("mine", 3))]
        (tell,) = [effect for effect in out if isinstance(effect, effects.TellOutcome)]
        assert (tell.engine, tell.asked_by) == ("engine-1", "client")
        assert talk.say(b"s", ActionOutcome(ActionApplied(act.id, 4))) == []

    def test_expire(self):
        talk = Talk()
        talk.scheduler()
        talk.exchange.act(1, "durable", Abort("r1"), talk.now)
        talk.now += limits.ACTION_S_MAX + limits.ACTION_ANSWER_S_MAX
        (answer,) = [each for each in talk.exchange.tick(talk.now) if isinstance(each, effects.AnswerLane)]
        assert answer.lane == 1
        assert isinstance(answer.outcome, Unknown)

    def test_are_not_answered_to_who_took_the_place_of_the_asker(self):
        talk = Talk()
        talk.scheduler()
        talk.client()
        (act,) = sent(talk.say(b"c", Act("mine", Abort("r1"))), Act)
        talk.client()
        assert seen(talk.say(b"s", ActionOutcome(Rejected(act.id, "no")))) == ["TellOutcome"]


class TestTime:
    def test_decides_who_is_silent(self):
        talk = Talk()
        talk.worker()
        talk.now += limits.HEARTBEAT_S
        assert seen(talk.exchange.tick(talk.now)) == ["FindMissed", "Beat to w"]
        talk.now += limits.SILENCE_S_MAX
        assert seen(talk.exchange.tick(talk.now, {b"w"})) == ["FindMissed", "Beat to w"]
        assert seen(talk.exchange.tick(talk.now)) == ["FindMissed", "Lose"]
        assert not talk.exchange.roster.peers

    def test_decides_when_a_name_is_free(self):
        talk = Talk()
        talk.say(b"w", make_hello("many@1", "one"))
        (refused,) = sent(talk.say(b"w2", make_hello("many@2", "two")), Refused)
        assert "engine name many" in refused.reason
        talk.now += limits.NAME_KEPT_S
        assert sent(talk.say(b"w2", make_hello("many@2", "two")), Welcome)


class TestSlices:
    def test_end_the_requests_of_an_engine_between_other_peers(self):
        talk = Talk()
        talk.worker()
        names = [f"r{number}" for number in range(2 * limits.SLICE_REQUESTS)]
        talk.say(b"w", make_frame([(name, 4, 0, 1) for name in names]))
        out = seen(talk.say(b"w", Bye()))
        assert out == ["End"] * limits.SLICE_REQUESTS + ["Continue"]
        out = seen(talk.exchange.proceed("engine-1", talk.now))
        assert out == ["End"] * limits.SLICE_REQUESTS + ["Lose", "Continue"]
        assert seen(talk.exchange.proceed("engine-1", talk.now)) == ["Lose"]
        assert talk.exchange.proceed("engine-1", talk.now) == []

    def test_of_a_hello_that_waits_are_parted_by_pauses(self):
        talk = Talk()
        talk.worker()
        names = [f"r{number}" for number in range(4 * limits.SLICE_REQUESTS)]
        talk.say(b"w", make_frame([(name, 4, 0, 1) for name in names]))
        talk.say(b"w", Bye())
        out = seen(talk.worker(boot="two"))
        assert out.count("Pause") == 3
        assert out[-4:] == ["Lose", "Greet", "Greet", "Welcome to w"]


def test_a_refusal_is_new_once_for_an_engine():
    def refuse(_):
        raise UsageError("no")

    talk = Talk()
    talk.exchange.roster._fits = refuse
    first, again = (talk.worker(model=make_model())[-1] for _ in range(2))
    assert (first.engine, first.reason, first.first) == ("engine-1", "no", True)
    assert not again.first


def test_an_engine_without_room_is_named_once():
    talk = Talk(budget=Budget(limits.MEMORY_BYTES_MIN))
    talk.worker()
    out = []
    for seq in range(1, 200):
        names = [(f"{seq}-{number}", 4, 0, 1) for number in range(100)]
        out += talk.say(b"w", make_frame(names, seq=seq, step=seq))
    assert seen(out).count("NoteFull") == 1
