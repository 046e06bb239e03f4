"""Files of earlier versions stay readable: each specimen opens with the public commands and holds its rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile

import msgspec
import numpy as np
import pytest

import capflow
from capflow.testing import MemoryHub, assert_rows, make_model, row_of, token_of
from tests.kit.captured import run
from tests.kit.sources import ROOT
from tests.kit.waiting import eventually

SPECIMENS = ROOT / "tests" / "specimens"
SITES = (capflow.Site(1, "post_block"), capflow.Site(3, "mlp_out"))
LENGTHS = {"a": 6, "b/c": 3}
LAYOUTS = ("per_file", "packed", "sharded", "sharded_zstd")
LIMIT_S = 60


@pytest.fixture
def specimen(tmp_path, monkeypatch):
    """Unpack a specimen into the test's directory; return that."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def unpack(name):
        with tarfile.open(SPECIMENS / f"{name}.tar.xz") as archive:
            archive.extractall(tmp_path, filter="data")
        return tmp_path

    return unpack


def command(*arguments):
    """Return what a command prints; it succeeds."""
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def query(path, sql):
    return [json.loads(line) for line in command("query", sql, "--path", path, "--format", "jsonl").splitlines()]


def assert_whole(capture, length, *, start=0):
    """Assert that a capture has the rows of these positions at both sites, and no others."""
    assert set(capture.sites) == set(SITES)
    positions = range(start, length)
    for site in SITES:
        rows = capture[site]
        assert rows.positions.tolist() == list(positions)
        assert rows.token_ids.tolist() == [token_of(capture.id, position) for position in positions]
        np.testing.assert_array_equal(rows.rows, [row_of(capture.id, site, position) for position in positions])


