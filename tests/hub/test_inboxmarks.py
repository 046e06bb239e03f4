"""What one consumer's inbox knows besides its records."""

from __future__ import annotations

import pytest

from capflow import limits
from capflow.buffers.spool import FullError
from capflow.hub.lanes import inbox as inbox_module
from capflow.hub.lanes.inbox import Inbox, Known
from tests.kit.frames import make_frame, make_model


def test_a_worker_whose_mark_has_no_room_is_forgotten_and_the_log_says_so_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(inbox_module, "_MARKS_MAX", 2)
    inbox = Inbox(tmp_path, "keep", 64 * limits.MIB, on_synced=lambda _: None)
    headers = [make_frame(boot=f"b{number}").header for number in range(5)]
    for header in headers:
        inbox.skip(header)
    assert [inbox.has(header) for header in headers] == [False, False, False, True, True]
    (message,) = [record.message for record in caplog.records]
    assert message.startswith("inbox keep: more than 2 workers at once")


WIDE = 900  # layers, of which each has five sites: 90 KB of a model's record


def nothing(_):
    return []


def taken(inbox):
    """Take out all there is; return the number of the last record."""
    last = 0
    while inbox.unread and (item := inbox.take(5.0)) is not None:
        last = item.number
    return last


@pytest.mark.parametrize("kind", ["alike", "different"])
def test_models_of_many_engines_leave_room_for_frames(tmp_path, kind):
    inbox = Inbox(tmp_path, "keep", 4 * limits.MIB, on_synced=lambda _: None)
    inbox.open()
    try:
        for number in range(60):
            model = make_model(WIDE, hidden=8 if kind == "alike" else 8 + number)
            inbox.put(Known(f"engine-{number}", model), 5.0)
            inbox.forget(taken(inbox), nothing, at_once=True)
            assert inbox.spool.wait_synced(inbox.spool.last, 5.0)
        model = make_model()
        inbox.put(Known("engine-1", model))
        assert inbox.tells_of("engine-1", model)
        frame = make_frame()
        inbox.put_frame(frame, 5.0)
        inbox.forget(taken(inbox), nothing, needed=lambda: {"engine-1": model}, at_once=True)
    finally:
        inbox.spool.close()
    again = Inbox(tmp_path, "keep", 4 * limits.MIB, on_synced=lambda _: None)
    again.open()
    try:
        assert again.model("engine-1") == model
        assert again.has(frame.header)
    finally:
        again.spool.close()


def test_an_inbox_that_is_full_of_models_is_emptied(tmp_path):
    inbox = Inbox(tmp_path, "keep", 2 * limits.MIB, on_synced=lambda _: None)
    inbox.open()
    for number in range(1000):
        try:
            inbox.put(Known(f"engine-{number}", make_model(WIDE, hidden=8 + number)))
        except FullError:
            break
    inbox.spool.close()  # as an earlier hub left it, that could not write a checkpoint
    inbox = Inbox(tmp_path, "keep", 2 * limits.MIB, on_synced=lambda _: None)
    inbox.open()
    try:
        with pytest.raises(FullError):
            inbox.put_frame(make_frame(), 0.0)
        inbox.forget(taken(inbox), nothing, at_once=True)
        inbox.put_frame(make_frame(), 5.0)
    finally:
        inbox.spool.close()
