"""Hostile files in the place of data files: none hangs a reader, exhausts its memory, or writes to the terminal."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
import zipfile

import duckdb
import numpy as np
import pytest
import torch

import capflow
from capflow import limits
from capflow.buffers.spool.report import inspect
from capflow.cli.engine.prompts import read_prompts
from capflow.errors import CapflowError, HubUnreachableError, UsageError
from capflow.files import open_regular, read_regular
from capflow.probes.saelens import read_saelens
from capflow.protocol.recording import Recorder
from capflow.text import jsontext
from capflow.transport.client import Client
from tests.kit.captured import run, write
from tests.kit.frames import make_frame, make_model
from tests.kit.stored import hashed

pytestmark = pytest.mark.timeout(60)

DEEP = "[" * 100_000
SPEAKS = "\x1b]0;title\x07\x9b31m\u2028\u202e"
HUGE = 256 << 30


@pytest.fixture
def recording(tmp_path):
    with Recorder(tmp_path / "recording") as recorder:
        recorder.engine("engine-1", make_model())
        recorder.frame(make_frame([("r1", 4, 0, 4)]))
    return tmp_path / "recording"


def fifo(path):
    path.unlink()
    os.mkfifo(path)


# Other things in the place of data files.


@pytest.mark.parametrize(
    ("layout", "name"), [("per_file", "*.safetensors"), ("packed", "*.safetensors"), ("sharded", "shard~*")]
)
def test_a_fifo_in_a_data_set_is_damage_like_any_other(tmp_path, layout, name):
    root = write(tmp_path / "rows", layout=layout)
    fifo(next(root.rglob(name)))
    done = run_failing("inspect", root)
    assert "got Not a regular file" in done


def test_a_fifo_in_place_of_a_sidecar_keeps_no_hub_from_writing_beside_it(tmp_path):
    root = write(tmp_path / "rows", {"r1": (4, 9)})
    fifo(root / "r1" / "request.json")
    write(root, {"r2": (4, 9), "r1": (4, 9)}, on_collision="suffix")
    assert set(capflow.open(root).requests()) == {"r1", "r2"}


@pytest.mark.parametrize("name", ["*.spool", "cursor"])
def test_a_fifo_in_a_spool_is_an_error(recording, name):
    fifo(next(recording.glob(name)))
    with pytest.raises(CapflowError, match="cannot be read: got Not a regular file"):
        inspect(recording)


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null"])
def test_a_device_is_not_read(path):
    with pytest.raises(OSError, match="Not a regular file"):
        open_regular(path)


# Files that are larger than their content.


def test_a_sparse_segment_costs_what_was_written_of_it(recording):
    (segment,) = recording.glob("*.spool")
    os.truncate(segment, HUGE)
    survey = inspect(recording, verify=True)
    assert (survey["records"], survey["lost"], survey["bytes"]) == (2, [], HUGE)


def test_a_sparse_sidecar_is_damage(tmp_path):
    root = write(tmp_path / "rows", {"r1": (4, 9)})
    os.truncate(root / "r1" / "request.json", HUGE)
    assert "request.json: got File too large" in run_failing("inspect", root)


def test_a_file_of_the_bound_is_read_and_one_byte_more_is_not(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    with pytest.raises(OSError, match="File too large"):
        read_regular(path, 4)


def test_a_compressed_file_of_vectors_is_expanded_within_bounds(tmp_path):
    from capflow_engine.steering.files import load_vectors

    path = tmp_path / "bomb.npz"
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"descr": "<f8", "fortran_order": False, "shape": (limits.VECTORS_BYTES_MAX,)}
    )
    zeros = bytes(1 << 20)
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("layer.1.npy", "w", force_zip64=True) as entry,
    ):
        entry.write(head.getvalue())
        for _ in range((limits.VECTORS_BYTES_MAX >> 20) + 1):
            entry.write(zeros)
    assert path.stat().st_size < 4 << 20
    with pytest.raises(UsageError, match=r"bomb\.npz: got [\d,]+ bytes after decompression, expected at most"):
        load_vectors(path)


def test_a_compressed_checkpoint_of_vectors_is_expanded_within_bounds(tmp_path, monkeypatch):
    from capflow_engine.steering.files import load_vectors

    monkeypatch.setattr(limits, "VECTORS_BYTES_MAX", 1 << 20)
    path, stored = tmp_path / "bomb.pt", io.BytesIO()
    torch.save({"layer.1": torch.zeros(1 << 19)}, stored)
    with zipfile.ZipFile(stored) as right, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry in right.infolist():
            archive.writestr(entry.filename, right.read(entry))
    assert path.stat().st_size < 1 << 14
    with pytest.raises(UsageError, match=r"bomb\.pt: got [\d,]+ bytes after decompression, expected at most"):
        load_vectors(path)


@pytest.mark.parametrize("shape", [(1 << 40,), (1 << 40, 1)])
def test_a_tensor_that_repeats_one_number_is_refused_before_it_is_expanded(tmp_path, shape):
    import torch

    from capflow_engine.steering.files import load_vectors

    torch.save(torch.zeros(1).expand(*shape), tmp_path / "view.pt")
    torch.save({"layer.1": torch.zeros(1).expand(*shape)}, tmp_path / "views.pt")
    for name in ("view.pt", "views.pt"):
        with pytest.raises(UsageError, match=r"shape|got"):
            load_vectors(tmp_path / name)


@pytest.mark.parametrize(("archived", "behind"), [(True, False), (False, False), (False, True)])
def test_a_checkpoint_that_names_a_class_at_length_is_refused_before_torch_looks_for_what_to_say(
    tmp_path, archived, behind
):
    from capflow_engine.steering.files import load_vectors

    path, stored = tmp_path / "long.pt", io.BytesIO()
    torch.save({"layer.1": torch.zeros(4)}, stored, _use_new_zipfile_serialization=archived)
    name, longer = b"_rebuild_tensor_v2", b"_rebuild_tensor_v2" * 100_000
    if archived:
        with zipfile.ZipFile(stored) as right, zipfile.ZipFile(path, "w") as archive:
            for entry in right.infolist():
                archive.writestr(entry.filename, right.read(entry).replace(name, longer))
    else:
        path.write_bytes(stored.getvalue().replace(name, longer))
    if behind:  # an empty archive, which zipfile sees and torch does not
        with zipfile.ZipFile(path, "a"):
            pass
    with pytest.raises(
        UsageError, match=r"long\.pt: got a class with a name of 1,8\d\d,\d+ characters, expected tensors"
    ):
        load_vectors(path)


# JSON that is nested too deeply, or has a key twice.


def test_nesting_that_is_too_deep_is_a_decode_error_of_its_file(tmp_path):
    from capflow_engine.steering.module import load_module

    root = write(tmp_path / "rows", {"r1": (4, 9)})
    (root / "r1" / "request.json").write_bytes(hashed(f'{{"x": {DEEP},"xxh3_64":""}}'.encode()))
    assert "request.json: got JSON is nested too deeply" in run_failing("inspect", root)
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"id": "a", "prompt": "b", "capture": ' + DEEP)
    config = tmp_path / "cfg.json"
    config.write_text('{"x": ' + DEEP)
    for read in (
        lambda: read_prompts(lines),
        lambda: load_module(lines),
        lambda: read_saelens(tmp_path, "sae"),
    ):
        with pytest.raises(UsageError, match="nested too deeply"):
            read()
    toml = tmp_path / "hub.toml"
    toml.write_text("x = " + DEEP)
    assert run("run", "--config", toml).returncode == 2


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1, "a": 2}',
        '{"x": [{"a": 1, "b": {}, "a": 2}]}',
        '{"a": 1, "\\u0061": 2}',
        '{"s": "\\"a\\": 1", "a" : 1, "a"\n: 2}',
        '{"x": {"a": 1, "b": "a:"}, "y": [":", "a", {"a": 1, "a": 1}]}',
    ],
)
def test_a_key_that_stands_twice_in_one_object_is_refused(text):
    with pytest.raises(UsageError, match=r"body: got a twice in one object, expected each key once"):
        jsontext.check_keys(text.encode(), "body")


@pytest.mark.parametrize("text", ['{"a": {"a": [{"a": 1}, {"a": 2}]}, "b": "\\"b\\": "}', "", '{"a": 1, "a"', "[1]"])
def test_a_key_that_stands_in_several_objects_is_not(text):
    jsontext.check_keys(text.encode(), "body")


def test_what_people_write_says_each_thing_once(tmp_path):
    from capflow_engine.request.options import RequestOptions
    from capflow_engine.steering.module import load_module

    file = tmp_path / "module.json"
    file.write_text('{"vectors": {"post_block": {"1": [1.0], "1": [2.0]}}}')
    with pytest.raises(UsageError, match="1 twice in one object"):
        load_module(file)
    file.write_text('{"id": "a", "prompt": "b", "prompt": "c"}')
    with pytest.raises(UsageError, match="line 1: got prompt twice"):
        read_prompts(file)
    with pytest.raises(UsageError, match="capture twice"):
        RequestOptions.from_client('{"capture": {}, "capture": {}}')


# Control characters for the terminal.


def test_nothing_of_a_data_set_speaks_to_the_terminal(tmp_path):
    root = write(tmp_path / "rows", {"r1": (4, 9)})
    sidecar = root / "r1" / "request.json"
    text = re.sub(
        rb'"model":"[^"]*"',
        lambda _: b'"model":' + json.dumps(SPEAKS, ensure_ascii=False).encode(),
        sidecar.read_bytes(),
    )
    sidecar.write_bytes(hashed(text))
    done = run("inspect", root)
    assert done.returncode == 0
    assert r"models    \x1b]0;title\x07\x9b31m\u2028\u202e" in done.stdout
    assert all(c.isprintable() or c == "\n" for c in done.stdout)


def test_nothing_of_an_error_speaks_to_the_terminal(tmp_path):
    (tmp_path / f"x{SPEAKS}").mkdir()
    stderr = run_failing("inspect", tmp_path / f"x{SPEAKS}")
    assert r"x\x1b]0;title\x07\x9b31m" in stderr
    assert all(c.isprintable() or c == "\n" for c in stderr)


def test_nothing_of_a_database_speaks_to_the_terminal(tmp_path):
    path = tmp_path / "rows.duckdb"
    with duckdb.connect(str(path)) as database:
        database.execute("CREATE TABLE said AS SELECT ? AS text", [SPEAKS])
    done = run_command("query", "FROM said", "--path", path)
    assert done.returncode == 0, done.stderr
    assert "title" in done.stdout
    assert all(c.isprintable() or c == "\n" for c in done.stdout)


# A hub that ends while a client connects.


def test_a_socket_that_hangs_up_is_no_question_of_keys(tmp_path_factory):
    path = tmp_path_factory.mktemp("h") / "h"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def hang_up():
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                connection.recv(8)
                connection.sendall(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00")
                connection.close()

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        with pytest.raises(HubUnreachableError) as raised:
            Client(f"ipc://{path}", timeout=1.5).__enter__()
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    assert "key" not in str(raised.value)


def run_command(*arguments):
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "capflow", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


def run_failing(*arguments):
    """Run a command that fails; return what it printed."""
    done = run_command(*arguments)
    assert done.returncode in (1, 2), done.stdout + done.stderr
    return done.stdout + done.stderr