def test_every_specimen_is_opened_here():
    names = {path.name.removesuffix(".tar.xz") for path in SPECIMENS.glob("*.tar.xz")}
    kinds = (*LAYOUTS, "recording", "database", "worker")
    assert names == {f"{kind}-{end}" for kind in kinds for end in ("closed", "killed")} | {
        "inbox-killed",
        "dead-closed",
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_data_set_opens(specimen, layout):
    dataset = capflow.open(specimen(f"{layout}-closed") / "data")
    assert sorted(dataset.requests()) == sorted(LENGTHS)
    for name, length in LENGTHS.items():
        assert_whole(dataset[name], length)
        assert dataset[name].texts == {position: f" {token_of(name, position)}" for position in range(length)}
    dataset.verify()
    assert dataset.damaged() == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_data_set_of_a_killed_writer_opens_and_the_next_writer_goes_on_with_it(specimen, layout):
    root = specimen(f"{layout}-killed") / "data"
    dataset = capflow.open(root)
    assert dataset.requests() == ["a"]
    assert_whole(dataset["a"], LENGTHS["a"])
    recording = specimen("recording-closed") / "recording"
    # The frames are those that the writer had before it was killed.
    written = "layout=sharded,compression=zstd" if layout == "sharded_zstd" else f"layout={layout}"
    command("replay", recording, "--consumer", f"filesystem:root={root},{written},capture=all,hooks=post_block+mlp_out")
    dataset = capflow.open(root)
    assert {name: len(dataset.captures(name)) for name in dataset.requests()} == dict.fromkeys(LENGTHS, 1)
    for name, length in LENGTHS.items():
        assert_whole(dataset[name], length)
    dataset.verify()


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_a_recording_is_replayed(specimen, end):
    directory = specimen(f"recording-{end}")
    command("spool", "verify", directory / "recording")
    options = f"root={directory / 'data'},capture=all,hooks=post_block+mlp_out"
    command("replay", directory / "recording", "--consumer", f"filesystem:{options}")
    dataset = capflow.open(directory / "data")
    assert sorted(dataset.requests()) == sorted(LENGTHS)
    for name, length in LENGTHS.items():
        assert_whole(dataset[name], length)
        assert dataset[name].sidecar.status == ("error" if (name, end) == ("b/c", "killed") else "stop")


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_a_database_is_queried_and_the_next_writer_goes_on_with_it(specimen, end):
    directory = specimen(f"database-{end}")
    path = directory / "scores.duckdb"
    ended = LENGTHS if end == "closed" else {"a": LENGTHS["a"]}
    assert_database(path, ended)
    recording = specimen("recording-closed") / "recording"
    options = f"path={path},probes={directory / 'p.safetensors'},vectors=true"
    command("replay", recording, "--consumer", f"duckdb:{options}")
    assert_database(path, LENGTHS)


def assert_database(path, ended):
    """Assert that a database has the requests that ended, with each token, row and score once."""
    rows = query(path, "SELECT request_id, status, capture_status, computed_length AS n FROM requests ORDER BY 1")
    assert rows == [
        {"request_id": name, "status": "stop", "capture_status": "ok", "n": length} for name, length in ended.items()
    ]
    done = f"request_id IN ({', '.join(repr(name) for name in ended)})"
    places = [(name, position) for name, length in ended.items() for position in range(length)]
    tokens = query(path, f"SELECT request_id, position, token_id FROM tokens WHERE {done} ORDER BY 1, 2")
    assert [tuple(row.values()) for row in tokens] == [(*place, token_of(*place)) for place in places]
    fired = query(path, f"SELECT request_id, position, probe FROM fired WHERE {done} ORDER BY ALL")
    assert [tuple(row.values()) for row in fired] == [(*place, name) for place in places for name in ("p.a", "p.b")]
    vectors = query(path, f"SELECT request_id, position, vector FROM vectors WHERE {done} ORDER BY 1, 2")
    assert [tuple(row.values()) for row in vectors] == [
        (*place, row_of(place[0], SITES[0], place[1]).tolist()) for place in places
    ]


class Keeper(capflow.Consumer):
    """Counts the rows of each request."""

    name = "keeper"
    policy = "spill"

    def __init__(self, config):
        super().__init__(config)
        self.rows = {}

    def spec(self):
        return capflow.CaptureSpec({"post_block": [1], "mlp_out": [3]})

    def on_frame(self, frame):
        for chunk in frame.chunks():
            self.rows[chunk.request.id] = self.rows.get(chunk.request.id, 0) + assert_rows(chunk)


def test_a_hub_goes_on_with_an_inbox(specimen, monkeypatch):
    directory = specimen("inbox-killed")
    (place,) = (directory / "spool").iterdir()
    report = json.loads(command("spool", "verify", place, "--json"))
    assert (report["lost"], report["requests"]["waiting"], report["requests"]["incomplete"]) == ([], 1, 0)
    home = directory / "state" / "capflow" / "spool"
    home.mkdir(parents=True)
    (directory / "spool").rename(home / "hub")
    monkeypatch.setenv("XDG_STATE_HOME", str(directory / "state"))
    monkeypatch.chdir("/")
    keeper = Keeper(None)
    with MemoryHub(keeper) as hub:
        engine = hub.engine(model=msgspec.structs.replace(make_model(), sites=SITES), seq=4)
        engine.promise("b/c", 3, 0, 3)
        engine.finish("b/c")
        assert hub.result("b/c").status == "ok"
    assert keeper.rows == {"b/c": LENGTHS["b/c"] * len(SITES)}


def test_dead_letters_are_listed_and_replayed(specimen):
    directory = specimen("dead-closed")
    (place,) = (directory / "spool").iterdir()
    letters = json.loads(command("spool", "dead", "list", place, "--json"))
    assert [(letter["method"], letter["requests"], letter["rows"]) for letter in letters] == [
        ("on_frame", ["a"], 2),
        ("on_frame", ["a"], 0),
        ("on_request_done", ["b/c"], 4),
        ("on_request_done", ["b/c"], 2),
        ("on_request_done", ["b/c"], 0),
    ]
    assert letters[0]["error"] == "refuses.on_frame: ValueError: a row too many"
    options = f"root={directory / 'data'},capture=all,hooks=post_block+mlp_out"
    command("spool", "dead", "replay", place, "--consumer", f"filesystem:{options}")
    dataset = capflow.open(directory / "data")
    assert_whole(dataset["a"], LENGTHS["a"], start=5)
    assert_whole(dataset["b/c"], LENGTHS["b/c"])
    assert json.loads(command("spool", "dead", "list", place, "--json")) == []


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_a_hub_gets_what_a_worker_left(specimen, end, monkeypatch):
    directory = specimen(f"worker-{end}")
    (place,) = (directory / "spool").iterdir()
    assert json.loads(command("spool", "verify", place, "--json"))["records"] == 4
    home = directory / "state" / "capflow"
    home.mkdir(parents=True)
    (directory / "spool").rename(home / "spool")
    monkeypatch.setenv("XDG_STATE_HOME", str(directory / "state"))
    with tempfile.TemporaryDirectory(prefix="cf") as sockets:
        address = f"ipc://{sockets}/h"
        (home / "spool" / place.name / "hub").write_text(address)
        options = f"root={directory / 'data'},capture=all,hooks=post_block+mlp_out"
        words = ["run", "--address", address, "--consumer", f"filesystem:{options}"]
        hub = subprocess.Popen(
            [sys.executable, "-m", "capflow", *words], env=os.environ, stderr=subprocess.PIPE, text=True
        )
        try:
            eventually(lambda: not list((home / "spool").glob("engine-*")), LIMIT_S)
            hub.send_signal(signal.SIGTERM)
            _, errors = hub.communicate(timeout=LIMIT_S)
        finally:
            hub.kill()
            hub.communicate()
    assert hub.returncode == 0, errors
    capture = capflow.open(directory / "data")["a"]
    assert_whole(capture, 16)
    assert (capture.sidecar.status, capture.sidecar.dropped) == ("stop", [])
