"""The actions that consumers see, and the rows that the duckdb consumer writes for them."""

from __future__ import annotations

import duckdb
import msgspec
import numpy as np
import pytest

from capflow.capture.frame import Acted, ActedOn, Frame
from capflow.capture.site import Site
from capflow.errors import RetryError
from capflow.steering.action import Abort, ActionApplied, Answered, Gain, Rejected, SetGate, Steer, Unknown, Unsteer
from capflow.steering.vector import SteeringVector
from capflow.transport.client import Client
from capflow_consumers.duckdb.consumer import DuckdbConfig, DuckdbConsumer
from tests.kit.answers import answering
from tests.kit.databases import SITES, done, opened, probe_file, query
from tests.kit.frames import make_finished, make_frame
from tests.kit.hubs import Recorder, address, configured, running_hub, scheduler_link, worker_link
from tests.kit.waiting import eventually

__all__ = ["address"]

STEER = Steer("r1", (SteeringVector.make(Site(2, "post_block"), np.ones(8)),))


class Told(Recorder):
    """Keeps the actions that it sees."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.told = []

    def on_action(self, answered):
        self.told.append(answered)


@pytest.mark.parametrize("policy", ["block", "spill"])
def test_consumers_are_told_of_every_action_and_what_came_of_it(address, policy, tmp_path):
    status, deaf = Told("told"), Recorder("deaf")
    options = {"spool_dir": tmp_path / "spool"} if policy == "spill" else {}
    with (
        running_hub(address, configured(status, policy, **options), deaf),
        worker_link(address) as worker,
        scheduler_link(address) as link,
        Client(address) as client,
    ):
        frame = make_frame()
        assert worker.send(frame.header, frame.payload) is None
        eventually(lambda: status.rows["r1"])
        thread = answering(
            link,
            [
                lambda act: ActionApplied(act.id, 7),
                lambda act: Rejected(act.id, "no"),
                lambda act: ActionApplied(act.id, 9),
            ],
        )
        assert client.act(STEER, 20).step == 7
        assert client.act(Unsteer("unknown"), 20).reason == "no"
        deaf.context.act(Abort("r1"))
        thread.join(20)
        eventually(lambda: len(status.told) == 3)
    facts = [(a.engine, a.request, a.kind, a.sites, a.asked_by, a.step, a.reason) for a in status.told]
    assert facts == [
        ("engine-1", "r1", "steer", (Site(2, "post_block"),), "client", 7, ""),
        ("", "unknown", "unsteer", (), "client", None, "no"),
        ("engine-1", "r1", "abort", (), "deaf", 9, ""),
    ]
    assert len({a.id for a in status.told}) == 3
    assert all(abs(a.time_ns - status.told[0].time_ns) < 60e9 for a in status.told)


@pytest.mark.parametrize("policy", ["block", "spill"])
def test_consumers_are_told_what_steered_requests_whose_rows_they_do_not_have(address, policy, tmp_path):
    """One request nobody wants rows of; of another only a consumer that minds no actions does."""
    status, deaf = Told("told", spec=None), Recorder("deaf")
    options = {"spool_dir": tmp_path / "spool"} if policy == "spill" else {}
    acted = Acted("controller gate", "steer", (Site(2, "post_block"),), 5, 1_700_000_000_000_000_000)
    with (
        running_hub(address, configured(status, policy, **options), deaf),
        worker_link(address) as worker,
        scheduler_link(address) as link,
    ):
        assert link.welcome.actions
        frame = make_frame([("seen", 3, 0, 3)])
        assert worker.send(frame.header, frame.payload) is None
        seen = msgspec.structs.replace(make_finished("seen", 3, 3, rows=6), acted=(acted,))
        end = make_frame([], finished=[seen], step=2)
        header = msgspec.structs.replace(end.header, acted=(ActedOn("unseen", "i", (acted, acted)),))
        assert worker.send(header, end.payload) is None
        eventually(lambda: len(status.told) == 3)
    facts = {(a.engine, a.request, a.kind, a.sites, a.asked_by, a.step) for a in status.told}
    steer = ("steer", (Site(2, "post_block"),), "controller gate", 5)
    assert facts == {("engine-1", "seen", *steer), ("engine-1", "unseen", *steer)}
    assert len({a.id for a in status.told}) == 3
    assert set(deaf.done) == {"seen"}


def test_nobody_asks_for_actions_where_no_consumer_minds_them(address):
    with running_hub(address, Recorder()), scheduler_link(address) as link:
        assert not link.welcome.actions


def test_actions_are_in_the_store_when_they_are_told_and_once(tmp_path):
    probe_file(tmp_path, "p")
    consumer = opened(tmp_path, "p")
    consumer.on_frame(make_frame(sites=SITES))
    steer = Answered.of(STEER, ActionApplied("x", 7), engine="engine-1", asked_by="client")
    abort = Answered.of(Abort("gone"), Rejected("y", "not running"), engine="", asked_by="judge")
    gain = Answered.of(Gain("r1", "module calm", 0.5), ActionApplied("z", 8), engine="engine-1", asked_by="client")
    opened_gate = SetGate("r1", "rude", threshold=2.0)
    gate = Answered.of(opened_gate, ActionApplied("g", 9), engine="engine-1", asked_by="client")
    for answered in (steer, abort, steer, gain, gate):
        consumer.on_action(answered)
    consumer._port.close()
    consumer._database.close()  # as a kill would
    columns = "capture, engine, request_id, kind, sites, asked_by, outcome, step, reason"
    columns_of_gains = "kind, target, scale, threshold"
    assert query(tmp_path, f"SELECT {columns_of_gains} FROM events WHERE step > 7 ORDER BY step") == [
        ("gain", "module calm", 0.5, None),
        ("set_gate", "rude", None, 2.0),
    ]
    mine = f"SELECT {columns} FROM actions WHERE target IS NULL ORDER BY kind DESC"
    assert query(tmp_path, mine) == [
        (1, "engine-1", "r1", "steer", ["post_block:2"], "client", "applied", 7, None),
        (None, "", "gone", "abort", [], "judge", "rejected", None, "not running"),
    ]
    again = opened(tmp_path, "p")
    again.on_action(steer)
    again.on_frame(make_frame(sites=SITES))
    assert again.on_request_done(done(rows=12)).status == "ok"
    again.close()
    assert query(tmp_path, "SELECT count(*), count(DISTINCT id) FROM actions") == [(4, 4)]
    assert query(tmp_path, "SELECT count(*) FROM actions JOIN requests USING (capture)") == [(3,)]


def of_incarnation(incarnation, kind="steer"):
    """Return the event of a client's action that named no incarnation, as a hub gives it."""
    action = {"steer": STEER, "unsteer": Unsteer("r1")}[kind]
    outcome = ActionApplied(kind, 7, 44, incarnation)
    return Answered.of(action, outcome, engine="engine-1", asked_by="client")


