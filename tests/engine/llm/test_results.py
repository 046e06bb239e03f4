"""What became of requests, asked of a hub that may not be there: nobody waits who did not ask for rows."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from capflow import limits
from capflow.transport.address import is_listening
from capflow.transport.client import Client
from capflow_engine.hubs import HubAt
from capflow_engine.llm import results as results_module
from capflow_engine.llm.asker import HUB, Asker
from capflow_engine.llm.results import HubResults
from tests.kit.frames import make_finished, make_frame
from tests.kit.hubs import Recorder, address, running_hub, worker_link
from tests.kit.waiting import eventually

__all__ = ["address"]


def test_whether_anything_listens_is_known_of_each_kind_of_address(address, tmp_path):
    assert not is_listening(address)
    stale = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(stale))
    assert stale.exists()
    assert not is_listening(f"ipc://{stale}")
    with running_hub(address, Recorder()), socket.socket() as port:
        assert is_listening(address)
        port.bind(("127.0.0.1", 0))
        there = f"tcp://{'ab' * 32}@127.0.0.1:{port.getsockname()[1]}"
        assert not is_listening(there)
        port.listen()
        assert is_listening(there)


def test_a_hub_that_is_not_there_is_looked_for_only_by_who_asked_for_rows(address, monkeypatch):
    waited = []

    def client(hub, timeout_s=0.1):
        waited.append(hub)
        return Client(hub.address, 0.1)

    monkeypatch.setattr(HubAt, "client", client)
    results = HubResults(HubAt(address), "")
    for _ in range(3):
        assert results.ask([("r1", False)]) == {}
    assert waited == []
    assert results.ask([("r1", False), ("r2", True)]) == {}
    assert len(waited) == 1


def test_a_hub_is_asked_also_of_requests_that_asked_for_nothing_and_left_when_it_goes(address):
    """It may capture every request."""
    results = HubResults(HubAt(address), "")
    with running_hub(address, Recorder()), worker_link(address) as link:
        made = make_frame([("r1", 4, 0, 4)], finished=[make_finished("r1")])
        assert link.send(made.header, made.payload) is None
        eventually(lambda: results.ask([("r1", False)])["r1"]["recorder"].status == "ok")
    assert results.ask([("r1", False)]) == {}
    results.close()


def test_results_are_waited_for_while_the_consumer_makes_progress(address, monkeypatch):
    class Slow(Recorder):
        def on_frame(self, frame):
            # Ten of them take longer than the wait without progress.
            time.sleep(0.3)
            super().on_frame(frame)

    monkeypatch.setattr(results_module, "_STILL_S_MAX", 1.5)
    results = HubResults(HubAt(address), "")
    with running_hub(address, Slow()), worker_link(address) as link:
        for step in range(10):
            finished = [make_finished("r1", 4, 40)] if step == 9 else []
            made = make_frame([("r1", 4, 4 * step, 4)], finished=finished, step=step)
            assert link.send(made.header, made.payload) is None
        assert results.ask([("r1", True)])["r1"]["recorder"].status == "ok"
    results.close()


def test_a_hub_that_came_back_is_asked_of_everything_again(address):
    """Also within the minute in which nobody would look for one that was not there."""
    results = HubResults(HubAt(address), "")
    assert results.ask([("gone", True)]) == {}
    with running_hub(address, Recorder()), worker_link(address) as link:
        for name in ("r1", "r2"):
            made = make_frame([(name, 4, 0, 4)], finished=[make_finished(name)])
            assert link.send(made.header, made.payload) is None
        assert results.ask([("r1", True)])["r1"]["recorder"].status == "ok"
        assert results.ask([("r2", False)])["r2"]["recorder"].status == "ok"
    results.close()


@pytest.mark.parametrize("listens", [True, False])
def test_a_server_answers_at_once_what_asked_for_nothing_while_no_hub_is_there(address, listens):
    """Though it would wait for an hour; what asked for rows, or to wait, has an answer when its time is over."""

    def client(timeout_s):
        return Client(address, 0.05)

    async def ask():
        asker = Asker(client, lambda: listens)
        ended = []

        async def one(name, **how):
            result = await asker.ask([name], **how)
            ended.append(name)
            return result

        asking = (
            one("waits", captures=False, wait_s=0.5),
            one("plain", captures=False, wait_s=3600, patient=False),
            one("rows", captures=True, wait_s=0.6),
        )
        return await asyncio.wait_for(asyncio.gather(*asking), 60), ended

    answers, ended = asyncio.run(ask())
    assert ended == ["plain", "waits", "rows"]
    for result, name in zip(answers, ("waits", "plain", "rows"), strict=True):
        assert set(result[name]) == {HUB}
        assert result[name][HUB].status == "error"


def test_a_response_that_waits_says_soon_that_the_hub_is_away_and_then_at_once(address, monkeypatch):
    """Also where the hub refuses; one that listens and is slow is waited for."""
    monkeypatch.setattr(limits, "HUB_AWAY_S", 0.5)
    listens = False

    async def ask():
        asker = Asker(lambda _: Client(address, 0.05), lambda: listens)
        took = []
        for wait_s in (300, 300, 1.5):
            begun = time.monotonic()
            result = await asker.ask(["rows"], captures=True, wait_s=wait_s)
            took.append(time.monotonic() - begun)
            assert result["rows"][HUB].status == "error"
            nonlocal listens
            listens = len(took) > 1
        return took

    first, again, slow = asyncio.run(asyncio.wait_for(ask(), 60))
    assert 0.5 <= first < 20
    assert again < 0.4
    assert slow >= 1.5


def test_a_response_that_waits_has_the_results_of_a_hub_that_is_back_soon(address):
    async def ask():
        asker = Asker(lambda _: Client(address, 1.0), listens)
        return await asker.ask(["r1"], captures=True, wait_s=60)

    looked = threading.Event()

    def listens():
        looked.set()
        return is_listening(address)

    async def later():
        asking = asyncio.create_task(ask())
        assert await asyncio.to_thread(looked.wait, 20)
        with running_hub(address, Recorder()), worker_link(address) as link:
            made = make_frame([("r1", 4, 0, 4)], finished=[make_finished("r1")])
            assert link.send(made.header, made.payload) is None
            return await asking

    assert asyncio.run(asyncio.wait_for(later(), 60))["r1"]["recorder"].status == "ok"


def test_many_requests_that_do_not_end_are_asked_about_at_a_bounded_rate(address):
    """And one that ends meanwhile is answered soon."""
    asked = []

    class Counting(Client):
        def results(self, names, **how):
            asked.append(len(list(names)))
            return super().results(names, **how)

    async def ask():
        asker = Asker(lambda timeout_s: Counting(address, timeout_s))
        many = asyncio.create_task(asker.ask([f"never-{n}" for n in range(16_384)], captures=True, wait_s=3.0))
        result = await asyncio.wait_for(asker.ask(["r1"], captures=True, wait_s=20.0), 20)
        waited = await asyncio.wait_for(many, 20)
        return result, waited

    with running_hub(address, Recorder()), worker_link(address) as link:
        made = make_frame([("r1", 4, 0, 4)], finished=[make_finished("r1")])
        assert link.send(made.header, made.payload) is None
        result, waited = asyncio.run(ask())
    assert result["r1"]["recorder"].status == "ok"
    assert len(waited) == 16_384
    assert sum(asked) < 8 * 16_384
