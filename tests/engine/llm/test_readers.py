"""Which consumers a request may name: asked of real hubs, and never in the way of one that is away."""

import socket
import time

import pytest

from capflow.capture.spec import parse_capture
from capflow.errors import UsageError
from capflow.protocol.routing import hub_of
from capflow.transport.address import private_address
from capflow_engine.hubs import HubAt
from capflow_engine.llm.readers import Readers
from capflow_engine.request.options import RequestOptions
from tests.kit.hubs import Recorder, address, configured, running_hub

__all__ = ["address"]

SPEC = {"hooks": {"post_block": [0]}}


class Hubs:
    """As much of an engine's settings as says where its hubs are."""

    def __init__(self, *addresses):
        self.hubs = tuple(map(HubAt, addresses))

    def hub_of(self, name):
        return hub_of(name, len(self.hubs))


def asking(*names, id="r1"):
    return [RequestOptions(id=id, capture=parse_capture(dict.fromkeys(names, SPEC)))]


def reader(name):
    return configured(Recorder(name, None, reads_requests=True))


def test_a_name_that_the_hub_has_passes_and_another_is_refused_with_those_that_it_has(address):
    with running_hub(address, reader("keep"), reader("keep@cold"), Recorder("shows")) as hub:
        readers = Readers(Hubs(hub.address))
        readers.check(asking("keep", "keep@cold"))
        readers.check([RequestOptions(id="r1", capture=parse_capture(SPEC)), RequestOptions(id="r2")])
        for name in ("kept", "keep@clod", "shows"):
            with pytest.raises(UsageError) as error:
                readers.check(asking("keep", name))
            assert str(error.value) == f"capture: got consumer {name}, expected one of the hub's: keep, keep@cold"


def test_a_hub_without_readers_says_so(address):
    with running_hub(address, Recorder("shows")) as hub, pytest.raises(UsageError, match="no consumer reads requests"):
        Readers(Hubs(hub.address)).check(asking("shows"))


def test_a_hub_that_is_away_refuses_nothing_and_is_asked_when_it_is_back(address):
    readers = Readers(Hubs(str(address)))
    readers.check(asking("anyone"))
    with running_hub(address, reader("keep")):
        readers.check(asking("keep"))
        with pytest.raises(UsageError):
            readers.check(asking("anyone"))
    with running_hub(address, reader("anyone")):
        readers.check(asking("anyone"))  # which the hub before did not have


def test_each_request_is_held_against_its_own_hub(address):
    other = private_address("other")
    with running_hub(address, reader("one")) as first, running_hub(other, reader("two")) as second:
        settings = Hubs(first.address, second.address)
        readers = Readers(settings)
        for name in map(str, range(8)):
            names = ("one", "two") if settings.hub_of(name) == 0 else ("two", "one")
            readers.check(asking(names[0], id=name))
            with pytest.raises(UsageError, match=f"got consumer {names[1]}, expected one of the hub's: {names[0]}"):
                readers.check(asking(names[1], id=name))


def test_a_hub_that_listens_and_does_not_answer_holds_up_one_request(address):
    readers = Readers(Hubs(address))
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(address.removeprefix("ipc://"))
        silent.listen(64)
        begun = time.monotonic()
        for _ in range(5):
            readers.check(asking("anyone"))
        assert time.monotonic() - begun < 3
