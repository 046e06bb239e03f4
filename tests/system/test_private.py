"""Captured data belongs to its owner alone: files, directories and sockets, with any umask."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from capflow import limits
from capflow.cli.engine.job import ModelJob
from capflow.cli.hub.running import HubRun
from capflow.plugins.configure import configure, load_plugins
from capflow.probes.file import write_file
from capflow.transport.outbox import Outbox
from tests.kit.captured import run, write
from tests.kit.frames import make_finished, make_frame, make_hello
from tests.kit.hubs import worker_link
from tests.kit.waiting import eventually

UMASKS = pytest.mark.parametrize("umask", [0o000, 0o022, 0o077], ids=oct)


@pytest.fixture
def at_umask():
    """Set the umask of this process for a test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.fixture
def short():
    """Return a directory whose name leaves room for a socket's; others may enter it."""
    with tempfile.TemporaryDirectory(prefix="cf") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def modes(root: Path, since: set[Path] = frozenset()) -> dict[str, str]:
    """Return what lies below a directory, but for `since`, and its mode as `ls` shows it.

    What a hub moves away between two looks is left out.
    """
    below = {}
    for directory, directories, files in os.walk(root):
        for path in {Path(directory, name) for name in directories + files} - since:
            with contextlib.suppress(FileNotFoundError):
                below[str(path.relative_to(root))] = stat.filemode(path.lstat().st_mode)
    return below


def open_to_others(root: Path, since: set[Path] = frozenset()) -> dict[str, str]:
    """Return what others can read, write or enter."""
    return {name: mode for name, mode in modes(root, since).items() if mode[4:] != "------"}


@UMASKS
def test_nothing_that_a_hub_and_its_consumers_write_can_be_read_by_others(short, umask):
    """Looked at while a request runs, after its end, and after the hub's."""
    root, runtime = short / "data", short / "run"
    root.mkdir()
    root.chmod(0o755)
    runtime.mkdir(0o700)
    consumers = [
        f"filesystem:root={root}/a/rows,layout=per_file,tail_s=0.05",
        f"filesystem@packed:root={root}/packed,buffer_bytes_max=0",
        f"filesystem@sharded:root={root}/sharded,layout=sharded,shard_bytes=1048576",
        f"filesystem@zstd:root={root}/zstd,layout=sharded,compression=zstd",
        f"duckdb:path={root}/rows.duckdb,vectors=true,site=post_block:0",
        f"record:path={root}/b/recording",
        f"log:spool_dir={root}/spools,policy=spill,queue_bytes_max=1",
    ]
    words = [word for consumer in consumers for word in ("--consumer", consumer)]
    places = {"XDG_RUNTIME_DIR": "run", "XDG_STATE_HOME": "data/state", "TMPDIR": "data"}
    environment = os.environ | {name: str(short / place) for name, place in places.items()}
    with subprocess.Popen(
        [sys.executable, "-m", "capflow", "run", *words],
        stderr=subprocess.PIPE,
        text=True,
        umask=umask,
        env=environment,
    ) as hub:
        try:
            address = re.search(r"listening at (\S+)", hub.stderr.readline())[1]
            with worker_link(address, make_hello()) as link:
                for step in range(3):
                    frame = make_frame([("r1", 4, 4 * step, 4)], step=step)
                    assert link.send(frame.header, frame.payload) is None
                eventually(lambda: list(root.glob("a/rows/.partial-*/*/running.jsonl")))
                eventually(lambda: list(root.glob("packed/.partial-*/*/*")))
                eventually(lambda: list(root.glob("state/**/*.spool")))
                running = modes(short)
                assert open_to_others(short) == {"data": "drwxr-xr-x"}
                frame = make_frame([("r1", 4, 12, 1)], step=3, finished=[make_finished("r1", 4, 13)])
                assert link.send(frame.header, frame.payload) is None
                eventually(lambda: list(root.glob("rows.duckdb.wal")) and list(root.glob("a/rows/r1")))
                running |= modes(short)
                assert open_to_others(short) == {"data": "drwxr-xr-x"}
            hub.send_signal(signal.SIGINT)
            errors = hub.stderr.read()
            assert hub.wait(30) in (0, 1), errors  # its model has more sites than the frames
        finally:
            hub.kill()
    left = modes(short)
    assert open_to_others(short) == {"data": "drwxr-xr-x"}
    assert sum(mode.startswith("s") for mode in running.values()) >= 2, "sockets of the hub and of its duckdb"
    assert {"rows.duckdb", "rows.duckdb.wal"} <= {Path(name).name for name in running}
    assert {Path(name).suffix for name in left} >= {".safetensors", ".json", ".parquet", ".duckdb", ".spool"}


