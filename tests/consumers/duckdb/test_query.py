"""`capflow query`, answered by a running consumer or from its file."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import subprocess
import sys
import threading
import time

import duckdb
import pyarrow as pa
import pytest

from capflow import limits
from capflow.errors import CapflowError, UsageError
from capflow.transport.hub_process import HubProcess
from capflow_consumers.duckdb.port import port_path, run_query, running_ports
from capflow_consumers.duckdb.query import SqlQuery
from tests.kit.databases import OPENER, SITES, done, opened, probe_file
from tests.kit.frames import make_frame
from tests.kit.hubs import worker_link
from tests.kit.waiting import eventually


@pytest.fixture(autouse=True)
def runtime(tmp_path_factory, monkeypatch):
    """A directory for sockets of this test alone."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("r")))


@pytest.fixture
def store(tmp_path):
    """A running consumer with one finished request of 4 tokens and 8 scores, at `tmp_path/scores.duckdb`."""
    probe_file(tmp_path, "p", threshold=-1e9)
    consumer = opened(tmp_path, "p")
    consumer.on_frame(make_frame(sites=SITES, texts=True))
    assert consumer.on_request_done(done(rows=12)).status == "ok"
    yield consumer
    consumer.close()


def ask(path, sql, rows=100):
    with run_query(port_path(path), sql, rows) as batches:
        assert batches is not None, "nobody answers"
        return pa.Table.from_batches(batches)


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "capflow", "query", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )  # fmt: skip


def test_the_running_store_answers_and_the_file_after_it(store, tmp_path):
    path = tmp_path / "scores.duckdb"
    sql = "SELECT request_id, position, probe FROM fired ORDER BY ALL LIMIT 2"
    expected = [{"request_id": "r1", "position": 0, "probe": name} for name in ("p.a", "p.b")]
    named = run(sql, "--path", path, "--format", "jsonl")
    unnamed = run(sql, "--format", "jsonl")
    assert [json.loads(line) for line in named.stdout.splitlines()] == expected, named.stderr
    assert unnamed.stdout == named.stdout, unnamed.stderr
    store.on_frame(make_frame([("r2", 4, 0, 4)], SITES, seq=2))  # it goes on
    assert store.on_request_done(done("r2", rows=12)).status == "ok"
    assert ask(path, "SELECT count(*) AS n FROM requests").to_pylist() == [{"n": 2}]
    store.close()
    assert running_ports() == []
    closed = run(sql, "--path", path, "--format", "csv")
    assert closed.stdout.splitlines() == ['"request_id","position","probe"', '"r1",0,"p.a"', '"r1",0,"p.b"'], (
        closed.stderr
    )
    assert closed.stderr == ""
    table = run(sql, "--path", path).stdout
    assert "│ r1" in table
    stream = subprocess.run(
        [sys.executable, "-m", "capflow", "query", sql, "--path", str(path), "--format", "arrow"],
        capture_output=True,
        check=True,
    )  # fmt: skip
    assert pa.ipc.open_stream(io.BytesIO(stream.stdout)).read_all().to_pylist() == expected


def test_a_hub_that_runs_answers_of_what_it_was_sent(tmp_path):
    probe_file(tmp_path, "p")
    path = tmp_path / "s.duckdb"
    hub = HubProcess([f"duckdb:path={path},probes={tmp_path}/p.safetensors,flush_s=0.1"])
    hub.start(60)
    try:
        with worker_link(hub.address) as worker:
            frame = make_frame(sites=SITES)
            assert worker.send(frame.header, frame.payload) is None
            counts = "SELECT count(*) AS n FROM scores"
            eventually(lambda: ask(path, counts).to_pylist() == [{"n": 8}])
            assert run(counts, "--format", "csv").stdout.split() == ['"n"', "8"]
    finally:
        hub.stop()
    assert run(counts, "--path", path, "--format", "csv").stdout.split() == ['"n"', "8"]


def test_an_answer_is_bounded_and_says_so(store, tmp_path):
    path = tmp_path / "scores.duckdb"
    assert ask(path, "FROM range(1_000_000_000)", rows=5_000).num_rows == 5_000
    exact = run("FROM range(3)", "--path", path, "--rows", 3, "--format", "csv")
    assert (exact.stdout.split(), exact.stderr) == (['"range"', "0", "1", "2"], "")
    more = run("FROM range(4)", "--path", path, "--rows", 3, "--format", "csv")
    assert more.stdout == exact.stdout
    assert more.stderr == "capflow: the answer has more than 3 rows; --rows N prints more\n"


