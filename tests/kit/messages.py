"""Every message of the protocol, one of each."""

from __future__ import annotations

from capflow.capture.frame import Rank
from capflow.capture.result import CaptureResult
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow.protocol.message import (
    Ack,
    Act,
    ActionOutcome,
    Await,
    Beat,
    Bye,
    ControllerSpec,
    FollowSteering,
    HeldSteering,
    Hello,
    Refused,
    Results,
    SharedSteering,
    Status,
    Version,
    Watched,
    WatchRequest,
    Welcome,
    WorkerCounts,
)
from capflow.steering.action import (
    Abort,
    ActionApplied,
    Freeze,
    Gain,
    Rejected,
    SetGate,
    Steer,
    Unfreeze,
    Unsteer,
)
from capflow.steering.clamp import Clamp
from capflow.steering.gate import SteeringGate
from capflow.steering.request import Steering, Tier
from capflow.steering.vector import SteeringVector
from tests.kit.frames import make_hello, make_model

MESSAGES = [
    make_hello(rank=Rank(1, 2, 3)),
    Hello("client", "", "c"),
    Welcome("h", 100, 3, (CaptureSpec({"post_block": "all"}, "last_prompt"),), (ControllerSpec("gate", b"\x01"),)),
    Welcome(
        "h",
        100,
        controllers=(
            ControllerSpec(
                "gate",
                b"",
                steering=Steering(
                    Tier((SteeringVector(3, "mlp_in", b"\0\0\x80?", gate="g"),)),
                    gates=(SteeringGate("g", 2, "post_block", b"\0\0\x80?", threshold=1.5),),
                ),
            ),
        ),
    ),
    Refused("no"),
    Ack(7, 1000),
    Beat(),
    Beat(WorkerCounts(sent_frames=3, queued_bytes=1, dropped_rows={"queue_full": 2})),
    Beat(WorkerCounts(sent_bytes=2**50, dropped_rows={"queue_full": 2**50}, spool={"bytes": 2**50})),  # after years
    Act("1", Steer("r1", (SteeringVector.make(Site(1, "mlp_in"), [1.0, 2.0]),))),
    Act("2", Unsteer("r1")),
    Act("3", Abort("r1")),
    Act("4", Steer("r1", (), clamps=(Clamp(3, "mlp_in", b"\0\0\x80?"),), gain=0.5, lease_s=2.5, lease_positions=7)),
    Act("5", Abort("r1", as_="stop", reason="probe", label="why")),
    Act("6", Gain("r1", "module calm", 0.5, lease_s=1.0)),
    Act("7", SetGate("r1", "rude", threshold=1.5, enabled=True)),
    Act("8", Freeze(engine="e")),
    Act("9", Unfreeze()),
    ActionOutcome(ActionApplied("1", 5)),
    ActionOutcome(ActionApplied("1", 5, 17)),
    ActionOutcome(ActionApplied("1", 5, 17, "a-1", "engine-2: why")),
    ActionOutcome(Rejected("1", "why")),
    ActionOutcome(Rejected("1", "why", "a-1")),
    Await(("r1", "r2"), wait=False),
    Results("r1", {"duckdb": CaptureResult("ok", None, {"rows": 3})}),
    Status({"a": [1, {"b": 2.5}]}),
    WatchRequest(1000),
    Watched("e", make_model()),
    Watched("e", replica=3),
    FollowSteering("e"),
    SharedSteering("e", "calm", Version(3, "w"), b"content"),
    SharedSteering("e", "", Version(4, "w")),
    HeldSteering("e", "calm", Version(3, "w")),
    HeldSteering("e", reason="why"),
    Bye(),
]
