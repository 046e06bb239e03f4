"""What is lost is told with its exact place: the ledger of it, and every way on which rows can be lost."""

import logging
import random

import msgspec
import pytest

from capflow import limits
from capflow.capture.frame import Dropped, Gap
from capflow.capture.losses import Losses, LossLog, described, lessened, narrowed, note_frame
from capflow.capture.positions import Positions
from capflow.capture.site import Site
from capflow.capture.spec import CaptureSpec
from capflow.hub.requests.share import WantedAt
from capflow.transport.client import Client
from tests.kit.exchanges import Desk
from tests.kit.frames import make_finished, make_frame, make_model
from tests.kit.hubs import Recorder, address, configured, running_hub, worker_link
from tests.kit.waiting import eventually

__all__ = ["address"]

FIRST, SECOND = Site(0, "post_block"), Site(3, "post_block")
BOTH = ("post_block:0", "post_block:3")


def places(dropped):
    """Return every row that gaps name, `(site, position)`, none twice."""
    rows = [
        (site, n) for each in dropped for gap in each.gaps for site in gap.sites for n in range(gap.start, gap.stop)
    ]
    assert len(rows) == len(set(rows))
    return set(rows)


def test_positions_that_follow_each_other_are_one_gap():
    lost = Losses()
    lost.add("queue_full", (FIRST, SECOND), 4, 8)
    for position in range(8, 20):
        lost.add("queue_full", (FIRST, SECOND), position, position + 1)
    lost.add("queue_full", (FIRST, SECOND), 30, 31)
    assert lost.dropped == (Dropped(34, "queue_full", (Gap(BOTH, 4, 20), Gap(BOTH, 30, 31))),)


def test_random_losses_are_told_to_the_row():
    rng = random.Random(5)
    for _ in range(200):
        lost, expected = Losses(), {}
        position = 0
        for _ in range(rng.randrange(1, 40)):
            length = rng.randrange(1, 6)
            if rng.random() < 0.6:
                sites = rng.choice([(FIRST,), (SECOND,), (FIRST, SECOND)])
                reason = rng.choice(["queue_full", "hub_gone"])
                lost.add(reason, sites, position, position + length)
                expected.setdefault(reason, set()).update(
                    (str(site), n) for site in sites for n in range(position, position + length)
                )
            position += length
        assert {each.reason: places([each]) for each in lost.dropped} == expected
        assert {reason: len(rows) for reason, rows in expected.items()} == lost.rows
        again = Losses()
        again.update(msgspec.msgpack.decode(msgspec.msgpack.encode(lost.dropped), type=tuple[Dropped, ...]))
        assert again.dropped == lost.dropped


def test_gaps_beyond_the_bound_are_counted():
    lost = Losses()
    for n in range(limits.GAPS_MAX + 10):
        lost.add("queue_full", (FIRST,), 2 * n, 2 * n + 1)
    (dropped,) = lost.dropped
    assert (dropped.rows, len(dropped.gaps)) == (limits.GAPS_MAX + 10, limits.GAPS_MAX)
    lost.add("queue_full", (FIRST,), 2 * limits.GAPS_MAX - 1, 2 * limits.GAPS_MAX)
    assert lost.rows["queue_full"] == limits.GAPS_MAX + 11


def test_rows_that_turn_out_to_be_lost_for_another_reason_keep_their_places_when_they_are_all():
    lost = Losses()
    lost.add("earlier_hub", (FIRST,), 0, 4)
    lost.blame("spool_damaged", 4, instead_of="earlier_hub")
    assert lost.dropped == (Dropped(4, "spool_damaged", (Gap(("post_block:0",), 0, 4),)),)
    lost.blame("earlier_hub", 3, instead_of="spool_damaged")
    assert lost.dropped == (Dropped(3, "earlier_hub"), Dropped(1, "spool_damaged"))


