"""`capflow spool` of an inbox: which requests in it are split between inboxes, and which are incomplete."""

from __future__ import annotations

import json

import pytest

from capflow.capture.frame import Rank, RequestRows
from capflow.hub.lanes.inbox import Inbox, Known, RequestDoneMark, Unkept
from tests.kit.frames import make_finished, make_frame, make_model
from tests.kit.spool_command import capflow_spool

NAME = "filesystem-0123456789abcdef"
ROWS = 4


@pytest.fixture
def inbox(tmp_path):
    """Return what opens an inbox, NAME or the one beside it, into which frames are put."""
    opened = []

    def opens(number=1):
        made = Inbox(tmp_path, NAME, 1 << 22, on_synced=lambda _: None)
        made.open_at(made.place(number))
        made.put(Known("engine-1", make_model()))
        opened.append(made)
        return made

    yield opens
    for made in opened:
        made.spool.close()


def put(inbox, step, request=None, *, ends=None, sent=0):
    """Put a frame with rows of a request, with the end of one, or with both; return its number."""
    parts = [(request, ROWS, 0, ROWS)] if request else []
    finished = [make_finished(ends, ROWS, ROWS, rows=sent)] if ends else []
    return inbox.put_frame(make_frame(parts, step=step, finished=finished), 1.0)


def shown(inbox, command="inspect"):
    inbox.spool.close()
    done = capflow_spool(command, inbox.directory, "--json")
    return json.loads(done.stdout)["requests"], done.returncode


def rows_of_a_frame():
    header = make_frame([("r", ROWS, 0, ROWS)]).header
    return sum(len(block.sites) * block.rows for block in header.blocks)


def test_a_whole_inbox_has_no_split_and_no_incomplete_requests(inbox):
    one = inbox()
    last = put(one, 1, "done", ends="done", sent=rows_of_a_frame())
    one.put(RequestDoneMark("engine-1", "done", last))
    put(one, 2, "whole", ends="whole", sent=rows_of_a_frame())
    put(one, 3, "runs")
    requests, code = shown(one, "verify")
    assert requests == {"waiting": 2, "split": 0, "incomplete": 0, "named": [], "unnamed": 0}
    assert code == 0


def test_requests_in_two_inboxes_are_split_and_not_incomplete(inbox):
    one, two = inbox(), inbox(2)
    put(one, 1, "split")
    put(one, 2, "own")
    put(two, 3, ends="split", sent=rows_of_a_frame())
    two.spool.close()
    requests, code = shown(one, "verify")
    (row,) = requests["named"]
    assert (requests["waiting"], requests["split"], requests["incomplete"], code) == (2, 1, 0, 0)
    assert (row["request"], row["rows"], row["also_in"]) == ("split", rows_of_a_frame(), [f"{NAME}.2"])
    assert "split of engine-1: " in capflow_spool("inspect", two.directory).stdout


def test_an_end_without_its_frames_is_an_incomplete_request(inbox):
    one = inbox()
    put(one, 1, ends="gone", sent=rows_of_a_frame())
    requests, code = shown(one, "verify")
    (row,) = requests["named"]
    assert (requests["incomplete"], code) == (1, 1)
    assert (row["request"], row["rows"], row["rows_missing"]) == ("gone", 0, rows_of_a_frame())
    text = capflow_spool("inspect", one.directory).stdout
    assert "requests 1 waiting, 0 split, 1 incomplete" in text
    assert f"gone of engine-1: 0 rows, {rows_of_a_frame()} missing" in text


def test_a_request_whose_first_frames_were_forgotten_is_incomplete(inbox):
    one = inbox()
    number = put(one, 1, "long\x1b[2J")
    while one.take(0.0) is not None:
        pass
    unkept = Unkept("engine-1", Rank(0, 0, 0), RequestRows("long\x1b[2J", ROWS, 0, ()), {0: 7})
    one.forget(number, lambda _: [unkept], at_once=True)
    assert one.spool.wait_synced(one.spool.last, 10)
    requests, code = shown(one, "verify")
    assert (requests["incomplete"], requests["named"][0]["rows_missing"], code) == (1, 7, 1)
    assert "\x1b" not in capflow_spool("inspect", one.directory).stdout


def test_the_names_are_bounded(inbox):
    one = inbox()
    for number in range(30):
        put(one, number + 1, ends=f"r{number:02}", sent=1)
    requests, _ = shown(one)
    assert (requests["incomplete"], len(requests["named"]), requests["unnamed"]) == (30, 20, 10)
    assert "and 10 more" in capflow_spool("inspect", one.directory).stdout


def test_a_spool_that_is_no_inbox_has_no_requests(tmp_path, inbox):
    one = inbox()
    one.spool.close()
    other = one.directory.rename(tmp_path / "outbox")
    assert json.loads(capflow_spool("inspect", other, "--json").stdout)["requests"] is None
