"""Messages: each is what it was on the other side, and its bytes are pinned."""

from __future__ import annotations

import msgspec
import pytest

from capflow import limits
from capflow.protocol import message
from capflow.protocol.message import (
    Ack,
    Act,
    ActionOutcome,
    Beat,
    Bye,
    FollowSteering,
    HeldSteering,
    Refused,
    SharedSteering,
    Version,
    Watched,
    WatchRequest,
    Welcome,
)
from capflow.steering.action import Abort, ActionApplied, Freeze, Gain, Rejected, SetGate
from tests.kit.messages import MESSAGES


@pytest.mark.parametrize("sent", MESSAGES, ids=lambda sent: type(sent).__name__)
def test_round_trip(sent):
    assert message.decode(message.encode(sent)) == sent


@pytest.mark.parametrize(
    ("sent", "golden"),
    [
        (Ack(7, 1000), "83a474797065a361636ba373657107ac6372656469745f6279746573cd03e8"),
        (Beat(), "81a474797065a462656174"),
        (Beat(troubles=("x",)), "82a474797065a462656174a874726f75626c657391a178"),
        (Bye(), "81a474797065a3627965"),
        (WatchRequest(1000), "82a474797065a3746170ac6372656469745f6279746573cd03e8"),
        (Watched("e", replica=0), "83a474797065a6746170706564a6656e67696e65a165a77265706c69636100"),
        (FollowSteering("e"), "82a474797065a6666f6c6c6f77a6656e67696e65a165"),
        (
            SharedSteering("e", "m", Version(3, "w"), b"c"),
            (
                "85a474797065a87374656572696e67a6656e67696e65a165"
                "a66d6f64756c65a16da776657273696f6e9203a177a7636f6e74656e74c40163"
            ),
        ),
        (HeldSteering("e"), "82a474797065a468656c64a6656e67696e65a165"),
        (
            HeldSteering("e", "m", Version(3, "w"), "why"),
            "85a474797065a468656c64a6656e67696e65a165a66d6f64756c65a16da776657273696f6e9203a177a6726561736f6ea3776879",
        ),
        (Refused("no"), "82a474797065a772656675736564a6726561736f6ea26e6f"),
        (
            next(each for each in MESSAGES if isinstance(each, Welcome) and each.controllers[0].steering is not None),
            (
                "89a474797065a777656c636f6d65a3687562a168ac6372656469745f627974657364a86c6173745f73657100a8636170"
                "747572657390ab636f6e74726f6c6c6572739183a46e616d65a467617465a57374617465c400a87374656572696e6787"
                "a46261736583a7766563746f72739187a56c6179657203a4686f6f6ba66d6c705f696ea464617461c4040000803fa564"
                "74797065a7666c6f61743332a57363616c65cb3ff0000000000000a872656c6174697665c2a467617465a167a6636c61"
                "6d707390a8666561747572657390a770726566696c6c83a7766563746f727390a6636c616d707390a866656174757265"
                "7390a66465636f646583a7766563746f727390a6636c616d707390a8666561747572657390a77061746368657390a76d"
                "6f64756c657390a56761746573918ca46e616d65a167a56c6179657202a4686f6f6baa706f73745f626c6f636ba46461"
                "7461c4040000803fa462696173cb0000000000000000a97468726573686f6c64cb3ff8000000000000a573636f7265a3"
                "646f74a973686172706e657373c0a56c61746368c2a9706f736974696f6e73a3616c6ca56c6162656ca0a561626f7274"
                "a0a8666561747572657390a776657273696f6e01a7636c6f636b5f73cb0000000000000000a7616374696f6e73c2"
            ),
        ),
        (
            Act("1", Abort("r1")),
            "83a474797065a3616374a26964a131a6616374696f6e82a474797065a561626f7274a772657175657374a27231",
        ),
        (
            Act("1", Abort("r1", as_="stop", reason="x")),
            (
                "83a474797065a3616374a26964a131a6616374696f6e84a474797065a561626f7274a772657175657374a27231a26173"
                "a473746f70a6726561736f6ea178"
            ),
        ),
        (
            Act("1", Gain("r1", "global", 0.5)),
            (
                "83a474797065a3616374a26964a131a6616374696f6e84a474797065a46761696ea772657175657374a27231a56f776e"
                "6572a6676c6f62616ca57363616c65cb3fe0000000000000"
            ),
        ),
        (
            Act("1", SetGate("r1", "g", threshold=1.0, enabled=False)),
            (
                "83a474797065a3616374a26964a131a6616374696f6e85a474797065a87365745f67617465a772657175657374a27231"
                "a467617465a167a97468726573686f6c64cb3ff0000000000000a7656e61626c6564c2"
            ),
        ),
        (Act("1", Freeze()), "83a474797065a3616374a26964a131a6616374696f6e81a474797065a6667265657a65"),
        (
            ActionOutcome(ActionApplied("1", 5)),
            "82a474797065a76f7574636f6d65a76f7574636f6d6583a474797065a76170706c696564a26964a131a47374657005",
        ),
        (
            ActionOutcome(ActionApplied("1", 5, 9)),
            (
                "82a474797065a76f7574636f6d65a76f7574636f6d6584a474797065a76170706c696564a26964a131a47374657005a8"
                "706f736974696f6e09"
            ),
        ),
        (
            ActionOutcome(Rejected("1", "no")),
            "82a474797065a76f7574636f6d65a76f7574636f6d6583a474797065a872656a6563746564a26964a131a6726561736f6ea26e6f",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_bytes_are_pinned(sent, golden):
    assert message.encode(sent).hex() == golden


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
