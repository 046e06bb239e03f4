from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections import Counter

import duckdb
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capflow.capture.frame import Dropped, Frame, Rank
from capflow.capture.positions import Positions
from capflow.capture.spec import Want
from capflow.errors import FatalError, RetryError, UsageError
from capflow.probes.kinds import load_probe
from capflow.probes.probe import Probe
from capflow_consumers.duckdb.consumer import DuckdbConfig, DuckdbConsumer
from capflow_consumers.duckdb.schema import TABLES, VIEWS
from tests.kit.checked import checked
from tests.kit.databases import OPENER, SITES, Clock, Counts, done, opened, probe_file, query
from tests.kit.frames import make_frame, make_model, row_of, token_of
from tests.kit.sources import ROOT


def test_every_token_has_its_text_and_its_scores(tmp_path):
    probe = probe_file(tmp_path, "happy")
    consumer = opened(tmp_path, "happy")
    consumer.on_frame(make_frame([("r1", 4, 0, 4)], SITES, texts=True))
    consumer.on_frame(make_frame([("r1", 4, 4, 1)], SITES, texts=True, seq=2))
    result = consumer.on_request_done(done(computed_length=5, rows=15))
    consumer.close()
    path = str(tmp_path / "scores.duckdb")
    assert (result.status, result.payload) == ("ok", {"path": path, "tokens": 5, "scores": 10})

    tokens = query(tmp_path, "SELECT engine, request_id, position, token_id, text, phase FROM tokens ORDER BY position")
    assert tokens == [
        ("engine-1", "r1", p, token_of("r1", p), f" {token_of('r1', p)}", "prompt" if p < 4 else "generated")
        for p in range(5)
    ]
    scores = query(tmp_path, "SELECT position, probe, layer, hook, score FROM scores ORDER BY position, probe")
    expected = probe.scores(np.stack([row_of("r1", SITES[1], p) for p in range(5)]))
    assert [score[:4] for score in scores] == [
        (p, name, 1, "post_block") for p in range(5) for name in ("happy.a", "happy.b")
    ]
    np.testing.assert_allclose([score[4] for score in scores], expected.ravel(), rtol=1e-5)
    (line,) = query(tmp_path, "SELECT * EXCLUDE (started_at, finished_at) FROM requests")
    assert line == (1, "engine-1", "r1", "test-model", 4, 5, "stop", 15, "ok", None, None, None, None)
    ((seconds,),) = query(tmp_path, "SELECT date_diff('second', started_at, finished_at) FROM requests")
    assert seconds > 0


def as_it_is(frame):
    return frame


def narrowed(frame):
    """Return a frame as the hub gives it to one consumer of several."""
    return frame.narrowed(lambda _: dict.fromkeys(SITES, Want(Positions.ALL)))


def reordered(frame):
    """Return the same frame, whose spans stand in another order than their rows."""
    blocks = tuple(block._replace(spans=block.spans[::-1]) for block in frame.header.blocks)
    return Frame(msgspec.structs.replace(frame.header, blocks=blocks), frame.payload)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_interleaving_of_requests_and_stages_gives_each_token_its_scores_once(data, tmp_path_factory):
    interleave(data, tmp_path_factory.mktemp("data"))


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_many_interleavings_give_each_token_its_scores_once(data, tmp_path_factory):
    interleave(data, tmp_path_factory.mktemp("data"))