def framed(incarnation, request="r1"):
    """Return a frame with rows of an incarnation of a request."""
    rows = make_frame(sites=SITES)
    part = msgspec.structs.replace(rows.header.requests[0], id=request, incarnation=incarnation)
    return Frame.seal(msgspec.structs.replace(rows.header, requests=(part,)), rows.payload)


@pytest.mark.parametrize("killed", [False, True])
def test_events_before_the_rows_are_of_the_capture_of_their_own_request(tmp_path, killed):
    probe_file(tmp_path, "p")
    consumer = opened(tmp_path, "p")
    consumer.on_action(of_incarnation("first"))  # of a request that nobody captures
    consumer.on_action(of_incarnation("second", "unsteer"))
    if killed:
        consumer.close()
        consumer = opened(tmp_path, "p")
    consumer.on_frame(framed("second"))
    consumer.on_action(of_incarnation("third"))  # the next one of the id
    finished = msgspec.structs.replace(make_finished(), incarnation="second")
    assert consumer.on_request_done(msgspec.structs.replace(done(rows=12), finished=(finished,))).status == "ok"
    consumer.close()
    stored = query(tmp_path, "SELECT incarnation, kind, capture FROM actions ORDER BY incarnation")
    assert stored == [("first", "steer", None), ("second", "unsteer", 1), ("third", "steer", None)]


def test_a_kill_attaches_no_event_to_another_request_s_capture(tmp_path):
    """The number of a capture of which nothing was committed is free again; an event committed before may have it."""
    probe_file(tmp_path, "p")
    consumer = opened(tmp_path, "p")
    consumer.on_frame(framed("first"))
    consumer.on_action(of_incarnation("first"))
    consumer._database.close()  # killed, with what is pending
    consumer = opened(tmp_path, "p")
    consumer.on_frame(framed("second", "r2"))
    consumer.on_frame(framed("first"))  # delivered again
    for request, incarnation in (("r2", "second"), ("r1", "first")):
        finished = msgspec.structs.replace(make_finished(), id=request, incarnation=incarnation)
        ended = msgspec.structs.replace(done(request, rows=12), finished=(finished,))
        assert consumer.on_request_done(ended).status == "ok"
    consumer.close()
    stored = query(tmp_path, "SELECT requests.request_id, capture FROM actions JOIN requests USING (capture)")
    assert stored == [("r1", 2)]


