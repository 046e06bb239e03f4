"""The events of a stream: the same whether they come whole, byte by byte or cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capflow.errors import RemoteProtocolError
from capflow_dashboard import limits
from capflow_dashboard.again.events import EventReader

CASES = {
    "one line": (b"data: a\n\n", ["a"]),
    "without a space": (b"data:a\n\n", ["a"]),
    "two spaces": (b"data:  a\n\n", [" a"]),
    "several lines": (b"data: a\ndata: b\ndata\n\n", ["a\nb\n"]),
    "carriage returns and line feeds": (b"data: a\r\n\r\ndata: b\r\n\r\n", ["a", "b"]),
    "carriage returns": (b"data: a\r\rdata: b\r\r", ["a", "b"]),
    "mixed": (b"data: a\r\n\ndata: b\n\r", ["a", "b"]),
    "UTF-8": ("data: é🙂\n\n".encode(), ["é🙂"]),
    "a byte order mark": (b"\xef\xbb\xbfdata: a\n\n", ["a"]),
    "comments and other fields": (b": ping\n\nevent: x\nid: 1\nretry: 5\ndata: a\n\nevent: y\n\n", ["a"]),
    "not whole": (b"data: a\n\ndata: b\n", ["a"]),
    "a name that only begins so": (b"database: a\n\n", []),
    "an empty one": (b"data\n\n", [""]),
}


@pytest.mark.parametrize("text", CASES)
def test_events_are_the_same_however_they_are_cut(text):
    sent, events = CASES[text]
    assert EventReader().feed(sent) == events
    for size in (1, 2, 3):
        reader = EventReader()
        assert [one for at in range(0, len(sent), size) for one in reader.feed(sent[at : at + size])] == events
    for cut in range(len(sent) + 1):
        reader = EventReader()
        assert reader.feed(sent[:cut]) + reader.feed(sent[cut:]) == events


@pytest.mark.parametrize("sent", [b"x" * 1000, b"data: " + b"x" * 100 + b"\n", b"data\n", b"data: \r\n"])
def test_an_event_without_an_end_is_refused_and_not_kept(sent):
    reader = EventReader()

    def feed():
        for _ in range(limits.AGAIN_EVENT_BYTES_MAX + 1):
            reader.feed(sent)

    with pytest.raises(RemoteProtocolError, match="got a longer event, expected events of at most 262144 bytes"):
        feed()


def test_what_is_no_utf_8_is_refused():
    with pytest.raises(RemoteProtocolError, match=r"the server's stream: got .*utf-8.*, expected UTF-8"):
        EventReader().feed(b"data: \xff\n\n")


@given(st.lists(st.binary(max_size=50), max_size=30))
def test_no_bytes_break_it(parts):
    reader = EventReader()
    try:
        for part in parts:
            for event in reader.feed(part):
                assert isinstance(event, str)
    except RemoteProtocolError:
        pass