def interleave(data, tmp_path):
    """Store frames of requests and stages in any order, and compare scores and tokens with the reference."""
    probes = {SITES[0]: probe_file(tmp_path, "first", SITES[0]), SITES[2]: probe_file(tmp_path, "last", SITES[2])}
    consumer = opened(tmp_path, "first", "last", batch_rows=data.draw(st.sampled_from([1, 7, 50_000])))
    ids = [f"r{n}" for n in range(data.draw(st.integers(1, 3)))]
    length = {i: data.draw(st.integers(1, 9)) for i in ids}
    at = {(i, stage): 0 for i in ids for stage in (0, 1)}
    stages = {0: SITES[:2], 1: SITES[2:]}
    seqs: Counter[int] = Counter()
    while at:
        stage = data.draw(st.sampled_from(sorted({stage for _, stage in at})))
        asked = []
        for i in data.draw(st.lists(st.sampled_from(sorted(i for i, s in at if s == stage)), unique=True, min_size=1)):
            count = data.draw(st.integers(1, length[i] - at[i, stage]))
            asked.append((i, 2, at[i, stage], count))
            at[i, stage] += count
            if at[i, stage] == length[i]:
                del at[i, stage]
        seqs[stage] += 1
        made = make_frame(asked, stages[stage], dtype="bfloat16", seq=seqs[stage], rank=Rank(stage, 0, 0))
        frame = Frame.decode(*made.encode())
        consumer.on_frame(data.draw(st.sampled_from([as_it_is, narrowed, reordered]))(frame))
    for i in ids:
        assert consumer.on_request_done(done(i, 2, length[i], rows=3 * length[i])).status == "ok"
    consumer.close()
    expected = {
        (i, p, name): score
        for i in ids
        for p in range(length[i])
        for site, probe in probes.items()
        for name, score in zip(
            probe.names, probe.scores(row_of(i, site, p, dtype="bfloat16")[None])[0].tolist(), strict=True
        )
    }
    got = query(tmp_path, "SELECT request_id, position, probe, score FROM scores")
    assert len(got) == len(expected)
    assert {row[:3]: pytest.approx(row[3], rel=1e-4, abs=1e-4) for row in got} == expected
    tokens = query(tmp_path, "SELECT request_id, position, token_id FROM tokens ORDER BY ALL")
    assert tokens == sorted((i, p, token_of(i, p)) for i in ids for p in range(length[i]))


def test_the_view_fired_has_the_tokens_at_or_above_the_threshold(tmp_path):
    weight = np.zeros((1, 8))
    weight[0, 0] = 1.0  # the score is the row's first number
    rows = {p: float(row_of("r1", SITES[1], p)[0]) for p in range(6)}
    threshold = sorted(rows.values())[3]
    Probe.make(SITES[1], weight, names=("first",), threshold=threshold).save(tmp_path / "p.safetensors")
    consumer = opened(tmp_path, "p")
    consumer.on_frame(make_frame([("r1", 4, 0, 6), ("running", 4, 0, 6)], SITES, texts=True))
    consumer.on_request_done(done(computed_length=6, rows=18))
    consumer.close()
    fired = query(tmp_path, "SELECT request_id, position, text, probe, score, threshold FROM fired ORDER BY position")
    expected = [
        ("r1", p, f" {token_of('r1', p)}", "first", score, threshold) for p, score in rows.items() if score >= threshold
    ]
    assert len(expected) == 3
    assert fired == expected


def test_an_id_that_comes_again_does_not_mix_with_the_first(tmp_path):
    probe_file(tmp_path, "p", threshold=-1e9)
    for boot in range(2):
        consumer = opened(tmp_path, "p")
        for seq in range(2):
            consumer.on_frame(make_frame([("0", 4, 0, 4)], SITES[:2], seq=seq + 1, boot=f"b{boot}"))
            consumer.on_request_done(done("0", rows=8))
        consumer.close()
    assert query(tmp_path, "SELECT capture FROM requests ORDER BY capture") == [(1,), (2,), (3,), (4,)]
    assert query(tmp_path, "SELECT count(*) FROM fired") == [(4 * 4 * 2,)]


def test_what_is_given_again_after_a_kill_is_in_the_tables_once(tmp_path):
    """The first consumer is killed with one request finished, and one partly committed, pending and not sent."""
    probe_file(tmp_path, "p")

    def give(consumer, steps):
        for step in steps:
            parts = [("whole", 4, step * 4, 4)] if step < 2 else []
            consumer.on_frame(make_frame([*parts, ("half", 4, step * 4, 4)], SITES[:2], seq=step + 1))
            if step == 1:
                results.append(consumer.on_request_done(done("whole", 4, 8, rows=16)))

    results = []
    killed = opened(tmp_path, "p")
    give(killed, range(3))
    killed._database.close()  # with what is pending
    consumer = opened(tmp_path, "p")
    give(consumer, range(5))
    results.append(consumer.on_request_done(done("half", 4, 20, rows=40)))
    consumer.close()
    assert results[0] == results[1]
    assert [result.status for result in results] == ["ok"] * 3
    assert (results[2].payload["tokens"], results[2].payload["scores"]) == (20, 40)
    assert consumer._context.counts == {"requests_again": 1}
    assert query(tmp_path, "SELECT request_id, capture_status FROM requests ORDER BY 1") == [
        ("half", "ok"),
        ("whole", "ok"),
    ]
    tokens = query(tmp_path, "SELECT request_id, position, token_id FROM tokens ORDER BY request_id DESC, position")
    lengths = {"whole": 8, "half": 20}
    assert tokens == [(request, p, token_of(request, p)) for request, length in lengths.items() for p in range(length)]
    sql = """
        SELECT request_id, count(*), count(DISTINCT (position, probe, layer)), count(DISTINCT capture)
        FROM scores GROUP BY request_id ORDER BY request_id DESC
    """
    assert query(tmp_path, sql) == [(request, 2 * length, 2 * length, 1) for request, length in lengths.items()]


