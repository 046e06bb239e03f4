"""Suggestions are the names that a user may have meant, the closest first, and none where nothing is close."""

import pytest

from capflow.text.suggestion import closest, did_you_mean

NAMES = ("run", "record", "replay", "result", "plugin", "plugins", "steer", "unsteer", "queue_bytes_max")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("runn", ["run"]),
        ("RUN", ["run"]),
        ("plug", ["plugin", "plugins"]),
        ("re", ["record", "replay", "result"]),
        ("ster", ["steer", "unsteer"]),
        ("queue-bytes-max", ["queue_bytes_max"]),
        ("queue_byte_max", ["queue_bytes_max"]),
        ("zzz", []),
        ("r", []),
        ("", []),
    ],
)
def test_the_closest_names(name, expected):
    assert closest(name, NAMES) == expected


def test_the_question():
    assert did_you_mean("plug", NAMES) == "did you mean plugin or plugins?"
    assert did_you_mean("zzz", NAMES) == ""