def test_an_answer_that_is_too_large_names_the_limit_wherever_it_is(store, tmp_path, monkeypatch):
    """In the first batch, behind others, and where a column has more text than Arrow's can."""
    path = tmp_path / "scores.duckdb"
    monkeypatch.setattr(limits, "QUERY_BATCH_BYTES_MAX", 100_000)
    late = "SELECT repeat('x', CASE WHEN range < 5000 THEN 1 ELSE 1000 END) AS t FROM range(9000)"
    for sql in ("SELECT repeat('x', 100_001) AS t", late):
        with pytest.raises(UsageError, match=r"too large: got \S+ bytes, expected at most 100,000 bytes"):
            ask(path, sql, rows=9_000)
    assert ask(path, late, rows=4_000).num_rows == 4_000, "the rows that are asked for are not too large"
    store.close()
    query = SqlQuery.on_file(path, "SELECT repeat('x', 100_001) AS t")
    with contextlib.closing(query.batches()) as batches:  # noqa: SIM117
        with pytest.raises(UsageError, match="too large"):
            next(batches)


@pytest.mark.long
def test_text_that_no_column_holds_is_refused_as_too_large(store, tmp_path):
    with pytest.raises(UsageError, match="more than 2 GiB of text"):
        ask(tmp_path / "scores.duckdb", "SELECT repeat('x', 3_000_000_000) AS t")


def test_a_query_that_fails_behind_its_first_rows_says_why(store, tmp_path):
    """DuckDB raises OSError there, as the socket does when its client has gone."""
    with pytest.raises(CapflowError, match="query: got Invalid Input Error: late"):
        ask(tmp_path / "scores.duckdb", LATE_ERROR, rows=1_000_000)
    assert ask(tmp_path / "scores.duckdb", LATE_ERROR, rows=1_000).num_rows == 1_000


def test_sql_that_is_too_long_names_the_limit(store, tmp_path):
    sql = "SELECT '" + "x" * limits.SQL_BYTES_MAX + "'"
    with pytest.raises(UsageError, match=f"expected less than {limits.SQL_BYTES_MAX:,}"):
        ask(tmp_path / "scores.duckdb", sql)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(port_path(tmp_path / "scores.duckdb")))
        client.sendall(json.dumps({"sql": sql, "rows": 1}).encode()[: limits.SQL_BYTES_MAX])
        assert "too long" in json.loads(client.makefile("rb").readline())["error"]


LATE_ERROR = "SELECT CASE WHEN range > 900_000 THEN error('late') ELSE range::VARCHAR END AS t FROM range(1_000_000)"
WRONG = [
    ("SELEC 1", "syntax error"),
    ("SELECT nothing", "nothing"),
    ("", "got nothing, expected one SELECT"),
    ("SELECT 1; SELECT 2", "got SELECT and SELECT, expected one SELECT"),
    ("DROP TABLE scores", "got DROP, expected one SELECT"),
    ("CREATE TEMP TABLE t AS SELECT 1", "got CREATE, expected one SELECT"),
    ("SET memory_limit = '1TB'", "got SET, expected one SELECT"),
    ("COPY scores TO '/tmp/x'", "got COPY, expected one SELECT"),
    ("ATTACH '/tmp/x'", "got ATTACH, expected one SELECT"),
    ("WITH x AS (INSERT INTO marks SELECT * FROM marks RETURNING capture) FROM x", "read-only"),
    ("FROM read_text('/etc/hostname')", "disabled by configuration"),
]


@pytest.mark.parametrize(("sql", "message"), WRONG)
def test_sql_that_is_none_or_would_write_is_refused_by_the_store_and_on_the_file(store, tmp_path, sql, message):
    path = tmp_path / "scores.duckdb"
    before = ask(path, "FROM marks")
    with pytest.raises(UsageError, match=message):
        ask(path, sql)
    assert ask(path, "FROM marks") == before
    store.close()
    from capflow_consumers.duckdb.query import SqlQuery

    with pytest.raises(UsageError, match=message):
        list(SqlQuery.on_file(path, sql).batches())


