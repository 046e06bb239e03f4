from __future__ import annotations

from capflow.buffers.newest import keep_newest


def test_the_oldest_go_and_no_more_than_must():
    entries = {"a": 1, "b": 2, "c": 3}
    entries["a"] = entries.pop("a")
    assert keep_newest(entries, 3) == 0
    assert keep_newest(entries, 1) == 2
    assert entries == {"a": 1}
    assert keep_newest(entries, 0) == 1
    assert keep_newest(entries, 0) == 0
