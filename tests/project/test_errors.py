"""The one form of an error message."""

import errno

import pytest

from capflow.errors import CapflowError, FatalError, RetryError, UsageError, explain, kind_of


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


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RetryError("the database is locked"), "retry"),
        (OSError(errno.ENOSPC, "no space"), "retry"),
        (OSError(errno.EMFILE, "no descriptors"), "retry"),
        (BlockingIOError(errno.EAGAIN, "again"), "retry"),
        (MemoryError(), "retry"),
        (FileNotFoundError(errno.ENOENT, "gone"), "poison"),
        (OSError("no errno"), "poison"),
        (CapflowError("no"), "poison"),
        (UsageError("no"), "poison"),
        (ValueError("no"), "poison"),
        (RecursionError(), "poison"),
        (FatalError("broken"), "fatal"),
        (SystemExit(1), "fatal"),
        (KeyboardInterrupt(), "fatal"),
        (GeneratorExit(), "fatal"),
    ],
)
def test_every_error_of_a_consumer_is_of_one_kind(error, kind):
    assert kind_of(error) == kind
