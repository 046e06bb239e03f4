"""The one form of an error message."""

import pytest

from capflow.errors import explain


@pytest.mark.parametrize(
    ("got", "shown"),
    [("", "''"), ("  ", "'  '"), ("\n", r"'\n'"), ("x", "x"), (0, "0"), ([], "[]"), (b"", "b''")],
)
def test_an_error_shows_what_came_also_when_it_is_blank(got, shown):
    assert explain("--key", got=got, expected="a name") == f"--key: got {shown}, expected a name"


def test_an_error_leaves_out_what_is_not_given():
    assert explain("x") == "x"
    assert explain("", got=0, expected="1..2") == "got 0, expected 1..2"
    assert explain("x", do="leave it out") == "x; leave it out"
