"""`capflow spool`: what it shows, its exit codes, and what it refuses."""

from __future__ import annotations

import json

import pytest

from capflow.buffers.spool import Spool, report
from capflow.buffers.spool.survey import survey
from tests.kit.spool_command import capflow_spool
from tests.kit.waiting import eventually


@pytest.fixture
def filled(tmp_path):
    """A spool of ten records; three are acknowledged."""
    with Spool(tmp_path / "s", segment_bytes=3000) as spool:
        for number in range(1, 11):
            spool.append(b"head", b"%d" % number * 1000)
        for _ in range(3):
            record = spool.read()
        spool.acknowledge(record.id)
    return tmp_path / "s"


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_spool_is_shown_and_left_as_it_is(filled):
    before = files(filled)
    done = capflow_spool("inspect", filled, "--json")
    listed = json.loads(done.stdout)
    assert (listed["records"], listed["acknowledged"], listed["last"], listed["lost"]) == (7, 3, 10, [])
    assert (listed["in_use"], listed["void_bytes"]) == (False, 0)
    assert sum(segment["records"] for segment in listed["segments"]) == 7
    assert listed["bytes"] == sum(len(data) for name, data in before.items() if name.endswith(".spool"))
    assert "records 7 left, 3 of 10 done" in capflow_spool("inspect", filled).stdout
    assert capflow_spool("verify", filled).returncode == 0
    assert files(filled) == before


def test_a_damaged_record_is_named(filled):
    segment = sorted(filled.glob("*.spool"))[1]
    data = bytearray(segment.read_bytes())
    place = data.index(b"555555")
    data[place] ^= 1
    segment.write_bytes(data)
    done = capflow_spool("verify", filled, "--json")
    listed = json.loads(done.stdout)
    assert (done.returncode, listed["lost"]) == (1, [[5, 5]])
    assert "lost 5-5" in capflow_spool("verify", filled).stdout
    assert capflow_spool("inspect", filled).returncode == 0
    with Spool(filled) as spool:
        assert [spool.read().id for _ in range(7)] == list(range(4, 11))
        assert spool.records_lost == 1
        spool.acknowledge(10)
    listed = json.loads(capflow_spool("verify", filled, "--json").stdout)
    assert (listed["lost"], listed["set_aside"]) == ([], [segment.name + ".bad"])


def test_records_that_are_gone_are_lost(filled):
    before, gone, after = json.loads(capflow_spool("inspect", filled, "--json").stdout)["segments"][-3:]
    (filled / gone["name"]).unlink()
    done = capflow_spool("verify", filled, "--json")
    assert (done.returncode, json.loads(done.stdout)["lost"]) == (1, [[gone["first"], after["first"] - 1]])
    assert before["records"]


def test_a_spool_is_emptied_only_when_that_is_wanted(filled):
    (filled / "notes.txt").write_text("mine")
    done = capflow_spool("purge", filled)
    assert done.returncode == 2
    assert "got 7 records that were not delivered; --yes removes them" in done.stderr
    done = capflow_spool("purge", filled, "--yes")
    assert (done.returncode, done.stdout.split()[0]) == (0, "removed")
    assert sorted(files(filled)) == ["lock", "notes.txt"]
    with Spool(filled) as spool:
        assert spool.read() is None


def test_a_spool_in_use_is_read_and_not_emptied(filled):
    with Spool(filled) as spool:
        spool.append(b"", b"more")
        assert spool.wait_synced(11, 20)
        listed = json.loads(capflow_spool("inspect", filled, "--json").stdout)
        assert (listed["in_use"], listed["records"]) == (True, 8)
        done = capflow_spool("purge", filled, "--yes")
        assert (done.returncode, "is in use; stop the process" in done.stderr) == (1, True)
        assert [spool.read().id for _ in range(8)] == list(range(4, 12))


def test_damage_in_a_spool_in_use_is_named_and_what_its_writer_does_meanwhile_is_not(filled, monkeypatch):
    with Spool(filled) as spool:
        segment = sorted(filled.glob("*.spool"))[1]
        data = bytearray(segment.read_bytes())
        data[data.index(b"555555")] ^= 1
        segment.write_bytes(data)
        done = capflow_spool("verify", filled, "--json")
        listed = json.loads(done.stdout)
        assert (done.returncode, listed["in_use"], listed["lost"]) == (1, True, [[5, 5]])

        def surveyed(files, directory):
            listed = survey(files, directory)
            # The consumer continues, and the segment that it has finished is removed.
            if spool.acknowledged_through == 3:
                assert [spool.read().id for _ in range(5)] == [4, 5, 6, 7, 8]
                spool.acknowledge(8)
                assert spool.wait_acknowledged(8, 20)
                eventually(lambda: not list(filled.glob(listed.segments[0].path.name)))
            return listed

        monkeypatch.setattr(report, "survey", surveyed)
        assert report.inspect(filled, verify=True)["lost"] == []


@pytest.mark.parametrize(("path", "message"), [("s", "got no directory"), (".", "got a directory without a spool")])
def test_what_is_no_spool_is_refused(tmp_path, path, message):
    for command in ("inspect", "verify", "purge"):
        done = capflow_spool(command, tmp_path / path)
        assert (done.returncode, message in done.stderr) == (2, True)
