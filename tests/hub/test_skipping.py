"""A live consumer that skips rows: they are counted and shown, and the command that ran it ends well."""

from __future__ import annotations

import io

import pytest
from prometheus_client import generate_latest
from rich.console import Console

from capflow.capture.frame import Dropped
from capflow.capture.losses import described
from capflow.capture.result import CaptureResult
from capflow.cli.engine.job import _only_skipped
from capflow.cli.hub.running import HubRun
from capflow.hub.monitor.metrics import registry_of
from tests.kit.frames import make_finished, make_frame
from tests.kit.hubs import Recorder, address, configured, worker_link
from tests.kit.waiting import eventually

__all__ = ["address"]

FRAMES = 20


def run_held(address, policy):
    """Run a hub whose consumer is stuck while more frames come than its queue holds; return the run and its output."""
    recorder = Recorder(held=True)
    frame = make_frame([("r1", 400, 0, 400)])
    out = io.StringIO()
    made = [configured(recorder, policy, queue_bytes_max=3 * frame.nbytes)]
    with (
        HubRun(address, made, ends=True, console=Console(file=out, width=200)) as running,
        worker_link(address) as link,
    ):
        for step in range(FRAMES):
            sent = make_frame([("r1", 400, step * 400, 400)], step=step)
            assert link.send(sent.header, sent.payload) is None
        end = make_frame([], step=FRAMES, finished=[make_finished("r1", 400, 400 * FRAMES)])
        assert link.send(end.header, end.payload) is None
        eventually(lambda: running.hub.counts.frames == FRAMES + 1)
        recorder.go.set()
        eventually(lambda: "r1" in recorder.done)
    return running, out.getvalue()


def test_rows_that_a_live_consumer_skipped_are_shown_and_no_failure(address):
    running, printed = run_held(address, "skip")
    skipped = running.hub.snapshot().rows_skipped
    assert skipped > 0
    assert running.hub.snapshot().rows_lost == 0
    assert "\ncapflow_lost_rows_total 0.0\n" in generate_latest(registry_of(running.hub)).decode()
    assert running.exit_code == 0
    assert f"rows skipped by live consumers: {skipped} skipped" in printed
    assert "\nrows lost:" not in printed


def test_rows_that_a_queue_dropped_are_a_failure(address):
    running, printed = run_held(address, "drop")
    lost = running.hub.snapshot().rows_lost
    assert lost > 0
    assert running.exit_code == 1
    assert f"rows lost: {lost} consumer_queue_full" in printed
    assert "\nrows skipped" not in printed


@pytest.mark.parametrize(
    ("dropped", "error", "expected"),
    [
        ([Dropped(3, "skipped")], "", True),
        ([Dropped(3, "skipped")], "disk full; ", False),
        ([Dropped(3, "skipped"), Dropped(1, "queue_full")], "", False),
        ([], "disk full", False),
    ],
)
def test_what_a_job_says_is_missing(dropped, error, expected):
    result = CaptureResult("partial_error", error + "; ".join(map(described, dropped)), dropped=tuple(dropped))
    assert _only_skipped(result) is expected
