"""Messages: each is what it was on the other side, and its bytes are pinned."""

from __future__ import annotations

import msgspec
import pytest
from frames import make_hello, make_model

from capflow import limits, message
from capflow.action import Abort, Applied, Rejected, Steer, Unsteer
from capflow.frame import Rank
from capflow.message import (
    Ack,
    Act,
    ActionOutcome,
    Await,
    Beat,
    Bye,
    ControllerSpec,
    Hello,
    Refused,
    Results,
    Status,
    Tap,
    Tapped,
    Welcome,
    WorkerCounts,
)
from capflow.result import CaptureResult
from capflow.site import Site
from capflow.spec import CaptureSpec
from capflow.vector import SteeringVector

MESSAGES = [
    make_hello(rank=Rank(1, 2, 3)),
    Hello("client", "", "c"),
    Welcome("h", 100, 3, (CaptureSpec({"post_block": "all"}, "last_prompt"),), (ControllerSpec("gate", b"\x01"),)),
    Refused("no"),
    Ack(7, 1000),
    Beat(),
    Beat(WorkerCounts(sent_frames=3, queued_bytes=1, dropped_rows={"queue_full": 2})),
    Beat(WorkerCounts(sent_bytes=2**50, dropped_rows={"queue_full": 2**50}, spool={"bytes": 2**50})),  # after years
    Act("1", Steer("r1", (SteeringVector.make(Site(1, "mlp_in"), [1.0, 2.0]),))),
    Act("2", Unsteer("r1")),
    Act("3", Abort("r1")),
    ActionOutcome(Applied("1", 5)),
    ActionOutcome(Rejected("1", "why")),
    Await(("r1", "r2"), wait=False),
    Results("r1", {"duckdb": CaptureResult("ok", None, {"rows": 3})}),
    Status({"a": [1, {"b": 2.5}]}),
    Tap(1000),
    Tapped("e", make_model()),
    Tapped("e", replica=3),
    Bye(),
]


@pytest.mark.parametrize("said", MESSAGES, ids=lambda said: type(said).__name__)
def test_round_trip(said):
    assert message.decode(message.encode(said)) == said


@pytest.mark.parametrize(
    ("said", "golden"),
    [
        (Ack(7, 1000), "83a474797065a361636ba373657107ac6372656469745f6279746573cd03e8"),
        (Beat(), "81a474797065a462656174"),
        (Beat(troubles=("x",)), "82a474797065a462656174a874726f75626c657391a178"),
        (Bye(), "81a474797065a3627965"),
        (Tap(1000), "82a474797065a3746170ac6372656469745f6279746573cd03e8"),
        (Tapped("e", replica=0), "83a474797065a6746170706564a6656e67696e65a165a77265706c69636100"),
        (Refused("no"), "82a474797065a772656675736564a6726561736f6ea26e6f"),
        (
            Act("1", Abort("r1")),
            "83a474797065a3616374a26964a131a6616374696f6e82a474797065a561626f7274a772657175657374a27231",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_bytes_are_pinned(said, golden):
    assert message.encode(said).hex() == golden


def test_fields_of_a_later_version_are_passed_over():
    part = msgspec.msgpack.encode({"type": "ack", "seq": 1, "credit_bytes": 2, "new": [1]})
    assert message.decode(part) == Ack(1, 2)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"type": "frame"},
        {"type": "nope"},
        {"type": "ack"},
        {"type": "ack", "seq": "1", "credit_bytes": 2},
        {"type": "act", "id": "1", "action": {"type": "abort", "request": "r1", "force": True}},
        {"type": "act", "id": "1", "action": {"type": "reboot"}},
        {"type": "beat", "counts": {"sent_frames": -1}},
        {"type": "beat", "counts": {"spool": {"records": -1}}},
        {"type": "beat", "counts": {"dropped_rows": {str(n): 1 for n in range(limits.REASONS_MAX + 1)}}},
        {"type": "beat", "counts": {"dropped_rows": {"x" * (limits.REQUEST_ID_LENGTH_MAX + 1): 1}}},
        [],
        None,
    ],
)
def test_what_is_no_message_is_refused(value):
    with pytest.raises(msgspec.MsgspecError):
        message.decode(msgspec.msgpack.encode(value))
