"""An engine whose hub goes away and comes back: what it computed meanwhile is all there, and its answers are vLLM's."""

from __future__ import annotations

import functools
import inspect
import threading

import pytest

import capflow
from capflow.buffers.spool.files import Files
from capflow.transport.links.worker import WorkerLink
from tests.kit.engines import GREEDY, answers, engine, prompts
from tests.kit.hubs import address, running_hub
from tests.kit.rows import ALL, Keeper
from tests.kit.waiting import eventually

__all__ = ["address"]

pytestmark = pytest.mark.engine
LENGTHS = [5, 40, 17, 3]


def asked(name):
    return [capflow.sampling_params(id=f"{name}{n}", capture=ALL, max_tokens=12, **GREEDY) for n in range(len(LENGTHS))]


def test_what_is_computed_while_the_hub_is_gone_is_delivered_when_it_is_back(tiny, reference, address, tmp_path):
    first, second = Keeper(), Keeper()
    with running_hub(address, first) as hub, engine(tiny, hub=address, policy="spill", spool_dir=str(tmp_path)) as llm:
        before = llm.generate(prompts(LENGTHS), asked("before"), use_tqdm=False)
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        (link,) = worker.capflow.outlets.links
        hub.stop(20)
        eventually(lambda: not link.connected)
        gone = llm.generate(prompts(LENGTHS), asked("gone"), use_tqdm=False)
        assert answers(gone) == answers(before)
        eventually(lambda: link.outbox.waiting > 10)
        with running_hub(address, second):
            eventually(lambda: len(second.done) == len(LENGTHS))
            after = llm.generate(prompts(LENGTHS), asked("after"), use_tqdm=False)
            assert answers(after) == answers(before)
            eventually(lambda: len(second.done) == 2 * len(LENGTHS))
            eventually(lambda: link.outbox.unacknowledged == 0)
    for keeper, name, outputs in ((first, "before", before), (second, "gone", gone), (second, "after", after)):
        for n, output in enumerate(outputs):
            tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
            assert keeper.done[f"{name}{n}"].dropped == ()
            keeper.hold(f"{name}{n}", tokens, reference)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("policy", [pytest.param("drop", marks=pytest.mark.long), "spill"])
def test_answers_are_the_same_whether_a_hub_is_there_or_not(tiny, address, tmp_path, monkeypatch, policy):
    """The hub is absent, present, gone. With `drop` no hub is there to report the lost rows; with `spill` none are."""
    keeper, spool = Keeper(), {"spool_dir": str(tmp_path)} if policy == "spill" else {}
    plain = capflow.sampling_params(max_tokens=12, **GREEDY)
    with engine(tiny, capflow_on=False) as llm:
        from vllm import SamplingParams

        expected = answers(llm.generate(prompts(LENGTHS), SamplingParams(max_tokens=12, **GREEDY), use_tqdm=False))
    monkeypatch.setenv("CAPFLOW_HUB", address)  # where one is looked for, as long as it takes
    with engine(tiny, policy=policy, **spool) as llm:
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        (link,) = worker.capflow.outlets.links
        assert answers(llm.generate(prompts(LENGTHS), plain, use_tqdm=False)) == expected
        absent = llm.generate(prompts(LENGTHS), asked("absent"), use_tqdm=False)
        assert answers(absent) == expected
        with running_hub(address, keeper) as hub:
            eventually(lambda: link.connected)
            assert answers(llm.generate(prompts(LENGTHS), asked("there"), use_tqdm=False)) == expected
            eventually(lambda: len(keeper.done) == len(LENGTHS))
            hub.stop(20)
            eventually(lambda: not link.connected)
            assert answers(llm.generate(prompts(LENGTHS), asked("gone"), use_tqdm=False)) == expected


def test_nothing_of_the_spool_or_the_socket_is_done_by_the_thread_that_computes(tiny, address, tmp_path, monkeypatch):
    """In an engine that spills while its hub is gone, only background threads touch the spool's files or the socket."""
    threads = {}

    def watch(owner, name):
        method = getattr(owner, name)

        @functools.wraps(method)
        def watched(*args, **kwargs):
            threads.setdefault(f"{owner.__name__}.{name}", set()).add(threading.get_ident())
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    with (
        running_hub(address, Keeper()) as hub,
        engine(tiny, hub=address, policy="spill", spool_dir=str(tmp_path)) as llm,
    ):
        for name, _ in inspect.getmembers(Files, inspect.isfunction):
            watch(Files, name)
        watch(WorkerLink, "_fill")
        llm.generate(prompts(LENGTHS), asked("there"), use_tqdm=False)
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        (link,) = worker.capflow.outlets.links
        hub.stop(20)
        eventually(lambda: not link.connected)
        llm.generate(prompts(LENGTHS), asked("gone"), use_tqdm=False)
        eventually(lambda: link.outbox.waiting > 10)
        eventually(lambda: "Files.fdatasync" in threads)
    assert {"Files.write", "Files.fdatasync", "WorkerLink._fill"} <= set(threads)
    assert {name for name, idents in threads.items() if threading.get_ident() in idents} == set()
