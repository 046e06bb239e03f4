"""What data sets keep of steering: which rows were steered, and the events of each request, in every layout."""

from __future__ import annotations

import duckdb
import msgspec
import numpy as np
import pytest

import capflow
from capflow import limits
from capflow.capture.frame import Finished, Frame
from capflow.steering.action import ActionApplied, Answered, Rejected, Steer, Unknown
from capflow_consumers.dataset.layout import SteeringEvent
from tests.kit.captured import run
from tests.kit.frames import make_finished, make_frame
from tests.kit.stored import SITES, done, opened

LAYOUTS = ("per_file", "packed", "sharded")


def event(number, request="r1", incarnation="b-1", position=5):
    return Answered(
        f"e{number}", "engine-1", request, "gate", (SITES[0],), "gate rude", number, 7, "", position, 1.5, 1.0, "rude",
        incarnation,
    )  # fmt: skip


def ended(**fields):
    finished: Finished = msgspec.structs.replace(make_finished("r1", 4, 6), incarnation="b-1")
    return msgspec.structs.replace(done(computed_length=6, rows=18), finished=(finished,), **fields)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_readers_know_which_rows_were_steered_and_why(tmp_path, layout):
    """The first event comes before any row; one comes twice; one belongs to an earlier request of the id."""
    consumer = opened(tmp_path, SITES, layout=layout)
    consumer.on_action(event(1, position=0))
    consumer.on_action(event(9, incarnation="b-0"))
    consumer.on_frame(make_frame([("r1", 4, 0, 4)], SITES, seq=1, steered={"r1": (1, 3)}))
    consumer.on_frame(make_frame([("r1", 4, 4, 2)], SITES, seq=2, steered={"r1": (5, 6)}))
    consumer.on_action(event(2))
    consumer.on_action(event(2))
    consumer.on_request_done(ended())
    consumer.close()
    capture = capflow.open(tmp_path)["r1"]
    for site in SITES:
        assert capture.steered(site).tolist() == [False, True, True, False, False, True]
    facts = [(e.id, e.kind, e.by, e.position, e.score, e.threshold, e.label, e.sites, e.step) for e in capture.events]
    rest = (1.5, 1.0, "rude", [str(SITES[0])], 7)
    assert facts == [("e1", "gate", "gate rude", 0, *rest), ("e2", "gate", "gate rude", 5, *rest)]
    if layout == "sharded":
        (path,) = tmp_path.glob("*.parquet")
        sql = f"SELECT DISTINCT position FROM '{path}' WHERE steered ORDER BY position"
        assert duckdb.sql(sql).fetchall() == [(1,), (2,), (5,)]
    shown = run("inspect", tmp_path).stdout
    assert "steered   3 positions of 1 captures; events gate 2" in shown


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_engines_that_do_not_say_it_are_of_unknown_steering(tmp_path, layout):
    consumer = opened(tmp_path, SITES, layout=layout)
    consumer.on_frame(make_frame([("r1", 4, 0, 4)], SITES, seq=1, steered={}))
    consumer.on_frame(make_frame([("r1", 4, 4, 2)], SITES, seq=2))
    consumer.on_request_done(ended())
    consumer.close()
    capture = capflow.open(tmp_path)["r1"]
    assert capture.steered(SITES[0]) is None
    assert capture.events == ()


def test_torch_rows_say_it(tmp_path):
    torch_rows = pytest.importorskip("capflow_consumers.dataset.torch_rows")
    consumer = opened(tmp_path, SITES)
    consumer.on_frame(make_frame([("r1", 4, 0, 6)], SITES, seq=1, steered={"r1": (1, 3)}))
    consumer.on_request_done(ended())
    consumer.close()
    (batch,) = torch_rows.TorchRows(tmp_path, shuffle_rows=0)
    assert batch.steered.tolist() == [position in (1, 2) for position in batch.positions.tolist()]


def test_a_data_set_that_is_replayed_says_it_again(tmp_path):
    consumer = opened(tmp_path / "first", SITES)
    consumer.on_action(event(1, position=1))
    consumer.on_frame(make_frame([("r1", 4, 0, 6)], SITES, seq=1, steered={"r1": (1, 3, 4, 6)}))
    consumer.on_request_done(ended())
    consumer.close()
    replayed = run("replay", tmp_path / "first", "--consumer", f"filesystem:root={tmp_path / 'second'}")
    assert replayed.returncode == 0, replayed.stderr
    first, second = (capflow.open(tmp_path / name)["r1"] for name in ("first", "second"))
    assert second.steered(SITES[0]).tolist() == first.steered(SITES[0]).tolist()
    assert second.events == first.events
    assert len(second.events) == 1


