"""How errors of the file system below a data set are judged."""

from __future__ import annotations

import errno
import os

import pytest

from capflow.errors import RetryError, kind_of
from capflow_consumers.dataset import disk
from tests.kit.stored import opened

GONE = (errno.ENOENT, errno.EACCES, errno.ENOTCONN)


def kind(root, code):
    return kind_of(disk.judged(root, OSError(code, os.strerror(code))))


@pytest.mark.parametrize("code", [*GONE, errno.EROFS, errno.ENOSPC])
def test_an_error_while_the_root_is_away_is_tried_again(tmp_path, code):
    assert kind(tmp_path / "root", code) == "retry"


@pytest.mark.parametrize("code", GONE)
def test_an_error_below_a_root_that_is_there_has_the_data_set_opened_again(tmp_path, code):
    (tmp_path / disk.LOCK).touch()
    assert kind(tmp_path, code) == "fatal"


def test_an_error_of_one_request_is_that_requests(tmp_path):
    assert kind(tmp_path, errno.ENAMETOOLONG) == "poison"


def test_a_consumer_that_is_opened_again_makes_no_root_in_the_place_of_one_that_is_away(tmp_path):
    root = tmp_path / "root"
    consumer = opened(root)
    consumer.close()
    root.rename(tmp_path / "elsewhere")
    with pytest.raises(RetryError, match=r"root cannot be written: got No such file or directory, .*; mount it, or"):
        consumer.open(consumer._context)
    assert not root.exists()
    (tmp_path / "elsewhere").rename(root)
    consumer.open(consumer._context)
    consumer.close()
