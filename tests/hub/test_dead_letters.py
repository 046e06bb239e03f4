"""`capflow spool dead`: what a consumer could not handle is listed, shown, replayed and dropped."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import capflow
from capflow import limits
from capflow.capture.frame import Frame
from capflow.capture.result import RequestDone
from capflow.cli import cli
from capflow.errors import RetryError, UsageError
from capflow.hub.lanes import dead_letters
from capflow.plugins.configure import ConfiguredConsumer
from capflow.plugins.consumer import Consumer
from capflow.testing.frames import row_of
from capflow.testing.hub import MemoryHub
from tests.kit.hubs import EVERYTHING
from tests.kit.waiting import eventually


class Refuses(Consumer):
    """Refuses the second frame of r1, and the end of r2."""

    name = "refuses"

    def spec(self):
        return EVERYTHING

    def on_frame(self, frame):
        if any(part.id == "r1" and part.start == 2 for part in frame.header.requests):
            raise ValueError("no\x1b[31m")

    def on_request_done(self, done):
        if done.request == "r2":
            raise ValueError("no end")


@pytest.fixture
def dead(tmp_path):
    """Return a directory with dead letters: a frame of r1 and its end; three frames of r2 and its end."""
    made = ConfiguredConsumer.of(Refuses(None), policy="spill", spool_dir=tmp_path / "spool")
    with MemoryHub(made) as hub:
        engine = hub.engine()
        for name in ("r1", "r2"):
            for step in range(3):
                engine.step([(name, 4, 2 * step, 2), ("other", 4, 6 * (name == "r2") + 2 * step, 2)])
        for name in ("r1", "r2", "other"):
            engine.finish(name)
        assert [hub.result(name).status for name in ("r1", "r2")] == ["partial_error", "error"]
    (result,) = (tmp_path / "spool").glob("*.dead")
    return result


def invoke(*arguments):
    return CliRunner().invoke(cli, ["spool", "dead", *map(str, arguments)])


def test_they_are_listed_and_shown_with_their_reasons(dead):
    status = json.loads(invoke("list", dead, "--json").stdout)
    assert [(each["method"], each["requests"]) for each in status] == [
        ("on_frame", ["r1", "other"]),
        ("on_frame", ["r1"]),
        *[("on_request_done", ["r2"])] * 4,
        ("on_frame", ["other"]),
    ]
    assert all("ValueError: no" in each["error"] or "the end of a request" in each["error"] for each in status)
    assert "\x1b[31m" not in invoke("list", dead).stdout
    shown = invoke("show", dead, status[0]["letter"]).stdout
    assert "r1: positions 2..3 at post_block" in shown
    assert "\x1b" not in shown
    assert isinstance(invoke("show", dead, 99).exception, UsageError)


def test_a_replay_gives_a_consumer_every_row_of_them_and_removes_them(dead, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    replayed = invoke("replay", dead, "--consumer", f"filesystem:root={tmp_path / 'again'},capture=all")
    assert replayed.exit_code == 0, replayed.output
    result = capflow.open(tmp_path / "again")
    site = capflow.Site.parse("post_block:1")
    rows = {capture.id: capture["post_block:1"] for capture in result}
    positions = {name: result.positions.tolist() for name, result in rows.items()}
    assert positions == {"r1": [2, 3], "r2": [0, 1, 2, 3, 4, 5], "other": [2, 3]}
    for name, result in rows.items():
        for row, position in zip(result.rows, result.positions, strict=True):
            assert (row == row_of(name, site, int(position), result.rows.shape[1])).all()
    lost = {capture.id: capture.sidecar.dropped for capture in capflow.open(tmp_path / "again")}
    assert lost == {"r1": [(16, "not_recorded")], "r2": [], "other": [(40, "not_recorded")]}
    assert json.loads(invoke("list", dead, "--json").stdout) == []


class RefusesSome(Consumer):
    """Refuses the second frame of some requests, and the ends of some, by the number of the request."""

    name = "refuses_some"

    def __init__(self, frames, ends):
        super().__init__(None)
        self.frames = frames
        self.ends = ends
        self.number = 1

    def spec(self):
        return EVERYTHING

    def on_frame(self, frame):
        if self.number in self.frames and any(part.start == 2 for part in frame.header.requests):
            raise ValueError("no")

    def on_request_done(self, done):
        number, self.number = self.number, self.number + 1
        if number in self.ends:
            raise ValueError("no end")


def dead_of(tmp_path, ids, *, frames, ends):
    """Return a directory with dead letters of requests, one after the other: with 6 positions, others with 4.

    frames: the numbers of the requests of which the second frame is refused.
    ends: the numbers of the requests of which the end is refused.
    """
    made = ConfiguredConsumer.of(RefusesSome(frames, ends), policy="spill", spool_dir=tmp_path / "spool")
    with MemoryHub(made) as hub:
        engine = hub.engine()
        for over, name in enumerate(ids, 1):
            for start in range(0, 6 if over == 1 else 4, 2):
                engine.step([(name, 4, start, 2)], incarnation=str(over))
            engine.finish(name, incarnation=str(over))
            eventually(lambda expected=over: hub.hub.lanes[0].results.total() == expected)
    (directory,) = (tmp_path / "spool").glob("*.dead")
    return directory


def frames_and_ends(directory):
    """Return "frame" for each frame of a replay, and for each end the number of rows that it announces."""
    entries = [each for each in dead_letters.entries_of(directory) if isinstance(each, Frame | RequestDone)]
    return [each.rows if isinstance(each, RequestDone) else "frame" for each in entries]


@pytest.fixture
def dead_twice(tmp_path):
    """Return a directory with dead letters of two requests of one id, each of which failed at a frame and its end."""
    return dead_of(tmp_path, ["r1", "r1"], frames={1, 2}, ends={1, 2})


def test_an_end_of_a_request_that_failed_at_a_frame_and_at_its_end_comes_after_all_of_its_rows(dead_twice):
    assert frames_and_ends(dead_twice) == [*["frame"] * 3, 4 * 6, *["frame"] * 2, 4 * 4]


def test_letters_of_a_request_that_failed_at_a_frame_and_at_its_end_leave(dead_twice, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert invoke("drop", dead_twice, "--yes", "--through", 4).exit_code == 0
    replayed = invoke("replay", dead_twice, "--consumer", f"filesystem:root={tmp_path / 'again'},capture=all")
    assert replayed.exit_code == 0, replayed.output
    assert json.loads(invoke("list", dead_twice, "--json").stdout) == []
    (capture,) = capflow.open(tmp_path / "again")
    assert capture["post_block:1"].positions.tolist() == [0, 1, 2, 3]


def test_a_replay_of_many_requests_has_one_open_at_once(tmp_path):
    directory = dead_of(tmp_path, ["r1", "r2", "r3"], frames={1, 2, 3}, ends=())
    assert frames_and_ends(directory) == ["frame", 4 * 6, "frame", 4 * 4, "frame", 4 * 4]


def test_a_replay_keeps_requests_of_one_id_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    directory = dead_of(tmp_path, ["r1", "r1"], frames={1}, ends={2})
    assert frames_and_ends(directory) == ["frame", 4 * 6, *["frame"] * 2, 4 * 4]
    options = f"root={tmp_path / 'again'},capture=all,on_collision=suffix"
    replayed = invoke("replay", directory, "--consumer", f"filesystem:{options}")
    assert replayed.exit_code == 0, replayed.output
    assert json.loads(invoke("list", directory, "--json").stdout) == []
    captures = list(capflow.open(tmp_path / "again"))
    assert [capture["post_block:1"].positions.tolist() for capture in captures] == [[2, 3], [0, 1, 2, 3]]
    assert [capture.sidecar.dropped for capture in captures] == [[(16, "not_recorded")], []]


def test_a_replay_says_why_a_consumer_did_not_keep_a_request(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    directory = dead_of(tmp_path, ["r1", "r1"], frames={1}, ends={2})
    options = f"root={tmp_path / 'again'},capture=all,on_collision=error"
    replayed = invoke("replay", directory, "--consumer", f"filesystem:{options}")
    assert replayed.exit_code == 1
    assert f"request r1: {tmp_path / 'again' / 'r1'} exists already; set on_collision to" in replayed.output
    assert len(json.loads(invoke("list", directory, "--json").stdout)) == 5


def test_what_a_replay_fails_at_stays(dead, tmp_path):
    (tmp_path / "taken").write_text("a file")
    refused = invoke("replay", dead, "--consumer", f"filesystem:root={tmp_path / 'taken'}")
    assert refused.exit_code != 0
    assert len(json.loads(invoke("list", dead, "--json").stdout)) == 7


def test_they_are_dropped_only_when_that_is_wanted(dead):
    assert invoke("drop", dead).exit_code != 0
    assert "removed 2" in invoke("drop", dead, "--through", 2, "--yes").stdout
    assert "removed 5" in invoke("drop", dead, "--yes").stdout
    assert invoke("list", dead, "--json").stdout.strip() == "[]"


def test_what_is_no_dead_letter_is_refused(dead, tmp_path):
    refused = invoke("list", tmp_path)
    assert refused.exit_code != 0
    assert "Traceback" not in refused.output


def test_a_letter_for_which_the_disk_takes_long_is_there_once(dead, tmp_path, monkeypatch):
    letter = next(result.letter for result in dead_letters.read(dead) if result.frame is None)
    monkeypatch.setattr(dead_letters, "_SYNC_S", 0.0)
    letters = dead_letters.DeadLetters(tmp_path / "slow.dead", limits.DEAD_BYTES_DEFAULT)
    tries = 0
    while True:
        tries += 1
        try:
            assert letters.put(letter)
        except RetryError:
            continue
        break
    letters.close()
    assert tries > 1
    assert letters.letters == len(list(dead_letters.read(tmp_path / "slow.dead"))) == 1