def test_events_keep_no_capture_when_its_rows_are_not_written(tmp_path, monkeypatch):
    probe_file(tmp_path, "p")
    consumer = opened(tmp_path, "p")
    consumer.on_action(of_incarnation("first"))
    consumer.on_frame(framed("first"))
    finished = msgspec.structs.replace(make_finished(), incarnation="first")
    ended = msgspec.structs.replace(done(rows=12), finished=(finished,))
    monkeypatch.setattr("capflow_consumers.duckdb.database._ADOPT", "SELECT error('no room'), ?, ?, ?, ?")
    with pytest.raises(RetryError):
        consumer.on_request_done(ended)
    monkeypatch.undo()
    consumer._database.close()  # killed, with what is pending
    assert query(tmp_path, "SELECT capture FROM actions") == [(None,)]
    assert query(tmp_path, "SELECT count(*) FROM requests") == [(0,)]


def test_the_store_tells_the_unknown_from_the_rejected(tmp_path):
    probe_file(tmp_path, "p")
    consumer = opened(tmp_path, "p")
    for outcome in (Unknown("u", "no answer"), Rejected("r", "not running")):
        consumer.on_action(Answered.of(Abort("r1"), outcome, engine="engine-1", asked_by="client"))
    consumer.close()
    stored = query(tmp_path, "SELECT outcome, step, reason FROM actions ORDER BY outcome")
    assert stored == [("rejected", None, "not running"), ("unknown", None, "no answer")]


def test_records_of_earlier_versions_have_an_outcome():
    """They lie in the inboxes of consumers."""
    answered = Answered.of(STEER, ActionApplied("x", 7), engine="engine-1", asked_by="client")
    for outcome, step in (("applied", 7), ("rejected", None)):
        record = msgspec.to_builtins(msgspec.structs.replace(answered, step=step, outcome="unknown"))
        del record["outcome"]
        assert msgspec.convert(record, Answered).outcome == outcome


def test_a_hub_brings_actions_to_the_store(address, tmp_path):
    path = tmp_path / "scores.duckdb"
    consumer = DuckdbConsumer(DuckdbConfig(str(path), site="post_block:0"))
    with (
        running_hub(address, configured(consumer, "spill", spool_dir=tmp_path / "spool")),
        scheduler_link(address) as link,
        Client(address) as client,
    ):
        thread = answering(link, [lambda act: ActionApplied(act.id, 7)])
        assert client.act(STEER, 20).step == 7
        thread.join(20)
    with duckdb.connect(str(path), read_only=True) as connection:
        result = connection.execute("SELECT request_id, kind, sites, outcome, step FROM actions").fetchall()
    assert result == [("r1", "steer", ["post_block:2"], "applied", 7)]


def test_the_store_has_events_and_steered_tokens_and_older_files_get_the_columns(tmp_path):
    probe_file(tmp_path, "p")
    consumer = opened(tmp_path, "p")
    consumer.on_frame(make_frame([("r1", 4, 0, 4)], SITES, seq=1))
    consumer.on_frame(make_frame([("r1", 4, 4, 2)], SITES, seq=2, steered={"r1": (5, 6)}))
    gate = Answered("i", "engine-1", "r1", "gate", (), "gate rude", 10**18, 7, "", 5, 1.5, 1.0, "rude", "b-1")
    consumer.on_action(gate)
    consumer.on_request_done(done(computed_length=6, rows=18))
    consumer.close()
    steered = [(p, None) for p in range(4)] + [(4, False), (5, True)]
    assert query(tmp_path, "SELECT position, steered FROM tokens ORDER BY position") == steered
    columns = "request_id, position, kind, asked_by, label, score, threshold, step, outcome"
    event = ("r1", 5, "gate", "gate rude", "rude", 1.5, 1.0, 7, "applied")
    assert query(tmp_path, f"SELECT {columns} FROM events") == [event]
    (path,) = tmp_path.glob("*.duckdb")
    with duckdb.connect(str(path)) as connection:
        connection.execute("DROP VIEW events; DROP VIEW fired; DROP VIEW top_tokens; DROP VIEW layer_scores")
        connection.execute("ALTER TABLE tokens DROP COLUMN steered")
        connection.execute("DROP INDEX actions_id")
        for column in ("scale", "target", "incarnation", "label", "threshold", "score", "position"):
            connection.execute(f"ALTER TABLE actions DROP COLUMN {column}")
    opened(tmp_path, "p").close()
    assert query(tmp_path, "SELECT position, steered FROM tokens ORDER BY position") == [(p, None) for p in range(6)]
    assert query(tmp_path, f"SELECT {columns} FROM events") == [
        ("r1", None, "gate", "gate rude", *[None] * 3, 7, "applied")
    ]