def test_opening_with_another_threshold_moves_what_fired_and_keeps_the_scores(tmp_path):
    probe_file(tmp_path, "p", threshold=-1e9)
    consumer = opened(tmp_path, "p")
    consumer.on_frame(make_frame(sites=SITES[:2]))
    consumer.on_request_done(done(rows=8))
    consumer.close()
    assert query(tmp_path, "SELECT count(*) FROM fired") == [(8,)]
    opened(tmp_path, "p").close()
    assert query(tmp_path, "SELECT count(*) FROM probes") == [(2,)]
    probe_file(tmp_path, "p", threshold=1e9)
    opened(tmp_path, "p").close()
    assert query(tmp_path, "SELECT count(*) FROM fired") == [(0,)]
    assert query(tmp_path, "SELECT count(*) FROM scores") == [(8,)]


def test_another_probe_under_a_known_name_is_refused(tmp_path):
    probe_file(tmp_path, "p", seed=1)
    opened(tmp_path, "p").close()
    probe_file(tmp_path, "p", seed=2)
    with pytest.raises(
        UsageError, match=r"the database has scores of another probe p\.a: got post_block:1 [0-9a-f]{16}"
    ):
        opened(tmp_path, "p")
    probe_file(tmp_path, "p", SITES[0], seed=1)
    with pytest.raises(UsageError, match="give the probe another name, or use another database"):
        opened(tmp_path, "p")


# What is captured.


def test_the_sites_of_the_probes_are_captured(tmp_path):
    for name, site in zip("abc", SITES, strict=True):
        probe_file(tmp_path, name, site)
    spec = opened(tmp_path, "a", "b", "c").spec()
    assert (spec.hooks, spec.positions) == ({"mlp_in": [1], "post_block": [0, 1]}, "all")


def test_without_probes_only_tokens_of_requests_that_ask_are_recorded(tmp_path):
    consumer = opened(tmp_path)
    assert consumer.spec() is None
    asks = {SITES[0]: Want(Positions.LAST_PROMPT)}
    frame = make_frame([("asks", 4, 0, 4), ("other", 4, 0, 4)], SITES, texts=True)
    consumer.on_frame(frame.narrowed(lambda request: asks if request.id == "asks" else {}))
    result = consumer.on_request_done(done("asks", rows=1))
    assert (result.status, result.payload["tokens"], result.payload["scores"]) == ("ok", 4, 0)
    consumer.close()
    assert query(tmp_path, "SELECT request_id, count(*) FROM tokens GROUP BY ALL") == [("asks", 4)]
    assert query(tmp_path, "SELECT count(*) FROM scores") == [(0,)]


def test_the_option_site_captures_without_probes(tmp_path):
    assert opened(tmp_path, site="post_block:3", positions="all_generated").spec().hooks == {"post_block": [3]}


# When it is written.


def test_rows_are_written_after_a_while_and_a_batch_when_it_is_full(tmp_path):
    probe_file(tmp_path, "p")
    clock = Clock()
    consumer = opened(tmp_path, "p", clock=clock, batch_rows=30, flush_s=2.0)

    def written() -> int:
        return consumer._database._connection.execute("SELECT count(*) FROM tokens").fetchone()[0]

    consumer.on_frame(make_frame([("r1", 4, 0, 4)], SITES))
    consumer.on_idle()
    assert written() == 0
    clock.now = 2.0
    consumer.on_idle()
    assert written() == 4
    consumer.on_frame(make_frame([("r1", 4, 4, 9)], SITES, seq=2))
    clock.now = 3.9
    consumer.on_idle()
    assert written() == 4
    consumer.on_frame(make_frame([("r1", 4, 13, 1)], SITES, seq=3))
    assert written() == 14


