"""Lenses through the page's socket: each token's answer, plain refusals, and a process that is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")

from websockets.exceptions import ConnectionClosed

import capflow
from capflow.capture.frame import Rank
from capflow.capture.result import RequestDone
from capflow.capture.site import Site
from capflow_dashboard import limits
from capflow_dashboard.board.board import Board
from capflow_dashboard.lens.desk import LensDesk
from capflow_dashboard.lens.rows import KeptRows
from capflow_dashboard.wire import TokenAsk
from tests.kit.dashboards import Pageless, open_dashboard
from tests.kit.frames import make_frame, make_model
from tests.kit.lenses import TOKENS, assert_lens, assert_tokens, change_config, save_model, save_translators, stopped
from tests.kit.waiting import eventually


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("gemma"), "gemma2", tied=True)


@pytest.fixture
def own(tmp_path):
    """A model whose files a test may change."""
    return save_model(tmp_path, "llama")


@pytest.fixture
def unhurried(monkeypatch):
    """Let a page ask as often as it likes."""
    monkeypatch.setattr(limits, "LENSES_PER_S_MAX", 1000)


@contextlib.contextmanager
def shown(model, *, near=True, frame=None, options=None, **changes):
    """Yield a dashboard that shows the request of a model, and a page of it."""
    with open_dashboard(near=near, **(options or {})) as consumer, Pageless(consumer) as page:
        consumer.on_session("engine-1", msgspec.structs.replace(model.info, **changes))
        consumer.on_frame(model.frame() if frame is None else frame)
        page.until(lambda p: p.requests)
        yield consumer, page


def job_of(consumer):
    return consumer._process.lens.pid


def ask_and_wait(consumer, page, position, id=1):
    """Ask for a lens; return once the process is asked."""
    page.ask(1, position, id)
    eventually(consumer._process.lens._lock.locked)


def is_alive(pid):
    """Return whether a process runs; one that ended and is not reaped does not."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def done(request):
    return RequestDone("engine-1", request, "stop", 4, 6, 24, 24, ())


def test_every_token_has_the_lens_of_transformers(llama, unhurried):
    with shown(llama) as (_, page):
        for position in range(len(TOKENS)):
            answer = page.lens(1, position, id=40 + position)
            assert answer["error"] == ""
            assert (answer["id"], answer["request"], answer["position"]) == (40 + position, 1, position)
            assert [layer["site"] for layer in answer["layers"]] == ["post_block:0", "post_block:1", "post_block:2"]
            assert [layer["layer"] for layer in answer["layers"]] == [0, 1, 2]
            assert_lens(answer["layers"], llama, llama.rows[:, position])
            logits = llama.logits()[position]
            own = np.exp(logits - logits.max())
            assert_tokens(answer["layers"][-1]["tokens"], own / own.sum())
            assert {text for layer in answer["layers"] for _, text, _ in layer["tokens"]} == {None}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_coarser_dtypes_are_taken_as_they_are(llama, dtype):
    with shown(llama, frame=llama.frame(dtype=dtype)) as (_, page):
        rounded = llama.rows[:, 2].astype(np.dtype(dtype)).astype(np.float32)
        assert_lens(page.lens(1, 2)["layers"], llama, rounded)


def test_stages_of_a_pipeline_send_the_rows_of_one_token_in_several_frames(llama, unhurried):
    with shown(llama, frame=llama.frame(layers=[0, 1], rank=Rank(0, 0, 0)), stages=2) as (consumer, page):
        consumer.on_frame(llama.frame(layers=[2], positions=(3, 6), rank=Rank(1, 0, 0)))
        page.until(lambda p: p.counts.get("rows", 0) == 15)
        assert_lens(page.lens(1, 4)["layers"], llama, llama.rows[:, 4])
        partial = page.lens(1, 0)["layers"]
        assert [layer["layer"] for layer in partial] == [0, 1]
        assert_lens(partial, llama, llama.rows[:2, 0])


def test_engines_of_two_models_have_each_its_own_lens(llama, gemma, unhurried):
    with shown(llama) as (consumer, page):
        consumer.on_session("engine-2", gemma.info)
        consumer.on_frame(gemma.frame(engine="engine-2"))
        page.until(lambda p: len(p.requests) == 2)
        keys = {request["engine"]: key for key, request in page.requests.items()}
        for _ in range(2):
            assert_lens(page.lens(keys["engine-1"], 1)["layers"], llama, llama.rows[:, 1])
            assert_lens(page.lens(keys["engine-2"], 1)["layers"], gemma, gemma.rows[:, 1])