@pytest.mark.parametrize(("count", "lost"), [(limits.ACTED_MAX + 144, 0), (limits.EVENTS_KEPT_MAX + 3, 1)])
def test_a_replay_of_a_data_set_leaves_out_no_event(tmp_path, count, lost):
    """One event stands for those that the data set lost; it has no room beside the others."""
    consumer = opened(tmp_path / "first", SITES)
    consumer.on_frame(make_frame([("r1", 4, 0, 6)], SITES, seq=1, steered={}))
    rejected = Answered.of(Steer("r1", ()), Rejected("r", "no"), engine="engine-1", asked_by="client")
    for answered in (rejected, *map(event, range(count - 1))):
        consumer.on_action(answered)
    consumer.on_request_done(ended())
    consumer.close()
    replayed = run("replay", tmp_path / "first", "--consumer", f"filesystem:root={tmp_path / 'second'}")
    assert replayed.returncode == 0, replayed.stderr
    first, second = (capflow.open(tmp_path / name)["r1"] for name in ("first", "second"))
    assert len(first.events) == min(count, limits.EVENTS_KEPT_MAX)
    assert second.events == first.events
    assert second.sidecar.events_lost == lost


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_data_set_tells_the_unknown_from_the_rejected(tmp_path, layout):
    consumer = opened(tmp_path, SITES, layout=layout)
    consumer.on_frame(make_frame([("r1", 4, 0, 6)], SITES, seq=1, steered={}))
    for outcome in (ActionApplied("a", 7), Rejected("r", "no"), Unknown("u", "no answer")):
        consumer.on_action(Answered.of(Steer("r1", ()), outcome, engine="engine-1", asked_by="client"))
    consumer.on_request_done(ended())
    consumer.close()
    facts = [(event.outcome, event.step, event.reason) for event in capflow.open(tmp_path)["r1"].events]
    assert facts == [("applied", 7, ""), ("rejected", None, "no"), ("unknown", None, "no answer")]


def test_events_of_earlier_data_sets_have_an_outcome():
    rejected = {"id": "e", "kind": "steer", "by": "client", "time_ns": 1, "reason": "no"}
    assert msgspec.convert(rejected, SteeringEvent).outcome == "rejected"
    assert msgspec.convert(rejected | {"step": 3}, SteeringEvent).outcome == "applied"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows_say_it", [True, False])
def test_an_event_of_another_request_of_the_id_is_not_in_a_sidecar(tmp_path, layout, rows_say_it):
    """A client steers without an incarnation, so only the outcome has it; and none if no request ran."""
    consumer = opened(tmp_path, SITES, layout=layout)

    def client(incarnation, position):
        outcome = ActionApplied("a", 7, position, incarnation)
        consumer.on_action(Answered.of(Steer("r1", ()), outcome, engine="engine-1", asked_by="client"))

    client("b-0", 1)  # of a request that was not captured
    client("", 2)
    client("b-1", 3)
    frame = make_frame([("r1", 4, 0, 6)], SITES, seq=1, steered={})
    if rows_say_it:
        part = msgspec.structs.replace(frame.header.requests[0], incarnation="b-1")
        frame = Frame.seal(msgspec.structs.replace(frame.header, requests=(part,)), frame.payload)
    consumer.on_frame(frame)
    client("b-1", 4)
    client("b-2", 5)
    consumer.on_request_done(ended())
    client("b-1", 6)  # after the end
    consumer.close()
    assert [event.position for event in capflow.open(tmp_path)["r1"].events] == [3, 4]


def test_many_events_are_counted(tmp_path):
    consumer = opened(tmp_path, SITES)
    consumer.on_frame(make_frame([("r1", 4, 0, 6)], SITES, seq=1, steered={}))
    for number in range(limits.EVENTS_KEPT_MAX + 3):
        consumer.on_action(event(number))
    consumer.on_request_done(ended())
    consumer.close()
    sidecar = capflow.open(tmp_path)["r1"].sidecar
    assert (len(sidecar.events), sidecar.events_lost) == (limits.EVENTS_KEPT_MAX, 3)
    assert not np.any(capflow.open(tmp_path)["r1"].steered(SITES[0]))