def test_an_ok_result_is_on_the_disk_whatever_kills_the_hub(tmp_path):
    probe_file(tmp_path, "p")
    script = """
import sys
from pathlib import Path
from tests.kit.frames import make_frame
from tests.kit.databases import SITES, done, opened
consumer = opened(Path(sys.argv[1]), "p")
for n in range(10**6):
    consumer.on_frame(make_frame([(f"r{n}", 4, 0, 4), ("endless", 1, n, 1)], SITES))
    print(consumer.on_request_done(done(f"r{n}", rows=12)).status, flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as hub:
        acknowledged = [hub.stdout.readline() for _ in range(20)]
        hub.send_signal(signal.SIGKILL)
    assert acknowledged == ["ok\n"] * 20
    opened(tmp_path, "p").close()
    assert query(tmp_path, "SELECT count(*) >= 20, count(*) = count(DISTINCT capture) FROM requests") == [(True, True)]
    counts = "SELECT request_id, count(*) FROM scores JOIN requests USING (capture, request_id) GROUP BY ALL"
    assert {count for _, count in query(tmp_path, counts)} == {8}


def test_lost_rows_are_a_partial_error_on_record(tmp_path):
    probe_file(tmp_path, "p")
    consumer = opened(tmp_path, "p")
    consumer.on_frame(make_frame(sites=SITES))
    result = consumer.on_request_done(done(rows=13, dropped=(Dropped(1, "queue_full"),)))
    consumer.close()
    assert result.status == "partial_error"
    assert result.error == "1 rows lost: queue_full; rows seen: got 12, expected 13 as delivered"
    assert query(tmp_path, "SELECT capture_status FROM requests") == [("partial_error",)]


def test_a_write_that_fails_is_tried_again_and_nothing_is_lost_by_it(tmp_path):
    probe_file(tmp_path, "p")
    consumer = opened(tmp_path, "p", batch_rows=10)
    consumer._database._connection.execute("ALTER TABLE scores RENAME TO hidden")
    consumer.on_frame(make_frame([("r1", 4, 0, 4)], SITES))  # fills the batch; its rows wait
    refused = make_frame([("r1", 4, 4, 4)], SITES, seq=2)
    for call in (lambda: consumer.on_frame(refused), consumer.on_idle, lambda: consumer.on_request_done(done(rows=12))):
        consumer._clock.now += 10.0
        with pytest.raises(RetryError, match=r"scores\.duckdb cannot be written: got "):
            call()
    assert consumer._context.counts["flush_errors"] == 4
    consumer._database._connection.execute("ALTER TABLE hidden RENAME TO scores")
    consumer.on_frame(refused)
    result = consumer.on_request_done(done(computed_length=8, rows=24))
    consumer.close()
    assert (result.status, result.payload["tokens"], result.payload["scores"]) == ("ok", 8, 16)
    assert query(tmp_path, "SELECT count(*), count(DISTINCT position) FROM tokens") == [(8, 8)]
    assert query(tmp_path, "SELECT count(*), count(DISTINCT (position, probe)) FROM scores") == [(16, 16)]


def test_a_restart_while_frames_could_not_be_written_loses_none_of_them(tmp_path):
    """The file lacks the middle frames of a running request; only these are written when all frames come again."""
    probe_file(tmp_path, "p")
    frames = [make_frame([("r1", 4, 4 * n, 4)], SITES, seq=n + 1) for n in range(6)]
    consumer = opened(tmp_path, "p")
    for frame in (*frames[:2], *frames[4:]):
        consumer.on_frame(frame)
    consumer.close()
    consumer = opened(tmp_path, "p")
    for frame in frames:
        consumer.on_frame(frame)
    assert consumer.on_request_done(done(computed_length=24, rows=72)).status == "ok"
    consumer.close()
    assert query(tmp_path, "SELECT position, count(*) FROM tokens GROUP BY ALL ORDER BY 1") == [
        (p, 1) for p in range(24)
    ]
    assert query(tmp_path, "SELECT count(*), count(DISTINCT (position, probe)) FROM scores") == [(48, 48)]
    marks = query(tmp_path, "SELECT capture, first_frame, last_frame FROM marks ORDER BY ALL")
    assert marks == [(1, 1, 2), (1, 3, 4), (1, 5, 6)]


def test_stages_that_tell_of_other_positions_of_a_request_leave_no_token_out(tmp_path):
    consumer = opened(tmp_path, site="post_block:0")
    consumer.on_frame(make_frame([("r1", 9, 8, 1)], SITES[:1]))
    consumer.on_frame(make_frame([("r1", 9, 0, 9)], SITES[1:2], rank=Rank(1, 0, 0)))
    assert consumer.on_request_done(done(prompt_length=9, computed_length=9, rows=10)).payload["tokens"] == 9
    consumer.close()
    assert query(tmp_path, "SELECT position, count(*) FROM tokens GROUP BY ALL ORDER BY 1") == [
        (p, 1) for p in range(9)
    ]


def test_a_request_whose_engine_was_started_again_is_another_capture(tmp_path):
    consumer = opened(tmp_path, site="post_block:0")
    consumer.on_frame(make_frame(sites=SITES[:1]))
    consumer.close()
    consumer = opened(tmp_path, site="post_block:0")
    consumer.on_frame(make_frame(sites=SITES[:1], boot="boot-2"))
    assert consumer.on_request_done(done(rows=4)).status == "ok"
    consumer.close()
    assert query(tmp_path, "SELECT capture, count(*) FROM tokens GROUP BY ALL ORDER BY 1") == [(1, 4), (2, 4)]
    assert query(tmp_path, "SELECT capture FROM requests") == [(2,)]


def test_rows_of_several_widths_and_dtypes_are_written_beside_each_other(tmp_path):
    consumer = opened(tmp_path, site="post_block:1", vectors=True)
    models = {"engine-1": (8, "float32"), "engine-2": (16, "bfloat16"), "engine-3": (8, "float16")}
    for seq in range(1, 4):
        for engine, (hidden, dtype) in models.items():
            span = ("r1", 4, 4 * (seq - 1), 4)
            consumer.on_frame(make_frame([span], SITES[1:2], seq=seq, engine=engine, hidden=hidden, dtype=dtype))
    for engine in models:
        end = msgspec.structs.replace(done(computed_length=12, rows=12), engine=engine)
        assert consumer.on_request_done(end).status == "ok"
    consumer.close()
    for engine, (hidden, dtype) in models.items():
        rows = query(tmp_path, f"SELECT position, vector FROM vectors WHERE engine = '{engine}' ORDER BY position")
        assert [position for position, _ in rows] == list(range(12))
        for position, vector in rows:
            np.testing.assert_array_equal(vector, row_of("r1", SITES[1], position, hidden, dtype).astype(np.float32))


# What cannot work is refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_rows": 0}, "consumers.duckdb.batch_rows: got 0, expected 1 or more"),
        ({"flush_s": -1.0}, "consumers.duckdb.flush_s: got -1.0, expected 0 or more"),
        ({"memory_bytes_max": 1}, "consumers.duckdb.memory_bytes_max: got 1, expected 67108864 or more"),
        ({"site": "nose"}, "site: got nose, expected HOOK:LAYER"),
        ({"site": "mlp_in:1", "positions": "x"}, "consumers.duckdb.positions: got x, expected one of"),
        ({"path": "/"}, "consumers.duckdb.path: got /, expected a file in a directory that exists"),
        ({"path": "/missing/x"}, "consumers.duckdb.path: got /missing/x, expected a file"),
        ({"probes": ["/missing"]}, "/missing: got no such file"),
    ],
)
def test_a_wrong_option_is_named_before_anything_is_opened(tmp_path, options, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        checked(DuckdbConsumer(DuckdbConfig(**{"path": str(tmp_path / "f"), **options})))


def test_probes_of_one_name_or_of_different_widths_are_refused(tmp_path):
    probe_file(tmp_path, "p")
    with pytest.raises(UsageError, match=r"consumers\.duckdb\.probes: got p\.a twice, expected different names"):
        opened(tmp_path, "p", "p")
    probe_file(tmp_path, "q", width=4)
    with pytest.raises(UsageError, match=r"q\.safetensors: weight: got 4 numbers, expected 8, as .*p\.safetensors"):
        opened(tmp_path, "p", "q")


def test_a_probe_that_does_not_fit_the_model_is_refused_when_the_engine_connects(tmp_path):
    probe_file(tmp_path, "p", width=4)
    with pytest.raises(UsageError, match=r"p\.safetensors: weight: got 4 numbers, expected 8, the model's width"):
        opened(tmp_path, "p")


def test_frames_of_a_model_that_does_not_fit_are_refused_with_the_reason(tmp_path):
    probe_file(tmp_path, "p")
    consumer = opened(tmp_path, "p")
    with pytest.raises(UsageError, match="expected 16, the model's width"):
        consumer.on_session("engine-1", make_model(hidden=16))
    with pytest.raises(UsageError, match="expected 16, the model's width"):
        consumer.on_frame(make_frame(sites=SITES, hidden=16))
    assert consumer.on_request_done(done(rows=12)).status == "error"
    consumer.on_session("engine-1", make_model())
    consumer.on_frame(make_frame(sites=SITES))


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "scores.duckdb").write_bytes(b"not a database" * 1000)
    message = r"consumers\.duckdb\.path: got /.* expected a DuckDB database, or a path without a file"
    with pytest.raises(UsageError, match=message):
        opened(tmp_path)


def test_a_database_whose_tables_are_others_is_refused(tmp_path):
    with duckdb.connect(str(tmp_path / "scores.duckdb")) as connection:
        connection.execute("CREATE TABLE tokens (word VARCHAR)")
    with pytest.raises(
        UsageError, match=r"whose table tokens has word, expected a new file, or one whose table tokens has"
    ):
        opened(tmp_path)


def test_a_file_that_another_program_has_open_is_refused(tmp_path):
    path = str(tmp_path / "scores.duckdb")
    with subprocess.Popen(
        [sys.executable, "-c", OPENER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "open\n"
        with pytest.raises(UsageError, match=r"which is in use: .* close the program that has it open"):
            opened(tmp_path)
        other.communicate("\n")
    opened(tmp_path).close()


def test_nobody_else_can_read_the_file_while_it_is_open(tmp_path):
    consumer = opened(tmp_path)
    path = str(tmp_path / "scores.duckdb")
    run = [sys.executable, "-c", OPENER, path, "ro"]
    refused = subprocess.run(run, input="\n", capture_output=True, text=True, check=False)
    assert "lock" in refused.stderr
    consumer.close()
    assert subprocess.run(run, input="\n", capture_output=True, text=True, check=True).stdout == "open\n"


# The documentation.


def test_the_queries_in_the_documentation_run_and_find_what_fired(tmp_path):
    text = (ROOT / "docs" / "querying.md").read_text()
    probe_file(tmp_path, "happy", threshold=-1e9)
    consumer = opened(tmp_path, "happy")
    consumer.on_frame(make_frame([("r1", 4, 0, 6)], SITES, texts=True))
    consumer.on_request_done(done(computed_length=6, rows=18))
    consumer.close()
    queries = re.findall(r"```sql\n(.*?)```", text, re.DOTALL)
    assert len(queries) >= 4
    for sql in queries:
        assert query(tmp_path, sql), sql
    listed = {
        line[0]: [name for cell in line[1:] for name in re.findall(r"`(\w+)`", cell)]
        for line in (re.findall(r"^\| `(\w+)` \|(.*)\|$", text, re.MULTILINE))
    }
    for table in [*TABLES, *VIEWS]:
        assert listed[table] == [column for column, *_ in query(tmp_path, f"DESCRIBE {table}")], table


def test_the_snippets_in_the_documentation_write_probes(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "querying.md").read_text()
    monkeypatch.chdir(tmp_path)
    for body in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(body, "querying.md", "exec"), {})  # noqa: S102
    names = [load_probe(path).names for path in sorted(tmp_path.glob("*.safetensors"))]
    assert names == [("emotions.17", "emotions.2048"), ("happy",)]


@pytest.mark.parametrize("reopened", [True, False])
def test_a_frame_of_which_a_part_was_taken_is_not_vouched_for(tmp_path, monkeypatch, reopened):
    probe_file(tmp_path, "p", SITES[0])
    probe_file(tmp_path, "q", SITES[1])
    consumer = opened(tmp_path, "p", "q")
    frames = [make_frame([("r1", 4, 4 * n, 4)], SITES, seq=n + 1) for n in range(2)]
    consumer.on_frame(frames[0])
    stage = consumer._pending._stages[SITES[1], 8, np.dtype(np.float32)]
    with monkeypatch.context() as patched:
        patched.setattr(stage, "add", lambda *_: 1 / 0)
        with pytest.raises(FatalError, match="part of a frame was taken: got ZeroDivisionError"):
            consumer.on_frame(frames[1])
    if reopened:
        consumer.close()
        consumer.open(Counts())
        consumer.on_session("engine-1", make_model())
        for frame in frames:
            consumer.on_frame(frame)
    result = consumer.on_request_done(done(computed_length=8, rows=24))
    consumer.close()
    assert result.status == ("ok" if reopened else "error"), result
    rows = 8 if reopened else 0
    assert query(tmp_path, "SELECT count(*), count(DISTINCT position) FROM tokens") == [(rows, rows)]
    assert query(tmp_path, "SELECT count(*), count(DISTINCT (position, probe)) FROM scores") == [(4 * rows, 4 * rows)]
    assert query(tmp_path, "SELECT sum(last_frame + 1 - first_frame) FROM marks") == [(2 if reopened else None,)]