def test_a_request_with_the_id_of_an_earlier_one_has_its_own_rows(llama, unhurried):
    with shown(llama, frame=llama.frame(positions=(0, 3), incarnation="a")) as (consumer, page):
        consumer.on_request_done(done("r1"))
        again = llama.frame(positions=(0, 3), incarnation="b")
        rows = np.ascontiguousarray(llama.rows[:, 3:6])
        consumer.on_frame(type(again).seal(again.header, rows.view(np.uint8).reshape(-1)))
        page.until(lambda p: len(p.requests) == 2)
        assert_lens(page.lens(1, 0)["layers"], llama, llama.rows[:, 0])
        assert_lens(page.lens(2, 0)["layers"], llama, llama.rows[:, 3])


def test_two_pages_that_ask_at_once_get_each_its_own_answer(llama):
    with shown(llama) as (consumer, one), Pageless(consumer) as two:
        assert one.lens(1, 0)["error"] == ""
        with stopped(job_of(consumer)):
            one.ask(1, 1, id=11)
            two.ask(1, 2, id=12)
        _, first = one.until(lambda p: p.lenses if len(p.lenses) == 2 else None)
        (second,) = two.until(lambda p: p.lenses)
        assert (first["id"], second["id"]) == (11, 12)
        assert_lens(first["layers"], llama, llama.rows[:, 1])
        assert_lens(second["layers"], llama, llama.rows[:, 2])


def test_of_the_asks_that_wait_the_newest_is_answered(llama, unhurried):
    with shown(llama) as (consumer, page):
        page.lens(1, 0)
        with stopped(job_of(consumer)):
            ask_and_wait(consumer, page, 1, id=2)
            for number in range(3, 7):
                page.ask(1, 1, id=number)
            # Read in order, so the asks before it were read.
            page.subscribe(request=1)
            page.until(lambda p: p.columns)
        page.until(lambda p: p.lenses[-1]["id"] == 6)
        assert [answer["id"] for answer in page.lenses] == [1, 2, 6]


def test_a_page_gets_two_a_second_at_most(llama):
    with shown(llama) as (_, page):
        page.lens(1, 0)
        begun = time.monotonic()
        page.lens(1, 0)
        page.lens(1, 0)
        assert time.monotonic() - begun >= 1.9 / limits.LENSES_PER_S_MAX


def test_updates_come_while_a_lens_is_computed(llama, unhurried):
    with shown(llama) as (consumer, page):
        page.lens(1, 0)
        with stopped(job_of(consumer)):
            ask_and_wait(consumer, page, 1)
            consumer.on_frame(llama.frame("r2", seq=2))
            page.until(lambda p: len(p.requests) == 2)
            assert len(page.lenses) == 1
        page.until(lambda p: len(p.lenses) == 2)


@pytest.mark.parametrize(
    ("request_key", "position", "message"),
    [
        (9, 0, "lens: got request 9, expected a request that is shown"),
        (1, 6, "lens: got position 6, whose rows are not kept, expected one of the newest 128 MiB of rows"),
    ],
)
def test_a_token_that_is_not_here_is_refused(llama, request_key, position, message):
    with shown(llama) as (consumer, page):
        answer = page.lens(request_key, position)
        assert (answer["error"], answer["layers"]) == (message, [])
        assert job_of(consumer) is None


def test_rows_that_made_room_for_newer_ones_are_refused(llama, unhurried):
    with shown(llama) as (consumer, page):
        assert page.lens(1, 0)["error"] == ""
        rows = consumer._process.rows
        rows._bytes_max = rows.nbytes
        consumer.on_frame(llama.frame("r2", seq=2))
        page.until(lambda p: len(p.requests) == 2)
        assert "position 0, whose rows are not kept" in page.lens(1, 0)["error"]
        assert page.lens(2, 0)["error"] == ""


def test_rows_of_other_hooks_have_no_lens():
    with open_dashboard(hook="pre_attn") as consumer, Pageless(consumer) as page:
        consumer.on_session("engine-1", make_model())
        consumer.on_frame(make_frame([("r1", 4, 0, 4)], [Site(0, "pre_attn")]))
        page.until(lambda p: p.requests)
        expected = "lens: got rows of pre_attn, expected the stream after a block; capture post_block"
        assert page.lens(1, 0)["error"] == expected


