"""What one consumer's inbox knows besides its records."""

from __future__ import annotations

from frames import make_frame

from capflow import inbox as inbox_module
from capflow import limits
from capflow.inbox import Inbox


def test_a_worker_whose_mark_has_no_room_is_forgotten_and_the_log_says_so_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(inbox_module, "_MARKS_MAX", 2)
    inbox = Inbox(tmp_path, "keep", 64 * limits.MIB, on_synced=lambda _: None)
    headers = [make_frame(boot=f"b{number}").header for number in range(5)]
    for header in headers:
        inbox.skip(header)
    assert [inbox.has(header) for header in headers] == [False, False, False, True, True]
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("inbox keep: more than 2 workers at once")