def test_a_path_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "text").write_text("not a database" * 1000)
    for path, message in (
        (tmp_path / "missing", "which does not exist, expected a DuckDB database"),
        (tmp_path, "a directory, expected a DuckDB database"),
        (tmp_path / "text", "expected a DuckDB database"),
    ):
        done = run("SELECT 1", "--path", path)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr
    done = run("SELECT 1")
    assert done.returncode == 2
    assert "got 0 running duckdb consumers, expected one; name the database with --path FILE" in done.stderr


def test_a_database_that_another_program_writes_is_named(tmp_path):
    path = tmp_path / "other.duckdb"
    with subprocess.Popen(
        [sys.executable, "-c", OPENER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        other.stdout.readline()
        done = run("SELECT 1", "--path", path)
        other.communicate("\n")
    assert done.returncode == 1
    assert f"{path} is open in another process" in done.stderr


def test_only_its_user_reaches_the_socket(store, tmp_path):
    socket_file = port_path(tmp_path / "scores.duckdb")
    assert socket_file.stat().st_mode & 0o777 == 0o600
    assert socket_file.parent.stat().st_mode & 0o777 == 0o700


def test_a_killed_store_leaves_a_socket_that_stops_nobody(tmp_path):
    probe_file(tmp_path, "p")
    path = tmp_path / "scores.duckdb"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(port_path(path)))
    stale.close()
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE t AS SELECT 7 AS n")
    assert run("FROM t", "--path", path, "--format", "csv").stdout.split() == ['"n"', "7"]
    path.unlink()
    consumer = opened(tmp_path, "p")
    assert ask(path, "SELECT 8 AS n").to_pylist() == [{"n": 8}]
    consumer.close()
    assert not port_path(path).exists()


def test_a_store_without_a_place_for_its_socket_records_all_the_same(tmp_path, monkeypatch, caplog):
    runtime = tmp_path / ("x" * 100)
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    probe_file(tmp_path, "p")
    consumer = opened(tmp_path, "p")
    assert "consumer duckdb: its database cannot be queried while it runs: socket for queries" in caplog.text
    consumer.on_frame(make_frame(sites=SITES))
    assert consumer.on_request_done(done(rows=12)).status == "ok"
    consumer.close()
    assert (
        run("SELECT count(*) AS n FROM scores", "--path", tmp_path / "scores.duckdb", "--format", "csv").stdout
        == '"n"\n8\n'
    )


SLOW = "SELECT count(*) FROM range(100_000_000_000) a"


def test_a_slow_query_holds_up_neither_rows_nor_other_queries_nor_the_end(store, tmp_path):
    path = tmp_path / "scores.duckdb"
    errors = []

    def slow():
        try:
            ask(path, SLOW)
        except CapflowError as e:
            errors.append(str(e))

    asking = threading.Thread(target=slow)
    asking.start()
    eventually(lambda: store._port._running)
    assert ask(path, "SELECT 1 AS n").to_pylist() == [{"n": 1}]
    store.on_frame(make_frame([("r2", 4, 0, 4)], SITES, seq=2))
    assert store.on_request_done(done("r2", rows=12)).status == "ok"
    begun = time.monotonic()
    store.close()
    assert time.monotonic() - begun < 10
    asking.join(10)
    assert len(errors) == 1
    with duckdb.connect(str(path), read_only=True) as connection:
        assert connection.execute("SELECT count(*) FROM requests").fetchone() == (2,)


def test_a_client_that_goes_takes_its_query_with_it(store, tmp_path):
    for _ in range(2 * limits.QUERIES_MAX):  # more than run at once: each makes room for the next
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(port_path(tmp_path / "scores.duckdb")))
            client.sendall(json.dumps({"sql": SLOW, "rows": 1}).encode() + b"\n")
            eventually(lambda: store._port._running)
        eventually(lambda: not store._port._running)


@pytest.mark.parametrize("line", [b"\n", b"SELECT 1\n", b"[]\n", b'{"sql": 1}\n', b"\xff\xfe\n", b'{"sql": "SELECT 1"'])
def test_what_is_no_query_is_answered_as_such(store, tmp_path, line):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(port_path(tmp_path / "scores.duckdb")))
        client.sendall(line)
        client.shutdown(socket.SHUT_WR)
        assert json.loads(client.makefile("rb").readline())["error"].startswith("query: got ")
    assert ask(tmp_path / "scores.duckdb", "SELECT 1 AS n").to_pylist() == [{"n": 1}]