def test_a_model_that_is_not_on_this_machine_is_refused(llama):
    with shown(llama, name="nobody/nothing-1b") as (_, page):
        error = page.lens(1, 0)["error"]
        assert error.startswith("lens: the model's files: got nobody/nothing-1b, which is not here, expected a")


@pytest.mark.parametrize("changes", [{"num_layers": 4}, {"hidden_size": 32}])
def test_files_of_another_model_are_refused(llama, changes):
    with shown(llama, **changes) as (_, page):
        error = page.lens(1, 0)["error"]
        assert "64" in error
        assert "expected" in error
        assert "\n" not in error


def test_a_data_set_may_have_fewer_layers_than_the_model(llama, unhurried):
    with shown(llama, frame=llama.frame(layers=[0, 1]), num_layers=2, sites=llama.info.sites[:2]) as (consumer, page):
        assert "3 layers of width 64, expected those of the engine's model: 2 of width 64" in page.lens(1, 3)["error"]
        consumer.board.source = ("stored", "rows")
        assert_lens(page.lens(1, 3)["layers"], llama, llama.rows[:2, 3])


def test_a_desk_that_is_closed_starts_no_process(llama):
    board, rows, frame = Board(4, 64), KeptRows(), llama.frame()
    board.greet("engine-1", llama.info, llama.info.sites, [])
    board.take(frame)
    rows.add(frame)

    async def answers():
        desk = LensDesk(board, rows)
        before = await desk.answer(TokenAsk(1, 1, 0))
        await desk.close()
        return before, await desk.answer(TokenAsk(2, 1, 0)), desk.pid

    before, after, pid = asyncio.run(answers())
    assert_lens(before["layers"], llama, llama.rows[:, 0])
    assert (after["error"], after["layers"], pid) == ("lens: got the end of the dashboard", [], None)


def test_damaged_weights_are_refused_and_whole_ones_work_again(own, unhurried):
    path = Path(own.directory) / "model.safetensors"
    content = path.read_bytes()
    with shown(own) as (_, page):
        for damage in (content[:-1], content[:100], b"", b"\xff" * 64, content + b"x"):
            path.write_bytes(damage)
            error = page.lens(1, 0)["error"]
            assert error.startswith(f"{path}: got Error while deserializing header"), error
            assert "\n" not in error
        path.write_bytes(content)
        assert_lens(page.lens(1, 0)["layers"], own, own.rows[:, 0])


@pytest.mark.parametrize("near", [True, False])
def test_a_lens_file_is_shown_live_as_it_is_read_offline(llama, unhurried, near, tmp_path):
    path = tmp_path / "j.safetensors"
    save_translators(path, llama, "jacobian", layers=[1])
    expected = capflow.open_lens(llama.directory, path).by_site({1: llama.rows[1], 2: llama.rows[2]}, 8)
    with shown(llama, near=near, options={"lens": str(path)}) as (_, page):
        assert page.hello["lens_title"] == "Jacobian lens"
        answer = page.lens(1, 3)
        assert answer["error"] == ""
        # The file does not translate layer 0.
        assert [layer["site"] for layer in answer["layers"]] == ["post_block:1", "post_block:2"]
        for layer, reading in zip(answer["layers"], expected.values(), strict=True):
            assert [token for token, *_ in layer["tokens"]] == reading.ids[3].tolist()
            probabilities = [probability for *_, probability in layer["tokens"]]
            np.testing.assert_allclose(probabilities, reading.probabilities[3], rtol=1e-5)


def test_a_lens_of_other_weights_is_refused_unless_it_is_accepted(llama, unhurried, tmp_path):
    path = tmp_path / "j.safetensors"
    save_translators(path, llama, "jacobian", fingerprint="0" * 16)
    with shown(llama, options={"lens": str(path)}) as (_, page):
        assert page.lens(1, 0)["error"].startswith(f"{path}: got a lens of other weights, 0000000000000000, expected ")
    with shown(llama, options={"lens": str(path), "other_weights": True}) as (_, page):
        assert page.lens(1, 0)["error"] == ""


