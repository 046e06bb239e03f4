"""A file that is written whole: it is there as it was, or as it is to be."""

from __future__ import annotations

import stat

import pytest

from capflow.errors import CapflowError
from capflow.files import replacing, whole_file, write_whole


def test_it_takes_the_place_of_what_was_there_and_is_private(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o644)
    with replacing(path) as stream:
        stream.write(b"new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_there_stays_when_the_writer_fails(tmp_path):
    path = tmp_path / "file"
    write_whole(path, b"old")
    with pytest.raises(TypeError), replacing(path) as stream:
        stream.writelines([b"half", None])
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_a_user_named_is_refused_in_one_line(tmp_path):
    missing = tmp_path / "missing" / "x"
    refusal = r"x cannot be written: got No such file .* expected a directory that can be"
    with pytest.raises(CapflowError, match=refusal), whole_file(missing) as stream:
        stream.write(b"")
    with pytest.raises(OSError, match="No such file"):
        write_whole(missing, b"")


def test_the_longest_name_that_a_file_can_have(tmp_path):
    name = "ä" * 127
    write_whole(tmp_path / name, b"long")
    assert (tmp_path / name).read_bytes() == b"long"