@pytest.mark.parametrize(
    ("gaps", "rows", "text"),
    [
        ((), 5, "5 rows lost: queue_full"),
        ((Gap(BOTH, 5, 6),), 2, "2 rows lost: queue_full, at post_block:0 post_block:3 position 5"),
        (
            (Gap(("post_block:0", "post_block:1", "mlp_in:7"), 0, 4),),
            14,
            "14 rows lost: queue_full, at post_block:0-1 mlp_in:7 positions 0..3, and 2 rows elsewhere",
        ),
    ],
)
def test_a_description_names_the_places(gaps, rows, text):
    assert described(Dropped(rows, "queue_full", gaps)) == text


def test_an_end_says_what_was_lost_on_the_way():
    lost = {}
    note_frame(lost, make_frame([("r1", 4, 0, 4), ("r2", 4, 2, 1)]).header, "spool_damaged")
    end = make_frame([], finished=[make_finished("r1", rows=10, dropped=(Dropped(3, "queue_full"),))]).header
    (lessened_end,) = lessened(end, lost).finished
    assert lessened_end.rows == 6
    assert lessened_end.dropped == (
        Dropped(3, "queue_full"),
        Dropped(4, "spool_damaged", (Gap(("post_block:0",), 0, 4),)),
    )
    assert set(lost) == {"r2"}


def test_an_end_that_names_fewer_rows_than_were_lost_has_none():
    lost = {}
    note_frame(lost, make_frame([("r1", 4, 0, 4)]).header, "too_large")
    (end,) = lessened(make_frame([], finished=[make_finished("r1", rows=3)]).header, lost).finished
    assert end.rows == 0
    assert [(each.reason, each.rows) for each in end.dropped] == [("too_large", 4)]


def test_a_consumer_is_told_of_lost_rows_that_it_wants_and_of_those_whose_place_is_not_known():
    every, few = Positions.ALL.at(4), Positions.parse({"last": 1}).at(4)
    gaps = (Gap(("post_block:0", "post_block:1"), 2, 6), Gap(("mlp_in:0",), 0, 2))
    lost = (Dropped(13, "queue_full", gaps), Dropped(2, "earlier_hub"), Dropped(2, "spool_full", gaps[1:]))
    assert narrowed(lost, {"post_block:0": every, "post_block:1": every, "mlp_in:0": every}.get) == lost
    assert narrowed(lost, {"post_block:1": every}.get) == (
        Dropped(3 + 4, "queue_full", (Gap(("post_block:1",), 2, 6),)),
        Dropped(2, "earlier_hub"),
    )
    assert narrowed(lost[:1], {"post_block:0": few}.get) == (Dropped(4, "queue_full", (Gap(("post_block:0",), 2, 6),)),)
    assert narrowed(lost[2:], {"post_block:0": every}.get) == ()


def test_the_result_of_a_consumer_names_no_rows_at_sites_of_others():
    part = Recorder("part", spec=CaptureSpec({"post_block": [0]}))
    desk = Desk(part, Recorder("whole"))
    desk.hello(b"w")
    gap = Dropped(2, "queue_full", (Gap(("post_block:3",), 4, 6),))
    end = make_finished("r1", computed_length=6, rows=8, dropped=(gap,))
    desk.say(b"w", make_frame([("r1", 4, 0, 4)], [FIRST, SECOND], finished=[end]))
    desk.handle_all()
    (request,) = desk.exchange.index.named("r1")
    part_result, whole_result = request.results
    assert (part_result.status, part_result.dropped) == ("ok", ())
    assert (whole_result.status, whole_result.dropped) == ("partial_error", (gap,))