def test_a_lens_file_that_was_replaced_is_read_again(llama, unhurried, tmp_path):
    path = tmp_path / "j.safetensors"
    save_translators(path, llama, "jacobian")
    with shown(llama, options={"lens": str(path)}) as (_, page):
        before = page.lens(1, 0)["layers"]
        save_translators(path, llama, "jacobian", scale=1.0)
        after = page.lens(1, 0)["layers"]
        assert before[-1] == after[-1]
        assert before[0]["tokens"] != after[0]["tokens"]


def test_a_lens_that_translates_no_captured_layer_is_refused(llama, tmp_path):
    path = tmp_path / "j.safetensors"
    save_translators(path, llama, "jacobian", layers=[1])
    with shown(llama, frame=llama.frame(layers=[0]), sites=llama.info.sites[:1], options={"lens": str(path)}) as (_, p):
        assert p.lens(1, 0)["error"] == f"lens: got rows of post_block:0, expected layers that {path} translates"


def test_files_that_changed_are_read_again(own, unhurried):
    with shown(own) as (_, page):
        page.lens(1, 0)
        change_config(own.directory, model_type="phi3", rms_norm_eps=3.0)
        own.model.model.norm.variance_epsilon = 3.0
        assert_lens(page.lens(1, 0)["layers"], own, own.rows[:, 0])


def test_a_process_that_is_killed_is_named_and_the_next_lens_works(llama, unhurried):
    with shown(llama) as (consumer, page):
        page.lens(1, 0)
        job = job_of(consumer)
        with stopped(job):
            ask_and_wait(consumer, page, 1)
            os.kill(job, signal.SIGKILL)
            page.until(lambda p: len(p.lenses) == 2)
        assert page.lenses[-1]["error"] == f"lens of {llama.directory}: its process: got ended by SIGKILL"
        assert_lens(page.lens(1, 2)["layers"], llama, llama.rows[:, 2])


def test_a_process_that_was_killed_while_it_waited_is_started_again(llama, unhurried):
    with shown(llama) as (consumer, page):
        page.lens(1, 0)
        job = job_of(consumer)
        os.kill(job, signal.SIGKILL)
        eventually(lambda: consumer._process.lens._process.returncode is not None)
        assert_lens(page.lens(1, 2)["layers"], llama, llama.rows[:, 2])
        assert job_of(consumer) != job


def test_a_lens_that_takes_too_long_is_ended(llama, monkeypatch, unhurried):
    with shown(llama) as (consumer, page):
        page.lens(1, 0)
        job = job_of(consumer)
        monkeypatch.setattr(limits, "LENS_S_MAX", 0.25)
        with stopped(job):
            assert page.lens(1, 1)["error"] == f"lens of {llama.directory}: time: got more than 0.25 s"
            eventually(lambda: not is_alive(job))
        monkeypatch.setattr(limits, "LENS_S_MAX", 30.0)
        assert_lens(page.lens(1, 2)["layers"], llama, llama.rows[:, 2])


def test_a_lens_that_takes_too_much_memory_is_refused(own, monkeypatch, unhurried):
    monkeypatch.setattr(limits, "LENS_BYTES_MAX", 160 * limits.MIB)
    tokenizer = Path(own.directory) / "tokenizer.json"
    with shown(own) as (_, page):
        assert page.lens(1, 0)["error"] == ""
        tokenizer.write_text(json.dumps({"model": {"vocab": {"x" * (200 * limits.MIB): 0}}}))
        assert page.lens(1, 0)["error"].startswith(f"lens of {own.directory}: memory: got more than")
        tokenizer.unlink()
        assert_lens(page.lens(1, 2)["layers"], own, own.rows[:, 2])


def test_a_page_that_is_closed_leaves_no_answer_to_the_next(llama, unhurried):
    with shown(llama) as (consumer, page), Pageless(consumer) as closed:
        page.lens(1, 0)
        job = job_of(consumer)
        with stopped(job):
            ask_and_wait(consumer, closed, 1)
            closed.socket.close()
            eventually(lambda: job_of(consumer) != job)
            eventually(lambda: not is_alive(job))
        assert_lens(page.lens(1, 2)["layers"], llama, llama.rows[:, 2])


def test_an_idle_process_is_ended(llama, monkeypatch, unhurried):
    monkeypatch.setattr(limits, "LENS_IDLE_S", 0.5)
    with shown(llama) as (consumer, page):
        page.lens(1, 0)
        job = job_of(consumer)
        eventually(lambda: job_of(consumer) is None)
        eventually(lambda: not is_alive(job))
        assert_lens(page.lens(1, 2)["layers"], llama, llama.rows[:, 2])


