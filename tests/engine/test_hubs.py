"""Several hubs: each has its own requests, and one that is gone holds up no other."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from capflow.capture.spec import CaptureSpec
from capflow.errors import UsageError
from capflow.protocol.routing import hub_of
from capflow.steering.action import Abort, ActionApplied, Rejected
from capflow.transport.client import Client
from capflow.transport.keys import write_key
from capflow.transport.zap import new_key
from capflow_engine.hubs import HubAt, HubLinks, hubs_at
from capflow_engine.llm.results import Askers
from tests.kit.frames import make_finished, make_frame, make_hello, make_model
from tests.kit.hubs import Recorder, running_hub, worker_link
from tests.kit.waiting import eventually


@pytest.fixture
def addresses():
    with tempfile.TemporaryDirectory(prefix="cf") as directory:
        yield [f"ipc://{directory}/{name}" for name in "ab"]


def names_of(hub, count, prefix="r"):
    """Return the ids of some requests that belong to a hub, of two."""
    names = (f"{prefix}{number}" for number in itertools.count())
    return list(itertools.islice((name for name in names if hub_of(name, 2) == hub), count))


class TestHubsAt:
    def test_without_an_address_it_is_the_default_one(self, monkeypatch):
        monkeypatch.setenv("CAPFLOW_HUB", "ipc:///h")
        assert hubs_at([]) == (HubAt("ipc:///h"),)

    def test_their_order_is_kept(self):
        hubs = hubs_at(["ipc:///b", "ipc:///a", "tcp://127.0.0.1:1"])
        assert [hub.address for hub in hubs] == ["ipc:///b", "ipc:///a", "tcp://127.0.0.1:1"]

    @pytest.mark.parametrize(
        ("addresses", "message"),
        [
            (["ipc:///a", "ipc:///b", "ipc:///a"], "--hub: got ipc:///a twice"),
            (["ipc:///a", "http://x"], "--hub: got http://x"),
            (["tcp://10.0.0.1:1"], "--hub: got tcp://10.0.0.1:1"),
            ([f"ipc:///{n}" for n in range(65)], "--hub: got 65 hubs, expected at most 64"),
        ],
    )
    def test_wrong_ones_are_refused_by_name(self, addresses, message):
        with pytest.raises(UsageError, match=message):
            hubs_at(addresses, where="--hub")

    def test_a_key_is_for_those_that_have_one(self, tmp_path):
        pair = new_key()
        path = write_key(tmp_path, "mine", pair)
        keyed = f"tcp://{pair.public}@127.0.0.1:1"
        assert hubs_at([keyed, "ipc:///a"], str(path)) == (HubAt(keyed, str(path)), HubAt("ipc:///a"))
        with pytest.raises(UsageError, match="--key: got the address ipc:///a"):
            hubs_at(["ipc:///a"], str(path))


class TestScheduler:
    @pytest.fixture
    def links(self, addresses):
        hello = make_hello(role="scheduler", boot="scheduler")
        links = HubLinks([HubAt(address) for address in addresses], hello, lambda _: "")
        yield links
        links.close()

    def test_each_hub_says_what_it_wants(self, addresses, links):
        first = CaptureSpec({"post_block": [0]})
        second = CaptureSpec({"mlp_in": [1, 2]})
        with running_hub(addresses[0], Recorder(spec=first)):
            links.wait_welcomes(0.5)
            assert [w and w.captures for w in links.welcomes] == [(first,), None]
            with running_hub(addresses[1], Recorder(spec=second)):
                links.wait_welcomes(20)
                assert [w.captures for w in links.welcomes] == [(first,), (second,)]

    def test_the_outcome_of_an_action_goes_to_the_hub_that_asked(self, addresses, links):
        with running_hub(addresses[0], Recorder()), running_hub(addresses[1], Recorder()):
            links.wait_welcomes(20)
            outcomes = {}

            def act(number):
                with Client(addresses[number]) as client:
                    outcomes[number] = client.act(Abort(f"asked-of-{number}"), timeout=20)

            threads = [threading.Thread(target=act, args=(number,)) for number in range(2)]
            for thread in threads:
                thread.start()
            acts = []
            eventually(lambda: acts.extend(links.actions(lambda _: True)) or len(acts) == 2)
            assert len({act.id for act in acts}) == 2, "both hubs call theirs by the same number"
            for act in acts:
                first = act.action.request == "asked-of-0"
                links.outcome(ActionApplied(act.id, 7) if first else Rejected(act.id, "no"))
            for thread in threads:
                thread.join(20)
        assert isinstance(outcomes[0], ActionApplied)
        assert isinstance(outcomes[1], Rejected)
        assert outcomes[1].reason == "no"


class TestResults:
    def settings(self, addresses, spares=0):
        hubs = tuple(HubAt(address) for address in addresses)
        regular = len(hubs) - spares
        return SimpleNamespace(
            engine="engine-1", hubs=hubs, spares=spares, regular=regular, hub_of=lambda name: hub_of(name, regular)
        )

    def test_each_hub_is_asked_for_its_own_and_one_that_is_gone_delays_no_other(self, addresses):
        (mine,), (others,) = names_of(0, 1), names_of(1, 1)
        askers = Askers(self.settings(addresses))

        async def ask():
            begun = time.monotonic()

            async def one(name, wait_s):
                results = await askers.ask([name], captures=True, wait_s=wait_s)
                return results[name], time.monotonic() - begun

            return await asyncio.gather(one(mine, 30.0), one(others, 3.0)), await askers.ask(
                [others, mine], captures=True, wait_s=0.5
            )

        with running_hub(addresses[0], Recorder()), worker_link(addresses[0]) as link:
            frame = make_frame([(mine, 4, 0, 4)], finished=[make_finished(mine)])
            assert link.send(frame.header, frame.payload) is None
            ((results, took), (unknown, waited)), both = asyncio.run(ask())
        assert results["recorder"].status == "ok"
        assert took < waited
        assert list(unknown) == ["hub"]
        assert unknown["hub"].status == "error"
        assert list(both) == [others, mine]
        assert both[mine]["recorder"].status == "ok"

    def test_the_requests_of_a_spare_hub_are_found_there(self, addresses):
        """By what the engine says of them while they end, and by their names alone."""
        askers = Askers(self.settings(addresses, spares=1))

        async def ask():
            by_report = await askers.ask(["mine", "moved"], {"moved": 1}, captures=True, wait_s=20.0)
            by_name = await askers.find(["moved", "mine", "other"], wait_s=0.0, known_s=0.3)
            return by_report, by_name

        with contextlib.ExitStack() as stack:
            for address, name in zip(addresses, ("mine", "moved"), strict=True):
                stack.enter_context(running_hub(address, Recorder()))
                link = stack.enter_context(worker_link(address))
                frame = make_frame([(name, 4, 0, 4)], finished=[make_finished(name)])
                assert link.send(frame.header, frame.payload) is None
            by_report, by_name = asyncio.run(ask())
        assert [by_report[name]["recorder"].status for name in ("mine", "moved")] == ["ok", "ok"]
        assert by_name["moved"]["recorder"].status == by_name["mine"]["recorder"].status == "ok"
        assert by_name["other"] == {}


def test_a_hub_that_moves_is_found_where_its_name_leads(addresses, tmp_path):
    """The name of a socket is a path, as that of a machine is in DNS: it is looked up at each attempt to connect."""
    here, there = addresses
    with tempfile.TemporaryDirectory(prefix="cf") as directory:
        name = Path(directory) / "hub"
        name.symlink_to(here.removeprefix("ipc://"))
        before, after = Recorder(), Recorder()
        with worker_link(f"ipc://{name}", make_hello(model=make_model()), wait=False) as link:
            with running_hub(here, before):
                assert link.wait_welcome(20)
                first = make_frame([("r1", 4, 0, 4)])
                link.send(first.header, first.payload)
                eventually(lambda: before.rows["r1"] == 4)
            eventually(lambda: not link.connected)
            name.unlink()
            name.symlink_to(there.removeprefix("ipc://"))
            second = make_frame([("r2", 4, 0, 4)], finished=[make_finished("r2")])
            assert link.send(second.header, second.payload) is None
            with running_hub(there, after):
                eventually(lambda: "r2" in after.done)
    assert before.rows == {"r1": 4}
    assert after.rows == {"r2": 4}
