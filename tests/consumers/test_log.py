from __future__ import annotations

import logging

import numpy as np
import pytest

from capflow.capture.frame import Dropped
from capflow.capture.result import RequestDone
from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.steering.action import Answered
from capflow_consumers.log import LogConfig, LogConsumer
from tests.kit.checked import checked
from tests.kit.frames import make_frame, row_of

SITES = (Site(0, "post_block"), Site(1, "post_block"))


def done(request: str, dropped: tuple[Dropped, ...] = ()) -> RequestDone:
    return RequestDone("engine-1", request, "stop", 3, 4, 8, 8, dropped)


def test_each_finished_request_is_one_line(caplog):
    consumer = LogConsumer(LogConfig())
    consumer.check()
    caplog.set_level(logging.INFO)
    consumer.on_frame(make_frame([("r1", 3, 0, 3), ("r2", 3, 0, 3)], SITES, dtype="bfloat16"))
    consumer.on_frame(make_frame([("r1", 3, 3, 1)], SITES, dtype="bfloat16"))
    result = consumer.on_request_done(done("r1"))
    rows = [row_of("r1", site, p, dtype="bfloat16").astype(np.float64) for site in SITES for p in range(4)]
    mean = np.mean([np.linalg.norm(row) for row in rows])
    assert result.status == "ok"
    assert result.payload == {"rows": 8, "sites": 2, "mean_norm": pytest.approx(mean, rel=1e-6)}
    assert [record.getMessage() for record in caplog.records] == [f"r1: 8 rows at 2 sites, mean norm {mean:.4g}"]


def test_one_of_every_n_requests_is_logged_and_each_is_answered(caplog):
    consumer = LogConsumer(LogConfig(every=2))
    caplog.set_level(logging.INFO)
    for n in range(5):
        consumer.on_frame(make_frame([(f"r{n}", 3, 0, 3)]))
        assert consumer.on_request_done(done(f"r{n}")).payload["rows"] == 3
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["r1", "r3"]
    assert not consumer.seen


def test_lost_rows_are_a_partial_error():
    assert LogConsumer(LogConfig()).on_request_done(done("r1", (Dropped(3, "queue_full"),))).status == "partial_error"


def test_options_are_checked():
    with pytest.raises(UsageError, match=r"consumers\.log\.every: got 0, expected 1 or more"):
        LogConsumer(LogConfig(every=0)).check()
    with pytest.raises(UsageError, match=r"consumers\.log\.positions: got x, expected one of"):
        checked(LogConsumer(LogConfig(positions="x")))


def test_each_event_of_steering_is_a_line_unless_they_are_off(caplog):
    caplog.set_level(logging.INFO)
    event = Answered("i", "e", "r1", "gate", SITES[:1], "gate rude", 1, 7, "", 41, 1.5, 1.0, "rude", "b-1")
    LogConsumer(LogConfig(events=False)).on_action(event)
    LogConsumer(LogConfig()).on_action(event)
    (record,) = caplog.records
    assert record.getMessage() == "r1: gate by gate rude at position 41, score 1.5"
    caplog.clear()
    gain = Answered("i", "e", "r1", "gain", (), "client", 1, 7, "", 41, target="module calm", scale=0.5)
    LogConsumer(LogConfig()).on_action(gain)
    assert caplog.messages == ["r1: gain of module calm to 0.5 by client at position 41"]
    about = (record.event, record.position, record.score, record.threshold, record.label, record.sites)
    assert about == ("steering", 41, 1.5, 1.0, "rude", ["post_block:0"])