def test_the_process_ends_with_the_dashboard_also_while_it_is_asked(llama, unhurried):
    with shown(llama) as (consumer, page):
        page.lens(1, 0)
        job = job_of(consumer)
        with stopped(job):
            ask_and_wait(consumer, page, 1)
            consumer.close()
            with contextlib.suppress(ConnectionClosed):
                page.drain(10)
            eventually(lambda: not is_alive(job))


def children_of(pid):
    """Return the processes that a process started."""
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]


def test_the_process_ends_when_the_pages_process_is_killed(llama):
    with shown(llama, near=False) as (consumer, page):
        assert_lens(page.lens(1, 2)["layers"], llama, llama.rows[:, 2])
        (job,) = children_of(consumer._process.pid)
        assert os.getpriority(os.PRIO_PROCESS, job) == os.getpriority(os.PRIO_PROCESS, 0) + 10
        os.kill(consumer._process.pid, signal.SIGKILL)
        eventually(lambda: not is_alive(job))


@pytest.mark.parametrize(
    "message",
    [
        {"lens": {"id": 1, "request": 1}},
        {"lens": {"id": 1, "request": 1, "position": -1}},
        {"lens": {"id": 1, "request": 1, "position": 0, "k": 3}},
        {"lens": {"id": 1, "request": 1, "position": 0}, "seen": 1},
        {"lens": {"id": 1, "request": 1, "position": 0}, "subscribe": {}},
        {"lens": None},
    ],
)
def test_a_page_that_asks_wrongly_is_cut_off(message):
    with open_dashboard() as consumer, Pageless(consumer) as page:
        page.socket.send(json.dumps(message))
        with pytest.raises(ConnectionClosed) as raised:
            page.drain(10)
        assert raised.value.rcvd.code == 1008


def test_kept_rows_are_bounded_and_the_newest():
    kept = KeptRows(64 * limits.KIB)
    site = Site(0, "post_block")
    for position in range(40):
        kept.add(make_frame([("r1", 4, position, 1)], [site], hidden=256, seq=position + 1))
        assert kept.nbytes <= 64 * limits.KIB
    rows = [bool(kept.find("engine-1", "r1", "", position, [site])) for position in range(40)]
    assert rows == sorted(rows)
    assert 10 < sum(rows) < 20


def test_a_frame_that_is_larger_than_all_room_is_not_kept():
    kept = KeptRows(8 * limits.KIB)
    kept.add(make_frame([("r1", 4, 0, 4)], [(0, "post_block")], hidden=2048))
    assert kept.nbytes == 0


def test_kept_rows_are_found_without_a_copy_of_frames():
    kept = KeptRows()
    frame = make_frame([("r1", 4, 0, 4), ("r2", 2, 7, 2)], [(0, "post_block"), (1, "post_block")], dtype="bfloat16")
    kept.add(frame)
    assert kept._frames[0][0].payload is frame.payload
    site = Site(1, "post_block")
    (row,) = kept.find("engine-1", "r2", "", 8, [site]).values()
    _, second = frame.chunks()
    np.testing.assert_array_equal(row, second.rows[1, 1].astype(np.float32))
    assert not kept.find("engine-1", "r2", "", 9, [site])
    assert not kept.find("engine-1", "r2", "", 6, [site])
    assert not kept.find("engine-2", "r2", "", 8, [site])
    assert not kept.find("engine-1", "r2", "x", 8, [site])
    assert not kept.find("engine-1", "r2", "", 8, [Site(2, "post_block")])


def test_of_a_position_that_was_computed_twice_the_newest_row_counts():
    kept = KeptRows()
    site = Site(0, "post_block")
    old = make_frame([("r1", 4, 0, 4)], [site])
    again = make_frame([("r1", 4, 2, 1)], [site], seq=2)
    new = type(again).seal(again.header, np.full(8, 5, np.float32).view(np.uint8))
    kept.add(old)
    kept.add(new)
    assert kept.find("engine-1", "r1", "", 2, [site])[site].tolist() == [5.0] * 8
    assert kept.find("engine-1", "r1", "", 1, [site])[site].tolist() != [5.0] * 8
