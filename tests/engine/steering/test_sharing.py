"""Front ends of one engine share modules and the global state through its hubs."""

from __future__ import annotations

import contextlib
import threading
import uuid

import numpy as np
import pytest

from capflow import limits
from capflow.capture.site import Site
from capflow.errors import UsageError
from capflow.steering.request import NOTHING, Steering, Tier
from capflow.steering.vector import SteeringVector
from capflow_engine.hubs import HubAt
from capflow_engine.settings import Settings
from capflow_engine.steering.sharing import NotEverywhereError, Sharing
from capflow_engine.steering.store import SteeringStore
from tests.kit.hubs import Recorder, address, running_hub
from tests.kit.waiting import eventually

__all__ = ["address"]


def steering(value, width=4):
    vector = SteeringVector.make(Site(1, "post_block"), np.full(width, value, np.float32))
    return Steering(base=Tier((vector,)))


@contextlib.contextmanager
def front(*addresses, engine="run-1", directory=None, check=lambda _new, _asked: None):
    """Yield the store of a front end of an engine."""
    settings = Settings(engine, tuple(map(HubAt, addresses)), (), shared=True)
    store = SteeringStore(directory, check)
    sharing = Sharing.start(settings, store)
    try:
        yield store
    finally:
        sharing.close()


def test_a_change_holds_at_every_front_end_when_it_returns(address, tmp_path):
    with running_hub(address, Recorder()), front(address) as first, front(address, directory=tmp_path) as second:
        first.register("calm", steering(1))
        assert second.get("calm") == steering(1)
        second.register("calm", steering(2))
        assert first.get("calm") == steering(2)
        second.set_global(steering(3))
        assert first.global_state == steering(3)
        assert SteeringStore(tmp_path).global_state == steering(3)  # another API server of the same command
        first.clear_global()
        assert second.global_state == NOTHING
        first.unregister("calm")
        assert second.names == ()
        second.register("calm", steering(4))
        assert first.get("calm") == steering(4)


def test_a_front_end_that_starts_later_has_all(address):
    with running_hub(address, Recorder()), front(address) as first:
        for number in range(20):
            first.register(f"m{number}", steering(number))
        first.unregister("m0")
        first.set_global(steering(5))
        with front(address) as later:
            assert later.held.modules == first.held.modules
            assert len(later.names) == 19
            assert later.global_state == steering(5)


def test_engines_with_other_ids_share_nothing(address):
    with running_hub(address, Recorder()), front(address) as first, front(address, engine="run-2") as other:
        first.register("calm", steering(1))
        assert other.names == ()


def test_a_change_without_a_hub_holds_here_and_everywhere_when_the_hub_is_back(address, monkeypatch):
    monkeypatch.setattr(limits, "SHARED_S_MAX", 0.3)
    with front(address) as first, front(address) as second:
        with pytest.raises(NotEverywhereError, match=r"not shared .*no hub answers.*as soon as a hub passes it on"):
            first.register("calm", steering(1))
        assert first.names == ("calm",)
        assert second.names == ()
        with running_hub(address, Recorder()):
            eventually(lambda: second.names == ("calm",))
            with pytest.raises(UsageError):
                first.register("", steering(1))
        # Both change it while they cannot hear of each other: every store ends with the same one.
        for number, store in enumerate((second, first, second)):
            with pytest.raises(NotEverywhereError):
                store.register("calm", steering(2 + number))
        with running_hub(address, Recorder()):
            eventually(lambda: first.get("calm") == second.get("calm") == steering(4))


def test_one_of_two_hubs_is_enough(address):
    gone = f"{address}-{uuid.uuid4().hex[:4]}"
    with running_hub(address, Recorder()), front(gone, address) as first, front(gone, address) as second:
        first.register("calm", steering(1))
        assert second.get("calm") == steering(1)


def test_changes_at_once_end_alike(address):
    with running_hub(address, Recorder()), contextlib.ExitStack() as stack:
        stores = [stack.enter_context(front(address)) for _ in range(4)]

        def change(number):
            for turn in range(15):
                stores[number].register(f"m{turn % 3}", steering(100 * number + turn))
                stores[number].set_global(steering(1000 * number + turn + 1))

        threads = [threading.Thread(target=change, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        first, *others = stores
        eventually(lambda: all(other.held.versions == first.held.versions for other in others))
        assert all(other.held.modules == first.held.modules for other in others)
        assert all(other.global_state == first.global_state for other in others)


def test_what_does_not_fit_is_not_taken_and_what_is_too_large_is_refused(address, monkeypatch):
    def check(new, _asked):
        if new == steering(9):
            raise UsageError("it does not fit")

    with running_hub(address, Recorder()), front(address) as first, front(address, check=check) as second:
        first.register("wrong", steering(9))
        first.register("right", steering(1))
        assert second.names == ("right",)
        monkeypatch.setattr(limits, "SHARED_PART_BYTES_MAX", 100)
        with pytest.raises(UsageError, match=r"module large: got .* bytes, expected at most 100"):
            first.register("large", steering(1, width=64))
        assert first.names == ("right", "wrong")


def test_a_front_end_that_does_not_answer_holds_up_a_change_for_a_while_only(address, monkeypatch):
    monkeypatch.setattr(limits, "SHARED_S_MAX", 0.5)
    with running_hub(address, Recorder()), front(address) as first, front(address) as second:
        hold = threading.Event()
        merge = second.merge
        monkeypatch.setattr(second, "merge", lambda *part: hold.wait(20) and merge(*part))
        with pytest.raises(NotEverywhereError, match="no answer from 1 front ends"):
            first.register("calm", steering(1))
        hold.set()
        eventually(lambda: second.names == ("calm",))
        first.register("calm", steering(2))
        assert second.get("calm") == steering(2)