@UMASKS
def test_nothing_that_commands_write_can_be_read_by_others(tmp_path, at_umask, umask):
    pytest.importorskip("sklearn")
    rows = write(tmp_path / "rows", {f"r{n}": (4, 9) for n in range(8)})
    labels = tmp_path / "labels.jsonl"
    labels.write_text("".join(f'{{"request": "r{n}", "label": {n % 2}}}\n' for n in range(8)))
    before = set(tmp_path.rglob("*"))
    at_umask(umask)
    commands = [
        ["export", rows, tmp_path / "x" / "safetensors", "--to", "safetensors"],
        ["export", rows, tmp_path / "saelens", "--to", "saelens", "--context-size", 4],
        ["inspect", rows, "--png", tmp_path / "norms.png"],
        ["probe", "fit", rows, "--labels", labels, "--site", "post_block:2", "--out", tmp_path / "p.safetensors"],
        ["keys", "new", "me", "--dir", tmp_path / "keys" / "mine"],
        ["replay", rows, "--consumer", f"filesystem:root={tmp_path}/y/again", "--ask"],
        ["replay", rows, "--consumer", f"record:path={tmp_path}/z/recording", "--ask"],
    ]
    for command in commands:
        done = run(*command)
        assert done.returncode == 0, done.stderr
    assert len(modes(tmp_path, before)) > 20
    assert open_to_others(tmp_path, before) == {}


@UMASKS
def test_nothing_that_the_engine_side_writes_can_be_read_by_others(tmp_path, at_umask, umask):
    from capflow_engine.steering.module import load_module
    from capflow_engine.steering.store import SteeringStore
    from capflow_models.jobs.rolloutjob import write_parquet
    from capflow_models.runs.lines import LineFile
    from capflow_models.spec import LayerSteeringSpec, SteeringSpec
    from capflow_models.specfiles import save_spec
    from capflow_models.vectors.file import save_vectors

    at_umask(umask)
    outbox = Outbox.of(tmp_path / "a" / "outbox", make_hello(), limits.SPOOL_BYTES_DEFAULT)
    outbox.open()
    frame = make_frame([("r1", 4, 0, 4)])
    assert outbox.put(1, frame.header, frame.payload, 1.0) is None
    outbox.close()
    save_vectors(tmp_path / "v.safetensors", {2: np.ones(8)})
    save_spec(tmp_path / "b" / "spec", "tiny", SteeringSpec({2: LayerSteeringSpec(np.ones(8))}))
    write_parquet(tmp_path / "rollouts.parquet", iter(()))
    write_file(tmp_path / "probe.safetensors", {"weight": np.ones(8, np.float32)}, {})
    with LineFile(tmp_path / "rollouts.jsonl") as file:
        file.add([b"{}"])
    directory = tmp_path / "store"
    directory.mkdir(0o700)
    SteeringStore(directory).set_global(load_module(tmp_path / "v.safetensors"))
    assert len(modes(tmp_path)) > 15
    assert open_to_others(tmp_path) == {}


@UMASKS
@pytest.mark.parametrize("layout", ["per_file", "packed", "sharded"])
@pytest.mark.parametrize(
    ("mode", "file", "directory"), [("0640", "-rw-r-----", "drwxr-x---"), ("0664", "-rw-rw-r--", "drwxrwxr-x")]
)
def test_a_data_set_is_shared_by_its_option_whatever_the_umask(
    tmp_path, at_umask, umask, layout, mode, file, directory
):
    at_umask(umask)
    write(tmp_path / "a" / "rows", layout=layout, mode=mode)
    assert set(modes(tmp_path).values()) == {file, directory}


def test_a_directory_that_exists_keeps_its_mode_and_its_group(tmp_path, at_umask):
    at_umask(0o077)
    tmp_path.chmod(0o2750)
    write(tmp_path, {"r1": (4, 9)}, mode="0640")
    assert stat.filemode(tmp_path.stat().st_mode) == "drwxr-s---"
    assert stat.filemode((tmp_path / "r1").stat().st_mode) == "drwxr-s---"


def test_a_mode_that_would_let_anybody_write_is_refused(tmp_path):
    done = run("replay", write(tmp_path / "rows"), "--consumer", f"filesystem:root={tmp_path}/x,mode=0666")
    assert done.returncode == 2
    assert "consumers.filesystem.mode: got 0666, expected 0600 or 0640 or 0644 or 0660 or 0664" in done.stderr


def test_an_engine_beside_a_hub_has_the_umask_of_its_user(short, at_umask, monkeypatch):
    """What it fetches may be for a group, as a cache of models is."""
    engine, umask = short / "engine", short / "umask"
    engine.write_text(f"#!/bin/sh\numask > {umask}.new && mv {umask}.new {umask}\n")
    engine.chmod(0o700)
    inside = short / "h"
    inside.mkdir(0o700)
    monkeypatch.setattr(sys, "executable", str(engine))
    at_umask(0o027)
    consumer = configure("log", {}, load_plugins())
    with HubRun(f"ipc://{inside}/h", [consumer], console=Console(quiet=True)) as running:
        assert os.umask(0o077) == 0o077
        job = ModelJob("tiny", [], (), 1)
        job.start(running.umask_before)
        eventually(umask.exists)
        job.stop(threading.Event())
        job.forget_log()
    assert umask.read_text().strip() == "0027"
    assert os.umask(0o027) == 0o027