def test_what_a_consumer_lost_is_found_without_a_look_at_sites_where_nothing_was(monkeypatch):
    desk = Desk(Recorder())
    model = make_model(limits.LAYERS_MAX, hidden=1)
    desk.hello(b"w", model=model)
    gap = Dropped(2, "queue_full", (Gap(("post_block:3",), 4, 6),))
    ends = [make_finished(f"r{number}", computed_length=6, rows=9, dropped=(gap,)) for number in range(20)]
    desk.say(b"w", make_frame([(end.id, 4, 0, 4) for end in ends], [FIRST], hidden=1))
    looked, get = [], WantedAt.get
    monkeypatch.setattr(WantedAt, "get", lambda self, site: looked.append(site) or get(self, site))
    desk.say(b"w", make_frame([], seq=2, finished=ends))
    desk.handle_all()
    assert looked == [SECOND] * len(looked)
    assert 20 <= len(looked) <= 40  # for what the consumer is told, and for its result


def test_a_consumer_that_drops_is_told_each_row_that_it_did_not_get(address, caplog):
    """What it was given and what its result names are all there was, and none is in both."""
    slow = Recorder("slow", held=True)
    frame = make_frame()
    with (
        running_hub(address, configured(slow, "drop", frame.nbytes * 2)),
        worker_link(address) as link,
        Client(address) as client,
        caplog.at_level(logging.WARNING),
    ):
        for step in range(40):
            made = make_frame([("r1", 4, step * 4, 4)], [FIRST, SECOND] if step % 7 else [FIRST], step=step)
            assert link.send(made.header, made.payload) is None
            if not step:
                assert slow.waiting.wait(20)
        rows = sum(8 if step % 7 else 4 for step in range(40))
        end = make_frame([], finished=[make_finished(computed_length=160, rows=rows)])
        link.send(end.header, end.payload)
        eventually(lambda: link.counters["unacked_frames"] == 0)
        slow.go.set()
        result = client.results(["r1"], timeout=20)["r1"]["slow"]
    given = {(str(site), position) for _, site, position in slow.positions}
    lost = places(result.dropped)
    assert given
    assert lost
    assert not given & lost
    assert given | lost == {(str(s), n) for n in range(160) for s in ((FIRST, SECOND) if n // 4 % 7 else (FIRST,))}
    assert result.error == "; ".join(map(described, result.dropped))
    (record,) = [record for record in caplog.records if getattr(record, "event", "") == "rows_lost"]
    assert (record.request, record.consumer) == ("r1", "slow")
    assert msgspec.convert(record.dropped, tuple[Dropped, ...]) == result.dropped


def test_what_an_earlier_hub_had_is_everything_before_what_came(address):
    consumer = Recorder()
    with running_hub(address, consumer), worker_link(address) as link, Client(address) as client:
        made = make_frame([("r1", 4, 6, 1)], [FIRST, SECOND], finished=[make_finished(computed_length=7, rows=14)])
        link.send(made.header, made.payload)
        result = client.results(["r1"], timeout=20)["r1"]["recorder"]
        assert result.dropped == (Dropped(12, "earlier_hub", (Gap(BOTH, 0, 6),)),)


def test_the_log_says_a_few_in_a_second_and_how_many_it_left_out(caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("capflow.capture.losses.time.monotonic", lambda: now[0])
    log = LossLog(logging.getLogger("capflow.test"), "worker 0", engine="e")
    with caplog.at_level(logging.INFO):
        for n in range(limits.LOSSES_LOGGED_MAX + 5):
            log.tell(f"r{n}", [Dropped(1, "queue_full")])
        log.tell("whole", [])
        assert len(caplog.records) == limits.LOSSES_LOGGED_MAX
        now[0] += 1
        log.tell("later", [Dropped(2, "skipped", (Gap(("post_block:0",), 3, 5),))])
    last = caplog.records[-1]
    assert last.getMessage() == (
        "worker 0: request later: 2 rows lost: skipped, at post_block:0 positions 3..4 "
        "(5 earlier requests were left out)"
    )
    assert last.levelno == logging.INFO  # it is what `skip` is for
    assert (last.engine, msgspec.json.decode(msgspec.json.encode(last.dropped))) == (
        "e",
        [{"rows": 2, "reason": "skipped", "gaps": [{"sites": ["post_block:0"], "start": 3, "stop": 5}]}],
    )
