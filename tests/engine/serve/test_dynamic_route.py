"""`GET /v1/steering/dynamic`: what the hub knows of the engine's ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from capflow.protocol.message import Determinism
from capflow.transport.links.worker import Staged
from capflow_engine.hubs import HubAt
from tests.kit.hubs import Recorder, address, running_hub, worker_link
from tests.kit.waiting import eventually

__all__ = ["address"]

routes = pytest.importorskip("capflow_engine.serve.http.steering_routes")


def test_it_says_whether_ranks_steer_alike_and_null_without_a_hub(address):
    front = SimpleNamespace(settings=SimpleNamespace(hubs=(HubAt(address, None),), engine="engine-1"))
    assert routes.dynamic(front) == {"determinism": None}
    staged = Staged(determinism=Determinism(False, 9, 64, 5, ("0.0", "0.1"), ("0.1",)))
    with running_hub(address, Recorder()), worker_link(address, staged=lambda: staged):
        eventually(lambda: routes.dynamic(front)["determinism"])
        report = routes.dynamic(front)["determinism"]
        front.settings.engine = "another"
        assert routes.dynamic(front) == {"determinism": None}
    facts = {"consistent": False, "actions": 9, "step": 64, "first_mismatch": 5}
    assert report == facts | {"ranks": ["0.0", "0.1"], "differing": ["0.1"]}
